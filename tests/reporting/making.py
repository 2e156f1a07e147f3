"""Score tables of any shape, made without models, and what is read out of their report."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import wqk
from wqk._files import append_lines
from wqk.tables.run import METRICS, SCORES, Run, create_run, open_run
from wqk.tables.score_table import ScoreTable

# A name that would end a script, open a tag, run, and be read as an entity or a template. Its last
# part, which figures show, has all but the first of these.
EVIL = "=</script><img src=x onerror=document.title='owned'>&amp;<b>${title}`"


def row(**values: Any) -> dict[str, Any]:
    """A row as a scan makes it, of a layer."""
    defaults = {
        "checkpoint": "owner/model",
        "stack": "encoder",
        "kind": "self",
        "layer": 0,
        "heads": 2,
        "circuit": "qk",
        "distance": 0,
        "norm": 2.5,
        "symmetry": 0.25,
        "symmetry_null": 0.0625,
        "directionality": -0.5,
        "directionality_excess": -0.75,
        "status": "ok",
    }
    return defaults | values


def rows(
    checkpoint: str, layers: int = 3, heads: int = 2, seed: int = 0, **changes: Any
) -> list[dict[str, Any]]:
    """A layer's row and one for each of its heads, again and again."""
    dice, made = np.random.default_rng(seed), []
    about = {
        "checkpoint": checkpoint,
        "model_type": "bert",
        "family": "bert",
        "parameters": 12_345_678,
        "heads": heads,
        "key_heads": heads,
        "d_query": 64,
        "d_key": 64,
        "symmetry_null": 0.02,
    }
    for layer in range(layers):
        for head in (None, *range(heads)):
            symmetry, leaning, excess = dice.uniform(-1, 1, 3)
            drawn = {"symmetry": symmetry, "directionality": leaning, "norm": dice.uniform(1, 9)}
            if head is None:
                terms = {"within_heads": 0.25, "between_heads": 0.75, "within_random": 0.2}
                drawn |= {f"symmetry_{name}": symmetry * share for name, share in terms.items()}
            place = {"layer": layer, "head": head, "directionality_excess": excess}
            made.append(row(**about, **place, **drawn) | changes)
    return made


def table(*parts: list[dict[str, Any]], **metadata: Any) -> ScoreTable:
    return ScoreTable.from_rows([*itertools.chain(*parts)], metadata)


def training(name: str, steps: tuple[int, ...], **options: Any) -> ScoreTable:
    """A model at several steps, as a scan of its checkpoints names them."""
    return table(
        *(rows(f"{name}/checkpoint-{step}", step=step, seed=step, **options) for step in steps)
    )


def trained(folder: Path, mode: str = "encoder") -> list[Run]:
    """Two seeds, of which the second has not come as far; their losses rise between two steps."""
    rows = wqk.scan(wqk.demo_model("encoder"), heads=False).frame.to_dicts()
    for seed, steps in ((1, (0, 5, 10, 20)), (2, (0, 5, 10))):
        recipe = {"mode": mode, "steps": 20, "seed": seed}
        about = {"recipe": recipe, "corpus": {"folder": "text"}}
        run = create_run(folder / f"{mode}-{seed}", about)
        for step in steps:
            loss = {0: 4.0, 5: 2.5, 10: 3.0, 20: 2.0}[step] - seed / 10
            append_lines(run.folder / METRICS, {"step": step, "held_out_loss": loss})
            for row in rows:
                scored = {"step": step, "checkpoint": run.name, "symmetry": step / 100}
                append_lines(run.folder / SCORES, {**row, **scored})
    return [open_run(folder / f"{mode}-{seed}") for seed in (1, 2)]


class Page(HTMLParser):
    """A document's scripts, text, and the attributes of its elements, by a parser of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(next(text for tag, text in self.scripts if tag.get("id") == "data"))
        self.policy = next(
            a["content"] for t, a in self.tags if a.get("http-equiv") == "Content-Security-Policy"
        )

    def handle_starttag(self, tag: str, attributes: list[tuple[str, Any]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        if self.tags and self.cdata_elem == "script":
            self.scripts.append((self.tags[-1][1], text))
        elif self.cdata_elem != "style":
            self.words.append(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
