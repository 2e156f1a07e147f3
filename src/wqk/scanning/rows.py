"""From one block's forms to its rows of the score table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from wqk._typing import Array
from wqk.attention.coordinates import Coordinates, lacks_norm
from wqk.checkpoints import Checkpoint
from wqk.errors import FormError
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.forms.kernels import on_host
from wqk.forms.outliers import directionalities
from wqk.forms.randomness import looks_random
from wqk.forms.scores import head_terms
from wqk.tables.columns import COLUMNS
from wqk.tables.measures import Measure
from wqk.tables.schema import joined_statuses


def score_heads(
    stack: BilinearForm,
    layer: BilinearForm | None = None,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    measures: Sequence[Measure] = (),
) -> list[dict[str, Any]]:
    """Scores of a layer and, with ``heads``, of each head after it: what follows from the forms.

    ``stack`` has the layer's heads as (G, H/G), ``layer`` their sum, if already computed.
    """
    layer = stack.sum() if layer is None else layer
    scores = {name: float(value) for name, value in _scores(layer, gamma, measures).items()}
    row = {"rank": layer.rank, **scores}
    if layer.is_square:
        terms = head_terms(stack, layer)
        row |= {
            "symmetry_within_heads": float(terms.within),
            "symmetry_between_heads": float(terms.between),
            "symmetry_within_random": float(terms.within_random),
        }
    if not heads:
        return [row]
    columns = {
        name: np.ravel(on_host(values)) for name, values in _scores(stack, gamma, measures).items()
    }
    _, sharing = stack.stack
    return [row] + [
        {
            "head": head,
            "key_head": head // sharing,
            "rank": stack.rank,
            **{name: float(values[head]) for name, values in columns.items()},
        }
        for head in range(math.prod(stack.stack))
    ]


def block_columns(
    form: BilinearForm, plan: AttentionPlan, coordinates: Coordinates, distance: int
) -> dict[str, Any]:
    """The columns that all rows of a block at one distance share; heads are stacked (G, H/G)."""
    key_heads, sharing = form.stack
    return {
        "family": plan.family,
        "stack": plan.stack,
        "kind": plan.kind,
        "window": plan.window,
        "layer": plan.layer,
        "heads": key_heads * sharing,
        "key_heads": key_heads,
        "d_query": form.widths[0],
        "d_key": form.widths[1],
        "applications": plan.applications,
        "circuit": coordinates.circuit,
        "distance": distance,
    }


def with_status(
    rows: list[dict[str, Any]],
    plan: AttentionPlan,
    coordinates: Coordinates,
    weights: Sequence[Array],
) -> list[dict[str, Any]]:
    """The rows of one block, the layer's own first, with their status.

    ``weights`` are the two that the forms are made of; none if these are not a model's own.
    """
    statuses = {*plan.statuses, *(["partial"] if lacks_norm(plan, coordinates) else [])}
    score = rows[0].get("symmetry")
    if len(weights) and score is not None and looks_random(weights, score, weights[0].shape[-1]):
        statuses.add("random-looking")

    def status(row: dict[str, Any]) -> str:
        is_zero = math.isnan(row["directionality"])
        return joined_statuses(
            statuses - {"random-looking"} | {"degenerate"} if is_zero else statuses
        )

    return [{**row, "status": status(row)} for row in rows]


def checkpoint_columns(checkpoint: Checkpoint) -> dict[str, Any]:
    """The columns that all rows of a checkpoint share."""
    model_type = checkpoint.config.get("model_type")
    return {
        "checkpoint": checkpoint.name,
        "revision": checkpoint.revision,
        "step": checkpoint.step,
        "model_type": (
            model_type.encode("utf-8", "replace").decode() if isinstance(model_type, str) else None
        ),
        "parameters": checkpoint.parameters,
    }


# The scores that a form has as attributes, named as their columns; directionality takes a gamma.
ATTRIBUTES = tuple(
    column.name
    for column in COLUMNS
    if column.type is float
    and hasattr(BilinearForm, column.name)
    and not column.name.startswith("directionality")
)


def _scores(form: BilinearForm, gamma: float, measures: Sequence[Measure]) -> dict[str, Any]:
    """Every score of a form or a stack; some only if both sides are the same space."""
    found: dict[str, Any] = {}
    for name in ATTRIBUTES:
        with suppress(FormError):
            found[name] = getattr(form, name)
    found |= directionalities(form.moments, gamma)._asdict()
    for measure in measures:
        found |= measure.compute(form) if measure.of == "form" else {}
    return found
