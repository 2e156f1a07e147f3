"""Views of a checkpoint: one form, or the coupling of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import Result, counted, json_value, number
from wqk._style import save_figure
from wqk.attention import Block
from wqk.errors import FormError, called_as
from wqk.forms import images
from wqk.forms.images import matrix_image
from wqk.forms.kernels import directionalities
from wqk.forms.scores import coupling, head_terms, symmetry
from wqk.model import open as open_model
from wqk.reporting import pictures
from wqk.reporting.payload import strongest_pair
from wqk.tables.rendering import HEADLINE, label
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Number of printed pairs of heads.
MOST_PAIRS = 8


@dataclass(frozen=True, repr=False)
class FormView(Result):
    """A view of a checkpoint's forms.

    Attributes
    ----------
    title, subtitle
        Name and scores.
    values
        Numbers of the figure, as plain values for JSON.
    figure
        Function that draws the figure (needs matplotlib).
    table
        Table to print below the scores; None without a table.
    note
        Explanation of the table.
    """

    title: str
    subtitle: str
    values: Mapping[str, Any]
    figure: Callable[[], Figure]
    table: Sheet | None = None
    note: str = ""

    @property
    def sentence(self) -> str:
        """Name and scores."""
        return f"{self.title}: {self.subtitle}"

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the figure as plain values, for JSON."""
        return {name: json_value(value) for name, value in self.values.items()}

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a row for each index of the longest axis, with all values of this axis."""
        lists = {name: value for name, value in self.values.items() if isinstance(value, list)}
        length = max(map(len, lists.values()), default=0)
        columns = {name: values for name, values in lists.items() if len(values) == length}
        for place in range(length):
            row = {name: values[place] for name, values in columns.items()}
            yield {"place": place, **row}

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        yield Text.assemble((self.title, "bold"), f"\n{self.subtitle}")
        if self.table is not None:
            yield self.table
        if self.note:
            yield Text(self.note, style="dim")

    def _drawn(self) -> Figure:
        return self.figure()

    plot = _drawn

    def save(self, path: str | PathLike[str]) -> None:
        """Write the figure as .png, .pdf or .svg, atomically."""
        save_figure(self.figure(), Path(path))


def form_view(block: Block, name: str, head: int | None = None, gamma: float = 2.0) -> FormView:
    """Return a layer's or a head's form: image, norms, outlying rows and columns.

    Raises `FormError` for an unknown head.
    """
    if head is not None and not 0 <= head < block.head_count:
        raise FormError(f"{name}: no head {head}; heads are 0 to {block.head_count - 1}")
    form = block.form if head is None else block[head].qk
    title = name if head is None else f"{name}, head {head}"
    image = matrix_image(form, gamma=gamma)
    scores = {}
    if form.is_square:
        scores["symmetry"] = float(symmetry(form))
    for score, value in directionalities(form.moments, gamma)._asdict().items():
        scores[score] = float(value)
    subtitle = "the form is zero"
    if image.row_norms.any():
        headline = [score for score in HEADLINE if score in scores]
        subtitle = ", ".join(f"{label(score)} {scores[score]:z.2f}" for score in headline)
    values = {
        "layer": block.layer,
        "head": head,
        **scores,
        "outlying_rows": np.flatnonzero(image.outlying_rows).tolist(),
        "outlying_columns": np.flatnonzero(image.outlying_columns).tolist(),
        "row_norms": image.row_norms.tolist(),
        "column_norms": image.column_norms.tolist(),
    }
    return FormView(title, subtitle, values, lambda: images.matrix(image, title, subtitle))


def coupling_view(block: Block, name: str) -> FormView:
    """Return the coupling of a layer's heads: 1 for heads that are transposes of each other."""
    matrix = np.asarray(coupling(block.groups))
    terms = head_terms(block.groups, block.form)
    total, within, between = float(symmetry(block.form)), float(terms.within), float(terms.between)
    random = float(terms.within_random)
    values = {
        "layer": block.layer,
        "symmetry": total,
        "symmetry_within_heads": within,
        "symmetry_between_heads": between,
        "symmetry_within_random": random,
        "coupling": matrix.tolist(),
    }
    title = f"{name}, coupling of heads"
    pairs = _pairs_by_strength(matrix)
    split = (
        f"symmetry of the layer {number(total)}: {number(within)} within heads, "
        f"{number(between)} between heads ({number(random)} within heads if the rank dimensions "
        "were assigned to heads at random)"
    )
    return FormView(
        title=title,
        subtitle=strongest_pair(matrix),
        values=values,
        figure=lambda: pictures.coupling(matrix, title),
        table=_table_of_pairs(matrix, pairs[:MOST_PAIRS]) if pairs else None,
        note=f"{_note_on_pairs(len(pairs))}\n{split}" if pairs else "",
    )


