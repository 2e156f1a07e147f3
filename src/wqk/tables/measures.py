"""What a scan measures on request, each measure with its own columns.

A measure is declared here and nowhere else: the option of ``wqk scan``, the columns of tables and
files, their place on the terminal and in the documentation follow from `MEASURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wqk.errors import CheckpointError
from wqk.tables.columns import Column

if TYPE_CHECKING:
    from numpy import ndarray

    from wqk.attention import Block
    from wqk.families import AttentionPlan
    from wqk.forms import BilinearForm


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
    """A layer's lengths and ceilings are the largest of its heads'."""
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
    from wqk.attention.ceilings import lacks_ceiling

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
    Column("spectral_norm", float, "the largest score of two vectors of length 1",
           "σ₁", r"$\sigma_1$", chance="spectral_norm_null"),
    Column("spectral_norm_null", float, "σ₁ of factors with independent entries"),
)  # fmt: skip

MEASURES = (
    Measure("spectral_norm", SPECTRAL_NORM, "form", _spectral_norm),
    Measure(
        "spectrum",
        (
            *SPECTRAL_NORM,
            Column("stable_rank", float, "how many directions carry the norm: ‖M‖² / σ₁²",
                   "stable rank", chance="stable_rank_null"),
            Column("stable_rank_null", float, "of factors with independent entries"),
            Column("effective_rank", float, "how many directions are in use: exp(−Σ p log p), "
                   "p = σ / Σσ", "effective rank", chance="effective_rank_null"),
            Column("effective_rank_null", float, "of factors with independent entries"),
            Column("eigenvalue_positivity", float, "1 if every token attends to its like, −1 if to "
                   "its opposite: Σ Re λ / Σ |λ|", "positivity",
                   chance="eigenvalue_positivity_spread"),
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
            Column("score_ceiling_any_distance", float, "the largest score at any distance",
                   "any distance"),
        ),
        "block",
        _ceiling,
        "Add the largest score that any input can produce.",
        _without_ceiling,
    ),
    Measure(
        "bands",
        (Column("rotary_low_share", float, "share of the slower half of the rotary planes",
                "rotary low share"),),
        "block",
        _bands,
        "Add the share of slow rotary planes.",
    ),
)  # fmt: skip


def chosen(names: Collection[str], circuit: str = "qk") -> list[Measure]:
    """The measures of these names, in the order of the list.

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
    """A block's rows with the measures that need more of it than its forms."""
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
        reasons = {plan.stack: why for plan in plans if (why := measure.lacking(plan))}
        metadata |= {f"no_{measure.name}": reasons} if reasons else {}
    return metadata
