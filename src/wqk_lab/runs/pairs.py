"""Pairs of public models that differ in objective and mask, and surveys of these pairs.

The pairs are data, ``data/pairs.csv``. Both models of a pair are scored as in any survey. If the
second model of a pair continues the first model, the update is measured, too:

    Δ = W_after − W_before, with W = A Bᵀ, A and B of shape (D, R) for each head.

A model that cannot be read, or a pair whose models do not fit, is kept with the reason.

Axes: H query heads, G key heads, D width, R head width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import polars as pl

from wqk._files import read_text, unwritable, write_atomically
from wqk._typing import Float
from wqk.attention import Block
from wqk.differences import DIFFERENCE_SCHEMA, block_rows
from wqk.errors import CheckpointError, TableError, WqkError, all_lines
from wqk.forms.scores import symmetry_null
from wqk.model import Model
from wqk.model import open as open_model
from wqk.scanning.surveys import survey
from wqk.storage.references import HubAccess
from wqk.tables.score_table import ScoreTable, read_table

DATA = Path(__file__).parent / "data"

# Files that a survey of pairs adds to a folder: the design with the outcome of each pair; updates.
DESIGN, UPDATES = "pairs.json", "updates"

UPDATE_SCHEMA: dict[str, pl.DataType] = {
    **{name: DIFFERENCE_SCHEMA[name] for name in ("layer", "head", "norm", "moved", "cosine")},
    "symmetry": pl.Float64(),
    "symmetry_null": pl.Float64(),
    "directionality_excess": pl.Float64(),
    "span": pl.Float64(),
    "span_chance": pl.Float64(),
    "status": pl.String(),
}


@dataclass(frozen=True)
class Pair:
    """Two models, and the predicted change from the first to the second.

    Attributes
    ----------
    recipe
        Authors and method of training; pairs of one recipe are not independent.
    relation
        ``twins``: trained separately by one recipe; ``converted``: ``after`` continues ``before``
        under another mask; ``contrast``: under the same mask; ``control``: an untrained copy.
    before, after, before_stack, after_stack
        Hub ids, and the stacks of models with several; empty for the only stack.
    expected
        Predicted sign of the change of symmetry and of directionality; 0 for a control, without any
        change; None if nothing is predicted.
    checked
        True if a public page with both names was found; otherwise the names are inferred.
    bytes_before, bytes_after
        Bytes of queries and keys, estimated from published shapes.
    differs
        Settings in which the second model differs, in words.
    """

    recipe: str
    relation: Literal["twins", "converted", "contrast", "control"]
    before: str
    after: str
    before_stack: str = ""
    after_stack: str = ""
    expected: int | None = None
    checked: bool = False
    bytes_before: int = 0
    bytes_after: int = 0
    differs: str = ""

    @property
    def title(self) -> str:
        """Both models, and the stack of the second if the model has several.

        Examples
        --------
        >>> pairs()[0].title
        'jhu-clsp/ettin-decoder-17m → jhu-clsp/ettin-encoder-17m'
        """
        stack = f" ({self.after_stack})" if self.after_stack else ""
        return f"{self.before} → {self.after}{stack}"

    @property
    def key(self) -> str:
        """A unique file name for the pair."""
        return hashlib.blake2b(self.title.encode(), digest_size=8).hexdigest()

    @property
    def is_update(self) -> bool:
        """True if the second model continues the first: then Δ is the effect of training."""
        return self.relation != "twins"


@dataclass(frozen=True, eq=False)
class PairSurvey:
    """A survey of pairs: the design, reasons of missing pairs, all scores, and the updates.

    ``problems`` has a reason for each pair that was not read. ``updates`` has a column ``pair``
    with the pair's title, and the columns of `UPDATE_SCHEMA`.
    """

    pairs: tuple[Pair, ...]
    problems: dict[str, str]
    scores: ScoreTable
    updates: pl.DataFrame


def pairs() -> tuple[Pair, ...]:
    """Return the pairs that come with the package.

    Examples
    --------
    >>> sorted({pair.relation for pair in pairs()})
    ['contrast', 'control', 'converted', 'twins']
    """
    frame = pl.read_csv(DATA / "pairs.csv", comment_prefix="#")
    shipped = []
    for row in frame.iter_rows(named=True):
        matrix_bytes = row.pop("layers") * row.pop("width") * row.pop("item")
        bytes_before = matrix_bytes * (row.pop("queries") + row.pop("keys"))
        row["bytes_before"] = bytes_before
        row["bytes_after"] = bytes_before * row.pop("attentions")
        row["before_stack"] = row["before_stack"] or ""
        row["after_stack"] = row["after_stack"] or ""
        row["checked"] = row["checked"] == "yes"
        shipped.append(Pair(**row))
    return tuple(shipped)


def bytes_to_read(chosen: Sequence[Pair]) -> int:
    """Return the bytes of queries and keys of all models; each model is counted once.

    Examples
    --------
    >>> pair = pairs()[0]
    >>> bytes_to_read([pair, pair]) == pair.bytes_before + pair.bytes_after
    True
    """
    sizes = {pair.before: pair.bytes_before for pair in chosen}
    sizes |= {pair.after: pair.bytes_after for pair in chosen}
    return sum(sizes.values())


def survey_pairs(
    out: str | PathLike[str],
    chosen: Sequence[Pair] | None = None,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    retry: bool = False,
    **options: Any,
) -> PairSurvey:
    """Score both models of every pair, and measure the updates; the same call resumes.

    Parameters
    ----------
    out
        A survey's folder; ``pairs.json`` and a table of each update are added to the folder.
    chosen
        Pairs to survey; all of `pairs` by default.
    gamma, heads, retry
        As for `wqk.survey`; ``retry`` also repeats pairs that failed.
    **options
        Further options of `wqk.survey`.

    Returns
    -------
    PairSurvey
        The survey. A missing model is no error: the pairs of the model are in ``problems``.

    Raises
    ------
    WqkError
        As for `wqk.survey`.
    """
    design = pairs() if chosen is None else tuple(chosen)
    refs: list[str] = []
    for pair in design:
        refs += [pair.before, pair.after]
    table = survey(
        list(dict.fromkeys(refs)), out=out, gamma=gamma, heads=heads, retry=retry, **options
    )
    failed = {line["checkpoint"]: line["reason"] for line in table.metadata["failed"]}
    problems = {}
    for pair in design:
        if reason := failed.get(pair.before) or failed.get(pair.after):
            problems[pair.title] = reason
    hub = {}
    for name in ("token", "cache_dir", "local_files_only"):
        if name in options:
            hub[name] = options[name]
    folder = Path(out) / UPDATES
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None
    for pair in design:
        path = folder / f"{pair.key}.parquet"
        if not pair.is_update or pair.title in problems or (path.exists() and not retry):
            continue
        try:
            rows = update_rows(pair, gamma, heads, **hub)
        except WqkError as error:
            problems[pair.title] = all_lines(error)
        else:
            buffer = BytesIO()
            rows.write_parquet(buffer)
            write_atomically(path, buffer.getvalue())
    lines = [{**asdict(pair), "problem": problems.get(pair.title)} for pair in design]
    write_atomically(Path(out) / DESIGN, json.dumps(lines, indent=1).encode())
    return read_pairs(out)


def read_pairs(folder: str | PathLike[str]) -> PairSurvey:
    """Read a survey that `survey_pairs` has written; `TableError` if the folder has none."""
    path = Path(folder)
    try:
        lines = json.loads(read_text(path / DESIGN, TableError))
        problems = [line.pop("problem") for line in lines]
        design = tuple(Pair(**line) for line in lines)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TableError(f"{path / DESIGN}: damaged; survey the pairs again") from None
    frames = [pl.DataFrame(schema={"pair": pl.String(), **UPDATE_SCHEMA})]
    for pair in design:
        file = path / UPDATES / f"{pair.key}.parquet"
        if file.exists() and pair.is_update:
            try:
                rows = pl.read_parquet(file).select(UPDATE_SCHEMA.keys())
            except pl.exceptions.PolarsError:
                raise TableError(f"{file}: damaged; delete it and survey the pairs again") from None
            frames.append(rows.select(pl.lit(pair.title).alias("pair"), pl.all()))
    problem_by_title = {}
    for pair, problem in zip(design, problems, strict=True):
        if problem:
            problem_by_title[pair.title] = problem
    return PairSurvey(
        pairs=design,
        problems=problem_by_title,
        scores=read_table(path / "scores.parquet"),
        updates=pl.concat(frames),
    )


def update_rows(
    pair: Pair, gamma: float = 2.0, heads: bool = True, **hub: Unpack[HubAccess]
) -> pl.DataFrame:
    """Measure the update of every layer and of every head, with the columns of `UPDATE_SCHEMA`.

    Symmetry and directionality are scores of Δ; ``symmetry_null`` is the symmetry of Δ with random
    signs of rows (`wqk.symmetry_null`). ``span`` is the share of ‖Δ‖² within the span of the
    parent: the share of U Uᵀ Δ V Vᵀ, with U and V orthonormal bases of a head's A and B before. The
    share of a layer is that of all heads together. ``span_chance`` is R/D, the share of small steps
    of A and B in random directions, since each step leaves one side of the product unchanged.

    Raises
    ------
    CheckpointError
        The models cannot be read, or their layers or shapes differ.

    Examples
    --------
    >>> import wqk
    >>> encoder = str(wqk.demo_model("encoder"))
    >>> rows = update_rows(Pair("demo", "control", encoder, encoder), heads=False)
    >>> rows["moved"].to_list()
    [0.0, 0.0, 0.0, 0.0]
    """
    reference = _one_stack(pair.before, pair.before_stack, **hub)
    candidate = _one_stack(pair.after, pair.after_stack, **hub)
    reference_layers = [plan.layer for plan in reference.plans]
    if reference_layers != [plan.layer for plan in candidate.plans]:
        raise CheckpointError(
            f"{reference.name} and {candidate.name} cannot be compared: {len(reference)} layers "
            f"and {len(candidate)}"
        )
    rows = []
    for before, after in zip(reference, candidate, strict=True):
        rank, width = before.query.weight.shape[1:]
        layer_update = after.form.difference(before.form)
        head_updates = after.groups.difference(before.groups)
        layer_null, head_nulls = symmetry_null(layer_update), symmetry_null(head_updates)
        nulls = np.r_[np.ravel(layer_null), np.ravel(head_nulls)]
        block_update = block_rows(before, after, gamma)
        spans = span_shares(before, after)
        for row, span, null in zip(block_update, spans, nulls, strict=True):
            if heads or row["head"] is None:
                measured = {"span": float(span), "symmetry_null": float(null)}
                rows.append({**row, **measured, "span_chance": rank / width})
    frame = pl.DataFrame(rows, infer_schema_length=None)
    cast = [pl.col(name).cast(kind) for name, kind in UPDATE_SCHEMA.items()]
    return frame.select(cast).fill_nan(None)


def _one_stack(ref: str, stack: str, **hub: Unpack[HubAccess]) -> Model:
    """Open a model with the self-attention of one stack."""
    model = open_model(ref, **hub).select(stack=stack or None, kind="self")
    stacks = {plan.stack for plan in model.plans}
    if len(stacks) > 1:
        raise CheckpointError(f"{model.name}: name one of its stacks: {', '.join(stacks)}")
    return model


def span_shares(before: Block, after: Block) -> np.ndarray:
    """Return shares of the update within the old span, (1 + H): of all heads, and of each head.

    A share is NaN if no weight has changed.
    """
    queries, keys = _double_weights(before)
    new_queries, new_keys = _double_weights(after)
    heads_per_key_head = len(queries) // len(keys)
    inside = []
    total = []
    for head, (query, new_query) in enumerate(zip(queries, new_queries, strict=True)):
        group = head // heads_per_key_head
        squares = _update_squares(query.T, keys[group].T, new_query.T, new_keys[group].T)
        inside.append(squares.inside)
        total.append(squares.total)
    # All heads together come first.
    inside_squares = np.array([sum(inside), *inside])
    total_squares = np.array([sum(total), *total])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total_squares > 0, inside_squares / total_squares, np.nan)


def _double_weights(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Return a block's query and key weights in double precision."""
    query_weight, key_weight = block.weights()
    return np.asarray(query_weight, np.float64), np.asarray(key_weight, np.float64)


class UpdateSquares(NamedTuple):
    """Sums of squares of a head's update Δ, and of the update within the old span."""

    inside: float
    total: float


def _update_squares(
    a: Float[np.ndarray, "D R"],
    b: Float[np.ndarray, "D R"],
    new_a: Float[np.ndarray, "D R"],
    new_b: Float[np.ndarray, "D R"],
) -> UpdateSquares:
    """Return the sums of squares of Δ = A' B'ᵀ − A Bᵀ, and of U Uᵀ Δ V Vᵀ."""
    # Δ = X Yᵀ, each of shape (D, 2R), without the difference of two large products.
    x = np.hstack([new_a - a, a])
    y = np.hstack([new_b, new_b - b])
    a_basis, b_basis = np.linalg.qr(a)[0], np.linalg.qr(b)[0]
    within_span = (a_basis.T @ x) @ (b_basis.T @ y).T
    return UpdateSquares(
        inside=float(np.square(within_span).sum()),
        total=float(((x.T @ x) * (y.T @ y)).sum()),
    )
