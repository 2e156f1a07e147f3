"""Files of llama.cpp's own converter, and their readings.

The readings of `llama-cpp.jsonl` were compared with llama.cpp itself: for each of these files, the
attention that llama.cpp computed is that of the reading, to float32's rounding (docs/log.md).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.families.completeness import omissions
from tests.families.converting import DATA, build, convert, jobs, model_of, reading

import wqk
from wqk.checkpoints.gguf import architectures
from wqk.families import families, find_family
from wqk.families.layouts import NORMS

LINES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("line", LINES, ids=lambda line: str(line["name"]))
def test_a_conversion_is_read_as_llama_cpp_runs_it(line: dict[str, object]) -> None:
    model = model_of(line)
    assert reading(model) == line["read"]
    assert omissions(model.checkpoint, find_family(model.checkpoint)) == []


def test_every_architecture_is_read_or_refused_with_its_reason() -> None:
    listed = [kind for family in families().values() for kind in family.model_types]
    expected = [f"gguf-{name}" for name in architectures()]
    assert sorted(kind for kind in listed if kind.startswith("gguf-")) == sorted(expected)
    assert len(expected) > 150


def test_families_are_of_what_the_code_does_by_architecture() -> None:
    for name, row in architectures().items():
        family = next(f for f in families().values() if f"gguf-{name}" in f.model_types)
        for rule in family.attention:
            facts = {
                "norm": rule.input_norm_kind if row["norm"] in NORMS else row["norm"],
                "head_norm": rule.norm if "head_norm" in row else None,
                "after": "{previous}" in "".join(rule.input_norm) or None,
                "latent": rule.layout == "latent" or None,
                "gated": rule.layout == "gated" or None,
                "norm_after_rotary": bool(rule.rotary and rule.rotary.before_norm) or None,
                "bare_head_norm": not rule.norm_gain or None,
            }
            assert rule.between or facts == {key: row.get(key) for key in facts}, name


def test_a_file_that_says_that_no_layer_has_attention_is_refused_for_that() -> None:
    """Granite's hybrids, converted with names of kinds of layers that the converter lacks."""
    key = "granitehybrid.attention.head_count_kv"
    line = next(line for line in LINES if key in line["metadata"])
    metadata = line["metadata"] | {key: [0 for _ in line["metadata"][key]]}
    with pytest.raises(wqk.errors.CheckpointError, match=r"attn_q.weight' is there, but .* zeros"):
        model_of(line | {"metadata": metadata})


# What llama.cpp does otherwise than transformers, in words of the verdict.
OTHERWISE = {
    # the share is not converted
    "BambaForCausalLM": "rotated dimensions",
    # it has one only at 64 layers
    "Exaone4ForCausalLM": "window: 6 against none",
    "Exaone4_5_ForConditionalGeneration": "window: 6 against none",
    # query_pre_attn_scalar is not in the file
    "Gemma3ForConditionalGeneration": "scaled by 3.266",
    # half of them, where the file is silent
    "Glm4vForConditionalGeneration": "rotated dimensions",
    "GlmOcrForConditionalGeneration": "rotated dimensions",
    # the converter looks for another key
    "GlmForCausalLM": "epsilon of input norms",
    # YaRN's bounds are always whole
    "GptOssForCausalLM": "truncate",
    # that of single layers is not converted
    "GraniteSWAForCausalLM": "rotary base",
    # of the pattern of layers only its length counts
    "LagunaForCausalLM": "rotated dimensions",
    # whatever the file says
    "Llama4ForCausalLM": "chunk of 6 against chunk of 8192",
    "Llama4ForConditionalGeneration": "chunk of 6 against chunk of 8192",
    # llama.cpp's Llama has none
    "MistralForCausalLM": "window: 6 against none",
    "SolarOpenForCausalLM": "rotated dimensions",
}
# What cannot be compared, in words of the error.
REFUSED = {
    "HrmTextForCausalLM": "layers are applied in turns (HRM)",
    "MuseGlimmerAssistantModel": "a draft model",
    "Qwen4ExpForCausalLM": "compressed or pooled",
    "Qwen4ExpForConditionalGeneration": "compressed or pooled",
}


def assert_equal_mixers(folder: Path, path: Path) -> None:
    """Forms of linear attention and state spaces are equal where both files are read."""
    original, converted = wqk.open(folder), wqk.open(path)
    places = {(plan.kind, plan.layer) for plan in converted.mixers}
    for plan in original.mixers:
        if (plan.kind, plan.layer) in places:
            blocks = [m.block(plan.layer, kind=plan.kind) for m in (original, converted)]
            forms = [b.at(fold_norm=plan.query.input_norm is not None).dense() for b in blocks]
            np.testing.assert_allclose(*forms, atol=1e-6 * np.abs(forms[0]).max())


@pytest.mark.campaign
def test_conversions_are_the_same_as_their_originals(tmp_path: Path) -> None:
    """Every class that transformers has and llama.cpp's converter knows, with its variants.

    A difference is one that llama.cpp makes, and has its name; no conversion is a guess.
    """
    sources = os.environ.get("LLAMA_CPP")
    if not sources:
        pytest.skip("LLAMA_CPP does not name a folder with llama.cpp's sources")
    outcomes, wrong = dict[str, str](), list[str]()
    for name, variant, change in jobs(Path(sources)):
        folder = tmp_path / f"{name}-{variant}"
        path = folder.with_suffix(".gguf")
        try:
            build(name, change, folder)
            convert(folder, path)
        except Exception:
            continue
        try:
            assert_equal_mixers(folder, path)
            comparison = wqk.same(folder, path)
        except wqk.WqkError as error:
            outcomes[folder.name] = f"refused: {error!s:.200}"
            wrong += [folder.name] * (REFUSED.get(name, "\0") not in str(error))
            continue
        finally:
            shutil.rmtree(folder)
            path.unlink()
        assert not any("guessed" in note for note in comparison.notes), name
        outcomes[folder.name] = "same" if comparison.same else comparison.sentence
        # Towers for pictures and sound are files of their own.
        tower = "mmproj" in comparison.sentence and all(block.same for block in comparison.blocks)
        if not (comparison.same or tower or OTHERWISE.get(name, "\0") in comparison.sentence):
            wrong.append(folder.name)
    (tmp_path / "outcomes.json").write_text(json.dumps(outcomes, indent=1))
    assert wrong == []
    assert sum(outcome == "same" for outcome in outcomes.values()) > 100, outcomes
