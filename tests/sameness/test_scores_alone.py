"""Mistakes that only scores show, as queries and keys are stored in coordinates of their own.

Each rotary plane of a key head is turned by an angle of its own, and so are its queries: no row of
the candidate is one of the reference's, and no score changes. Axes: H query heads, G key heads, R
head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests import small
from tests.sameness.mending import mend

from wqk.checkpoints.modules import StateDict
from wqk.sameness.mismatches import Kind
from wqk.sameness.same import same

H, G, R, D = 6, 3, 8, 48
Array = np.ndarray
Change = Callable[[Array, Array], tuple[Array, Array]]  # of queries (H, R, D) and keys (G, R, D)


def turned(query: Array, key: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Turn the rotary planes of each key head and of its queries."""
    angles = random.uniform(0.5, 2.5, (G, R // 2, 1))
    sides = []
    for side in (query, key):
        cosines, sines = (
            function(angles).repeat(len(side) // G, axis=0) for function in (np.cos, np.sin)
        )
        first, second = side[:, : R // 2], side[:, R // 2 :]
        halves = cosines * first - sines * second, sines * first + cosines * second
        sides.append(np.concatenate(halves, axis=1))
    return sides[0], sides[1]


def candidate(reference: StateDict, change: Change) -> StateDict:
    """The model with a mistake, in coordinates of its own."""
    tensors, random = dict(reference._arrays), np.random.default_rng(1)
    for layer in range(2):
        names = [f"model.layers.{layer}.self_attn.{side}_proj.weight" for side in "qk"]
        query, key = (tensors[name].reshape(-1, R, D) for name in names)
        sides = change(*turned(query, key, random))
        for name, side in zip(names, sides, strict=True):
            tensors[name] = np.ascontiguousarray(side.reshape(-1, D))
    return StateDict(tensors, reference.config, "candidate")


def of_groups(order: list[int]) -> Change:
    """Put key heads in another order, with their queries."""
    queries = [head * (H // G) + n for head in order for n in range(H // G)]
    return lambda query, key: (query[queries], key[order])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (of_groups([2, 0, 1]), Kind.HEADS),
        (of_groups([2, 1, 0]), Kind.HEADS),
        (lambda query, key: (query[[1, 0, 3, 2, 5, 4]], key), Kind.HEADS),
        (lambda query, key: (query.reshape(G, H // G, R, D).swapaxes(0, 1), key), Kind.PAIRING),
        (lambda query, key: (-query, key), Kind.SCALED),
        (lambda query, key: (query, 3 * key), Kind.SCALED),
        (lambda query, key: (query * np.arange(1, H + 1)[:, None, None], key), Kind.SCALED),
    ],
    ids=["rolled", "reversed", "within groups", "pairing", "sign", "factor", "factors of heads"],
)
def test_a_mistake_that_only_scores_show_is_named_and_repaired(change: Change, kind: Kind) -> None:
    reference = small.llama(heads=H, key_heads=G, head_width=R, width=D)
    wrong = candidate(reference, change)
    assert same(reference, candidate(reference, lambda query, key: (query, key))).same
    comparison = same(reference, wrong)
    assert [cause.mismatch.verdict for cause in comparison.causes] == [kind], comparison.sentence
    tensors = dict(wrong._arrays)
    mend(comparison.repair, tensors, reference._arrays)
    mended = same(reference, StateDict(tensors, reference.config, "mended"))
    assert mended.same, mended.sentence
