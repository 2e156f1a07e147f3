"""A configuration file, proven: a tiny model is made of it, run, and compared with what is read.

Widths, depths and vocabularies are shrunk; everything else is as the file has it, old keys and
absent ones included.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.deriving.probing import record_type
from tools.deriving.proof import UNSEEN, WEAK, faults
from tools.deriving.records import read_record
from tools.deriving.shrinking import small_file
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from wqk.checkpoints import open_checkpoint
from wqk.errors import WqkError
from wqk.families import find_family
from wqk.live.verification import verify

if TYPE_CHECKING:
    from pathlib import Path

    from tools.deriving.records import RunRecord

# Largest difference of a probability: some models look up angles in tables of single precision.
ROUNDING = 1e-6
# Why `verify` cannot compare a model that was recorded: by its inputs, or names that it has live.
UNVERIFIED = "cannot be run|cannot generate the input|as transformers loads it|does not project"
# Verdicts on an attention that say nothing against what is read of it.
UNTOLD = ("right", "form right", "not compared", "too uniform to tell")


def configuration_faults(
    table: dict[str, Any], folder: Path, settings: dict[str, Any] | None = None
) -> list[str]:
    """List the faults for a model with this ``config.json``; empty if there are none.

    ``settings`` are further keys, which stay as large as they are.

    The products in single precision are compared by `faults`, and every probability by `verify`.

    Raises
    ------
    RuntimeError
        No model could be made or run.
    """
    record_type(table["model_type"], folder, tiny_file(table, settings or {}))
    fault_list = recorded_faults(folder)
    record = read_record(folder)
    if fault_list and settings and (stopped := _stopped(record)):
        record_type(table["model_type"], folder, small_file(table))
        if new := [
            why for part, why in stopped.items() if part not in _stopped(read_record(folder))
        ]:
            raise RuntimeError(f"with these settings, {new[0]}")
    return fault_list


def tiny_file(table: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration made small, and settings that stay as they are."""
    small = small_file(table)
    file = overlaid(small, settings)
    sections = {k: v for k, v in small.get("rope_parameters", {}).items() if "section" in k}
    for key in {"rope_scaling", "rope_parameters"} & set(settings):
        file[key] = sections | file[key]
    return file


def recorded_faults(folder: Path) -> list[str]:
    """The same of a model whose record is there."""
    record = read_record(folder)
    if record.failure or not record.sites:
        raise RuntimeError(record.failure or "; ".join(record.notes) or "no softmax")
    checkpoint = open_checkpoint(folder)
    try:
        with np.errstate(all="ignore"):
            fault_list = faults(record, checkpoint, find_family(checkpoint))
        fault_list = [f for f in fault_list if not (f.startswith(WEAK) or f.endswith(UNSEEN))]
        stopped = [note for note in record.notes if note.startswith("whole:")]
        if stopped and fault_list and all("everywhere" in fault for fault in fault_list):
            raise RuntimeError(stopped[0])  # its parts were run without their masks
        # Classes of parts alone are not among those that a file is loaded with.
        loaded = MODEL_MAPPING_NAMES.get(record.model_type)
        fault_list += _verified(folder) if loaded else []
    except WqkError as error:
        fault_list = [f"refused: {error}".replace(str(folder), "")]
    return fault_list


def _stopped(record: RunRecord) -> dict[str, str]:
    """The parts that could not be run, and why; projections that were not reached."""
    notes = {note.partition(":")[0]: note for note in record.notes if "Error" in note}
    return notes | {name: f"{name} was not run" for name in record.unreached}


def overlaid(table: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A table with other settings, part by part.

    Examples
    --------
    >>> overlaid({"text_config": {"a": 1, "b": 2}}, {"text_config": {"b": 3}})
    {'text_config': {'a': 1, 'b': 3}}
    """
    nested = {
        key: overlaid(table[key], value)
        for key, value in settings.items()
        if key.endswith("_config") and isinstance(table.get(key), dict)
    }
    return table | settings | nested


def _verified(folder: Path) -> list[str]:
    try:
        blocks = verify(folder, tolerance=ROUNDING).blocks
    except WqkError as error:
        if re.search(UNVERIFIED, str(error)):
            return []
        return [f"verify: {error}".replace(str(folder), "")]
    return [
        f"verify: layer {block.layer} of the {block.stack} ({block.kind}) is {block.verdict}"
        for block in blocks
        if block.verdict not in UNTOLD
    ]


def main() -> None:
    """Prove files named on the command line."""
    import sys
    import tempfile
    from pathlib import Path

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            table = json.loads(Path(name).read_text(encoding="utf-8"))
            print(name, configuration_faults(table, Path(scratch) / "model"))


if __name__ == "__main__":
    main()
