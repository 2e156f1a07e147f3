"""How strongly one form passes on what another writes, and what chance would give.

One form writes to a stream of width D, another reads from it: the product of the two, W R, is a
virtual form from the first one's input to the second one's output. Its share of the largest norm
it could have is the composition score (Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits"), ‖W R‖ / (‖W‖ ‖R‖).

Of each form only one end counts: M = A Bᵀ meets the stream with A, and B can be replaced by the
small triangle of its QR decomposition. With w and r for the two ends, both (D, R) and of norm 1,
the squared score is ‖wᵀ r‖², from an R × R core.

**Chance.** Let a random rotation U of the stream come between the two forms. Then ‖wᵀ U r‖² has a
mean and a variance in closed form: with P = w wᵀ and S = r rᵀ, and P₀ and S₀ for their traceless
parts, E = 1/D and Var = 2 ‖P₀‖² ‖S₀‖² / ((D − 1)(D + 2)), as Haar-distributed rotations act
irreducibly on traceless symmetric matrices. Streams have outlying dimensions, which most forms
read and write; a fairer chance leaves those where they are and rotates the other m. With indices
1 and 2 for the fixed and the rotated dimensions,

    E   = ⟨P₁₁, S₁₁⟩ + tr P₂₂ tr S₂₂ / m
    Var = 4 ⟨P₁₂P₂₁, S₁₂S₂₁⟩ / m + 2 ‖(P₂₂)₀‖² ‖(S₂₂)₀‖² / ((m − 1)(m + 2)).

Tail probabilities are those of a shifted gamma distribution with these two cumulants and the third
(Hall 1983, Buckley and Eagleson 1988), for which the entries of U count as independent. In
simulations they are right within a factor of 2 down to 10⁻³, mostly too large.

**Updates.** A step adds (A + ΔA)(B + ΔB)ᵀ − A Bᵀ = Δ₂ + Δ₃ to a form. The first-order term, Δ₂ = ΔA
Bᵀ + A ΔBᵀ, has rank 2R, the second-order term, Δ₃ = ΔA ΔBᵀ, rank R. Between two training steps Δ₃
is small; where it is not, the weights move faster than the form's gradient says.

Axes: ``...`` a stack of forms, W writing and R reading heads, G groups of heads that share a
factor, D width of the stream, K fixed dimensions, r rank of a form's core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from wqk._typing import Float
from wqk.errors import FormError
from wqk.forms import BilinearForm, overlaps
from wqk.forms.kernels import array_namespace, balance, on_host
from wqk.forms.overlaps import StackSide
from wqk.forms.spectra import root_of, spectral_norm


class Chained(NamedTuple):
    """Every writing form with every reading one; all arrays are (W, R).

    Scores are NaN where a form is zero.
    """

    score: np.ndarray  # ‖W R‖ / (‖W‖ ‖R‖)
    mean: np.ndarray  # of the squared score, by chance
    variance: np.ndarray
    third: np.ndarray  # its third cumulant

    @property
    def expected(self) -> np.ndarray:
        """The score that chance gives, root mean square."""
        return np.asarray(np.sqrt(self.mean))

    @property
    def z(self) -> np.ndarray:
        """Standard deviations of the squared score above its mean; NaN if chance leaves none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (self.score**2 - self.mean) / np.sqrt(self.variance)
        return np.where(self.variance > 1e-12 * self.mean**2, z, np.nan)

    @property
    def p(self) -> np.ndarray:
        """The probability that chance gives a score as large, one-sided."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return gamma_tail(self.z, self.third / self.variance**1.5)


@dataclass(frozen=True, eq=False)
class End(StackSide):
    """A side, and what chance makes of it: w₁ are the rows that it leaves in place, w₂ the others.

    With G = w₂ᵀ w₂.
    """

    fixed: Float[np.ndarray, "heads 3 kk"]  # w₁ Gⁿ w₁ᵀ for n = 0, 1, 2
    traces: Float[np.ndarray, "heads 3"]  # tr Gⁿ for n = 1, 2, 3
    rotated: int  # number m of the dimensions that are not fixed


def end(form: BilinearForm, fixed: np.ndarray | None = None) -> End:
    """The query side of a form, or of a stack (G, S) of forms: what it reads.

    The key side, what it writes, is the end of the transpose.

    Parameters
    ----------
    form
        Its query may be shared within a group, (G, 1, D, R), or be every form's own, (G, S, D, R).
    fixed
        Which of the D dimensions chance leaves where they are, as a mask; by default none.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> identity = BilinearForm.from_matrix(np.eye(4))
    >>> up = BilinearForm(np.eye(4)[:, :1], np.eye(4)[:, 1:2])  # reads 0, writes 1
    >>> down = BilinearForm(np.eye(4)[:, 1:2], np.eye(4)[:, 2:3])  # reads 1, writes 2
    >>> float(chain(end(up.T), end(down)).score[0, 0])
    1.0
    >>> float(chain(end(up.T), end(identity)).score[0, 0])
    0.5
    """
    return keeping(sides(form)[0], fixed)


def sides(form: BilinearForm) -> tuple[StackSide, StackSide]:
    """The query side of a form, or of a stack, and its key side, without what chance makes of them.

    The shapes are those for `end`.
    """
    groups, sharing = (1, 1, *form.stack)[-2:]
    factors = [
        balance(np.reshape(factor, (-1, *(1, 1, *factor.shape)[-3:])), np).factor
        for factor in (form.query, form.key)
    ]
    grams = [_gram(factor) for factor in factors]
    triangles = [_triangle(factor, gram) for factor, gram in zip(factors, grams, strict=True)]

    def side(near: np.ndarray, gram: np.ndarray, triangle: np.ndarray) -> StackSide:
        # Everything about single forms is small; in double precision.
        core = triangle.swapaxes(-1, -2) @ gram @ triangle
        square = np.trace(core, axis1=-2, axis2=-1)
        scale = np.where(square > 0, square, 1)[..., None, None]
        mix = np.broadcast_to(triangle / np.sqrt(scale), (groups, sharing, *triangle.shape[-2:]))
        own = near.shape[1] == sharing  # no factor is shared
        if own:
            size = np.linalg.norm(core / scale, axis=(-2, -1))
        else:  # rounding acts on the shared factor, whatever its mix leaves of it
            stretch = np.linalg.norm(gram, 2, axis=(-2, -1))
            size = stretch * np.linalg.norm(mix @ mix.swapaxes(-1, -2), axis=(-2, -1))
        mix = mix.astype(near.dtype)
        columns = near @ mix if own else near[:, 0]
        return StackSide(
            np.ascontiguousarray(np.moveaxis(columns, -2, 0).reshape(near.shape[-2], -1)),
            None if own else mix,
            groups * sharing,
            np.broadcast_to(square == 0, (groups, sharing)).ravel(),
            np.broadcast_to(size, (groups, sharing)).ravel(),
        )

    return side(factors[0], grams[0], triangles[1]), side(factors[1], grams[1], triangles[0])


def keeping(side: StackSide, fixed: np.ndarray | None) -> End:
    """The same with what chance makes of it, where it leaves some dimensions, a mask, in place."""
    kept = np.zeros(side.width, bool) if fixed is None else fixed
    free = int((~kept).sum())
    if free < 2:
        raise FormError(f"chance needs two dimensions to rotate, got {free} of {side.width}")
    core, at_fixed = _gram(side.factors(~kept)), side.factors(kept).astype(np.float64)
    if side.mix is not None:
        mix = side.mix.astype(np.float64)
        core, at_fixed = mix.swapaxes(-1, -2) @ core[:, None] @ mix, at_fixed[:, None] @ mix
    square, image, blocks = core @ core, at_fixed, []
    for _ in range(3):
        blocks.append((image @ at_fixed.swapaxes(-1, -2)).reshape(side.heads, -1))
        image = image @ core
    traces = [np.trace(one, axis1=-2, axis2=-1).ravel() for one in (core, square, square @ core)]
    return End(**vars(side), fixed=np.stack(blocks, 1), traces=np.stack(traces, 1), rotated=free)


def chain(writer: End, reader: End, tiled: np.ndarray | None = None) -> Chained:
    """The composition of every writing form with every reading one.

    Parameters
    ----------
    writer
        The end of the transposed forms that write, none of which share a factor on this side.
    reader
        The end of the forms that read.
    tiled
        ‖wᵀ r‖² of every pair by `wqk.forms.overlaps.by_tiles`, where known; those that rounding may
        have changed are computed again from their cores.

    Raises
    ------
    FormError
        The two meet streams of different widths.
    """
    if writer.width != reader.width:
        raise FormError(
            f"one form writes to a stream of width {writer.width}, the other reads from one "
            f"of width {reader.width}"
        )
    m = writer.rotated
    fixed = [writer.fixed[:, n] @ reader.fixed[:, n].T for n in range(3)]
    zero = np.logical_or.outer(writer.zero, reader.zero)
    first, second, third = (
        np.outer(left, right)
        for left, right in zip(_deviations(writer), _deviations(reader), strict=True)
    )
    variance = 4 * fixed[1] / m + 2 * second / ((m - 1) * (m + 2))
    if tiled is None:
        squares = overlaps.by_cores(writer, reader)
    else:
        unsure = overlaps.uncertain(tiled, variance, writer, reader)
        again = np.flatnonzero(unsure.any(axis=1))
        squares = tiled
        if len(again):
            squares = tiled.copy()
            squares[again] = overlaps.by_cores(writer, reader, again)
    return Chained(
        np.where(zero, np.nan, np.sqrt(squares)),
        fixed[0] + first / m,
        variance,
        24 * fixed[2] / m**2 + 8 * third / m**3,
    )


def chain_all(
    writers: Sequence[End], readers: Sequence[End], wanted: Sequence[tuple[int, int]], threads: int
) -> list[Chained]:
    """The composition of many stacks of forms at once, which takes less time than one by one.

    Parameters
    ----------
    writers, readers
        Ends as for `chain`.
    wanted
        Which writing stack with which reading one, by their numbers.
    threads
        How many products run at a time, each with a single-threaded BLAS.
    """
    tiled: dict[tuple[int, int], np.ndarray] = {}
    for width in {readers[j].width for _, j in wanted}:
        pairs = [pair for pair in wanted if readers[pair[1]].width == width]
        rows = sorted({i for i, _ in pairs})
        fed = {j: [rows.index(i) for i, one in pairs if one == j] for j in {j for _, j in pairs}}
        spans = {column: (min(one), max(one) + 1) for column, one in fed.items()}
        columns = sorted(spans, key=lambda column: spans[column])
        some = [writers[i] for i in rows], [readers[j] for j in columns]
        places = [(rows.index(i), columns.index(j)) for i, j in pairs]
        if not overlaps.tiles_pay(*some, places):
            continue
        squares = overlaps.by_tiles(*some, [spans[column] for column in columns], threads)
        starts = [np.cumsum([0, *(one.heads for one in ends)]) for ends in some]
        for pair, place in zip(pairs, places, strict=True):
            at = [slice(start[n], start[n + 1]) for start, n in zip(starts, place, strict=True)]
            tiled[pair] = squares[at[0], at[1]]
    with ThreadPoolExecutor(threads) as pool:
        return list(
            pool.map(
                lambda pair: chain(writers[pair[0]], readers[pair[1]], tiled.get(pair)), wanted
            )
        )


def gamma_tail(z: np.ndarray, skewness: np.ndarray) -> np.ndarray:
    """P(Z ≥ z) of a standardized gamma distribution of this skewness.

    By the cube root of Wilson and Hilferty (1931): within 10 % where it is likely, and too large
    rather than too small, by a factor of up to 2, where it is not. NaN where z is.

    Examples
    --------
    >>> gamma_tail(np.array([1.96]), np.array([1e-6])).round(3)  # nearly normal
    array([0.025])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = 8 / np.maximum(skewness, 1e-9) ** 2
        ratio = np.maximum(1 + z * np.sqrt(2 / degrees), 0)
        normal = (np.cbrt(ratio) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    tail = [0.5 * math.erfc(value) for value in (normal / math.sqrt(2)).ravel().tolist()]
    return np.reshape(tail, np.shape(normal))


def _deviations(one: End) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tr P₂₂, and the traces of the square and the cube of its traceless part, (heads,)."""
    m = one.rotated
    first, second, third = one.traces.T
    return first, second - first**2 / m, third - 3 * first * second / m + 2 * first**3 / m**2


def _triangle(key: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """What can replace a factor on the far side of its form, (…, R, r): T Tᵀ = keyᵀ key.

    Examples
    --------
    >>> key = np.ones((3, 2))  # of rank one
    >>> triangle = _triangle(key, key.T @ key)
    >>> np.round(triangle @ triangle.T, 9).tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    root = np.linalg.qr(key, mode="r") if key.shape[-1] > key.shape[-2] else root_of(gram)
    return np.asarray(root).swapaxes(-1, -2)


def _gram(factor: np.ndarray) -> np.ndarray:
    """factorᵀ factor of (…, D, R) in double precision."""
    return np.asarray((factor.swapaxes(-1, -2) @ factor).astype(np.float64))


class UpdateTerms(NamedTuple):
    """Δ₂ = ΔA Bᵀ + A ΔBᵀ, of rank 2R, and Δ₃ = ΔA ΔBᵀ, of rank R."""

    first: BilinearForm
    second: BilinearForm


def update_terms(before: BilinearForm, after: BilinearForm) -> UpdateTerms:
    """Split a form's change into the first-order and the second-order term in its factors.

    Raises
    ------
    FormError
        The factors have different shapes, so that neither form is an update of the other.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> one = BilinearForm(np.eye(2), np.eye(2))
    >>> terms = update_terms(one, BilinearForm(1.1 * np.eye(2), 1.1 * np.eye(2)))
    >>> terms.first.dense().round(6).tolist(), terms.second.dense().round(6).tolist()
    ([[0.2, 0.0], [0.0, 0.2]], [[0.01, 0.0], [0.0, 0.01]])
    """
    shapes = [(form.query.shape, form.key.shape) for form in (before, after)]
    if shapes[0] != shapes[1]:
        raise FormError(f"an update needs factors of the same shape, got {shapes[0]}, {shapes[1]}")
    query_step, key_step = after.query - before.query, after.key - before.key
    make = type(before).from_factors
    return UpdateTerms(
        _rescaled(make(query_step, before.key)) + _rescaled(make(before.query, key_step)),
        _rescaled(make(query_step, key_step)),
    )


def change(before: BilinearForm, after: BilinearForm) -> BilinearForm:
    """Δ₂ + Δ₃ = ΔA (B + ΔB)ᵀ + A ΔBᵀ: `BilinearForm.difference` with rescaled factors."""
    make = type(before).from_factors
    query_step, key_step = after.query - before.query, after.key - before.key
    return _rescaled(make(query_step, after.key)) + _rescaled(make(before.query, key_step))


def update_measures(before: BilinearForm, after: BilinearForm) -> dict[str, Any]:
    """Norm, σ₁ and stable rank of both terms, each (...), by their columns in a table.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> one = BilinearForm(np.eye(2), np.eye(2))
    >>> float(update_measures(one, one * 1.1)["first_order_stable_rank"].round(3))
    2.0
    """
    measures: dict[str, Any] = {}
    for order, term in zip(("first", "second"), update_terms(before, after), strict=True):
        norm, largest = term.norm, spectral_norm(term)
        xp = array_namespace(largest)
        moves = largest > 0
        ratio = norm / xp.where(moves, largest, xp.ones_like(largest))
        measures |= {
            f"{order}_order_norm": norm,
            f"{order}_order_spectral_norm": largest,
            f"{order}_order_stable_rank": xp.where(moves, ratio**2, math.nan * ratio),
        }
    return measures


def _rescaled(form: BilinearForm) -> BilinearForm:
    """The same forms with factors of equal size, by exact powers of two; zeros beside a zero.

    To the kernels, a small step next to large weights would look like cancellation, for which they
    need float64 and many times the time; so would no step at all.
    """
    xp = array_namespace(form.query, form.key)
    of_one = (-2, -1) if form.query.shape[:-2] == form.key.shape[:-2] else (-3, -2, -1)
    query, key = (
        on_host(xp.max(xp.abs(factor), axis=of_one, keepdims=True)).astype(np.float64)
        for factor in (form.query, form.key)
    )
    is_zero = query * key == 0  # false where an entry is not finite
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.nan_to_num(np.log2(key / query) / 2, posinf=0, neginf=0)
    power = np.exp2(np.round(exponent).clip(-60, 60))  # stays far from the ends of float32
    scales = (np.where(is_zero, 0.0, scale) for scale in (power, 1 / power))
    factors = (
        factor * xp.asarray(scale, dtype=factor.dtype, device=device(factor))
        for factor, scale in zip((form.query, form.key), scales, strict=True)
    )
    return type(form).from_factors(*factors)
