"""Options change what a command prints, one at a time."""

from __future__ import annotations

import pytest
from tests.command import ENCODER, run

import wqk

DECODER, INDUCTION = (str(wqk.demo_model(name)) for name in ("decoder", "induction"))
SHOWN = [
    ("scan ENCODER --spectrum", "effective rank"),
    ("scan DECODER --ceiling", "No ceiling (decoder)"),
    ("scan ENCODER --csv", "checkpoint,revision,step,model_type"),
    ("demo --csv", "checkpoint,revision,step,model_type"),
    ("survey ENCODER --out scores --csv", "checkpoint,revision,step,model_type"),
    ("explain ENCODER --csv", "stack,kind,layers,role,tensor"),
    ("show ENCODER --layer 0 --csv", "place,row_norms,column_norms"),
    ("compose INDUCTION --csv", "checkpoint,revision,step,kind,writer_stack"),
    ("diff ENCODER ENCODER --csv", "reference,reference_revision,reference_step"),
    ("same ENCODER ENCODER --csv", "stack,kind,layer,same,distance"),
    ("kin ENCODER ENCODER --csv", "stack,layer,reference_stack,reference_layer"),
    ("lab atlas --modality vision --json", '"modality": "vision"'),
]


@pytest.mark.parametrize(("line", "text"), SHOWN, ids=[line for line, _ in SHOWN])
def test_an_option_changes_what_is_printed(line, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = {"ENCODER": ENCODER, "DECODER": DECODER, "INDUCTION": INDUCTION}
    arguments = [models.get(word, word) for word in line.split()]
    assert text in run(*arguments, width=120).stdout


def test_atlas_leaves_out_rows_whose_numbers_are_doubted() -> None:
    all_rows, sound = (
        run("lab", "atlas", *options, width=160).stdout for options in ([], ["--sound"])
    )
    assert 0 < sound.count("\n") < all_rows.count("\n")
