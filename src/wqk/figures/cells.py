"""Training runs in order: cells (one recipe, several seeds), and cells that compare.

Two runs are of one cell if nothing that decides their numbers differs but the seed. Cells compare
if they differ in one thing alone: an encoder with its decoder, a start with other starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from wqk.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from wqk.runs import Run

# Fields of a recipe that tell runs of one cell apart, or do not touch the numbers.
WITHIN_A_CELL = {"seed", "preset", "keep_checkpoints", "save_every"}

# What an encoder and a decoder that compare differ in, and what starts that compare differ in.
MODE = ("mode", "objective")
START = ("init", "init_keep_norm", "penalty", "penalty_weight")


@dataclass(frozen=True)
class Cell:
    """Runs that differ in nothing but the seed.

    Attributes
    ----------
    runs
        At least one.
    settings
        What they share: the fields of their recipe that are on, and the corpus' ``corpus`` (its
        folder's name) and ``fingerprint``.
    """

    runs: tuple[Run, ...]
    settings: Mapping[str, Any]

    @property
    def mode(self) -> str:
        """``encoder`` or ``decoder``."""
        return str(self.settings.get("mode", "encoder"))

    @property
    def start(self) -> str:
        """How its queries and keys start, and the penalty, in words."""
        words = str(self.settings.get("init", "random"))
        if self.settings.get("init_keep_norm"):
            words += ", norm kept"
        if (penalty := self.settings.get("penalty", "none")) != "none":
            weight = self.settings.get("penalty_weight", 0)
            words = f"{penalty} penalty {weight:g}" + ("" if words == "random" else f", {words}")
        return words


@dataclass(frozen=True)
class Comparison:
    """Cells that differ in one thing alone.

    Attributes
    ----------
    title
        What tells it from the other comparisons: the corpus, and what else varies among them.
    cells
        By what they differ in: ``encoder`` and ``decoder``, or starts.
    """

    title: str
    cells: Mapping[str, Cell]


def cells(runs: Iterable[Run]) -> list[Cell]:
    """Put runs that differ in their seed alone together, in the order of the first of each.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from wqk.runs import create_run
    >>> folder = mkdtemp()
    >>> runs = [create_run(f"{folder}/{init}-{seed}", {"recipe": {"init": init, "seed": seed}})
    ...         for init in ("random", "paired") for seed in (1, 2)]
    >>> [(cell.start, [run.name for run in cell.runs]) for cell in cells(runs)]
    [('random', ['random-1', 'random-2']), ('paired', ['paired-1', 'paired-2'])]
    """
    grouped: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        settings = _settings(run)
        same = next((members for known, members in grouped if known == settings), None)
        if same is None:
            grouped.append((settings, [run]))
        else:
            same.append(run)
    return [Cell(tuple(members), settings) for settings, members in grouped]


def pairs(runs: Iterable[Run], figure: str) -> list[Comparison]:
    """Encoders and decoders that differ in nothing else.

    Raises
    ------
    RunError
        There is no such pair; says what ``figure`` needs.
    """
    found = [c for c in by_mode(runs) if len(c.cells) == 2]
    if not found:
        raise RunError(
            f"{figure} needs runs of an encoder and of a decoder that are trained alike: wqk train "
            f"--mode encoder and --mode decoder; got {_listed(runs, MODE[0])}"
        )
    return found


def by_mode(runs: Iterable[Run]) -> list[Comparison]:
    """Cells by mode, each beside the one that differs in the mode alone, if there is one."""
    groups = _groups(cells(runs), MODE)
    titles = _titles([group[0] for group in groups], MODE)
    return [
        Comparison(title, {cell.mode: cell for cell in sorted(group, key=_encoder_first)})
        for title, group in zip(titles, groups, strict=True)
    ]


def starts(runs: Iterable[Run], figure: str, penalties: bool) -> Comparison:
    """The cells that differ in how they start alone; with ``penalties``, or in the penalty.

    Raises
    ------
    RunError
        No two cells do, or those of several recipes do.
    """
    some = [c for c in cells(runs) if penalties or c.settings.get("penalty", "none") == "none"]
    groups = [group for group in _groups(some, START) if len(group) > 1]
    if not groups:
        raise RunError(
            f"{figure} needs runs that start differently and are trained alike: wqk train --init "
            f"random and --init symmetric; got {_listed(runs, START[0])}"
        )
    titles = _titles([group[0] for group in groups], START)
    if len(groups) > 1:
        raise RunError(
            f"{figure} compares the starts of one recipe; got those of {'; '.join(titles)}: give "
            "the runs of one"
        )
    ordered = sorted(groups[0], key=lambda cell: cell.start != "random")
    return Comparison(titles[0], {cell.start: cell for cell in ordered})


def one(comparisons: Sequence[Comparison], figure: str, instead: str) -> Comparison:
    """The only comparison there is.

    Raises
    ------
    RunError
        There are several.
    """
    if len(comparisons) > 1:
        titles = "; ".join(comparison.title for comparison in comparisons)
        raise RunError(
            f"{figure} shows one pair of recipes; got {titles}: give the runs of one, or draw "
            f"{instead}, which shows all"
        )
    return comparisons[0]


def _settings(run: Run) -> dict[str, Any]:
    """What decides a run's numbers, but for its seed.

    What is off is left out: runs that were recorded before there was such a field lack it.
    """
    recipe = {k: v for k, v in run.recipe.items() if v and k not in WITHIN_A_CELL}
    corpus = run.settings.get("corpus", {})
    named = {"corpus": PurePath(str(corpus.get("folder", ""))).name}
    return named | recipe | {"fingerprint": corpus.get("fingerprint")}


def _groups(some: Iterable[Cell], but: Sequence[str]) -> list[list[Cell]]:
    """Cells that agree in everything except ``but``."""
    groups: list[tuple[dict[str, Any], list[Cell]]] = []
    for cell in some:
        key = {name: value for name, value in cell.settings.items() if name not in but}
        same = next((members for known, members in groups if known == key), None)
        if same is None:
            groups.append((key, [cell]))
        else:
            same.append(cell)
    return [members for _, members in groups]


def _titles(firsts: Sequence[Cell], but: Sequence[str]) -> list[str]:
    """The corpus of each, and the settings in which they differ."""
    names = dict.fromkeys(name for cell in firsts for name in cell.settings if name not in but)
    varying = [
        name
        for name in names
        if name not in ("corpus", "fingerprint")
        and any(cell.settings.get(name) != firsts[0].settings.get(name) for cell in firsts)
    ]
    return [
        ", ".join(
            [
                cell.settings["corpus"] or "unknown corpus",
                *(f"{name.replace('_', ' ')} {cell.settings.get(name, 'off')}" for name in varying),
            ]
        )
        for cell in firsts
    ]


def _encoder_first(cell: Cell) -> bool:
    return cell.mode != "encoder"


def _listed(runs: Iterable[Run], field: str) -> str:
    """What a field of the runs' recipes holds."""
    found = list(runs)
    if not found:
        return "no run"
    values = dict.fromkeys(str(run.recipe.get(field)) for run in found)
    return f"{len(found)} run{'s' * (len(found) > 1)} ({', '.join(values)})"
