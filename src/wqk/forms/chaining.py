"""Composition of two forms through the residual stream, its score, and the score by chance.

A form W writes to a stream of width D, and a form R reads from the stream. Their product, W R, is a
virtual form from the input of W to the output of R. The composition score is the norm of the
product relative to the largest possible norm, ‖W R‖ / (‖W‖ ‖R‖) (Elhage et al. 2021, "A
Mathematical Framework for Transformer Circuits").

The score depends only on one end of each form: M = A Bᵀ acts on the stream with A, and B can be
replaced by the small triangle of its QR decomposition. With w and r for the ends of the two forms,
both (D, R) and of norm 1, the squared score is ‖wᵀ r‖², computed from an R × R core.

**Chance.** Let a random rotation U of the stream act between the two forms. Then ‖wᵀ U r‖² has a
mean and a variance in closed form: with P = w wᵀ and S = r rᵀ, and P₀ and S₀ for their traceless
parts, E = 1/D and Var = 2 ‖P₀‖² ‖S₀‖² / ((D − 1)(D + 2)), because Haar-distributed rotations act
irreducibly on traceless symmetric matrices. Most forms read and write the outlying dimensions of a
stream. Therefore chance keeps the outlying dimensions fixed and rotates the other m dimensions.
With indices 1 and 2 for the fixed and the rotated dimensions,

    E   = ⟨P₁₁, S₁₁⟩ + tr P₂₂ tr S₂₂ / m
    Var = 4 ⟨P₁₂P₂₁, S₁₂S₂₁⟩ / m + 2 ‖(P₂₂)₀‖² ‖(S₂₂)₀‖² / ((m − 1)(m + 2)).

Tail probabilities are those of a shifted gamma distribution with these two cumulants and the third
(Hall 1983, Buckley and Eagleson 1988), for which the entries of U count as independent:

    κ₃  = 24 ⟨P₁₂P₂₂P₂₁, S₁₂S₂₂S₂₁⟩ / m² + 8 tr (P₂₂)₀³ tr (S₂₂)₀³ / m³.

In simulations the probabilities are right within a factor of 2 down to 10⁻³, mostly too large.

**Updates.** A step adds (A + ΔA)(B + ΔB)ᵀ − A Bᵀ = Δ₂ + Δ₃ to a form. The first-order term, Δ₂ = ΔA
Bᵀ + A ΔBᵀ, has rank 2R; the second-order term, Δ₃ = ΔA ΔBᵀ, has rank R. Between two training steps
Δ₃ is small, unless the weights move so far that the form's gradient no longer describes the step.

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
from wqk.forms.arrays import array_namespace, on_host
from wqk.forms.kernels import balance
from wqk.forms.overlaps import StackSide
from wqk.forms.spectra import root_of, spectral_norm


class Chained(NamedTuple):
    """Compositions of all pairs of a writing and a reading form; all arrays are (W, R).

    Attributes
    ----------
    score
        ‖W R‖ / (‖W‖ ‖R‖); NaN if a form is zero.
    mean, variance, third
        The first three cumulants of the squared score by chance.
    """

    score: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    third: np.ndarray

    @property
    def expected(self) -> np.ndarray:
        """The score by chance: the root of the mean square."""
        return np.asarray(np.sqrt(self.mean))

    @property
    def z(self) -> np.ndarray:
        """The squared score minus its mean, in standard deviations; NaN if chance has no spread."""
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (self.score**2 - self.mean) / np.sqrt(self.variance)
        return np.where(self.variance > 1e-12 * self.mean**2, z, np.nan)

    @property
    def p(self) -> np.ndarray:
        """One-sided p-value: the probability by chance of a score at least as large."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return gamma_tail(self.z, self.third / self.variance**1.5)


@dataclass(frozen=True, eq=False)
class End(StackSide):
    """One side of a stack of forms, with the moments for the score by chance.

    The rows w₁ belong to the fixed dimensions of the stream, w₂ to the rotated dimensions, and
    G = w₂ᵀ w₂.

    Attributes
    ----------
    fixed
        w₁ Gⁿ w₁ᵀ for n = 0, 1, 2, flattened.
    traces
        tr Gⁿ for n = 1, 2, 3.
    rotated
        Number m of rotated dimensions.
    """

    fixed: Float[np.ndarray, "heads 3 kk"]
    traces: Float[np.ndarray, "heads 3"]
    rotated: int


