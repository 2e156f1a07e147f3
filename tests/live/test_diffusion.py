"""Joint attention of a text and a picture: one softmax, of which each form has the logits.

diffusers is not needed: a module with its names stands in. Its own models are compared where it is
installed (`benchmarks/libraries.py` prints the differences).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import wqk
from wqk.live.observing import Observer

HEADS, WIDTH, TEXT, PICTURE = 2, 16, 3, 5


class Joint(nn.Module):
    """Queries, keys and values of two streams, in one softmax; norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            self.add_module(name, nn.RMSNorm(WIDTH // HEADS, eps=1e-6))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.to_add_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> Any:
        """What both streams read, text first."""

        def heads(vectors: torch.Tensor) -> torch.Tensor:
            return vectors.unflatten(-1, (HEADS, -1))

        sides = [
            torch.cat([added(heads(project_text(text))), norm(heads(project(picture)))], 1)
            for project_text, added, project, norm in (
                (self.add_q_proj, self.norm_added_q, self.to_q, self.norm_q),
                (self.add_k_proj, self.norm_added_k, self.to_k, self.norm_k),
            )
        ]
        value = torch.cat([heads(self.add_v_proj(text)), heads(self.to_v(picture))], 1)
        query, key, value = (side.transpose(1, 2) for side in (*sides, value))
        read = functional.scaled_dot_product_attention(query, key, value)
        read = read.transpose(1, 2).flatten(-2)
        return self.to_out[0](read[:, TEXT:]), self.to_add_out(read[:, :TEXT])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Joint()

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> Any:
        read = self.attn(picture, text)
        return picture + read[0], text + read[1]


class QwenImageTransformer2DModel(nn.Module):
    """A stand-in for the model of this name, without its positions."""

    __module__ = "diffusers.models.transformers"

    def __init__(self) -> None:
        super().__init__()
        self.config = {"num_attention_heads": HEADS, "num_layers": 2, "attention_head_dim": 8}
        self.transformer_blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            picture, text = block(picture, text)
        return picture


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = QwenImageTransformer2DModel().double().eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 2.0)
    return made


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, PICTURE, WIDTH).double(), torch.randn(2, TEXT, WIDTH).double()


def test_a_module_of_diffusers_has_its_family_and_each_form_the_joint_logits(
    model: nn.Module, batch: Any
) -> None:
    opened = wqk.open(model)
    assert {plan.family for plan in opened.plans} == {"diffusers-qwen-image"}
    calls: list[Any] = []
    with torch.no_grad(), Observer(model, calls.append):
        model(*batch)
    measured = wqk.logits(model, batch)
    assert not measured.missing
    assert len(measured.blocks) == len(opened.plans) == 8
    for layer, call in enumerate(calls):
        largest = (call.queries @ call.keys.mT * call.scale).amax((0, 2, 3))
        for name in (("image", "self"), ("image", "cross"), ("text", "self"), ("text", "cross")):
            block = measured.blocks[(*name, layer)]
            np.testing.assert_allclose(block.max_logit, largest, rtol=1e-12)


def test_the_four_forms_are_the_quarters_of_the_observed_products(
    model: nn.Module, batch: Any
) -> None:
    calls: list[Any] = []
    with torch.no_grad(), Observer(model, calls.append):
        model(*batch)
    observed = (calls[0].queries @ calls[0].keys.mT * calls[0].scale).numpy()
    streams = {"text": batch[1].numpy(), "image": batch[0].numpy()}
    tokens = {"text": slice(0, TEXT), "image": slice(TEXT, None)}
    opened = wqk.open(model)
    for stack, x in streams.items():
        for kind in ("self", "cross"):
            other = stack if kind == "self" else next(name for name in streams if name != stack)
            block = opened.block(0, stack=stack, kind=kind)
            products = block.products(x, streams[other]) * block.plan.scale
            quarter = observed[:, :, tokens[stack], tokens[other]]
            np.testing.assert_allclose(products, quarter, rtol=1e-9)
