"""Attention logits of other libraries' own modules, next to the input of their softmax.

``python -m benchmarks.libraries [NAME...]`` builds a tiny random model with each library that is
installed, runs it in float64, and prints a row: heads, and the largest difference between the
largest logits and entropies that `wqk.logits` measured and those of the softmax's own input.
PyTorch's kernels are run as plain operations for the reference (`SDPBackend.MATH`), and as they are
for the measurement. nanoGPT and nanochat are no packages: ``NANOGPT`` and ``NANOCHAT`` are folders
with their repositories.

Axes: H heads.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import wqk
from wqk.errors import WqkError
from wqk.live.observing import slow_path
from wqk.live.running import double_precision

SEQUENCES, TOKENS = 2, 12
HIDDEN = -5e3  # scores below are those of hidden pairs


class Case(NamedTuple):
    """A model and what it is called with."""

    model: Any
    batch: Any


class Softmaxes(TorchDispatchMode):  # type: ignore[misc]
    """Records the largest score and the mean entropy of each head, of every softmax of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[np.ndarray] = []
        self.entropy: list[np.ndarray] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_softmax = func._schema.name in ("aten::_softmax", "aten::_safe_softmax")
        if is_softmax and args[0].ndim in (3, 4):
            scores, weights = (
                tensor if tensor.ndim == 4 else tensor.unflatten(0, (SEQUENCES, -1))
                for tensor in (args[0], output)
            )
            visible = scores.masked_fill(scores < HIDDEN, -torch.inf)
            rows = torch.special.entr(weights).sum(-1)
            self.largest.append(visible.amax((0, 2, 3)).numpy())
            self.entropy.append(rows.mean((0, 2)).numpy())
        return output


def tokens(vocabulary: int) -> torch.Tensor:
    """Two sequences of random tokens."""
    return torch.randint(
        vocabulary, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0)
    )


def nanogpt() -> Case:
    """Model of nanoGPT."""
    sys.path.insert(0, os.environ["NANOGPT"])
    from model import GPT, GPTConfig

    config = GPTConfig(block_size=32, vocab_size=50, n_layer=2, n_head=4, n_embd=32, dropout=0.0)
    return Case(GPT(config), tokens(50))


def nanochat() -> Case:
    """Model of nanochat, with sliding windows and grouped heads."""
    sys.path.insert(0, os.environ["NANOCHAT"])
    from nanochat import gpt

    gpt.COMPUTE_DTYPE = torch.float64
    sizes = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64}
    model = gpt.GPT(gpt.GPTConfig(sequence_len=32, vocab_size=64, **sizes))
    model.init_weights()
    return Case(model, tokens(64))


def torchtitan() -> Case:
    """Llama 3 of torchtitan, with PyTorch's kernel."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import _debugmodel

    model = _debugmodel("flex").build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention.inner_attention = ScaledDotProductAttention(None)
        layer.attention.inner_attention.sdpa_backends = [SDPBackend.MATH]
    return Case(model, tokens(2048))


def litgpt() -> Case:
    """LitGPT's ``GPT`` as a small Llama."""
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_head": 4, "n_query_groups": 2, "n_embd": 32, "block_size": 32}
    config = Config.from_name("Llama-3.2-1B", padded_vocab_size=64, head_size=8, **sizes)
    return Case(GPT(config), tokens(64))


def x_transformers() -> Case:
    """x-transformers' decoder with rotary positions and normed queries and keys."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    return Case(TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers), tokens(50))


def timm() -> Case:
    """Vision transformer of timm."""
    from timm import create_model

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return Case(create_model("vit_tiny_patch16_224", **sizes), torch.randn(2, 3, 32, 32).double())


def open_clip() -> Case:
    """OpenCLIP's two towers."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=TOKENS, vocab_size=50, width=32, heads=4, layers=2)
    return Case(CLIP(32, vision, text), (torch.randn(2, 3, 32, 32).double(), tokens(50)))


