"""Whether two models are related by descent or initialization, from their queries and keys.

Tests of the weights decide. That coordinates of the stream agree may have another reason, such as
embeddings that both were trained on: these are then looked at, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wqk._console import counted
from wqk.attention import Block
from wqk.checkpoints import Checkpoint, Part
from wqk.comparing.fingerprints import (
    Fingerprint,
    fingerprint,
    lacks_any_norm,
    spectral_closeness,
)
from wqk.comparing.randomization import OF_WEIGHTS, Agreement, Evidence, gather, layer_shares
from wqk.comparing.relations import RELATED, START, Kinship, LayerMatch, Likeness, in_place
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.families.embeddings import embedding_table
from wqk.model import open as open_model
from wqk.scanning.cores import one_blas_thread, usable_cores

# How often the second model is renumbered; p cannot be smaller than 1 in this many and one.
RENUMBERINGS = 4999

# A layer counts as matched up to this p of its own.
MATCHED = 0.01

# Tests that only agree if the coordinates of the residual stream do.
SAME_STREAM = ("coordinates", "weights")

# Blocks that are read at a time: their weights are what takes memory.
AT_ONCE = 2

# Rows of the tables of embeddings that are compared.
ROWS = 256


class _Model(NamedTuple):
    """A model, read once: what is kept of its self-attention."""

    name: str
    checkpoint: Checkpoint
    plans: tuple[AttentionPlan, ...]
    prints: tuple[Fingerprint, ...]


def kin(ref: Any, other: Any, *, on_progress: Callable[[int, int], None] | None = None) -> Kinship:
    """Test whether two models are related: by descent, or by a shared initialization.

    The agreement of two models' forms is compared with that after renumbering the second one's
    heads, coordinates or dimensions, which changes nothing that the models share by architecture,
    recipe or text. Reads queries and keys only, block by block; where the coordinates of the
    residual stream agree, also some rows of the embeddings and the gains of norms.

    Parameters
    ----------
    ref, other
        Two models, or what `wqk.open` takes: folders, files, hub ids, live modules.
    on_progress
        Called after every block with the number done and the number of all.

    Returns
    -------
    Kinship
        ``conclusion``, ``p`` of the weights, ``coordinates_p``, ``matches`` and ``kind``.

    Raises
    ------
    CheckpointError
        A model has no self-attention that can be compared, or two have no numbering in common.

    Examples
    --------
    >>> import wqk
    >>> encoder, decoder = wqk.demo_model("encoder"), wqk.demo_model("decoder")
    >>> kinship = wqk.kin(encoder, encoder)
    >>> kinship.conclusion, kinship.p, kinship.kind
    ('related', 0.0002, 'copy')
    """
    a, b = _read((ref, other), on_progress)
    evidence = gather(a.prints, b.prints, RENUMBERINGS)
    if not evidence.agreements:
        raise CheckpointError(
            f"{a.name} and {b.name} have no numbering in common that a test could renumber: "
            f"layers have {_shape(a)}, and {_shape(b)}; compare models that share the number of "
            "heads, their width, or the width of the model"
        )
    related = evidence.weights is not None and evidence.weights <= RELATED
    coordinates = evidence.coordinates is not None and evidence.coordinates <= RELATED
    matches: tuple[LayerMatch, ...] = ()
    kind, bounds = None, False
    if related:
        name = _matching(evidence)
        bounds = name not in SAME_STREAM
        matches = tuple(_matches(a, b, evidence.agreements[name], bounds))
        kind = _kind(a, b, matches, bounds)
    return Kinship(
        a.name, b.name, evidence.weights, evidence.coordinates, evidence.floor, evidence.outcomes,
        tuple(_likenesses(a, b)) if coordinates else (), matches, kind, bounds,
        spectral_closeness(a.prints, b.prints),
    )  # fmt: skip


def _shape(model: _Model) -> str:
    one = model.prints[0]
    heads = counted(one.head_count, "head")
    return f"{heads} of width {one.head_width} on {one.width} dimensions"


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


def _matching(evidence: Evidence) -> str:
    """The test that layers and heads are matched by: the first that sees the relation.

    Where coordinates agree, forms can be compared entry by entry.
    """
    seen = {o.name: o for o in evidence.outcomes if o.p is not None}
    wanted = [name for name in (*SAME_STREAM, "dimensions", "heads") if name in seen]
    farthest = max((n for n in OF_WEIGHTS if n in seen), key=lambda name: seen[name].z or 0.0)
    return next((name for name in wanted if (seen[name].p or 0.0) <= RELATED), farthest)


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
        change = _least_changes(own, block, heads) if bounds else _changes(own, block, heads)
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
    a: Fingerprint, b: Fingerprint, heads: Sequence[int | None]
) -> tuple[float | None, ...]:
    """The smallest ‖M_b − R M_a S‖ / ‖M_a‖ that any rotations R and S allow (Mirsky).

    It is the distance of the singular values.
    """
    first, second = (one.spectra * one.norms[:, None] for one in (a, b))
    if first.shape[-1] != second.shape[-1]:
        return (None,) * len(heads)
    return tuple(
        None if h is None else _relative(second[k] - first[h], first[h])
        for k, h in enumerate(heads)
    )


def _relative(difference: np.ndarray, form: np.ndarray) -> float | None:
    size = float(np.linalg.norm(form))
    return float(np.linalg.norm(difference)) / size if size > 0 else None


def _kind(a: _Model, b: _Model, matches: Sequence[LayerMatch], bounds: bool) -> str | None:
    """What became of the forms, where it can be seen; None where it would be a guess.

    They are equal but for the rounding of stored weights, or all in place or elsewhere and changed
    by less than their own size. If they have changed by more, chance may have matched them.
    """
    changes = [match.change for match in matches if match.change is not None]
    if len(a.prints) != len(b.prints) or len(changes) != len(matches):
        return None
    moved = not in_place(matches) or any(
        match.heads != tuple(range(len(match.heads))) for match in matches
    )
    rounding = 2 * max(one.rounding for one in (*a.prints, *b.prints))
    if not moved and max(changes) <= rounding:
        return "rotated copy" if bounds else "copy"
    if bounds or max(changes) > START:
        return None
    return "rearranged" if moved else "changed"


def _likenesses(a: _Model, b: _Model) -> Iterator[Likeness]:
    """How far what the two models' coordinates may come from is equal: embeddings, and gains."""
    for what, of in (("token embeddings", _embeddings), ("gains of norms", _gains)):
        found = [values for model in (a, b) if (values := of(model)) is not None]
        if len(found) < 2 or found[0].shape[1] != found[1].shape[1]:
            continue
        rows = min(map(len, found))
        one, other = (values[:rows].astype(np.float64) for values in found)
        near = np.abs(one - other) <= 2.0**-7 * np.maximum(np.abs(one), np.abs(other))
        # Without what every row has, such as outlying coordinates, or every gain, a mean of 1.
        axis = 0 if of is _embeddings else 1
        one, other = (values - values.mean(axis=axis, keepdims=True) for values in (one, other))
        sizes = float(np.linalg.norm(one) * np.linalg.norm(other))
        correlation = float((one * other).sum()) / sizes if sizes else None
        if correlation is not None or near.all():
            yield Likeness(what, float(near.mean()), correlation)


def _embeddings(model: _Model) -> np.ndarray | None:
    """Some rows of the table of token embeddings; None if none is known."""
    try:
        table = embedding_table(model.checkpoint, model.prints[0].width)
    except CheckpointError:
        return None
    count = min(ROWS, model.checkpoint.info(table).shape[0])
    return model.checkpoint.read([Part(table, ((0, count),))])[0] if count else None


def _gains(model: _Model) -> np.ndarray | None:
    """The gains of the norms that feed the blocks (L, D), as stored; None if they are not known."""
    norms = [plan.query.input_norm for plan in model.plans]
    parts = [norm.gain[0] for norm in norms if norm is not None and len(norm.gain) == 1]
    gains = model.checkpoint.read(parts) if parts else []
    width = model.prints[0].width
    return np.stack(gains) if gains and all(gain.shape == (width,) for gain in gains) else None
