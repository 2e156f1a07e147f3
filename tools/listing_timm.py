"""Writes ``src/wqk/checkpoints/timm.toml``: how many heads timm's vision transformers have.

timm saves the name of the architecture, and keeps its numbers in the functions of that name. Left
out are variants whose blocks are others than those that the family ``timm`` describes.

    python -m tools.listing_timm
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from textwrap import fill

import wqk

MODULES = ("vision_transformer", "deit")
OTHERS = re.compile(r"qk_norm|attn_layer|block_fn|scale_attn_norm|norm_layer=(?!nn\.LayerNorm\b)")


def listed() -> dict[tuple[str, int], list[str]]:
    """Architectures by the norm's epsilon and the number of heads."""
    import timm

    names_by_setting: dict[tuple[str, int], list[str]] = {}
    for name in timm.list_models():
        function = timm.model_entrypoint(name)
        source = inspect.getsource(function)
        heads = re.search(r"num_heads\s*=\s*(\d+)\b", source)
        module = function.__module__.rpartition(".")[2]
        if module in MODULES and heads and not OTHERS.search(source):
            epsilon = "1e-5" if "norm_layer=nn.LayerNorm" in source else "1e-6"
            names_by_setting.setdefault((epsilon, int(heads[1])), []).append(name)
    return names_by_setting


def main() -> None:
    """Write the file."""
    lines = ["# Written by tools/listing_timm.py from timm's own functions."]
    names_by_setting = listed()
    for epsilon in ("1e-5", "1e-6"):
        lines.append(f'["{epsilon}"]')
        for (listed_epsilon, heads), names in sorted(names_by_setting.items()):
            if listed_epsilon == epsilon:
                lines.append(f'{heads} = """\n{fill(" ".join(sorted(names)), 100)}"""')
    file = Path(wqk.__file__).parent / "checkpoints" / "timm.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
