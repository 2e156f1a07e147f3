"""Token pairs with the largest and smallest scores of a head.

The scores are computed from token embeddings only. The first layer computes the same scores if only
the folded norm comes before it and positions have no effect. Deeper layers do not read embeddings,
but the output of earlier layers.

Only few of the V² pairs must be computed. Because |q_i · k_j| ≤ ‖q_i‖ ‖k_j‖, vectors are compared
in descending order of length, until no remaining pair can have an extreme score.

Axes: V tokens, D model width, R head width.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from rich.text import Text

from wqk._console import Result, counted, display_name, json_value, number
from wqk._typing import Float
from wqk.attention import Block
from wqk.attention.factors import Coordinates, lacks_norm, omissions
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError, HubError, called_as, first_line
from wqk.families import AttentionPlan
from wqk.families.naming import embedding_table
from wqk.families.plans import contents_of_attention
from wqk.forms import BilinearForm
from wqk.inspecting.directions import Direction, TokenDirections, direction_ends
from wqk.model import open as open_model
from wqk.storage.references import HubOptions, redacted
from wqk.tables.sheet import Sheet

# Files of tokenizers have about 20 MB at most; larger files are rejected.
LARGEST_TOKENIZER = 2**28

# Names of the tables that turn the stream into logits, if they differ from the embeddings.
UNEMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|unembed|output|lm_head\.decoder|decoder)\.weight"
)

# Names of tables whose rows models add to the embeddings of tokens: positions, types of tokens.
ADDED_TABLES = re.compile(
    r"(?:.*\.)?(?:wpe|\w*position\w*|pos_emb\w*|token_type_embeddings?|segment_embeddings?)"
    r"(?:\.weight)?"
)

# Rows of the table of embeddings that are in memory at a time.
EMBEDDING_ROWS = 8192

# Marks of tokenizers for a space before a word.
WORD_MARKERS = ("Ġ", "▁")
# Mark of WordPiece tokens that continue a word.
CONTINUATION = "##"

# Reason why tokens have numbers instead of names.
UNNAMED = "Tokens have no names: there is no tokenizer.json or vocab.txt next to the model."

# Queries and keys whose scores are computed together: 2 MB, which stay in a core's cache.
SCORE_BLOCK = (512, 1024)


# Lists of pairs in a result.
LISTS = ("largest", "smallest", "most_alike", "least_alike")


class TokenPair(NamedTuple):
    """A query token, a key token, the score, and the tokens' names; None without a tokenizer.

    In an output-value circuit, the first token is attended to and the second is written: `attended`
    and `written` are the numbers of these tokens.
    """

    query: int
    key: int
    score: float
    query_name: str | None = None
    key_name: str | None = None

    @property
    def attended(self) -> int:
        """In an output-value circuit, the token that the head attends to."""
        return self.query

    @property
    def written(self) -> int:
        """In an output-value circuit, the token whose logit the head changes."""
        return self.key

    def values_by_name(self, circuit: str) -> dict[str, Any]:
        """Return all values by name; for ``ov``, also with the names of this circuit.

        Examples
        --------
        >>> [*TokenPair(3, 5, 1.0).values_by_name("ov")][-4:]
        ['attended', 'written', 'attended_name', 'written_name']
        """
        values: dict[str, Any] = self._asdict()
        if circuit == "ov":
            values |= {
                "attended": self.query,
                "written": self.key,
                "attended_name": self.query_name,
                "written_name": self.key_name,
            }
        return values


@dataclass(frozen=True, repr=False)
class TokenMatches(Result):
    """Scores of a head's form for pairs of token embeddings.

    `frame` is a polars frame with a row for each pair; the column ``list`` names the list, the last
    columns the head.

    Attributes
    ----------
    checkpoint, stack, layer, head
        The head.
    distance
        Number of tokens from key to query.
    embeddings
        Name of the embedding table.
    normalized
        Whether the norm before the block is folded in.
    largest, smallest
        Pairs with the most extreme scores, the most extreme pair first. No pair is in both lists:
        if there are fewer pairs than places, ``smallest`` has the pairs that ``largest`` lacks.
    most_alike, least_alike
        Tokens with the most extreme scores with themselves ("most to itself" and "least to itself"
        on the screen). No token is in both lists.
    caveat
        Sentences on the meaning of the scores.
    circuit
        ``qk`` or ``ov``. With ``ov``, JSON and CSV have the tokens of a pair also as ``attended``
        and ``written``; ``query`` and ``key`` are the same tokens.
    through
        Layer and head between the embedding and the keys or values.
    unembeddings
        Name of the table for written tokens, if the circuit is ``ov``.
    tokens
        Number of tokens with a score with themselves: all tokens of the vocabulary, also if
        ``query`` or ``key`` chose one of them.
    positive_tokens
        Number of these tokens whose score with themselves is above 0. With ``ov``, attending to
        such a token makes this token more likely.
    chosen_query, chosen_key
        Numbers of the tokens that ``query`` and ``key`` chose; None for all tokens.
    """

    checkpoint: str
    stack: str
    layer: int
    head: int
    distance: int
    embeddings: str
    normalized: bool
    largest: tuple[TokenPair, ...]
    smallest: tuple[TokenPair, ...]
    most_alike: tuple[TokenPair, ...]
    least_alike: tuple[TokenPair, ...]
    caveat: str
    circuit: str = "qk"
    through: tuple[int, int] | None = None
    unembeddings: str | None = None
    tokens: int = 0
    positive_tokens: int = 0
    chosen_query: int | None = None
    chosen_key: int | None = None

    @property
    def sentence(self) -> str:
        """The pair with the largest score, and the number of tokens that match themselves."""
        best = self.largest[0]
        sentence = (
            f"{self.checkpoint}, {self.stack}, layer {self.layer}, head {self.head}: largest score "
            f"{_score(best.score, abs(best.score))}, {_query(best)} → {_key(best)}"
        )
        return f"{sentence}; {self._matching_themselves}" if self._is_of_all_tokens else sentence

    @property
    def _is_of_all_tokens(self) -> bool:
        """Return whether neither a query nor a key was chosen."""
        return self.chosen_query is None and self.chosen_key is None

    @property
    def _matching_themselves(self) -> str:
        """Number of tokens with a positive score with themselves, in words."""
        if self.circuit == "ov":
            return (
                f"attending to a token makes this token more likely for {self.positive_tokens} of "
                f"{counted(self.tokens, 'token')}"
            )
        return (
            f"the score of a token with itself is above 0 for {self.positive_tokens} of "
            f"{counted(self.tokens, 'token')}"
        )

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        subject = {
            "checkpoint": display_name(self.checkpoint),
            "stack": self.stack,
            "layer": self.layer,
            "head": self.head,
            "distance": self.distance,
            "normalized": self.normalized,
            "circuit": self.circuit,
            "through": None if self.through is None else ".".join(map(str, self.through)),
        }
        for name in LISTS:
            for pair in getattr(self, name):
                yield {"list": name, **pair.values_by_name(self.circuit), **subject}

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain values, for JSON."""
        values = super().to_dict()
        for name in LISTS:
            pairs = [pair.values_by_name(self.circuit) for pair in getattr(self, name)]
            values[name] = json_value(pairs)
        return values

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield pairs with the largest and smallest scores, then tokens with themselves."""
        head = f"{self.stack}, layer {self.layer}, head {self.head}, distance {self.distance}"
        if self.through is not None:
            head += f", through {'.'.join(map(str, self.through))}"
        if self.circuit == "ov":
            head += f", written: {self.unembeddings}"
        norm = ", normalized" if self.normalized else ""
        yield Text.assemble(
            (display_name(self.checkpoint), "bold"), f"\n{head}; {self.embeddings}{norm}\n"
        )
        ends = "attended → written" if self.circuit == "ov" else "query → key"
        columns = (f"largest: {ends}", f"smallest: {ends}")
        yield _side_by_side(
            columns, self.largest, self.smallest, lambda pair: f"{_query(pair)} → {_key(pair)}"
        )
        columns = ("most to itself (most_alike)", "least to itself (least_alike)")
        if len(self.most_alike) > 1 or self.least_alike:
            yield _side_by_side(columns, self.most_alike, self.least_alike, _query)
        elif self.most_alike:
            (pair,) = self.most_alike
            yield Text(f"{_query(pair)} with itself: {_score(pair.score, abs(pair.score))}")
        if self._is_of_all_tokens:
            yield Text(f"{self._matching_themselves[0].upper()}{self._matching_themselves[1:]}.")
        yield Text(self.caveat, style="dim")


@called_as("wqk.tokens(ref, layer, head)")
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
    directions: int | None = None,
    query: int | str | None = None,
    key: int | str | None = None,
) -> TokenMatches | TokenDirections:
    """List the token pairs that a head scores highest and lowest.

    Queries and keys are computed from the model's token embeddings. In layer 0 the head computes
    the same scores, except for positions. In deeper layers the scores are only a hint, because the
    inputs of these layers are not embeddings. Of the demo models, demo:induction has all weights;
    demo:encoder and demo:decoder have queries and keys only.

    Parameters
    ----------
    ref
        A `Model`, or a reference for `wqk.open`.
    layer
        Number of the layer; negative numbers count from the last layer.
    head
        Number of the head in the layer.
    stack
        ``encoder`` or ``decoder``, if the model has both.
    top
        Number of pairs in each list. No pair is in two lists: the second list is shorter if there
        are too few pairs.
    distance
        Number of tokens from key to query, for rotary models.
    fold_norm
        Whether to normalize the embeddings with the norm before the block, including gain and bias.
    circuit
        ``qk`` for the tokens that the head matches. ``ov`` for the tokens that the head writes: a
        pair consists of a token that the head attends to, and a token that the head's output makes
        more or less likely.
    through
        Layer and number of an earlier head. The keys, or with ``ov`` the values, are computed from
        the output of this head; the two heads form a virtual head (`wqk.compose` finds the
        important ones).
    embeddings
        Name of the embedding table, if it has no usual name.
    directions
        Number of singular directions of the form to list instead of pairs, largest first, with the
        tokens at their two ends.
    query
        Only pairs with this token as the query, or with ``ov`` as the attended token: its number,
        or its name in the tokenizer. If a text can be both, the name is meant.
    key
        Only pairs with this token as the key, or with ``ov`` as the written token.

    Returns
    -------
    TokenMatches or TokenDirections
        The pairs; with ``directions``, the singular directions of the form without biases.

    Raises
    ------
    CheckpointError
        The layer, the head or the table does not exist; or no norm before the block is known.

    Notes
    -----
    A vocabulary of 128,000 tokens needs 140 MB for heads of width 128, and another 140 MB for
    scores in progress. Embeddings are read in blocks of rows.
    """
    if top < 1:
        raise CheckpointError(f"top is a number of pairs, 1 or more; got {top}")
    if directions is not None and (query, key) != (None, None):
        raise CheckpointError(
            "directions are of all tokens; leave out query and key, or directions"
        )
    model = open_model(ref)
    checkpoint, block = model.checkpoint, model.block(layer, stack=stack)
    plan = block.plan
    form = _head(block, head, circuit, fold_norm, distance)
    reading, earlier = plan, None
    if through is not None:
        earlier = model.block(through[0], stack=stack)
        reading = earlier.plan
        if reading.layer >= plan.layer:
            raise CheckpointError(
                f"{checkpoint.name}: layer {plan.layer} reads what earlier layers write; through "
                f"must name one of these, got layer {reading.layer}"
            )
        earlier_form = _head(earlier, through[1], "ov", fold_norm)
        form = form @ earlier_form.T if circuit == "qk" else earlier_form @ form
    contents = contents_of_attention(model.plans, checkpoint.tensors())
    table = embedding_table(checkpoint, form.widths[0] - 1, embeddings, contents)
    if fold_norm:
        _require_norm(block, circuit)
        if earlier is not None:
            _require_norm(earlier, "ov")
    unembeddings = None
    # Of a virtual head, the earlier head reads the embeddings of the attended token.
    first_plan, second_plan = (plan, reading) if circuit == "qk" else (reading, None)
    if circuit == "ov":
        unembeddings = unembedding_table(checkpoint, table, form.widths[1] - 1)
    sides = (
        _TokenSide(table, first_plan if fold_norm else None),
        _TokenSide(unembeddings or table, second_plan if fold_norm else None),
    )
    names = token_names(model.ref, **model.hub)
    is_single = circuit == "qk" and not through
    if is_single:
        caveat = _caveat(checkpoint, plan, table, fold_norm)
    else:
        address = None if through is None else (reading.layer, through[1])
        caveat = _written_caveat(plan, circuit, address, fold_norm)
    if not names:
        caveat += f" {UNNAMED}"
    if directions is not None:
        return TokenDirections(
            checkpoint=checkpoint.name,
            stack=plan.stack,
            layer=plan.layer,
            head=head,
            circuit=circuit,
            embeddings=table,
            unembeddings=unembeddings or table,
            directions=_directions(checkpoint, form, sides, directions, top, names),
            caveat=f"{caveat} Biases are left out of the directions, whose sign is arbitrary.",
        )
    queries, keys = (
        _projected(checkpoint, side.table, factor, side.plan)
        for side, factor in zip(sides, (form.query, form.key), strict=True)
    )
    query_numbers = _chosen_tokens(query, len(queries), names)
    key_numbers = _chosen_tokens(key, len(keys), names)
    chosen_queries = queries if query is None else queries[query_numbers]
    chosen_keys = keys if key is None else keys[key_numbers]
    # Pairs of places among the chosen tokens become pairs of numbers of tokens.
    largest, smallest = (
        np.stack([query_numbers[pairs[0]], key_numbers[pairs[1]]])
        for pairs in _distinct_extremes(chosen_queries, chosen_keys, top)
    )
    count = min(len(queries), len(keys))  # one of the tables may be padded
    scores = np.einsum("vr,vr->v", queries[:count], keys[:count])
    with_themselves = np.intersect1d(query_numbers, key_numbers)
    by_score_with_itself = with_themselves[np.argsort(scores[with_themselves])[::-1]]
    most_alike, least_alike = (
        np.stack([tokens] * 2) for tokens in _distinct_ends(by_score_with_itself, top)
    )
    return TokenMatches(
        checkpoint=checkpoint.name,
        stack=plan.stack,
        layer=plan.layer,
        head=head,
        distance=distance,
        embeddings=table,
        normalized=fold_norm,
        largest=_pairs(queries, keys, largest, names),
        smallest=_pairs(queries, keys, smallest, names),
        most_alike=_pairs(queries, keys, most_alike, names),
        least_alike=_pairs(queries, keys, least_alike, names),
        caveat=caveat,
        circuit=circuit,
        through=None if through is None else (reading.layer, through[1]),
        unembeddings=unembeddings,
        tokens=count,
        positive_tokens=int((scores > 0).sum()),
        chosen_query=None if query is None else int(query_numbers[0]),
        chosen_key=None if key is None else int(key_numbers[0]),
    )


def _distinct_ends(descending: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last entries along the last axis, the last entry first.

    No entry is in both results: the second result has what the first result lacks.

    Examples
    --------
    >>> [ends.tolist() for ends in _distinct_ends(np.arange(5), 2)]
    [[0, 1], [4, 3]]
    >>> [ends.tolist() for ends in _distinct_ends(np.arange(5), 4)]
    [[0, 1, 2, 3], [4]]
    """
    count = descending.shape[-1]
    least_count = min(top, max(count - top, 0))
    return descending[..., :top], descending[..., ::-1][..., :least_count]


