"""Every family, proven: a random model attends with the forms read from its saved weights."""

from __future__ import annotations

from typing import Any

import pytest
from tests.families.architectures import ALL
from tests.families.completeness import omissions
from tests.families.proving import (
    prove_attention,
    prove_live,
    prove_norms,
    prove_values_and_outputs,
    prove_variety,
    save,
)

from wqk.checkpoints import open_checkpoint
from wqk.families import find_family


@pytest.fixture(params=ALL, ids=lambda architecture: architecture.name, scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An architecture, its model, and the folder that the model is saved in."""
    folder = tmp_path_factory.mktemp(request.param.name)
    return request.param, save(request.param, folder), folder


def test_the_model_attends_with_the_forms_that_are_read(saved: Any) -> None:
    architecture, _, folder = saved
    prove_attention(architecture, folder)


def test_the_live_module_holds_the_same_blocks(saved: Any) -> None:
    prove_live(*saved)


def test_values_and_outputs_are_there_and_every_head_is_another(saved: Any) -> None:
    architecture, model, folder = saved
    checkpoint = open_checkpoint(folder)
    left_out = omissions(checkpoint, find_family(checkpoint))
    # Older configurations leave out keys that the family has.
    assert [line for line in left_out if not (architecture.hub and "stray" in line)] == []
    prove_values_and_outputs(model, folder)
    prove_variety(folder)


def test_the_named_norms_feed_queries_and_keys(saved: Any) -> None:
    architecture, _, folder = saved
    prove_norms(architecture, folder)


def test_no_two_architectures_have_one_name() -> None:
    names = [architecture.name for architecture in ALL]
    assert len(names) == len(set(names))
