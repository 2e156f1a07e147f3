"""What `wqk.kin` keeps of a block: a few numbers that changes of coordinates leave alone.

A model computes the same after three changes of its queries and keys: its heads are renumbered,
its residual stream is rotated, or the dimensions inside a head are. Each part of a
fingerprint keeps some of these numberings and does not see the other changes:

====================  =====================================================  =====================
part                  what it holds                                          numbering that it keeps
====================  =====================================================  =====================
``pairs``             tr(M_a M_b) and tr(M_a M_bᵀ) of all pairs of heads     heads
``form``              entries of the layer's form, on a few coordinates      stream coordinates
``grams``             AᵀA, BᵀB and BᵀA of each head                          dimensions in a head
``query``, ``key``    the factors themselves, on these coordinates           all three
``spectra``           singular values of each head                           none
====================  =====================================================  =====================

Axes: H query heads, G key heads, D model width, R head width, S sampled coordinates of the stream,
U units of a head: single dimensions, or with rotary positions the planes that turn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

# A layer of more dimensions compares heads straight, tr(M_a M_bᵀ), only if they share a key head:
# the products of all queries with each other would take most of the time.
WIDE = 2048


# Families whose residual stream holds sinusoids by design, so that its coordinates have meanings.
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


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """One self-attention block."""

    stack: str
    layer: int
    # Cosines of M_a with M_bᵀ, and with M_b; NaN if not computed.
    pairs: Float[np.ndarray, "two heads heads"]
    norms: Float[np.ndarray, " heads"]  # ‖M_h‖
    query: Float[np.ndarray, "heads r s"]  # W_q on the sampled coordinates
    key: Float[np.ndarray, "key_heads r s"]
    units: Int[np.ndarray, " r"]  # of each dimension of a head: the unit that it belongs to
    grams: Float[np.ndarray, "heads three u u within within"]  # AᵀA, BᵀB, BᵀA, unit by unit
    spectra: Float[np.ndarray, "heads r"]  # singular values, largest first, of norm 1
    rounding: float  # of the stored values, relative to the largest of a form
    width: int  # D
    # Why a numbering carries meaning in this family, so that it is no matter of chance; or empty.
    heads_differ: str
    coordinates_differ: str
    dimensions_differ: str

    @property
    def head_count(self) -> int:
        """H."""
        return len(self.query)

    @property
    def key_heads(self) -> int:
        """G."""
        return len(self.key)

    @property
    def head_width(self) -> int:
        """R."""
        return int(self.query.shape[1])

    @property
    def forms(self) -> Float[np.ndarray, "heads s s"]:
        """M_h on the sampled coordinates."""
        keys = self.key.repeat(len(self.query) // len(self.key), axis=0)
        return np.asarray(self.query.swapaxes(-1, -2) @ keys)


def fingerprint(block: Block, folds: bool) -> Fingerprint | None:
    """Read one block; None if its form is not square, as symmetry needs.

    With ``folds`` the gains of the norms that feed it are folded in.
    """
    plan = block.plan
    ((_, form),) = block.forms(FOLDED if folds else PLAIN)
    if not form.is_square:
        return None
    query, key, scale = _scaled(form)
    pairs, norms, products = _pairs(query, key)
    at = np.sort(np.random.default_rng(0).permutation(form.widths[0])[:SAMPLED])
    rotary = plan.rotary or plan.axial
    units = _units(form.rank, rotary.planes if rotary else None)
    spectra = _spectra(products[0], products[1, :: len(query) // len(key)])
    return Fingerprint(
        plan.stack,
        plan.layer,
        pairs,
        norms * scale,
        query[..., at] if scale == 1 else query[..., at].astype(np.float64) * scale,
        key[..., at].copy(),
        units,
        _grams(products, units),
        spectra,
        _rounding(block),
        form.widths[0],
        "" if "alibi" not in plan.position else "its heads differ by their linear biases",
        ""
        if plan.family not in SINUSOIDAL
        and block.checkpoint.config.get("model_type") not in SINUSOIDAL
        else "its residual stream holds sinusoids of position",
        _dimensions_differ(plan),
    )


def _rounding(block: Block) -> float:
    """The largest relative error that the stored weights' types allow, as their values show them.

    Weights that were once stored in 16 bits keep their coarseness where each takes 32 now.
    """
    parts = [*block.plan.query.parts, *block.plan.key.parts]
    return max(
        ROUNDING.get(grid(block.checkpoint.info(part.name).dtype, values), 0.0)
        for part, values in zip(parts, block.read(parts), strict=True)
        if values.ndim > 1
    )


def _dimensions_differ(plan: AttentionPlan) -> str:
    if plan.rule.guess:
        return "whether its positions turn dimensions is not known, as its family was guessed"
    if plan.position.startswith("rotary"):
        return f"its positions are {plan.position}"
    if any(side.norm and side.norm.kind == "layer" for side in (plan.query, plan.key)):
        return "queries or keys are centered"
    return ""


def _scaled(form: BilinearForm) -> tuple[np.ndarray, np.ndarray, float]:
    """All heads' factors (H, R, D) and (G, R, D) in the safe range, and the forms' scale."""
    factors, scale = [], 1.0
    for factor in (form.query, form.key):
        factor, exponents, _ = balance(factor, np)
        if exponents.any():  # one scale for all heads
            factor = factor * 2.0 ** (exponents - exponents.max())[..., None, None]
            scale *= 2.0 ** float(exponents.max())
        factors.append(factor.swapaxes(-1, -2).reshape(-1, *factor.shape[:-3:-1]))
    return factors[0], factors[1], scale


def _pairs(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cosines of all pairs of heads, transposed (2, H, H)[0] and straight [1], and their norms.

    tr(M_a M_b) = Σ_ij (B_aᵀ A_b)_ij (B_bᵀ A_a)_ji and tr(M_a M_bᵀ) = Σ_ij (A_aᵀ A_b)_ij
    (B_aᵀ B_b)_ij, with A = query and B = key. Zero heads have cosines 0. Last come AᵀA, BᵀB and BᵀA
    of each head, (3, H, R, R).
    """
    (heads, width, d), groups = query.shape, len(key)
    sharing = heads // groups
    rows, key_rows = query.reshape(-1, d), key.reshape(-1, d)
    crossing = (key_rows @ rows.T).reshape(groups, width, groups, sharing, width)  # B_gᵀ A_h
    pairs = np.full((2, groups, sharing, groups, sharing), np.nan)
    own = np.empty((3, groups, sharing, width, width), query.dtype)
    for a in range(groups):  # with itself and those that follow; the other half by symmetry
        for b in range(a, groups):
            forward, backward = crossing[a, :, b], crossing[b, :, a]
            pairs[0, a, :, b] = np.tensordot(backward, forward, axes=((0, 2), (2, 0)))
        last = groups if len(rows) <= WIDE else a + 1
        queries = query[a * sharing : last * sharing].reshape(-1, d)
        queries = (queries[: sharing * width] @ queries.T).reshape(
            sharing, width, -1, sharing, width
        )
        keys = (key[a] @ key_rows[a * width : last * width].T).reshape(width, -1, width)
        pairs[1, a, :, a:last] = np.einsum("aigbj,igj->agb", queries, keys)
        own[0, a] = np.einsum("aiaj->aij", queries[:, :, 0])
        own[1, a], own[2, a] = keys[:, 0], crossing[a, :, a].swapaxes(0, 1)
    pairs = np.triu(pairs.reshape(2, heads, heads))
    pairs += np.triu(pairs, 1).swapaxes(1, 2)
    norms = np.sqrt(pairs[1].diagonal().clip(min=0))
    safe = np.where(norms > 0, norms, np.inf)
    cosines = (pairs / safe[:, None] / safe).astype(np.float32)
    return cosines, norms, own.reshape(3, heads, width, width)


