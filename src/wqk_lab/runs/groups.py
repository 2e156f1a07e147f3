"""Training runs grouped into cells (one recipe, several seeds), and comparable cells.

Two runs belong to one cell if only the seed differs. Cells are comparable if only one setting
differs: an encoder and a decoder, or two initializations.
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

# Fields of a recipe that may differ within a cell.
WITHIN_A_CELL = {"seed", "preset", "keep_checkpoints", "save_every"}

# Values of fields that older recipes lack.
BEFORE = {"rows": "blocks"}

# Fields that differ between comparable modes, and between comparable starts.
MODE = ("mode", "objective")
START = ("init", "init_head_norm", "init_norm", "init_values", "penalty", "penalty_weight")

# Fields that scale a start, with names for titles.
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
    """One or more runs that differ only in the seed.

    ``shared`` has the recipe's fields that are set (``objective`` unless the mode implies the
    objective), the name of the corpus's folder as ``corpus``, and the corpus's ``fingerprint``.
    """

    runs: tuple[Run, ...]
    shared: Mapping[str, Any]

    @property
    def mode(self) -> str:
        """``encoder`` or ``decoder``."""
        return str(self.shared.get("mode"))

    @property
    def penalty(self) -> str:
        """The penalty and its weight as text; empty without a penalty."""
        penalty = self.shared.get("penalty", "none")
        weight = self.shared.get("penalty_weight", 0)
        return "" if penalty == "none" else f"{penalty} penalty {weight:g}"

    @property
    def start(self) -> str:
        """The initialization of queries and keys, and the penalty, in words."""
        init = str(self.shared.get("init", "random"))
        terms = []
        if init != "random" or not self.penalty:
            terms.append(init)
        for field, name in SCALES.items():
            if self.shared.get(field):
                terms.append(f"{name} × {self.shared[field]:g}")
        if self.penalty:
            terms.append(self.penalty)
        return ", ".join(terms)

    def without(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the shared fields except the given names."""
        return {name: value for name, value in self.shared.items() if name not in names}


@dataclass(frozen=True)
class ModeGroup:
    """An encoder and a decoder with otherwise equal recipes, or one of them alone."""

    title: str  # the corpus, and settings that differ from groups on corpora of the same name
    cells: Mapping[str, RunCell]  # by mode, the encoder first


def cells(runs: Iterable[Run]) -> list[RunCell]:
    """Group runs that differ only in seed, in the order of each group's first run.

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
    merged = []
    for group in groups:
        members = tuple(cell.runs[0] for cell in group)
        merged.append(RunCell(members, group[0].shared))
    return merged


def pairs(runs: Sequence[Run], figure: str) -> list[ModeGroup]:
    """Return encoders and decoders that differ only in mode; raise `RunError` without a pair."""
    pairs_of_cells = [members for members in _by_mode(runs) if len(members) == 2]
    if not pairs_of_cells:
        raise RunError(
            f"{figure} needs runs of an encoder and of a decoder with otherwise equal recipes: "
            f"wqk lab train --mode encoder and --mode decoder; got {_listed(runs, MODE[0])}"
        )
    return _mode_groups(pairs_of_cells)


def modes(runs: Iterable[Run]) -> list[ModeGroup]:
    """Return groups as `pairs` does, and cells without a counterpart."""
    return _mode_groups(_by_mode(runs))


def comparable(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs that differ only in seed, initialization and penalty, with two starts or more.

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
    groups = []
    for group in _by_start(cells(runs)):
        members: list[Run] = []
        for cell in group:
            members += cell.runs
        groups.append(members)
    return groups


def starts(runs: Sequence[Run], figure: str, penalties: bool) -> dict[str, RunCell]:
    """Return the cells that differ only in the start, or, with ``penalties``, in the penalty.

    The random start comes first. `RunError` if there are no two such cells, or if there are such
    cells of several recipes.
    """
    candidates = [cell for cell in cells(runs) if penalties or not cell.penalty]
    groups = _by_start(candidates)
    if not groups:
        raise RunError(
            f"{figure} needs runs with different initializations and otherwise equal recipes: "
            f"wqk lab train --init random and --init symmetric; got {_listed(runs, START[0])}"
            f"{_advice_on_penalties(runs, penalties)}"
        )
    if len(groups) > 1:
        titles = "; ".join(_titles([group[0] for group in groups]))
        raise RunError(
            f"{figure} compares initializations of one recipe; got those of {titles}: give the "
            "runs of one"
        )
    ordered = sorted(groups[0], key=lambda cell: cell.start != "random")
    return {cell.start: cell for cell in ordered}


def _advice_on_penalties(runs: Sequence[Run], are_compared: bool) -> str:
    """Return the end of a message about runs with penalties that a figure does not compare."""
    if are_compared or not any(cell.penalty for cell in cells(runs)):
        return ""
    return "; runs with a penalty are compared by wqk lab figure losses and by wqk report"


def one(comparisons: Sequence[ModeGroup], figure: str, instead: str) -> ModeGroup:
    """Return the only comparison; raise `RunError` if there are several."""
    if len(comparisons) > 1:
        titles = "; ".join(comparison.title for comparison in comparisons)
        raise RunError(
            f"{figure} shows one pair of recipes; got {titles}: give the runs of one, or draw "
            f"{instead}, which shows all"
        )
    return comparisons[0]


def _shared(run: Run) -> dict[str, Any]:
    """Return all settings that determine a run's numbers, without the seed.

    Fields that are not set are left out, since older runs may lack them.
    """
    recipe = {}
    for name, value in _set_fields(run.recipe).items():
        if value != BEFORE.get(name):
            recipe[name] = value
    if (recipe.get("mode"), recipe.get("objective")) in OWN_OBJECTIVES:
        del recipe["objective"]
    if parent := recipe.get("parent"):
        recipe["parent"] = _line(parent)
    corpus = run.settings.get("corpus", {})
    named = {"corpus": PurePath(corpus.get("folder", "")).name}
    return named | recipe | {"fingerprint": corpus.get("fingerprint")}


def _set_fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set fields of a recipe, without the fields that vary within a cell."""
    return {name: value for name, value in recipe.items() if value and name not in WITHIN_A_CELL}


