"""The products q·k of a model next to the forms that wqk reads from its saved file.

A plan is matched with a softmax by numbers alone: some input of a projection x gives, through the
read weights and biases, every row of the queries that the model multiplied, head by head, up to the
scale of a token, and so do the keys of the same group. Names play no part.

Axes: n windows and heads, I queries, J keys, R head width, T tokens, D width, H heads, G key heads.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.checkpoints import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tools.deriving.records import Product, RunRecord, Site, VectorSource

    from wqk.attention import Block
    from wqk.checkpoints import Checkpoint


ALIKE = 1e-4  # largest 1 − |cosine|, of single precision
TINY = 1e-6
POOLED = {"max", "max_pool2d_with_indices"}  # what takes the largest of several tokens' entries
MOST_WINDOWS = 48  # windows and heads that are looked at
MOST_ROWS = 16  # rows of a window and head that are looked at


@dataclass
class Judgment:
    """Pairs of plans and softmaxes that match, and those without a match."""

    matched: dict[int, list[int]] = field(default_factory=dict)  # sites of each plan
    unmatched_sites: list[int] = field(default_factory=list)
    unmatched_plans: list[int] = field(default_factory=list)


def judge(sites: Sequence[Site], attentions: Sequence[Block]) -> Judgment:
    """Match every softmax with a plan."""
    verdict = Judgment()
    reads = [ReadAttention(attention) for attention in attentions]
    for number, site in enumerate(sites):
        # Names only order the search: it ends at the first plan whose numbers fit.
        likely = sorted(range(len(reads)), key=lambda n: not named_alike(reads[n].attention, site))
        plan = next((n for n in likely if reads[n].fits_some(site)), None)
        if plan is None:
            verdict.unmatched_sites.append(number)
        else:
            verdict.matched.setdefault(plan, []).append(number)
    for plan, read in enumerate(reads):
        if plan not in verdict.matched:
            also = [number for number, site in enumerate(sites) if read.fits_some(site)]
            verdict.matched |= {plan: also} if also else {}
    verdict.unmatched_plans = [n for n in range(len(reads)) if n not in verdict.matched]
    return verdict


def named_alike(attention: Block, site: Site) -> bool:
    """Return whether queries may come from the tensor that is read: saving changes prefixes."""
    ending = attention.plan.query.tensor.split(".")[-4:]
    return any(
        source.parameter.split(".")[-4:] == ending
        for product in site.products
        for source in product.query_sources
    )


def content_of(site: Site) -> list[Product]:
    """The products of what the model was given, rather than of positions alone.

    Products that only choose which keys are seen (an indexer's) are left out.
    """
    scores = [p for p in site.products if "topk" not in p.through] or site.products
    most = max(product.varies for product in scores)
    return [product for product in scores if product.varies == most]


def beside(site: Site) -> bool:
    """Return whether products without content are added to the score."""
    return any("topk" not in p.through for p in site.products if p not in content_of(site))


def is_learned(site: Site) -> bool:
    """Return whether queries or keys are parameters, such as those of a pooling head."""
    return max(product.varies for product in site.products) < 2


def of_channels(site: Site, record: RunRecord, checkpoint: Checkpoint) -> bool:
    """Return whether queries and keys are channels: one output of a projection each."""
    names = set(checkpoint.tensors())
    for product in content_of(site):
        tokens = product.queries.shape[-1]
        for source in product.query_sources:
            name = record.names.get(source.parameter, source.parameter)
            if source.depth or name not in names or len(source.given) % tokens:
                continue
            weight = np.asarray(checkpoint.read([Part(name)])[0], np.float64)
            if weight.ndim != 2 or weight.shape[1] != source.given.shape[1]:
                continue
            outputs = source.given.astype(np.float64) @ weight.T
            recorded = outputs.reshape(-1, tokens, len(weight)).swapaxes(1, 2).reshape(-1, tokens)
            centered = [
                _unit(r - r.mean(-1, keepdims=True)) for r in (recorded, product.queries[0])
            ]
            if ((centered[1] @ centered[0].T).max(axis=-1) > 1 - ALIKE).all():
                return True
    return False


def head_biases(product: Product) -> list[np.ndarray]:
    """Parameters that are added to the queries of every head (H, R)."""
    return [
        source.given
        for source in product.query_sources
        if source.parameter
        and source.depth == 0
        and {"leaf", "add"} <= {*source.operations}
        and source.given.shape[-1] == product.queries.shape[-1]
        and len(product.queries) % len(source.given) == 0
    ]


class ReadAttention:
    """One attention as read, in a form that is quickly compared.

    Either the plain forms, W x + b with what is linear in norms, computed here; or, where
    ``turned`` is set, everything that wqk says of queries and keys, positions included.
    """

    def __init__(self, attention: Block, turned: bool = False) -> None:
        self.attention, self.turned = attention, turned
        self.heads, self.width, self.d_query = attention.query.weight.shape
        self.groups, _, self.d_key = attention.key.weight.shape
        # Latent attention has dimensions for positions alone, compared where positions are.
        positional = attention.positional if turned else None
        self.apart = positional[0].weight.shape[1] if positional else 0
        self.width += self.apart

    def fits_some(self, site: Site) -> bool:
        """Return whether a product of the site's full inputs matches this attention."""
        return any(map(self.fits, content_of(site)))

    def fits(self, product: Product) -> bool:
        for columns in _columns(product, self.width):
            windows = slice(min(MOST_WINDOWS, len(product.queries)))
            queries = product.queries[windows, ..., columns].astype(np.float64)
            keys = product.keys[windows, ..., columns].astype(np.float64)
            # Entries that are joined to the keys (DeepSeek V4) have no positions in the text.
            is_joined = self._least(product) < 1
            length = queries.shape[1] if is_joined else keys.shape[1]
            for vectors in self._vectors(product.key_sources, length, False):
                shift = self._shift(False)
                groups = owners(keys, vectors, shift, least=self._least(product))
                if groups is None or (groups >= 0).sum() == 0:
                    continue
                if self._queries_fit(product, queries, groups):
                    return True
        return False

    def _queries_fit(self, product: Product, queries: np.ndarray, groups: np.ndarray) -> bool:
        length = queries.shape[1]
        if any(s.depth == 0 and POOLED & {*s.operations} for s in product.query_sources):
            return self._pooled_fit(product, queries)
        for recorded, vectors in itertools.product(
            [queries, *self._without_biases(product, queries)],
            self._vectors(product.query_sources, length, True),
        ):
            of_group = vectors.reshape(self.groups, -1, self.width)
            shift = self._shift(True)
            shifts = None if shift is None else shift.reshape(self.groups, -1, self.width)[:, 0]
            owner_of_head = owners(recorded, of_group, shifts, groups)
            if owner_of_head is None:
                continue
            heads = owners(recorded, vectors, shift)
            if heads is None:  # several heads' queries in one product
                return True
            if len(set(heads[heads >= 0])) == self.heads:
                return True
        return False

    def _least(self, product: Product) -> float:
        """The least share of keys that are tokens', next to what the family says it leaves out."""
        rule = self.attention.plan.rule
        joined = any(s.depth == 0 and "cat" in s.operations for s in product.key_sources)
        return 0.5 if joined and not rule.whole_score else 1.0

    def _pooled_fit(self, product: Product, queries: np.ndarray) -> bool:
        """Return whether all entries of the queries are entries of some token, in one head."""
        factor = self.attention.plan.score_scale / product.factor
        rows = queries.reshape(len(queries), -1, self.width) / factor
        for vectors in self._vectors(product.query_sources, queries.shape[1], True):
            near = ALIKE * vectors.std()
            computed = np.sort(vectors.reshape(self.heads, -1, self.width), axis=1)

            def has(head: np.ndarray, token: np.ndarray, near: float = near) -> bool:
                pairs = zip(head.T, token.T, strict=True)
                return all(
                    (np.searchsorted(k, s - near) < np.searchsorted(k, s + near)).all()
                    for k, s in pairs
                )

            if all(any(has(head, row) for head in computed) for row in rows):
                return True
        return False

    def _without_biases(self, product: Product, queries: np.ndarray) -> Iterator[np.ndarray]:
        """Queries without a vector of each head that is added to them all: a term of keys alone."""
        for bias in head_biases(product):
            if bias.shape == (self.heads, self.width):
                yield queries - bias[np.arange(len(queries)) % self.heads][:, None]

    @property
    def _is_stretched(self) -> bool:
        """Return whether an attention factor turns a head's vectors only in part."""
        rotary = self.attention.plan.rotary
        if rotary is None or rotary.amplitude == 1:
            return False
        return 2 * len(rotary.frequencies) < self.width or self.attention.query.shift is not None

    def _shift(self, query: bool) -> Any:
        factor = self.attention.query if query else self.attention.key
        return None if self.turned else factor.shift

    def _vectors(
        self, sources: Sequence[VectorSource], length: int, query: bool, positions: bool = True
    ) -> Iterator[np.ndarray]:
        """Queries or keys (heads, T, R) of each input that may be the projection's."""
        factor = self.attention.query if query else self.attention.key
        width = factor.weight.shape[-1]
        seen = set()
        for source in sources:
            if source.given.shape[-1] != width or id(source.given) in seen:
                continue
            seen.add(id(source.given))
            x = source.given.astype(np.float64)
            if self.turned or self.attention.plan.clip is not None or self._is_stretched:
                positions = positions and self.turned
                for first in (0, 1) if positions else (0,):  # some count from 1
                    numbers = np.arange(len(x)) % length + first
                    numbers = numbers if positions else np.zeros(len(x))
                    compute = self.attention.queries if query else self.attention.keys
                    vectors = np.asarray(compute(x, numbers), np.float64)
                    vectors = vectors if query else vectors[:: self.heads // self.groups]
                    yield vectors
                    if self.attention.plan.rotary is not None:
                        yield from (vectors[..., order] for order in _orders(self.width))
                    if self.apart:  # pairs that turned may be stored as halves
                        turned = vectors[..., -self.apart :]
                        halves = [turned[..., ::2], turned[..., 1::2]]
                        yield np.concatenate([vectors[..., : -self.apart], *halves], axis=-1)
                continue
            vectors = x @ np.asarray(factor.weight, np.float64).swapaxes(-1, -2)
            if factor.bias is not None:
                vectors = vectors + np.asarray(factor.bias, np.float64)[:, None]
            yield vectors
            if self.attention.plan.may_turn:  # pairs may be stored as halves, or the other way
                for order in _orders(self.width):
                    yield vectors[..., order]

    def length(self, query: bool, product: Product) -> float | None:
        """Return the ratio of the lengths of recorded vectors and of vectors that wqk computes.

        NaN where that differs from token to token; None where it cannot be told.
        """
        rows = product.queries if query else product.keys
        sources = product.query_sources if query else product.key_sources
        if rows.shape[-1] != self.width:
            return None
        rows = rows.reshape(-1, self.width)
        rows = rows[:: max(1, len(rows) // 40)].astype(np.float64)
        for vectors in self._vectors(sources, 1, query, positions=False):
            computed = vectors.reshape(-1, self.width)
            sizes = np.linalg.norm(computed, axis=-1)
            ratios = []
            for row in rows[np.linalg.norm(rows, axis=-1) > TINY]:
                size = float(np.linalg.norm(row))
                along = computed @ row / (size * np.maximum(sizes, 1e-30))
                best = int(along.argmax())
                if along[best] < 1 - ALIKE:
                    break
                ratios.append(size / float(sizes[best]))
            else:
                if ratios:
                    is_constant = max(ratios) / min(ratios) < 1.01
                    return float(np.median(ratios)) if is_constant else math.nan
        return None


def _orders(width: int) -> Iterator[np.ndarray]:
    """Dimensions of a head with pairs as halves, and the other way; of one axis or of two."""
    for axes in (1, 2):
        if width % (2 * axes) == 0:
            halves = np.arange(width).reshape(axes, -1, 2).swapaxes(1, 2).reshape(-1)
            yield from (halves, np.argsort(halves))


def _columns(product: Product, width: int) -> Iterator[slice]:
    """Return the place of the content among the columns: all, the first, or the last."""
    all_columns = product.queries.shape[-1]
    if all_columns == width:
        yield slice(None)
    elif all_columns > width:
        yield slice(0, width)
        yield slice(all_columns - width, all_columns)


def owners(
    rows: np.ndarray,
    vectors: np.ndarray,
    shifts: Any,
    expected_owner: np.ndarray | None = None,
    least: float = 1.0,
) -> np.ndarray | None:
    """Return the owners of the rows (n, I, R) among the vectors (owners, T, R); −1 for zero rows.

    None where fewer than the ``least`` share of rows are somebody's, or the ``expected_owner``'s.
    """
    owners = np.full(len(rows), -1)
    prepared = [
        _directions(v, None if shifts is None else np.asarray(shifts[n], np.float64))
        for n, v in enumerate(vectors)
    ]
    for n, all_rows in enumerate(rows):
        sampled = all_rows[:: max(1, len(all_rows) // MOST_ROWS)]
        candidates = range(len(vectors)) if expected_owner is None else [expected_owner[n]]
        for owner in candidates:
            if owner < 0:
                owners[n] = -1
                break
            prepared_vectors, off = prepared[owner]
            mine = _unit(sampled if off is None else sampled - (sampled @ off)[:, None] * off)
            mine = mine[np.abs(mine).max(axis=-1) > 0]
            if not len(mine):
                break
            if not len(prepared_vectors):
                continue
            if ((mine @ prepared_vectors.T).max(axis=-1) > 1 - ALIKE).mean() >= least:
                owners[n] = owner
                break
        else:
            return None
    return owners


def _directions(vectors: np.ndarray, shift: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """Unit vectors, off the direction of a shift; and that direction."""
    vectors = vectors.reshape(-1, vectors.shape[-1])
    off = None
    if shift is not None and np.linalg.norm(shift) > TINY:
        off = shift / np.linalg.norm(shift)
        vectors = vectors - (vectors @ off)[:, None] * off
    return _unit(vectors), off


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.where(
        lengths > TINY * max(1.0, float(lengths.max(initial=0))),
        rows / np.maximum(lengths, 1e-30),
        0.0,
    )
