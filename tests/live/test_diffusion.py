"""Joint attention of a text and a picture: one softmax, of which each form has the logits.

Fast tests use a module with the names of diffusers'; slow ones diffusers' own tiny models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.diffusion import MODELS
from torch import nn
from torch.nn import functional

import wqk
from wqk.live.observing import Observer
from wqk.live.recording import recording
from wqk.live.running import double_precision

HEADS, WIDTH, TEXT, PICTURE = 2, 16, 3, 5
KEYS = ("add_k_proj", "to_k")  # of text and picture


class Joint(nn.Module):
    """Queries, keys and values of two streams, in one softmax; norms of queries and keys."""

    def __init__(self, keys: tuple[str, str] = KEYS) -> None:
        super().__init__()
        self.keys = keys
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            self.add_module(name, nn.RMSNorm(WIDTH // HEADS, eps=1e-6))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.to_add_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> Any:
        """Outputs of the joint attention for the picture and for the text; text comes first."""

        def heads(vectors: torch.Tensor) -> torch.Tensor:
            return vectors.unflatten(-1, (HEADS, -1))

        text_keys, picture_keys = (getattr(self, name) for name in self.keys)
        sides = [
            torch.cat([added(heads(project_text(text))), norm(heads(project(picture)))], 1)
            for project_text, added, project, norm in (
                (self.add_q_proj, self.norm_added_q, self.to_q, self.norm_q),
                (text_keys, self.norm_added_k, picture_keys, self.norm_k),
            )
        ]
        value = torch.cat([heads(self.add_v_proj(text)), heads(self.to_v(picture))], 1)
        query, key, value = (side.transpose(1, 2) for side in (*sides, value))
        read = functional.scaled_dot_product_attention(query, key, value)
        read = read.transpose(1, 2).flatten(-2)
        return self.to_out[0](read[:, TEXT:]), self.to_add_out(read[:, :TEXT])


class Block(nn.Module):
    def __init__(self, keys: tuple[str, str]) -> None:
        super().__init__()
        self.attn = Joint(keys)

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> Any:
        read = self.attn(picture, text)
        return picture + read[0], text + read[1]


class QwenImageTransformer2DModel(nn.Module):
    """A stand-in for the model of this name, without its positions."""

    __module__ = "diffusers.models.transformers"

    def __init__(self, keys: tuple[str, str] = KEYS) -> None:
        super().__init__()
        self.config = {
            "num_attention_heads": HEADS,
            "num_layers": 2,
            "attention_head_dim": 8,
            "axes_dims_rope": (2, 2, 4),
        }
        self.transformer_blocks = nn.ModuleList(Block(keys) for _ in range(2))

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            picture, text = block(picture, text)
        return picture


def randomized(model: nn.Module) -> nn.Module:
    """Return a model in float64 whose attention is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.double().eval().named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            nn.init.uniform_(parameter, 0.5, 2.0, generator=generator)
        else:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@pytest.fixture
def model() -> nn.Module:
    return randomized(QwenImageTransformer2DModel())


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
            stack_of_keys = (
                stack if kind == "self" else next(name for name in streams if name != stack)
            )
            block = opened.block(0, stack=stack, kind=kind)
            products = block.products(x, streams[stack_of_keys]) * block.plan.scale
            quarter = observed[:, :, tokens[stack], tokens[stack_of_keys]]
            np.testing.assert_allclose(products, quarter, rtol=1e-9)


def test_each_form_is_verified_on_its_part_of_the_joint_attention(
    model: nn.Module, batch: Any
) -> None:
    verification = wqk.verify(model, batch)
    assert [block.verdict for block in verification.blocks] == ["right"] * 8
    assert verification.difference < 1e-12


def test_exchanged_projections_of_the_streams_are_wrong(batch: Any) -> None:
    exchanged = randomized(QwenImageTransformer2DModel(KEYS[::-1]))
    verification = wqk.verify(exchanged, batch)
    assert [block.verdict for block in verification.blocks] == ["wrong"] * 8


@pytest.fixture
def of_diffusers() -> Callable[[str], tuple[nn.Module, dict[str, Any]]]:
    pytest.importorskip("diffusers")

    def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
        with double_precision():
            model, batch = MODELS[name]()
        return randomized(model), batch

    return make


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("flux", "form right"),
        ("sd3", "right"),
        ("qwen", "form right"),
        ("pixart", "right"),
        ("wan", "form right"),
    ],
)
def test_transformers_of_diffusers_are_verified(
    name: str, verdict: str, of_diffusers: Callable[[str], tuple[nn.Module, dict[str, Any]]]
) -> None:
    verification = wqk.verify(*of_diffusers(name))
    assert verification.ok
    assert verification.verdict == verdict


def grid(*sides: int) -> np.ndarray:
    """Positions of all tokens of a grid, (N, axes)."""
    ranges = [np.arange(side, dtype=float) for side in sides]
    return np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(sides))


# Positions of the picture's tokens and of the text's, in the models of `benchmarks.diffusion`.
# Qwen-Image counts from the middle of the picture, and the text from the picture's margin.
POSITIONS = {
    "flux": (grid(1, 4, 4), np.zeros((5, 3))),
    "qwen": (grid(1, 4, 4) - [0, 2, 2], 2 + np.arange(5.0)[:, None].repeat(3, axis=1)),
    "wan": (grid(2, 4, 4), np.zeros((0, 3))),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_on_three_axes_turn_as_in_diffusers(
    name: str, of_diffusers: Callable[[str], tuple[nn.Module, dict[str, Any]]]
) -> None:
    model, batch = of_diffusers(name)
    opened = wqk.open(model)
    plans = [plan for plan in opened.plans if plan.axial is not None]
    assert len(plans) == {"flux": 10, "qwen": 8, "wan": 2}[name]
    with double_precision(), recording(model, plans, plans) as records:
        model(**batch)
    picture, text = POSITIONS[name]
    positions = {"image": picture, "video": picture, "text": text}
    positions["single"] = np.concatenate([text, picture])
    for plan, (application,) in zip(plans, records, strict=True):
        block, axial = opened.block(plan.layer, stack=plan.stack, kind=plan.kind), plan.axial
        stack_of_cross = {"image": "text", "text": "image"}.get(plan.stack, plan.stack)
        stream_of_keys = stack_of_cross if plan.kind == "cross" else plan.stack
        queries = axial.rotate(block.queries(application.query_input), positions[plan.stack])
        keys = axial.rotate(block.keys(application.key_input), positions[stream_of_keys])
        logits = queries @ keys.swapaxes(-1, -2) * plan.scale
        (attention,) = application.attentions(HEADS)
        parts = attention.parts(*logits.shape[-2:])
        assert min(np.abs(part.logits - logits).max() for part in parts) < 1e-11
        wrong = replace(axial, axis_pairs=axial.axis_pairs[::-1])
        turned = wrong.rotate(block.queries(application.query_input), positions[plan.stack])
        if plan.stack != "text":  # all tokens of Flux's text have the same place
            assert np.abs(turned - queries).max() > 0.1
