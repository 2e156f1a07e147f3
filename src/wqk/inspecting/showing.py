"""Views of a checkpoint: one form, the coupling of heads, scores by distance, or rotary planes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import Result, json_value
from wqk._style import save_figure
from wqk.attention import Block
from wqk.attention.bands import decay
from wqk.attention.coordinates import Coordinates
from wqk.errors import CheckpointError, FormError
from wqk.forms import images
from wqk.forms.images import matrix_image
from wqk.forms.kernels import directionalities
from wqk.forms.scores import coupling, symmetry, untrained_range
from wqk.model import open as open_model
from wqk.reporting import pictures
from wqk.scanning.scan import score_heads
from wqk.tables.rendering import HEADLINE, label
from wqk.tables.schema import SUMMARIZED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Distances at which forms are compared: 0, and four per doubling up to 4096.
DISTANCES = [0, *sorted({round(2 ** (k / 4)) for k in range(49)})]


@dataclass(frozen=True, repr=False)
class View(Result):
    """A view of a checkpoint's forms.

    Attributes
    ----------
    title, subtitle
        Name and scores.
    values
        The numbers behind the figure, as JSON can hold them.
    figure
        Draws the figure (needs matplotlib).
    """

    title: str
    subtitle: str
    values: Mapping[str, Any]
    figure: Callable[[], Figure]

    @property
    def sentence(self) -> str:
        """Name and scores."""
        return f"{self.title}: {self.subtitle}"

    def to_dict(self) -> dict[str, Any]:
        """The numbers behind the figure, as plain values for JSON."""
        return {name: json_value(value) for name, value in self.values.items()}

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """One for each place along the longest axis of the numbers, with all that lie along it."""
        lists = {name: value for name, value in self.values.items() if isinstance(value, list)}
        length = max(map(len, lists.values()), default=0)
        along = {name: value for name, value in lists.items() if len(value) == length}
        for place in range(length):
            yield {"place": place, **{name: value[place] for name, value in along.items()}}

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        yield Text.assemble((self.title, "bold"), f"\n{self.subtitle}")

    def _drawn(self) -> Figure:
        return self.figure()

    plot = _drawn

    def save(self, path: str | PathLike[str]) -> None:
        """Write the figure as .png, .pdf or .svg, atomically."""
        save_figure(self.figure(), Path(path))


def form_view(block: Block, name: str, head: int | None = None, gamma: float = 2.0) -> View:
    """A layer's or a head's form: image, norms, outlying rows and columns.

    FormError if there is no such head.
    """
    if head is not None and not 0 <= head < block.head_count:
        raise FormError(f"{name}: no head {head}; heads are 0 to {block.head_count - 1}")
    form = block.form if head is None else block[head].qk
    title = name if head is None else f"{name}, head {head}"
    image = matrix_image(form, gamma=gamma)
    scores = {"symmetry": float(symmetry(form))} if form.is_square else {}
    scores |= {
        name: float(d) for name, d in directionalities(form.moments, gamma)._asdict().items()
    }
    subtitle = "the form is zero"
    if image.row_norms.any():
        subtitle = ", ".join(
            f"{label(score)} {scores[score] + 0.0:.2f}" for score in HEADLINE if score in scores
        )
    values = {
        "layer": block.layer,
        "head": head,
        **scores,
        "outlying_rows": np.flatnonzero(image.outlying_rows).tolist(),
        "outlying_columns": np.flatnonzero(image.outlying_columns).tolist(),
        "row_norms": image.row_norms.tolist(),
        "column_norms": image.column_norms.tolist(),
    }
    return View(title, subtitle, values, lambda: images.matrix(image, title, subtitle))


def distance_view(block: Block, name: str, distances: Sequence[int], gamma: float = 2.0) -> View:
    """A layer's scores, and its heads', as functions of the relative distance (rotary models)."""
    forms = block.forms(Coordinates(distances=tuple(distances)))
    scored = [score_heads(form, gamma=gamma) for _, form in forms]
    values: dict[str, Any] = {
        "layer": block.layer,
        "distance": list(distances),
        **{score: [rows[0][score] for rows in scored] for score in SUMMARIZED},
        "heads": {
            score: [[row[score] for row in rows[1:]] for rows in scored] for score in SUMMARIZED
        },
        "untrained": untrained_range(block.groups.widths[0], block.form.rank, gamma),
    }
    first, last = (scored[end][0]["symmetry"] for end in (0, -1))
    title = f"{name}, by distance"
    subtitle = f"symmetry {first:.2f} at distance {distances[0]}, {last:.2f} at {distances[-1]}"
    return View(title, subtitle, values, lambda: pictures.distance_curves(values, title))


def bands_view(blocks: Iterable[Block], name: str, by_head: bool) -> View:
    """How weight is distributed over rotary planes, and how forms change with the distance.

    Rows are one layer's heads, or layers: sums (planes) and medians (curves) over their heads.
    CheckpointError without rotary positions; FormError if layers differ in the number of planes.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    numbers: list[int] = []
    for block in blocks:
        bands, along = block.bands(), decay(block, DISTANCES)
        norm, cosine = along.norm, along.cosine
        if not by_head:
            bands = bands._replace(energies=bands.energies.sum(axis=0, keepdims=True))
            alive = np.isfinite(norm).all(axis=1)
            norm, cosine = (_medians(curves[alive]) for curves in (norm, cosine))
        if parts and parts[0][0].shape[1] != bands.shares.shape[1]:
            raise FormError(f"{name}: layers differ in their rotary planes; choose a layer")
        parts.append((bands.shares, bands.low_share, norm, cosine))
        numbers += range(len(bands.energies)) if by_head else [block.layer]
    shares, low, norms, cosines = map(np.concatenate, zip(*parts, strict=True))
    values = {
        "rows": "head" if by_head else "layer",
        "numbers": numbers,
        "frequencies": bands.frequencies.tolist(),
        "axes": bands.axes.tolist(),
        "shares": shares.tolist(),
        "low_share": low.tolist(),
        "distance": DISTANCES,
        "norm": norms.tolist(),
        "cosine": cosines.tolist(),
    }
    title = f"{name}, rotary planes"
    subtitle = "every form is zero"
    if np.isfinite(low).any():
        least, most = np.nanmin(low), np.nanmax(low)
        subtitle = f"share of the slower half {least:.2f} to {most:.2f} (by chance 0.50)"
    return View(title, subtitle, values, lambda: pictures.rotary_planes(values, title))