def _line(parent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step and the recipe that parents of all seeds of a cell have in common."""
    recipe = _set_fields(parent["recipe"])
    if grandparent := recipe.pop("parent", None):
        recipe["parent"] = _line(grandparent)
    return {"step": parent["step"], **recipe}


def _gathered(ungrouped: Iterable[RunCell], names: Sequence[str]) -> list[list[RunCell]]:
    """Group cells that differ only in the named fields, in the order of each group's first cell."""
    groups: dict[str, list[RunCell]] = {}
    for cell in ungrouped:
        remaining_fields = json.dumps(cell.without(names), sort_keys=True)
        groups.setdefault(remaining_fields, []).append(cell)
    return list(groups.values())


def _by_start(ungrouped: Iterable[RunCell]) -> list[list[RunCell]]:
    """Group cells that differ only in initialization and penalty; single cells are left out."""
    return [group for group in _gathered(ungrouped, START) if len(group) > 1]


def _by_mode(runs: Iterable[Run]) -> list[tuple[RunCell, ...]]:
    """Pair encoders with decoders that differ only in mode; other cells stay single."""
    groups: list[tuple[RunCell, ...]] = []
    for group in _gathered(cells(runs), MODE):
        encoders = [cell for cell in group if cell.mode == "encoder"]
        decoders = [cell for cell in group if cell.mode == "decoder"]
        if encoders and decoders:
            groups += product(encoders, decoders)
        else:
            groups += [(cell,) for cell in group]
    return groups


def _mode_groups(groups: Sequence[tuple[RunCell, ...]]) -> list[ModeGroup]:
    titles = _titles([members[-1] for members in groups])
    mode_groups = []
    for title, members in zip(titles, groups, strict=True):
        cell_by_mode = {cell.mode: cell for cell in members}
        mode_groups.append(ModeGroup(title, cell_by_mode))
    return mode_groups


def _titles(titled: Sequence[RunCell]) -> list[str]:
    """Return titles: the corpus, and settings that differ among cells with the same corpus name."""
    titles = []
    for cell in titled:
        corpus = cell.shared["corpus"]
        same_corpus = [peer for peer in titled if peer.shared["corpus"] == corpus]
        varying = set()
        for name in cell.shared:
            if len({str(peer.shared.get(name)) for peer in same_corpus}) > 1:
                varying.add(name)
        terms = [corpus or "corpus without a name"]
        if "fingerprint" in varying:
            terms.append(str(cell.shared["fingerprint"])[:8])
        if len({peer.start for peer in same_corpus}) > 1:
            terms.append(cell.start)
        if "parent" in varying and (parent := cell.shared.get("parent")):
            terms.append(f"from a {parent['mode']}")
        for name, value in cell.shared.items():
            if name in varying - UNNAMED:
                terms.append(f"{name.replace('_', ' ')} {value}")
        titles.append(", ".join(terms))
    return titles


def _listed(runs: Sequence[Run], field: str) -> str:
    """Return, in words, the number of runs, and a field's values."""
    if not runs:
        return "no run"
    values = dict.fromkeys(str(run.recipe.get(field)) for run in runs)
    return f"{len(runs)} runs ({field} {', '.join(values)})"
