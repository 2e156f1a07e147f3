"""Pairs of public models that differ in objective and mask: what is read of them, and how.

The pairs are data, ``data/pairs.csv``. Both models of a pair are scored
as in any survey; of a pair whose second model continues the first, the update is measured, too:

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
from typing import Any, Literal, Unpack

import numpy as np
import polars as pl

from wqk._files import read_text, unwritable, write_atomically
from wqk.attention import Block
from wqk.differences import DIFFERENCE_SCHEMA, block_rows
from wqk.errors import CheckpointError, TableError, WqkError, all_lines
from wqk.forms.scores import symmetry_null
from wqk.model import open as open_model
from wqk.scanning.surveys import survey
from wqk.storage.references import HubAccess
from wqk.tables.score_table import ScoreTable, read_table

DATA = Path(__file__).parent / "data"

# What a survey of pairs adds to its folder: the design, with what became of each pair; the updates.
DESIGN, UPDATES = "pairs.json", "updates"

UPDATE_SCHEMA: dict[str, pl.DataType] = {
    **{n: DIFFERENCE_SCHEMA[n] for n in ("layer", "head", "norm", "moved", "cosine")},
    **{n: pl.Float64() for n in ("symmetry", "symmetry_null", "directionality_excess")},
    **{n: pl.Float64() for n in ("span", "span_chance")},
    "status": pl.String(),
}


@dataclass(frozen=True)
class Pair:
    """Two models, and what is expected of the second compared with the first.

    Attributes
    ----------
    recipe
        Who made them and how; pairs of one recipe are not independent.
    relation
        ``twins``: trained apart by one recipe; ``converted``: ``after`` continues ``before`` under
        another mask; ``contrast``: under the same mask; ``control``: an untrained copy.
    before, after, before_stack, after_stack
        Hub ids, and which stack where a model has several; empty for the only one.
    expected
        Predicted sign of the change of symmetry and of directionality; 0 for a control, which must
        not change at all; None if nothing is predicted.
    checked
        Whether a public page was found that names both models so; otherwise the names are inferred.
    bytes_before, bytes_after
        Of queries and keys, estimated from published shapes.
    differs
        What the second model differs in, in words.
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
        """Both models, and the stack where it matters.

        Examples
        --------
        >>> pairs()[0].title
        'jhu-clsp/ettin-decoder-17m → jhu-clsp/ettin-encoder-17m'
        """
        return f"{self.before} → {self.after}" + (f" ({self.after_stack})" * bool(self.after_stack))

    @property
    def key(self) -> str:
        """A file name that is this pair's own."""
        return hashlib.blake2b(self.title.encode(), digest_size=8).hexdigest()

    @property
    def is_update(self) -> bool:
        """True if the second model continues the first: Δ is then the effect of training."""
        return self.relation != "twins"


@dataclass(frozen=True, eq=False)
class PairSurvey:
    """A survey of pairs: the design, why pairs are missing, all scores, and the updates.

    ``problems`` has a reason for each pair that was not read. ``updates`` has the columns of
    `UPDATE_SCHEMA` after ``pair``, the pair's title.
    """

    pairs: tuple[Pair, ...]
    problems: dict[str, str]
    scores: ScoreTable
    updates: pl.DataFrame


def pairs() -> tuple[Pair, ...]:
    """Return the shipped pairs.

    Examples
    --------
    >>> sorted({pair.relation for pair in pairs()})
    ['contrast', 'control', 'converted', 'twins']
    """
    frame = pl.read_csv(DATA / "pairs.csv", comment_prefix="#")
    listed = []
    for row in frame.iter_rows(named=True):
        shape = (row.pop(name) for name in ("layers", "width", "item"))
        once = int(np.prod(list(shape))) * (row.pop("queries") + row.pop("keys"))
        sizes = {"bytes_before": once, "bytes_after": once * row.pop("attentions")}
        stacks = {name: row[name] or "" for name in ("before_stack", "after_stack")}
        listed.append(Pair(**{**row, **sizes, **stacks, "checked": row["checked"] == "yes"}))
    return tuple(listed)


