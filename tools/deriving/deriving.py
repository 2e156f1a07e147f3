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
from tools.deriving.records import Record, read_record
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
from wqk.families.config import part_types
from wqk.families.family import Family, family_of_type, parse_family
from wqk.families.finding import MODALITIES, compose_family, infer_family
from wqk.families.naming import prefixes

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
    record: Record, checkpoint: Checkpoint, known: Mapping[str, Family]
) -> tuple[str, list[tuple[list[str], str]]]:
    """The known family that is proven by a record; or else those whose forms are right."""
    tensors = checkpoint.tensors()
    nearest: list[tuple[list[str], str]] = []
    for name in sorted(known, key=lambda n: PREFERRED.index(n) if n in PREFERRED else 99):
        family = known[name]
        names = [n for rule in family.attention for n in (*rule.query, *rule.fused)]
        if family.refusal or family.with_parts or not any("{" in n for n in names):
            continue
        spoken = re.split(r"[_-]", record.model_type)
        if any(r.stack in MODALITIES and r.stack not in spoken for r in family.attention):
            continue
        if not any(prefixes(tensors, rule) for rule in family.attention):
            continue
        try:
            found = faults(record, checkpoint, family)
        except WqkError as error:
            found = [f"cannot be read: {error}"]
        if not strong(found):
            return name, []
        if not unread(strong(found)):
            nearest.append((strong(found), name))
    return "", sorted(nearest, key=lambda pair: len(pair[0]))


