"""Comparison of a model's attention with attention recomputed from the weights as read.

The inputs of a block's query and key projections are recorded while the model runs, and its
attention is observed at the operation that computes it, for any kernel. Attention is recomputed
from the inputs and from the weights that a family's rules select. With a wrong tensor, head width,
grouping, rotary order, scale or mask, the result differs from the model's attention.

For a guess, scale and mask are observed: `Verification.family_file` is the guess with the observed
facts. If positions rotate queries and keys in an unknown way, the products of queries and keys are
compared without positions.

Axes: B texts, H query heads, N tokens (I queries, J keys).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wqk._console import Result, counted, display_name
from wqk._junit import Case
from wqk.attention import Block
from wqk.checkpoints import Part, steps_of
from wqk.checkpoints.adapters import AdaptedCheckpoint, unrounded
from wqk.checkpoints.checkpoint import Around
from wqk.checkpoints.modules import LiveCheckpoint, unwrapped
from wqk.errors import CheckpointError, called_as
from wqk.families import AttentionPlan, Place
from wqk.families.proofs import PROVEN, Learned
from wqk.live.learning import family_file
from wqk.live.recording import (
    FROM_DISTANCE,
    OBSERVED,
    REPEATED,
    Application,
    Attention,
    alibi,
    allowed,
    beyond,
    fitted,
    form_difference,
    softmax,
)
from wqk.live.running import ModelRun, lack_of_tokenizer, run, run_module
from wqk.model import Model
from wqk.model import open as open_model
from wqk.tables.sheet import Cell, Sheet

# An attention this much farther from uniform than the tolerance separates right weights from wrong.
MIN_CONTRAST = 1e3

RIGHT = "right"
FORM_RIGHT = "form right"  # positions, mask and scale are not known, or not reported
ONLY_FORM_RIGHT = "only form right"  # positions, mask or scale are not what the family says
WRONG = "wrong"
TOO_UNIFORM = "too uniform to tell"
NOT_COMPARED = "not compared"

# The verdicts, the worst first: the text of a block's row, and the sentence of a checkpoint
# with this worst verdict.
VERDICTS = {
    WRONG: (
        "WRONG",
        "The forms do NOT give the model's own attention; its scores are not to be believed.",
    ),
    ONLY_FORM_RIGHT: (
        "WRONG but for the form",
        "The forms are right, but positions, mask or scale are NOT what the family says: they do "
        "not give the model's own attention.",
    ),
    NOT_COMPARED: (
        "not compared",
        "Not every attention could be compared: some did not run, compute no product of all "
        "queries and keys, or read a text in which positions act otherwise.",
    ),
    TOO_UNIFORM: (
        "too uniform to tell",
        "Some attention is so uniform that any weights would give it.",
    ),
    FORM_RIGHT: (
        "form right",
        "The forms are right, apart from positions, mask and scale, which are not known: they give "
        "the model's own products of queries and keys, up to a factor.",
    ),
    RIGHT: (
        "right",
        "The forms give the model's own attention: largest difference of a probability "
        "{difference:.1e}, in {precision}.",
    ),
}


@dataclass(frozen=True)
class VerifiedBlock:
    """Comparison of one application of a block's attention.

    Attributes
    ----------
    stack, kind, layer
        The block.
    application
        Number of the use of shared weights, from 0.
    difference
        Largest absolute difference of an attention probability. Infinite if the weights do not fit
        the model's computation; None if the model reports no attention.
    form_difference
        Largest difference of a product of queries and keys without positions, relative to the
        largest product. None if it was not needed, or no such product was observed.
    contrast
        Largest distance of the model's own attention from uniform attention.
    tolerance
        Largest accepted difference.
    largest_score
        Largest absolute score of this input, before a cap and additive positions; None if the scale
        is not known.
    ceiling
        Largest score that any input can produce; None without a bound, or if the scale is not
        known.
    described
        Whether the family describes everything in the score besides the form.
    heads, observed_heads
        Numbers of query heads by the family, and of the model's own attention; None if that
        attention was compared, or none was observed.
    """

    derived: ClassVar = ("verdict",)

    stack: str
    kind: str
    layer: int
    application: int
    difference: float | None
    form_difference: float | None
    contrast: float
    tolerance: float
    largest_score: float | None
    ceiling: float | None
    described: bool
    heads: int | None = None
    observed_heads: int | None = None

    @property
    def verdict(self) -> str:
        """``right``, ``form right``, or the reason against both.

        ``form right``: positions, mask and scale are unknown, or the attention was not observed.
        ``only form right``: positions, mask or scale contradict the family.
        """
        if self.difference is not None and self.difference <= self.tolerance:
            has_contrast = self.tolerance < self.contrast / MIN_CONTRAST
            return RIGHT if has_contrast else TOO_UNIFORM
        if self.form_difference is not None and self.form_difference <= self.tolerance:
            contradicts_family = self.described and self.difference is not None
            return ONLY_FORM_RIGHT if contradicts_family else FORM_RIGHT
        if self.form_difference is not None:
            return WRONG
        if self.difference is None:
            return NOT_COMPARED
        # An infinite difference means that the weights do not fit what the model computes.
        is_explained = not self.described and math.isfinite(self.difference)
        return NOT_COMPARED if is_explained else WRONG

    @property
    def has_other_heads(self) -> bool:
        """Return whether the model's number of heads differs from the family's."""
        return self.observed_heads is not None and self.observed_heads != self.heads

    @property
    def ok(self) -> bool:
        """Return whether the form is right and no observation contradicts the family."""
        return self.verdict in (RIGHT, FORM_RIGHT)


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """Comparison of a checkpoint's blocks with the running model.

    Attributes
    ----------
    checkpoint, family
        Names of the checkpoint and of the family.
    blocks
        Comparisons of all applications of all blocks.
    failures
        Parts of the model that were not measured, with reasons.
    precision
        Precision of the model's pass.
    rounded
        Buffers of a module in memory that are stored in half precision, such as tables of angles.
    drawn
        Weights of layers and embeddings that the checkpoint lacks; transformers draws them at
        random. Attention is still compared, but its scores differ from training.
    learned
        Observed scale, mask and window of the blocks of a confirmed guess.
    family_file
        The guess with the observed facts, as a family file; empty without a guess, or if the guess
        was not confirmed.
    """

    derived: ClassVar = ("ok", "verdict", "result", "difference")

    checkpoint: str
    family: str
    blocks: tuple[VerifiedBlock, ...]
    failures: tuple[str, ...] = ()
    precision: str = "float64"
    rounded: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    learned: Mapping[Place, Learned] = field(default_factory=dict)
    family_file: str = ""

    @property
    def ok(self) -> bool:
        """Return whether every form is right."""
        return all(block.ok for block in self.blocks)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """The worst verdict of all blocks."""
        return min((block.verdict for block in self.blocks), key=list(VERDICTS).index)

    @property
    def difference(self) -> float:
        """Largest difference of a probability; NaN if no attention was observed."""
        reported = [block.difference for block in self.blocks if block.difference is not None]
        return max(reported, default=math.nan)

    @property
    def result(self) -> str:
        """Sentence about the worst verdict."""
        _, sentence = VERDICTS[self.verdict]
        result = sentence.format(difference=self.difference, precision=self.precision)
        block = next((block for block in self.blocks if block.has_other_heads), None)
        if self.verdict == WRONG and block is not None:
            place = Place(block.stack, block.kind, block.layer)
            return (
                f"{result} In {place}, the model attends with {block.observed_heads} query heads, "
                f"the family has {block.heads}; correct the family's key 'heads', or the number "
                "that the configuration or heads_per_layer= gives."
            )
        if self.verdict != ONLY_FORM_RIGHT or not self.rounded:
            return result
        return (
            f"{result} {self.rounded[0]} is stored in half precision, which may be why: "
            ".to(torch.bfloat16) also rounds tables of angles, from_pretrained(..., "
            "dtype=torch.bfloat16) does not."
        )

    @property
    def sentence(self) -> str:
        """The checkpoint, and the result."""
        return f"{self.checkpoint}: {self.result}"

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return [vars(block) | {"verdict": block.verdict} for block in self.blocks]

    def _junit_cases(self) -> Iterator[Case]:
        """Yield a case for each application of a block; it fails unless the form is right."""
        for block in self.blocks:
            name = str(Place(block.stack, block.kind, block.layer))
            if block.application:
                name += f", use {block.application}"
            word, sentence = VERDICTS[block.verdict]
            if block.ok:
                yield Case(name)
                continue
            if block.difference is not None:
                word += (
                    f": largest difference {block.difference:.1e}, at most {block.tolerance:.1e}"
                )
            yield Case(name, failure=f"{word}\n{sentence}")

    def _table(self) -> Sheet:
        """Return a row for each application of a block.

        Differences are of probabilities. If probabilities contradict the family, a further column
        contains differences of products, which depend only on the form.
        """
        has_products = any(block.form_difference is not None for block in self.blocks)
        differences = ["largest difference", *["of products"] * has_products]
        headings = ("attention", "layer", *differences, "largest score", "ceiling", "verdict")
        table = Sheet.of(*headings, text=["attention", "verdict"])
        for block in self.blocks:
            layer = str(block.layer) + (f", use {block.application}" if block.application else "")
            cells: list[str | Cell] = [f"{block.stack} {block.kind}", layer]
            cells.append(_difference(block.difference))
            if has_products:
                cells.append(_difference(block.form_difference))
            score, ceiling = block.largest_score, block.ceiling
            is_known = score is not None and math.isfinite(score)
            cells.append(f"{score:.3g}" if is_known else "–")
            limit = Cell("–", "")
            if score and is_known and ceiling is not None:
                limit = Cell(f"{ceiling:.3g}", f"× {ceiling / score:.1f}")
            word, _ = VERDICTS[block.verdict]
            if block.verdict == WRONG and block.has_other_heads:
                word = f"{word}: {block.observed_heads} heads, not {block.heads}"
            table.add(*cells, limit, Cell(word, style="" if block.ok else "bold red"))
        return table

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        title = display_name(self.checkpoint)
        yield Text.assemble((title, "bold"), f"\nfamily {self.family}\n")
        yield self._table()
        if any(block.form_difference is not None for block in self.blocks):
            yield Text(
                "of products: products of queries and keys without positions, relative to the "
                "largest product",
                style="dim",
            )
        if self.verdict in (NOT_COMPARED, FORM_RIGHT):
            yield from (Text(f"not measured: {failure}") for failure in self.failures)
        yield Text(f"\n{self.result}")
        if self.drawn:
            yield Text(
                f"{counted(len(self.drawn), 'weight')} of layers and embeddings are not in "
                f"the checkpoint, such as {self.drawn[0]}, and were drawn at random: the largest "
                "scores are not those of the trained model"
            )
        if self.family_file:
            yield Text(f"\nlearned, as a family file:\n\n{self.family_file}")


def _difference(difference: float | None) -> str:
    """Return a difference as text; "no fit" for infinity, if the weights fit no product."""
    if difference is None:
        return "–"
    return f"{difference:.1e}" if math.isfinite(difference) else "no fit"


@called_as("wqk.verify(model, batch), or wqk.verify(ref)")
def verify(
    ref: Any,
    batch: Any = None,
    *,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    length: int = 24,
    seed: int = 0,
    tolerance: float | None = None,
) -> Verification:
    """Run the model, and compare its attention with the forms.

    If the family is guessed, positions and scale are unknown: unless positions are absent and the
    scale is the usual scale, only the products of queries and keys are compared. After a guess
    about a module in memory is confirmed, clipping, initialization and all functions that need a
    known family accept the module; if the number of heads was set, pass the opened model. Scores
    keep the status ``guessed``, because values and outputs were not compared.

    Needs PyTorch and transformers (``pip install '.[train]'``).

    Parameters
    ----------
    ref
        A folder written by ``save_pretrained``, a Hub id, or a `Model` opened from one of these; a
        model, or a LoRA adapter, which PEFT then merges into its base model.
    batch
        Arguments of a module in memory: by name, in order, or a single argument. The module is
        copied, and runs in evaluation mode.
    text
        Text for the model to read; by default, random tokens.
    tokens
        Token ids, instead of a text.
    length
        Number of random tokens.
    seed
        Seed of the random tokens.
    tolerance
        Largest accepted difference of a probability: by default 1e-9, because computations are in
        float64, and 1e-5 for a module in memory, whose tables of positions are in float32. If the
        code of a module requires float32, the module runs in float32.

    Raises
    ------
    UnknownFamily
        The model's family is unknown, or `transformers` has no code for the model.
    CheckpointError
        The checkpoint cannot be read or run.
    MissingPackage
        PyTorch or `transformers` is not installed.

    Examples
    --------
    >>> import wqk
    >>> verify(wqk.demo_model("encoder")).ok
    True
    """
    opened = open_model(ref)
    opened.require_softmax()
    if hasattr(opened.ref, "named_modules") and batch is not None:
        return _verify_module(opened, batch, 1e-5 if tolerance is None else tolerance)
    if batch is not None:
        raise CheckpointError(
            f"{opened.name}: a batch is for a module in memory; a model that is stored reads text= "
            "or tokens="
        )
    tolerance = 1e-9 if tolerance is None else tolerance
    ref = opened.ref
    if isinstance(ref, str | os.PathLike):
        ref = steps_of(os.fspath(ref))[-1]
        if text is not None and (reason := lack_of_tokenizer(Path(ref))):
            raise CheckpointError(
                f"{opened.name}: has no tokenizer that encodes text ({reason}); save the model's "
                "tokenizer next to its weights, or leave text= out to run random tokens"
            )
    stored, adapter = opened.checkpoint, None
    if isinstance(stored, AdaptedCheckpoint):
        adapter, stored = stored.adapter, unrounded(stored)
    model = opened.on(_InDoublePrecision(stored))

    def run_model(flat: bool) -> ModelRun:
        return run(
            ref,
            model,
            adapter=adapter,
            text=text,
            tokens=tokens,
            length=length,
            seed=seed,
            flat=flat,
        )

    return _compare(model, run_model, tolerance)


def _verify_module(opened: Model, batch: Any, tolerance: float) -> Verification:
    """Verify a module in memory on a batch; in float32 if its code requires float32."""
    try:
        verification = _verify_copy(opened, batch, tolerance, exact=True)
    except CheckpointError as refusal:
        try:
            verification = _verify_copy(opened, batch, tolerance, exact=False)
        except CheckpointError:
            raise refusal from None
    network = unwrapped(opened.ref)
    if verification.verdict != RIGHT:
        PROVEN.pop(network, None)
    elif verification.learned:
        PROVEN[network] = verification.learned
    return verification


def _verify_copy(opened: Model, batch: Any, tolerance: float, *, exact: bool) -> Verification:
    """Verify a copy of a module on the host, in float64 if ``exact``, else in float32."""
    module = _copy_of(unwrapped(opened.ref)).cpu().eval()
    module = module.double() if exact else module.float()
    for part in module.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")
    model, batch = opened.on(LiveCheckpoint(module)), _on_host(batch, exact)

    def run_model(flat: bool) -> ModelRun:
        return run_module(module, opened.plans, batch, flat=flat, exact=exact)

    verification = _compare(model, run_model, tolerance)
    rounded = tuple(
        name
        for name, buffer in unwrapped(opened.ref).named_buffers()
        if buffer.is_floating_point() and buffer.itemsize == 2
    )
    return replace(verification, precision="float64" if exact else "float32", rounded=rounded)


def _copy_of(module: Any) -> Any:
    """Return a copy of a module, including tensors from the module's last pass.

    Stored tensors may belong to a graph of gradients, and PyTorch cannot copy such tensors. A mode
    for this thread detaches them, without changes for other threads.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Detaching(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
                args = (args[0].detach(), *args[1:])
            return func(*args, **(kwargs or {}))

    with Detaching():
        return deepcopy(module)


def _compare(model: Model, run_model: Callable[[bool], ModelRun], tolerance: float) -> Verification:
    """Compare a run's blocks with their forms; if they differ, also without rotary positions.

    Parameters
    ----------
    model
        The model with the blocks to compare.
    run_model
        Function that runs the model and records its blocks; with True, without rotary positions.
    tolerance
        Largest accepted difference.
    """
    records, failures, drawn = run_model(False)
    comparisons: list[tuple[VerifiedBlock, Learned | None]] = []
    for block, applications in zip(model, records, strict=True):
        comparisons += _compare_block(block, applications, tolerance)
    blocks = [block for block, _ in comparisons]
    if not all(block.verdict == RIGHT for block in blocks):
        flat_records = run_model(True).records
        differences: list[float | None] = []
        for block, applications in zip(model, flat_records, strict=True):
            differences += [form_difference(block, use) for use in _uses(applications)]
        blocks = [
            replace(block, form_difference=difference)
            for block, difference in zip(blocks, differences, strict=True)
        ]
    for mixer in model.without_softmax:
        failures.append(f"{mixer}: has no softmax whose input could be compared")
    for block, applications in zip(model, records, strict=True):
        reasons = {beyond(block.plan, use.key_input.shape[1]) for use in applications}
        failures += [f"{block.plan.place}: {reason}" for reason in reasons if reason]
    learned = {
        Place(block.stack, block.kind, block.layer): facts
        for block, facts in comparisons
        if facts is not None and block.verdict == RIGHT
    }
    return Verification(
        checkpoint=model.name,
        family=model.family,
        blocks=tuple(blocks),
        failures=tuple(failures),
        drawn=drawn,
        learned=learned,
        family_file=family_file(model, learned),
    )


def _on_host(batch: Any, exact: bool) -> Any:
    """Return a batch with tensors on the host, and numbers in float64 or float32."""
    if isinstance(batch, Mapping):
        return {name: _on_host(value, exact) for name, value in batch.items()}
    # Lists stay lists: some models distinguish them from tuples (Qwen-Image's sizes of pictures).
    if isinstance(batch, list):
        return [_on_host(value, exact) for value in batch]
    if isinstance(batch, tuple):
        return tuple(_on_host(value, exact) for value in batch)
    if not hasattr(batch, "is_floating_point"):
        return batch
    batch = batch.cpu()
    if not batch.is_floating_point():
        return batch
    return batch.double() if exact else batch.float()


class AttentionCheck(NamedTuple):
    """Comparison of an observed attention with the recomputed attention."""

    difference: float | None  # largest difference of a probability; None without any attention
    contrast: float  # largest distance of the observed attention from uniform
    largest_score: float | None
    learned: Learned | None
    observed_heads: int | None = None  # of an attention that was not compared


NOT_OBSERVED = AttentionCheck(difference=None, contrast=0.0, largest_score=None, learned=None)


def _uses(applications: Sequence[Application]) -> Sequence[Application | None]:
    """Return the applications of a block; a single None if the block did not run."""
    return applications if applications else [None]


def _compare_block(
    block: Block, applications: Sequence[Application], tolerance: float
) -> Iterator[tuple[VerifiedBlock, Learned | None]]:
    """Compare each application of a block; yield one empty comparison if there are none."""
    plan = block.plan
    sinks = block.read([plan.sinks])[0] if plan.sinks else None
    bounds = None if plan.rule.guess else block.ceiling()
    ceiling = None if bounds is None else float(bounds.any_distance.max())
    knows_positions = plan.position in (*FROM_DISTANCE, *OBSERVED)
    knows_score = knows_positions and plan.rule.whole_score and not plan.rule.guess
    for number, application in enumerate(_uses(applications)):
        check, length = NOT_OBSERVED, 0
        if application is not None:
            check = _closest(block, application, sinks)
            length = application.key_input.shape[1]
        verified = VerifiedBlock(
            *plan.place,
            number,
            difference=check.difference,
            form_difference=None,
            contrast=check.contrast,
            tolerance=tolerance,
            largest_score=check.largest_score,
            ceiling=ceiling,
            described=knows_score and not beyond(plan, length),
            heads=None if check.observed_heads is None else plan.query.heads,
            observed_heads=check.observed_heads,
        )
        yield verified, check.learned


def _closest(block: Block, application: Application, sinks: np.ndarray | None) -> AttentionCheck:
    """Return the check of the observed attention that is nearest to the recomputed attention."""
    checks: list[AttentionCheck] = []
    for attention in _attentions(block.plan, application):
        batch, _, queries, keys = attention.weights.shape
        if not block.plan.rule.whole_score and application.key_input.shape[1] != keys:
            # Entries that are made of many tokens (DeepSeek V4) are no tokens' keys.
            continue
        inputs = fitted(application, batch, queries, keys, block.groups.widths)
        if inputs is not None:
            checks.append(_check(block, attention, inputs, sinks))
    observed_heads = application.observed_heads
    if not checks and observed_heads is not None:
        return _misfit(block.plan, contrast=0.0)._replace(observed_heads=observed_heads)

    def difference(check: AttentionCheck) -> float:
        assert check.difference is not None
        return check.difference

    return min(checks, key=difference, default=NOT_OBSERVED)


def _misfit(plan: AttentionPlan, contrast: float) -> AttentionCheck:
    """Return the check of an attention that does not fit the weights of a block."""
    return AttentionCheck(
        difference=math.inf,
        contrast=contrast,
        largest_score=None if plan.rule.guess else math.inf,
        learned=None,
    )


def _attentions(plan: AttentionPlan, application: Application) -> Iterator[Attention]:
    """Yield the observed attentions of a block; for joint attention, the block's part."""
    for attention in application.attentions(plan.query.heads):
        if plan.rule.joint:
            queries, keys = application.query_input.shape[-2], application.key_input.shape[-2]
            yield from attention.parts(queries, keys)
        else:
            yield attention


def _check(
    block: Block,
    attention: Attention,
    inputs: tuple[np.ndarray, np.ndarray],
    sinks: np.ndarray | None,
) -> AttentionCheck:
    """Recompute an attention from the inputs of its projections, and compare.

    Parameters
    ----------
    block
        The block with the weights to check.
    attention
        The observed attention, (B, H, I, J).
    inputs
        Inputs of the queries, (B, I, D), and of the keys, (B, J, D).
    sinks
        Scores of the heads' sinks, (H,); None without sinks.
    """
    plan, (x, y) = block.plan, inputs
    rows = _token_rows(plan, attention)
    weights = attention.weights
    if attention.other_weights is not None:
        weights = np.concatenate([weights, attention.other_weights], axis=-1)
    observed = weights.swapaxes(1, 2)[rows]
    contrast = _contrast(observed)
    if (x.shape[-1], y.shape[-1]) != block.groups.widths:
        return _misfit(plan, contrast)
    positions = np.arange(x.shape[1]), np.arange(y.shape[1])
    products = block.products(x, y, positions)
    learned = largest_score = None
    if plan.rule.guess:
        learned = _learned(plan, attention, products)
        scores = learned.scale * products + attention.added
        shown = attention.visible
    else:
        largest_score = plan.score_scale * float(np.abs(products).max())
        scores = block.scores(products) + _added(plan, attention)
        shown = _expected_mask(plan, attention)
    # Granite SWA applies sinks to outputs, after the reported attention.
    takes_part = sinks is not None and not np.allclose(observed.sum(axis=-1), 1, atol=1e-6)
    # A finite number, as in models: a padded query may have no key in its window.
    masked = np.where(shown, scores, np.finfo(np.float64).min)
    if attention.other_scores is not None:
        masked = np.concatenate([masked, attention.other_scores], axis=-1)
    expected = softmax(masked, sinks if takes_part else None)
    difference = float(np.abs(expected.swapaxes(1, 2)[rows] - observed).max(initial=0.0))
    return AttentionCheck(difference, contrast, largest_score, learned)


def _added(plan: AttentionPlan, attention: Attention) -> np.ndarray | float:
    """Return the terms added to scores: from the plan if distances suffice, else as observed."""
    _, heads, queries, keys = attention.weights.shape
    if not plan.position:
        return 0.0
    if plan.position in FROM_DISTANCE:
        biases = alibi(plan, heads, np.arange(queries)[:, None] - np.arange(keys))
        return REPEATED.get(plan.position, 1) * biases
    return attention.added


def _expected_mask(plan: AttentionPlan, attention: Attention) -> np.ndarray:
    """Return the visible pairs of a plan: by causality, window and padding of keys.

    If the plan does not determine the mask, the observed mask is returned.
    """
    *_, queries, keys = attention.visible.shape
    if plan.window is not None and not plan.window.is_known:
        return attention.visible
    if plan.position and plan.position not in FROM_DISTANCE:
        return attention.visible  # windows of pictures, which positions in a row do not determine
    shown = allowed(plan, np.arange(queries)[:, None] - np.arange(keys))
    is_token = np.asarray(attention.visible.any(axis=(1, 2)))  # keys that are no padding, (B, J)
    return np.asarray(shown & is_token[:, None, None])


def _token_rows(plan: AttentionPlan, attention: Attention) -> np.ndarray:
    """Return a mask (B, I) of rows, without padding and rows without visible keys."""
    visible = attention.visible
    sees_a_key = np.asarray(visible.any(axis=(1, 3)))
    if plan.kind == "cross" or visible.shape[-1] != visible.shape[-2]:
        return sees_a_key
    is_seen = np.asarray(visible.any(axis=(1, 2)))  # padding is not
    return np.asarray(sees_a_key & is_seen)


def _contrast(weights: np.ndarray) -> float:
    """Return the largest distance of weights from uniform weights, over keys with positive weight.

    The uniform weights have the same sum, which is below 1 with sinks.
    """
    key_counts = np.maximum(1, (weights > 0).sum(axis=-1, keepdims=True))
    uniform = weights.sum(axis=-1, keepdims=True) / key_counts
    return float(np.where(weights > 0, np.abs(weights - uniform), 0).max(initial=0.0))


def _learned(plan: AttentionPlan, attention: Attention, products: np.ndarray) -> Learned:
    """Return scale, mask and window of a guess, from an observed attention.

    ``products`` are the products of queries and keys of the guess, (B, H, I, J).
    """
    visible = attention.visible
    *_, query_count, key_count = visible.shape
    distance = np.arange(query_count)[:, None] - np.arange(key_count)
    shown = np.asarray(visible.any(axis=(0, 1)))  # pairs that some text and head shows, (I, J)
    is_square = query_count == key_count and query_count > 1
    is_causal = is_square and not (shown & (distance < 0)).any()
    back = int(distance[shown].max(initial=0))
    has_window = is_causal and back < query_count - 1
    expected = (distance >= 0) if is_causal else np.ones_like(shown)
    if has_window:
        expected = expected & (distance <= back)
    is_token = np.asarray(visible.any(axis=(1, 2)))[:, None, None]  # keys without padding
    expected = np.broadcast_to(expected & is_token, visible.shape)
    has_bias = bool(np.abs(attention.added).max(initial=0.0) > 1e-5)
    return Learned(
        heads=plan.query.heads,
        key_heads=plan.key.heads,
        scale=_learned_scale(plan, attention.logits, products),
        causal=is_causal,
        window=back + 1 if has_window else None,
        has_own_mask=not np.array_equal(expected, visible),
        has_bias=has_bias,
    )


def _learned_scale(plan: AttentionPlan, logits: np.ndarray | None, products: np.ndarray) -> float:
    """Return the factor that fits products best to logits; the plan's scale if it fits as well."""
    if logits is None:
        return plan.score_scale
    square_sum = float((products * products).sum())
    if not square_sum:
        return plan.score_scale
    scale = float((logits * products).sum()) / square_sum
    # Without the rounding of float64, so that equal blocks have learned equal scales.
    scale = float(f"{scale:.12g}")
    if math.isclose(scale, plan.score_scale, rel_tol=1e-5):
        return plan.score_scale
    return scale


class _InDoublePrecision(Around):
    """A checkpoint read as float64, so that folded norms are not rounded."""

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        return [array.astype(np.float64) for array in self.inner.read(parts)]
