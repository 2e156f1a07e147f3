"""Negative controls: a family with a mistake in it is refused, or does not agree with the model."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from tests.families.architectures import NAMED
from tests.families.proving import edit_tensors, save

import wqk
from wqk.attention.block import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, WqkError
from wqk.families import find_family
from wqk.forms import BilinearForm
from wqk.live.verification import verify

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION = "[[attention]]\n"


def added(line: str) -> dict[str, str]:
    """A line that no table of attention has."""
    return {ATTENTION: f"{ATTENTION}{line}\n"}


def swapped(one: str, other: str) -> dict[str, str]:
    return {one: other, other: one}


# A mistake, the model that shows it, and parts of its family's file: as they are, and as they would
# be wrong.
WRONG: list[tuple[str, str, dict[str, str]]] = [
    # Queries, keys and heads.
    ("queries for keys", "bert", swapped("self.query", "self.key")),
    ("values for keys", "bert", {"self.key": "self.value"}),
    ("too few heads", "bert", added('heads = "wrong"\ndefaults = { wrong = 2 }')),
    ("too many heads", "bert", added('heads = "wrong"\ndefaults = { wrong = 8 }')),
    # Fused tensors.
    ("grouped as sectioned", "gpt-neox", {"grouped": "sectioned"}),
    ("sectioned as grouped", "modernbert", {"sectioned": "grouped"}),
    ("heads of a fused tensor", "deberta", {'"grouped"': '"sectioned"'}),
    ("number of blocks", "codegen", {'blocks = "4"': 'blocks = "2"'}),
    # Rotary positions.
    ("rotary order", "llama", {'"half"': '"interleaved"'}),
    ("half-split positions", "deepseek-v2", {'"interleaved"': '"half"'}),
    ("rotary width", "gptj", {'width = "rotary_dim"': ""}),
    ("rotary base", "gpt-neox-hub", {'base = "rotary_emb_base"': ""}),
    ("global base in windows", "gemma3-text-hub", {"local_base": "base"}),
    ("turning the usual way", "nanochat", {"reversed = true": ""}),
    ("positions without windows", "cohere2", {"windowed_only = true": ""}),
    ("rotary positions beside linear biases", "falcon-alibi", {'only_if = "not alibi"': ""}),
    # What multiplies a score, and what cuts it off.
    ("a scale where there is none", "t5", {"scale = []": ""}),
    ("no scale", "bert", added("scale = []")),
    ("no scale by layer", "gpt2", {"layer_number ** -1": "1"}),
    ("no scale by terms", "deberta-v2", {', "score_terms ** -0.5"': ""}),
    ("no scale of its own", "granite", {'scale = "attention_multiplier|head_width ** -0.5"': ""}),
    ("no stretch in the scale", "deepseek-v3-yarn", {'"rotary_stretch ** 2"': "1"}),
    ("no temperature", "swinv2", {"temperature =": "# temperature ="}),
    ("no cosine", "swinv2", {"norm_gain = false": ""}),
    ("no clipping", "mpt-clipped", {'clip = "attn_config.clip_qkv"': ""}),
    # What is added to a score.
    ("no position bias", "t5", {'position = "relative"': ""}),
    ("linear biases", "llama", added('position = "alibi"')),
    ("no linear biases", "bloom", {'position = "alibi"': ""}),
    ("linear biases without their scale", "falcon-alibi", {'"scaled alibi"': '"alibi"'}),
    # Norms of queries and keys.
    ("gain stored from 1", "qwen3", added("norm_offset = 1.0")),
    ("gain as it is stored", "gemma3-text", {"\nnorm_offset = 1.0": ""}),
    ("kind of norm", "phi-norms", {'\nnorm = "layer"': ""}),
    ("norm over all heads", "stablelm-norms", {'norm_over = "head"': ""}),
    ("norms of one head", "stablelm-norms", {".norms.{head}": ".norms.0"}),
    ("norms of cross-attention", "mllama", {"query_norm = [": "query_bias = ["}),
    ("no sinks", "gpt-oss", {"self_attn.sinks": "self_attn.none"}),
    # Which tokens are seen.
    ("not causal", "llama", {"causal = true": ""}),
    ("causal", "bert", added("causal = true")),
    ("a text that looks ahead", "clip", {"causal = true": ""}),
    ("a norm in layers without positions", "llama4-text", {'["norm", "window"]': '["window"]'}),
    ("no window", "mistral", {'window = "sliding_window"': ""}),
]

# The same for mistakes that are noticed before anything is compared, and what is then said.
UNFIT: list[tuple[str, str, dict[str, str], type[WqkError], str]] = [
    (
        "multi-query where there are groups",
        "falcon-grouped",
        {"multi_query and not new_decoder_architecture": "multi_query"},
        CheckpointError,
        "takes the outputs of 6 heads",
    ),
    (
        "heads for key heads",
        "llama",
        added('key_heads = "num_attention_heads"'),
        CheckpointError,
        r"do not (divide|fit)",
    ),
]


def wrong_family(name: str, changes: dict[str, str], folder: Path) -> Path:
    """Save a model, and its family with a mistake."""
    save(NAMED[name], folder)
    family = find_family(open_checkpoint(folder))
    shipped = resources.files("wqk.families") / "data" / f"{family.name}.toml"
    text = shipped.read_text(encoding="utf-8")
    assert all(right in text for right in changes)
    # All at once, so that two names may be swapped.
    rights = re.compile("|".join(map(re.escape, changes)))
    path = folder / "wrong.toml"
    path.write_text(rights.sub(lambda right: changes[right[0]], text), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "changes"), [row[1:] for row in WRONG], ids=[f"{row[1]}: {row[0]}" for row in WRONG]
)
def test_a_wrong_family_fails(name: str, changes: dict[str, str], tmp_path: Path) -> None:
    verification = verify(wqk.open(tmp_path, family=wrong_family(name, changes, tmp_path)))
    assert not verification.ok
    assert verification.difference > 1e-3


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [row[1:] for row in UNFIT],
    ids=[f"{row[1]}: {row[0]}" for row in UNFIT],
)
def test_a_family_that_does_not_fit_is_refused(
    name: str, changes: dict[str, str], error: type[WqkError], message: str, tmp_path: Path
) -> None:
    family = wrong_family(name, changes, tmp_path)
    with pytest.raises(error, match=message):
        verify(wqk.open(tmp_path, family=family))


def test_pairing_heads_with_the_wrong_key_heads_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(NAMED["llama"], tmp_path)
    assert verify(tmp_path).ok

    def paired_modulo(attention: Block) -> BilinearForm:
        own, other = attention.query_key
        heads, width, d_query = own.weight.shape
        groups = attention.key_head_count
        query = own.weight.reshape(heads // groups, groups, width, d_query)
        key = other.weight[:, None].swapaxes(-1, -2)
        return BilinearForm(query.swapaxes(0, 1).swapaxes(-1, -2), key)

    monkeypatch.setattr(Block, "groups", property(paired_modulo))
    verification = verify(tmp_path)
    assert not verification.ok
    assert verification.difference > 1e-3


def test_uniform_attention_proves_nothing(tmp_path: Path) -> None:
    save(NAMED["bert"], tmp_path)

    def without_queries(tensors: dict[str, Any]) -> dict[str, Any]:
        return {n: v * 0 if ".self.query." in n else v for n, v in tensors.items()}

    edit_tensors(tmp_path, without_queries)
    verification = verify(tmp_path)
    assert verification.difference < 1e-12
    assert not verification.ok
