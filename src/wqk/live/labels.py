"""Labels of heads: previous-token, duplicate-token, induction, first-token and copying heads.

Four labels depend on the attention to repeated random tokens. The model reads P random tokens twice
in a row. The score of a head is the mean weight of the token that a head with this label attends to
(Olsson et al., 2022). For the query i, in the second half if the first half has no such token:

=================  =======================================================================
previous_token     token i − 1
duplicate_token    token i − P: the same token, one period earlier
induction          token i − P + 1: what followed the same token one period earlier
first_token        token 0: an attention sink
=================  =======================================================================

Copying depends on the weights (Elhage et al., 2021): Σ Re λ / Σ |λ| for the eigenvalues λ of W_E
W_V W_O W_U, which is about 0 for random signs. The score is 1 if attending to a token makes this
token more likely, and −1 if less likely.

Axes: H heads, P tokens of a period, V tokens of the vocabulary, D model width, R head width.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import Result, counted, number
from wqk._typing import FilePath, Float
from wqk.attention import Block
from wqk.errors import CheckpointError, FormError, WqkError, called_as, required_by
from wqk.families import AttentionPlan, Place
from wqk.families.naming import embedding_table
from wqk.forms import BilinearForm
from wqk.inspecting.tokens import embedding_rows, unembedding_table
from wqk.live.addresses import BlockIndex, network_of, opened_live, subject_of
from wqk.live.calls import ObservedCall
from wqk.live.held_out import ATTENTION_ALONE, has_attention_alone, load
from wqk.live.observing import Observer
from wqk.live.running import most_positions, run_batch
from wqk.model import Model
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    import torch

# Scores from which on a head has a label.
THRESHOLD = 0.4
# Sizes of eigenvalues, relative to the product of the sizes of the matrices, that are rounding.
ROUNDING = 1e-9
# Tokens of a period, and sequences.
PERIOD, SEQUENCES = 32, 4

PATTERNS = ("previous_token", "duplicate_token", "induction", "first_token")
SCORES = (*PATTERNS, "copying")
LABEL_SYNONYMS = {"labels": "frame", **{label: f"of({label!r})" for label in SCORES}}


@dataclass(frozen=True)
class LabeledHead:
    """Scores of one head, and the resulting labels.

    Weights are shares of a query's attention, from 0 to 1; copying is between −1 and 1.
    """

    stack: str
    kind: str
    layer: int
    head: int
    previous_token: float  #: Mean weight of the token before the query.
    duplicate_token: float  #: Mean weight of the same token one period earlier.
    induction: float  #: Mean weight of the token after the same token one period earlier.
    first_token: float  #: Mean weight of the first token, from queries of the second period.
    copying: float | None  #: ``Σ Re λ / Σ |λ|`` of W_E W_V W_O W_U; None if it is unknown.
    labels: tuple[str, ...]  #: Scores at or above the threshold.

    def row(self) -> dict[str, Any]:
        """Return the head as a row of a table."""
        row: dict[str, Any] = {
            "stack": self.stack,
            "kind": self.kind,
            "layer": self.layer,
            "head": self.head,
        }
        for score in SCORES:
            row[score] = getattr(self, score)
        return row | {"labels": ", ".join(self.labels)}


@dataclass(frozen=True, repr=False)
class HeadLabels(Result, synonyms=LABEL_SYNONYMS):
    """Heads of a model with scores and labels."""

    heads: tuple[LabeledHead, ...]
    threshold: float
    notes: tuple[str, ...] = ()  #: What could not be measured, and why.

    def __len__(self) -> int:
        return len(self.heads)

    def of(self, label: str) -> tuple[LabeledHead, ...]:
        """Return the heads with a label, such as ``previous-token``, the highest score first.

        Raises
        ------
        FormError
            The label is unknown.
        """
        score = label.replace("-", "_")
        if score not in SCORES:
            raise FormError(f"label: {label!r} is unknown; expected one of {', '.join(SCORES)}")
        labeled = [head for head in self.heads if score in head.labels]
        return tuple(sorted(labeled, key=lambda head: -getattr(head, score)))

    @property
    def sentence(self) -> str:
        """Number of heads with each label."""
        counts = [f"{len(self.of(label))} {label.replace('_', '-')}" for label in SCORES]
        return f"{counted(len(self.heads), 'head')}: {', '.join(counts)}"

    def _rows(self) -> Iterator[dict[str, Any]]:
        for head in self.heads:
            yield head.row()

    def _shown(self, width: int) -> Iterator[Any]:
        yield self.sentence
        columns = ("attention", "layer", "head", *SCORES, "labels")
        sheet = Sheet.of(*columns, text=["attention", "labels"])
        for head in self.heads:
            place = f"{head.stack} {head.kind}", str(head.layer), str(head.head)
            numbers = (number(getattr(head, score), 2) for score in SCORES)
            sheet.add(*place, *numbers, ", ".join(head.labels))
        yield sheet
        yield from self.notes


@called_as("wqk.label_heads(ref)")
def label_heads(
    model: Any,
    *,
    threshold: float = THRESHOLD,
    period: int = PERIOD,
    sequences: int = SEQUENCES,
    seed: int = 0,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
) -> HeadLabels:
    """Label previous-token, duplicate-token, induction, first-token and copying heads.

    The model reads random tokens twice in a row. The attention to these tokens determines the first
    four labels, the weights determine the last label.

    Parameters
    ----------
    model
        A folder, the folder of a training run, a Hub id, or ``demo:induction``, which transformers
        loads in float32; a `Model`; or an `nn.Module`, called with tokens (B, N) in its present
        mode (training or evaluation).
    threshold
        Least score of a head with a label.
    period
        Number of random tokens before the repetition; fewer if the model has fewer tokens, or fewer
        positions than twice this number.
    sequences, seed
        Number of sequences, and the seed of their tokens.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Returns
    -------
    HeadLabels
        Scores and labels of each head with self-attention.

    Raises
    ------
    UnknownFamily
        No family describes the model.
    CheckpointError
        The checkpoint cannot be loaded, or lacks weights that the model runs with. The model has no
        table of embeddings, cannot be run on tokens, or has less than 2 tokens or 4 positions.
    NonFiniteWeights
        A query or key weight of the first block is NaN or infinite.
    FormError
        The threshold is not in (0, 1], the period is below 2, or sequences are below 1.

    Notes
    -----
    Copying ignores the norms between the embedding, the head and the logits, except for the gain of
    the norm before the head. Eigenvalues are computed from R × R matrices; only one product of D ×
    V × D depends on V. NaN or infinite weights of later blocks result in scores of NaN without
    labels.

    References
    ----------
    Olsson et al., *In-context Learning and Induction Heads*, 2022 (the patterns). Elhage et al.,
    *A Mathematical Framework for Transformer Circuits*, 2021 (copying).

    Examples
    --------
    >>> import wqk
    >>> labels = wqk.label_heads("demo:induction")
    >>> labels.sentence
    '8 heads: 1 previous-token, 0 duplicate-token, 4 induction, 0 first-token, 4 copying'
    >>> [(head.layer, head.head) for head in labels.of("previous-token")]
    [(0, 2)]

    A module in memory:

    >>> import transformers
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    >>> labels = wqk.label_heads(transformers.GPT2LMHeadModel(config).eval(), period=8)
    >>> labels.sentence
    '2 heads: 0 previous-token, 0 duplicate-token, 0 induction, 0 first-token, 0 copying'
    """
    with required_by("labels of heads"):
        import torch
    if not 0 < threshold <= 1:
        raise FormError(f"threshold: expected a number in (0, 1], got {threshold!r}")
    if period < 2 or sequences < 1:
        raise FormError(
            f"period and sequences: expected at least 2 and 1, got {period!r} and {sequences!r}"
        )
    stored = model.ref if isinstance(model, Model) else model
    is_stored = isinstance(stored, str | os.PathLike)
    if is_stored:
        family = getattr(model, "family_file", None) if family is None else family
        model, _ = load(model, "label_heads")
    network = network_of(model, "run")
    opened = opened_live(model, family, heads_per_layer)
    plans = [plan for plan in opened.plans if plan.has_softmax and plan.kind == "self"]
    table = _embeddings(opened, plans)
    vocabulary = opened.checkpoint.info(table).shape[0]
    tokens = _random_tokens(network, vocabulary, period, sequences, seed)
    patterns = _Patterns(BlockIndex(network, plans), tokens.shape[1])
    with torch.no_grad(), Observer(network, patterns.add):
        run_batch(network, tokens.repeat(1, 2))
    copying, notes = _copying(opened, plans, table)
    if is_stored and has_attention_alone(network):
        notes.append(ATTENTION_ALONE)
    heads: list[LabeledHead] = []
    for plan in plans:
        means = patterns.scores(plan.place)
        if means is None:
            notes.append(f"{subject_of(plan)}: it did not attend to all tokens")
            continue
        copying_of_heads = copying.get(plan.place, [None] * plan.query.heads)
        for head, copying_score in enumerate(copying_of_heads):
            scores: dict[str, Any] = {name: float(means[name][head]) for name in PATTERNS}
            scores["copying"] = None if copying_score is None else float(copying_score)
            labels = tuple(
                name for name, score in scores.items() if score is not None and score >= threshold
            )
            heads.append(LabeledHead(*plan.place, head, **scores, labels=labels))
    return HeadLabels(tuple(heads), threshold, tuple(notes))


def _random_tokens(
    network: Any, vocabulary: int, period: int, sequences: int, seed: int
) -> torch.Tensor:
    """Draw tokens (B, P) on the model's device; no token occurs twice in a sequence.

    The period is shorter if the vocabulary, or half of the positions, is smaller.
    """
    import torch

    positions = most_positions(network)
    longest = vocabulary if positions is None else min(vocabulary, positions // 2)
    if longest < 2:
        raise CheckpointError(
            f"{type(network).__name__}: {counted(vocabulary, 'token')} and "
            f"{counted(positions or 0, 'position')}; expected at least 2 tokens and 4 positions"
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(vocabulary, generator=generator) for _ in range(sequences)]
    return torch.stack(orders)[:, : min(period, longest)].to(next(network.parameters()).device)


def _embeddings(opened: Model, plans: Sequence[AttentionPlan]) -> str:
    """Return the name of the table of embeddings that the blocks read.

    Raises
    ------
    CheckpointError
        The model has no block, or not exactly one table of this width.
    """
    if not plans:
        raise CheckpointError(
            f"{opened.name}: no self-attention with a softmax; expected at least one block"
        )
    block = opened.block(plans[0].layer, stack=plans[0].stack)
    width = block.groups.widths[0]
    try:
        return embedding_table(opened.checkpoint, width)
    except CheckpointError as error:
        raise CheckpointError(
            f"{opened.name}: no single table of token embeddings of width {width} was recognized; "
            "expected a model that reads tokens"
        ) from error


class _Patterns:
    """Mean weights of the tokens that heads of each label attend to, by block."""

    def __init__(self, index: BlockIndex, period: int) -> None:
        self._index, self._period = index, period
        self._totals: dict[Any, Any] = {}
        self._rows: dict[Any, int] = {}

    def add(self, call: ObservedCall) -> None:
        """Add an observed attention of all tokens to all tokens."""
        for address in self._index.addresses(call):
            arranged = call.by_head(address.heads)
            length = 2 * self._period
            if arranged is None or arranged.is_relative:
                continue
            if arranged.shape[2:] == (length, length):
                self._add(address.name, arranged)

    def _add(self, name: Place | str, call: ObservedCall) -> None:
        """Add the weights of the keys of each pattern, for queries of the second period."""
        import torch

        totals = torch.zeros(len(PATTERNS), call.shape[1], dtype=torch.float64, device=call.device)
        rows = 0
        for tile in call.tiles():
            weights = tile.attention()
            queries = torch.arange(tile.rows.start, tile.rows.stop, device=call.device)
            is_repeated = queries >= self._period  # queries with repeated tokens
            queries = queries[is_repeated]
            rows += len(queries) * len(weights)
            targets = (  # the key that each query attends to, in the order of `PATTERNS`
                queries - 1,
                queries - self._period,
                queries - self._period + 1,
                torch.zeros_like(queries),
            )
            for pattern, keys in enumerate(targets):
                columns = keys[None, None, :, None].expand(*weights.shape[:2], -1, 1)
                weights_of_targets = weights[:, :, is_repeated].gather(-1, columns)
                totals[pattern] += weights_of_targets.sum((0, 2, 3), dtype=torch.float64)
        self._totals[name] = self._totals.get(name, 0) + totals
        self._rows[name] = self._rows.get(name, 0) + rows

    def scores(self, place: Place) -> dict[str, np.ndarray] | None:
        """Return the scores of the heads of a block, (H,) for each pattern."""
        if place not in self._totals:
            return None
        means = (self._totals[place] / self._rows[place]).cpu().numpy()
        return dict(zip(PATTERNS, means, strict=True))


def _copying(
    opened: Model, plans: Sequence[AttentionPlan], table: str
) -> tuple[Mapping[Place, Float[np.ndarray, " heads"]], list[str]]:
    """Return the copying scores of the heads of each block, and notes on blocks without scores."""
    scores: dict[Place, np.ndarray] = {}
    notes: list[str] = []
    mixing: np.ndarray | None = None
    for plan in plans:
        try:
            block = opened.block(plan.layer, stack=plan.stack, kind=plan.kind)
            written = _written(block)
            if mixing is None:
                unembeddings = unembedding_table(opened.checkpoint, table, written.widths[1])
                mixing = _mixing(opened, table, unembeddings)
            scores[plan.place] = _eigenvalue_score(written, mixing)
        except WqkError as error:
            notes.append(f"{subject_of(plan)}: no copying score ({error})")
    return scores, notes


def _written(block: Block) -> BilinearForm:
    """Return the forms W_V W_O of a block's heads (H,), with the gains of a known norm before."""
    has_norm = block.plan.query.input_norm is not None
    return block.at(circuit="ov", fold_norm=has_norm)


