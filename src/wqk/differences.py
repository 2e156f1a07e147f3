"""How far, and in which direction, the forms moved between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from rich.text import Text

from wqk._console import counted, farthest, kind_in_words, number
from wqk._style import style
from wqk._version import __version__
from wqk.attention import Block
from wqk.attention.factors import FOLDED, PLAIN, lacks_norm
from wqk.attention.rounding import ROUNDING, rounding_of
from wqk.errors import CheckpointError, TableError
from wqk.forms import BilinearForm
from wqk.forms.chaining import update_measures
from wqk.forms.kernels import directionalities
from wqk.forms.scores import symmetry
from wqk.model import open as open_model
from wqk.scanning.scan import block_columns, checkpoint_columns
from wqk.tables.columns import COLUMNS, UPDATE_COLUMNS, Column
from wqk.tables.rendering import head_maps, label, title
from wqk.tables.schema import UPDATE_TERMS, conditions, joined_statuses, types
from wqk.tables.score_table import Table
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARED = ("checkpoint", "revision", "step", "model_type", "family")
_PLACE = ("stack", "kind", "layer", "head", "key_head", "heads", "key_heads", "d_query", "d_key")

DIFFERENCE_COLUMNS = (
    Column("before", str, "the checkpoint before"),
    Column("before_revision", str, "its revision on the Hub"),
    Column("before_step", int, "its training step"),
    *(column for column in COLUMNS if column.name in (*_SHARED, *_PLACE)),
    Column("norm", float, "norm of the form before", "norm", r"$\lVert W_{qk} \rVert$"),
    Column(
        "moved",
        float,
        "norm of the difference over the norm before",
        "moved",
        r"$\lVert \Delta W_{qk} \rVert / \lVert W_{qk} \rVert$",
    ),
    Column("cosine", float, "cosine between the two forms", "cosine"),
    Column("symmetry", float, "symmetry of the difference", "symmetry", "$s$"),
    Column(
        "directionality", float, "of the difference, by Definition 3.2", "directionality", "$d$"
    ),
    Column(
        "directionality_excess",
        float,
        "of the difference, as published",
        "(excess)",
        "$d$ (excess)",
    ),
    Column("status", str, "why the scores are to be doubted; ok if nothing is known", "status"),
    Column("rounding", float, "what quantization is expected to move, as moved", "rounding"),
    Column("beside", float, "moved, of the other version", "beside"),
)
DIFFERENCE_SCHEMA = types(DIFFERENCE_COLUMNS)


@dataclass(frozen=True, eq=False, repr=False)
class DifferenceTable(Table):
    """How the forms of two checkpoints differ, one row for each layer and for each head.

    ``norm`` is that of the form before, ``moved`` the norm of the difference over it, ``cosine``
    that between the two forms; symmetry and directionality are the difference's own, and null if
    nothing has moved. Of quantized weights, ``rounding`` is what ``moved`` is expected to be where
    rounding to the format's values is all that happened; norms that feed them are folded in, since
    AWQ moves factors between the two. ``beside`` is ``moved`` of another version that was asked
    for, and the terms of first and second order in the factors follow on request.
    """

    declared = DIFFERENCE_COLUMNS
    further = UPDATE_COLUMNS
    needed = ("layer", "moved")

    @property
    def result(self) -> str:
        """What was found, in one sentence.

        Examples
        --------
        >>> import wqk
        >>> diff(wqk.demo_model("encoder"), wqk.demo_model("encoder"), heads=False).result
        'Nothing moved: all 4 layers are equal.'
        """
        layers = self.layers.frame
        if not layers.height:
            return "No layer was compared."
        if (layers["moved"] == 0).all():
            return f"Nothing moved: all {counted(layers.height, 'layer')} are equal."
        most = layers.filter(pl.col("moved").is_finite()).sort("moved")
        if not most.height:
            return "How far the layers moved is not known: their forms before have no norm."
        row = most.row(-1, named=True)
        others = len(layers.select("stack", "kind").unique()) > 1
        where = f" of the {row['stack']} ({kind_in_words(row['kind'])})" if others else ""
        shares = (most["moved"] / most["rounding"]).drop_nulls().to_numpy()
        parts = [
            f"Layer {row['layer']}{where} moved most, by {row['moved']:.2g} of its norm; half of "
            f"all layers by {float(np.median(most['moved'])):.2g} or less."
        ]
        if shares.size:
            parts += [f"That is at most {shares.max():.2g} times what quantization alone moves."]
        heads = self.heads.frame.filter(pl.col("moved").is_finite())
        named = pl.format("{} {} " * others + "{}.{}", *["stack", "kind"] * others, "layer", "head")
        far = [*zip(heads["moved"], heads.select(named).to_series(), strict=True)]
        parts += [farthest(far)] if far else []
        both = (self.heads if far else self.layers).frame.drop_nulls("beside")
        if both.height:
            nearer = int((both["beside"] < both["moved"]).sum())
            what = "heads" if far else "layers"
            changed = both.filter(pl.col("moved") > 0)
            ratio = float(np.median(changed["beside"] / changed["moved"]))
            parts += [
                f"{self.metadata.get('beside', 'The other version')} moved less in {nearer} of "
                f"{both.height} {what}; in the median, {ratio:.2g} times as far."
            ]
        return " ".join(parts)

    def plot(self) -> Figure:
        """Draw how far each head moved, layers down, and beside it the other version.

        Raises
        ------
        TableError
            The table has no heads.
        MissingPackage
            Matplotlib is not installed.

        Examples
        --------
        >>> import wqk
        >>> figure = diff(wqk.demo_model("encoder"), wqk.demo_model("decoder")).plot()
        """
        rows = self.heads.frame
        if not rows.height:
            raise TableError("a picture shows heads, and none was compared: give heads=True")
        others = rows["beside"].null_count() < rows.height
        columns = {"moved": rows["checkpoint"][0]}
        columns |= {"beside": self.metadata.get("beside", "beside")} if others else {}
        kinds = [
            (f"{part['stack'][0]}, {kind_in_words(part['kind'][0])}", part)
            for part in rows.partition_by("stack", "kind", maintain_order=True)
        ]
        values = np.concatenate([rows[name].drop_nulls() for name in columns])
        most = float(np.nanmax(values, initial=0)) or 1.0
        titles = {name: str(model).rpartition("/")[2] for name, model in columns.items()}
        with style():
            bar = "moved, relative to the form before"
            return head_maps(kinds, titles, bar, vmin=0, vmax=most)

    def _shown(self, width: int) -> Iterator[Any]:
        """One line per compared layer or head."""
        frame = self.frame
        if not frame.height:
            yield Text("no rows")
            return
        first = frame.row(0, named=True)
        before = {"checkpoint": first["before"], "revision": first["before_revision"]}
        yield Text.assemble("\n", (title(before), "bold"), " → ", (title(first), "bold"))
        headings = {one.name: one.heading for one in self.headed() if one.name != "layer"}
        del headings["directionality"]
        headings["directionality_excess"] = label("directionality_excess")
        for name in ("head", "status", "rounding", "beside"):
            if frame[name].is_null().all() or (name == "status" and (frame[name] == "ok").all()):
                del headings[name]
        unusual = conditions(frame, self.metadata, every=False)
        for rows in frame.partition_by("stack", "kind", maintain_order=True):
            where = f"{rows['stack'][0]} {kind_in_words(rows['kind'][0])}"
            yield Text(" · ".join([str(rows["family"][0]), where, *unusual]))
            yield _differences(rows, headings)
            for order in ("first", "second"):
                names = [name for name in UPDATE_TERMS if name.startswith(order)]
                if names[0] in frame.columns:
                    texts = {n: n.removeprefix(f"{order}_order_").replace("_", " ") for n in names}
                    head = {n: headings[n] for n in ("head",) if n in headings}
                    yield Text(f"term of {order} order")
                    yield _differences(rows, head | texts)
        notes = ["moved: norm of the difference over the norm before"]
        notes += ["symmetry and directionality are the difference's own"]
        if "status" in headings:
            notes.append("unmoved: there is no difference")
        if "beside" in headings:
            notes.append(f"beside: moved, of {self.metadata.get('beside')}")
        yield Text("; ".join(notes), style="dim")
        yield self.result


def diff(
    before: Any,
    after: Any,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    terms: bool = False,
    beside: Any = None,
) -> DifferenceTable:
    """Measure how far, and in which direction, the forms moved.

    The two can be a model and its fine-tuned version, two steps of a training run, two seeds of
    one architecture, or a model and its quantized version.

    Parameters
    ----------
    before, after
        Models, or what `wqk.open` takes; a training run's folder stands for its last step.
    gamma, heads
        As for `wqk.scan`.
    terms
        Whether to add norm, σ₁ and stable rank of the terms of first and second order in the
        factors, ΔA Bᵀ + A ΔBᵀ and ΔA ΔBᵀ.
    beside
        Another version of the first, such as another quantization, whose distances are shown beside
        those of the second.

    Returns
    -------
    DifferenceTable
        A row for each layer, and with ``heads`` one for each head after it.

    Raises
    ------
    CheckpointError
        The two do not have the same attention blocks.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.diff(wqk.demo_model("encoder"), wqk.demo_model("encoder"), heads=False)
    >>> table.frame.select("layer", "moved", "cosine", "symmetry", "status").row(0)
    (0, 0.0, 1.0, None, 'unmoved')
    """
    old, new = open_model(before), open_model(after)
    layers, new_layers = (
        [f"{p.rule.stack} {p.what}, layer {p.layer}" for p in model.scored] for model in (old, new)
    )
    odd = next((pair for pair in zip_longest(layers, new_layers) if pair[0] != pair[1]), None)
    if odd:
        raise CheckpointError(
            f"{old.name} and {new.name} cannot be compared: one has {odd[0] or 'no more layers'} "
            f"where the other has {odd[1] or 'no more layers'}"
        )
    shared = checkpoint_columns(new.checkpoint) | {
        "before": old.name,
        "before_revision": old.checkpoint.revision,
        "before_step": old.checkpoint.step,
    }
    plans = [*old.scored, *new.scored]
    folds = any(plan.quantized for plan in plans) and not any(lacks_norm(p, FOLDED) for p in plans)
    blocks = ([Block(m.checkpoint, plan) for plan in m.scored] for m in (old, new))
    rows = [
        {**shared, **row}
        for a, b in zip(*blocks, strict=True)
        for row in block_rows(a, b, gamma, terms, folds)
        if heads or row["head"] is None
    ]
    columns = {**DIFFERENCE_SCHEMA, **(UPDATE_TERMS if terms else {})}
    frame = pl.DataFrame(rows, schema=columns, strict=False)
    metadata = {"wqk": __version__, "gamma": gamma, "folded_norms": folds}
    if beside is not None:
        third = open_model(beside)
        other = diff(old, third, gamma=gamma, heads=heads)
        frame = frame.with_columns(beside=other.frame["moved"])
        metadata["beside"] = third.name
    return DifferenceTable(frame, metadata)


def block_rows(
    old: Block, new: Block, gamma: float, terms: bool = False, folds: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of one block: its layer's, then its heads'."""
    first, second = ((one.shape, one.stack, one.rank) for one in (old.groups, new.groups))
    if first != second:
        raise CheckpointError(
            f"layer {old.layer} has {old!r} before and {new!r} after; only equal shapes compare"
        )
    _, sharing = new.groups.stack
    # Half a step is the largest error of rounding; evenly spread, its root mean square is that over
    # the root of 3. What rounding to bfloat16 explains is not shown.
    roundings = [
        rounded
        for block in (old, new)
        for side in zip(block.query_key, (block.plan.query, block.plan.key), strict=True)
        if (rounded := rounding_of(block, *side)) > ROUNDING["BF16"]
    ]
    before, after = (next(block.forms(FOLDED if folds else PLAIN))[1] for block in (old, new))
    shared = block_columns(new.groups, new.plan, PLAIN, distance=0)
    for numbers, columns in (
        ([None], _columns(before.sum(), after.sum(), gamma, terms)),
        (range(old.head_count), _columns(before, after, gamma, terms)),
    ):
        for index, head in enumerate(numbers):
            found = {name: float(column[index]) for name, column in columns.items()}
            values = {name: None if np.isnan(value) else value for name, value in found.items()}
            statuses = {*old.plan.statuses, *new.plan.statuses}
            statuses |= {"unmoved"} if values["directionality"] is None else set()
            statuses |= {"degenerate"} if values["norm"] == 0 else set()
            yield (
                shared
                | values
                | {
                    "head": head,
                    "key_head": None if head is None else head // sharing,
                    "status": joined_statuses(statuses),
                    "rounding": math.hypot(*roundings) / 3**0.5 if roundings else None,
                }
            )


