"""Fingerprints of blocks for `wqk.kin`: a few numbers that changes of coordinates do not alter.

A model's output stays equal under three changes of its queries and keys: renumbered heads, a
rotated residual stream, and rotated dimensions inside a head. Each part of a fingerprint depends on
some of these numberings, and does not depend on the others:

====================  =====================================================  =====================
part                  content                                                numberings kept
====================  =====================================================  =====================
``pairs``             tr(M_a M_b) and tr(M_a M_bᵀ) of all pairs of heads     heads
``form``              entries of the layer's form, on a few coordinates      stream coordinates
``grams``             AᵀA, BᵀB and BᵀA of each head                          dimensions in a head
``query``, ``key``    the factors, on the same coordinates                   all three
``spectra``           singular values of each head                           none
====================  =====================================================  =====================

Axes: H query heads, G key heads, D model width, R head width, S sampled coordinates of the stream,
U units of a head: single dimensions, or with rotary positions the planes that turn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.attention import Block
from wqk.attention.factors import FOLDED, PLAIN
from wqk.attention.rounding import ROUNDING, grid
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.forms.kernels import balance
from wqk.forms.spectra import root_of

# Coordinates of the residual stream, and numbers of each head, that are compared at most. A copy
# lies dozens of standard deviations from chance on far fewer.
SAMPLED, UNITS = 64, 32

# In a layer with more query rows (heads times head width), M_a is compared with M_bᵀ only where the
# heads a and b share a key head: the products of all queries would take most of the time.
WIDE = 2048

# Families with sinusoids in the residual stream by design: coordinates have meanings.
SINUSOIDAL = {
    "conditional_detr",
    "ctrl",
    "detr",
    "flaubert",
    "fsmt",
    "informer",
    "m2m_100",
    "marian",
    "musicgen",
    "nllb-moe",
    "pegasus",
    "pegasus_x",
    "roformer",
    "seamless_m4t",
    "seamless_m4t_v2",
    "speech_to_text",
    "speecht5",
    "time_series_transformer",
    "vit_mae",
    "whisper",
    "xglm",
    "xlm",
}


class FixedNumberings(NamedTuple):
    """Reasons why numberings of a block carry meaning; empty if a numbering is chance."""

    heads: str
    coordinates: str
    dimensions: str


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Fingerprint of one self-attention block.

    Attributes
    ----------
    stack, layer
        Place of the block.
    pairs
        Cosines of all pairs of heads: of M_a with M_bᵀ at index 0, of M_a with M_b at index 1. NaN
        if a cosine is not computed.
    norms
        ‖M_h‖ of each head.
    query, key
        The factors of all heads, on the sampled coordinates of the residual stream.
    units
        Number of the unit that each dimension of a head belongs to.
    grams
        AᵀA, BᵀB and BᵀA of each head, unit by unit.
    spectra
        Singular values of each head, largest first, scaled to norm 1.
    rounding
        Largest relative rounding error that the stored number types allow.
    width
        Width D of the residual stream.
    fixed
        Reasons why numberings of the block carry meaning.
    """

    stack: str
    layer: int
    pairs: Float[np.ndarray, "two heads heads"]
    norms: Float[np.ndarray, " heads"]
    query: Float[np.ndarray, "heads r s"]
    key: Float[np.ndarray, "key_heads r s"]
    units: Int[np.ndarray, " r"]
    grams: Float[np.ndarray, "heads three u u within within"]
    spectra: Float[np.ndarray, "heads r"]
    rounding: float
    width: int
    fixed: FixedNumberings

    @property
    def head_count(self) -> int:
        """H, the number of query heads."""
        return len(self.query)

    @property
    def key_heads(self) -> int:
        """G, the number of key heads."""
        return len(self.key)

    @property
    def head_width(self) -> int:
        """R, the width of a head."""
        return int(self.query.shape[1])

    @property
    def forms(self) -> Float[np.ndarray, "heads s s"]:
        """M_h on the sampled coordinates."""
        keys = self.key.repeat(self.head_count // self.key_heads, axis=0)
        return np.asarray(self.query.swapaxes(-1, -2) @ keys)


def fingerprint(block: Block, folds: bool) -> Fingerprint | None:
    """Read one block; None if its form is not square, because symmetry needs a square form.

    With ``folds``, the gains of the norms before the block are folded in.
    """
    plan = block.plan
    ((_, form),) = block.forms(FOLDED if folds else PLAIN)
    if not form.is_square:
        return None
    width = form.widths[0]
    query, key, scale = _scaled_factors(form)
    pairs, norms, products = _pairs(query, key)
    sampled = np.sort(np.random.default_rng(0).permutation(width)[:SAMPLED])
    sampled_query = query[..., sampled]
    if scale != 1:
        sampled_query = sampled_query.astype(np.float64) * scale
    rotary = plan.rotary or plan.axial
    units = _units(form.rank, rotary.planes if rotary else None)
    query_heads_per_key_head = len(query) // len(key)
    return Fingerprint(
        stack=plan.stack,
        layer=plan.layer,
        pairs=pairs,
        norms=norms * scale,
        query=sampled_query,
        key=key[..., sampled].copy(),
        units=units,
        grams=_grams(products, units),
        spectra=_spectra(products[0], products[1, ::query_heads_per_key_head]),
        rounding=_rounding(block),
        width=width,
        fixed=FixedNumberings(
            heads=_fixed_heads(plan),
            coordinates=_fixed_coordinates(block),
            dimensions=_fixed_dimensions(plan),
        ),
    )


def _rounding(block: Block) -> float:
    """Return the largest relative error that the number types of the stored weights allow.

    Weights that were rounded to 16 bits keep this error if they are now stored in 32 bits.
    """
    parts = [*block.plan.query.parts, *block.plan.key.parts]
    errors = []
    for part, values in zip(parts, block.read(parts), strict=True):
        if values.ndim > 1:
            number_type = grid(block.checkpoint.info(part.name).dtype, values)
            errors.append(ROUNDING.get(number_type, 0.0))
    return max(errors)


def _fixed_heads(plan: AttentionPlan) -> str:
    """Return the reason why the order of heads carries meaning; empty if it does not."""
    if "alibi" in plan.position:
        return "its heads differ by their linear biases"
    return ""


def _fixed_coordinates(block: Block) -> str:
    """Return the reason why stream coordinates carry meaning; empty if they do not."""
    if {block.plan.family, block.checkpoint.config.get("model_type")} & SINUSOIDAL:
        return "its residual stream holds sinusoids of position"
    return ""


def _fixed_dimensions(plan: AttentionPlan) -> str:
    """Return the reason why dimensions of a head carry meaning; empty if they do not."""
    if plan.rule.guess:
        return "whether its positions turn dimensions is not known, as its family was guessed"
    if plan.position.startswith("rotary"):
        return f"its positions are {plan.position}"
    if any(side.norm and side.norm.kind == "layer" for side in (plan.query, plan.key)):
        return "queries or keys are centered"
    return ""


def _scaled_factors(form: BilinearForm) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the factors (H, R, D) and (G, R, D) in the safe range, and the scale of the forms."""
    factors = []
    scale = 1.0
    for factor in (form.query, form.key):
        balanced, exponents, _ = balance(factor, np)
        if exponents.any():  # all heads share one scale
            largest = exponents.max()
            balanced = balanced * 2.0 ** (exponents - largest)[..., None, None]
            scale *= 2.0 ** float(largest)
        width, rank = balanced.shape[-2:]
        factors.append(balanced.swapaxes(-1, -2).reshape(-1, rank, width))
    query, key = factors
    return query, key, scale


def _pairs(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return cosines of all pairs of heads, norms of all heads, and products of each head.

    The cosines (2, H, H) are transposed at index 0 and straight at index 1. With A = query and
    B = key, tr(M_a M_b) = Σ_ij (B_aᵀ A_b)_ij (B_bᵀ A_a)_ji and
    tr(M_a M_bᵀ) = Σ_ij (A_aᵀ A_b)_ij (B_aᵀ B_b)_ij. Heads of norm 0 have cosines 0. The products
    (3, H, R, R) are AᵀA, BᵀB and BᵀA.
    """
    heads, width, d = query.shape
    groups = len(key)
    sharing = heads // groups  # query heads of each group
    query_rows = query.reshape(-1, d)
    key_rows = key.reshape(-1, d)
    cross_products = key_rows @ query_rows.T  # B_gᵀ A_h
    cross_products = cross_products.reshape(groups, width, groups, sharing, width)
    transposed = np.full((groups, sharing, groups, sharing), np.nan)  # tr(M_a M_b)
    straight = np.full((groups, sharing, groups, sharing), np.nan)  # tr(M_a M_bᵀ)
    products = np.empty((3, groups, sharing, width, width), query.dtype)
    for a in range(groups):
        # Only pairs with later groups; the earlier ones follow by symmetry.
        for b in range(a, groups):
            forward = cross_products[a, :, b]
            backward = cross_products[b, :, a]
            transposed[a, :, b] = np.tensordot(backward, forward, axes=((0, 2), (2, 0)))
        end = groups if len(query_rows) <= WIDE else a + 1
        query_rows_from_a = query[a * sharing : end * sharing].reshape(-1, d)
        query_rows_of_a = query_rows_from_a[: sharing * width]
        key_rows_from_a = key_rows[a * width : end * width]
        query_products = query_rows_of_a @ query_rows_from_a.T  # A_aᵀ A_b
        query_products = query_products.reshape(sharing, width, -1, sharing, width)
        key_products = key[a] @ key_rows_from_a.T  # B_aᵀ B_b
        key_products = key_products.reshape(width, -1, width)
        straight[a, :, a:end] = np.einsum("aigbj,igj->agb", query_products, key_products)
        products[0, a] = np.einsum("aiaj->aij", query_products[:, :, 0])
        products[1, a] = key_products[:, 0]
        products[2, a] = cross_products[a, :, a].swapaxes(0, 1)
    traces = np.stack([_symmetric(transposed, heads), _symmetric(straight, heads)])
    norms = np.sqrt(traces[1].diagonal().clip(min=0))
    divisors = np.where(norms > 0, norms, np.inf)
    cosines = (traces / divisors[:, None] / divisors).astype(np.float32)
    return cosines, norms, products.reshape(3, heads, width, width)


def _symmetric(traces: np.ndarray, heads: int) -> Float[np.ndarray, "heads heads"]:
    """Return traces of all pairs of heads, from ``traces`` with the same or a later head."""
    upper = np.triu(traces.reshape(heads, heads))
    return upper + np.triu(upper, 1).T


def _units(width: int, planes: tuple[slice, slice] | None) -> Int[np.ndarray, " r"]:
    """Return the unit number of each dimension: rotary planes first, then single dimensions."""
    if planes is None:
        return np.arange(width)
    units = np.full(width, -1)
    plane_count = len(np.arange(width)[planes[0]])
    for plane in planes:
        units[plane] = np.arange(plane_count)
    is_still = units < 0
    units[is_still] = plane_count + np.arange(is_still.sum())
    return units


def _compared_dimensions(units: Int[np.ndarray, " r"]) -> np.ndarray:
    """Return the dimensions of the compared units, (U, 1) or (U, 2): units of one size."""
    size = 2 if (units == 0).sum() == 2 else 1
    dimensions_by_unit = [np.flatnonzero(units == unit) for unit in range(units.max() + 1)]
    # The first planes are the fast ones, which training texts of any length turn.
    return np.array([dims for dims in dimensions_by_unit if len(dims) == size][:UNITS])


def _grams(products: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return AᵀA, BᵀB and BᵀA of each head, (H, 3, U, U, w, w), each of norm 1 off its diagonal."""
    dimensions = _compared_dimensions(units)
    count, within = dimensions.shape
    compared = dimensions.ravel()
    by_head = products.swapaxes(0, 1)
    grams = by_head[..., compared[:, None], compared]
    grams = grams.reshape(len(grams), 3, count, within, count, within)
    grams = grams.swapaxes(3, 4)
    off_diagonal = 1 - np.eye(count, dtype=grams.dtype)
    entries = grams * off_diagonal[:, :, None, None]
    norms = np.sqrt(np.square(entries).sum(axis=(2, 3, 4, 5), keepdims=True))
    divisors = np.where(norms > 0, norms, np.inf)
    return np.asarray(grams / divisors, np.float32)


def _spectra(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return singular values of A Bᵀ: roots of the eigenvalues of S (AᵀA) Sᵀ, with SᵀS = BᵀB.

    ``queries`` are AᵀA of all heads, (H, R, R), and ``keys`` are BᵀB of all key heads, (G, R, R).
    """
    heads_per_key_head = len(queries) // len(keys)
    roots = root_of(keys.astype(np.float64))
    roots = roots.repeat(heads_per_key_head, axis=0)
    products = roots @ queries.astype(np.float64) @ roots.swapaxes(-1, -2)
    ascending = np.linalg.eigvalsh(products)
    squares = ascending[:, ::-1].clip(min=0)  # rounding leaves small negative values
    spectra = np.sqrt(squares)
    norms = np.linalg.norm(spectra, axis=1, keepdims=True)
    divisors = np.where(norms > 0, norms, 1.0)
    return np.asarray(spectra / divisors, np.float32)


def spectral_closeness(
    reference: Sequence[Fingerprint], candidate: Sequence[Fingerprint]
) -> float | None:
    """Return the relative distance of the candidate's heads to the reference's, by singular values.

    The result is the median over heads of the distance to the nearest head of the reference,
    divided by the median distance to the nearest other head of the candidate: near 1 for unrelated
    models, 0 for a copy in any coordinates. None if the widths of heads differ, or if the candidate
    has a single head.
    """
    if len({block.head_width for block in (*reference, *candidate)}) > 1:
        return None
    reference_spectra = np.concatenate([block.spectra for block in reference])
    candidate_spectra = np.concatenate([block.spectra for block in candidate])
    if len(candidate_spectra) < 2:
        return None
    within = _distances(candidate_spectra, candidate_spectra)
    np.fill_diagonal(within, np.inf)
    usual = float(np.median(within.min(axis=1)))
    if usual <= 0:
        return None
    between = _distances(candidate_spectra, reference_spectra)
    return float(np.median(between.min(axis=1))) / usual


def _distances(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the distance of each row of the first array to each row of the second."""
    return np.array([np.linalg.norm(columns - row, axis=1) for row in rows.astype(np.float64)])
