"""What an initialization did to each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wqk.forms.scores import symmetry

if TYPE_CHECKING:
    from wqk.attention import Attention


class FormScores(NamedTuple):
    """Symmetry, trace and Frobenius norm of a layer's form, gains of query and key norms in it."""

    symmetry: float
    trace: float
    norm: float


def form_scores(attention: Attention) -> FormScores:
    """The scores of one layer's form."""
    form = attention.form
    return FormScores(float(symmetry(form)), float(form.trace), float(form.norm))


@dataclass(frozen=True)
class LayerChange:
    """One layer's form before and after."""

    stack: str
    layer: int
    before: FormScores
    after: FormScores

    @property
    def norm_ratio(self) -> float:
        """‖W_qk‖ after over ‖W_qk‖ before, NaN where that was zero."""
        return self.after.norm / self.before.norm if self.before.norm else math.nan


@dataclass(frozen=True, repr=False)
class Initialization:
    """The layers that were set, in order; printing it shows a line for each.

    Attributes
    ----------
    kind
        What they were set to.
    layers
        Each with its scores before and after, as the model now holds them.
    """

    kind: str
    layers: tuple[LayerChange, ...]

    def __repr__(self) -> str:
        head = f"{self.kind} initialization of {len(self.layers)} layers"
        columns = f"{'layer':>18}  {'symmetry':>17}  {'trace':>21}  norm ratio"
        return "\n".join([head, columns, *map(_line, self.layers)])


def _line(change: LayerChange) -> str:
    before, after = change.before, change.after
    return (
        f"{change.stack:>14} {change.layer:>3}"
        f"  {before.symmetry:>7.3f} → {after.symmetry:>7.3f}"
        f"  {before.trace:>9.3g} → {after.trace:>9.3g}"
        f"  {change.norm_ratio:>10.3f}"
    )
