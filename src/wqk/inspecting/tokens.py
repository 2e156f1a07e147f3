"""Which tokens a head matches: the largest and smallest scores of pairs of token embeddings.

The scores are those of the model's embeddings alone. The first layer computes the same if nothing
but the norm that is folded in comes before it and positions do not count; deeper layers read what
the layers before them have written.

Of all V² pairs, few have to be computed: since |q_i · k_j| ≤ ‖q_i‖ ‖k_j‖, vectors are compared in
the order of their lengths, until no remaining pair can be among the wanted ones.

Axes: V tokens, D model width, R head width.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from rich.text import Text

from wqk._console import Result, number
from wqk._typing import Float
from wqk.attention import Block
from wqk.attention.factors import Coordinates, lacks_norm, omissions
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError, HubError, first_line
from wqk.families import AttentionPlan
from wqk.families.naming import embedding_table
from wqk.forms import BilinearForm
from wqk.model import open as open_model
from wqk.storage.references import HubOptions, redacted
from wqk.tables.sheet import Sheet

# Files of tokenizers are 20 MB at most.
LARGEST_TOKENIZER = 2**28

# What the tables are called that make logits, where they are not the embeddings themselves.
UNEMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|unembed|output|lm_head\.decoder|decoder)\.weight"
)

# Rows of the table of embeddings that are in memory at a time.
ROWS = 8192

# Queries and keys whose scores are computed together: 2 MB, which stay in a core's cache.
BLOCK = (512, 1024)


class TokenPair(NamedTuple):
    """A query token, a key token, their score, and their names where there is a tokenizer."""

    query: int
    key: int
    score: float
    query_name: str | None = None
    key_name: str | None = None


@dataclass(frozen=True, repr=False)
class TokenMatches(Result):
    """The scores that a head's form gives to pairs of token embeddings."""

    checkpoint: str
    stack: str
    layer: int
    head: int
    distance: int  # tokens from key to query
    embeddings: str  # name of the tensor
    normalized: bool  # whether the norm that feeds the block is folded in
    largest: tuple[TokenPair, ...]  # the most extreme first
    smallest: tuple[TokenPair, ...]
    most_alike: tuple[TokenPair, ...]  # tokens with themselves
    least_alike: tuple[TokenPair, ...]
    caveat: str  # what the scores are and are not
    circuit: str = "qk"
    through: tuple[int, int] | None = None  # layer and head between the keys' or values' token
    unembeddings: str | None = None  # name of the tensor for the tokens that are written

    @property
    def sentence(self) -> str:
        """The pair with the largest score."""
        best = self.largest[0]
        return (
            f"{self.checkpoint}, {self.stack}, layer {self.layer}, head {self.head}: largest score "
            f"{_score(best.score, abs(best.score))}, {_query(best)} → {_key(best)}"
        )

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        for pairs in ("largest", "smallest", "most_alike", "least_alike"):
            yield from ({"list": pairs} | pair._asdict() for pair in getattr(self, pairs))

    def _shown(self, width: int) -> Iterator[Any]:
        """Pairs with the largest and smallest scores side by side, then tokens with themselves."""
        where = f"{self.stack}, layer {self.layer}, head {self.head}, distance {self.distance}"
        if self.through is not None:
            where += f", through {'.'.join(map(str, self.through))}"
        if self.circuit == "ov":
            where += f", written: {self.unembeddings}"
        norm = ", normalized" if self.normalized else ""
        yield Text.assemble((self.checkpoint, "bold"), f"\n{where}; {self.embeddings}{norm}\n")
        ends = "attended → written" if self.circuit == "ov" else "query → key"
        columns = (f"largest: {ends}", f"smallest: {ends}")
        yield _side_by_side(
            columns, self.largest, self.smallest, lambda pair: f"{_query(pair)} → {_key(pair)}"
        )
        columns = ("most to itself: token", "least to itself: token")
        yield _side_by_side(columns, self.most_alike, self.least_alike, _query)
        if all(pair.query_name is None for pair in self.largest):
            yield (
                "Tokens are shown by number: there is no tokenizer.json or vocab.txt beside the "
                "model."
            )
        yield Text(self.caveat, style="dim")