def _distinct_extremes(
    query: np.ndarray, key: np.ndarray, top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of `extreme_pairs`, without pairs that are in both."""
    pairs = len(query) * len(key)
    if 2 * top <= pairs:
        return extreme_pairs(query, key, top)
    descending, _ = extreme_pairs(query, key, pairs)
    return _distinct_ends(descending, top)


def _chosen_tokens(
    token: int | str | None, count: int, names: Mapping[int, str]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of a token, from a number or a name; all numbers without a token.

    Examples
    --------
    >>> names = {0: "the", 1: "▁cat", 2: "0"}
    >>> [_chosen_tokens(token, 3, names).tolist() for token in ("the", "cat", "0", 0, "1", None)]
    [[0], [1], [2], [0], [1], [0, 1, 2]]
    """
    if token is None:
        return np.arange(count)
    if isinstance(token, str):
        number_by_name = {name: number for number, name in names.items() if number < count}
        for marker in ("", *WORD_MARKERS):
            if marker + token in number_by_name:
                return np.array([number_by_name[marker + token]])
    if str(token).isdecimal() and int(token) < count:
        return np.array([int(token)])
    way = "the name of a single token, or its number" if names else "the number of a token"
    near = _near_tokens(str(token), names)
    raise CheckpointError(f"no token {token!r}; expected {way}, from 0 to {count - 1}{near}")


def _near_tokens(word: str, names: Mapping[int, str]) -> str:
    """Return the end of a message on an unknown token: a similar token, and parts of the word.

    Examples
    --------
    >>> names = dict(enumerate(["good", "goods", "##ish", "-", "Ġcat"]))
    >>> _near_tokens("goodish-cat", names)
    "; did you mean 'goods', or a token in the word: 'good', '##ish', '-', 'cat'?"
    >>> _near_tokens("Cat", names), _near_tokens("bad", names)
    ("; did you mean 'cat'?", '')
    """
    plain_names = {name.lstrip("".join(WORD_MARKERS)) for name in names.values()}
    if word.lower() in plain_names:
        return f"; did you mean {word.lower()!r}?"
    similar = get_close_matches(word, plain_names, 1)
    suggestions = [repr(name) for name in similar]
    pieces = _pieces(word, plain_names)
    if pieces:
        suggestions.append(f"a token in the word: {', '.join(map(repr, pieces))}")
    return f"; did you mean {', or '.join(suggestions)}?" if suggestions else ""


def _pieces(word: str, names: Collection[str]) -> list[str]:
    """Split a word into tokens, the longest first; empty if it cannot be split.

    Tokenizers with merges may split the word otherwise.

    Examples
    --------
    >>> names = ["good", "##ish", "is", "h"]
    >>> _pieces("goodish", names), _pieces("goodish", ["good", "is", "h"]), _pieces("bad", names)
    (['good', '##ish'], ['good', 'is', 'h'], [])
    """
    pieces = []
    start = 0
    while start < len(word):
        # WordPiece takes a punctuation mark for a word of its own.
        is_within_word = start > 0 and word[start - 1 : start + 1].isalnum()
        end, piece = _longest_piece(word, start, names, is_within_word)
        if not piece:
            return []
        pieces.append(piece)
        start = end
    return pieces


def _longest_piece(
    word: str, start: int, names: Collection[str], is_within_word: bool
) -> tuple[int, str]:
    """Return the end and name of the longest token at a place of a word; else ""."""
    for end in range(len(word), start, -1):
        text = word[start:end]
        if is_within_word and CONTINUATION + text in names:
            return end, CONTINUATION + text
        if text in names:
            return end, text
    return start, ""


class _TokenSide(NamedTuple):
    """The table of the tokens on one side of a form, and the plan of the applied norm."""

    table: str
    plan: AttentionPlan | None


def _directions(
    checkpoint: Checkpoint,
    form: BilinearForm,
    sides: tuple[_TokenSide, _TokenSide],
    count: int,
    top: int,
    names: Mapping[int, str],
) -> tuple[Direction, ...]:
    """Return the largest singular directions of a form of [x, 1], without biases."""
    if count < 1:
        raise CheckpointError(f"directions is a number of directions, 1 or more; got {count}")
    plain = BilinearForm.from_factors(form.query[:-1], form.key[:-1])
    decomposition = plain.svd()
    values = np.asarray(decomposition.S, np.float64)
    total = float((values**2).sum())
    ends = []
    vectors_of_sides = (decomposition.U[:, :count], decomposition.Vh[:count].T)
    for side, vectors in zip(sides, vectors_of_sides, strict=True):
        without_bias = np.concatenate([vectors, np.zeros((1, vectors.shape[1]))])
        coordinates = _projected(checkpoint, side.table, without_bias, side.plan)
        ends.append(direction_ends(coordinates, names, top))
    return tuple(
        Direction(float(value), float(value**2 / total) if total else 0.0, first, second)
        for value, first, second in zip(values[:count], *ends, strict=True)
    )


def _require_norm(block: Block, circuit: Literal["qk", "ov"]) -> None:
    """Raise `CheckpointError` if no known norm feeds a block."""
    if lacks_norm(block.plan, Coordinates(circuit, fold_norm=True)):
        raise CheckpointError(
            f"{block.checkpoint.name}: no known norm feeds layer {block.plan.layer}; leave out "
            "fold_norm=True"
        )


def _head(
    block: Block, head: int, circuit: Literal["qk", "ov"], fold_norm: bool, distance: int = 0
) -> BilinearForm:
    """Return one head's form of [x, 1], scaled and with biases.

    Without a known norm, no norm is folded in; see `_require_norm`. Raises `CheckpointError` if
    there is no such head.
    """
    plan, name = block.plan, block.checkpoint.name
    coordinates = Coordinates(circuit, fold_norm, bias=True, distances=(distance,))
    ((_, form),) = block.forms(coordinates, every_bias=True)
    heads = form.stack[0] * form.stack[1]
    if not 0 <= head < heads:
        raise CheckpointError(f"{name}: no head {head}, layer {plan.layer} has {heads}")
    head_form: BilinearForm = form[divmod(head, form.stack[1])]
    if circuit == "ov":
        return head_form
    query = plan.rotary.stretch(head_form.query) if plan.rotary else head_form.query
    return BilinearForm.from_factors(plan.score_scale * query, head_form.key)


def _projected(
    checkpoint: Checkpoint, table: str, factor: np.ndarray, plan: AttentionPlan | None
) -> np.ndarray:
    """Return all tokens of a table on one side of a form, (V, R); normalized as in a block."""
    blocks = []
    for rows in embedding_rows(checkpoint, table):
        normalized = rows if plan is None else _normalized(rows, plan)
        blocks.append(normalized @ factor[:-1] + factor[-1])
    return np.concatenate(blocks).astype(np.float32)


def _written_caveat(
    plan: AttentionPlan, circuit: str, through: tuple[int, int] | None, fold_norm: bool
) -> str:
    """Describe the meaning of pairs with a written token, or of a virtual head.

    ``through`` is the layer and the number of the earlier head.
    """
    subject = "one head" if through is None else "two heads in a row"
    norms = " ".join(_norms_in_words(plan, circuit, through, fold_norm))
    guess = " The family is guessed." if plan.rule.guess else ""
    return (
        f"From weights alone: what {subject} would do if nothing else were in the stream. "
        f"{norms}{guess}"
    )


def _norms_in_words(
    plan: AttentionPlan, circuit: str, through: tuple[int, int] | None, fold_norm: bool
) -> Iterator[str]:
    """Yield sentences on the norms that scores include, and on missing norms."""
    if fold_norm:
        yield "Embeddings pass the norm in front of the head that reads them."
        if through is not None:
            layer, head = through
            yield (
                f"What head {layer}.{head} writes passes the norm in front of layer {plan.layer} "
                "without the division by its size."
            )
    elif plan.query.input_norm:
        norms, pronoun = "The norm in front of the head is", "it"
        if through is not None:
            norms, pronoun = "The norms in front of the heads are", "them"
        yield f"{norms} left out (--fold-norm folds {pronoun} in)."
    if circuit == "ov":
        yield "The norm before the unembedding is left out."


def unembedding_table(checkpoint: Checkpoint, table: str, width: int) -> str:
    """Return the table (V, ``width``) from stream to logits; the embeddings if tied."""
    candidates = [
        name
        for name, info in checkpoint.tensors().items()
        if UNEMBEDDINGS.fullmatch(name) and len(info.shape) == 2 and info.shape[1] == width
    ]
    return candidates[0] if len(candidates) == 1 else table


def _caveat(checkpoint: Checkpoint, plan: AttentionPlan, table: str, fold_norm: bool) -> str:
    """Describe the meaning of a single head's scores, and the missing terms."""
    if plan.layer:
        exact = (
            "This layer reads what the layers before it have written, not embeddings: take the "
            "pairs as a hint at what its form matches."
        )
    else:
        exact = _first_layer(checkpoint, plan, table)
    missing = [plan.reason] if plan.reason else []
    for omission in omissions(plan, Coordinates("qk", fold_norm, bias=True)):
        # The scores include the scale and the chosen distance. A norm that is not folded is
        # missing with more than its gains, see below.
        if omission.kind not in ("rotary", "scale", "norms"):
            missing.append(omission.explanation)
    if plan.query.input_norm and not fold_norm:
        missing.append("the norm in front of the block is not applied (--fold-norm applies it)")
    but = f" However, {'; '.join(missing)}." if missing else ""
    return f"Scores of token embeddings alone, with scale and biases. {exact}{but}"


def _first_layer(checkpoint: Checkpoint, plan: AttentionPlan, table: str) -> str:
    """Describe the difference between the scores of embeddings and the model's, in layer 0."""
    added = _added_tables(checkpoint, table, plan.stack)
    if added:
        return (
            "In layer 0 the model's own scores differ: the model adds rows of "
            f"{' and '.join(added)} to the embeddings."
        )
    between = "nothing lies between the embeddings and attention (no norm is known there)"
    norm = plan.query.input_norm
    if norm is not None:
        name = f", {norm.gain[0].name}," if norm.gain else ""
        between = f"only the norm{name} lies between the embeddings and attention"
    if plan.rotary or plan.axial or plan.position:
        way = (
            "positions change the scores" if plan.position else "positions rotate queries and keys"
        )
        return (
            f"In layer 0 this is the model's own score if {between}. The model has no table of "
            f"positions to add to the embeddings: {way}."
        )
    return (
        f"In layer 0 this is the model's own score if {between}, and no positions are added to the "
        "embeddings: the checkpoint has no table of positions, but models can also compute them."
    )


def _added_tables(checkpoint: Checkpoint, table: str, stack: str) -> list[str]:
    """Return tables next to the token embeddings whose rows the model adds to the embeddings.

    Towers of a composite model have tables of the same names, but in other modules.
    """
    modules = {_module(table), f"{_module(table)}.{stack}".lstrip(".")}
    width = checkpoint.info(table).shape[1]
    return [
        name
        for name, info in checkpoint.tensors().items()
        if ADDED_TABLES.fullmatch(name)
        and _module(name) in modules
        and len(info.shape) == 2
        and info.shape[1] == width
    ]


def _module(table: str) -> str:
    """Return the module that contains a table.

    Examples
    --------
    >>> [_module(name) for name in ("bert.embeddings.word_embeddings.weight", "wte.weight")]
    ['bert.embeddings', '']
    """
    return table.removesuffix(".weight").rpartition(".")[0]


def _pairs(
    query: np.ndarray, key: np.ndarray, places: np.ndarray, names: Mapping[int, str]
) -> tuple[TokenPair, ...]:
    """Return pairs of tokens with scores in double precision, in the order of the indices."""
    query_places, key_places = places
    queries = query[query_places].astype(np.float64)
    keys = key[key_places].astype(np.float64)
    scores = np.einsum("pr,pr->p", queries, keys)
    pairs = []
    for i, j, score in zip(*places.tolist(), scores.tolist(), strict=True):
        pairs.append(TokenPair(i, j, score, names.get(i), names.get(j)))
    return tuple(pairs)


def extreme_pairs(
    query: Float[np.ndarray, "tokens width"], key: Float[np.ndarray, "tokens width"], top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the (query, key) indices of the ``top`` largest and smallest q_i · k_j, (2, top) each.

    Examples
    --------
    >>> query, key = np.array([[1.0], [-3.0]]), np.array([[2.0], [1.0]])
    >>> [pairs.tolist() for pairs in extreme_pairs(query, key, 1)]
    [[[0], [0]], [[1], [0]]]
    """
    query_lengths = np.linalg.norm(query, axis=-1)
    key_lengths = np.linalg.norm(key, axis=-1)
    query_order = np.argsort(-query_lengths, kind="stable")  # longest first
    key_order = np.argsort(-key_lengths, kind="stable")
    queries, keys = query[query_order], key[key_order]
    largest, smallest = _Extremes(top, +1), _Extremes(top, -1)
    height, width = SCORE_BLOCK
    # Bound of the products in each block; rounding may lift a product slightly above its bound.
    bounds = 1.0001 * np.outer(
        query_lengths[query_order][::height], key_lengths[key_order][::width]
    )
    for row, i in enumerate(range(0, len(queries), height)):
        for column, j in enumerate(range(0, len(keys), width)):
            if bounds[row, column] <= min(largest.threshold, smallest.threshold):
                break
            scores = queries[i : i + height] @ keys[j : j + width].T
            largest.take(scores, i, j)
            smallest.take(scores, i, j)
    largest_pairs = np.stack([query_order[largest.places[0]], key_order[largest.places[1]]])
    smallest_pairs = np.stack([query_order[smallest.places[0]], key_order[smallest.places[1]]])
    return largest_pairs, smallest_pairs


class _Extremes:
    """The largest values of sign · score, and their indices."""

    def __init__(self, top: int, sign: int) -> None:
        self._top, self._sign = top, sign
        self._scores = np.empty(0, np.float32)
        self.places = np.empty((2, 0), np.int64)

    @property
    def threshold(self) -> float:
        """Lower bound of further scores."""
        return float(self._scores[-1]) if len(self._scores) == self._top else -np.inf

    def take(self, scores: np.ndarray, first_row: int, first_column: int) -> None:
        """Update the extremes with a block of scores; ``indices`` belong to the first entry."""
        threshold = self.threshold
        most_extreme = scores.max() if self._sign > 0 else -scores.min()
        if most_extreme <= threshold:
            return
        signed = self._sign * scores.ravel()
        indices = np.flatnonzero(signed > threshold)
        if len(indices) > self._top:
            highest = np.argpartition(-signed[indices], self._top)[: self._top]
            indices = indices[highest]
        rows, columns = np.divmod(indices, scores.shape[1])
        new_places = np.stack([rows + first_row, columns + first_column])
        all_scores = np.concatenate([self._scores, signed[indices]])
        all_places = np.concatenate([self.places, new_places], axis=1)
        kept = np.argsort(-all_scores, kind="stable")[: self._top]
        self._scores = all_scores[kept]
        self.places = all_places[:, kept]


def _normalized(rows: np.ndarray, plan: AttentionPlan) -> np.ndarray:
    """Return rows as normalized by the block's norm, before its gain."""
    norm = plan.query.input_norm
    assert norm is not None
    if norm.kind == "layer":
        rows = rows - rows.mean(axis=-1, keepdims=True)
    return np.asarray(rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + norm.epsilon))


def embedding_rows(checkpoint: Checkpoint, table: str) -> Iterator[np.ndarray]:
    """Yield the rows of a table in order, at most `EMBEDDING_ROWS` at a time."""
    count = checkpoint.info(table).shape[0]
    for start in range(0, count, EMBEDDING_ROWS):
        yield checkpoint.read([Part(table, ((start, min(start + EMBEDDING_ROWS, count)),))])[0]


def token_names(ref: Any, **hub: Unpack[HubOptions]) -> dict[int, str]:
    """Read the names of tokens by number, from ``tokenizer.json`` or ``vocab.txt``.

    Only a folder or a Hub id can have a tokenizer. Without a tokenizer, the result is empty.
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
    """Return the vocabulary of a ``tokenizer.json``, in either format."""
    content = json.loads(_text(path))
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        names = {int(number): str(token) for token, number in vocabulary.items()}
    else:  # a list of entries (token, score), in order
        names = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    for token in content.get("added_tokens") or []:
        names[int(token["id"])] = str(token["content"])
    return names


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
    """Return a sheet with two lists of token pairs and their scores; the second may be empty."""
    largest = max(abs(pair.score) for pair in (*left, *right))
    if not right:
        table = Sheet.of(columns[0], "score", text=columns[:1])
        for pair in left:
            table.add(label(pair), _score(pair.score, largest))
        return table
    table = Sheet.of(columns[0], "score", columns[1], "score", text=columns)
    for pairs in zip_longest(left, right):
        cells = []
        for pair in pairs:
            cells += [label(pair), _score(pair.score, largest)] if pair else ["", ""]
        table.add(*cells)
    return table


def _score(score: float, largest: float) -> str:
    """Return a score as text, with the digits for the largest score of the table.

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
    """Return a token's name with control characters escaped; the number without a name."""
    if name is None:
        return str(number)
    return name if name.isprintable() else name.encode("unicode_escape").decode()
