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
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from wqk._typing import Float
from wqk.attention import Block
from wqk.attention.coordinates import Coordinates, lacks_norm
from wqk.attention.omissions import omissions
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.references import HubOptions, redacted
from wqk.errors import CheckpointError, HubError, first_line
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.model import open as open_model

# What tables of token embeddings are called, without ``.weight``.
NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embedding|word_embeddings|word_embedding|wte"
    r"|embed_in|shared|embeddings|tokens_embed|tok_embedding|embedding)(?:\.weight)?"
)

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


@dataclass(frozen=True)
class TokenMatches:
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
    """The pairs of tokens with the largest and the smallest score, of one head.

    A vocabulary of 128,000 tokens takes 140 MB for heads of width 128, and as much for the scores
    in progress: embeddings are read in blocks of rows.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes.
    layer, head, stack
        Which head; negative layers count from the end.
    top
        How many pairs of each kind.
    distance
        Tokens from key to query, in rotary models.
    fold_norm
        Normalize the embeddings as the norm that feeds the block does, gain and bias included.
    circuit
        ``ov`` for what the head writes instead of what it matches: the pairs are of a token that it
        attends to, and of one that becomes more likely, or less, by what it writes.
    through
        Layer and head of an earlier one, in between: the head's keys, or with ``ov`` its values,
        are computed from what that one writes. The two are one virtual head
        (`wqk.compose` finds those that matter).
    embeddings
        The tensor that holds them, where its name is not one of the usual.

    Raises
    ------
    CheckpointError
        There is no such layer, head or table; or no norm is known to feed the block.
    """
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
    table = embedding_table(checkpoint, one.shape[0] - 1, embeddings)
    written = _unembedding_table(checkpoint, table, one.shape[1] - 1) if circuit == "ov" else None
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
    block: Block,
    head: int,
    circuit: Literal["qk", "ov"],
    fold_norm: bool,
    distance: int = 0,
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
        else "In layer 0 this is the model's own score where nothing but a norm stands between "
        "embedding and attention and positions are not added."
    )
    given = Coordinates("qk", fold_norm, bias=True)
    # The distance was chosen, the scale is in the scores, and of a norm more than gains is missing.
    others = (o for o in omissions(plan, given) if o.kind not in ("rotary", "scale", "norms"))
    missing = [*filter(None, [plan.reason]), *(omission.explanation for omission in others)]
    if plan.query.input_norm and not fold_norm:
        missing.append("the norm that feeds the block is left out")
    but = f" But {'; '.join(missing)}." if missing else ""
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


def embedding_table(checkpoint: Checkpoint, width: int, name: str | None = None) -> str:
    """The tensor (V, ``width``) with one embedding per token, by name or searched for.

    Raises `CheckpointError` if there is none, if it has another width, or if several may be it.
    """
    tensors = checkpoint.tensors()
    if name is not None:
        shape = checkpoint.info(name).shape
        if len(shape) != 2 or shape[1] != width:
            raise CheckpointError(
                f"{name}: an embedding table must be (tokens, {width}), as wide as the "
                f"queries' input; got {shape}"
            )
        return name
    found = [
        tensor
        for tensor, info in tensors.items()
        if len(info.shape) == 2 and info.shape[1] == width and NAMES.fullmatch(tensor)
    ]
    # A table that encoder and decoder share is stored under several names.
    found = [t for t in found if t.endswith("shared.weight")] or found
    if len(found) != 1:
        several = f"several might be it: {', '.join(found[:4])}" if found else "none was recognized"
        raise CheckpointError(
            f"{checkpoint.name}: no table of token embeddings of width {width} ({several}); "
            "name the tensor (embeddings=NAME)"
        )
    return found[0]


def embedding_rows(checkpoint: Checkpoint, table: str) -> Iterator[np.ndarray]:
    """The table's rows in order, (at most `ROWS`, D) at a time."""
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
                OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
                RecursionError, MemoryError,
            ) as error:  # fmt: skip
                raise CheckpointError(
                    f"{path}: contains no tokenizer ({first_line(error)})"
                ) from None
    return {}


def _beside(ref: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
    """A file next to the weights, fetched from the Hub if necessary."""
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
    """The vocabulary of a ``tokenizer.json``, in either form."""
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