def _pairs_by_strength(matrix: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs of heads with a coupling, in descending order of magnitude."""
    first, second = np.triu_indices(len(matrix), 1)
    values = matrix[first, second]
    order = np.argsort(-np.abs(values), kind="stable")  # NaN comes last
    count = int(np.isfinite(values).sum())
    finite = order[:count]
    return list(zip(first[finite].tolist(), second[finite].tolist(), strict=True))


def _table_of_pairs(matrix: np.ndarray, pairs: Sequence[tuple[int, int]]) -> Sheet:
    """Return a table of pairs of heads: the coupling, and the symmetry of both heads."""
    table = Sheet.of("heads", "coupling", "symmetry of the first", "of the second", text=["heads"])
    for first, second in pairs:
        coupling = float(matrix[first, second])
        first_symmetry = float(matrix[first, first])
        second_symmetry = float(matrix[second, second])
        values = map(number, (coupling, first_symmetry, second_symmetry))
        table.add(f"{first} and {second}", *values)
    return table


def _note_on_pairs(count: int) -> str:
    """Return the meaning of a coupling, and the number of omitted pairs."""
    meaning = "coupling: 1 if one head is the transpose of the other, −1 if it is minus that"
    if count <= MOST_PAIRS:
        return meaning
    return f"{counted(count - MOST_PAIRS, 'more pair')}: in the picture, and in --json\n{meaning}"


@called_as("wqk.show(ref, layer, head)")
def show(
    ref: Any,
    layer: int,
    head: int | None = None,
    *,
    coupling: bool = False,
    stack: str | None = None,
    kind: str = "self",
    gamma: float = 2.0,
) -> FormView:
    """Show a layer's or a head's form, or the coupling of its heads.

    Parameters
    ----------
    ref
        A `Model`, or a reference for `wqk.open`.
    layer, stack, kind
        As for `Model.block`.
    head
        Number of a head, to show its form instead of the layer's.
    coupling
        Whether to show the coupling of heads: 1 for heads that are transposes of each other. The
        view has the strongest pairs, and the layer's symmetry within heads and between heads.
    gamma
        Threshold of outlying norms, in standard deviations above the mean.

    Returns
    -------
    FormView
        ``values`` contains the numbers, ``figure()`` draws the numbers, ``save(path)`` writes the
        figure.

    Raises
    ------
    WqkError
        The checkpoint, the layer or the head does not exist.

    Examples
    --------
    >>> import wqk
    >>> view = wqk.show(wqk.demo_model("encoder"), layer=2, head=1)
    >>> view.title
    'encoder, layer 2, head 1'
    """
    if coupling and head is not None:
        raise FormError("head and coupling are mutually exclusive; give one of them")
    model = open_model(ref)
    file = Path(model.name).name
    block = model.block(layer, stack=stack, kind=kind)
    many_attentions = len({(p.stack, p.kind) for p in model.plans}) > 1
    attention = f"{block.stack} {block.kind}, " if many_attentions else ""
    name = f"{file}, {attention}layer {block.layer}"
    if coupling:
        return coupling_view(block, name)
    return form_view(block, name, head, gamma)
