"""Tests of kinship: agreement of two models beyond the agreement by chance of their numberings.

Weights are drawn independently, and training treats all heads of a layer in the same way, all
coordinates of the residual stream, and all dimensions of a head. Therefore, if two models have no
weights in common, every renumbering of the candidate is as likely as the actual numbering, also for
models with common architecture, recipe, text and order of the text. If attention was trained from
scratch on the embeddings of another model, the argument holds for heads and dimensions, but not for
coordinates. Each test renumbers the candidate many times, and counts the renumberings with at least
the agreement of the actual numbering:

- ``heads``: the heads of each layer are permuted; heads that share a key head stay together;
- ``coordinates``: the coordinates of the residual stream are permuted, in all layers at once;
- ``dimensions``: the units of each head change their signs, in queries and keys at once, and
  are compared with each other within each head;
- ``weights``: units change their signs as for ``dimensions``, and weights are compared as stored.
  The test detects no relation after any of the three changes; otherwise it detects the weakest
  relation.

The tests search for the matching layer (and for ``dimensions`` the matching head): layers again in
each renumbering, heads by numbers that do not depend on signs.

Axes: N renumberings, L layers of the candidate, K layers of the reference, H heads, G key heads,
S sampled coordinates, U units of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._typing import Float, Int

if TYPE_CHECKING:
    from wqk.kinship.fingerprints import Fingerprint

# Numbers in one intermediate array: 2 MB in float32, which stays in a core's cache.
CHUNK = 2**19

# The tests that hold whatever coordinates of the stream two models share: they compare signs and
# orders that each model drew for itself.
OF_WEIGHTS = ("heads", "dimensions", "weights")

# Passes over rows and columns after which a form is free of the scales of both.
SCALING_PASSES = 4


class Agreement(NamedTuple):
    """Agreement of two models in one test; index 0 of N is the actual numbering.

    Attributes
    ----------
    layers
        Agreement of each layer of the candidate with the best layer of the reference.
    match
        The layer of the reference that each layer of the candidate matches; -1 if no layer can be
        compared.
    heads
        For each layer of the candidate, the reference's head that each head matches, or -1.
    copy
        Agreement of the candidate with a copy of the candidate, summed over layers.
    """

    layers: Float[np.ndarray, "n layers"]
    match: Int[np.ndarray, " layers"]
    heads: tuple[Int[np.ndarray, " heads"], ...]
    copy: float


@dataclass(frozen=True)
class RandomizationResult:
    """Result of one test of two models, or the reason why the test was left out.

    Attributes
    ----------
    name
        Name of the test: ``heads``, ``coordinates``, ``dimensions``, ``weights``.
    p
        Share of renumberings, including the actual numbering, with at least this agreement.
    z
        Deviation from the mean over renumberings, in standard deviations.
    visible
        The agreement that one in a thousand renumberings exceeds, relative to the agreement of a
        copy.
    left_out
        Reason why the test was left out; else empty.
    """

    name: str
    p: float | None
    z: float | None
    visible: float | None
    left_out: str = ""


class KinshipEvidence(NamedTuple):
    """Results of all tests of two models.

    Attributes
    ----------
    p
        Joint p of heads, dimensions and weights; None if no test applies.
    coordinates_p
        p of the coordinates of the residual stream; None if the test does not apply.
    floor
        The smallest p that this number of renumberings can give.
    results
        The result of each test.
    agreements
        The agreements in the tests that apply, by name.
    """

    p: float | None
    coordinates_p: float | None
    floor: float
    results: tuple[RandomizationResult, ...]
    agreements: dict[str, Agreement]


def gather(
    reference: Sequence[Fingerprint],
    candidate: Sequence[Fingerprint],
    count: int,
    seed: int = 0,
) -> KinshipEvidence:
    """Renumber the candidate ``count`` times in each test.

    Renumbering n of all tests is one renumbering of the model. Each test ranks the renumberings; p
    compares the smallest share over tests, and therefore needs no correction for their number.
    """
    agreements: dict[str, Agreement] = {}
    reasons: dict[str, str] = {}
    for position, (name, test) in enumerate(TESTS.items()):
        random = np.random.default_rng([seed, position])
        agreement = renumber(test, reference, candidate, count, random)
        if isinstance(agreement, str):
            reasons[name] = agreement
        else:
            agreements[name] = agreement
    totals = {name: agreement.layers.sum(axis=1) for name, agreement in agreements.items()}
    shares = {name: _shares(totals_of_test) for name, totals_of_test in totals.items()}

    results = []
    for name in TESTS:
        if name in reasons:
            results.append(RandomizationResult(name, None, None, None, reasons[name]))
        else:
            share = float(shares[name][0])
            results.append(_result(name, share, totals[name], agreements[name].copy))

    applied = [name for name in OF_WEIGHTS if name in totals]
    joined = None
    if applied:
        shares_of_weights = np.stack([shares[name] for name in applied])
        totals_of_weights = np.stack([totals[name] for name in applied])
        joined = _joined(shares_of_weights, totals_of_weights)
    return KinshipEvidence(
        p=joined,
        coordinates_p=float(shares["coordinates"][0]) if "coordinates" in shares else None,
        floor=1 / (count + 1),
        results=tuple(results),
        agreements=agreements,
    )


def _result(
    name: str, share: float, totals: Float[np.ndarray, " n"], copy: float
) -> RandomizationResult:
    """Return the result of an applicable test, from totals over layers."""
    actual = totals[0]
    by_chance = totals[1:]
    mean = by_chance.mean()
    spread = by_chance.std()
    deviations = float((actual - mean) / spread) if spread > 0 else 0.0
    visible = None
    if copy > mean:
        visible = float((np.quantile(by_chance, 0.999) - mean) / (copy - mean))
    return RandomizationResult(name, share, deviations, visible)


def layer_shares(agreement: Agreement) -> Float[np.ndarray, " layers"]:
    """Return, for each layer, the share of renumberings in which any layer agrees at least as much.

    The comparison with the largest agreement over all layers of a renumbering corrects for the
    number of layers.
    """
    largest = agreement.layers[1:].max(axis=1)
    is_exceeding = largest[:, None] >= agreement.layers[0] - _slack(largest)
    return np.asarray((1 + is_exceeding.sum(axis=0)) / (1 + len(largest)))


class LayerAgreement(NamedTuple):
    """Agreement of one layer of the candidate with layers of the reference.

    Attributes
    ----------
    by_renumbering
        The best agreement with a layer of the reference; index 0 is the actual numbering.
    best
        Position of the best layer among the compared layers of the reference.
    heads
        For each head of the candidate's layer, the matching head of the best layer.
    copy
        Agreement of the candidate's layer with a copy.
    """

    by_renumbering: Float[np.ndarray, " n"]
    best: int
    heads: np.ndarray
    copy: float


# Comparable layers of the reference, each with the values that a test prepared of the layer.
PreparedLayers = Sequence[tuple["Fingerprint", Any]]


class RandomizationTest(NamedTuple):
    """A test: one numbering, and the agreement of a layer after drawing the numbering again.

    Attributes
    ----------
    fixed
        Function that returns the reason why the numbering of a fingerprint carries meaning; empty
        if the numbering is chance.
    shape
        Function that returns the shape of a layer; layers of equal shape can be compared.
    prepare
        Function that returns the compared values of a layer; called once for each layer.
    compare
        Function that compares the comparable layers of the reference with a layer of the candidate.
    length
        Function that returns the number of numbered elements; a single element has only one order.
    refusal
        The reason given if no layers can be compared.
    """

    fixed: Callable[[Fingerprint], str]
    shape: Callable[[Fingerprint], Any]
    prepare: Callable[[Fingerprint], Any]
    compare: Callable[[PreparedLayers, Fingerprint, Any, Draw], LayerAgreement]
    length: Callable[[Fingerprint], int]
    refusal: str


class Draw(NamedTuple):
    """Source of renumberings.

    Attributes
    ----------
    size
        Number N of numberings, including the actual numbering.
    random
        Generator of random numbers.
    stream_orders
        Drawn orders of the residual stream, by its width; all layers share one order.
    """

    size: int
    random: np.random.Generator
    stream_orders: dict[int, np.ndarray]


def renumber(
    test: RandomizationTest,
    reference: Sequence[Fingerprint],
    candidate: Sequence[Fingerprint],
    count: int,
    random: np.random.Generator,
) -> Agreement | str:
    """Return the agreement of the candidate's layers, or why the test does not apply."""
    for block in (*reference, *candidate):
        reason = test.fixed(block)
        if reason:
            return reason
    reference_shapes = [test.shape(block) for block in reference]
    comparable = [_positions(reference_shapes, test.shape(block)) for block in candidate]
    if not any(comparable) or max(map(test.length, candidate)) < 2:
        return test.refusal
    layers = np.zeros((count + 1, len(candidate)), np.float32)
    match = np.full(len(candidate), -1)
    heads = [np.full(block.head_count, -1) for block in candidate]
    copy = 0.0
    draw = Draw(count + 1, random, {})
    prepared = [test.prepare(block) for block in reference]
    for layer, (block, positions) in enumerate(zip(candidate, comparable, strict=True)):
        if not positions or test.length(block) < 2:
            continue
        prepared_layers = [(reference[position], prepared[position]) for position in positions]
        agreement = test.compare(prepared_layers, block, test.prepare(block), draw)
        layers[:, layer] = agreement.by_renumbering
        match[layer] = positions[agreement.best]
        heads[layer] = agreement.heads
        copy += agreement.copy
    return Agreement(layers, match, tuple(heads), copy)