def _columns(
    old: BilinearForm, new: BilinearForm, gamma: float, terms: bool
) -> dict[str, np.ndarray]:
    """Each measure of a form, or of a stack of them, flat."""
    step = new.difference(old)
    norm, new_norm, moved = (np.asarray(form.norm, np.float64) for form in (old, new, step))
    with np.errstate(divide="ignore", invalid="ignore"):
        measures = {
            "norm": norm,
            "moved": moved / norm,
            # ‖M − M₀‖² = ‖M‖² + ‖M₀‖² − 2 ⟨M, M₀⟩, solved for the product.
            "cosine": (norm / new_norm + new_norm / norm - (moved / norm) * (moved / new_norm)) / 2,
            **directionalities(step.moments, gamma)._asdict(),
        }
    if step.is_square:
        measures["symmetry"] = symmetry(step)
    if terms:
        measures |= update_measures(old, new)
    return {name: np.ravel(values) for name, values in measures.items()}


def _differences(rows: pl.DataFrame, headings: dict[str, str]) -> Sheet:
    lines = Sheet.of("layer", *headings.values())
    for row in rows.iter_rows(named=True):
        lines.add(str(row["layer"]), *(_difference_cell(n, row[n]) for n in headings))
    return lines


def _difference_cell(name: str, value: Any) -> str:
    if name == "head":
        return "all" if value is None else str(value)
    if name in UPDATE_TERMS and value is not None:
        return f"{value:.3g}"
    return number(value) if isinstance(value, float | None) else str(value)
