"""Evidence for the statements: weights and gradients of a subject, each computed once.

Axes: B batch, N tokens (i predicted, j context), D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from wqk._machine import cached_property
from wqk.attention import Block
from wqk.attention.factors import Factor
from wqk.checkpoints import open_checkpoint
from wqk.errors import TheoryError
from wqk.families import AttentionPlan
from wqk.families.plans import part_names
from wqk.forms import BilinearForm
from wqk.live.held_out import IGNORED
from wqk.model import open as open_model
from wqk_lab.theory.gradients import (
    LayerGradient,
    bilinear_plans,
    blocks_of,
    gradients_in_passes,
    load_values,
    mixing_error,
)
from wqk_lab.theory.subject import Subject
from wqk_lab.theory.text import Text
from wqk_lab.theory.verdict import Sample, Statement

Computed = TypeVar("Computed")

# Entries of the residual stream, at all positions and layers of a pass with gradients. A pass holds
# about forty times as many numbers.
NUMBERS_IN_A_PASS = 2**20


class LayerUpdate(NamedTuple):
    """The update of a self-attention layer on a batch."""

    inputs: np.ndarray  # x, of the query and the key projections, (B, N, D)
    beta: np.ndarray  # β, summed over heads, (B, N, N)

    @classmethod
    def of(cls, layer: LayerGradient) -> LayerUpdate:
        """Return the update that a layer's gradient determines."""
        return cls(layer.query_input, np.asarray(layer.beta.sum(axis=1)))

    @property
    def form(self) -> BilinearForm:
        """The form Σ_ij β_ij x_i x_jᵀ over the batch."""
        width = self.inputs.shape[-1]
        context = (self.beta @ self.inputs).reshape(-1, width)
        return BilinearForm.from_factors(self.inputs.reshape(-1, width).T, context.T)


@dataclass(frozen=True, eq=False)
class Evidence:
    """A subject and its text; results that several statements need are computed once.

    Attributes
    ----------
    subject, text
        The model with its blocks, and the whole text of these blocks.
    layers
        Numbers of the layers to measure; None for all.
    mixing_errors
        By layer, the difference of its heads' outputs from the mean of values weighted by
        attention, for each batch of `gradients`.
    on_batch
        Called before the gradients of each batch, with the number of finished batches and of all
        batches.

    Raises
    ------
    CheckpointError, TheoryError
        On first use: the model lacks a chosen layer, or its scores are not bilinear.
    """

    subject: Subject
    text: Text
    layers: Collection[int] | None = None
    on_batch: Callable[[int, int], None] | None = field(default=None, repr=False)
    mixing_errors: dict[str, list[float]] = field(default_factory=dict, repr=False, init=False)
    _results: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, compute: Callable[[Evidence], Computed]) -> Computed:
        """Return the result of a function of this evidence, computed on the first call."""
        if compute not in self._results:
            self._results[compute] = compute(self)
        result: Computed = self._results[compute]
        return result

    @cached_property
    def plans(self) -> list[AttentionPlan]:
        """Return the attention blocks of the chosen layers."""
        model = open_model(self.subject.model)
        if self.layers is not None:
            model = model.select(layers=self.layers)
        return list(model.plans)

    @cached_property
    def blocks(self) -> list[Block]:
        """Queries and keys of the chosen layers, read once."""
        return blocks_of(open_checkpoint(self.subject.model), self.plans)

    @cached_property
    def values(self) -> dict[str, Factor | None]:
        """Weights of the values of each self-attention layer; None if not named by the family."""
        checkpoint = open_checkpoint(self.subject.model)
        plans = [plan for plan in self.plans if plan.kind == "self"]
        return {self.label(plan): load_values(checkpoint, plan) for plan in plans}

    @cached_property
    def batches(self) -> list[dict[str, object]]:
        """Return the subject's batches, as PyTorch tensors."""
        return list(self.subject.batches())

    def passes(self) -> Iterator[list[LayerGradient]]:
        """Yield the gradients of the model's loss for each batch; only self-attention."""
        bilinear_plans(self.subject.name, self.plans)
        blocks = [block for block in self.blocks if block.plan.kind == "self"]
        width_of_layers = sum(block.query.weight.shape[-1] for block in blocks)
        positions = NUMBERS_IN_A_PASS // max(1, width_of_layers)
        for done, batch in enumerate(self.batches):
            if self.on_batch:
                self.on_batch(done, len(self.batches))
            yield gradients_in_passes(self.subject.model, batch, blocks, positions)

    @cached_property
    def gradients(self) -> list[list[LayerGradient]]:
        """The gradients of all batches, without the inputs of W_o.

        Only one statement needs these inputs; its numbers are in `mixing_errors`.
        """
        batches = []
        for layers in self.passes():
            for layer in layers:
                label = self.label(layer.attention.plan)
                error = mixing_error(layer, self.values[label])
                self.mixing_errors.setdefault(label, []).append(error)
            batches.append([replace(layer, mixed=None) for layer in layers])
        return batches

    @property
    def by_layer(self) -> dict[str, list[LayerGradient]]:
        """The `gradients` of all batches, by layer."""
        columns = zip(*self.gradients, strict=True)
        return {self.label(column[0].attention.plan): list(column) for column in columns}

    @cached_property
    def updates(self) -> dict[str, list[LayerUpdate]]:
        """The updates for all batches, by layer."""
        return {
            label: list(map(LayerUpdate.of, gradients_of_layer))
            for label, gradients_of_layer in self.by_layer.items()
        }

    @cached_property
    def forms(self) -> dict[str, BilinearForm]:
        """W_qk of each self-attention layer with a square form, summed over heads."""
        forms = {
            self.label(block.plan): block.form
            for block in self.blocks
            if block.plan.kind == "self" and block.form.is_square
        }
        if not forms:
            raise TheoryError(f"{self.subject.name}: no self-attention layer has a square form")
        return forms

    @cached_property
    def predicted(self) -> list[np.ndarray]:
        """Masks of the predicted tokens of each batch, (B, N)."""
        return [np.asarray(labels != IGNORED) for _, labels in self.subject.examples()]

    def label(self, plan: AttentionPlan) -> str:
        """Return a layer's name: the stack, if there are several, and the number."""
        stacks = {p.stack for p in self.plans}
        if len(stacks) > 1:
            return f"{plan.stack} {plan.layer}"
        return str(plan.layer)

    def on(self, subject: Subject) -> Evidence:
        """Return evidence for the same layers of another subject with the same model."""
        evidence = Evidence(subject, self.text, self.layers, self.on_batch)
        evidence.__dict__.update(plans=self.plans, blocks=self.blocks)
        return evidence

    def sample(self, measure: Callable[[LayerGradient, int], Mapping[str, float]]) -> Sample:
        """Measure every layer on every batch, as for `sample_of`.

        ``measure`` is a function of a layer's gradient and the number of its batch.
        """
        measured: dict[str, list[Mapping[str, float]]] = {}
        for label, gradients_of_layer in self.by_layer.items():
            numbers_of_layer = [measure(g, batch) for batch, g in enumerate(gradients_of_layer)]
            measured[label] = numbers_of_layer
        return sample_of(measured)


