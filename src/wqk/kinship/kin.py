"""Whether two models are related by descent or initialization, from their queries and keys.

Tests of the weights decide. That coordinates of the stream agree may have another reason, such as
embeddings that both were trained on: these are then looked at, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wqk._console import Result, counted, kind_in_words, number
from wqk._machine import one_blas_thread, usable_cores
from wqk.attention import Block
from wqk.attention.factors import FOLDED, lacks_norm
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.families.naming import embedding_table
from wqk.kinship.fingerprints import (
    SAMPLED,
    Fingerprint,
    fingerprint,
    spectral_closeness,
)
from wqk.kinship.randomization import (
    OF_WEIGHTS,
    Agreement,
    Evidence,
    Outcome,
    gather,
    layer_shares,
)
from wqk.kinship.thresholds import CLOSE_SPECTRA, CORRELATED, MATCHED, RELATED, START
from wqk.model import open as open_model
from wqk.sameness.same import same
from wqk.tables.sheet import Cell, Sheet

KINDS = {
    "copy": "their forms are equal",
    "rotated copy": "their forms are equal but for a rotation",
    "changed": "their forms are in place and changed by less than their own size",
    "rearranged": "layers or heads are in another order",
}

NUMBERINGS = {
    "heads": "heads of each layer",
    "coordinates": "coordinates of the residual stream",
    "dimensions": "signs of each head's dimensions",
    "weights": "the same, weights as they stand",
}


DIRECTION = (
    "Related means that one comes from the other, or both come from a third model or from one "
    "initialization. The forms do not tell which, nor which was first."
)


@dataclass(frozen=True)
class LayerMatch:
    """One block of the second model, and the one of the first that it agrees with."""

    derived: ClassVar[tuple[str, ...]] = ("change",)

    stack: str
    layer: int
    of_stack: str | None  # in the first model; None if no block agrees more than chance allows
    of_layer: int | None
    p: float  # share of renumberings in which any layer agrees as well
    heads: tuple[int | None, ...]  # for each head, the first model's that it is closest to
    changes: tuple[float | None, ...]  # of each head: ‖M_b − M_a‖ / ‖M_a‖

    @property
    def change(self) -> float | None:
        """The median over heads."""
        known = [change for change in self.changes if change is not None]
        return float(np.median(known)) if known else None


@dataclass(frozen=True)
class Likeness:
    """How far something else than queries and keys is the same in both models."""

    what: str  # token embeddings, gains of norms
    equal: float  # share of values that are equal but for rounding to 16 bits
    correlation: float | None  # of their values; None if they are all the same

    @property
    def alike(self) -> bool:
        """Whether they agree by more than chance."""
        return self.equal > 0.5 or (self.correlation or 0.0) > CORRELATED

    def __str__(self) -> str:
        if self.equal > 0.5:
            return f"{self.what} are equal ({self.equal:.0%} of the values compared)"
        what = "are nearly equal" if (self.correlation or 0) > 0.9 else "correlate"
        what = what if self.alike else "are not alike"
        return f"{self.what} {what} (correlation {number(self.correlation, 2)})"


@dataclass(frozen=True, repr=False)
class Kinship(Result, synonyms={"verdict": "conclusion", "pvalue": "p", "p_value": "p"}):
    """What is known of two models' relation, from their queries and keys."""

    derived: ClassVar[tuple[str, ...]] = ("conclusion", "related", "change", "reading")

    checkpoint: str
    other: str
    # The chance of such an agreement between models that share nothing: of heads, dimensions and
    # weights; and of the coordinates of the residual stream. None if no test applies.
    p: float | None
    coordinates_p: float | None
    floor: float  # the smallest p that the number of renumberings allows
    tests: tuple[Outcome, ...]
    likenesses: tuple[Likeness, ...]  # looked at where coordinates agree
    matches: tuple[LayerMatch, ...]  # empty unless related
    kind: str | None  # copy, rotated copy, changed, rearranged; None where it would be a guess
    # Whether changes are smallest possible ones, from singular values, as coordinates differ.
    bounds: bool
    # Distance of heads' singular values to the nearest of the other model, over that to the
    # nearest in their own. It has no p.
    closeness: float | None

    @property
    def related(self) -> bool:
        """Whether p, of the weights, is at most .001."""
        return self.p is not None and self.p <= RELATED

    def __bool__(self) -> bool:
        return self.related

    @property
    def conclusion(self) -> str:
        """``related``, ``shared coordinates`` where these alone agree, or ``no sign``."""
        if self.related:
            return "related"
        shared = self.coordinates_p is not None and self.coordinates_p <= RELATED
        return "shared coordinates" if shared else "no sign"

    @property
    def change(self) -> float | None:
        """The median relative change over matched layers; None if the models are unrelated."""
        known = [m.change for m in self.matches if m.change is not None]
        return float(np.median(known)) if known else None

    @property
    def sentence(self) -> str:
        """Whether they are related, and how."""
        return f"{self.checkpoint} and {self.other}: {_verdict(self)}"

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        """One for each block of the second model."""
        return [vars(match) | {"change": match.change} for match in self.matches]

    @property
    def reading(self) -> tuple[str, ...]:
        """What the result means, in sentences."""
        return tuple(_reading(self))

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        yield Text.assemble((self.checkpoint, "bold"), "  and  ", (self.other, "bold"))
        yield _verdict(self)
        table = Sheet.of("renumbered", "p", "deviations", "", text=["renumbered", ""])
        for test in self.tests:
            numbers = ("–", "–") if test.p is None else (probability(test.p), f"{test.z:.1f}")
            table.add(NUMBERINGS[test.name], *numbers, Cell(test.left_out, style="dim"))
        yield table
        if self.related:
            yield _summary(self)
        for sentence in self.reading:
            yield Text(sentence, style="dim")


