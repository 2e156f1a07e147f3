"""Tests of kinship: whether two models agree more than their numberings would by chance.

Weights are drawn independently, and training treats all heads of a layer alike, all coordinates of
the stream, and all dimensions of a head. Of a model that shares nothing with another, every
renumbering was therefore as likely as the one that it has, whatever the two have in common besides
weights: architecture, recipe, text, order of the text. Of attention that was trained from scratch
on another model's embeddings this holds for heads and dimensions, but not for coordinates. Each
test renumbers the second model many times and counts how often the two agree as well as they do:

- ``heads``: the heads of each layer are permuted, those that share a key head together;
- ``coordinates``: the coordinates of the residual stream are permuted, in all layers at once;
- ``dimensions``: the units of each head change their signs, in queries and keys at once, and
  are compared with each other within each head;
- ``weights``: the same signs, and weights are compared as they stand. It sees no relation after any
  of the three changes, and otherwise the weakest.

Which layer, and for ``dimensions`` which head, is compared with which is searched: for layers
within each renumbering again; for heads by numbers that no change of signs alters.

Axes: N renumberings, L layers of the second model, K of the first, H heads, G key heads,
S sampled coordinates, U units of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from wqk._typing import Float, Int

if TYPE_CHECKING:
    from wqk.kinship.fingerprints import Fingerprint

# Numbers in one intermediate array: 2 MB in float32, which stays in a core's cache.
CHUNK = 2**19

# The tests that hold whatever coordinates of the stream two models share: they compare signs and
# orders that each model drew for itself.
OF_WEIGHTS = ("heads", "dimensions", "weights")


class Agreement(NamedTuple):
    """How far two models agree by one numbering: row 0 as they are, the others by chance."""

    layers: Float[np.ndarray, "n layers"]  # of each layer of the second with its best of the first
    match: Int[np.ndarray, " layers"]  # the first model's layer; -1 if none can be compared
    heads: tuple[Int[np.ndarray, " heads"], ...]  # of each layer: the first's heads, or -1
    copy: float  # sum over layers of the second model with a copy of itself


@dataclass(frozen=True)
class Outcome:
    """One test of two models, or why it was left out."""

    name: str
    p: float | None  # share of renumberings, the observed one included, that agree as well
    z: float | None  # standard deviations from the mean over renumberings
    # The smallest agreement, as a share of a copy's, that one in a thousand renumberings exceeds.
    visible: float | None
    left_out: str = ""


class Evidence(NamedTuple):
    """All tests of two models; None for a part that no test applies to."""

    weights: float | None  # p of heads, dimensions and weights, joined
    coordinates: float | None  # p of coordinates
    floor: float  # the smallest p that these renumberings can give
    outcomes: tuple[Outcome, ...]
    agreements: dict[str, Agreement]


def gather(
    a: Sequence[Fingerprint], b: Sequence[Fingerprint], count: int, seed: int = 0
) -> Evidence:
    """Renumber the second model ``count`` times in each test.

    Renumbering n of all tests is one renumbering of the model. Its share of each test is known
    among all n, and p compares the smallest one over tests, so that it needs no correction.
    """
    agreements: dict[str, Agreement] = {}
    reasons: dict[str, str] = {}
    for place, (name, test) in enumerate(TESTS.items()):
        found = renumber(test, a, b, count, np.random.default_rng([seed, place]))
        if isinstance(found, str):
            reasons[name] = found
        else:
            agreements[name] = found
    totals = {name: found.layers.sum(axis=1) for name, found in agreements.items()}
    shares = {name: _shares(total) for name, total in totals.items()}

    def outcome(name: str) -> Outcome:
        if name in reasons:
            return Outcome(name, None, None, None, reasons[name])
        own, others = totals[name][0], totals[name][1:]
        mean, spread, copy = others.mean(), others.std(), agreements[name].copy
        deviations = float((own - mean) / spread) if spread > 0 else 0.0
        visible = (
            float((np.quantile(others, 0.999) - mean) / (copy - mean)) if copy > mean else None
        )
        return Outcome(name, float(shares[name][0]), deviations, visible)

    outcomes, applied = tuple(map(outcome, TESTS)), [name for name in OF_WEIGHTS if name in totals]
    both = [np.stack([some[n] for n in applied]) for some in (shares, totals)] if applied else []
    of_weights = _joined(*both) if both else None
    of_coordinates = float(shares["coordinates"][0]) if "coordinates" in shares else None
    return Evidence(of_weights, of_coordinates, 1 / (count + 1), outcomes, agreements)


def layer_shares(agreement: Agreement) -> Float[np.ndarray, " layers"]:
    """For each layer, the share of renumberings in which some layer agrees as well.

    The largest agreement over all layers of a renumbering is compared, which corrects for their
    number.
    """
    best = agreement.layers[1:].max(axis=1)
    exceeding = (best[:, None] >= agreement.layers[0] - _slack(best)).sum(axis=0)
    return np.asarray((1 + exceeding) / (1 + len(best)))


# The best agreement of one layer of the second model with some of the first, in each renumbering;
# with which of them; its head for each own one; and the agreement with a copy.
Found: TypeAlias = tuple[Float[np.ndarray, " n"], int, np.ndarray, float]


class Randomization(NamedTuple):
    """One numbering, and how a layer agrees when it is drawn anew."""

    meaning: str  # where a fingerprint says why the numbering is no matter of chance
    shape: Callable[[Fingerprint], Any]  # of layers that can be compared
    prepare: Callable[[Fingerprint], Any]  # once for each layer
    # Of the first's layers of one shape, with what was prepared of them; of a layer, with the same.
    compare: Callable[..., Found]
    least: Callable[[Fingerprint], int]  # how many are numbered, of which one is no order
    refusal: str


def renumber(
    test: Randomization,
    a: Sequence[Fingerprint],
    b: Sequence[Fingerprint],
    count: int,
    random: np.random.Generator,
) -> Agreement | str:
    """The agreement of every layer of the second model, or why the test does not apply."""
    differ = next((text for f in (*a, *b) if (text := getattr(f, test.meaning))), "")
    if differ:
        return differ
    comparable = [[i for i, one in enumerate(a) if test.shape(one) == test.shape(f)] for f in b]
    if not any(comparable) or max(map(test.least, b)) < 2:
        return test.refusal
    layers, match = np.zeros((count + 1, len(b)), np.float32), np.full(len(b), -1)
    heads, copy, draw = [np.full(f.head_count, -1) for f in b], 0.0, Draw(count + 1, random, {})
    prepared = [test.prepare(block) for block in a]
    for j, (block, rows) in enumerate(zip(b, comparable, strict=True)):
        if rows and test.least(block) > 1:
            others = [(a[i], prepared[i]) for i in rows]
            found = test.compare(others, block, test.prepare(block), draw)
            layers[:, j], best, heads[j], own = found
            match[j], copy = rows[best], copy + own
    return Agreement(layers, match, tuple(heads), copy)


Others = Sequence[tuple["Fingerprint", Any]]


class Draw(NamedTuple):
    """What renumberings are drawn with."""

    size: int  # how many there are, the observed numbering included
    random: np.random.Generator
    known: dict[int, np.ndarray]  # orders of the stream, by its width


def _reordered(
    others: Others, own: np.ndarray, orders: np.ndarray
) -> tuple[np.ndarray, int, float]:
    """Agreement with the best of others in each order, which it is as it stands, and a copy's."""
    theirs = np.stack([one.ravel() for _, one in others], axis=1)
    theirs /= np.sqrt(len(theirs))
    layer, best = np.zeros(len(orders), np.float32), int((own.ravel() @ theirs).argmax())
    step = max(1, CHUNK // own.size)
    for some in (slice(start, start + step) for start in range(0, len(orders), step)):
        at = orders[some, :, None] * own.shape[-1] + orders[some, None, :]
        renumbered = np.take(own.reshape(len(own), -1), at.ravel(), axis=1)
        renumbered = renumbered.reshape(len(own), len(at), -1).swapaxes(0, 1)
        layer[some] = (renumbered.reshape(len(at), -1) @ theirs).max(axis=1)
    return layer, best, float(np.square(own).sum() / np.sqrt(own.size))


def permuted_heads(others: Others, block: Fingerprint, own: np.ndarray, draw: Draw) -> Found:
    """Agreement of how pairs of heads are related, under permutations of each layer's heads."""
    orders = _head_orders(draw, block.head_count, block.key_heads)
    layer, best, copy = _reordered(others, own, orders)
    return layer, best, np.arange(block.head_count), copy


def permuted_coordinates(others: Others, block: Fingerprint, own: np.ndarray, draw: Draw) -> Found:
    """Agreement of the layers' forms entry by entry, under permutations of the stream."""
    if block.width not in draw.known:  # one for all layers
        draw.known[block.width] = draw.random.random((draw.size, own.shape[-1])).argsort(axis=1)
        draw.known[block.width][0] = np.arange(own.shape[-1])
    layer, best, copy = _reordered(others, own, draw.known[block.width])
    # For each head the other layer's with the largest cosine, on the sample.
    ours, theirs = (_unit_rows(x.forms.reshape(x.head_count, -1)) for x in (block, others[best][0]))
    return layer, best, (ours @ theirs.T).argmax(axis=1), copy


def flipped_dimensions(others: Others, block: Fingerprint, own: np.ndarray, draw: Draw) -> Found:
    """Agreement of heads with their closest, under changes of the signs of their units.

    The closest layer, and in it the closest head of each head, are found by the sizes of the units'
    products, which signs do not change.
    """
    likeness = [own @ sizes.T for _, sizes in others]
    best = int(np.argmax([one.max(axis=1).sum() for one in likeness]))
    closest = likeness[best].argmax(axis=1)
    products = _products(others[best][0].grams[closest], block)
    signs = _signs(draw, products.shape[:2])
    turned = np.matmul(signs.swapaxes(0, 1), products).swapaxes(0, 1)
    copy = float(_products(block.grams, block).sum())
    return (turned * signs).sum(axis=(1, 2)), best, closest, copy


def flipped_weights(
    others: Others, block: Fingerprint, own: Sequence[np.ndarray], draw: Draw
) -> Found:
    """Agreement of weights, dimension by dimension, under changes of the signs of units."""
    cosines = np.stack([_cosines(theirs, own, block) for _, theirs in others], axis=1)
    found = _signs(draw, cosines.shape[:1]) @ cosines
    copy = float(_cosines(own, own, block).sum())
    return found.max(axis=1), int(found[0].argmax()), np.arange(block.head_count), copy


def _signs(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Random signs; row 0 changes none."""
    signs = draw.random.integers(0, 2, (draw.size, *shape)).astype(np.float32) * 2 - 1
    signs[0] = 1
    return signs


def _relations(block: Fingerprint) -> Float[np.ndarray, "two heads heads"]:
    """How all pairs of heads are related, beside what is usual in the layer.

    Pairs are standardized within three sets that permutations keep apart: a head with itself, heads
    that share a key head, and others. In place of a head's cosine with itself stands its norm.
    """
    heads = block.head_count
    group = np.arange(heads) // (heads // block.key_heads)
    kinds = (group[:, None] == group).astype(int) + np.eye(heads, dtype=int)
    relations = np.array(block.pairs, np.float64)
    np.fill_diagonal(relations[1], np.log(np.where(block.norms > 0, block.norms, 1.0)))
    for one in relations:
        for kind in range(3):
            one[kinds == kind] = _standardized(one[kinds == kind])
    return np.asarray(relations, np.float32)


def _entries(block: Fingerprint) -> Float[np.ndarray, "s s"]:
    """The layer's form on the sampled coordinates, freed of the scales of rows and columns.

    Otherwise two models whose residual streams have the same outlying coordinates would agree.
    """
    entries = block.forms.sum(axis=0, dtype=np.float64)
    for axis in (0, 1) * 4:  # until both are free of scales
        size = np.sqrt(np.square(entries).mean(axis=axis, keepdims=True))
        entries = entries / np.where(size > 0, size, 1.0)
    diagonal = np.eye(len(entries), dtype=bool)
    for kind in (diagonal, ~diagonal):
        entries[kind] = _standardized(entries[kind])
    return np.asarray(entries, np.float32)


def _standardized(values: np.ndarray) -> np.ndarray:
    """Values of mean 0 and variance 1; 0 if they are all the same, or not known."""
    if np.isnan(values).any():
        return np.zeros_like(values)
    centered = values - values.mean() if values.size else values
    spread = np.sqrt(np.square(centered).mean()) if values.size else 0.0
    if spread <= 1e-6 * np.abs(values).max(initial=0.0):
        return np.zeros_like(values)
    return np.asarray(centered / spread)


def _head_orders(draw: Draw, heads: int, key_heads: int) -> Int[np.ndarray, "n heads"]:
    """Random orders of heads that keep those of a key head together; row 0 is the model's own."""
    sharing = heads // key_heads
    outer = draw.random.random((draw.size, key_heads)).argsort(axis=1)
    inner = draw.random.random((draw.size, key_heads, sharing)).argsort(axis=2)
    orders = (outer[:, :, None] * sharing + inner).reshape(draw.size, heads)
    orders[0] = np.arange(heads)
    return orders


def _products(others: np.ndarray, block: Fingerprint) -> Float[np.ndarray, "groups u u"]:
    """Of each pair of units, the agreement of a block's heads with others, by key head.

    Heads that share a key head change their signs together. Of standard deviation 1 in sum.
    """
    products = np.einsum("hkuvij,hkuvij->huv", others, block.grams)
    products = products.reshape(block.key_heads, -1, *products.shape[1:]).sum(axis=1)
    products = (products + products.swapaxes(-1, -2)) / 2
    products[:, np.eye(products.shape[-1], dtype=bool)] = 0
    spread = np.sqrt(2 * np.square(products).sum())
    return np.asarray(products / spread if spread > 0 else products, np.float32)


def _directions(block: Fingerprint) -> list[np.ndarray]:
    """Queries and keys of each dimension, with norm 1."""
    return [_unit_rows(x.reshape(-1, x.shape[-1])) for x in (block.query, block.key)]


def _cosines(
    a: Sequence[np.ndarray], own: Sequence[np.ndarray], b: Fingerprint
) -> Float[np.ndarray, " groups_units"]:
    """Of each unit of each key head, the sum of its dimensions' cosines in queries and keys.

    Divided by the root of the number of units, so that layers weigh alike.
    """
    groups, width = b.key_heads, b.head_width
    total = np.zeros((groups, width))
    for theirs, ours in zip(a, own, strict=True):
        cosines = np.einsum("ns,ns->n", theirs, ours)
        total += cosines.reshape(groups, -1, width).sum(axis=1)
    units = total @ np.eye(b.units.max() + 1)[b.units]
    return np.asarray(units.ravel() / np.sqrt(units.size), np.float32)


def _sizes(block: Fingerprint) -> Float[np.ndarray, "heads products"]:
    """The sizes of the products of units, which signs do not change, as heads are correlated by."""
    sizes = np.sqrt(np.square(block.grams).sum(axis=(-2, -1))).reshape(block.head_count, -1)
    return _unit_rows(sizes - sizes.mean(axis=1, keepdims=True))


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of norm 1, but for those that are 0."""
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(size > 0, size, 1.0))


def _slack(values: np.ndarray) -> float:
    """What rounding adds to a sum: renumberings that change nothing count as equal."""
    return 1e-4 * float(values.std()) + 1e-9


def _shares(totals: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """For each renumbering the share of all, itself included, whose total is as large."""
    ascending = np.sort(totals)
    below = np.searchsorted(ascending, totals - _slack(totals), side="left")
    return np.asarray((len(totals) - below) / len(totals))


def _joined(shares: Float[np.ndarray, "tests n"], totals: Float[np.ndarray, "tests n"]) -> float:
    """The share of renumberings whose smallest share is as small as the observed one.

    Of equal ones that whose total deviates more, in standard deviations, counts as smaller.
    """
    smallest = shares.min(axis=0)
    spread = totals.std(axis=1, keepdims=True)
    deviations = (totals - totals.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    farthest = np.where(shares == smallest, deviations, -np.inf).max(axis=0)
    equal = (smallest == smallest[0]) & (farthest >= farthest[0] - 1e-3)
    return float(np.mean((smallest < smallest[0]) | equal))


TESTS = {
    "heads": Randomization(
        meaning="heads_differ",
        shape=lambda f: (f.head_count, f.key_heads),
        prepare=_relations,
        compare=permuted_heads,
        least=lambda f: f.head_count,
        refusal="the two have different numbers of heads, or a single one",
    ),
    "coordinates": Randomization(
        meaning="coordinates_differ",
        shape=lambda f: f.width,
        prepare=lambda f: _entries(f)[None],
        compare=permuted_coordinates,
        least=lambda f: f.width,
        refusal="the two have different widths",
    ),
    "dimensions": Randomization(
        meaning="dimensions_differ",
        shape=lambda f: (f.head_width, *f.grams.shape[2:]),
        prepare=_sizes,
        compare=flipped_dimensions,
        least=lambda f: f.grams.shape[2],
        refusal="the two have heads of different widths, or positions that turn them differently",
    ),
    "weights": Randomization(
        meaning="dimensions_differ",
        shape=lambda f: (f.head_count, f.key_heads, f.width, tuple(f.units)),
        prepare=_directions,
        compare=flipped_weights,
        least=lambda f: len(f.units) + 1,
        refusal="the two have weights of different shapes",
    ),
}