StatementMeasure = Callable[[Evidence], Sample]


def of_layers(
    measure: Callable[[LayerGradient], Mapping[str, float]],
) -> StatementMeasure:
    """Return the measure of a statement that applies a function to each layer and batch."""
    return lambda evidence: evidence.sample(lambda layer, _: measure(layer))


def sample_of(
    measured: Mapping[str, Sequence[Mapping[str, float]]], unit: str = "batches"
) -> Sample:
    """Make a sample from each layer's numbers, by unit: first the quantity, then its details.

    Examples
    --------
    >>> sample = sample_of({"0": [{"s": 1.0, "n": 3.0}], "1": [{"s": 2.0, "n": 4.0}]})
    >>> sample.values.tolist(), sample.layers, sample.details["n"].tolist()
    ([[1.0, 2.0]], ('0', '1'), [[3.0, 4.0]])
    """
    units = list(zip(*measured.values(), strict=True))
    quantity, *details = units[0][0]
    tables = {}
    for name in (quantity, *details):
        rows = []
        for numbers_by_layer in units:
            rows.append([numbers[name] for numbers in numbers_by_layer])
        tables[name] = np.array(rows)
    return Sample(tables.pop(quantity), unit, tuple(measured), tables)


def inner_product(first: BilinearForm, second: BilinearForm) -> float:
    """Return ⟨M, N⟩ = Σ_kl M_kl N_kl = tr(M Nᵀ), from the factors of two forms.

    Examples
    --------
    >>> form = BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
    >>> inner_product(form, form), inner_product(form, form.T), round(cosine(form, form * -2.0), 12)
    (125.0, 121.0, -1.0)
    """
    return float(((first.query.T @ second.query) * (first.key.T @ second.key)).sum())


def cosine(first: BilinearForm, second: BilinearForm) -> float:
    """Return ⟨M, N⟩ / ‖M‖ ‖N‖; NaN if a form is the zero matrix."""
    return ratio(inner_product(first, second), float(first.norm * second.norm))


def ratio(part: Any, total: Any) -> float:
    """Divide two numbers; NaN if the divisor is 0, as in a layer without a gradient."""
    return float(part / total) if total else math.nan


NOT_FOR = {
    "causal": "about models that see both sides; this one sees what came before",
    "masked": "about models that predict each next token; this one fills in masked ones",
    "each": "about some tokens masked at a time; here each is predicted from all others",
}


def obstacle(statement: Statement, evidence: Evidence) -> str:
    """Return the reason why a statement cannot be tested on some evidence; else empty."""
    subject, needs = evidence.subject, statement.needs
    if subject.objective not in statement.objectives:
        return NOT_FOR[subject.objective]
    if needs in ("nothing", "text") or not subject.missing:
        return ""
    lacking = subject.missing
    if needs == "weights":
        plans = open_model(subject.model).plans
        lacking = tuple(part_names(plans) & {*lacking})
    elif needs == "forward":  # the language-model head plays no part
        body = f"{subject.model.base_model_prefix}."
        lacking = tuple(name for name in lacking if name.startswith(body))
    if not lacking:
        return ""
    further = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"rests on tensors that the checkpoint lacks: {min(lacking)}{further}"