def _mixing(opened: Model, table: str, unembeddings: str) -> Float[np.ndarray, "d d"]:
    """Return the product W_U W_E over the vocabulary, (D, D), from blocks of rows of the tables."""
    checkpoint = opened.checkpoint
    width = checkpoint.info(table).shape[1]
    mixing = np.zeros((width, width))
    for read, written in zip(
        embedding_rows(checkpoint, table), embedding_rows(checkpoint, unembeddings), strict=False
    ):
        count = min(len(read), len(written))  # one of the tables may be padded
        mixing += written[:count].astype(np.float64).T @ read[:count].astype(np.float64)
    return mixing


def _eigenvalue_score(
    written: BilinearForm, mixing: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, " heads"]:
    """Return Σ Re λ / Σ |λ| of W_E W_V W_O W_U by head; 0 if all eigenvalues are rounding.

    W_E W_V W_O W_U is V × V, of rank R at most. The products XY and YX have the same nonzero
    eigenvalues. Therefore the eigenvalues are computed from the form (W_U W_E) W_V W_O, which is D
    × D and stored as factors.
    """
    value = np.asarray(written.query, np.float64)
    output = np.asarray(written.key, np.float64)
    form = BilinearForm.from_factors(mixing @ value, output)
    eigenvalues = form.eigenvalues()
    sizes = np.abs(eigenvalues).sum(-1)
    rounding = ROUNDING * np.linalg.norm(mixing) * BilinearForm.from_factors(value, output).norm
    is_signal = sizes > rounding
    return np.asarray(is_signal * eigenvalues.real.sum(-1) / np.where(is_signal, sizes, 1))
