"""What a block does besides its scores, in the same terms: its values, and scores of positions.

The output-value form W_v W_o of each head does not see an invertible map between the two, as the
scores do not see a rotation between queries and keys; both are compared by one computation.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from wqk.attention import Block
from wqk.attention.factor import Factor, load_factor
from wqk.comparing.blocks import Rows, Scoring
from wqk.comparing.weights import rounding_of
from wqk.families import Side

VALUES, POSITIONS = "values", "scores of positions"


def other_circuits(block: Block, norms: bool) -> dict[str, Scoring]:
    """The forms of a block besides its scores, by their names; without those it does not tell.

    With ``norms`` the gain of the norm that feeds the values is folded in.
    """
    plan, found = block.plan, {}
    if plan.value is not None and plan.output is not None:
        value, output = _factor(block, plan.value), _factor(block, plan.output)
        norm = None
        if norms and plan.value.input_norm is not None:
            feeding = plan.value.input_norm
            gain, *shift = block.read([*feeding.gain, *feeding.bias])
            gain = gain + gain.dtype.type(feeding.offset)
            norm = gain, shift[0] if shift else None, feeding.kind
        rows = (
            Rows(output.weight, None, None),
            Rows(value.weight, value.bias, norm),
        )
        rounded = [
            rounding_of(block, *pair) for pair in ((value, plan.value), (output, plan.output))
        ]
        found[VALUES] = Scoring(*rows, 1.0, None, max(rounded) * (2.0**0.5 if norm else 1.0))
    if plan.positional is not None:
        sides = plan.positional.query, plan.positional.key
        query, key = (_factor(block, side) for side in sides)
        rounded = [rounding_of(block, *pair) for pair in ((query, sides[0]), (key, sides[1]))]
        rotary = plan.positional.rotary
        found[POSITIONS] = Scoring(
            Rows(query.weight, query.bias, None), Rows(key.weight, key.bias, None), plan.scale,
            rotary if len(rotary.frequencies) else None, 2 * max(rounded),
        )  # fmt: skip
    return found


def _factor(block: Block, side: Side) -> Factor:
    parts = side.parts
    return load_factor(
        dict(zip(parts, block.read(parts), strict=True)), side, block.checkpoint.name
    )


def comparable(a: Scoring, b: Scoring) -> bool:
    """Whether two blocks' forms have the same number of heads, and act on the same spaces."""
    return a.query.weight.shape == b.query.weight.shape and (
        a.key.weight.shape[1:] == b.key.weight.shape[1:]
    )
