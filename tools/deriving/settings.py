"""Keys that a model's code does not read.

    python -m tools.deriving.settings [TYPE ...]

A key counts for a type only if its model computes something else with it. Where a family reads a
key that the code for a type ignores, the key is listed under that type in ``unread.toml``.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.deriving.configured import overlaid, small_file
from tools.deriving.probing import in_a_process, record_type
from tools.deriving.records import RunRecord, read_record
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import wqk
import wqk.families
from wqk.errors import WqkError
from wqk.families import config, families, model_types
from wqk.families.family import family_of_type
from wqk.families.rotary import SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.families import AttentionRule

UNREAD = Path(wqk.families.__file__).parent / "unread.toml"
HEAD = "# Written by tools/deriving/settings.py: keys that transformers does not read, by type.\n"


def unread_keys(model_type: str, path: str = "") -> list[str]:
    """The keys that a family reads of a file, and the code for this type does not.

    ``path`` is that of a part, whose family reads its keys; empty for the model's own.
    """
    family = family_of_type(model_types.part_types(model_type)[path] if path else model_type)
    if family is None:
        return []
    pair_by_key = dict(pair for rule in family.attention for pair in _read(rule, bool(path)))
    return sorted(
        key for key, pair in pair_by_key.items() if _is_unread(model_type, path, key, pair)
    )


# Settings next to which a window may count: that it is used, and layers that have one.
USED = {"use_sliding_window": True, "max_window_layers": 0}
KINDS = ["full_attention", "sliding_attention"]
BESIDE_WINDOWS: tuple[dict[str, Any], ...] = ({}, USED, {"layer_types": KINDS} | USED)
BESIDE_OTHERS: tuple[dict[str, Any], ...] = ({}, {"use_bidirectional_attention": False})
# Frequencies that are not scaled, where these are not a type's own.
BESIDE_SHARES: tuple[dict[str, Any], ...] = (
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    {},
)
# Keys that are read of every file. Masks have to be causal only where a window is looked for.
EVERYWHERE = {
    "head_dim": (16, 32),
    "is_causal": (True, False),
    "rope_scaling": (None, {"rope_type": "linear", "factor": 3.0}),
}


def _is_unread(model_type: str, path: str, key: str, values: tuple[Any, Any]) -> bool:
    """Return whether two values of a key are read differently but computed equally.

    What is read is read as if nothing were known to be unread.
    """
    by_kind = isinstance(model_types.default_values(model_type).get("scaled"), list)
    if key == SHARE and by_kind and _says(model_type, key):
        return False  # kinds of layers have shares of their own, which count
    is_unread = False
    companions = BESIDE_SHARES if key == SHARE else BESIDE_OTHERS
    for companion in BESIDE_WINDOWS if "window" in key else companions:
        parts = [{**companion, key: value} for value in values]
        tables = [{path: part} if path else part for part in parts]
        (first_record, first_forms), (second_record, second_forms) = (
            _record({"model_type": model_type} | t) for t in tables
        )
        # Masks that are not what families say were not given, rather than not read.
        seen = (
            first_record
            and second_record
            and (
                "window" not in key
                or all(site.causal and site.reach >= 0 for site in first_record.sites)
            )
        )
        if (
            first_record
            and second_record
            and first_record.sites
            and seen
            and first_forms != second_forms
        ):
            is_unread = True
            if key == SHARE or not _alike(first_record, second_record):
                return _alike(first_record, second_record)
    return is_unread or (key == SHARE and not _says(model_type, key))


def _says(model_type: str, key: str) -> bool:
    """Return whether the code of a type contains a word, if nothing could be run."""
    folder = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
    return any(key in file.read_text(encoding="utf-8") for file in folder.glob("*.py"))


def _read(rule: AttentionRule, is_part: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Keys of a rule, and two values with which it should compute something else."""
    for key in rule.window:
        yield key, (4, 6)
        yield "use_sliding_window", (True, False)
    if rule.softcap:
        yield rule.softcap, (0.3, 3.0)
    if rule.clip and "." not in rule.clip:
        yield rule.clip, (0.1, 1.0)
    if rule.rotary and SHARE in rule.rotary.fraction:
        yield SHARE, (0.5, 1.0)
    if is_part and rule.causal_if == "is_decoder":
        yield rule.causal_if, (True, False)
    for key, values in EVERYWHERE.items():
        if key != "rope_scaling" or rule.rotary:
            yield key, values


def _record(table: dict[str, Any]) -> tuple[RunRecord | None, list[Any]]:
    """Return the computation of a model with these settings, and the plans that are read of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        try:
            file = overlaid(small_file({"model_type": table["model_type"]}), table)
            record_type(table["model_type"], folder, file)
            record = read_record(folder)
        except Exception:  # of the model's own code
            return None, []
        try:
            read: list[Any] = [
                (
                    str(p.window),
                    p.softcap,
                    p.clip,
                    p.causal,
                    p.query.head_width,
                    turned and turned.frequencies.tolist(),
                )
                for p in wqk.open(folder).plans
                for turned in [p.rotary or p.axial or (p.positional and p.positional.rotary)]
            ]
        except WqkError as error:
            read = [str(error)]
        return record, read


def _alike(first: RunRecord, second: RunRecord) -> bool:
    """Return whether two models computed the same."""
    if len(first.sites) != len(second.sites) or second.failure:
        return False
    if len(first.turned) != len(second.turned):
        return False
    return all(
        (a.causal, a.reach, len(a.products)) == (b.causal, b.reach, len(b.products))
        and all(
            p.through == q.through
            and p.queries.shape == q.queries.shape
            and np.allclose(p.queries, q.queries, atol=1e-4)
            and np.allclose(p.keys, q.keys, atol=1e-4)
            for p, q in zip(a.products, b.products, strict=True)
        )
        for a, b in zip((*first.sites, *first.turned), (*second.sites, *second.turned), strict=True)
    )


def main() -> None:
    """Find the unread keys of every type that a family lists; or of those that are named.

    A part is named after its model: ``pi0.dit_config``.
    """
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    named = sys.argv[1:]
    keys_by_type: dict[str, list[str]] = dict(model_types._data(UNREAD.name)) if named else {}  # type: ignore[arg-type]
    config.unread_keys = lambda model_type: ()
    unread_keys("llama")  # what is loaded late is loaded once, for all processes
    known = {kind for family in families().values() for kind in family.model_types}
    parts = [
        f"{composite}.{path}"
        for composite, types in model_types._data("parts.toml").items()
        for path, kind in types.items()
        if kind in known
    ]
    for kind in named or [*sorted(known & set(CONFIG_MAPPING_NAMES)), *sorted(parts)]:
        composite, _, path = kind.partition(".")
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "keys.json"
            ended = in_a_process(
                lambda composite=composite, path=path, file=file: file.write_text(
                    json.dumps(unread_keys(composite, path))
                )
            )
            keys = json.loads(file.read_text()) if file.exists() else []
        print(f"{kind:40} {', '.join(keys)} {ended}", flush=True)
        keys_by_type.pop(kind, None)
        if keys:
            keys_by_type[kind] = keys
    lines = [
        f"{json.dumps(kind)} = {json.dumps(keys_by_type[kind])}\n" for kind in sorted(keys_by_type)
    ]
    UNREAD.write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
