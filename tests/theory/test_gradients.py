"""β of every family against PyTorch's own gradient of a term that is put into the scores."""

from __future__ import annotations

import itertools
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.families.architectures import ALL, NAMED
from tests.families.proving import build

from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import TheoryError
from wqk.theory.gradients import LayerGradient, gradients
from wqk.verification.inputs import inputs_of
from wqk.verification.running import PADDING_MASKS, double_precision

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.families.architectures import Architecture

    from wqk.families import AttentionPlan

LENGTH = 9
DISTANCES = (0, 1, 4)

# Families whose scores are not bilinear forms of what is projected, and the reason that is given.
REFUSED = {
    **dict.fromkeys(
        (
            "qwen3 phi-norms stablelm-norms persimmon olmo2 olmo3 cohere-norms gemma3-text "
            "gemma3-text-hub gemma3 gemma3-hub dots1 glm4-moe minimax-m2 olmoe qwen3-moe exaone4 "
            "exaone4-full nanochat apertus lfm2 swinv2 mllama"
        ).split(),
        "normalised token by token before they meet",
    ),
    **dict.fromkeys(
        ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-yarn"),
        "go through a latent",
    ),
    **dict.fromkeys(("mpt-clipped", "olmo-clipped"), "cut off at ±0.7"),
    "falcon-alibi": "linear biases twice",
    # What they hand out is not what meets the values, or they hand out nothing.
    **dict.fromkeys(
        (
            "data2vec-vision mask2former sam seggpt siglip siglip-vision siglip-hub vit-mae-hub "
            "wavlm wavlm-large vit-mae"
        ).split(),
        "hands out no attention",
    ),
}


def linear(output: Any, random: Any) -> Any:
    """A random linear functional of the model's first output."""
    return (output * torch.randn(output.shape, generator=random)).sum()


def likelihood(output: Any, random: Any) -> Any:
    """Of random classes at every place, which weigh differently."""
    chosen = torch.rand(output.shape[:-1], generator=random)
    classes = torch.randint(output.shape[-1], output.shape[:-1], generator=random)
    return -(output.log_softmax(-1).gather(-1, classes[..., None])[..., 0] * chosen).mean()


def distance_of_examples(output: Any, random: Any) -> Any:
    """Something that couples the examples of a batch, as contrastive objectives do."""
    return (output - torch.flip(output, (0,)) * 0.7 + 0.3).square().mean()


OBJECTIVES = (linear, likelihood, distance_of_examples)


def objective(kind: Callable[..., Any], seed: int) -> Callable[[Any, Any], Any]:
    def loss(model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        first = next(
            v for v in outputs.values() if torch.is_tensor(v) and v.ndim and v.requires_grad
        )
        return kind(first, torch.Generator().manual_seed(seed))

    return loss


@contextmanager
def built(architecture: Architecture) -> Iterator[Any]:
    """The random model in float64, quietly."""
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield build(architecture).double()


class PutIntoScores(torch.overrides.TorchFunctionMode):
    """Adds scale · x E yᵀ to what is given to the softmax, or to the soft cap, of each block.

    Knows nothing of attention probabilities or of β: it waits for the functions by name.
    """

    def __init__(self, model: Any, plans: list[AttentionPlan]) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}
        self.plan: AttentionPlan | None = None
        self.terms: dict[int, dict[int | None, Any]] = {}
        self.handles: list[Any] = []
        for plan in plans:
            width, other = (
                model.get_parameter(side.tensor).shape[0 if side.transposed else 1]
                for side in (plan.query, plan.key)
            )
            self.terms[id(plan)] = {
                distance: torch.zeros(plan.query.heads, width, other, requires_grad=True)
                for distance in (None, *(DISTANCES if plan.rotary else ()))
            }
            for side in ("query", "key"):
                module = model.get_submodule(getattr(plan, side).tensor.rpartition(".")[0])
                self.handles.append(module.register_forward_pre_hook(self._given(side, plan)))

    def _given(self, side: str, plan: AttentionPlan) -> Callable[[Any, Any], None]:
        def keep(module: Any, args: Any) -> None:
            # A projection that is used again, for relative positions, comes after the first.
            if self.plan is not plan:
                self.given.clear()
            self.plan = plan
            self.given.setdefault(side, args[0])

        return keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.plan is not None and len(self.given) == 2:
            capped = self.plan.softcap is not None
            if func in ((torch.tanh, torch.Tensor.tanh) if capped else SOFTMAXES):
                scores = args[0] if args else kwargs["input"]
                args = (self._added(scores), *args[1:])
        return func(*args, **(kwargs or {}))

    def _added(self, scores: Any) -> Any:
        plan = self.plan
        assert plan is not None
        queries = scores.shape[-2]
        x = self.given["query"].reshape(-1, 1, queries, self.given["query"].shape[-1])
        y = self.given["key"].reshape(len(x), 1, -1, self.given["key"].shape[-1])
        i, j = torch.arange(x.shape[2])[:, None], torch.arange(y.shape[2])
        term = torch.zeros(())
        for distance, e in self.terms[id(plan)].items():
            pairs = torch.ones(()) if distance is None else (i - j == distance).double()
            term = term + plan.scale / (plan.softcap or 1.0) * (x @ e @ y.mT) * pairs
        self.given, self.plan = {}, None
        if plan.sinks:
            term = torch.nn.functional.pad(term, (0, 1))
        return scores + term.reshape(scores.shape)


SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)


def gradients_of_terms(
    model: Any, plans: list[AttentionPlan], batch: Any, loss: Any
) -> list[dict[int | None, Any]]:
    """∂loss/∂E of every block: of an E for all pairs, and for pairs at some distances."""
    model.eval()
    mode = PutIntoScores(model, plans)
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = config._experts_implementation = "eager"
    try:
        with mode:
            value = loss(model, batch | {"output_attentions": True})
    finally:
        for handle in mode.handles:
            handle.remove()
    flat = [e for plan in plans for e in mode.terms[id(plan)].values()]
    found = iter(torch.autograd.grad(value, flat))
    return [{distance: next(found) for distance in mode.terms[id(plan)]} for plan in plans]


def place(plan: AttentionPlan) -> tuple[str, str, int]:
    return plan.stack, plan.rule.kind, plan.layer


CASES = [
    (architecture, OBJECTIVES[index % 3], index % 2 == 0, index)
    for index, architecture in enumerate(a for a in ALL if a.name not in REFUSED)
]


@pytest.mark.parametrize(
    ("architecture", "kind", "padded", "seed"),
    CASES,
    ids=[f"{a.name}-{kind.__name__}-{'padded' if padded else 'full'}" for a, kind, padded, _ in CASES],
)
def test_beta_is_the_gradient_of_the_form(
    architecture: Architecture, kind: Any, padded: bool, seed: int
) -> None:
    with built(architecture) as model:
        batch = inputs_of(model, None, LENGTH, seed)
        if not padded:
            batch |= {n: torch.ones_like(batch[n]) for n in PADDING_MASKS if n in batch}
        loss = objective(kind, seed)
        found = gradients(model, batch, loss)
        plans = attention_plans(open_checkpoint(model))
        expected = gradients_of_terms(model, plans, batch, loss)
    # Where attention is all but certain a block's gradient is a small difference of large numbers.
    largest = max(np.abs(e.numpy()).max() for terms in expected for e in terms.values())
    assert largest > 1e-6
    for plan, terms in zip(plans, expected, strict=True):
        uses = [g for g in found if place(g.attention.plan) == place(plan)]
        for head, (distance, term) in itertools.product(range(plan.query.heads), terms.items()):
            forms = [
                g.by_prediction(head) if distance is None else g.at_distance(distance, head)
                for g in uses
            ]
            together = sum(form.dense() for form in forms)
            assert np.abs(together - term[head].numpy()).max() < 1e-10 * largest
