"""Training runs grouped into cells (one recipe, several seeds), and comparable cells.

Two runs belong to one cell if they differ only in the seed. Cells are comparable if they differ
in one thing only: an encoder and its decoder, or one initialization and another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from wqk.errors import RunError

if TYPE_CHECKING:
    from wqk.tables.run import Run

# Fields of a recipe in which runs of one cell may differ.
WITHIN_A_CELL = {"seed", "preset", "keep_checkpoints", "save_every"}

# Values of fields that older recipes lack.
BEFORE = {"rows": "blocks"}

# Fields in which comparable modes differ, and those in which comparable starts differ.
MODE = ("mode", "objective")
START = ("init", "init_head_norm", "init_norm", "init_values", "penalty", "penalty_weight")

# What the fields of a start that scale it are called.
SCALES = {"init_head_norm": "heads", "init_norm": "norm", "init_values": "values"}

# Fields that titles omit: shown elsewhere, or without effect on the numbers.
UNNAMED = {
    "mode",
    "corpus",
    "fingerprint",
    "parent",
    *START,
    "log_every",
    "held_out_every",
    "held_out_blocks",
    "score_every",
}

OWN_OBJECTIVES = {("encoder", "masked"), ("decoder", "causal")}


@dataclass(frozen=True)
class RunCell:
    """Runs that differ only in their seed, at least one.

    They share the fields of their recipe that are set (``objective`` if it is not the mode's own),
    the name of the corpus's folder as ``corpus``, and its ``fingerprint``.
    """

    runs: tuple[Run, ...]
    shared: Mapping[str, Any]

    @property
    def mode(self) -> str:
        """``encoder`` or ``decoder``."""
        return str(self.shared.get("mode"))

    @property
    def penalty(self) -> str:
        """The penalty and its weight; empty without one."""
        penalty = self.shared.get("penalty", "none")
        weight = self.shared.get("penalty_weight", 0)
        return "" if penalty == "none" else f"{penalty} penalty {weight:g}"

    @property
    def start(self) -> str:
        """The initialization of queries and keys, and the penalty, in words."""
        init = str(self.shared.get("init", "random"))
        scales = [
            f"{name} × {self.shared[key]:g}" for key, name in SCALES.items() if self.shared.get(key)
        ]
        texts = [init] if init != "random" or not self.penalty else []
        return ", ".join(filter(None, [*texts, *scales, self.penalty]))

    def without(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the fields that the runs share, without some fields."""
        return {name: value for name, value in self.shared.items() if name not in names}


@dataclass(frozen=True)
class ModeGroup:
    """An encoder and a decoder with otherwise equal recipes, or one of them alone."""

    title: str  # the corpus, and the difference from groups on corpora of the same name
    cells: Mapping[str, RunCell]  # by mode, the encoder first


def cells(runs: Iterable[Run]) -> list[RunCell]:
    """Group runs that differ only in their seed, in the order of each group's first run.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from wqk.tables.run import create_run
    >>> folder = mkdtemp()
    >>> runs = [create_run(f"{folder}/{init}-{seed}", {"recipe": {"init": init, "seed": seed}})
    ...         for init in ("random", "paired") for seed in (1, 2)]
    >>> [(cell.start, [run.name for run in cell.runs]) for cell in cells(runs)]
    [('random', ['random-1', 'random-2']), ('paired', ['paired-1', 'paired-2'])]
    """
    groups = _gathered((RunCell((run,), _shared(run)) for run in runs), ())
    return [RunCell(tuple(c.runs[0] for c in group), group[0].shared) for group in groups]


def pairs(runs: Sequence[Run], figure: str) -> list[ModeGroup]:
    """Return encoders and decoders that differ in nothing else; RunError without such a pair."""
    pairs_of_cells = [members for members in _by_mode(runs) if len(members) == 2]
    if not pairs_of_cells:
        raise RunError(
            f"{figure} needs runs of an encoder and of a decoder with otherwise equal recipes: "
            f"wqk lab train --mode encoder and --mode decoder; got {_listed(runs, MODE[0])}"
        )
    return _mode_groups(pairs_of_cells)


def modes(runs: Iterable[Run]) -> list[ModeGroup]:
    """As `pairs`, plus cells without a counterpart."""
    return _mode_groups(_by_mode(runs))


def comparable(runs: Iterable[Run]) -> list[list[Run]]:
    """Return groups of runs of several starts that differ only in seed, start and penalty.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from wqk.tables.run import create_run
    >>> folder = mkdtemp()
    >>> runs = [create_run(f"{folder}/{init}-{width}", {"recipe": {"init": init, "width": width}})
    ...         for init, width in (("random", 8), ("random", 16), ("paired", 16))]
    >>> [[run.name for run in group] for group in comparable(runs)]
    [['random-16', 'paired-16']]
    """
    return [[run for cell in group for run in cell.runs] for group in _by_start(cells(runs))]


def starts(runs: Sequence[Run], figure: str, penalties: bool) -> dict[str, RunCell]:
    """Return the cells that differ only in their start, or, with ``penalties``, in the penalty.

    The random start comes first. RunError if no two cells do, or cells of several recipes.
    """
    compared = [cell for cell in cells(runs) if penalties or not cell.penalty]
    groups = _by_start(compared)
    if not groups:
        raise RunError(
            f"{figure} needs runs with different initializations and otherwise equal recipes: "
            f"wqk lab train --init random and --init symmetric; got {_listed(runs, START[0])}"
        )
    if len(groups) > 1:
        titles = "; ".join(_titles([group[0] for group in groups]))
        raise RunError(
            f"{figure} compares initializations of one recipe; got those of {titles}: give the "
            "runs of one"
        )
    ordered = sorted(groups[0], key=lambda cell: cell.start != "random")
    return {cell.start: cell for cell in ordered}


def one(comparisons: Sequence[ModeGroup], figure: str, instead: str) -> ModeGroup:
    """Return the only comparison; RunError if there are several."""
    if len(comparisons) > 1:
        titles = "; ".join(comparison.title for comparison in comparisons)
        raise RunError(
            f"{figure} shows one pair of recipes; got {titles}: give the runs of one, or draw "
            f"{instead}, which shows all"
        )
    return comparisons[0]


def _shared(run: Run) -> dict[str, Any]:
    """Everything but the seed that determines a run's numbers.

    Fields that are not set are left out, since older runs may not have recorded them.
    """
    recipe = {
        k: v for k, v in run.recipe.items() if v and k not in WITHIN_A_CELL and v != BEFORE.get(k)
    }
    if (recipe.get("mode"), recipe.get("objective")) in OWN_OBJECTIVES:
        del recipe["objective"]
    if parent := recipe.get("parent"):
        recipe["parent"] = _line(parent)
    corpus = run.settings.get("corpus", {})
    named = {"corpus": PurePath(corpus.get("folder", "")).name}
    return named | recipe | {"fingerprint": corpus.get("fingerprint")}


def _line(parent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a parent shares with the parents of other seeds."""
    recipe = {k: v for k, v in parent["recipe"].items() if v and k not in WITHIN_A_CELL}
    if before := recipe.pop("parent", None):
        recipe["parent"] = _line(before)
    return {"step": parent["step"], **recipe}


def _gathered(some: Iterable[RunCell], names: Sequence[str]) -> list[list[RunCell]]:
    """Cells that differ only in these fields together, in the order of the first of each."""
    groups: dict[str, list[RunCell]] = {}
    for cell in some:
        groups.setdefault(json.dumps(cell.without(names), sort_keys=True), []).append(cell)
    return list(groups.values())


def _by_start(some: Iterable[RunCell]) -> list[list[RunCell]]:
    """Cells that differ only in initialization and penalty, where there are two or more."""
    return [group for group in _gathered(some, START) if len(group) > 1]


def _by_mode(runs: Iterable[Run]) -> list[tuple[RunCell, ...]]:
    """Each encoder with each decoder that differs only in the mode; the others alone."""
    groups: list[tuple[RunCell, ...]] = []
    for group in _gathered(cells(runs), MODE):
        encoders, decoders = (
            [cell for cell in group if cell.mode == mode] for mode in ("encoder", "decoder")
        )
        groups += product(encoders, decoders) if encoders and decoders else ((c,) for c in group)
    return groups


def _mode_groups(groups: Sequence[tuple[RunCell, ...]]) -> list[ModeGroup]:
    titles = _titles([members[-1] for members in groups])
    return [
        ModeGroup(title, {cell.mode: cell for cell in members})
        for title, members in zip(titles, groups, strict=True)
    ]


def _titles(cells: Sequence[RunCell]) -> list[str]:
    """Return the corpus, and what differs among cells with corpora of the same name."""
    titles = []
    for cell in cells:
        corpus = cell.shared["corpus"]
        cells_of_corpus = [other for other in cells if other.shared["corpus"] == corpus]
        varying = {
            name
            for name in cell.shared
            if len({str(other.shared.get(name)) for other in cells_of_corpus}) > 1
        }
        texts = [corpus or "corpus without a name"]
        if "fingerprint" in varying:
            texts.append(str(cell.shared["fingerprint"])[:8])
        if len({other.start for other in cells_of_corpus}) > 1:
            texts.append(cell.start)
        if "parent" in varying and (parent := cell.shared.get("parent")):
            texts.append(f"from a {parent['mode']}")
        named = [name for name in cell.shared if name in varying - UNNAMED]
        texts += [f"{name.replace('_', ' ')} {cell.shared[name]}" for name in named]
        titles.append(", ".join(texts))
    return titles


def _listed(runs: Sequence[Run], field: str) -> str:
    """Return the number of runs, and their values of a field."""
    values = dict.fromkeys(str(run.recipe.get(field)) for run in runs)
    return f"{len(runs)} runs ({field} {', '.join(values)})" if runs else "no run"
