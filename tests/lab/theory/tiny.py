"""Tiny random models in float64, and what they are run on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.families.architectures import NAMED
from tests.families.proving import build

from wqk.live.running import PADDING_MASKS, double_precision, inputs_of

LENGTH = 9

# One of each way in which a score is made: fused and separate, grouped, rotary in both orders and
# in part, scaled rotary, linear and learned biases of positions, soft caps, sinks, shared layers.
# fmt: off
VARIETY = (
    "bert", "gpt2", "gptj", "gpt-neox", "llama", "llama-yarn", "phi", "phi3", "phi4-mini",
    "falcon-grouped", "bloom", "mpt", "t5", "bart", "gemma2", "gpt-oss", "albert", "modernbert",
)
# fmt: on


@contextmanager
def built(name: str) -> Iterator[Any]:
    """The random model of a named architecture in float64, quietly."""
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(NAMED[name]).double().eval()
        model.config._experts_implementation = "eager"  # the fused kernels know no float64
        yield model


def batch_for(model: Any, seed: int = 0, *, padded: bool = False) -> dict[str, Any]:
    """Random input of two examples, of which the second may be padded."""
    batch = inputs_of(model, None, LENGTH, seed)
    if not padded:
        batch |= {name: torch.ones_like(batch[name]) for name in PADDING_MASKS if name in batch}
    return batch


def linear(output: Any, random: Any) -> Any:
    """A random linear functional of the model's first output."""
    return (output * torch.randn(output.shape, generator=random)).sum()


def likelihood(output: Any, random: Any) -> Any:
    """Negative log-likelihood of random classes, with random weights, at every place."""
    weights = torch.rand(output.shape[:-1], generator=random)
    classes = torch.randint(output.shape[-1], output.shape[:-1], generator=random)
    return -(output.log_softmax(-1).gather(-1, classes[..., None])[..., 0] * weights).mean()


def contrast(output: Any, random: Any) -> Any:
    """Something that couples the examples of a batch."""
    return (output - torch.flip(output, (0,)) * 0.7 + 0.3).square().mean()


OBJECTIVES = (linear, likelihood, contrast)


def objective(kind: Callable[..., Any], seed: int) -> Callable[[Any, Any], Any]:
    """A loss of a model and a batch, the same every time."""

    def loss(model: Any, batch: Any) -> Any:
        torch.manual_seed(seed)  # some models drop out even in evaluation
        outputs = model(**batch).values()
        first = next(v for v in outputs if torch.is_tensor(v) and v.ndim and v.requires_grad)
        return kind(first, torch.Generator().manual_seed(seed))

    return loss
