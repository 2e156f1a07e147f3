"""What an initialization did to each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._console import counted
from wqk.forms.scores import symmetry

if TYPE_CHECKING:
    from wqk.attention import Attention


class LayerScores(NamedTuple):
    """Scores of a layer's form, which includes the gains of query and key norms.

    Attributes
    ----------
    symmetry, trace, norm
        Of W_qk.
    own_score
        Expected attention logit of a token with itself, averaged over heads, if its components are
        independent with unit variance, as after a layer norm: scale · trace / H.
    value_norm
        ‖W_v‖; NaN if values are not a single projection.
    """

    symmetry: float
    trace: float
    norm: float
    own_score: float
    value_norm: float


def layer_scores(attention: Attention, value: np.ndarray | None) -> LayerScores:
    """The current scores of one layer."""
    form = attention.form
    trace = float(form.trace)
    return LayerScores(
        symmetry=float(symmetry(form)),
        trace=trace,
        norm=float(form.norm),
        own_score=attention.plan.scale * trace / attention.head_count,
        value_norm=math.nan if value is None else float(np.linalg.norm(value.astype(np.float64))),
    )


@dataclass(frozen=True)
class LayerChange:
    """One layer's form before and after."""

    stack: str
    layer: int
    before: LayerScores
    after: LayerScores

    @property
    def norm_ratio(self) -> float:
        """‖W_qk‖ after, divided by that before; NaN if that was zero."""
        return self.after.norm / self.before.norm if self.before.norm else math.nan

    @property
    def value_ratio(self) -> float:
        """‖W_v‖ after, divided by that before; NaN if that was zero or is unknown."""
        before = self.before.value_norm
        return self.after.value_norm / before if before else math.nan


@dataclass(frozen=True, repr=False)
class Initialization:
    """The layers that were set, in order; printing it shows a line for each.

    Attributes
    ----------
    kind
        The kind of initialization.
    layers
        Each with its scores before and after.
    """

    kind: str
    layers: tuple[LayerChange, ...]

    def __repr__(self) -> str:
        head = f"{self.kind} initialization of {counted(len(self.layers), 'layer')}"
        columns = (
            f"{'layer':>18}  {'symmetry':>17}  {'trace':>21}  {'own-token score':>17}"
            "  norm ratio  values"
        )
        return "\n".join([head, columns, *map(_line, self.layers)])


def _line(change: LayerChange) -> str:
    before, after = change.before, change.after
    return (
        f"{change.stack:>14} {change.layer:>3}"
        f"  {before.symmetry:>7.3f} → {after.symmetry:>7.3f}"
        f"  {before.trace:>9.3g} → {after.trace:>9.3g}"
        f"  {before.own_score:>7.3f} → {after.own_score:>7.3f}"
        f"  {change.norm_ratio:>10.3f}  {change.value_ratio:>6.3f}"
    )