def _medians(curves: np.ndarray) -> np.ndarray:
    """The median (1, N) of curves (H, N); NaN without curves."""
    if not len(curves):
        return np.full((1, curves.shape[1]), np.nan)
    return np.asarray(np.median(curves, axis=0, keepdims=True))


def coupling_view(block: Block, name: str) -> View:
    """How far each pair of a layer's heads are each other's transposes."""
    matrix = np.asarray(coupling(block.groups))
    a, b = np.triu_indices(len(matrix), 1)
    finite = np.isfinite(matrix[a, b])  # the coupling of a head that is zero is NaN
    a, b = a[finite], b[finite]
    subtitle = "no two heads to compare"
    if len(a):
        pairs = matrix[a, b]
        strongest = np.argmax(np.abs(pairs))
        subtitle = (
            f"strongest pair {a[strongest]} and {b[strongest]}: {pairs[strongest]:.2f}; "
            f"{np.mean(pairs > 0):.0%} of pairs positive"
        )
    title = f"{name}, coupling of heads"
    values = {"layer": block.layer, "coupling": matrix.tolist()}
    return View(title, subtitle, values, lambda: pictures.coupling(matrix, title))


def show(
    ref: Any,
    layer: int | None = None,
    head: int | None = None,
    *,
    coupling: bool = False,
    distances: Sequence[int] | None = None,
    bands: bool = False,
    stack: str | None = None,
    kind: str = "self",
    gamma: float = 2.0,
) -> View:
    """Show a layer's or a head's form, the coupling of heads, or the effect of positions.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes.
    layer, stack, kind
        As for `Model.block`.
    head
        One head instead of the layer.
    coupling
        How far each pair of heads are each other's transposes.
    distances
        Scores at these relative distances (rotary models).
    bands
        How weight is distributed over rotary planes, and how forms change with the distance: of one
        layer's heads, or without ``layer`` of all layers.
    gamma
        Threshold of outlying norms, in standard deviations above the mean.

    Returns
    -------
    View
        ``values`` holds the numbers, ``figure()`` draws them, ``save(path)`` writes the figure.

    Raises
    ------
    WqkError
        There is no such checkpoint, layer or head.

    Examples
    --------
    >>> import wqk
    >>> view = wqk.show(wqk.demo_model("encoder"), layer=2, head=1)
    >>> view.title
    'encoder, layer 2, head 1'
    """
    if sum((coupling, head is not None, distances is not None, bands)) > 1:
        raise FormError(
            "head, coupling, distances and bands are mutually exclusive; give one of them"
        )
    model = open_model(ref)
    file = Path(model.name).name
    if layer is None:
        if not bands:
            raise FormError("a view shows one layer; give its number (only bands show all layers)")
        asked = [b for b in model if b.kind == kind and stack in (None, b.stack)]
        chosen = [b for b in asked if b.plan.rotary or b.plan.axial] or asked
        if len({b.stack for b in chosen}) != 1:
            stacks = " or ".join(sorted({b.stack for b in chosen or model}))
            raise CheckpointError(f"{model.name}: bands are of one stack; choose from {stacks}")
        return bands_view(chosen, file, by_head=False)
    block = model.block(layer, stack=stack, kind=kind)
    several = len({(p.stack, p.kind) for p in model.plans}) > 1
    which = f"{block.stack} {block.kind}, " if several else ""
    name = f"{file}, {which}layer {block.layer}"
    if distances is not None:
        return distance_view(block, name, distances, gamma)
    if bands:
        return bands_view([block], name, by_head=True)
    return coupling_view(block, name) if coupling else form_view(block, name, head, gamma)