def _reading(kinship: Kinship) -> Iterator[str]:
    near = ""
    if kinship.closeness is not None and kinship.closeness < CLOSE_SPECTRA:
        near = (
            f"But singular values of heads lie {1 / max(kinship.closeness, 1e-6):,.0f} times "
            "closer to the other model's than to each other"
        )
    if kinship.conclusion == "shared coordinates":
        yield (
            "The coordinates of the residual stream mean the same in both, and nothing else says "
            "that their weights have anything in common."
        )
        causes = [str(one) for one in kinship.likenesses if one.alike]
        if causes:
            text = "; ".join(causes)
            yield (
                f"{text[0].upper()}{text[1:]}: attention that was trained from scratch on them "
                "agrees like this."
            )
        else:
            seen = "; ".join(map(str, kinship.likenesses)) or "neither was found"
            yield f"Embeddings and norms do not explain it: {seen}."
        if near:
            yield f"{near}, as if heads were renumbered and dimensions turned. This has no p."
        else:
            yield (
                "A relation is not excluded: renumbered heads and turned dimensions together leave "
                "nothing but coordinates to see."
            )
        return
    if not kinship.related:
        visible = ", ".join(
            f"{test.visible:.0%} by {test.name}"
            for test in kinship.tests
            if test.visible is not None
        )
        yield f"Agreement that would have been seen, as a share of a copy's: {visible}."
        if near:
            yield (
                f"{near}, as if heads were renumbered, the stream rotated and dimensions turned, "
                "all three. No renumbering can say what chance allows then, so this has no p."
            )
            return
        yield (
            "A relation is not excluded: renumbered heads, a rotated stream and turned dimensions "
            "hide one from the tests if all three are done."
        )
        return
    yield DIRECTION
    if kinship.bounds:
        yield (
            "The coordinates of the residual stream do not agree; a change is the smallest that "
            "singular values allow."
        )
    elif kinship.matches and kinship.change is not None:
        yield f"Changes are measured on {SAMPLED} coordinates of the residual stream at most."
    if kinship.change is not None and kinship.change > START and not kinship.bounds:
        yield (
            "The forms have changed by more than their own size: the two may share no more than "
            "an initialization. Whether they share some of their training as well cannot be told."
        )
    for one in kinship.likenesses:
        yield f"The {one}."


def _verdict(kinship: Kinship) -> str:
    parts = {"weights": kinship.p, "coordinates": kinship.coordinates_p}
    told = ", ".join(
        f"{name}: {'no test applies' if p is None else f'p = {probability(p)}'}"
        for name, p in parts.items()
    )
    least = ""
    if min((p for p in parts.values() if p is not None), default=1.0) <= kinship.floor:
        least = f"; {probability(kinship.floor)} is the least that can be found"
    said = {
        "related": f"Related{': ' * bool(kinship.kind)}{KINDS.get(str(kinship.kind), '')}",
        "shared coordinates": "Shared coordinates, and no sign that the weights are related",
        "no sign": "No sign that they are related",
    }
    return f"{said[kinship.conclusion]} ({told}{least})."


