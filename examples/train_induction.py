"""Train two layers of attention, without MLPs, to continue repeated sequences of random tokens.

::

    python examples/train_induction.py induction --seed 0

The only way to know what follows is to find the token's last occurrence and to copy what came after
it: the model grows an induction head (Elhage et al. 2021, Olsson et al. 2022). The folder is a
checkpoint with the names of Llama's tensors, and ``training.csv``: loss, accuracy and composition
over the steps. About two minutes on one free core.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import wqk

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
TOKENS, BATCH, LEARNING_RATE, WARM_UP = 48, 32, 3e-3, 100
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}


class SelfAttention(nn.Module):
    """Causal attention with rotary positions and no biases."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
            nn.init.normal_(getattr(self, name).weight, std=0.6 * WIDTH**-0.5)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """What the heads write, (B, N, D)."""

        def heads(project: nn.Module) -> Tensor:
            return project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

        def turned(vectors: Tensor) -> Tensor:
            first, second = vectors.chunk(2, -1)
            return vectors * cosine + torch.cat((-second, first), -1) * sine

        query, key = turned(heads(self.q_proj)), turned(heads(self.k_proj))
        mixed = functional.scaled_dot_product_attention(
            query, key, heads(self.v_proj), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention on the normalized stream, added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=CONFIG["rms_norm_eps"])
        self.self_attn = SelfAttention()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """The stream after this layer."""
        return x + self.self_attn(self.input_layernorm(x), cosine, sine)


class Copier(nn.Module):
    """Embedding, two layers of attention, and the logits of the next token."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, WIDTH),
                "layers": nn.ModuleList(Layer() for _ in range(LAYERS)),
                "norm": nn.RMSNorm(WIDTH, eps=CONFIG["rms_norm_eps"]),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=0.6 * WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, N, V)."""
        width = WIDTH // HEADS
        rates = CONFIG["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(tokens.shape[1]), rates).repeat(1, 2)
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x, angles.cos(), angles.sin())
        return self.lm_head(self.model["norm"](x))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens (B, N), each row a random sequence of 6 to 24 again and again, and what is repeated.

    The first token of a repetition cannot be foreseen, and no fixed distance leads to the answer.
    """
    random = torch.Generator().manual_seed(seed)
    places = torch.arange(TOKENS).expand(BATCH, TOKENS)
    while True:
        length = torch.randint(6, 25, (BATCH, 1), generator=random)
        sequence = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=random)
        yield sequence.gather(1, places % length), places[:, 1:] > length


def train(seed: int, steps: int, every: int = 100) -> tuple[Copier, list[dict[str, float]]]:
    """A model and its history: loss, share of repeated tokens it foresees, composition."""
    torch.manual_seed(seed)
    model, history = Copier(), []
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, (tokens, repeated) in enumerate(batches(seed)):
        logits, following = model(tokens)[:, :-1], tokens[:, 1:]
        loss = functional.cross_entropy(logits[repeated], following[repeated])
        if step % every == 0:
            right = (logits.argmax(-1) == following)[repeated].float().mean()
            history.append({"step": step, "loss": loss.item(), "accuracy": right.item()})
            frame = wqk.compose(model).frame
            for kind in "qkv":
                scores = frame.filter(kind=kind)["score"]
                history[-1] |= {f"{kind}_largest": scores.max(), f"{kind}_median": scores.median()}
            print(history[-1], flush=True)
        if step == steps:
            return model, history
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / WARM_UP)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError("batches never end")


def main() -> None:
    """Train, and write the checkpoint and its history."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, history = train(options.seed, options.steps)
    options.folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.float16) for name, weight in model.state_dict().items()}
    save_file(weights, options.folder / "model.safetensors", {"format": "pt"})
    (options.folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    with (options.folder / "training.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(history[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({name: round(value, 6) for name, value in row.items()} for row in history)


if __name__ == "__main__":
    main()
