"""A configuration file, proven: a tiny model is made of it, run, and compared with what is read.

Widths, depths and vocabularies are shrunk; everything else is as the file has it, old keys and
absent ones included.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.deriving.probing import record_type
from tools.deriving.proof import WEAK, faults
from tools.deriving.records import read_record
from tools.deriving.shrinking import small_file
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from wqk.checkpoints import open_checkpoint
from wqk.errors import WqkError
from wqk.families import find_family
from wqk.live.verification import verify

if TYPE_CHECKING:
    from pathlib import Path

# Largest difference of a probability: some models look up angles in tables of single precision.
ROUNDING = 1e-6
# Verdicts on an attention that say nothing against what is read of it.
UNTOLD = ("right", "form right", "not compared", "too uniform to tell")


def configuration_faults(table: dict[str, Any], folder: Path) -> list[str]:
    """What is read wrongly of a model with this ``config.json``; empty if nothing is.

    The products in single precision are compared by `faults`, and every probability by `verify`.

    Raises
    ------
    RuntimeError
        No model could be made or run.
    """
    file = small_file(table)
    record_type(table["model_type"], folder, file)
    record = read_record(folder)
    if record.failure:
        raise RuntimeError(record.failure)
    checkpoint = open_checkpoint(folder)
    try:
        with np.errstate(all="ignore"):
            found = faults(record, checkpoint, find_family(checkpoint))
        found = [fault for fault in found if not fault.startswith(WEAK)]
        # Classes of parts alone are not among those that a file is loaded with.
        loaded = MODEL_MAPPING_NAMES.get(table["model_type"])
        return found + (_verified(folder) if loaded else [])
    except WqkError as error:
        return [f"refused: {error}".replace(str(folder), "")]


def _verified(folder: Path) -> list[str]:
    try:
        blocks = verify(folder, tolerance=ROUNDING).blocks
    except WqkError as error:
        if "cannot be run" in str(error):  # by what `verify` gives it; the record has been run
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
