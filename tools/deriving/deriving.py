"""Families from records: which known family fits a model type, or else a rule made from evidence.

    python -m tools.deriving RECORDS [TYPE...] [--write]

A type is proven where forms, scale, positions and masks are what the model computed. With
``--write``, what proves is written to the families' data; what is left is printed with what stands
in its way.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.deriving.evidence import claims, rules_of
from tools.deriving.judging import is_learned, judge, named_alike, of_channels
from tools.deriving.mending import completed, mended, strong, unread
from tools.deriving.probing import record_all
from tools.deriving.proof import faults
from tools.deriving.records import RunRecord, read_record
from tools.deriving.writing import (
    PAGE,
    family_text,
    rule_table,
    write_families,
    write_outcomes,
)

from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import WqkError
from wqk.families import families, find_family, plan_attention
from wqk.families.composites import MODALITIES, compose_family
from wqk.families.family import family_of_type, parse_family
from wqk.families.guessing import infer_family
from wqk.families.model_types import part_types
from wqk.families.rules import Family
from wqk.families.spellings import prefixes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wqk.checkpoints import Checkpoint

SECONDS = 30  # of one processor, for each type
# Families that are asked first, where several fit.
PREFERRED = (
    "llama",
    "bert",
    "bart",
    "vit",
    "clip-vision",
    "clip-text",
    "siglip-vision",
    "t5",
    "gpt2",
    "deepseek",
    "wav2vec2",
    "whisper",
    "swin",
)


def fitting_family(
    record: RunRecord, checkpoint: Checkpoint, families_by_name: Mapping[str, Family]
) -> tuple[str, list[tuple[list[str], str]]]:
    """The known family that is proven by a record; or else those whose forms are right."""
    tensors = checkpoint.tensors()
    nearest: list[tuple[list[str], str]] = []
    for name in sorted(
        families_by_name, key=lambda n: PREFERRED.index(n) if n in PREFERRED else 99
    ):
        family = families_by_name[name]
        names = [n for rule in family.attention for n in (*rule.query, *rule.fused)]
        if family.refusal or family.with_parts or not any("{" in n for n in names):
            continue
        spoken = re.split(r"[_-]", record.model_type)
        if any(r.stack in MODALITIES and r.stack not in spoken for r in family.attention):
            continue
        if not any(prefixes(tensors, rule) for rule in family.attention):
            continue
        try:
            fault_list = faults(record, checkpoint, family)
        except WqkError as error:
            fault_list = [f"cannot be read: {error}"]
        if not strong(fault_list):
            return name, []
        if not unread(strong(fault_list)):
            nearest.append((strong(fault_list), name))
    return "", sorted(nearest, key=lambda pair: len(pair[0]))


def derive(
    record: RunRecord, checkpoint: Checkpoint, models: Sequence[Family] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rules that are proven by a record; or none, and the faults of the best that was tried.

    ``models`` are families that nearly fit, and so may do with a change.
    """
    best: list[str] = []
    rule_sets = [[rule_table(rule) for rule in family.attention] for family in models]
    with contextlib.suppress(WqkError):
        rule_sets.append(claims(infer_family(checkpoint), checkpoint.config))
    for rules in itertools.chain(rule_sets, rules_of(record, checkpoint)):
        rules, remaining = mended(record, checkpoint, rules)
        if not remaining:
            return completed(record, checkpoint, rules), []
        if not best or _rank(remaining) < _rank(best):
            best = remaining
    return [], best or ["no rule could be made from what was recorded"]


def _rank(fault_list: list[str]) -> tuple[bool, int]:
    """Rank faults: wrong or uncompared forms come first."""
    return unread(fault_list) or any("everywhere" in fault for fault in fault_list), len(fault_list)


@dataclass
class TypeOutcome:
    """Outcome of a model type."""

    type: str
    outcome: str = "left"  # or listed, known, new, composite, silent, not built, not run
    family: str = ""
    rules: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    with_parts: bool = False  # whether the rules are of attention next to that of parts
    partial: str = ""  # why the forms do not hold the whole score
    read: str = ""  # what wqk does with a type that is left: refuses it, or guesses

    @property
    def proven(self) -> bool:
        return self.outcome in ("listed", "known", "new", "composite")


def outcome_of(record: RunRecord, folder: Path, families_by_name: dict[str, Family]) -> TypeOutcome:
    """Return the outcome of a type; a new family is added to the known families."""
    result = TypeOutcome(record.model_type)
    if record.failure:
        return replace(result, outcome="not built", faults=[record.failure])
    if not record.sites:
        silent = not record.notes and not record.unreached
        return replace(result, outcome="silent" if silent else "not run", faults=record.notes)
    checkpoint = open_checkpoint(folder)
    try:
        result = _derived(result, record, checkpoint, families_by_name)
        if result.proven:
            known_family = (
                None if result.outcome == "composite" else families_by_name.get(result.family)
            )
            family = known_family or find_family(checkpoint)
            if known_family and known_family.with_parts:
                family = compose_family(checkpoint, known_family) or known_family
            return replace(result, partial=_partial(checkpoint, family))
    except WqkError as error:
        result.faults.append(str(error).replace(str(folder), "").lstrip(": "))
    return replace(result, read=_reading(record, checkpoint, folder))