def derive(
    record: Record, checkpoint: Checkpoint, models: Sequence[Family] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rules that are proven by a record; or none, and the faults of the best that was tried.

    ``models`` are families that nearly fit, and so may do with a change.
    """
    best: list[str] = []
    others = [[rule_table(rule) for rule in family.attention] for family in models]
    with contextlib.suppress(WqkError):
        others.append(claims(infer_family(checkpoint), checkpoint.config))
    for rules in itertools.chain(others, rules_of(record, checkpoint)):
        rules, found = mended(record, checkpoint, rules)
        if not found:
            return completed(record, checkpoint, rules), []
        if not best or _rank(found) < _rank(best):
            best = found
    return [], best or ["no rule could be made from what was recorded"]


def _rank(found: list[str]) -> tuple[bool, int]:
    """How far from right: first whether forms are wrong, or were not even compared."""
    return unread(found) or any("everywhere" in fault for fault in found), len(found)


@dataclass
class Outcome:
    """How a model type came out."""

    type: str
    outcome: str = "left"  # or listed, known, new, composite, silent, not built, not run
    family: str = ""
    rules: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    with_parts: bool = False  # whether the rules are of attention beside that of parts
    partial: str = ""  # why the forms do not hold the whole score
    read: str = ""  # what wqk does with a type that is left: refuses it, or guesses

    @property
    def proven(self) -> bool:
        return self.outcome in ("listed", "known", "new", "composite")


def outcome_of(record: Record, folder: Path, known: dict[str, Family]) -> Outcome:
    """How a type comes out; a new family is added to the known."""
    result = Outcome(record.model_type)
    if record.failure:
        return replace(result, outcome="not built", faults=[record.failure])
    if not record.sites:
        silent = not record.notes and not record.unreached
        return replace(result, outcome="silent" if silent else "not run", faults=record.notes)
    checkpoint = open_checkpoint(folder)
    try:
        result = _derived(result, record, checkpoint, known)
        if result.proven:
            own = None if result.outcome == "composite" else known.get(result.family)
            family = own or find_family(checkpoint)
            if own and own.with_parts:
                family = compose_family(checkpoint, own) or own
            return replace(result, partial=_partial(checkpoint, family))
    except WqkError as error:
        result.faults.append(str(error).replace(str(folder), "").lstrip(": "))
    return replace(result, read=_reading(record, checkpoint, folder))


def _derived(
    result: Outcome, record: Record, checkpoint: Checkpoint, known: dict[str, Family]
) -> Outcome:
    own = family_of_type(record.model_type)
    if own and not own.refusal:
        whole = compose_family(checkpoint, own) if own.with_parts else None
        wrong = strong(faults(record, checkpoint, whole or own))
        if not wrong:
            return replace(result, outcome="listed", family=own.name)
    composite = None if own else compose_family(checkpoint)
    if composite:
        found = strong(faults(record, checkpoint, composite))
        if not found:
            return replace(result, outcome="composite", family=composite.name)
        beside = _beside_parts(record, checkpoint, composite) if unread(found) else None
        if beside is None:
            return replace(result, faults=found)
        known[beside.family] = _family(beside)
        return beside
    name, nearly = fitting_family(record, checkpoint, known)
    if name:
        return replace(result, outcome="known", family=name)
    rules, left = derive(record, checkpoint, [known[name] for _, name in nearly[:3]])
    if rules:
        name = record.model_type.replace("_", "-").lower()
        new = replace(result, outcome="new", family=name, rules=rules)
        known[name] = _family(new)
        return new
    return replace(result, faults=wrong if own and not own.refusal else left)


def _family(row: Outcome) -> Family:
    """The family that a type's rules make."""
    text = family_text(row.family, [row.type], row.rules, row.with_parts)
    return parse_family(text, row.family)


def _beside_parts(record: Record, checkpoint: Checkpoint, composite: Family) -> Outcome | None:
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
    row = Outcome(record.model_type, "new", name, rules, with_parts=True)
    whole = compose_family(checkpoint, _family(row)) if rules else None
    return row if whole and not strong(faults(record, checkpoint, whole)) else None


def _partial(checkpoint: Checkpoint, family: Family) -> str:
    reasons = (p.reason for p in plan_attention(checkpoint, family))
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _reading(record: Record, checkpoint: Checkpoint, folder: Path) -> str:
    """What wqk does today with a type that is not proven."""
    try:
        plans = plan_attention(checkpoint, find_family(checkpoint))
        attentions = [Block(checkpoint, p) for p in plans]
    except WqkError as error:
        return f"refused: {error}".replace(str(folder), "").replace(": : ", ": ")
    judged = judge(record.sites, attentions)
    kind = "guessed" if plans[0].rule.guess else "read"
    # What was not run is neither right nor wrong.
    unmatched = [attentions[number] for number in judged.unmatched_plans]
    alike = any(named_alike(one, site) for one in unmatched for site in record.sites)
    if alike and not record.notes:
        return f"{kind}, wrong"
    left = (record.sites[number] for number in judged.unmatched_sites)
    left_out = [s for s in left if not is_learned(s) and not of_channels(s, record, checkpoint)]
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
    given = parser.parse_args()
    given.out = given.out or given.records / "outcomes.jsonl"
    given.records.mkdir(parents=True, exist_ok=True)
    if record:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        record_all(given.types or list(CONFIG_MAPPING_NAMES), given.records)
    signal.signal(signal.SIGVTALRM, _too_long)
    known = dict(families())
    there = sorted(p.name for p in given.records.iterdir() if p.is_dir() and p.name[0] != ".")
    # Parts before what is made of them, and what no family knows before what one does.
    types = given.types or sorted(
        there, key=lambda t: (bool(part_types(t)), family_of_type(t) is not None)
    )
    rows: dict[str, Outcome] = {}
    if given.out.exists():
        lines = given.out.read_text(encoding="utf-8").splitlines()
        rows = {row.type: row for row in (Outcome(**json.loads(line)) for line in lines)}
    for row in rows.values():
        if row.rules and row.family not in known:
            known[row.family] = _family(row)
    for model_type in types:
        folder = given.records / model_type
        again = given.types or (given.again and model_type in rows and not rows[model_type].proven)
        if (model_type in rows and not again) or not (folder / "record.json").exists():
            continue
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            row = outcome_of(read_record(folder), folder, known)
        except Exception as error:  # of the tool itself; the other types go on
            row = Outcome(model_type, faults=[f"{type(error).__name__}: {error}"])
        rows[model_type] = row
        told = f"{'; '.join(row.faults)[:160]} {row.read[:60]}"
        print(f"{model_type:32} {row.outcome:9} {row.family:24} {told}", flush=True)
        given.out.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows.values()), "utf-8")
    if given.write:
        write_families(list(rows.values()))
        write_outcomes(list(rows.values()), PAGE)
    print(Counter(row.outcome for row in rows.values()), file=sys.stderr)


if __name__ == "__main__":
    main()