def bytes_to_read(chosen: Sequence[Pair]) -> int:
    """Bytes of queries and keys of all models, each counted once.

    Examples
    --------
    >>> one = pairs()[0]
    >>> bytes_to_read([one, one]) == one.bytes_before + one.bytes_after
    True
    """
    sizes = {pair.before: pair.bytes_before for pair in chosen}
    return sum((sizes | {pair.after: pair.bytes_after for pair in chosen}).values())


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
        A survey's folder, which also gets ``pairs.json`` and a table of each update.
    chosen
        The pairs; all of `pairs` by default.
    gamma, heads, retry
        As for `wqk.survey`; ``retry`` also repeats pairs that failed.
    **options
        Further options of `wqk.survey`.

    Returns
    -------
    PairSurvey
        What was read. A model that is missing is no error: its pairs are in ``problems``.

    Raises
    ------
    WqkError
        As for `wqk.survey`.
    """
    design = pairs() if chosen is None else tuple(chosen)
    refs = dict.fromkeys(ref for pair in design for ref in (pair.before, pair.after))
    table = survey(list(refs), out=out, gamma=gamma, heads=heads, retry=retry, **options)
    failed = {line["checkpoint"]: line["reason"] for line in table.metadata["failed"]}
    problems = {
        pair.title: failed[ref]
        for pair in design
        for ref in (pair.after, pair.before)
        if ref in failed
    }
    hub = {n: options[n] for n in ("token", "cache_dir", "local_files_only") if n in options}
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
    """Read the survey that `survey_pairs` has written.

    Raises `TableError` if the folder is no such survey.
    """
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
    reasons = {
        pair.title: problem for pair, problem in zip(design, problems, strict=True) if problem
    }
    return PairSurvey(design, reasons, read_table(path / "scores.parquet"), pl.concat(frames))


def update_rows(
    pair: Pair, gamma: float = 2.0, heads: bool = True, **hub: Unpack[HubAccess]
) -> pl.DataFrame:
    """Return the update of every layer and head, with the columns of `UPDATE_SCHEMA`.

    Symmetry and directionality are those of Δ; ``symmetry_null`` is its symmetry with random signs
    of rows (`wqk.symmetry_null`). ``span`` is the share of ‖Δ‖² within the parent's own span, of
    U Uᵀ Δ V Vᵀ with U and V orthonormal bases of a head's A and B before; a layer's is that of all
    its heads. ``span_chance`` is R/D: that of small steps of A and B in random directions, either
    of which leaves one side of the product in its span.

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
    old, new = (
        open_model(ref, **hub).select(stack=stack or None, kind="self")
        for ref, stack in ((pair.before, pair.before_stack), (pair.after, pair.after_stack))
    )
    for model in (old, new):
        stacks = {plan.stack for plan in model.plans}
        if len(stacks) > 1:
            raise CheckpointError(f"{model.name}: name one of its stacks: {', '.join(stacks)}")
    if [p.layer for p in old.plans] != [p.layer for p in new.plans]:
        raise CheckpointError(
            f"{old.name} and {new.name} cannot be compared: {len(old)} layers and {len(new)}"
        )
    rows = []
    for before, after in zip(old, new, strict=True):
        rank, width = before.query.weight.shape[1:]
        steps = after.form.difference(before.form), after.groups.difference(before.groups)
        nulls = np.concatenate([np.ravel(symmetry_null(step)) for step in steps])
        chance = {"span_chance": rank / width}
        spans = span_shares(before, after)
        for row, span, null in zip(block_rows(before, after, gamma), spans, nulls, strict=True):
            if heads or row["head"] is None:
                rows.append({**row, "span": float(span), "symmetry_null": float(null), **chance})
    frame = pl.DataFrame(rows, infer_schema_length=None)
    cast = [pl.col(name).cast(kind) for name, kind in UPDATE_SCHEMA.items()]
    return frame.select(cast).fill_nan(None)


def span_shares(before: Block, after: Block) -> np.ndarray:
    """Shares of the update within the span before, (1 + H): of all heads, and of each.

    NaN where nothing has moved.
    """
    (queries, keys), (new_queries, new_keys) = (
        [np.asarray(side, np.float64) for side in block.weights()] for block in (before, after)
    )
    inside, total = np.zeros(len(queries)), np.zeros(len(queries))
    for head, (query, new_query) in enumerate(zip(queries, new_queries, strict=True)):
        group = head * len(keys) // len(queries)
        a, b, new_b = query.T, keys[group].T, new_keys[group].T
        a_step, b_step = new_query.T - a, new_b - b
        # Δ = X Yᵀ, each of shape (D, 2R), without the difference of two large products.
        x, y = np.hstack([a_step, a]), np.hstack([new_b, b_step])
        u, v = np.linalg.qr(a)[0], np.linalg.qr(b)[0]
        inside[head] = np.square((u.T @ x) @ (v.T @ y).T).sum()
        total[head] = ((x.T @ x) * (y.T @ y)).sum()
    sums = np.r_[inside.sum(), inside], np.r_[total.sum(), total]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sums[1] > 0, sums[0] / sums[1], np.nan)