def _derived(
    result: TypeOutcome,
    record: RunRecord,
    checkpoint: Checkpoint,
    families_by_name: dict[str, Family],
) -> TypeOutcome:
    family_of_record = family_of_type(record.model_type)
    if family_of_record and not family_of_record.refusal:
        composed = (
            compose_family(checkpoint, family_of_record) if family_of_record.with_parts else None
        )
        wrong = strong(faults(record, checkpoint, composed or family_of_record))
        if not wrong:
            return replace(result, outcome="listed", family=family_of_record.name)
    composite = None if family_of_record else compose_family(checkpoint)
    if composite:
        fault_list = strong(faults(record, checkpoint, composite))
        if not fault_list:
            return replace(result, outcome="composite", family=composite.name)
        row = _beside_parts(record, checkpoint, composite) if unread(fault_list) else None
        if row is None:
            return replace(result, faults=fault_list)
        families_by_name[row.family] = _family(row)
        return row
    name, nearly = fitting_family(record, checkpoint, families_by_name)
    if name:
        return replace(result, outcome="known", family=name)
    rules, remaining = derive(
        record, checkpoint, [families_by_name[name] for _, name in nearly[:3]]
    )
    if rules:
        name = record.model_type.replace("_", "-").lower()
        new = replace(result, outcome="new", family=name, rules=rules)
        families_by_name[name] = _family(new)
        return new
    return replace(
        result, faults=wrong if family_of_record and not family_of_record.refusal else remaining
    )


def _family(row: TypeOutcome) -> Family:
    """The family that a type's rules make."""
    text = family_text(row.family, [row.type], row.rules, row.with_parts)
    return parse_family(text, row.family)


def _beside_parts(
    record: RunRecord, checkpoint: Checkpoint, composite: Family
) -> TypeOutcome | None:
    """A family of the attention that is in no part of a composite model, if one can be made."""
    attentions = [Block(checkpoint, p) for p in plan_attention(checkpoint, composite)]
    judged = judge(record.sites, attentions)
    if judged.unmatched_plans:
        return None
    sites = [record.sites[number] for number in judged.unmatched_sites]
    modules = {site.module for site in sites}
    turned = [site for site in record.turned if site.module in modules]
    rules, _ = derive(replace(record, sites=sites, turned=turned, unreached=[]), checkpoint)
    name = record.model_type.replace("_", "-").lower()
    row = TypeOutcome(record.model_type, "new", name, rules, with_parts=True)
    composed = compose_family(checkpoint, _family(row)) if rules else None
    return row if composed and not strong(faults(record, checkpoint, composed)) else None


def _partial(checkpoint: Checkpoint, family: Family) -> str:
    reasons = (p.reason for p in plan_attention(checkpoint, family))
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _reading(record: RunRecord, checkpoint: Checkpoint, folder: Path) -> str:
    """Return the result of wqk for a type that is not proven."""
    try:
        plans = plan_attention(checkpoint, find_family(checkpoint))
        attentions = [Block(checkpoint, p) for p in plans]
    except WqkError as error:
        return f"refused: {error}".replace(str(folder), "").replace(": : ", ": ")
    judged = judge(record.sites, attentions)
    kind = "guessed" if plans[0].rule.guess else "read"
    # What was not run is neither right nor wrong.
    unmatched = [attentions[number] for number in judged.unmatched_plans]
    is_named_alike = any(
        named_alike(fault_plan, site) for fault_plan in unmatched for site in record.sites
    )
    if is_named_alike and not record.notes:
        return f"{kind}, wrong"
    unmatched = (record.sites[number] for number in judged.unmatched_sites)
    left_out = [
        s for s in unmatched if not is_learned(s) and not of_channels(s, record, checkpoint)
    ]
    return f"{kind}, incomplete" if left_out else f"{kind}, right"


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS} seconds")


def main(record: bool = False) -> None:
    """Record what has no record yet, if asked to, and derive all that has one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path, help="outcomes; RECORDS/outcomes.jsonl by default")
    parser.add_argument("--again", action="store_true", help="try again what was left")
    parser.add_argument("--write", action="store_true", help="write the families' data")
    arguments = parser.parse_args()
    arguments.out = arguments.out or arguments.records / "outcomes.jsonl"
    arguments.records.mkdir(parents=True, exist_ok=True)
    if record:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        record_all(arguments.types or list(CONFIG_MAPPING_NAMES), arguments.records)
    signal.signal(signal.SIGVTALRM, _too_long)
    families_by_name = dict(families())
    recorded_types = sorted(
        p.name for p in arguments.records.iterdir() if p.is_dir() and p.name[0] != "."
    )
    # Parts before what is made of them, and what no family knows before what one does.
    types = arguments.types or sorted(
        recorded_types, key=lambda t: (bool(part_types(t)), family_of_type(t) is not None)
    )
    rows: dict[str, TypeOutcome] = {}
    if arguments.out.exists():
        lines = arguments.out.read_text(encoding="utf-8").splitlines()
        rows = {row.type: row for row in (TypeOutcome(**json.loads(line)) for line in lines)}
    for row in rows.values():
        if row.rules and row.family not in families_by_name:
            families_by_name[row.family] = _family(row)
    for model_type in types:
        folder = arguments.records / model_type
        again = arguments.types or (
            arguments.again and model_type in rows and not rows[model_type].proven
        )
        if (model_type in rows and not again) or not (folder / "record.json").exists():
            continue
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            row = outcome_of(read_record(folder), folder, families_by_name)
        except Exception as error:  # of the tool itself; the other types go on
            row = TypeOutcome(model_type, faults=[f"{type(error).__name__}: {error}"])
        rows[model_type] = row
        summary = f"{'; '.join(row.faults)[:160]} {row.read[:60]}"
        print(f"{model_type:32} {row.outcome:9} {row.family:24} {summary}", flush=True)
        arguments.out.write_text(
            "".join(json.dumps(asdict(r)) + "\n" for r in rows.values()), "utf-8"
        )
    if arguments.write:
        write_families(list(rows.values()))
        write_outcomes(list(rows.values()), PAGE)
    print(Counter(row.outcome for row in rows.values()), file=sys.stderr)


if __name__ == "__main__":
    main()
