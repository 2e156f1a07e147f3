"""Objectives: what is hidden, what is asked, and the loss against the model's own full logits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.training.making import SPECIAL, VOCABULARY, tiny_model

from wqk_lab.training.objectives import (
    IGNORED,
    Objective,
    RowSelection,
    Task,
    loss_of,
)
from wqk_lab.training.recipe import OBJECTIVES

MASK = SPECIAL["mask"]
PADDING = SPECIAL["padding"]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def task_of(
    name: str, blocks: torch.Tensor, seed: int, share: float = 0.3, corruption: str = "bert"
) -> Task:
    objective = Objective(name, share, corruption, MASK, VOCABULARY)
    return objective.task(blocks, objective.draw(*blocks.shape, draw(seed)))


def some_blocks(batch: int, block: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (batch, block), generator=draw(seed))


@given(
    name=st.sampled_from(["masked", "masked-next"]),
    batch=st.integers(1, 6),
    block=st.integers(4, 30),
    share=st.floats(0.13, 0.6),
    corruption=st.sampled_from(["bert", "mask"]),
    seed=st.integers(0, 1000),
)
def test_equally_many_tokens_are_asked_in_every_block(name, batch, block, share, corruption, seed):
    blocks = some_blocks(batch, block, seed)
    task = task_of(name, blocks, seed, share, corruption)
    shift = 1 if name == "masked-next" else 0
    asked = torch.zeros(batch * block, dtype=torch.bool)
    asked[task.rows + shift] = True
    asked = asked.view(batch, block)
    assert (asked.sum(1) == round(share * block)).all()
    assert torch.equal(blocks.flatten()[task.rows + shift], task.targets)
    assert torch.equal(task.inputs[~asked], blocks[~asked])
    if corruption == "mask":
        assert (task.inputs[asked] == MASK).all()
    assert not (shift and asked[:, 0].any())


def test_causal_asks_each_next_token() -> None:
    blocks = some_blocks(3, 5)
    task = task_of("causal", blocks, 0)
    assert task.inputs is blocks
    assert task.rows.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert torch.equal(task.targets, blocks[:, 1:].flatten())


def test_corruption_is_bert_s() -> None:
    task = task_of("masked", torch.full((400, 100), 7), 3, 0.5)
    shown = task.inputs.flatten()[task.rows]
    share = shown.bincount(minlength=VOCABULARY) / len(shown)
    anything = 0.1 / VOCABULARY
    tolerance = 4 * (0.8 * 0.2 / len(shown)) ** 0.5
    assert abs(share[MASK] - (0.8 + anything)) < tolerance
    assert abs(share[7] - (0.1 + anything)) < tolerance
    unrelated = torch.cat([share[:MASK], share[MASK + 1 : 7], share[8:]])
    assert (unrelated - anything).abs().max() < 4 * (anything / len(shown)) ** 0.5


def test_every_position_is_as_likely_to_be_asked() -> None:
    for name, first in (("masked", 0), ("masked-next", 1)):
        task = task_of(name, some_blocks(5000, 10), 1, corruption="mask")
        positions = (task.inputs == MASK).sum(0)
        assert positions[:first].sum() == 0
        expected = 15_000 / (10 - first)
        assert (positions[first:] - expected).abs().max() < 4 * expected**0.5


@given(name=st.sampled_from(OBJECTIVES), parts=st.sampled_from([1, 2, 3, 6]))
def test_rows_of_a_batch_s_draws_make_parts_of_its_task(name: str, parts: int) -> None:
    blocks, objective = some_blocks(6, 8), Objective(name, 0.3, "bert", MASK, VOCABULARY)
    draws = objective.draw(6, 8, draw(2))
    task, share = objective.task(blocks, draws), 6 // parts
    pieces = []
    for start in range(0, 6, share):
        part = slice(start, start + share)
        pieces.append(objective.task(blocks[part], tuple(drawn[part] for drawn in draws)))
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), task.inputs)
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), task.targets)
    rows = [piece.rows + number * share * 8 for number, piece in enumerate(pieces)]
    assert torch.equal(torch.cat(rows), task.rows)


ENCODERS = ("pre", "post", "modernbert")
DECODERS = ("pre", "post", "gpt2", "llama")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("masked", architecture) for architecture in ENCODERS]
    + [*itertools.product(("causal", "masked-next"), DECODERS)],
)
def test_logits_of_the_asked_rows_alone_give_the_same_loss(name: str, architecture: str) -> None:
    mode = "encoder" if name == "masked" else "decoder"
    model = tiny_model(architecture, mode=mode, objective=name).eval()
    blocks = some_blocks(8, 16)
    task = task_of(name, blocks, 5)
    # From the logits of all positions, without our hook's help.
    logits = model(input_ids=task.inputs).logits.flatten(0, 1).double()
    expected = -logits.log_softmax(1)[task.rows, task.targets].mean()
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    seen = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1]))
    loss = loss_of(model, RowSelection(model), task)
    loss.backward()
    assert seen == [(1, len(task.rows))]  # and no other row reaches the head
    hook.remove()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert model(input_ids=blocks).logits.shape == (*blocks.shape, VOCABULARY)


@pytest.mark.parametrize("name", ["causal", "masked-next"])
def test_the_loss_is_that_of_transformers_shifted_labels(name: str) -> None:
    model = tiny_model(mode="decoder").eval()
    task = task_of(name, some_blocks(4, 16), 4)
    labels = torch.full((4 * 16,), -100)
    labels[task.rows + 1] = task.targets
    model.config.loss_type = "ForCausalLMLoss"
    expected = model(input_ids=task.inputs, labels=labels.view(4, 16)).loss.item()
    assert loss_of(model, RowSelection(model), task).item() == pytest.approx(expected, abs=1e-6)


def padded_blocks(lengths: list[int], block: int) -> torch.Tensor:
    blocks = some_blocks(len(lengths), block)
    return torch.where(torch.arange(block) < torch.tensor(lengths)[:, None], blocks, PADDING)


@given(
    name=st.sampled_from(OBJECTIVES),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    share=st.floats(0.1, 0.6),
    corruption=st.sampled_from(["bert", "mask"]),
)
def test_padding_is_neither_changed_nor_predicted(name, lengths, share, corruption):
    blocks = padded_blocks(lengths, 20)
    objective = Objective(name, share, corruption, MASK, VOCABULARY, PADDING)
    task = objective.task(blocks, objective.draw(*blocks.shape, draw(1)))
    assert (task.visible == (blocks != PADDING)).all()
    assert (task.inputs[~task.visible] == PADDING).all()
    counted = task.targets != IGNORED
    assert (task.targets[counted] != PADDING).all()
    ahead = 0 if name == "masked" else 1
    asked = task.rows[counted] + ahead
    assert (blocks.flatten()[asked] == task.targets[counted]).all()
    able = [length - ahead for length in lengths]
    for row, length in enumerate(able):
        count = int(((asked // 20) == row).sum())
        expected = length if name == "causal" else min(length, max(1, round(share * length)))
        assert count in (expected, min(expected, round(share * 20)))


@pytest.mark.parametrize("mode", ["encoder", "decoder"])
def test_the_loss_of_padded_documents_is_that_of_each_alone(mode: str) -> None:
    lengths, block = [5, 12, 9], 12
    model = tiny_model(mode=mode, block=block).eval()
    blocks = padded_blocks(lengths, block)
    name = "masked" if mode == "encoder" else "causal"
    objective = Objective(name, 0.3, "mask", MASK, VOCABULARY, PADDING)
    task = objective.task(blocks, objective.draw(*blocks.shape, draw(2)))
    losses = []
    selection = RowSelection(model)
    with torch.no_grad():
        together = loss_of(model, selection, task)
        for row, target in zip(task.rows.tolist(), task.targets.tolist(), strict=True):
            if target != IGNORED:
                number, position = divmod(row, block)
                alone = task.inputs[number : number + 1, : lengths[number]]
                logits = model(input_ids=alone).logits[0, position]
                losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(target)))
    assert len(losses) == int(task.count)
    torch.testing.assert_close(together, torch.stack(losses).mean(), rtol=0, atol=1e-5)
