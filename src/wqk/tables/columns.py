"""What a column of a table is; those of a score table, and the measures that add to them.

The order of `COLUMNS` is a contract: a new column is added at the end. Types, headings on the
terminal and in files, what stands under a table, the pages of the documentation, and the value in
files that were written before a column existed, all follow from these records.

A `Measure` is what a scan adds on request, with its own columns. It is declared here and nowhere
else: the option of ``wqk scan``, the columns of tables and files, their place on the terminal and
in the documentation follow from `MEASURES`.
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
        Also the attribute in rows, files and JSON.
    type
        ``str``, ``int`` or ``float``.
    meaning
        In a few words.
    heading
        On a terminal and in Markdown; without one, the column is only in files for programs.
    latex
        The heading in LaTeX, if it is a formula there.
    missing
        The value in files that lack the column; most often, none is known.
    chance
        The column that holds what chance would give.
    """

    name: str
    type: type[str] | type[int] | type[float]
    meaning: str
    heading: str = ""
    latex: str = ""
    missing: str | int | None = None
    chance: str = ""


COLUMNS = (
    Column("checkpoint", str, "the checkpoint's name: a path, a Hub id, a class"),
    Column("revision", str, "its revision on the Hub"),
    Column("step", int, "the training step, where the checkpoint is one of several"),
    Column("model_type", str, "as in the configuration"),
    Column("family", str, "the family that says which tensors are queries and keys"),
    Column("parameters", int, "number of parameters that the checkpoint holds"),
    Column("stack", str, "encoder, decoder, vision, …"),
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
    Column("symmetry_between_heads", float, "the part of symmetry between different heads"),
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
UPDATE_COLUMNS = tuple(
    Column(f"{order}_order_{name}", float, f"{what} of the update's term of {order} order")
    for order in ("first", "second")
    for name, what in (("norm", "norm"), ("spectral_norm", "σ₁"), ("stable_rank", "stable rank"))
)

# What a monitor measures of attention logits; see `wqk.live.logits`.
LOGIT_COLUMNS = (
    Column("max_logit", float, "the largest logit, before a soft cap"),
    Column("logit_std", float, "standard deviation of the logits"),
    Column("attention_entropy", float, "mean entropy of a token's attention, in nats"),
    Column("attention_top_share", float, "mean of a token's largest attention weight"),
)


@dataclass(frozen=True)
class Measure:
    """Columns that a scan adds on request.

    Attributes
    ----------
    name
        In Python's ``measures``; ``wqk scan --name`` if there is ``help``.
    columns
        What it adds.
    of
        A ``form``: computed from every form or stack of forms. A ``block``: from the weights of a
        block of queries and keys, for the layer and its heads, by distance.
    compute
        From a form to its values by column, or from a block and distances to the values of the
        layer, and then of its heads (1 + H), by distance and column.
    help
        Of the option; empty if the measure is asked for in Python alone.
    lacking
        Why a block has no such values; empty if it has.
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
    null = null_spectrum(*shape)
    by_chance = {
        "stable_rank_null": null.stable_rank,
        "effective_rank_null": null.effective_rank,
        "eigenvalue_positivity_spread": null.eigenvalue_positivity_spread,
    }
    return {
        **{name: value for name, value in spectrum(form)._asdict().items() if value is not None},
        "spectral_norm_null": null_spectral_norm(*shape) * form.norm,
        **{name: 0 * form.norm + v for name, v in by_chance.items() if v is not None},
    }


def _ceiling(block: Block, distances: Sequence[int]) -> dict[int, dict[str, ndarray]]:
    """Return a layer's lengths and ceilings are the largest of its heads'."""
    import numpy as np

    bounds = block.ceiling(distances)
    if bounds is None:
        return {}
    return {
        distance: {
            name: np.concatenate([heads.max(keepdims=True), heads])
            for name, heads in (
                ("query_norm", bounds.query_norm),
                ("key_norm", bounds.key_norm),
                ("score_ceiling", bounds.at_distance[distance]),
                ("score_ceiling_any_distance", bounds.any_distance),
            )
        }
        for distance in distances
    }


def _without_ceiling(plan: AttentionPlan) -> str:
    from wqk.attention.measures import lacks_ceiling

    return lacks_ceiling(plan)


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
    ),
    Column("spectral_norm_null", float, "σ₁ of factors with independent entries"),
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
            ),
            Column("stable_rank_null", float, "of factors with independent entries"),
            Column(
                "effective_rank",
                float,
                "how many directions are in use: exp(−Σ p log p), p = σ / Σσ",
                "effective rank",
                chance="effective_rank_null",
            ),
            Column("effective_rank_null", float, "of factors with independent entries"),
            Column(
                "eigenvalue_positivity",
                float,
                "1 if every token attends to its like, −1 if to its opposite: Σ Re λ / Σ |λ|",
                "positivity",
                chance="eigenvalue_positivity_spread",
            ),
            Column("eigenvalue_positivity_spread", float, "standard deviation by chance, about 0"),
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
    ),
)


def chosen(names: Collection[str], circuit: str = "qk") -> list[Measure]:
    """Return the measures of these names, in the order of the list.

    Raises
    ------
    CheckpointError
        There is no such measure, or it is undefined for this circuit.

    Examples
    --------
    >>> [measure.of for measure in chosen(["bands", "spectrum"])]
    ['form', 'block']
    """
    known = [measure.name for measure in MEASURES]
    require_list("measures", names, ["ceiling"])
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise CheckpointError(f"no measure {name!r}; measures are {listed}")
    found = [measure for measure in MEASURES if measure.name in names]
    for measure in found:
        if measure.of == "block" and circuit != "qk":
            raise CheckpointError(
                f"the measure {measure.name!r} exists only for queries and keys; leave it out with "
                f"circuit={circuit!r}"
            )
    return found


def with_block_measures(
    rows: list[dict[str, Any]], block: Block, distances: Sequence[int], measures: Sequence[Measure]
) -> list[dict[str, Any]]:
    """Return a block's rows with the measures that need more of it than its forms."""
    found = [one.compute(block, distances) for one in measures if one.of == "block"]
    return [
        row
        | {
            name: float(values[0 if row.get("head") is None else 1 + row["head"]])
            for by_distance in found
            for name, values in by_distance.get(row["distance"], {}).items()
        }
        for row in rows
    ]


def measure_metadata(plans: Sequence[AttentionPlan], measures: Sequence[Measure]) -> dict[str, Any]:
    """Which measures a table contains, and why stacks lack one: ``no_ceiling``."""
    metadata: dict[str, Any] = {"measures": [one.name for one in measures]} if measures else {}
    for measure in measures:
        reasons = {plan.where: why for plan in plans if (why := measure.lacking(plan))}
        metadata |= {f"no_{measure.name}": reasons} if reasons else {}
    return metadata
