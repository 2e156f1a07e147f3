"""The table of quantized formats, their companions and keys, from the records of the readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wqk.checkpoints.quantization import FORMATS
from wqk.checkpoints.quantization.table import Effect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.checkpoints.quantization.table import QuantizedFormat


def rows(layout: QuantizedFormat) -> Iterator[tuple[str, str]]:
    """Effects of one format, and what has them; a key without an effect is only counted."""
    for effect in Effect:
        entries = [
            f"`{companion.ending.lstrip('.')}` ({companion.meaning}"
            + (f"; {companion.required})" if companion.required else ")")
            for companion in layout.companions
            if companion.effect is effect and companion.ending
        ]
        entries += [f"`{key.name}`" for key in layout.keys if key.effect is effect]
        if effect is Effect.NONE:
            keys = [key for key in layout.keys if key.effect is effect]
            entries = entries[: len(entries) - len(keys)]
            if keys:
                entries.append(f"{len(keys)} keys of calibration, kernels and inputs")
        if entries:
            yield effect.value, ", ".join(entries)


def write(path: Path) -> None:
    """Write the table into a file that the page includes."""
    lines = ["| format | effect on the weights | tensors and keys |", "|:--|:--|:--|"]
    for layout in FORMATS:
        for number, (effect, listed) in enumerate(rows(layout)):
            name = f"{layout.name}; proven against {layout.proof}" if number == 0 else ""
            lines.append(f"| {name} | {effect} | {listed.replace('|', '')} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