def _summary(kinship: Kinship) -> str:
    """How many layers are matched, how, and how far they have changed."""
    matched = [match for match in kinship.matches if match.of_layer is not None]
    where = "in place" if in_place(kinship.matches) else "in other places"
    alike = all(map(_in_order, matched))
    text = (
        f"{len(matched)} of the second model's {counted(len(kinship.matches), 'layer')} match, "
        f"{where}, heads in {'order' if alike else 'another order'}"
    )
    if kinship.change is not None:
        change = shown_change(kinship.change, kinship.bounds)
        text += f"; the median relative change of a form is {change}"
    return f"{text}.{_dropped_and_doubled(matched)}"


def _dropped_and_doubled(matched: Sequence[LayerMatch]) -> str:
    """Name layers of the first model that no layer of the second matches, or several do.

    Only layers between matched ones can be missed, as the matches do not contain the first model's
    depth.
    """
    sentences = []
    for stack in dict.fromkeys(match.of_stack for match in matched):
        numbers = [match.of_layer for match in matched if match.of_stack == stack]
        count_by_layer = Counter(number for number in numbers if number is not None)
        between = range(min(count_by_layer), max(count_by_layer) + 1)
        dropped = [layer for layer in between if layer not in count_by_layer]
        doubled = [layer for layer in sorted(count_by_layer) if count_by_layer[layer] > 1]
        for layers, verb in ((dropped, "matches none"), (doubled, "matches several")):
            if 0 < len(layers) < len(count_by_layer):
                subject = "layer" if len(layers) == 1 else "each of the layers"
                listed = ", ".join(map(str, layers))
                sentences.append(f" Of the first model, {subject} {listed} {verb}.")
    return "".join(sentences)


def in_place(matches: Sequence[LayerMatch]) -> bool:
    """Whether each matched layer has its match's number, in the stack that stands for that one's.

    Stacks are called by what they are: an encoder's may stand for a decoder's.
    """
    matched = [match for match in matches if match.of_layer is not None]
    stacks = {(match.of_stack, match.stack) for match in matched}
    first, second = (set(names) for names in zip(*stacks, strict=True)) if stacks else ((), ())
    return (
        len(stacks) == len(first) == len(second)
        and all(one == other or one not in second for one, other in stacks)
        and all(match.layer == match.of_layer for match in matched)
    )


def _in_order(match: LayerMatch) -> bool:
    return match.heads == tuple(range(len(match.heads)))


def layer_table(kinship: Kinship) -> Sheet:
    """A line for each layer of the second model: its match, that of its heads, and the change."""
    table = Sheet.of("layer", "of", "heads", "change", text=["of", "heads"])
    stacks = {stack for match in kinship.matches for stack in (match.stack, match.of_stack)}
    several = len(stacks - {None}) > 1
    for match in kinship.matches:
        own = f"{match.stack} {match.layer}" if several else str(match.layer)
        if match.of_layer is None:
            table.add(own, "–", "–", "–")
            continue
        of = f"{match.of_stack} {match.of_layer}" if several else str(match.of_layer)
        heads = "in order" if _in_order(match) else " ".join(map(str, match.heads))
        table.add(own, of, heads, shown_change(match.change, kinship.bounds))
    return table


def shown_change(change: float | None, bound: bool) -> str:
    """A relative change, marked if it is the smallest possible one."""
    return "–" if change is None else f"{'≥ ' if bound else ''}{number(change)}"


def probability(p: float) -> str:
    """A p-value to two digits.

    Examples
    --------
    >>> probability(0.3421), probability(0.0002)
    ('.34', '.0002')
    """
    if p >= 0.995:
        return "1"
    digits = max(2, 1 - math.floor(math.log10(p)) if p >= 0.01 else -math.floor(math.log10(p)))
    return f"{p:.{digits}f}".removeprefix("0")


# How often the second model is renumbered; p cannot be smaller than 1 in this many and one.
RENUMBERINGS = 4999

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
        if bounds and in_place(matches):
            # One rotation of the residual stream may make one model the other.
            with suppress(CheckpointError):
                if same(ref, other, up_to=("stream",)).same:
                    kind = "rotated copy"
                    matches = tuple(replace(m, changes=(0.0,) * len(m.heads)) for m in matches)
    return Kinship(
        a.name,
        b.name,
        evidence.weights,
        evidence.coordinates,
        evidence.floor,
        evidence.outcomes,
        tuple(_likenesses(a, b)) if coordinates else (),
        matches,
        kind,
        bounds,
        spectral_closeness(a.prints, b.prints),
    )