def diffusers(name: str) -> Callable[[], Case]:
    """Return the maker of one of diffusers' transformers."""

    def make() -> Case:
        from benchmarks.diffusion import MODELS

        model, batch = MODELS[name]()
        return Case(model, batch)

    return make


def transformer_lens() -> Case:
    """TransformerLens 4's bridge around a GPT-2 of transformers."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)).double()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(
            folder, hf_model=model, device="cpu", dtype=torch.float64
        )
    return Case(bridge, tokens(50))


def fsmt() -> Case:
    """Build the translation model of fairseq (FSMT), as transformers has it."""
    from transformers import FSMTConfig, FSMTModel

    sides = ("encoder", "decoder")
    sizes = {f"{side}_layers": 2 for side in sides} | {f"{side}_ffn_dim": 32 for side in sides}
    heads = {f"{side}_attention_heads": 4 for side in sides}
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=50, tgt_vocab_size=50, d_model=32, **sizes, **heads
    )
    return Case(FSMTModel(config), {"input_ids": tokens(50).clip(4)})


LIBRARIES: dict[str, Callable[[], Case]] = {
    "nanoGPT": nanogpt,
    "nanochat": nanochat,
    "torchtitan": torchtitan,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
    "timm": timm,
    "open_clip_torch": open_clip,
    "diffusers Flux": diffusers("flux"),
    "diffusers SD 3": diffusers("sd3"),
    "diffusers Qwen-Image": diffusers("qwen"),
    "diffusers PixArt": diffusers("pixart"),
    "diffusers Wan": diffusers("wan"),
    "transformer-lens": transformer_lens,
    "FSMT": fsmt,
}


def called(model: Any, batch: Any) -> None:
    """Call a model with a batch: arguments by name, in order, or a single one."""
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, tuple):
        model(*batch)
    else:
        model(batch)


def farthest(measured: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Largest distance of a number, one for each head, from the nearest of the other set.

    A joint attention is measured once for each of its streams, so that counts may differ.
    """
    gaps = np.abs(np.concatenate(measured)[:, None] - np.concatenate(reference))
    return float(max(gaps.min(0).max(), gaps.min(1).max()))


def compared(name: str) -> SimpleNamespace:
    """Measure the logits of one library's model, and compare them with those of its softmaxes."""
    torch.manual_seed(0)
    with double_precision():
        model, batch = LIBRARIES[name]()
        model = model.double().eval()
        for parameter in model.parameters():  # logits of tiny models are small
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        softmaxes = Softmaxes()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), slow_path(), softmaxes:
            called(model, batch)
        logits = wqk.logits(model, batch)
    blocks = list(logits.blocks.values())
    return SimpleNamespace(
        heads=sum(len(block.max_logit) for block in blocks),
        reference=sum(map(len, softmaxes.largest)),
        named=sum(not isinstance(block, str) for block in logits.blocks),
        blocks=len(blocks),
        scores=len(logits.scores),
        logit=farthest([block.max_logit for block in blocks], softmaxes.largest),
        entropy=farthest([b.attention_entropy for b in blocks], softmaxes.entropy),
        largest=logits.largest,
        missing=dict(logits.missing),
    )


def main() -> None:
    """Print a row for each library."""
    warnings.simplefilter("ignore")
    print("| library | version | blocks (named) | heads | largest | logits differ | entropies |")
    print("|:--|:--|--:|--:|--:|--:|--:|")
    for name in sys.argv[1:] or LIBRARIES:
        package = name.split()[0]
        try:
            row = compared(name)
        except (ImportError, KeyError, WqkError) as error:
            print(f"| {name} | not run: {type(error).__name__}: {str(error)[:150]} |")
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "–"
        print(
            f"| {name} | {version} | {row.blocks} ({row.named}) | {row.heads} of {row.reference} | "
            f"{row.largest:.3g} | {row.logit:.1e} | {row.entropy:.1e} |",
            *row.missing.items(),
        )


if __name__ == "__main__":
    main()