def match_tokens(
    ref: Any,
    layer: int,
    head: int,
    *,
    top: int = 20,
    distance: int = 0,
    fold_norm: bool = False,
    circuit: Literal["qk", "ov"] = "qk",
    through: tuple[int, int] | None = None,
    stack: str | None = None,
    embeddings: str | None = None,
) -> TokenMatches:
    """List the token pairs that a head scores highest and lowest.

    Queries and keys are computed from the model's token embeddings. In layer 0 that is what the
    head computes, apart from positions; in deeper layers it is only a hint, because their inputs
    are not embeddings.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes.
    layer, head, stack
        Which head; negative layers count from the end.
    top
        Number of pairs in each list.
    distance
        Tokens from key to query, in rotary models.
    fold_norm
        Normalize the embeddings as the norm that feeds the block does, gain and bias included.
    circuit
        ``qk`` for what the head matches; ``ov`` for what it writes: pairs of a token that it
        attends to, and of one that becomes more likely, or less, by what it writes.
    through
        An earlier head, by its layer and number, from whose output the keys, or with ``ov`` the
        values, are computed: the two are one virtual head (`wqk.compose` finds those that matter).
    embeddings
        Name of the embedding table, if it is not one of the usual.

    Raises
    ------
    CheckpointError
        There is no such layer, head or table; or no norm is known to feed the block.

    Notes
    -----
    A vocabulary of 128,000 tokens takes 140 MB for heads of width 128, and as much for the scores
    in progress: embeddings are read in blocks of rows.
    """
    if top < 1:
        raise CheckpointError(f"top is a number of pairs, 1 or more; got {top}")
    model = open_model(ref)
    checkpoint, block = model.checkpoint, model.block(layer, stack=stack)
    plan = block.plan
    one = _head(block, head, circuit, fold_norm, distance)
    reading = plan
    if through is not None:
        earlier = model.block(through[0], stack=stack)
        reading = earlier.plan
        if reading.layer >= plan.layer:
            raise CheckpointError(
                f"{checkpoint.name}: layer {plan.layer} reads what earlier layers write; through "
                f"must name one of these, got layer {reading.layer}"
            )
        between = _head(earlier, through[1], "ov", fold_norm)
        one = one @ between.T if circuit == "qk" else between @ one
    table = embedding_table(checkpoint, one.widths[0] - 1, embeddings)
    written = _unembedding_table(checkpoint, table, one.widths[1] - 1) if circuit == "ov" else None
    # The side of the token that is attended to reads as the first of two heads does.
    sides: tuple[tuple[Any, AttentionPlan | None, str], ...] = (
        (one.query, reading if written else plan, table),
        (one.key, None if written else reading, written or table),
    )
    query, key = (
        _projected(checkpoint, name, factor, feeding if fold_norm else None)
        for factor, feeding, name in sides
    )
    names = token_names(model.ref, **model.hub)
    largest, smallest = extreme_pairs(query, key, top)
    tokens = min(len(query), len(key))
    own = np.argsort(np.einsum("vr,vr->v", query[:tokens], key[:tokens]))
    wanted = (largest, smallest, np.stack([own[::-1][:top]] * 2), np.stack([own[:top]] * 2))
    lists = ("largest", "smallest", "most_alike", "least_alike")
    pairs = {
        kind: _pairs(query, key, places, names) for kind, places in zip(lists, wanted, strict=True)
    }
    return TokenMatches(
        checkpoint.name,
        plan.stack,
        plan.layer,
        head,
        distance,
        table,
        fold_norm,
        caveat=_caveat(plan, fold_norm)
        if circuit == "qk" and not through
        else _written_caveat(plan),
        circuit=circuit,
        through=None if through is None else (reading.layer, through[1]),
        unembeddings=written,
        **pairs,
    )


def _head(
    block: Block, head: int, circuit: Literal["qk", "ov"], fold_norm: bool, distance: int = 0
) -> BilinearForm:
    """One head's form of [x, 1], scaled and with biases.

    Raises `CheckpointError` if there is no such head, or no norm that could be folded in.
    """
    plan, name = block.plan, block.checkpoint.name
    coordinates = Coordinates(circuit, fold_norm, bias=True, distances=(distance,))
    if lacks_norm(plan, coordinates):
        raise CheckpointError(
            f"{name}: no known norm feeds layer {plan.layer}; leave out fold_norm"
        )
    ((_, form),) = block.forms(coordinates, every_bias=True)
    heads = form.stack[0] * form.stack[1]
    if not 0 <= head < heads:
        raise CheckpointError(f"{name}: no head {head}, layer {plan.layer} has {heads}")
    one: BilinearForm = form[divmod(head, form.stack[1])]
    if circuit == "ov":
        return one
    query = plan.rotary.stretch(one.query) if plan.rotary else one.query
    return BilinearForm.from_factors(plan.scale * query, one.key)


def _projected(
    checkpoint: Checkpoint, table: str, factor: np.ndarray, plan: AttentionPlan | None
) -> np.ndarray:
    """All tokens of a table on one side of a form, (V, R); normalized as a plan's block does."""
    blocks = []
    for rows in embedding_rows(checkpoint, table):
        normalized = rows if plan is None else _normalized(rows, plan)
        blocks.append(normalized @ factor[:-1] + factor[-1])
    return np.concatenate(blocks).astype(np.float32)


