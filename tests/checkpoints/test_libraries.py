"""Tiny models saved by other libraries: queries and keys that they compute are those that are read.

The libraries are no dependency of this project; where one is not installed, its tests skip.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Vectors = dict[str, np.ndarray]


def randomized(model: Any) -> Any:
    """Weights, biases and gains all different, and attention far from uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            small = parameter.ndim < 2
            parameter.add_(0.3 * noise) if small else parameter.copy_(
                noise / parameter[0].numel() ** 0.5
            )
    return model.eval()


class Listener:
    """The inputs of modules by name, and every pair of queries and keys with their scale."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: Vectors = {}
        self.scores: list[tuple[np.ndarray, np.ndarray, float]] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._hear(name))
        plain = torch.nn.functional.scaled_dot_product_attention

        def attend(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
            scale = options.get("scale") or query.shape[-1] ** -0.5
            self.scores.append((query[0].double().numpy(), key[0].double().numpy(), scale))
            return plain(query, key, value, *rest, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)

    def _hear(self, name: str) -> Callable[..., None]:
        def hear(module: Any, args: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self.inputs[name] = args[0][0].detach().double().numpy()

        return hear


def prove(folder: Path, heard: Listener, blocks: dict[tuple[str, str], int]) -> None:
    """Every block's queries and keys, from its inputs, are among those that met in the model."""
    checkpoint = open_checkpoint(folder)
    plans = wqk.open(checkpoint).plans
    places = [(plan.stack, plan.kind) for plan in plans]
    assert {place: places.count(place) for place in places} == blocks
    assert len({(plan.stack, plan.kind, plan.layer) for plan in plans}) == len(plans)
    assert all(plan.rule.guess == "" for plan in plans)
    for plan in plans:
        attention = Block(checkpoint, plan)
        x, y = (
            heard.inputs[side.tensor.removesuffix(".weight").removesuffix(".in_proj_weight")]
            for side in (plan.query, plan.key)
        )
        query, key = attention.queries(x), attention.keys(y)
        assert any(
            _contains(q, query) and _contains(k, key) and np.isclose(scale, plan.scale)
            for q, k, scale in heard.scores
        ), (plan.stack, plan.kind, plan.layer)


def _contains(computed: np.ndarray, read: np.ndarray) -> bool:
    """Whether all tokens' vectors (H, N, R) are among those of the model, in order."""
    many, some = computed.shape[-2], read.shape[-2]
    if computed.shape[0] != read.shape[0] or computed.shape[-1] != read.shape[-1]:
        return False
    runs = (computed[:, start : start + some] for start in range(many - some + 1))
    return any(np.allclose(run, read, rtol=1e-4, atol=1e-5) for run in runs)