def _positions(values: Sequence[Any], value: Any) -> list[int]:
    """Return the positions of a value in a sequence."""
    return [position for position, entry in enumerate(values) if entry == value]


def _reordered(
    prepared_layers: PreparedLayers, entries: np.ndarray, orders: np.ndarray
) -> tuple[np.ndarray, int, float]:
    """Return the best agreement in each order, the best layer, and a copy's agreement.

    ``entries`` of the candidate's layer are matrices; their rows and columns are permuted by the
    ``orders``. The first order is the actual order.
    """
    columns = np.stack([values.ravel() for _, values in prepared_layers], axis=1)
    columns /= np.sqrt(len(columns))
    best_layer = int((entries.ravel() @ columns).argmax())
    matrices, _, width = entries.shape
    flat_matrices = entries.reshape(matrices, -1)
    agreement = np.zeros(len(orders), np.float32)
    orders_at_once = max(1, CHUNK // entries.size)
    for start in range(0, len(orders), orders_at_once):
        chunk = orders[start : start + orders_at_once]
        positions = chunk[:, :, None] * width + chunk[:, None, :]
        reordered = np.take(flat_matrices, positions.ravel(), axis=1)
        by_order = reordered.reshape(matrices, len(chunk), -1).swapaxes(0, 1)
        products = by_order.reshape(len(chunk), -1) @ columns
        agreement[start : start + orders_at_once] = products.max(axis=1)
    agreement_of_copy = float(np.square(entries).sum() / np.sqrt(entries.size))
    return agreement, best_layer, agreement_of_copy


def permuted_heads(
    prepared_layers: PreparedLayers, block: Fingerprint, relations: np.ndarray, draw: Draw
) -> LayerAgreement:
    """Return the agreement of pairs of heads, for permutations of each layer's heads."""
    orders = _head_orders(draw, block.head_count, block.key_heads)
    agreement, best, copy = _reordered(prepared_layers, relations, orders)
    return LayerAgreement(agreement, best, np.arange(block.head_count), copy)


def permuted_coordinates(
    prepared_layers: PreparedLayers, block: Fingerprint, entries: np.ndarray, draw: Draw
) -> LayerAgreement:
    """Return the agreement of the layers' forms by entry, for permutations of the stream.

    Each head matches the head with the largest cosine on the sampled coordinates.
    """
    if block.width not in draw.stream_orders:
        sampled = entries.shape[-1]
        orders = draw.random.random((draw.size, sampled)).argsort(axis=1)
        orders[0] = np.arange(sampled)
        draw.stream_orders[block.width] = orders
    agreement, best, copy = _reordered(prepared_layers, entries, draw.stream_orders[block.width])
    matched_block, _ = prepared_layers[best]
    cosines = _flat_forms(block) @ _flat_forms(matched_block).T
    return LayerAgreement(agreement, best, cosines.argmax(axis=1), copy)


def _flat_forms(block: Fingerprint) -> np.ndarray:
    """Return the forms of all heads as rows of norm 1."""
    return _unit_rows(block.forms.reshape(block.head_count, -1))


def flipped_dimensions(
    prepared_layers: PreparedLayers, block: Fingerprint, sizes: np.ndarray, draw: Draw
) -> LayerAgreement:
    """Return the agreement of heads with the closest heads, for changes of signs of their units.

    The closest layer, and the closest head of each head in this layer, are found from the sizes of
    the units' products, which do not depend on signs.
    """
    likeness_by_layer = [sizes @ reference_sizes.T for _, reference_sizes in prepared_layers]
    totals = [likeness.max(axis=1).sum() for likeness in likeness_by_layer]
    best = int(np.argmax(totals))
    closest = likeness_by_layer[best].argmax(axis=1)
    matched_block, _ = prepared_layers[best]
    products = agreements(matched_block.grams[closest], block)
    signs = _signs(draw, products.shape[:2])
    products_with_flipped_rows = np.matmul(signs.swapaxes(0, 1), products).swapaxes(0, 1)
    agreement = (products_with_flipped_rows * signs).sum(axis=(1, 2))
    copy = float(agreements(block.grams, block).sum())
    return LayerAgreement(agreement, best, closest, copy)


def flipped_weights(
    prepared_layers: PreparedLayers,
    block: Fingerprint,
    directions: Sequence[np.ndarray],
    draw: Draw,
) -> LayerAgreement:
    """Return the agreement of weights by dimension, for changes of signs of units."""
    columns = [_cosines(values, directions, block) for _, values in prepared_layers]
    cosines = np.stack(columns, axis=1)
    agreement = _signs(draw, cosines.shape[:1]) @ cosines
    copy = float(_cosines(directions, directions, block).sum())
    best = int(agreement[0].argmax())
    return LayerAgreement(agreement.max(axis=1), best, np.arange(block.head_count), copy)


def _signs(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Draw random signs; row 0 changes none."""
    signs = draw.random.integers(0, 2, (draw.size, *shape)).astype(np.float32) * 2 - 1
    signs[0] = 1
    return signs


def _relations(block: Fingerprint) -> Float[np.ndarray, "two heads heads"]:
    """Return relations of all pairs of heads, relative to the usual relations in the layer.

    Pairs are standardized within three sets that permutations do not mix: a head with itself, heads
    that share a key head, and all remaining pairs. The norm of a head is used instead of the head's
    cosine with itself.
    """
    heads = block.head_count
    key_head = np.arange(heads) // (heads // block.key_heads)
    is_head_itself = np.eye(heads, dtype=bool)
    shares_key_head = (key_head[:, None] == key_head) & ~is_head_itself
    sets_of_pairs = (is_head_itself, shares_key_head, ~(is_head_itself | shares_key_head))
    relations = np.array(block.pairs, np.float64)
    log_norms = np.log(np.where(block.norms > 0, block.norms, 1.0))
    np.fill_diagonal(relations[1], log_norms)
    for cosines in relations:
        for pairs in sets_of_pairs:
            cosines[pairs] = _standardized(cosines[pairs])
    return np.asarray(relations, np.float32)


def _entries(block: Fingerprint) -> Float[np.ndarray, "s s"]:
    """Return the layer's form on the sampled coordinates, without the scales of rows and columns.

    Otherwise two models whose residual streams have the same outlying coordinates would agree.
    """
    entries = block.forms.sum(axis=0, dtype=np.float64)
    for _ in range(SCALING_PASSES):
        for axis in (0, 1):
            sizes = np.sqrt(np.square(entries).mean(axis=axis, keepdims=True))
            entries = entries / np.where(sizes > 0, sizes, 1.0)
    is_diagonal = np.eye(len(entries), dtype=bool)
    for mask in (is_diagonal, ~is_diagonal):
        entries[mask] = _standardized(entries[mask])
    return np.asarray(entries, np.float32)


def _standardized(values: np.ndarray) -> np.ndarray:
    """Return values with mean 0 and variance 1; 0 if all are equal, or if any are NaN."""
    if not values.size or np.isnan(values).any():
        return np.zeros_like(values)
    centered = values - values.mean()
    spread = np.sqrt(np.square(centered).mean())
    if spread <= 1e-6 * np.abs(values).max():
        return np.zeros_like(values)
    return np.asarray(centered / spread)


def _head_orders(draw: Draw, heads: int, key_heads: int) -> Int[np.ndarray, "n heads"]:
    """Draw orders of heads that keep the heads of a key head together; row 0 changes none."""
    sharing = heads // key_heads  # heads of each key head
    orders_of_key_heads = draw.random.random((draw.size, key_heads)).argsort(axis=1)
    orders_within = draw.random.random((draw.size, key_heads, sharing)).argsort(axis=2)
    first_heads = orders_of_key_heads[:, :, None] * sharing
    orders = (first_heads + orders_within).reshape(draw.size, heads)
    orders[0] = np.arange(heads)
    return orders


def agreements(grams: np.ndarray, block: Fingerprint) -> Float[np.ndarray, "groups u u"]:
    """Return the agreement of each pair of units of a block's heads with ``grams``, by key head.

    Heads that share a key head change their signs together. The sum has standard deviation 1.
    """
    by_head = np.einsum("hkuvij,hkuvij->huv", grams, block.grams)
    by_group = by_head.reshape(block.key_heads, -1, *by_head.shape[1:])
    products = by_group.sum(axis=1)
    products = (products + products.swapaxes(-1, -2)) / 2
    is_diagonal = np.eye(products.shape[-1], dtype=bool)
    products[:, is_diagonal] = 0
    spread = np.sqrt(2 * np.square(products).sum())
    if spread > 0:
        products = products / spread
    return np.asarray(products, np.float32)


def _directions(block: Fingerprint) -> list[np.ndarray]:
    """Return queries and keys of each dimension, scaled to norm 1."""
    return [_unit_rows(side.reshape(-1, side.shape[-1])) for side in (block.query, block.key)]


def _cosines(
    reference_directions: Sequence[np.ndarray],
    directions: Sequence[np.ndarray],
    block: Fingerprint,
) -> Float[np.ndarray, " groups_units"]:
    """Return the sum of cosines for each unit of each key head, in queries and keys.

    The sum is divided by the root of the number of units, so that all layers have equal weight.
    """
    groups, width = block.key_heads, block.head_width
    total = np.zeros((groups, width))
    for reference_rows, rows in zip(reference_directions, directions, strict=True):
        cosines = np.einsum("ns,ns->n", reference_rows, rows)
        total += cosines.reshape(groups, -1, width).sum(axis=1)
    is_of_unit = np.eye(block.units.max() + 1)[block.units]
    cosines_by_unit = total @ is_of_unit
    return np.asarray(cosines_by_unit.ravel() / np.sqrt(cosines_by_unit.size), np.float32)


def _sizes(block: Fingerprint) -> Float[np.ndarray, "heads products"]:
    """Return the sizes of the products of units, centered and of norm 1, independent of signs."""
    sizes = np.sqrt(np.square(block.grams).sum(axis=(-2, -1))).reshape(block.head_count, -1)
    return _unit_rows(sizes - sizes.mean(axis=1, keepdims=True))


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows scaled to norm 1; rows of zeros do not change."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1.0))


def _slack(values: np.ndarray) -> float:
    """Return a bound of the rounding error of a sum, so that unchanged totals count as equal."""
    return 1e-4 * float(values.std()) + 1e-9


def _shares(totals: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return, for each renumbering, the share of all renumberings with at least its total."""
    ascending = np.sort(totals)
    below = np.searchsorted(ascending, totals - _slack(totals), side="left")
    return np.asarray((len(totals) - below) / len(totals))


def _joined(shares: Float[np.ndarray, "tests n"], totals: Float[np.ndarray, "tests n"]) -> float:
    """Return the share of renumberings at least as extreme as the actual numbering.

    Renumberings are ordered by the smallest share over tests. Among equal shares, the share with
    the larger deviation of its total, in standard deviations, counts as smaller.
    """
    smallest = shares.min(axis=0)
    spread = totals.std(axis=1, keepdims=True)
    divisors = np.where(spread > 0, spread, 1.0)
    deviations = (totals - totals.mean(axis=1, keepdims=True)) / divisors
    deviations_of_smallest = np.where(shares == smallest, deviations, -np.inf)
    farthest = deviations_of_smallest.max(axis=0)
    is_smaller = smallest < smallest[0]
    is_as_far = (smallest == smallest[0]) & (farthest >= farthest[0] - 1e-3)
    return float(np.mean(is_smaller | is_as_far))


TESTS = {
    "heads": RandomizationTest(
        fixed=lambda block: block.fixed.heads,
        shape=lambda block: (block.head_count, block.key_heads),
        prepare=_relations,
        compare=permuted_heads,
        length=lambda block: block.head_count,
        refusal="the two have different numbers of heads, or a single one",
    ),
    "coordinates": RandomizationTest(
        fixed=lambda block: block.fixed.coordinates,
        shape=lambda block: block.width,
        prepare=lambda block: _entries(block)[None],
        compare=permuted_coordinates,
        length=lambda block: block.width,
        refusal="the two have different widths",
    ),
    "dimensions": RandomizationTest(
        fixed=lambda block: block.fixed.dimensions,
        shape=lambda block: (block.head_width, *block.grams.shape[2:]),
        prepare=_sizes,
        compare=flipped_dimensions,
        length=lambda block: block.grams.shape[2],
        refusal="the two have heads of different widths, or positions that turn them differently",
    ),
    "weights": RandomizationTest(
        fixed=lambda block: block.fixed.dimensions,
        shape=lambda block: (block.head_count, block.key_heads, block.width, tuple(block.units)),
        prepare=_directions,
        compare=flipped_weights,
        length=lambda block: len(block.units) + 1,
        refusal="the two have weights of different shapes",
    ),
}
