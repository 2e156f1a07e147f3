"""Small models for the monitor's tests, and a loop that trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.small import sizes

import wqk

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

SIZES = sizes(32, 2, 4, vocab_size=20, intermediate_size=32)


def bert(seed: int = 0) -> PreTrainedModel:
    """Without dropout, so that equal batches give equal gradients."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertModel(config, add_pooling_layer=False)


def gpt2(seed: int = 0) -> PreTrainedModel:
    """Queries, keys and values in one tensor, stored (in, out)."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(seed)
    return GPT2Model(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=16))


def llama(seed: int = 0) -> PreTrainedModel:
    """Two query heads for each key head."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    return LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(step))
    loss = model(tokens).last_hidden_state[..., 0].square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    model: torch.nn.Module, path: Path, steps: int, first: int = 0, device: str | None = None
) -> wqk.Monitor:
    """A loop as a user would write it: watched at every step, and after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = wqk.Monitor(model, path, every=1, device=device)
    for step in range(first, steps):
        monitor(step)
        train_step(model, optimizer, step)
    monitor.look(steps)
    return monitor
