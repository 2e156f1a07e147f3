"""Names that wrappers leave in saved tensors: the model is known all the same."""

from __future__ import annotations

import re

import pytest
import torch
from tests.live.models import bert
from tests.live.test_monitor import same

import wqk
from wqk.checkpoints import open_checkpoint

PLACES = {
    "compiled": ["", "_orig_mod."],
    "parallel": ["", "module."],
    "compiled layers": ["layer.0.", "layer.0._orig_mod."],
    "parallel layers": ["layer.1.", "layer.1.module."],
    "sharded layers": ["layer.0.", "_fsdp_wrapped_module.layer.0._fsdp_wrapped_module."],
    "checkpointed layers": ["layer.1.", "layer.1._checkpoint_wrapped_module."],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_saved_names_with_wrappers_are_those_of_the_plain_model(tmp_path, place):
    model = bert()
    model.config.save_pretrained(tmp_path)
    before, after = place
    state = model.state_dict()
    wrapped = {re.sub(f"^(.*?){before}", rf"\1{after}", n, count=1): t for n, t in state.items()}
    assert wrapped.keys() != state.keys()
    torch.save(wrapped, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).tensors().keys() == state.keys()
    table = wqk.scan(tmp_path)
    assert set(table.frame["family"]) == {"bert"}
    assert same(table, wqk.scan(model))


def test_an_average_beside_the_model_keeps_its_names() -> None:
    state = bert().state_dict()
    tensors = state | {f"module.{name}": tensor * 2 for name, tensor in state.items()}
    assert open_checkpoint(tensors).tensors().keys() == tensors.keys()


def test_layers_compiled_by_themselves_are_known_and_can_be_set() -> None:
    plain, model = bert(), bert()
    for number, layer in enumerate(model.encoder.layer):
        model.encoder.layer[number] = torch.compile(layer, backend="eager")
    assert set(wqk.scan(model).frame["family"]) == {"bert"}
    for network in (plain, model):
        wqk.initialize_(network, "symmetric")
    assert same(wqk.scan(model), wqk.scan(plain))
