"""Results of verbs: a sentence, a table, plain values for JSON, and views in a notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests import small

import wqk
from wqk._console import Result
from wqk.checkpoints.modules import StateDict
from wqk.live.logits import BlockLogits, Logits

ENCODER, DECODER, INDUCTION = map(wqk.demo_model, ("encoder", "decoder", "induction"))
llama = partial(small.llama, head_width=4, width=12, sides="qkvo", norms=True, name="llama")


def negated(model: StateDict) -> StateDict:
    """The model with the keys of its last layer negated."""
    model._arrays["model.layers.1.self_attn.k_proj.weight"] *= -1
    return model


RESULTS: dict[str, Callable[[], Any]] = {
    "scan": lambda: wqk.scan(ENCODER),
    "diff": lambda: wqk.diff(ENCODER, ENCODER),
    "the same": lambda: wqk.same(ENCODER, ENCODER),
    "not the same": lambda: wqk.same(llama(), negated(llama())),
    "show": lambda: wqk.show(ENCODER, layer=2, head=1),
    "coupling": lambda: wqk.show(ENCODER, layer=2, coupling=True),
    "kin": lambda: wqk.kin(ENCODER, DECODER),
    "compose": lambda: wqk.compose(INDUCTION),
    "explain": lambda: wqk.explain(ENCODER),
    "logits": lambda: wqk.logits(model := small.running(), model.dummy_inputs["input_ids"] % 9),
    "no numbers": lambda: Logits({("decoder", "self", 0): BlockLogits(*[np.full(1, np.nan)] * 6)}),
    "initialize_": lambda: wqk.initialize_(small.running(), "symmetric"),
    "clip_": lambda: wqk.clip_(small.running(), 1.0, logits={(0, 0): 3.0, (0, 1): np.inf}),
    "parts": lambda: wqk.parts(small.running(), tokens=np.arange(32).reshape(4, 8) % 9, draws=1),
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_displays_itself(name):
    result = RESULTS[name]()
    assert isinstance(result.frame, pl.DataFrame)
    assert len(result.frame)
    values = result.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert len(repr(result)) < 8000
    assert str(result) == repr(result)
    assert not isinstance(result, Result) or len(result.sentence) < 400
    page = result._repr_html_()
    assert page.startswith("<")
    picture = result._repr_png_() or b""
    assert picture.startswith(b"\x89PNG")
    drawn = {"scan", "not the same", "show", "coupling", "compose", "parts"}
    assert ("<img" in page) == (name in drawn)
    if name in drawn:  # twice as fine as it is wide, for a screen
        width = re.search(r'<img[^>]* width="(\d+)"', page)[1]
        assert int.from_bytes(picture[16:20], "big") == 2 * int(width)
