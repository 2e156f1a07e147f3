"""Columns of score tables, and measures that add columns on request, as records.

The order of `COLUMNS` is a contract: a new column is added at the end. Everything else about a
column follows from its record: its type, its headings on the terminal and in files, the definition
below a table, the pages of the documentation, and the value in files that are older than the
column.

A `Measure` has further columns; a scan adds them on request. A measure is declared only in
`MEASURES`: the option of ``wqk scan``, the columns of tables and files, and their place on the
terminal and in the documentation follow from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wqk.errors import CheckpointError, require_list

if TYPE_CHECKING:
    from numpy import ndarray

    from wqk.attention import Block
    from wqk.families import AttentionPlan
    from wqk.forms import BilinearForm


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes
    ----------
    name
        Name of the column in rows, files and JSON.
    type
        ``str``, ``int`` or ``float``.
    meaning
        Definition in a few words.
    heading
        Heading on a terminal and in Markdown. A column without a heading is only in files for
        programs.
    latex
        Heading in LaTeX, if a formula.
    missing
        Value in files that lack the column.
    chance
        Name of the column with the value by chance, in parentheses after the value for people.
    digits
        Significant digits in Markdown and LaTeX, of values that range over magnitudes; 0 for three
        decimals.
    """

    name: str
    type: type[str] | type[int] | type[float]
    meaning: str
    heading: str = ""
    latex: str = ""
    missing: str | int | None = None
    chance: str = ""
    digits: int = 0


COLUMNS = (
    Column("checkpoint", str, "the checkpoint's name: a path, a Hub id, a class"),
    Column("revision", str, "its revision on the Hub"),
    Column("step", int, "the training step, where the checkpoint is one of several"),
    Column("model_type", str, "as in the configuration"),
    Column("family", str, "the family that says which tensors are queries and keys"),
    Column("parameters", int, "number of parameters that the checkpoint holds"),
    Column("stack", str, "encoder, decoder, vision, …", missing="unknown"),
    Column("kind", str, "self- or cross-attention", missing="self"),
    Column("window", str, "tokens that local attention reaches", "window"),
    Column("layer", int, "from 0, within its stack", "layer"),
    Column("head", int, "from 0; none in the row of a whole layer", "head"),
    Column("key_head", int, "the key head that it shares"),
    Column("heads", int, "query heads of the layer"),
    Column("key_heads", int, "key heads of the layer"),
    Column("rank", int, "largest rank of the form, from its factors"),
    Column("d_query", int, "width of the side of the queries"),
    Column("d_key", int, "width of the side of the keys"),
    Column("applications", int, "how often a shared layer is applied", missing=1),
    Column("circuit", str, "qk, or ov for values and outputs", missing="qk"),
    Column("distance", int, "from key to query in tokens (rotary models)", missing=0),
    Column("norm", float, "Frobenius norm of the form", "norm", r"$\lVert W_{qk} \rVert$"),
    Column(
        "symmetry",
        float,
        "1 if the form is symmetric, −1 if skew-symmetric, about 0 if untrained",
        "symmetry",
        "$s$",
    ),
    Column(
        "symmetry_null",
        float,
        "symmetry that is expected by chance, with random signs of the rows",
        "null",
        "$s_0$",
    ),
    Column(
        "symmetry_within_heads",
        float,
        "the part of symmetry within single heads",
        "in heads",
        "$s$ in heads",
    ),
    Column(
        "symmetry_between_heads",
        float,
        "the part of symmetry between different heads",
        "between",
        "$s$ between heads",
    ),
    Column(
        "symmetry_within_random",
        float,
        "the part within heads, if the rank dimensions were assigned to heads at random",
        "(random)",
    ),
    Column(
        "directionality",
        float,
        "by Definition 3.2: norms beyond mean + gamma · standard deviation, summed over rows "
        "(R) and columns (C), as (R − C) / (R + C); below 0 where columns dominate",
        "directionality",
        "$d$",
    ),
    Column(
        "directionality_excess",
        float,
        "directionality as published: sums what these norms have beyond the threshold",
        "(excess)",
        "$d$ (excess)",
    ),
    Column("status", str, "why the scores are to be doubted; ok if nothing is known", "status"),
)

# The terms of first and second order of an update; see `wqk.forms.chaining`.
UPDATE_COLUMNS = (
    Column("first_order_norm", float, "norm of the update's term of first order"),
    Column("first_order_spectral_norm", float, "σ₁ of the update's term of first order"),
    Column("first_order_stable_rank", float, "stable rank of the update's term of first order"),
    Column("second_order_norm", float, "norm of the update's term of second order"),
    Column("second_order_spectral_norm", float, "σ₁ of the update's term of second order"),
    Column("second_order_stable_rank", float, "stable rank of the update's term of second order"),
)

