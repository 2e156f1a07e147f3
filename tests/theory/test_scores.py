"""Proposition 2.1 on tiny models, and checks of the checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.theory.tiny import VARIETY, batch_for, built

from wqk.attention import attention_plans
from wqk.checkpoints import open_checkpoint
from wqk.errors import TheoryError
from wqk.theory.scores import check_scores

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", VARIETY)
def test_attention_is_made_of_bilinear_forms(name: str) -> None:
    with built(name) as model:
        checks = check_scores(model, batch_for(model, 1, padded=True))
        plans = {(p.stack, p.kind, p.layer): p for p in attention_plans(open_checkpoint(model))}
    for check in checks:
        plan = plans[check.stack, check.kind, check.layer]
        assert max(check.form, check.heads, check.mixing or 0) < 1e-13
        assert (check.attention is None) == bool(plan.position or plan.sinks)
        assert (check.attention or 0) < 1e-12
        assert check.order < 1e-12 or plan.position
        assert check.convexity < 1e-12 or plan.sinks
        if plan.rotary:
            assert check.order_plain < 0.95


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_without_biases_and_positions_the_form_alone_orders(name: str) -> None:
    with built(name) as model:
        batch = batch_for(model)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("query.bias", "key.bias", "c_attn.bias")):
                    parameter.zero_()
        assert [c.order_plain for c in check_scores(model, batch)] == [1.0, 1.0]


def test_the_bias_of_the_keys_alone_does_not_matter() -> None:
    # q_i · b is the same for all keys j; b · k_j is not.
    with built("bert") as model:
        batch = batch_for(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("query.bias"):
                    parameter.zero_()
        assert [c.order_plain for c in check_scores(model, batch)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("part", "seen"), [("attention", "attention"), ("value", "mixing"), ("order", "order")]
)
def test_what_is_wrong_is_seen(part: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers that are not the model's: weights are changed between the pass and the comparison.
    import wqk.theory.scores as module

    with built("bert") as model:
        load, read = module.load_attention, module._values

        def other(checkpoint: Any, plan: Any) -> Any:
            found = load(checkpoint, plan)
            found.query.stored_weight[...] = np.roll(found.query.stored_weight, 1, axis=0)
            return found

        def others(checkpoint: Any, plan: Any) -> Any:
            weight, bias = read(checkpoint, plan)  # type: ignore[misc]
            return np.roll(weight, 1, axis=0), bias

        if part == "value":
            monkeypatch.setattr(module, "_values", others)
        else:
            monkeypatch.setattr(module, "load_attention", other)
        checks = check_scores(model, batch_for(model))
    assert all(getattr(check, seen) > 1e-3 for check in checks)


def test_what_is_no_bilinear_form_is_refused() -> None:
    with built("qwen3") as model, pytest.raises(TheoryError, match="normalized token by token"):
        check_scores(model, batch_for(model))


def test_a_real_model(shared: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(shared / "checkpoints/stories260k")
    tokens = torch.randint(3, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    for check in check_scores(model, {"input_ids": tokens}):
        assert max(check.form, check.heads, check.mixing, check.attention, check.order) < 1e-4