def _written_caveat(plan: AttentionPlan) -> str:
    """What pairs of a written token, or of a virtual head, are and are not."""
    guess = " The family is guessed." if plan.rule.guess else ""
    return (
        "From weights alone: what one head, or two in a row, would do if nothing else were in the "
        f"stream. The norms between heads, and the one before the last layer, are left out.{guess}"
    )


def _unembedding_table(checkpoint: Checkpoint, table: str, width: int) -> str:
    """The tensor (V, ``width``) that turns the stream into logits; the embeddings if tied."""
    found = [
        name
        for name, info in checkpoint.tensors().items()
        if UNEMBEDDINGS.fullmatch(name) and len(info.shape) == 2 and info.shape[1] == width
    ]
    return found[0] if len(found) == 1 else table


def _caveat(plan: AttentionPlan, fold_norm: bool) -> str:
    exact = (
        "This layer reads what the layers before it have written, not embeddings: take the pairs "
        "as a hint at what its form matches."
        if plan.layer
        else "In layer 0 this is the model's own score if the embedding reaches attention through "
        "nothing more than a norm, and no positions are added to it."
    )
    given = Coordinates("qk", fold_norm, bias=True)
    # The distance was chosen, the scale is in the scores, and of a norm more than gains is missing.
    others = (o for o in omissions(plan, given) if o.kind not in ("rotary", "scale", "norms"))
    missing = [*filter(None, [plan.reason]), *(omission.explanation for omission in others)]
    if plan.query.input_norm and not fold_norm:
        missing.append("the norm in front of the block is not applied (--fold-norm applies it)")
    but = f" However, {'; '.join(missing)}." if missing else ""
    return f"Scores of token embeddings alone, with scale and biases. {exact}{but}"


def _pairs(
    query: np.ndarray, key: np.ndarray, places: np.ndarray, names: Mapping[int, str]
) -> tuple[TokenPair, ...]:
    """Pairs of tokens with scores in double precision, in the order of the places (2, pairs)."""
    i, j = places
    scores = np.einsum("pr,pr->p", query[i].astype(np.float64), key[j].astype(np.float64))
    pairs = zip(i.tolist(), j.tolist(), scores.tolist(), strict=True)
    return tuple(TokenPair(q, k, score, names.get(q), names.get(k)) for q, k, score in pairs)


def extreme_pairs(
    query: Float[np.ndarray, "tokens width"], key: Float[np.ndarray, "tokens width"], top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices (query, key) of the ``top`` largest and smallest q_i · k_j, (2, top) each.

    Examples
    --------
    >>> query, key = np.array([[1.0], [-3.0]]), np.array([[2.0], [1.0]])
    >>> [pairs.tolist() for pairs in extreme_pairs(query, key, 1)]
    [[[0], [0]], [[1], [0]]]
    """
    lengths = [np.linalg.norm(side, axis=-1) for side in (query, key)]
    orders = [np.argsort(-length, kind="stable") for length in lengths]
    queries, keys = query[orders[0]], key[orders[1]]
    query_lengths, key_lengths = (n[o] for n, o in zip(lengths, orders, strict=True))
    best = [_Best(top, +1), _Best(top, -1)]
    # What the longest vectors of a block can reach; rounding may lift a product above its bound.
    reach = 1.0001 * np.outer(query_lengths[:: BLOCK[0]], key_lengths[:: BLOCK[1]])
    for row, i in enumerate(range(0, len(queries), BLOCK[0])):
        for column, j in enumerate(range(0, len(keys), BLOCK[1])):
            if reach[row, column] <= min(found.threshold for found in best):
                break
            scores = queries[i : i + BLOCK[0]] @ keys[j : j + BLOCK[1]].T
            for found in best:
                found.take(scores, i, j)
    largest, smallest = (
        np.stack([order[places] for order, places in zip(orders, found.places, strict=True)])
        for found in best
    )
    return largest, smallest


class _Best:
    """The largest of sign · score so far, and where they are."""

    def __init__(self, top: int, sign: int) -> None:
        self._top, self._sign = top, sign
        self._scores = np.empty(0, np.float32)
        self.places = np.empty((2, 0), np.int64)

    @property
    def threshold(self) -> float:
        """What a score has to exceed to be among them."""
        return float(self._scores[-1]) if len(self._scores) == self._top else -np.inf

    def take(self, scores: np.ndarray, first_row: int, first_column: int) -> None:
        """Look through a block of scores."""
        threshold = self.threshold
        if (scores.max() if self._sign > 0 else -scores.min()) <= threshold:
            return
        signed = self._sign * scores.ravel()
        flat = np.flatnonzero(signed > threshold)
        if len(flat) > self._top:
            flat = flat[np.argpartition(-signed[flat], self._top)[: self._top]]
        rows, columns = np.divmod(flat, scores.shape[1])
        scores = np.concatenate([self._scores, signed[flat]])
        places = np.stack([rows + first_row, columns + first_column])
        kept = np.argsort(-scores, kind="stable")[: self._top]
        self._scores = scores[kept]
        self.places = np.concatenate([self.places, places], axis=1)[:, kept]


def _normalized(rows: np.ndarray, plan: AttentionPlan) -> np.ndarray:
    """Rows as the block's norm has them before its gain."""
    norm = plan.query.input_norm
    assert norm is not None
    if norm.kind == "layer":
        rows = rows - rows.mean(axis=-1, keepdims=True)
    return np.asarray(rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + norm.epsilon))


