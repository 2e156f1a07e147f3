"""How far, and in which direction, the forms of one checkpoint have moved from another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._typing import FilePath
from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.forms.scores import directionality, symmetry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.attention import Attention
    from wqk.forms import BilinearForm

SCHEMA = {
    "stack": pl.String(),
    "kind": pl.String(),
    "layer": pl.Int64(),
    "head": pl.Int64(),
    "norm": pl.Float64(),
    "moved": pl.Float64(),
    "cosine": pl.Float64(),
    "symmetry": pl.Float64(),
    "directionality": pl.Float64(),
    "directionality_excess": pl.Float64(),
}


def diff(
    before: Any, after: Any, *, gamma: float = 2.0, family: FilePath | None = None
) -> pl.DataFrame:
    """Compare the forms of two checkpoints of one architecture, such as a model and its child.

    Parameters
    ----------
    before, after
        As for `wqk.open_checkpoint`.
    gamma, family
        As for `wqk.scan`.

    Returns
    -------
    polars.DataFrame
        A row for each layer and, with ``head`` filled in, for each head: ``norm`` of the form
        before; ``moved``, the norm of the difference over it; ``cosine`` between the two forms; and
        the scores of the difference after − before itself.

    Raises
    ------
    CheckpointError
        The two do not have the same attentions.

    Examples
    --------
    >>> import wqk
    >>> frame = wqk.diff(wqk.demo_model("encoder"), wqk.demo_model("encoder"))
    >>> frame["moved"].max(), frame["cosine"].round(6).unique().to_list()
    (0.0, [1.0])
    """
    old, new = open_checkpoint(before), open_checkpoint(after)
    old_plans, new_plans = attention_plans(old, family), attention_plans(new, family)
    places = [[(p.rule.stack, p.kind, p.layer) for p in plans] for plans in (old_plans, new_plans)]
    if places[0] != places[1]:
        raise CheckpointError(
            f"{old.name} and {new.name} cannot be compared: they have {len(old_plans)} and "
            f"{len(new_plans)} attention blocks, or different ones"
        )
    rows = [
        row
        for old_plan, new_plan in zip(old_plans, new_plans, strict=True)
        for row in _rows(load_attention(old, old_plan), load_attention(new, new_plan), gamma)
    ]
    return pl.DataFrame(rows, schema=SCHEMA, strict=False)


def _rows(old: Attention, new: Attention, gamma: float) -> Iterator[dict[str, Any]]:
    """The rows of one block: its layer's, then its heads'."""
    shapes = [(block.query.weight.shape, block.key.weight.shape) for block in (old, new)]
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            f"layer {old.layer} has {old!r} before and {new!r} after; only equal shapes compare"
        )
    place = {"stack": old.plan.stack, "kind": old.plan.kind, "layer": old.layer}
    for heads, columns in (
        ([None], _columns(old.form, new.form, gamma)),
        (range(old.head_count), _columns(old.heads, new.heads, gamma)),
    ):
        for index, head in enumerate(heads):
            yield {**place, "head": head, **{name: float(c[index]) for name, c in columns.items()}}


def _columns(old: BilinearForm, new: BilinearForm, gamma: float) -> dict[str, np.ndarray]:
    """Each measure of a form, or of a stack of them, flat."""
    step = new.difference(old)
    norm, new_norm = np.asarray(old.norm, np.float64), np.asarray(new.norm, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        measures = {
            "norm": norm,
            "moved": step.norm / norm,
            # ‖M − M₀‖² = ‖M‖² + ‖M₀‖² − 2 ⟨M, M₀⟩, solved for the product.
            "cosine": (norm**2 + new_norm**2 - np.asarray(step.norm) ** 2) / (2 * norm * new_norm),
            "directionality": directionality(step, gamma, "norm"),
            "directionality_excess": directionality(step, gamma, "excess"),
        }
    if step.is_square:
        measures["symmetry"] = symmetry(step)
    return {name: np.ravel(values) for name, values in measures.items()}