# Measures of attention logits by a monitor; see `wqk.live.logits`.
LOGIT_COLUMNS = (
    Column("max_logit", float, "the largest logit, before a soft cap"),
    Column("logit_std", float, "standard deviation of the logits"),
    Column("attention_entropy", float, "mean entropy of a token's attention, in nats"),
    Column("attention_top_share", float, "mean of a token's largest attention weight"),
    Column("extreme_logit", float, "the logit of largest magnitude, with its sign"),
    Column("first_token_share", float, "mean attention weight of the first token"),
)


@dataclass(frozen=True)
class Measure:
    """Columns that a scan adds on request.

    Attributes
    ----------
    name
        Name in the argument ``measures``, and of the option ``wqk scan --NAME``.
    columns
        The columns that the measure adds.
    of
        ``form`` if the measure is computed from every form or stack of forms; ``block`` if it is
        computed from the weights of a block, for the layer and its heads, by distance.
    compute
        Function of a form that returns values by column; or function of a block and distances that
        returns, by distance and column, the values of the layer and then of its heads, (1 + H,).
    help
        Help of the option. A measure without help has no option and is only available in Python.
    lacking
        Function of a plan that returns the reason why the block lacks these values, or "".
    """

    name: str
    columns: tuple[Column, ...]
    of: Literal["form", "block"]
    compute: Callable[..., Mapping[Any, Any]]
    help: str = ""
    lacking: Callable[[AttentionPlan], str] = lambda plan: ""


def _spectral_norm(form: BilinearForm) -> dict[str, Any]:
    from wqk.forms.spectra import null_spectral_norm, spectral_norm

    null = null_spectral_norm(*form.widths, form.rank) * form.norm
    return {"spectral_norm": spectral_norm(form), "spectral_norm_null": null}


def _spectrum(form: BilinearForm) -> dict[str, Any]:
    from wqk.forms.spectra import null_spectral_norm, null_spectrum, spectrum

    shape = (*form.widths, form.rank)
    values = {name: value for name, value in spectrum(form)._asdict().items() if value is not None}
    values["spectral_norm_null"] = null_spectral_norm(*shape) * form.norm
    null = null_spectrum(*shape)
    by_chance = {
        "stable_rank_null": null.stable_rank,
        "effective_rank_null": null.effective_rank,
        "eigenvalue_positivity_spread": null.eigenvalue_positivity_spread,
    }
    for name, value in by_chance.items():
        if value is not None:
            values[name] = 0 * form.norm + value  # the same value for every form of a stack
    return values


def _ceiling(block: Block, distances: Sequence[int]) -> dict[int, dict[str, ndarray]]:
    """Bound lengths and scores for the layer and its heads; the layer has the heads' maximum."""
    import numpy as np

    bounds = block.ceiling(distances)
    if bounds is None:
        return {}

    def with_layer(heads: ndarray) -> ndarray:
        return np.concatenate([heads.max(keepdims=True), heads])

    by_distance = {}
    for distance in distances:
        by_distance[distance] = {
            "query_norm": with_layer(bounds.query_norm),
            "key_norm": with_layer(bounds.key_norm),
            "score_ceiling": with_layer(bounds.at_distance[distance]),
            "score_ceiling_any_distance": with_layer(bounds.any_distance),
        }
    return by_distance


def _without_ceiling(plan: AttentionPlan) -> str:
    from wqk.attention.measures import lacks_ceiling

    return lacks_ceiling(plan)


def _without_bands(plan: AttentionPlan) -> str:
    return "" if plan.rotary or plan.axial else "no rotary positions"


def _bands(block: Block, distances: Sequence[int]) -> dict[int, dict[str, ndarray]]:
    import numpy as np

    if not (block.plan.rotary or block.plan.axial):
        return {}
    bands = block.bands()
    layer = bands._replace(energies=bands.energies.sum(axis=0, keepdims=True))
    shares = np.concatenate([layer.low_share, bands.low_share])
    return {distance: {"rotary_low_share": shares} for distance in distances}


SPECTRAL_NORM = (
    Column(
        "spectral_norm",
        float,
        "the largest score of two vectors of length 1",
        "σ₁",
        r"$\sigma_1$",
        chance="spectral_norm_null",
        digits=3,
    ),
    Column("spectral_norm_null", float, "σ₁ of factors with independent entries", digits=2),
)