def end(form: BilinearForm, fixed: np.ndarray | None = None) -> End:
    """Return the query side, the reading end, of a form or of a stack (G, S) of forms.

    For the key side, the writing end, pass the transpose.

    Parameters
    ----------
    form
        A form or a stack. Its query is shared within groups, (G, 1, D, R), or separate for each
        form, (G, S, D, R).
    fixed
        Mask of the D dimensions that chance keeps fixed; by default none.

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
    return with_chance(sides(form)[0], fixed)


def sides(form: BilinearForm) -> tuple[StackSide, StackSide]:
    """Return the query side and the key side of a form or a stack, without moments of chance.

    The shapes are as for `end`.
    """
    groups, sharing = (1, 1, *form.stack)[-2:]
    shape = groups, sharing
    query = balance(_in_groups(form.query), np).factor
    key = balance(_in_groups(form.key), np).factor
    query_gram, key_gram = _gram(query), _gram(key)
    return (
        _side(query, query_gram, _triangle(key, key_gram), shape),
        _side(key, key_gram, _triangle(query, query_gram), shape),
    )


def _in_groups(factor: np.ndarray) -> Float[np.ndarray, "groups sharing d rank"]:
    """Return a factor (D, R), (S, D, R) or (G, S, D, R) with four axes; missing axes are 1."""
    sharing = factor.shape[-3] if factor.ndim > 2 else 1
    return np.reshape(factor, (-1, sharing, *factor.shape[-2:]))


def _side(
    near: Float[np.ndarray, "groups near_sharing d rank"],
    gram: Float[np.ndarray, "groups near_sharing rank rank"],
    triangle: Float[np.ndarray, "groups far_sharing rank r"],
    shape: tuple[int, int],
) -> StackSide:
    """Return the near side of a stack of forms; a triangle replaces the factor of the far side.

    Parameters
    ----------
    near
        The factor of this side, N.
    gram
        NᵀN.
    triangle
        T with T Tᵀ = FᵀF, for the factor F of the far side: N T has the norm of N Fᵀ.
    shape
        Numbers of groups, and of forms in a group.
    """
    # Matrices of single forms are small and computed in double precision.
    core = triangle.swapaxes(-1, -2) @ gram @ triangle  # (N T)ᵀ N T
    square_norm = np.trace(core, axis1=-2, axis2=-1)
    divisor = np.where(square_norm > 0, square_norm, 1)[..., None, None]
    mix = np.broadcast_to(triangle / np.sqrt(divisor), (*shape, *triangle.shape[-2:]))
    is_shared = near.shape[1] != shape[1]
    if is_shared:
        # Rounding errors are relative to the shared factor, even where the mix makes it small.
        stretch = np.linalg.norm(gram, 2, axis=(-2, -1))
        size = stretch * np.linalg.norm(mix @ mix.swapaxes(-1, -2), axis=(-2, -1))
    else:
        size = np.linalg.norm(core / divisor, axis=(-2, -1))
    mix = mix.astype(near.dtype)
    columns = near[:, 0] if is_shared else near @ mix
    return StackSide(
        columns=np.ascontiguousarray(np.moveaxis(columns, -2, 0).reshape(near.shape[-2], -1)),
        mix=mix if is_shared else None,
        heads=math.prod(shape),
        zero=np.broadcast_to(square_norm == 0, shape).ravel(),
        size=np.broadcast_to(size, shape).ravel(),
    )


def with_chance(side: StackSide, fixed: np.ndarray | None) -> End:
    """Add the moments of chance to a side; ``fixed`` is the mask of the fixed dimensions."""
    is_fixed = np.zeros(side.width, bool) if fixed is None else fixed
    rotated = int((~is_fixed).sum())
    if rotated < 2:
        raise FormError(f"chance needs two dimensions to rotate, got {rotated} of {side.width}")
    core = _gram(side.factors(~is_fixed))  # G = w₂ᵀ w₂
    fixed_rows = side.factors(is_fixed).astype(np.float64)  # w₁
    if side.mix is not None:
        mix = side.mix.astype(np.float64)
        core = mix.swapaxes(-1, -2) @ core[:, None] @ mix
        fixed_rows = fixed_rows[:, None] @ mix
    fixed_moments = []
    image = fixed_rows  # w₁ Gⁿ
    for _ in range(3):
        fixed_moments.append((image @ fixed_rows.swapaxes(-1, -2)).reshape(side.heads, -1))
        image = image @ core
    square = core @ core
    powers = (core, square, square @ core)
    traces = [np.trace(power, axis1=-2, axis2=-1).ravel() for power in powers]
    return End(
        **vars(side),
        fixed=np.stack(fixed_moments, 1),
        traces=np.stack(traces, 1),
        rotated=rotated,
    )


def chain(writer: End, reader: End, tiled: np.ndarray | None = None) -> Chained:
    """Return the composition of every writing form with every reading form.

    Parameters
    ----------
    writer
        The end of the transposed writing forms. These forms share no factor on this side.
    reader
        The end of the reading forms.
    tiled
        ‖wᵀ r‖² of every pair, if already computed by `wqk.forms.overlaps.by_tiles`. Pairs that
        rounding may have changed are computed again from their cores.

    Raises
    ------
    FormError
        The forms belong to streams of different widths.
    """
    if writer.width != reader.width:
        raise FormError(
            f"one form writes to a stream of width {writer.width}, the other reads from one "
            f"of width {reader.width}"
        )
    m = writer.rotated
    # ⟨P₁₁, S₁₁⟩, ⟨P₁₂P₂₁, S₁₂S₂₁⟩ and ⟨P₁₂P₂₂P₂₁, S₁₂S₂₂S₂₁⟩ of every pair, (W, R).
    fixed = [writer.fixed[:, n] @ reader.fixed[:, n].T for n in range(3)]
    writes, reads = _rotated_moments(writer), _rotated_moments(reader)
    traces = np.outer(writes.trace, reads.trace)
    squares_of_traceless = np.outer(writes.traceless_square, reads.traceless_square)
    cubes_of_traceless = np.outer(writes.traceless_cube, reads.traceless_cube)
    mean = fixed[0] + traces / m
    variance = 4 * fixed[1] / m + 2 * squares_of_traceless / ((m - 1) * (m + 2))
    third = 24 * fixed[2] / m**2 + 8 * cubes_of_traceless / m**3
    if tiled is None:
        squares = overlaps.by_cores(writer, reader)
    else:
        squares = tiled
        uncertain = overlaps.uncertain(tiled, variance, writer, reader)
        uncertain_writers = np.flatnonzero(uncertain.any(axis=1))
        if len(uncertain_writers):
            squares = tiled.copy()
            squares[uncertain_writers] = overlaps.by_cores(writer, reader, uncertain_writers)
    is_zero = np.logical_or.outer(writer.zero, reader.zero)
    return Chained(
        score=np.where(is_zero, np.nan, np.sqrt(squares)), mean=mean, variance=variance, third=third
    )


def chain_all(
    writers: Sequence[End], readers: Sequence[End], pairs: Sequence[tuple[int, int]], threads: int
) -> list[Chained]:
    """Compute the compositions of many stacks at once, in less time than one by one.

    Parameters
    ----------
    writers, readers
        Ends as for `chain`.
    pairs
        Numbers of a writing stack and of a reading stack, for each composition.
    threads
        Number of products that run at the same time, each with a single-threaded BLAS.
    """
    pairs_by_width: dict[int, list[tuple[int, int]]] = {}
    for writer, reader in pairs:
        pairs_by_width.setdefault(readers[reader].width, []).append((writer, reader))
    tiled: dict[tuple[int, int], np.ndarray] = {}
    for pairs_of_width in pairs_by_width.values():
        tiled |= _tiled_squares(writers, readers, pairs_of_width, threads)

    def chain_pair(pair: tuple[int, int]) -> Chained:
        writer, reader = pair
        return chain(writers[writer], readers[reader], tiled.get(pair))

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(chain_pair, pairs))


def _tiled_squares(
    writers: Sequence[End], readers: Sequence[End], pairs: Sequence[tuple[int, int]], threads: int
) -> dict[tuple[int, int], np.ndarray]:
    """Compute ‖wᵀ r‖² of pairs of one width by tiles; empty if cores take less time.

    Stacks that occur in a pair become the rows and columns of a table. The writers keep their
    order; the readers are in the order of the writers of their pairs.
    """
    writer_numbers = sorted({writer for writer, _ in pairs})
    row_of_writer = {writer: row for row, writer in enumerate(writer_numbers)}
    # For each reader, the first row of its writers, and the row after the last one.
    span_of_reader: dict[int, tuple[int, int]] = {}
    for writer, reader in pairs:
        row = row_of_writer[writer]
        start, stop = span_of_reader.get(reader, (row, row + 1))
        span_of_reader[reader] = min(start, row), max(stop, row + 1)
    reader_numbers = sorted(span_of_reader, key=lambda reader: span_of_reader[reader])
    spans = [span_of_reader[reader] for reader in reader_numbers]
    column_of_reader = {reader: column for column, reader in enumerate(reader_numbers)}
    row_ends = [writers[writer] for writer in writer_numbers]
    column_ends = [readers[reader] for reader in reader_numbers]
    cells = [(row_of_writer[writer], column_of_reader[reader]) for writer, reader in pairs]
    if not overlaps.tiles_pay(row_ends, column_ends, cells):
        return {}
    squares = overlaps.by_tiles(row_ends, column_ends, spans, threads)
    row_starts = np.cumsum([0, *(end.heads for end in row_ends)])
    column_starts = np.cumsum([0, *(end.heads for end in column_ends)])
    squares_by_pair = {}
    for pair, (row, column) in zip(pairs, cells, strict=True):
        writing_heads = slice(*row_starts[[row, row + 1]])
        reading_heads = slice(*column_starts[[column, column + 1]])
        squares_by_pair[pair] = squares[writing_heads, reading_heads]
    return squares_by_pair


def gamma_tail(z: np.ndarray, skewness: np.ndarray) -> np.ndarray:
    """Return P(Z ≥ z) of a standardized gamma distribution with a given skewness.

    The approximation is the cube root of Wilson and Hilferty (1931). Large probabilities are
    right within 10 %; small ones are up to twice too large, rarely too small. NaN where z is NaN.

    Examples
    --------
    >>> gamma_tail(np.array([1.96]), np.array([1e-6])).round(3)  # nearly normal
    array([0.025])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = 8 / np.maximum(skewness, 1e-9) ** 2
        ratio = np.maximum(1 + z * np.sqrt(2 / degrees), 0)  # ratio of a chi-square to its mean
        cube_root = np.cbrt(ratio)  # nearly normal
        variance = 2 / (9 * degrees)  # of the cube root
        mean = 1 - variance
        normal = (cube_root - mean) / np.sqrt(variance)
    scaled = normal / math.sqrt(2)
    tail = [0.5 * math.erfc(value) for value in scaled.ravel().tolist()]
    return np.reshape(tail, np.shape(normal))


