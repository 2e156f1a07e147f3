"""Differences of the forms of two checkpoints, in size and direction."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import polars as pl
from rich.text import Text

from wqk._console import counted, farthest, kind_in_words, number
from wqk._style import current, style
from wqk._version import __version__
from wqk.attention import Block
from wqk.attention.factors import FOLDED, PLAIN, lacks_norm
from wqk.attention.rounding import ROUNDING, rounding_of
from wqk.errors import CheckpointError, TableError, called_as
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.forms.chaining import update_measures
from wqk.forms.kernels import directionalities
from wqk.forms.scores import symmetry
from wqk.model import Model
from wqk.model import open as open_model
from wqk.scanning.scan import block_columns, checkpoint_columns
from wqk.tables.columns import COLUMNS, UPDATE_COLUMNS, Column
from wqk.tables.rendering import head_maps, label, title
from wqk.tables.schema import UPDATE_TERMS, conditions, joined_statuses, records, types
from wqk.tables.score_table import Table
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARED = ("checkpoint", "revision", "step", "model_type", "family")
_PLACE = ("stack", "kind", "layer", "head", "key_head", "heads", "key_heads", "d_query", "d_key")

# Columns of earlier versions, and their present names.
FORMER_NAMES = {
    "before": "reference",
    "before_revision": "reference_revision",
    "before_step": "reference_step",
}

DIFFERENCE_COLUMNS = (
    Column("reference", str, "the checkpoint that the other one is compared with"),
    Column("reference_revision", str, "revision of the reference on the Hub"),
    Column("reference_step", int, "training step of the reference"),
    *(column for column in COLUMNS if column.name in (*_SHARED, *_PLACE)),
    Column("norm", float, "norm of the reference's form", "norm", r"$\lVert W_{qk} \rVert$"),
    Column(
        "moved",
        float,
        "norm of the difference over the norm of the reference",
        "moved",
        r"$\lVert \Delta W_{qk} \rVert / \lVert W_{qk} \rVert$",
    ),
    Column("cosine", float, "cosine between the two forms", "cosine"),
    Column("symmetry", float, "symmetry of the difference", "symmetry", "$s$"),
    Column(
        "directionality",
        float,
        "directionality of the difference, by Definition 3.2",
        "directionality",
        "$d$",
    ),
    Column(
        "directionality_excess",
        float,
        "directionality of the difference, as published",
        "(excess)",
        "$d$ (excess)",
    ),
    Column("status", str, "reasons to doubt the scores; ok without a reason", "status"),
    Column(
        "rounding",
        float,
        "expected value of moved where only quantization changed the weights",
        "rounding",
    ),
    Column("beside", float, "value of moved of another version", "beside"),
)
DIFFERENCE_SCHEMA = types(DIFFERENCE_COLUMNS)


@dataclass(frozen=True, eq=False, repr=False)
class DifferenceTable(Table):
    """Differences of the forms of two checkpoints, one row for each layer and for each head.

    ``norm`` is the norm of the reference's form, ``moved`` the norm of the difference divided by
    ``norm``, and ``cosine`` the cosine between the two forms. ``symmetry`` and ``directionality``
    are scores of the difference, and null for a zero difference. For quantized weights,
    ``rounding`` is the value of ``moved`` that rounding alone would cause; norms before the block
    are folded in, because AWQ moves factors between norm and weight. ``beside`` is the value of
    ``moved`` for another version of the reference. On request, columns for the terms of first and
    second order in the factors follow.

    A table with ``rows_shown`` prints only this number of rows, the result of `farthest`.
    """

    declared = DIFFERENCE_COLUMNS
    further = UPDATE_COLUMNS
    needed = ("layer", "moved")
    former_names = FORMER_NAMES
    synonyms: ClassVar[Mapping[str, str]] = {
        "heatmap": "plot()",
        "summary": "result",
        **dict.fromkeys(("best", "largest", "top", "worst"), "farthest(5)"),
    }

    rows_shown: int | None = None

    def __post_init__(self) -> None:
        columns = {*self.frame.columns}
        renamed = {
            former: name
            for former, name in FORMER_NAMES.items()
            if former in columns and name not in columns
        }
        object.__setattr__(self, "frame", self.frame.rename(renamed))
        super().__post_init__()

    @property
    def result(self) -> str:
        """The result, in a few sentences.

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
        measured = layers.filter(pl.col("moved").is_finite()).sort("moved")
        if not measured.height:
            return "How far the layers moved is not known: the reference's forms have no norm."
        several = len(layers.select("stack", "kind").unique()) > 1
        sentences = [_farthest_layer(measured, several)]
        shares_of_rounding = (measured["moved"] / measured["rounding"]).drop_nulls()
        if len(shares_of_rounding):
            largest = shares_of_rounding.to_numpy().max()
            sentences.append(f"That is at most {largest:.2g} times what quantization alone moves.")
        heads = self.heads.frame.filter(pl.col("moved").is_finite())
        if heads.height:
            folds = bool(self.metadata.get("folded_norms"))
            sentences.append(_farthest_heads(heads, several, folds))
        if heads.height:
            sentence = self._comparison_with_version(self.heads.frame, "heads")
        else:
            sentence = self._comparison_with_version(layers, "layers")
        if sentence:
            sentences.append(sentence)
        return " ".join(sentences)

    def _comparison_with_version(self, frame: pl.DataFrame, noun: str) -> str:
        """Sentence about the other version, ``beside``; empty without it."""
        compared = frame.drop_nulls("beside")
        if not compared.height:
            return ""
        nearer = int((compared["beside"] < compared["moved"]).sum())
        changed = compared.filter(pl.col("moved") > 0)
        ratio = float(np.median(changed["beside"] / changed["moved"]))
        name = self.metadata.get("beside", "The other version")
        return (
            f"{name} moved less in {nearer} of {compared.height} {noun}; "
            f"in the median, {ratio:.2g} times as far."
        )

    def farthest(self, count: int) -> Self:
        """Return the rows with the largest ``moved``, largest first; rows of heads, if any.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.diff(wqk.demo_model("encoder"), wqk.demo_model("decoder"))
        >>> table.farthest(2).frame.select("layer", "head", "moved").rows()
        [(0, 1, 2.808...), (3, 2, 1.560...)]
        """
        rows = self.heads.frame if len(self.heads) else self.frame
        moved = pl.col("moved").fill_nan(None)
        sorted_rows = rows.sort(moved, descending=True, nulls_last=True, maintain_order=True)
        return replace(self, frame=sorted_rows.head(count))

    def _first(self, count: int) -> Self:
        return self.farthest(count)

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata and the rows, as ``--json`` prints them."""
        return super().to_dict() | {"rows": records(self._rows_shown())}

    def _rows_shown(self) -> pl.DataFrame:
        """Return the rows that are printed."""
        if self.rows_shown is None:
            return self.frame
        return self.farthest(self.rows_shown).frame

    @current
    def plot(self) -> Figure:
        """Draw the distance of each head, layers down, and of the other version next to it, if any.

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
        model_by_column = {"moved": rows["checkpoint"][0]}
        if rows["beside"].null_count() < rows.height:
            model_by_column["beside"] = self.metadata.get("beside", "beside")
        origin = str(rows["reference"][0]).rpartition("/")[2]
        titles = {
            column: f"{origin} → {str(model).rpartition('/')[2]}"
            for column, model in model_by_column.items()
        }
        parts = []
        for part in rows.partition_by("stack", "kind", maintain_order=True):
            parts.append((f"{part['stack'][0]}, {kind_in_words(part['kind'][0])}", part))
        values = np.concatenate([rows[column].drop_nulls() for column in titles])
        largest = float(np.nanmax(values, initial=0)) or 1.0
        legend = "moved, relative to the reference's form"
        with style():
            return head_maps(parts, titles, legend, with_numbers=True, vmin=0, vmax=largest)

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield a line for each compared layer or head, at most ``rows_shown`` lines."""
        frame = self._rows_shown()
        if not frame.height:
            yield Text("no rows")
            return
        first_row = frame.row(0, named=True)
        reference = title(
            {"checkpoint": first_row["reference"], "revision": first_row["reference_revision"]}
        )
        yield Text.assemble((reference, "bold"), " → ", (title(first_row), "bold"))
        headings = self._headings()
        unusual = conditions(frame, self.metadata, every=False)
        for rows in frame.partition_by("stack", "kind", maintain_order=True):
            place = f"{rows['stack'][0]} {kind_in_words(rows['kind'][0])}"
            yield Text(" · ".join([str(rows["family"][0]), place, *unusual]))
            yield _sheet(rows, headings)
            for order in ("first", "second"):
                terms = _headings_of_terms(order)
                if not terms.keys() <= {*frame.columns}:
                    continue
                if "head" in headings:
                    terms = {"head": headings["head"], **terms}
                yield Text(f"term of {order} order")
                yield _sheet(rows, terms)
        notes = [
            "norm: of the reference's form; moved: norm of the difference over this norm",
            "symmetry and directionality are the difference's own",
        ]
        if "status" in headings:
            notes.append("unmoved: there is no difference")
        if "beside" in headings:
            notes.append(f"beside: moved, of {self.metadata.get('beside')}")
        yield Text("; ".join(notes), style="dim")
        yield self.result

    def _headings(self) -> dict[str, str]:
        """Headings of the printed columns, without columns that are empty or always ``ok``."""
        headings = {column.name: column.heading for column in self.headed()}
        del headings["layer"], headings["directionality"]
        headings["directionality_excess"] = label("directionality_excess")
        for name in ("head", "status", "rounding", "beside"):
            is_empty = self.frame[name].is_null().all()
            if is_empty or (name == "status" and (self.frame[name] == "ok").all()):
                del headings[name]
        return headings


def _headings_of_terms(order: str) -> dict[str, str]:
    """Headings of the columns of the terms of ``first`` or ``second`` order."""
    headings = {}
    for name in UPDATE_TERMS:
        if name.startswith(order):
            headings[name] = name.removeprefix(f"{order}_order_").replace("_", " ")
    return headings


def _farthest_layer(layers: pl.DataFrame, several: bool) -> str:
    """Sentence about the layer with the largest change; with several stacks, the stack."""
    row = layers.row(-1, named=True)
    stack = f" of the {row['stack']} ({kind_in_words(row['kind'])})" if several else ""
    median = float(np.median(layers["moved"]))
    # Further digits distinguish layers that moved nearly as far.
    digits = 2 if f"{row['moved']:.2g}" != f"{median:.2g}" else 3
    return (
        f"Layer {row['layer']}{stack} moved most, by {row['moved']:.{digits}g} of its norm; half "
        f"of all layers by {median:.{digits}g} or less."
    )


def _farthest_heads(heads: pl.DataFrame, several: bool, folds: bool) -> str:
    """Sentence about the heads that moved most; with their stacks if there are several stacks.

    ``folds`` is true if the forms contain the norms before the block.
    """
    if several:
        name = pl.format("{} {} {}.{}", "stack", "kind", "layer", "head")
    else:
        name = pl.format("{}.{}", "layer", "head")
    names = heads.select(name).to_series()
    terms = "with norms, without biases or positions"
    if not folds:
        terms = "without norms, biases or positions"
    measure = f"the distance of their forms, {terms}"
    return farthest([*zip(heads["moved"], names, strict=True)], measure)


@called_as("wqk.diff(reference, candidate)")
def diff(
    reference: Any,
    candidate: Any,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    terms: bool = False,
    beside: Any = None,
) -> DifferenceTable:
    """Measure how far, and in which direction, the forms moved.

    The models can be a model and its fine-tuned version, two steps of a training run, two seeds of
    one architecture, or a model and its quantized version.

    Parameters
    ----------
    reference, candidate
        Models, or references for `wqk.open`; the folder of a training run for its last step.
    gamma, heads
        As for `wqk.scan`.
    terms
        Whether to add norm, σ₁ and stable rank of the terms of first and second order in the
        factors, ΔA Bᵀ + A ΔBᵀ and ΔA ΔBᵀ.
    beside
        Another version of the reference, such as another quantization; its distances are shown next
        to the candidate's distances.

    Returns
    -------
    DifferenceTable
        A row for each layer, and with ``heads`` one for each head after it.

    Raises
    ------
    CheckpointError
        The models do not have the same attention blocks.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.diff(wqk.demo_model("encoder"), wqk.demo_model("encoder"), heads=False)
    >>> table.frame.select("layer", "moved", "cosine", "symmetry", "status").row(0)
    (0, 0.0, 1.0, None, 'unmoved')
    """
    reference_model = open_model(reference)
    candidate_model = open_model(candidate)
    _require_equal_layers(reference_model, candidate_model)
    shared = checkpoint_columns(candidate_model.checkpoint) | {
        "reference": reference_model.name,
        "reference_revision": reference_model.checkpoint.revision,
        "reference_step": reference_model.checkpoint.step,
    }
    plans = [*reference_model.scored, *candidate_model.scored]
    folds = any(plan.quantized for plan in plans)
    folds = folds and not any(lacks_norm(plan, FOLDED) for plan in plans)
    rows = []
    for plan_pair in zip(reference_model.scored, candidate_model.scored, strict=True):
        reference_block = Block(reference_model.checkpoint, plan_pair[0])
        candidate_block = Block(candidate_model.checkpoint, plan_pair[1])
        for row in block_rows(reference_block, candidate_block, gamma, terms, folds):
            if heads or row["head"] is None:
                rows.append({**shared, **row})
    columns = {**DIFFERENCE_SCHEMA, **(UPDATE_TERMS if terms else {})}
    frame = pl.DataFrame(rows, schema=columns, strict=False)
    metadata = {"wqk": __version__, "gamma": gamma, "folded_norms": folds}
    if beside is not None:
        version = open_model(beside)
        differences = diff(reference_model, version, gamma=gamma, heads=heads)
        frame = frame.with_columns(beside=differences.frame["moved"])
        metadata["beside"] = version.name
    return DifferenceTable(frame, metadata)


def _layer_title(plan: AttentionPlan) -> str:
    """Return the stack, the attention and the layer of a block, for messages."""
    return f"{plan.rule.stack} {plan.what}, layer {plan.layer}"


def _require_equal_layers(reference: Model, candidate: Model) -> None:
    """Raise `CheckpointError` unless two models have the same blocks in the same order."""
    reference_layers = map(_layer_title, reference.scored)
    candidate_layers = map(_layer_title, candidate.scored)
    for reference_layer, candidate_layer in zip_longest(reference_layers, candidate_layers):
        if reference_layer == candidate_layer:
            continue
        if reference_layer is None:
            difference = f"only the candidate has {candidate_layer}"
        elif candidate_layer is None:
            difference = f"only the reference has {reference_layer}"
        else:
            difference = f"the reference has {reference_layer}, the candidate {candidate_layer}"
        raise CheckpointError(
            f"{reference.name} and {candidate.name}: the two cannot be compared layer by "
            f"layer; {difference}; wqk scan REFERENCE CANDIDATE, or wqk.scan([reference, "
            "candidate]), scores both"
        )


def block_rows(
    reference: Block, candidate: Block, gamma: float, terms: bool = False, folds: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one block: the row of the layer, then the rows of the heads."""
    shapes = [(x.shape, x.stack, x.rank) for x in (reference.groups, candidate.groups)]
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            f"layer {reference.layer} has {reference!r} before and {candidate!r} after; "
            "only equal shapes compare"
        )
    coordinates = FOLDED if folds else PLAIN
    _, reference_form = next(reference.forms(coordinates))
    _, candidate_form = next(candidate.forms(coordinates))
    _, heads_per_key_head = candidate.groups.stack
    statuses = {*reference.plan.statuses, *candidate.plan.statuses}
    shared = block_columns(candidate.groups, candidate.plan, PLAIN, distance=0)
    shared["rounding"] = _expected_rounding(reference, candidate)

    layer_columns = _columns(reference_form.sum(), candidate_form.sum(), gamma, terms)
    layer_row = {"head": None, "key_head": None, **_scores(layer_columns, 0, statuses)}
    yield shared | layer_row
    head_columns = _columns(reference_form, candidate_form, gamma, terms)
    for head in range(reference.head_count):
        place = {"head": head, "key_head": head // heads_per_key_head}
        yield shared | place | _scores(head_columns, head, statuses)


def _scores(
    columns: Mapping[str, np.ndarray], position: int, statuses: Collection[str]
) -> dict[str, Any]:
    """Return the values of one row, with None instead of NaN, and the row's status."""
    scores: dict[str, Any] = {}
    for name, column in columns.items():
        value = float(column[position])
        scores[name] = None if math.isnan(value) else value
    row_statuses = {*statuses}
    if scores["directionality"] is None:
        row_statuses.add("unmoved")
    if scores["norm"] == 0:
        row_statuses.add("degenerate")
    scores["status"] = joined_statuses(row_statuses)
    return scores


def _expected_rounding(reference: Block, candidate: Block) -> float | None:
    """Return the distance that rounding of the formats explains; None if negligible.

    Rounding of 16-bit floats, and of wider types, is negligible.
    """
    half_steps = []
    for block in (reference, candidate):
        plans = (block.plan.query, block.plan.key)
        for factor, plan in zip(block.query_key, plans, strict=True):
            half_step = rounding_of(block, factor, plan)
            if half_step > ROUNDING["BF16"]:
                half_steps.append(half_step)
    if not half_steps:
        return None
    # An error that is spread evenly over ± half a step has a root mean square of half a step / √3.
    return math.hypot(*half_steps) / math.sqrt(3)


def _columns(
    reference: BilinearForm, candidate: BilinearForm, gamma: float, terms: bool
) -> dict[str, np.ndarray]:
    """Return all measures of one form, or of a stack of forms, each as a flat array."""
    difference = candidate.difference(reference)
    norm = np.asarray(reference.norm, np.float64)
    candidate_norm = np.asarray(candidate.norm, np.float64)
    distance = np.asarray(difference.norm, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        # ‖M − M₀‖² = ‖M‖² + ‖M₀‖² − 2 ⟨M, M₀⟩, solved for the product.
        moved = distance / norm
        ratios = norm / candidate_norm + candidate_norm / norm
        cosine = (ratios - moved * (distance / candidate_norm)) / 2
        measures = {
            "norm": norm,
            "moved": moved,
            "cosine": cosine,
            **directionalities(difference.moments, gamma)._asdict(),
        }
    if difference.is_square:
        measures["symmetry"] = symmetry(difference)
    if terms:
        measures |= update_measures(reference, candidate)
    return {name: np.ravel(values) for name, values in measures.items()}


def _sheet(rows: pl.DataFrame, headings: dict[str, str]) -> Sheet:
    """Return a line for each row, with the columns of the headings."""
    sheet = Sheet.of("layer", *headings.values())
    for row in rows.iter_rows(named=True):
        cells = [_cell_text(name, row[name]) for name in headings]
        sheet.add(str(row["layer"]), *cells)
    return sheet


def _cell_text(name: str, value: Any) -> str:
    """Return the text of a value of a column."""
    if name == "head":
        return "all" if value is None else str(value)
    if name in UPDATE_TERMS and value is not None:
        return f"{value:.3g}"
    if value is None or isinstance(value, float):
        return number(value)
    return str(value)
