"""Verdicts about a form: next to its model, and with unknown positions, mask and scale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.command import ENCODER, refuse, run
from tests.families.architectures import BERT, FURTHER, Architecture
from tests.families.proving import prove_live, prove_variety, save

import wqk
from wqk.live.calls import ObservedCall
from wqk.live.recording import Application, form_difference
from wqk.live.verification import Verification, VerifiedBlock, verify

# Rotary, causal and scaled, none of which a guess speaks of; as many key heads as query heads.
LLAMA = Architecture("llama", "LlamaModel", BERT | {"num_hidden_layers": 1})
GUESS = """
name = "toy"
model_types = ["toy"]
[[attention]]
stack = "unknown"
guess = "guessed by hand"
query = "layers.{layer}.self_attn.QUERY"
key = "layers.{layer}.self_attn.KEY"
"""


TOLD = [architecture for architecture in FURTHER.values() if architecture.told]


@pytest.mark.parametrize("architecture", TOLD, ids=lambda case: str(case.name))
def test_each_attention_of_a_model_is_told(architecture: Architecture, tmp_path: Path) -> None:
    model = save(architecture, tmp_path)
    lines = []
    for plan, block in zip(wqk.open(tmp_path).plans, verify(tmp_path).blocks, strict=True):
        heads = f"{plan.query.heads} over {plan.key.heads} heads"
        more = [f"window {plan.window}"] * (plan.window is not None) + [*plan.statuses]
        place = f"{plan.stack} {plan.kind} {plan.layer}"
        lines.append(f"{place}: {', '.join([heads, *more])}: {block.verdict}")
    assert lines == architecture.told
    prove_live(architecture, model, tmp_path)
    prove_variety(tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(LLAMA, folder)
    return folder


def guess(folder: Path, query: str = "q_proj", key: str = "k_proj", more: str = "") -> Path:
    path = folder / "guess.toml"
    path.write_text(GUESS.replace("QUERY", query).replace("KEY", key) + more, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("difference", "form", "described", "message"),
    [
        (1e-12, None, True, "give the model's own attention: largest difference of a probability "),
        (0.1, 1e-12, False, "right, apart from positions"),
        (0.1, 1e-12, True, "but positions, mask or scale are NOT"),
        (0.1, 0.1, True, "do NOT give the model's own attention"),
        (None, None, True, "Not every attention could be compared"),
    ],
)
def test_the_last_line_says_the_worst(difference, form, described, message):
    right = VerifiedBlock("s", "self", 0, 0, 1e-12, None, 0.5, 1e-9, 1.0, 2.0, True)
    second_block = VerifiedBlock(
        "s", "self", 1, 0, difference, form, 0.5, 1e-9, 1.0, 2.0, described
    )
    verification = Verification("m", "f", (right, second_block))
    assert message in verification.result
    assert " ".join(str(verification).split()).endswith(verification.result)


def test_a_right_form_is_right_apart_from_what_is_not_known(llama: Path) -> None:
    result = json.loads(run("verify", llama, "--family", guess(llama), "--json").stdout)
    assert (result["ok"], result["verdict"]) == (True, "form right")
    (block,) = result["blocks"]
    assert block["difference"] > 1e-3
    assert block["form_difference"] < 1e-12
    assert block["largest_score"] is None  # no scale is known


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("k_proj", "q_proj"),
        ("q_proj", "v_proj"),
    ],
    ids=["transposed", "values for keys"],
)
def test_a_wrong_form_is_wrong(llama: Path, query: str, key: str) -> None:
    shown = run("verify", llama, "--family", guess(llama, query, key), exits=1)
    assert "WRONG" in shown.stdout
    assert "do NOT give" in shown.stdout


def test_the_printed_differences_are_those_of_the_result(llama: Path) -> None:
    """A difference of probabilities is not one of products."""
    wrong = guess(llama, "k_proj", "q_proj")
    (block,) = json.loads(run("verify", llama, "--family", wrong, "--json", exits=1).stdout)[
        "blocks"
    ]
    assert block["difference"] < block["form_difference"]
    shown = run("verify", llama, "--family", wrong, exits=1).stdout
    (row,) = [line for line in shown.splitlines() if "WRONG" in line]
    assert f" {block['difference']:.1e} " in row
    assert f" {block['form_difference']:.1e} " in row
    assert "of products" in shown
    assert "of products" not in run("verify", llama).stdout


def test_weights_that_a_checkpoint_lacks_are_drawn_by_the_seed_and_counted(
    llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "partial"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = [name for name in tensors if "embed_tokens" in name]
    del tensors[embedding]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    first, second = (wqk.verify(folder) for _ in range(2))
    assert first.drawn == (embedding.removeprefix("model."),)
    assert first.blocks == second.blocks
    assert wqk.verify(folder, seed=1).blocks != first.blocks
    assert "1 weight of layers and embeddings" in " ".join(str(first).split())
    assert wqk.verify(llama).drawn == ()
    assert "drawn at random" not in str(wqk.verify(llama))


def test_verify_writes_a_report_for_continuous_integration(llama: Path, tmp_path: Path) -> None:
    """A report of right forms is replaced by the report of wrong ones, and by that of an error."""
    path = tmp_path / "report.xml"

    def report(family: Path, exits: int) -> ElementTree.Element:
        run("verify", llama, "--family", family, "--junit", path, exits=exits)
        return ElementTree.parse(path).getroot()  # our own file

    suite = report(guess(llama), exits=0)
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == (str(llama), "1", "0")
    suite = report(guess(llama, "k_proj", "q_proj"), exits=1)
    assert suite.get("failures") == "1"
    failure = suite.find("testcase[@name='unknown self 0']/failure")
    assert failure is not None
    assert str(failure.get("message")).startswith("WRONG: largest difference ")
    assert "do NOT give" in str(failure.text)
    suite = report(llama / "nowhere.toml", exits=2)
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")


def test_too_few_heads_do_not_fit_their_width(llama: Path) -> None:
    heads_in_rule = 'heads = "wrong"\nkey_heads = "wrong"\ndefaults = { wrong = 2 }'
    path = guess(llama, "q_proj", "k_proj", heads_in_rule)
    message = refuse("verify", llama, "--family", path)
    assert "32 rows do not fit 2 query heads of width 8" in message


def test_a_right_form_with_wrong_positions_is_told_from_a_wrong_form(llama: Path) -> None:
    family = GUESS.replace('guess = "guessed by hand"', "causal = true")
    path = llama / "known.toml"
    path.write_text(family.replace("QUERY", "q_proj").replace("KEY", "k_proj"), encoding="utf-8")
    result = verify(wqk.open(llama, family=path))
    assert not result.ok
    assert result.verdict == "only form right"


def test_a_family_is_named_on_the_command_line() -> None:
    assert "family bert" in run("explain", ENCODER, "--family", "bert").output
    assert "did you mean 'nanogpt'" in run("scan", ENCODER, "--family", "nanogtp", exits=2).output


class Bilinear:
    """Two heads' products of given vectors."""

    def __init__(self, seed: int) -> None:
        self.matrices = np.random.default_rng(seed).standard_normal((2, 4, 4))
        self.groups = SimpleNamespace(widths=(4, 4))
        self.plan = SimpleNamespace(
            rule=SimpleNamespace(partial="", whole_score=True, joint=False),
            longest=None,
            query=SimpleNamespace(heads=2),
        )

    def products(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(x[:, None] @ self.matrices @ y[:, None].swapaxes(-1, -2))


def difference(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> float | None:
    import torch

    columns = torch.eye(product.shape[-1]).double().expand(*product.shape[:-2], -1, -1)
    call = ObservedCall(operation="", queries=torch.from_numpy(product), keys=columns)
    return form_difference(Bilinear(0), Application(x, y, (call,)))  # type: ignore[arg-type]


def test_products_are_compared_up_to_a_factor_and_biases() -> None:
    random = np.random.default_rng(1)
    x, y = random.standard_normal((3, 5, 4)), random.standard_normal((3, 7, 4))
    product = Bilinear(0).products(x, y)
    rows, columns = random.standard_normal((3, 2, 5, 1)), random.standard_normal((3, 2, 1, 7))
    assert difference((0.3 * product + rows + columns).reshape(6, 5, 7), x, y) == 0
    for wrong in (
        product[:, ::-1],  # heads in another order
        -product,
        product * np.array([1.0, 2.0])[:, None, None],  # one head twice as large
        Bilinear(2).products(x, y),
    ):
        assert (difference(wrong.reshape(6, 5, 7), x, y) or 0) > 0.1
    # No verdict about a product of another size, or a product that is equal for all keys.
    assert difference(product[:, :1].reshape(3, 5, 7), x, y) is None
    assert difference(np.zeros((6, 5, 7)), x, y) is None
    # Inputs and products of packed texts, and inputs whose tokens come first.
    assert difference(product.reshape(6, 5, 7), x.reshape(15, 4), y.reshape(21, 4)) == 0
    assert difference(product.reshape(6, 5, 7), x.swapaxes(0, 1), y.swapaxes(0, 1)) == 0


@pytest.mark.parametrize(
    ("difference", "form", "contrast", "described", "verdict"),
    [
        (1e-12, None, 0.5, True, "right"),
        (1e-12, None, 1e-12, True, "too uniform to tell"),
        (0.1, None, 0.5, True, "wrong"),
        (0.1, 1e-12, 0.5, True, "only form right"),
        (0.1, 1e-12, 0.5, False, "form right"),
        (0.1, 0.1, 0.5, False, "wrong"),
        (0.1, None, 0.5, False, "not compared"),
        (float("inf"), None, 0.5, False, "wrong"),
        (None, 1e-12, 0.0, True, "form right"),
        (None, 0.1, 0.0, True, "wrong"),
        (None, None, 0.0, True, "not compared"),
    ],
)
def test_verdicts(difference, form, contrast, described, verdict):
    block = VerifiedBlock(
        "decoder", "self", 0, 0, difference, form, contrast, 1e-9, None, None, described
    )
    assert block.verdict == verdict
    assert block.ok == (verdict in ("right", "form right"))


def test_a_form_of_zero_cannot_be_verified(tmp_path: Path) -> None:
    """Its attention is uniform, and its scores have no ratio to their ceiling."""
    save(LLAMA, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "k_proj" in name)
    save_file(tensors | {name: 0 * tensors[name]}, file, {"format": "pt"})
    assert "so uniform that any weights" in run("verify", str(tmp_path), exits=1).stdout
