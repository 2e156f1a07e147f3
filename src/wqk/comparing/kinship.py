"""Whether models are related by descent or initialization, from their queries and keys alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np

from wqk._console import counted
from wqk.attention import Block
from wqk.checkpoints import Checkpoint
from wqk.comparing.fingerprints import (
    Fingerprint,
    fingerprint,
    lacks_any_norm,
    spectral_closeness,
)
from wqk.comparing.randomization import Agreement, Evidence, gather, layer_shares
from wqk.comparing.relations import (
    RELATED,
    START,
    Kinship,
    Kinships,
    LayerMatch,
    Merge,
    in_place,
    moved_heads,
)
from wqk.comparing.weights import ROUNDING
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.model import open as open_model
from wqk.scanning.cores import one_blas_thread, usable_cores

# Tests that only agree if heads stand in the same order.
IN_ORDER = ("heads", "weights")

# A layer counts as matched up to this p of its own.
MATCHED = 0.01

# Tests that only agree if the coordinates of the residual stream do.
SAME_STREAM = ("coordinates", "weights")

# Blocks that are read at a time: their weights are what takes memory.
AT_ONCE = 2

# A change of forms explained by parents leaves at most this part of the change from the nearer one.
MERGED = 0.5


class _Model(NamedTuple):
    """A model, read once: what is kept of its self-attention."""

    name: str
    checkpoint: Checkpoint
    plans: tuple[AttentionPlan, ...]
    prints: tuple[Fingerprint, ...]


@overload
def kin(
    ref: Any,
    other: Any,
    /,
    *,
    renumberings: int = ...,
    seed: int = ...,
    on_progress: Callable[[int, int], None] | None = ...,
) -> Kinship: ...
@overload
def kin(
    ref: Any,
    other: Any,
    third: Any,
    /,
    *more: Any,
    renumberings: int = ...,
    seed: int = ...,
    on_progress: Callable[[int, int], None] | None = ...,
) -> Kinships: ...
def kin(
    *refs: Any,
    renumberings: int = 4999,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Kinship | Kinships:
    """Test whether models are related: by descent, or by a shared initialization.

    The agreement of two models' forms is compared with that after renumbering the second one's
    heads, coordinates or dimensions, which changes nothing that the models share by architecture,
    recipe or text. Reads queries and keys only, block by block.

    Parameters
    ----------
    *refs
        Two models or more, or what `wqk.open` takes: folders, files, hub ids, live modules.
    renumberings
        How often the second model is renumbered; p cannot be smaller than 1 / (renumberings + 1).
    seed
        Of the renumberings.
    on_progress
        Called after every block with the number done and the number of all.

    Returns
    -------
    Kinship or Kinships
        ``related``, ``p``, ``matches`` and ``kind`` of two models; of more, all pairs, mixtures,
        distances and a tree.

    Raises
    ------
    CheckpointError
        A model has no self-attention that can be compared, or two have no numbering in common.
    ValueError
        Fewer than two models or 999 renumberings.

    Examples
    --------
    >>> import wqk
    >>> encoder, decoder = wqk.demo_model("encoder"), wqk.demo_model("decoder")
    >>> kinship = wqk.kin(encoder, encoder, renumberings=999)
    >>> kinship.related, kinship.p, kinship.kind
    (True, 0.001, 'copy')
    """
    if len(refs) < 2:
        raise ValueError(f"kin() expected two models or more, got {len(refs)}")
    if renumberings < 999:
        raise ValueError(
            f"renumberings must be at least 999, or p could not reach {RELATED}; got {renumberings}"
        )
    models = _read(refs, on_progress)
    pairs = tuple(
        _relate(a, b, renumberings, seed) for i, a in enumerate(models) for b in models[i + 1 :]
    )
    if len(models) == 2:
        return pairs[0]
    found = Kinships(tuple(model.name for model in models), pairs, ())
    return Kinships(found.names, pairs, tuple(_merges(found, models)))


def _read(
    refs: Sequence[Any],
    on_progress: Callable[[int, int], None] | None,
) -> list[_Model]:
    """All models in the same coordinates: norms are folded in if they are known of all."""
    opened = []
    for ref in refs:
        model = open_model(ref)
        opened.append((model, [plan for plan in model.plans if plan.kind == "self"]))
    folds = not any(lacks_any_norm(plan) for _, plans in opened for plan in plans)
    total, done = sum(len(plans) for _, plans in opened), 0
    models = []
    for model, plans in opened:
        kept = []
        # Not kept: the weights of all blocks together would not fit into memory.
        with one_blas_thread(), ThreadPoolExecutor(min(usable_cores(), AT_ONCE)) as pool:
            read = pool.map(partial(_fingerprint, model.checkpoint, folds), plans)
            for plan, found in zip(plans, read, strict=True):
                if found is not None:
                    kept.append((plan, found))
                done += 1
                if on_progress:
                    on_progress(done, total)
        if not kept:
            raise CheckpointError(
                f"{model.name}: has no self-attention on one residual stream to compare",
                checkpoint=model.name,
            )
        kept_plans, prints = zip(*kept, strict=True)
        models.append(_Model(model.name, model.checkpoint, kept_plans, prints))
    return models


def _fingerprint(checkpoint: Checkpoint, folds: bool, plan: AttentionPlan) -> Fingerprint | None:
    return fingerprint(Block(checkpoint, plan), folds)


def _relate(a: _Model, b: _Model, renumberings: int, seed: int) -> Kinship:
    evidence = gather(a.prints, b.prints, renumberings, seed)
    if evidence is None:
        shapes = [
            f"{counted(m.prints[0].head_count, 'head')} of width {m.prints[0].head_width} on "
            f"{m.prints[0].width} dimensions"
            for m in (a, b)
        ]
        raise CheckpointError(
            f"{a.name} and {b.name} have no numbering in common that a test could renumber: "
            f"layers have {shapes[0]}, and {shapes[1]}; compare models that share the number of "
            "heads, their width, or the width of the model"
        )
    related = evidence.p <= RELATED
    matches: tuple[LayerMatch, ...] = ()
    kind, bounds = None, False
    if related:
        name = _matching(evidence)
        bounds = name not in SAME_STREAM
        matches = tuple(_matches(a, b, evidence.agreements[name], bounds))
        kind = _kind(a, b, matches, evidence, bounds)
    return Kinship(
        a.name, b.name, evidence.p, evidence.floor, evidence.extrapolated, evidence.outcomes,
        matches, kind, bounds, spectral_closeness(a.prints, b.prints),
    )  # fmt: skip


def _matching(evidence: Evidence) -> str:
    """The test that layers and heads are matched by: the first that sees the relation.

    Where coordinates agree, forms can be compared entry by entry.
    """
    seen = {o.name: o.p for o in evidence.outcomes if o.p is not None}
    wanted = (*SAME_STREAM, "dimensions", "heads")
    return next(
        (name for name in wanted if seen.get(name, 1.0) <= RELATED), evidence.strongest.name
    )


def _matches(a: _Model, b: _Model, agreement: Agreement, bounds: bool) -> Iterator[LayerMatch]:
    shares = layer_shares(agreement)
    for j, block in enumerate(b.prints):
        i = int(agreement.match[j])
        if i < 0 or shares[j] > MATCHED:
            nothing = (None,) * block.head_count
            yield LayerMatch(
                block.stack, block.layer, None, None, float(shares[j]), nothing, nothing
            )
            continue
        own = a.prints[i]
        heads = [int(h) if h >= 0 else None for h in agreement.heads[j]]
        change = _least_changes(a, i, b, j, heads) if bounds else _changes(own, block, heads)
        yield LayerMatch(
            block.stack, block.layer, own.stack, own.layer, float(shares[j]), tuple(heads), change
        )


def _changes(
    a: Fingerprint, b: Fingerprint, heads: Sequence[int | None]
) -> tuple[float | None, ...]:
    """‖M_b − M_a‖ / ‖M_a‖ of each head, on the sampled coordinates."""
    own, theirs = a.forms, b.forms
    return tuple(
        None if h is None else _relative(theirs[k] - own[h], own[h]) for k, h in enumerate(heads)
    )


def _least_changes(
    a: _Model, i: int, b: _Model, j: int, heads: Sequence[int | None]
) -> tuple[float | None, ...]:
    """The smallest ‖M_b − R M_a S‖ / ‖M_a‖ that any rotations R and S allow (Mirsky).

    It is the distance of the singular values.
    """
    with one_blas_thread():
        first, second = (
            Block(m.checkpoint, m.plans[k]).heads.singular_values() for m, k in ((a, i), (b, j))
        )
    first, second = (
        np.asarray(values, np.float64).reshape(-1, values.shape[-1]) for values in (first, second)
    )
    if first.shape[-1] != second.shape[-1]:
        return (None,) * len(heads)
    return tuple(
        None if h is None else _relative(second[k] - first[h], first[h])
        for k, h in enumerate(heads)
    )


def _relative(difference: np.ndarray, form: np.ndarray) -> float | None:
    size = float(np.linalg.norm(form))
    return float(np.linalg.norm(difference)) / size if size > 0 else None


def _kind(
    a: _Model, b: _Model, matches: Sequence[LayerMatch], evidence: Evidence, bounds: bool
) -> str:
    """What became of the forms, as far as they tell: first by what is where, then by how much.

    Heads matched one to one in another order are so if their forms have changed by less than their
    own size, or if the tests that keep the order of heads see nothing. Otherwise chance may
    have matched them.
    """
    sizes = [(len(m.prints), sum(block.head_count for block in m.prints)) for m in (a, b)]
    if sizes[0] != sizes[1]:
        return "grown" if sizes[1] > sizes[0] else "pruned"
    ordered = any(
        one.p is not None and one.p <= RELATED for one in evidence.outcomes if one.name in IN_ORDER
    )
    moved = moved_heads(matches)
    near = not bounds and any(change <= START for change in moved)
    if not in_place(matches) or near or (moved and not ordered):
        return "rearranged"
    changes = [match.change for match in matches if match.change is not None]
    if len(changes) == len(matches) and max(changes) <= _rounding(a, b):
        return "rotated copy" if bounds else "copy"
    return "shared start" if not bounds and changes and np.median(changes) > START else "changed"


def _rounding(a: _Model, b: _Model) -> float:
    """The relative change of a form that the rounding of stored weights explains."""
    units = [
        max(
            ROUNDING.get(m.checkpoint.info(part.name).dtype, 0.0)
            for plan in m.plans
            for part in plan.parts
        )
        for m in (a, b)
    ]
    return 2 * max(units)


def _merges(found: Kinships, models: Sequence[_Model]) -> Iterator[Merge]:
    """Models that two others explain together, and neither alone."""
    count = len(models)
    for child in range(count):
        others = [k for k in range(count) if k != child and _aligned(found, child, k, models)]
        for place, one in enumerate(others):
            for two in others[place + 1 :]:
                merge = _mixture(models[child], models[one], models[two])
                if merge is not None:
                    yield merge


def _aligned(found: Kinships, one: int, two: int, models: Sequence[_Model]) -> bool:
    """Whether forms of two models can be added head by head."""
    pair = found[one, two]
    shapes = [[block.forms.shape for block in models[k].prints] for k in (one, two)]
    return pair.related and not pair.bounds and shapes[0] == shapes[1]


def _mixture(child: _Model, one: _Model, two: _Model) -> Merge | None:
    """The child's forms by least squares through its parents', if they leave little."""
    target, *parents = (
        np.concatenate([block.forms.ravel() for block in m.prints]).astype(np.float64)
        for m in (child, one, two)
    )
    nearer = min(float(np.linalg.norm(target - parent)) for parent in parents)
    design = np.stack(parents, axis=1)
    shares, *_ = np.linalg.lstsq(design, target)
    left = float(np.linalg.norm(target - design @ shares))
    if left > MERGED * nearer or shares.min() <= 0 or not nearer:
        return None
    parts = shares / shares.sum()
    return Merge(
        child.name,
        (one.name, two.name),
        (float(parts[0]), float(parts[1])),
        left / float(np.linalg.norm(target)),
    )