MEASURES = (
    Measure("spectral_norm", SPECTRAL_NORM, "form", _spectral_norm),
    Measure(
        "spectrum",
        (
            *SPECTRAL_NORM,
            Column(
                "stable_rank",
                float,
                "how many directions carry the norm: ‖M‖² / σ₁²",
                "stable rank",
                chance="stable_rank_null",
                digits=3,
            ),
            Column("stable_rank_null", float, "of factors with independent entries", digits=2),
            Column(
                "effective_rank",
                float,
                "how many directions are in use: exp(−Σ p log p), p = σ / Σσ",
                "effective rank",
                chance="effective_rank_null",
                digits=3,
            ),
            Column("effective_rank_null", float, "of factors with independent entries", digits=2),
            Column(
                "eigenvalue_positivity",
                float,
                "1 if every token attends to its like, −1 if to its opposite: Σ Re λ / Σ |λ|",
                "positivity",
                chance="eigenvalue_positivity_spread",
                digits=3,
            ),
            Column(
                "eigenvalue_positivity_spread",
                float,
                "standard deviation by chance, about 0",
                digits=2,
            ),
        ),
        "form",
        _spectrum,
        "Add measures of singular values and eigenvalues.",
    ),
    Measure(
        "ceiling",
        (
            Column("query_norm", float, "the largest length of a query", "query norm"),
            Column("key_norm", float, "the largest length of a key", "key norm"),
            Column("score_ceiling", float, "the largest score at this distance", "score ceiling"),
            Column(
                "score_ceiling_any_distance",
                float,
                "the largest score at any distance",
                "any distance",
            ),
        ),
        "block",
        _ceiling,
        "Add the largest score that any input can produce.",
        _without_ceiling,
    ),
    Measure(
        "bands",
        (
            Column(
                "rotary_low_share",
                float,
                "share of the slower half of the rotary planes",
                "rotary low share",
            ),
        ),
        "block",
        _bands,
        "Add the share of slow rotary planes.",
        _without_bands,
    ),
)


def select_measures(names: Collection[str], circuit: str = "qk") -> list[Measure]:
    """Return the measures of these names, in the order of `MEASURES`.

    Raises
    ------
    CheckpointError
        No measure has this name, or the measure is undefined for this circuit.

    Examples
    --------
    >>> [measure.of for measure in select_measures(["bands", "spectrum"])]
    ['form', 'block']
    """
    known = [measure.name for measure in MEASURES]
    require_list("measures", names, ["ceiling"])
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise CheckpointError(f"no measure {name!r}; measures are {listed}")
    selected = [measure for measure in MEASURES if measure.name in names]
    for measure in selected:
        if measure.of == "block" and circuit != "qk":
            raise CheckpointError(
                f"the measure {measure.name!r} exists only for queries and keys; leave it out with "
                f"circuit={circuit!r}"
            )
    return selected


def with_block_measures(
    rows: list[dict[str, Any]], block: Block, distances: Sequence[int], measures: Sequence[Measure]
) -> list[dict[str, Any]]:
    """Add the measures of whole blocks to the rows of a block."""
    measured = [measure.compute(block, distances) for measure in measures if measure.of == "block"]
    extended = []
    for row in rows:
        place = 0 if row.get("head") is None else 1 + row["head"]  # the layer is in front
        values_of_row = {}
        for by_distance in measured:
            for name, values in by_distance.get(row["distance"], {}).items():
                values_of_row[name] = float(values[place])
        extended.append(row | values_of_row)
    return extended


def measure_metadata(plans: Sequence[AttentionPlan], measures: Sequence[Measure]) -> dict[str, Any]:
    """List the measures of a table, and the reasons why stacks lack a measure: ``no_ceiling``."""
    metadata: dict[str, Any] = {}
    if measures:
        metadata["measures"] = [measure.name for measure in measures]
    for measure in measures:
        reasons = {}
        for plan in plans:
            if reason := measure.lacking(plan):
                reasons[plan.where] = reason
        if reasons:
            metadata[f"no_{measure.name}"] = reasons
    return metadata


def advice_on_measure(name: str) -> str:
    """Return the end of a message about a column that a scan adds on request; else nothing.

    Examples
    --------
    >>> advice_on_measure("score_ceiling"), advice_on_measure("symmetry")
    ('; wqk scan --ceiling adds it, in Python measures=["ceiling"]', '')
    """
    for measure in MEASURES:
        if measure.help and any(column.name == name for column in measure.columns):
            return f'; wqk scan --{measure.name} adds it, in Python measures=["{measure.name}"]'
    return ""
