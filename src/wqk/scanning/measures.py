"""Measures that a scan adds on request, each with its own columns.

=================  ==============================================================================
measure            what its columns hold
=================  ==============================================================================
``spectral_norm``  σ₁, and its expected value by chance
``spectrum``       σ₁, stable and effective rank, eigenvalue positivity; by chance
``ceiling``        largest lengths of queries and keys, largest score at a distance and at any
``bands``          share of the slower rotary planes
=================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from wqk.attention import Block
from wqk.attention.ceilings import lacks_ceiling
from wqk.attention.coordinates import Coordinates
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.forms.spectra import null_spectral_norm, null_spectrum, spectral_norm, spectrum
from wqk.tables.schema import MEASURES


def check_measures(measures: Collection[str], circuit: str) -> None:
    """Raise `CheckpointError` for unknown measures, and those undefined for this circuit."""
    unknown = [name for name in measures if name not in MEASURES]
    if unknown:
        raise CheckpointError(
            f"no measure {unknown[0]!r}; measures are {', '.join(map(repr, MEASURES))}"
        )
    if circuit != "qk" and {"ceiling", "bands"} & set(measures):
        raise CheckpointError(
            "ceilings and rotary bands exist only for queries and keys; leave them out with "
            "circuit='ov'"
        )


def form_measures(form: BilinearForm, measures: Collection[str]) -> dict[str, Any]:
    """The measures that depend only on a form, or a stack of forms, as arrays by column."""
    if not {"spectrum", "spectral_norm"} & set(measures):
        return {}
    shape = (*form.shape, form.rank)
    largest = {"spectral_norm_null": null_spectral_norm(*shape) * form.norm}
    if "spectrum" not in measures:
        return {"spectral_norm": spectral_norm(form), **largest}
    null = null_spectrum(*shape)
    found = spectrum(form)
    by_chance = {
        "stable_rank_null": null.stable_rank,
        "effective_rank_null": null.effective_rank,
        "eigenvalue_positivity_spread": null.eigenvalue_positivity_spread,
    }
    values = {name: value for name, value in found._asdict().items() if value is not None}
    constants = {n: 0 * form.norm + v for n, v in by_chance.items() if v is not None}
    return {**values, **largest, **constants}


def with_block_measures(
    rows: list[dict[str, Any]],
    block: Block,
    coordinates: Coordinates,
    measures: Collection[str],
) -> list[dict[str, Any]]:
    """A block's rows with the measures that need more of it than its form.

    A layer's lengths and ceilings are the largest of its heads'.
    """
    # By distance and name, the layer's value and then those of its heads.
    columns: dict[int, dict[str, np.ndarray]] = {n: {} for n in coordinates.distances}
    bounds = block.ceiling(coordinates.distances) if "ceiling" in measures else None
    for distance, found in columns.items():
        if bounds is not None:
            of_heads = {
                "query_norm": bounds.query_norm,
                "key_norm": bounds.key_norm,
                "score_ceiling": bounds.at_distance[distance],
                "score_ceiling_any_distance": bounds.any_distance,
            }
            for name, heads in of_heads.items():
                found[name] = np.concatenate([heads.max(keepdims=True), heads])
        if "bands" in measures and (block.plan.rotary or block.plan.axial):
            bands = block.bands()
            layer = bands._replace(energies=bands.energies.sum(axis=0, keepdims=True))
            found["rotary_low_share"] = np.concatenate([layer.low_share, bands.low_share])
    places = (0 if row.get("head") is None else 1 + row["head"] for row in rows)
    return [
        row | {name: float(values[n]) for name, values in columns[row["distance"]].items()}
        for row, n in zip(rows, places, strict=True)
    ]


def measure_metadata(plans: Sequence[AttentionPlan], measures: Collection[str]) -> dict[str, Any]:
    """Which measures a table contains, and why some rows lack one."""
    if not measures:
        return {}
    reasons = {plan.stack: lacks_ceiling(plan) for plan in plans if lacks_ceiling(plan)}
    missing = {"no_ceiling": reasons} if "ceiling" in measures and reasons else {}
    return {"measures": list(measures), **missing}