def _shape(model: _Model) -> str:
    one = model.prints[0]
    heads = counted(one.head_count, "head")
    return f"{heads} of width {one.head_width} on {one.width} dimensions"


def _read(refs: Sequence[Any], on_progress: Callable[[int, int], None] | None) -> list[_Model]:
    """All models in the same coordinates: norms are folded in if they are known of all."""
    models = [open_model(ref) for ref in refs]
    kinds = [[plan.kind for plan in model.scored if plan.kind != "cross"] for model in models]
    # Attention with a softmax if both have some, else what both have in its place.
    kind = min(set.intersection(*map(set, kinds)), key=kinds[0].index, default="self")
    opened = [(model, [p for p in model.scored if p.kind == kind]) for model in models]
    folds = not any(lacks_norm(plan, FOLDED) for _, plans in opened for plan in plans)
    total, done, read_models = sum(len(plans) for _, plans in opened), 0, list[_Model]()
    for model, plans in opened:
        kept = []
        # Not kept: the weights of all blocks together would not fit into memory.
        with one_blas_thread(), ThreadPoolExecutor(min(usable_cores(), AT_ONCE)) as pool:
            blocks = map(partial(Block, model.checkpoint), plans)  # each reads when it is needed
            read = pool.map(partial(fingerprint, folds=folds), blocks)
            for plan, found in zip(plans, read, strict=True):
                if found is not None:
                    kept.append((plan, found))
                done += 1
                if on_progress:
                    on_progress(done, total)
        if not kept:
            raise CheckpointError(
                f"{model.name}: has no {kind_in_words(kind)} on one residual stream to compare",
                checkpoint=model.name,
            )
        kept_plans, prints = zip(*kept, strict=True)
        read_models.append(_Model(model.name, model.checkpoint, kept_plans, prints))
    return read_models


def _matching(evidence: Evidence) -> str:
    """The test that layers and heads are matched by: the first that sees the relation.

    Where coordinates agree, forms can be compared entry by entry. None may see it alone.
    """
    seen = {o.name: o for o in evidence.outcomes if o.p is not None}
    for name in (*SAME_STREAM, "dimensions", "heads"):
        if name in seen and (seen[name].p or 0.0) <= RELATED:
            return name
    return max((n for n in OF_WEIGHTS if n in seen), key=lambda name: seen[name].z or 0.0)


def _matches(a: _Model, b: _Model, agreement: Agreement, bounds: bool) -> Iterator[LayerMatch]:
    shares = layer_shares(agreement)
    for j, block in enumerate(b.prints):
        i, place = int(agreement.match[j]), (block.stack, block.layer)
        if i < 0 or shares[j] > MATCHED:
            nothing = (None,) * block.head_count
            yield LayerMatch(*place, None, None, float(shares[j]), nothing, nothing)
            continue
        own = a.prints[i]
        heads = agreement.heads[j].tolist()
        change = _changes(own, block, heads, bounds)
        yield LayerMatch(*place, own.stack, own.layer, float(shares[j]), tuple(heads), change)


def _changes(
    a: Fingerprint, b: Fingerprint, heads: Sequence[int], bounds: bool
) -> tuple[float | None, ...]:
    """‖M_b − M_a‖ / ‖M_a‖ of each head, on the sampled coordinates.

    With ``bounds`` the smallest that any rotations R and S allow, ‖M_b − R M_a S‖, which is the
    distance of the singular values (Mirsky).
    """
    own, theirs = (one.spectra * one.norms[:, None] if bounds else one.forms for one in (a, b))
    if own.shape[-1] != theirs.shape[-1]:
        return (None,) * len(heads)
    sizes = [float(np.linalg.norm(form)) for form in own]
    apart = [float(np.linalg.norm(theirs[k] - own[h])) for k, h in enumerate(heads)]
    return tuple(far / sizes[h] if sizes[h] else None for far, h in zip(apart, heads, strict=True))


def _kind(a: _Model, b: _Model, matches: Sequence[LayerMatch], bounds: bool) -> str | None:
    """What became of the forms, where it can be seen; None where it would be a guess.

    They are equal but for the rounding of stored weights, or all in place or elsewhere and changed
    by less than their own size. If they have changed by more, chance may have matched them.
    """
    changes = [match.change for match in matches if match.change is not None]
    if len(a.prints) != len(b.prints) or len(changes) != len(matches):
        return None
    moved = not in_place(matches) or not all(map(_in_order, matches))
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
