"""What `wqk.kin` keeps of a block: a few numbers that changes of coordinates leave alone.

A model computes the same after three changes of its queries and keys: its heads are renumbered,
its residual stream is rotated, or the dimensions inside a head are. Each of the three parts of a
fingerprint keeps one of these numberings and does not see the other two changes:

====================  =====================================================  =====================
part                  what it holds                                          numbering that it keeps
====================  =====================================================  =====================
``pairs``             tr(M_a M_b) and tr(M_a M_bᵀ) of all pairs of heads     heads
``sample``, summed    entries of the layer's form, on a few coordinates      stream coordinates
``grams``             AᵀA, BᵀB and BᵀA of each head                          dimensions in a head
====================  =====================================================  =====================

Axes: H query heads, G key heads, D model width, R head width, S sampled coordinates of the stream,
U units of a head: single dimensions, or with rotary positions the planes that turn together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wqk._typing import Float
from wqk.attention.coordinates import Coordinates, lacks_norm, read_block
from wqk.forms.kernels import balance

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan
    from wqk.forms import BilinearForm

# Coordinates of the residual stream, and numbers of each head, that are compared at most. A copy
# lies dozens of standard deviations from chance on far fewer.
SAMPLED, UNITS = 64, 32

FOLDED, UNFOLDED = Coordinates(fold_norm=True), Coordinates()

# Families whose residual stream holds sinusoids by design, so that its coordinates have meanings.
SINUSOIDAL = {
    "conditional_detr", "ctrl", "detr", "flaubert", "fsmt", "informer", "m2m_100", "marian",
    "musicgen", "nllb-moe", "pegasus", "pegasus_x", "roformer", "seamless_m4t", "seamless_m4t_v2",
    "speech_to_text", "speecht5", "time_series_transformer", "vit_mae", "whisper", "xglm", "xlm",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """One self-attention block."""

    stack: str
    layer: int
    pairs: Float[np.ndarray, "two heads heads"]  # cosines of M_a with M_bᵀ, and with M_b
    norms: Float[np.ndarray, " heads"]  # ‖M_h‖
    sample: Float[np.ndarray, "heads s s"]  # M_h on the sampled coordinates
    grams: Float[np.ndarray, "heads three u u within within"]  # AᵀA, BᵀB, BᵀA, unit by unit
    key_heads: int
    width: int  # D
    head_width: int  # R
    # Why a numbering carries meaning in this family, so that it is no matter of chance; or empty.
    heads_differ: str
    coordinates_differ: str
    dimensions_differ: str

    @property
    def head_count(self) -> int:
        """H."""
        return len(self.norms)


def lacks_any_norm(plan: AttentionPlan) -> bool:
    """Whether no norm is known to feed a block, so that its gain cannot be folded in."""
    return lacks_norm(plan, FOLDED)


def fingerprint(checkpoint: Checkpoint, plan: AttentionPlan, folds: bool) -> Fingerprint | None:
    """Read one block; None if its form is not square, as symmetry needs.

    With ``folds`` the gains of the norms that feed it are folded in.
    """
    coordinates = FOLDED if folds else UNFOLDED
    ((_, form),) = read_block(checkpoint, plan, coordinates).forms
    if not form.is_square:
        return None
    heads = form.stack[0] * form.stack[1]
    query, key, scale = _scaled(form.query, form.key)
    pairs, norms = _pairs(query, key)
    at = np.sort(np.random.default_rng(0).permutation(form.shape[0])[:SAMPLED])
    sharing = heads // len(key)
    sample = query[:, at] @ key[:, at].repeat(sharing, axis=0).swapaxes(-1, -2)
    rotary = plan.rotary or plan.axial
    units = _units(form, rotary.planes if rotary else None)
    return Fingerprint(
        plan.stack,
        plan.layer,
        pairs,
        norms * scale,
        sample if scale == 1 else sample.astype(np.float64) * scale,
        _grams(query, key, units),
        len(key),
        form.shape[0],
        form.rank,
        "" if "alibi" not in plan.position else "its heads differ by their linear biases",
        "" if plan.family not in SINUSOIDAL and checkpoint.config.get("model_type")
        not in SINUSOIDAL else "its residual stream holds sinusoids of position",
        _dimensions_differ(plan),
    )  # fmt: skip


def _dimensions_differ(plan: AttentionPlan) -> str:
    if plan.rule.guess:
        return "whether its positions turn dimensions is not known, as its family was guessed"
    if plan.position.startswith("rotary"):
        return f"its positions are {plan.position}"
    if any(side.norm and side.norm.kind == "layer" for side in (plan.query, plan.key)):
        return "queries or keys are centered"
    return ""


def _scaled(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """All heads' factors (H, D, R) and (G, D, R) in the safe range, and the forms' scale."""
    factors, exponents = zip(
        *(balance(x.reshape(-1, x.shape[-1]), np) for x in (query, key)), strict=True
    )
    query, key = (
        factor.reshape(-1, *x.shape[-2:]) for factor, x in zip(factors, (query, key), strict=True)
    )
    return query, key, 2.0 ** float(sum(exponents))


def _pairs(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of all pairs of heads, transposed (2, H, H)[0] and straight [1], and their norms.

    tr(M_a M_b) = Σ_ij (B_aᵀ A_b)_ij (B_bᵀ A_a)_ji and tr(M_a M_bᵀ) = Σ_ij (A_aᵀ A_b)_ij
    (B_aᵀ B_b)_ij, with A = query and B = key. Zero heads have cosines 0.
    """
    heads, groups = len(query), len(key)
    of = np.arange(heads) // (heads // groups)
    rank = query.shape[-1]
    every = query.transpose(1, 0, 2).reshape(query.shape[1], heads * rank)
    between_keys = np.empty((groups, groups, rank * rank), np.float32)
    for g in range(groups):
        between_keys[g] = (key[g].T @ key).reshape(groups, -1)
    # (G, H, R, R): B_gᵀ A_h
    crossing = np.stack([
        (k.T @ every).reshape(rank, heads, rank).swapaxes(0, 1) for k in key
    ])  # fmt: skip
    turned = np.ascontiguousarray(crossing.swapaxes(-1, -2)).reshape(groups, heads, -1)
    crossing = crossing.reshape(groups, heads, -1)
    pairs = np.empty((2, heads, heads))
    for a in range(heads):
        # rows h of crossing[of[a]] are B_aᵀ A_h; turned[of[h], a] are (B_hᵀ A_a)ᵀ
        pairs[0, a] = np.einsum("hi,hi->h", crossing[of[a]], turned[of, a])
        products = (query[a].T @ every).reshape(rank, heads, rank).swapaxes(0, 1)
        pairs[1, a] = np.einsum("hi,hi->h", products.reshape(heads, -1), between_keys[of[a], of])
    squares = pairs[1].diagonal().clip(min=0)
    norms = np.sqrt(squares)
    safe = np.where(norms > 0, norms, np.inf)
    return (pairs / safe[:, None] / safe).astype(np.float32), norms