def test_diffusers_flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = randomized(
        diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16,
            num_attention_heads=3, joint_attention_dim=20, pooled_projection_dim=12,
            axes_dims_rope=(4, 4, 8), guidance_embeds=False,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    heard = Listener(model, monkeypatch)
    with torch.no_grad():
        model(
            hidden_states=torch.randn(1, 6, 4), encoder_hidden_states=torch.randn(1, 5, 20),
            pooled_projections=torch.randn(1, 12), timestep=torch.ones(1),
            img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(5, 3),  # no positions
        )  # fmt: skip
    streams = {(a, b): 2 for a in ("image", "text") for b in ("self", "cross")}
    prove(tmp_path, heard, streams | {("single", "self"): 3})
    assert set(wqk.scan(tmp_path).frame["status"]) <= {"partial", "partial, random-looking"}


@pytest.mark.parametrize("norm", [None, "rms_norm"])
def test_diffusers_sd3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str | None) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = randomized(
        diffusers.SD3Transformer2DModel(
            sample_size=4, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=16,
            num_attention_heads=3, caption_projection_dim=48, joint_attention_dim=20,
            pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8, qk_norm=norm,
            dual_attention_layers=(0,),
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    heard = Listener(model, monkeypatch)
    with torch.no_grad():
        model(
            hidden_states=torch.randn(1, 4, 4, 4), encoder_hidden_states=torch.randn(1, 5, 20),
            pooled_projections=torch.randn(1, 12), timestep=torch.ones(1),
        )  # fmt: skip
    blocks = {("image", "self"): 3, ("image", "cross"): 3, ("image-second", "self"): 1}
    prove(tmp_path, heard, blocks | {("text", "self"): 3, ("text", "cross"): 3})


@pytest.mark.parametrize("kind", ["PixArt", "DiT"])
def test_diffusers_transformers_of_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {
        "num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2,
        "sample_size": 4, "patch_size": 2, "attention_bias": True, "out_channels": 8,
    }  # fmt: skip
    own = {"caption_channels": 20, "cross_attention_dim": 48} if kind == "PixArt" else {}
    model = randomized(getattr(diffusers, f"{kind}Transformer2DModel")(**sizes, **own))
    model.save_pretrained(tmp_path)
    heard = Listener(model, monkeypatch)
    inputs: dict[str, Any] = {"timestep": torch.ones(1, dtype=torch.long)}
    if kind == "PixArt":
        inputs["encoder_hidden_states"] = torch.randn(1, 5, 20)
        inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    else:
        inputs["class_labels"] = torch.ones(1, dtype=torch.long)
    with torch.no_grad():
        model(torch.randn(1, 4, 4, 4), **inputs)
    blocks = {("image", "self"): 2}
    prove(tmp_path, heard, blocks | ({("image", "cross"): 2} if kind == "PixArt" else {}))


def test_diffusers_wan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = randomized(
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4,
            out_channels=4, text_dim=20, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=8,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    heard = Listener(model, monkeypatch)
    with torch.no_grad():  # one patch, at the position where nothing turns
        model(torch.randn(1, 4, 1, 2, 2), torch.ones(1), torch.randn(1, 5, 20))
    prove(tmp_path, heard, {("video", "self"): 2, ("video", "cross"): 2})


def test_open_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = pytest.importorskip("open_clip")
    config = {
        "embed_dim": 24,
        "vision_cfg": {
            "image_size": 16, "patch_size": 8, "width": 48, "layers": 2, "head_width": 16,
        },
        "text_cfg": {
            "context_length": 7, "vocab_size": 30, "width": 32, "heads": 2, "layers": 3,
        },
    }  # fmt: skip
    model = randomized(open_clip.model.CLIP(**config))
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    heard = Listener(model, monkeypatch)
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    tokens = torch.randint(1, 30, (1, 7))
    with torch.no_grad():
        model.encode_image(torch.randn(1, 3, 16, 16))
        model.encode_text(tokens)
    prove(tmp_path, heard, {("vision", "self"): 2, ("text", "self"): 3})
    causal = {plan.stack: plan.causal for plan in wqk.open(open_checkpoint(tmp_path)).plans}
    assert causal == {"vision": False, "text": True}


def test_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    # As timm saves for the hub; a tiny architecture of its own.
    model = randomized(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    about = {"architecture": "vit_tiny_patch16_224.augreg_in21k", "num_features": 192}
    (tmp_path / "config.json").write_text(json.dumps(about))
    heard = Listener(model, monkeypatch)
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    prove(tmp_path, heard, {("vision", "self"): 2})


@pytest.mark.parametrize(
    ("name", "norm"), [("tiny", "RMSNorm"), ("tiny", "LayerNorm"), ("Gemma-tiny", "RMSNorm")]
)
def test_litgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, norm: str) -> None:
    litgpt = pytest.importorskip("litgpt")
    from litgpt.utils import save_config

    config = litgpt.Config(
        name=name, n_layer=2, n_embd=48, n_head=6, n_query_groups=2, head_size=8, block_size=16,
        vocab_size=30, padded_vocab_size=30, rotary_percentage=0.5, norm_class_name=norm,
        norm_qk=True, intermediate_size=64, bias=True, attention_scores_scalar=20,
    )  # fmt: skip
    model = randomized(litgpt.GPT(config))
    torch.save(model.state_dict(), tmp_path / "lit_model.pth")
    save_config(config, tmp_path)
    heard = Listener(model, monkeypatch)
    with torch.no_grad():
        model(torch.randint(0, 30, (1, 9)))
    prove(tmp_path, heard, {("decoder", "self"): 2})
    norms = {plan.query.input_norm for plan in wqk.open(open_checkpoint(tmp_path)).plans}
    kind = {"RMSNorm": "rms", "LayerNorm": "layer"}[norm]
    assert {(norm.kind, norm.offset) for norm in norms} == {(kind, float("Gemma" in name))}
    # Under its first releases' name, each key head lies with its queries, as LitGPT itself reads.
    older = tmp_path / "older"
    older.mkdir()
    save_config(config, older)
    weights = {}
    for key, value in model.state_dict().items():
        if ".attn.qkv." in key:
            query, keys, values = value.split((48, 16, 16))
            groups = [part.reshape(2, -1, 8, *value.shape[1:]) for part in (query, keys, values)]
            value = torch.cat(groups, dim=1).reshape(value.shape)
        weights[key.replace(".attn.qkv.", ".attn.attn.")] = value
    torch.save(weights, older / "lit_model.pth")
    again = litgpt.GPT(config)
    again.load_state_dict(dict(weights))
    name = "transformer.h.1.attn.qkv.weight"
    assert again.state_dict()[name].equal(model.state_dict()[name])
    assert wqk.same(tmp_path, older).same


@pytest.mark.parametrize("nested", [False, True])
def test_lightning(tmp_path: Path, nested: bool) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    import transformers

    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 30,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
    }  # fmt: skip

    class Module(lightning.LightningModule):
        def __init__(self, **hyper: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            own = {k: v for k, v in config.items() if k != "model_type"}
            self.model = transformers.LlamaModel(transformers.LlamaConfig(**own))

    module = Module(lr=0.1, model=config) if nested else Module(lr=0.1, **config)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=0
    )
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    module.model.save_pretrained(tmp_path / "plain")
    assert wqk.same(tmp_path / "plain", tmp_path / "last.ckpt").same