class RotatedMoments(NamedTuple):
    """Moments of P₂₂, the rotated block of P = w wᵀ, each (heads,)."""

    trace: np.ndarray  # tr P₂₂
    traceless_square: np.ndarray  # tr (P₂₂)₀², for the traceless part (P₂₂)₀ = P₂₂ − (tr P₂₂ / m) I
    traceless_cube: np.ndarray  # tr (P₂₂)₀³


def _rotated_moments(side: End) -> RotatedMoments:
    """Return the moments of P₂₂ from the traces of Gⁿ: G has the nonzero eigenvalues of P₂₂."""
    m = side.rotated
    trace, square, cube = side.traces.T
    return RotatedMoments(
        trace=trace,
        traceless_square=square - trace**2 / m,
        traceless_cube=cube - 3 * trace * square / m + 2 * trace**3 / m**2,
    )


def _triangle(key: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return a small matrix T, (…, R, r), that can replace the far factor: T Tᵀ = keyᵀ key.

    Examples
    --------
    >>> key = np.ones((3, 2))  # of rank one
    >>> triangle = _triangle(key, key.T @ key)
    >>> np.round(triangle @ triangle.T, 9).tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    width, rank = key.shape[-2:]
    root = np.linalg.qr(key, mode="r") if rank > width else root_of(gram)
    return np.asarray(root).swapaxes(-1, -2)


def _gram(factor: np.ndarray) -> np.ndarray:
    """Return factorᵀ factor of (…, D, R) in double precision."""
    return np.asarray((factor.swapaxes(-1, -2) @ factor).astype(np.float64))


class UpdateTerms(NamedTuple):
    """The two terms of an update: Δ₂ = ΔA Bᵀ + A ΔBᵀ, of rank 2R, and Δ₃ = ΔA ΔBᵀ, of rank R."""

    first: BilinearForm
    second: BilinearForm


def update_terms(before: BilinearForm, after: BilinearForm) -> UpdateTerms:
    """Split a form's change into the first-order and the second-order term in its factors.

    Raises
    ------
    FormError
        The factors have different shapes, so neither form can be an update of the other.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> before = BilinearForm(np.eye(2), np.eye(2))
    >>> terms = update_terms(before, BilinearForm(1.1 * np.eye(2), 1.1 * np.eye(2)))
    >>> terms.first.dense().round(6).tolist(), terms.second.dense().round(6).tolist()
    ([[0.2, 0.0], [0.0, 0.2]], [[0.01, 0.0], [0.0, 0.01]])
    """
    old_shapes = before.query.shape, before.key.shape
    new_shapes = after.query.shape, after.key.shape
    if old_shapes != new_shapes:
        raise FormError(
            f"an update needs factors of the same shape, got {old_shapes}, {new_shapes}"
        )
    query_step, key_step = after.query - before.query, after.key - before.key
    make = type(before).from_factors
    query_term = _rescaled(make(query_step, before.key))  # ΔA Bᵀ
    key_term = _rescaled(make(before.query, key_step))  # A ΔBᵀ
    return UpdateTerms(first=query_term + key_term, second=_rescaled(make(query_step, key_step)))


def change(before: BilinearForm, after: BilinearForm) -> BilinearForm:
    """Return Δ₂ + Δ₃ = ΔA (B + ΔB)ᵀ + A ΔBᵀ: `BilinearForm.difference` with rescaled factors."""
    make = type(before).from_factors
    query_step, key_step = after.query - before.query, after.key - before.key
    return _rescaled(make(query_step, after.key)) + _rescaled(make(before.query, key_step))


def update_measures(before: BilinearForm, after: BilinearForm) -> dict[str, Any]:
    """Return norm, σ₁ and stable rank of both terms, each (...), by column of the score table.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> before = BilinearForm(np.eye(2), np.eye(2))
    >>> float(update_measures(before, before * 1.1)["first_order_stable_rank"].round(3))
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
    """Rescale the factors of forms to equal size, by exact powers of two; the forms do not change.

    The kernels treat a small step next to large weights as cancellation, and then compute in
    float64, which takes many times longer. If one factor is zero, the other becomes zero as well.
    """
    xp = array_namespace(form.query, form.key)
    # Forms with a common factor, along the last axis of the stack, have one scale.
    has_shared_factor = form.query.shape[:-2] != form.key.shape[:-2]
    axes = (-3, -2, -1) if has_shared_factor else (-2, -1)

    def largest_entries(factor: Any) -> np.ndarray:
        axes_of_factor = axes[-factor.ndim :]  # a factor of all forms may have no stack
        largest = xp.max(xp.abs(factor), axis=axes_of_factor, keepdims=True)
        return on_host(largest).astype(np.float64)

    query_size = largest_entries(form.query)
    key_size = largest_entries(form.key)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.log2(key_size / query_size) / 2
    exponent = np.nan_to_num(exponent, posinf=0, neginf=0)
    scale = np.exp2(np.round(exponent).clip(-60, 60))  # stays far from the ends of float32
    is_zero = query_size * key_size == 0  # false if an entry is not finite
    query_scale = np.where(is_zero, 0.0, scale)
    key_scale = np.where(is_zero, 0.0, 1 / scale)

    def scaled(factor: Any, scale_of_factor: np.ndarray) -> Any:
        return factor * xp.asarray(scale_of_factor, dtype=factor.dtype, device=device(factor))

    return type(form).from_factors(scaled(form.query, query_scale), scaled(form.key, key_scale))