def _units(form: BilinearForm, planes: tuple[slice, slice] | None) -> np.ndarray:
    """The dimensions of each unit of a head that is compared, (U, 1) or (U, 2)."""
    dimensions = np.arange(form.rank)
    if planes is None:
        return dimensions[:UNITS, None]
    turning = np.stack([dimensions[plane] for plane in planes], axis=1)
    # The fast planes, which every length of training text turns.
    return turning[:UNITS]


def _grams(query: np.ndarray, key: np.ndarray, units: np.ndarray) -> np.ndarray:
    """AᵀA, BᵀB and BᵀA of each head, (H, 3, U, U, w, w), each of norm 1 off its diagonal."""
    heads, sharing = len(query), len(query) // len(key)
    a = query[..., units.ravel()]
    b = key[..., units.ravel()].repeat(sharing, axis=0)
    grams = np.stack([x.swapaxes(-1, -2) @ y for x, y in ((a, a), (b, b), (b, a))], axis=1)
    count, within = units.shape
    grams = grams.reshape(heads, 3, count, within, count, within).swapaxes(3, 4)
    off = 1 - np.eye(count, dtype=grams.dtype)[:, :, None, None]
    size = np.sqrt(np.square(grams * off).sum(axis=(2, 3, 4, 5), keepdims=True))
    return np.asarray(grams / np.where(size > 0, size, np.inf), np.float32)
