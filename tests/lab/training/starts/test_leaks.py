"""A start changes no mask: what comes later never moves an earlier logit, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.families.architectures.architecture import BERT, GROUPED, TOKENS

import wqk
from wqk_lab.training.initializations import STARTS

GPT2 = TOKENS | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
DECODERS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", GROUPED),
    "gpt-neox": ("GPTNeoXForCausalLM", BERT),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "bert": ("BertLMHeadModel", BERT | {"is_decoder": True}),
}


def decoder(name: str, implementation: str) -> Any:
    kind, config = DECODERS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    settings = config | {"initializer_range": 0.3, "attn_implementation": implementation}
    return model_class(model_class.config_class(**settings)).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_no_future_token_moves_an_earlier_logit(name: str, implementation: str) -> None:
    model = decoder(name, implementation)
    assert model.config._attn_implementation == implementation
    tokens = torch.randint(3, 61, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (tokens[:, 9:] - 3 + 7) % 58 + 3
    for kind in STARTS:
        wqk.initialize_(model, STARTS[kind], seed=0)
        with torch.no_grad():
            logits, others = (model(input_ids=ids).logits for ids in (tokens, changed))
        assert (logits[:, :9] - others[:, :9]).abs().max() == 0, kind
        assert (logits[:, 9:] - others[:, 9:]).abs().max() > 1e-3
