"""Whether two checkpoints have the same attention, to check converted or rewritten models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._typing import FilePath
from wqk.attention import attention_plans
from wqk.attention.coordinates import Coordinates, lacks_norm, read_block
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.options import HubFolder, check_options
from wqk.comparing.blocks import Scoring, distances, mismatches
from wqk.comparing.mistakes import Mismatch, OtherSetting
from wqk.errors import CheckpointError
from wqk.scanning.cores import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Unpack

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan

# Half the distance between neighboring numbers of a type, relative to them.
ROUNDING = {
    "F64": 2.0**-53,
    "F32": 2.0**-24,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "F8_E4M3": 2.0**-4,
    "F8_E5M2": 2.0**-3,
}

# Tokens between query and key at which rotary positions are compared: none, one, many.
DISTANCES = (0, 1, 1024)

# Norms are folded in and biases kept, so that neither hides a difference or makes one.
FOLDED = Coordinates(fold_norm=True, bias=True)
UNFOLDED = Coordinates(bias=True)


@dataclass(frozen=True)
class BlockComparison:
    """One block of two checkpoints, under its name in the first."""

    stack: str
    kind: str
    layer: int
    distance: dict[int, float]  # largest ‖M_a(N) − M_b(N)‖ / ‖M_a(N)‖ over heads, by position N
    head: int  # the head in which it is largest
    tolerance: float  # what rounding explains of that head's distance
    mismatches: tuple[Mismatch, ...]  # how the second block differs; none if they are equal

    @property
    def same(self) -> bool:
        """Whether the blocks attend the same way."""
        return not self.mismatches

    @property
    def reason(self) -> str:
        """How the blocks differ, as text."""
        return "; ".join(map(str, self.mismatches))


@dataclass(frozen=True)
class CheckpointComparison:
    """Two checkpoints, block by block."""

    checkpoint: str
    other: str
    blocks: tuple[BlockComparison, ...]  # in the first checkpoint's order

    @property
    def same(self) -> bool:
        """Whether every block attends the same way."""
        return all(block.same for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        blocks = [
            asdict(block)
            | {
                "same": block.same,
                "mismatches": [
                    {"verdict": m.verdict, "reason": str(m), **asdict(m)} for m in block.mismatches
                ],
            }
            for block in self.blocks
        ]
        return {
            "checkpoint": self.checkpoint, "other": self.other, "same": self.same, "blocks": blocks,
        }  # fmt: skip


def same(
    ref: Any,
    other: Any,
    *,
    revisions: tuple[str | None, str | None] = (None, None),
    family: FilePath | None = None,
    other_family: FilePath | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **hub: Unpack[HubFolder],
) -> CheckpointComparison:
    """Compare the attention of two checkpoints of one model, whatever their families and layouts.

    Exact, from the weights: no model is run. Changes that leave attention unchanged are ignored:
    rotations within heads, factors moved between queries and keys, folded norms and scales, storage
    types. If a block differs, known conversion errors are identified: rotary order or base, the
    order or the pairing of heads, queries and keys exchanged, a factor, biases.

    Parameters
    ----------
    ref, other
        As for `wqk.open_checkpoint`: folders, files, hub ids, live modules.
    revisions
        Revisions of the two, if they are Hub repositories.
    family, other_family
        Family files to use instead of the model types' own.
    on_progress
        Called after every block with the number done and the number of all.
    **hub
        ``subfolder``, ``token``, ``cache_dir``, ``local_files_only``: see `open_checkpoint`.

    Raises
    ------
    CheckpointError
        The two differ in their numbers of blocks, heads or dimensions.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.demo_model("decoder")
    >>> wqk.same(model, model).same
    True
    """
    check_options("same", hub, HubFolder)
    checkpoints = (
        open_checkpoint(ref, revisions[0], **hub),
        open_checkpoint(other, revisions[1], **hub),
    )
    plans = [
        attention_plans(checkpoint, chosen)
        for checkpoint, chosen in zip(checkpoints, (family, other_family), strict=True)
    ]
    if len(plans[0]) != len(plans[1]):
        raise CheckpointError(
            f"{checkpoints[0].name} has {len(plans[0])} attention blocks and {checkpoints[1].name} "
            f"{len(plans[1])}; only models of equal depth can be compared"
        )
    blocks = []
    for pair in zip(*plans, strict=True):
        # Products of single heads are too small for several threads.
        with one_blas_thread():
            blocks.append(_compare(checkpoints, pair))
        if on_progress:
            on_progress(len(blocks), len(plans[0]))
    return CheckpointComparison(checkpoints[0].name, checkpoints[1].name, tuple(blocks))


def _compare(
    checkpoints: tuple[Checkpoint, Checkpoint], plans: tuple[AttentionPlan, AttentionPlan]
) -> BlockComparison:
    a, b = map(_scoring, checkpoints, plans)
    if (len(a.query), *a.query.shape[2:]) != (len(b.query), *b.query.shape[2:]):
        sizes = [f"{len(s.query)} heads on {s.query.shape[-1] - 1} dimensions" for s in (a, b)]
        raise CheckpointError(
            f"layer {plans[0].layer} of the {plans[0].stack} has {sizes[0]} in "
            f"{checkpoints[0].name} and {sizes[1]} in {checkpoints[1].name}; only equal ones can "
            "be compared"
        )
    at = DISTANCES if a.rotary or b.rotary else DISTANCES[:1]
    measured = distances(a, b, at)
    worst = measured.worst
    return BlockComparison(
        plans[0].stack,
        plans[0].kind,
        plans[0].layer,
        dict(zip(at, map(float, measured.relative.max(axis=1)), strict=True)),
        worst,
        float(measured.tolerance[worst]),
        (*mismatches(a, b, at), *_settings(*plans)),
    )


def _scoring(checkpoint: Checkpoint, plan: AttentionPlan) -> Scoring:
    """A block's scores in float64, on normalized inputs where a norm feeds it."""
    coordinates = UNFOLDED if lacks_norm(plan, FOLDED) else FOLDED
    ((_, form),) = read_block(checkpoint, plan, coordinates).forms
    query, key = (
        factor.astype(np.float64).swapaxes(-1, -2).reshape(-1, *factor.shape[:-3:-1])
        for factor in (form.query, form.key)
    )
    rotary = plan.rotary or plan.axial
    if rotary is not None:
        query, rotary = rotary.stretch(query.swapaxes(-1, -2)).swapaxes(-1, -2), rotary.turning
    types = {checkpoint.info(part.name).dtype for part in plan.parts}
    return Scoring(
        query * plan.scale,
        key,
        rotary,
        max(ROUNDING.get(dtype, ROUNDING["F8_E5M2"]) for dtype in types),
    )


def _settings(a: AttentionPlan, b: AttentionPlan) -> Iterator[OtherSetting]:
    """The terms of the score besides the form that differ."""

    def of(plan: AttentionPlan) -> dict[str, Any]:
        return {
            "mask": "causal" if plan.causal else "none",
            "window": plan.window,
            "softcap": plan.softcap,
            "limit of queries and keys": plan.clip,
            "positions added to the score": plan.position or None,
            "norm of queries": plan.query.norm.kind if plan.query.norm else None,
            "norm of keys": plan.key.norm.kind if plan.key.norm else None,
            "sinks": "learned" if plan.sinks else None,
        }

    theirs = of(b)
    for name, value in of(a).items():
        if value != theirs[name]:
            yield OtherSetting(name, str(value or "none"), str(theirs[name] or "none"))