def embedding_rows(checkpoint: Checkpoint, table: str) -> Iterator[np.ndarray]:
    """Yield the table's rows in order, (at most `ROWS`, D) at a time."""
    count = checkpoint.info(table).shape[0]
    for start in range(0, count, ROWS):
        yield checkpoint.read([Part(table, ((start, min(start + ROWS, count)),))])[0]


def token_names(ref: Any, **hub: Unpack[HubOptions]) -> dict[int, str]:
    """The tokens' names by number, from ``tokenizer.json`` or ``vocab.txt``; empty without one.

    ``ref`` is a folder or a Hub id; nothing else has a tokenizer.
    """
    if not isinstance(ref, str | os.PathLike):
        return {}
    for name, read in (("tokenizer.json", _from_tokenizer), ("vocab.txt", _from_lines)):
        path = _beside(ref, name, hub)
        if path is not None:
            try:
                return read(path)
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                ArithmeticError,
                RecursionError,
                MemoryError,
            ) as error:
                raise CheckpointError(
                    f"{path}: contains no tokenizer ({first_line(error)})"
                ) from None
    return {}


def _beside(ref: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
    """Return a file next to the weights, fetched from the Hub if necessary."""
    folder = Path(ref) / (hub.get("subfolder") or "")
    if Path(ref).exists():
        path = (folder if folder.is_dir() else folder.parent) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(str(ref), name, **hub))
    except (EntryNotFoundError, LocalEntryNotFoundError, HFValidationError):
        return None
    except Exception as error:  # the client lets errors of its transport through, of any class
        raise HubError(f"{redacted(str(ref))}: {name} cannot be fetched ({error})") from None


def _from_tokenizer(path: Path) -> dict[int, str]:
    """Return the vocabulary of a ``tokenizer.json``, in either form."""
    content = json.loads(_text(path))
    vocabulary = content["model"]["vocab"]
    pairs = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((entry[0], number) for number, entry in enumerate(vocabulary))
    )
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or [])
    return {int(number): str(token) for token, number in (*pairs, *added)}


def _text(path: Path) -> str:
    if path.stat().st_size > LARGEST_TOKENIZER:
        raise ValueError(f"larger than {LARGEST_TOKENIZER} bytes")
    return path.read_text(encoding="utf-8")


def _from_lines(path: Path) -> dict[int, str]:
    # Not splitlines: a token may itself be a separator of lines, such as U+2028.
    return dict(enumerate(_text(path).removesuffix("\n").split("\n")))


def _side_by_side(
    columns: tuple[str, str],
    left: tuple[TokenPair, ...],
    right: tuple[TokenPair, ...],
    label: Callable[[TokenPair], str],
) -> Sheet:
    """Two lists of token pairs and their scores."""
    table = Sheet.of(columns[0], "score", columns[1], "score", text=columns)
    largest = max(abs(pair.score) for pair in (*left, *right))
    for pairs in zip_longest(left, right):
        cells = [(label(pair), _score(pair.score, largest)) if pair else ("", "") for pair in pairs]
        table.add(*(cell for pair in cells for cell in pair))
    return table


def _score(score: float, largest: float) -> str:
    """Return a score to the digits that the largest beside it needs.

    Examples
    --------
    >>> _score(1.234, 5.0), _score(0.00123, 0.0021), _score(-3e-9, 4e-9)
    ('1.23', '0.0012', '-3.0e-09')
    """
    digits = 2 if largest == 0 else max(2, 1 - math.floor(math.log10(largest)))
    return number(score, digits) if digits < 7 else f"{score:.1e}"


def _query(pair: TokenPair) -> str:
    return _name(pair.query, pair.query_name)


def _key(pair: TokenPair) -> str:
    return _name(pair.key, pair.key_name)


def _name(number: int, name: str | None) -> str:
    """Return a token's name with control characters escaped; its number if it has none."""
    if name is None:
        return str(number)
    return name if name.isprintable() else name.encode("unicode_escape").decode()