def _units(width: int, planes: tuple[slice, slice] | None) -> Int[np.ndarray, " r"]:
    """Of each dimension the number of its unit: rotary planes first, then single dimensions."""
    if planes is None:
        return np.arange(width)
    units = np.full(width, -1)
    turning = np.arange(width)[planes[0]]
    for plane in planes:
        units[plane] = np.arange(len(turning))
    still = units < 0
    units[still] = len(turning) + np.arange(still.sum())
    return units


def _compared(units: Int[np.ndarray, " r"]) -> np.ndarray:
    """The dimensions of units of one size that are compared with each other, (U, 1) or (U, 2)."""
    size = 2 if (units == 0).sum() == 2 else 1
    chosen = [np.flatnonzero(units == unit) for unit in range(units.max() + 1)]
    # Of planes, the fast ones, which every length of training text turns.
    return np.array([dimensions for dimensions in chosen if len(dimensions) == size][:UNITS])


def _grams(products: np.ndarray, units: np.ndarray) -> np.ndarray:
    """AᵀA, BᵀB and BᵀA of each head, (H, 3, U, U, w, w), each of norm 1 off its diagonal."""
    units = _compared(units)
    flat, (count, within) = units.ravel(), units.shape
    grams = products.swapaxes(0, 1)[..., flat[:, None], flat]
    grams = grams.reshape(len(grams), 3, count, within, count, within).swapaxes(3, 4)
    off = 1 - np.eye(count, dtype=grams.dtype)[:, :, None, None]
    size = np.sqrt(np.square(grams * off).sum(axis=(2, 3, 4, 5), keepdims=True))
    return np.asarray(grams / np.where(size > 0, size, np.inf), np.float32)


def _spectra(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The singular values of A Bᵀ: the roots of the eigenvalues of S (AᵀA) Sᵀ, SᵀS being BᵀB.

    From AᵀA of each head, (H, R, R), and BᵀB of each key head, (G, R, R).
    """
    root = root_of(keys.astype(np.float64)).repeat(len(queries) // len(keys), axis=0)
    squares = np.linalg.eigvalsh(root @ queries.astype(np.float64) @ root.swapaxes(-1, -2))
    spectra = np.sqrt(squares[:, ::-1].clip(min=0))
    size = np.linalg.norm(spectra, axis=1, keepdims=True)
    return np.asarray(spectra / np.where(size > 0, size, 1.0), np.float32)


def spectral_closeness(a: Sequence[Fingerprint], b: Sequence[Fingerprint]) -> float | None:
    """How close heads of the second model come to the first's by their singular values.

    The median over heads of the distance to the nearest head of the first, relative to that to the
    nearest other head of the second: near 1 for models that have nothing in common, 0 for a copy in
    any coordinates. None if heads have other widths, or the second model has a single one.
    """
    if len({block.head_width for block in (*a, *b)}) > 1:
        return None
    first, second = (np.concatenate([block.spectra for block in m]) for m in (a, b))
    if len(second) < 2:
        return None
    own = _distances(second, second)
    np.fill_diagonal(own, np.inf)
    usual = float(np.median(own.min(axis=1)))
    return float(np.median(_distances(second, first).min(axis=1))) / usual if usual > 0 else None


def _distances(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.array([np.linalg.norm(others - row, axis=1) for row in rows.astype(np.float64)])
