"""A campaign of damage: pickles, archives, indexes and names; every one is read or refused."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import close_session, constants
from safetensors.numpy import save
from tests.checkpoints.attacking import mutated, random_fault
from tests.checkpoints.serving import Hub, bert_folder, serving, serving_bert, stand_in
from tests.checkpoints.stored import read_all, write_pickle
from tests.limits import counts, refused

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.pickles import load
from wqk.errors import WqkError
from wqk.storage import patience
from wqk.storage.references import redacted

# Opcodes that build values, with the arguments that they take from the stream.
OPCODES = [
    opcode
    for name, opcode in vars(pickle).items()
    if name.isupper() and isinstance(opcode, bytes) and len(opcode) == 1
]

# How the unpickler ends on nonsense; never in anything that the system says.
FAILURES = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    AssertionError,
    struct.error,
)


@counts(500, 100_000)
def test_random_programs_build_data_or_fail(count: int):
    dice = random.Random(0)
    built = 0
    for _ in range(count):
        program = b"".join(
            dice.choice(OPCODES) + dice.randbytes(dice.choice([0, 0, 1, 4])) for _ in range(30)
        )
        with contextlib.suppress(*FAILURES):
            load(io.BytesIO(b"\x80\x04" + program + b"."))
            built += 1
    assert 0 < built < count


@counts(100, 20_000)
def test_archives_with_damaged_descriptions(tmp_path: Path, count: int):
    dice = random.Random(1)
    good = pickle.dumps({"a": 1, "b": [1, 2, (3, "c")]}, protocol=2)
    for _ in range(count):
        text = bytearray(good)
        for _ in range(dice.randrange(1, 5)):
            text[dice.randrange(len(text))] = dice.randrange(256)
        with pytest.raises(WqkError):
            open_checkpoint(write_pickle(tmp_path / "model.pt", bytes(text)))


@counts(100, 20_000)
def test_folders_with_random_files(tmp_path: Path, count: int):
    dice = random.Random(2)
    weights = save({"a": np.zeros((2, 2), np.float32)})
    index = {"weight_map": {"a": "model-1.safetensors"}}
    files = {
        "model.safetensors": weights,
        "model-1.safetensors": weights,
        "other.safetensors": weights,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b"{}",
        "adapter_config.json": b'{"peft_type": "LORA"}',
        "adapter_model.safetensors": weights,
        "pytorch_model.bin": b"PK",
        "model.onnx": b"",
        "mp_rank_00_model_states.pt": b"",
        "tf_model.h5": b"",
        "flax_model.msgpack": b"",
        ".metadata": b"",
        "__0_0.distcp": b"",
    }
    outcomes = set()
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in dice.sample(sorted(files), dice.randrange(5)):
            content = files[name] if dice.random() < 0.8 else dice.randbytes(20)
            (folder / name).write_bytes(content)
        outcomes.add(refused(read_all, folder))
    assert outcomes == {True, False}


@counts(300, 100_000)
def test_whatever_an_address_looks_like_its_secret_is_not_shown(count: int):
    dice = random.Random(3)
    for _ in range(count):
        noise = "".join(dice.choices("ab/:?#[]@%&=.", k=dice.randrange(8)))
        host = f"h{noise}" if dice.random() < 0.3 else "example.org"
        shown = redacted(f"https://me:hunter2@{host}/x?sig=hunter2")
        assert "hunter2" not in shown, shown
        assert "hunter2" not in redacted(f"https://example.org/x?{noise}&token=hunter2")


@pytest.fixture(scope="module")
def truth() -> bytes:
    """The scores of what the servers hold, were they honest."""
    with pytest.MonkeyPatch.context() as patch, serving_bert() as site:
        patch.setenv("WQK_CACHE_LIMIT", "0")
        return scores(f"{site.url}/m")


def scores(ref: str) -> bytes:
    return wqk.scan(ref, heads=False).frame.drop("checkpoint", "revision").write_csv().encode()


def prove_scores(ref: str, truth: bytes) -> None:
    assert scores(ref) == truth


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Little patience, and no cache."""
    monkeypatch.setenv("WQK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WQK_CACHE_LIMIT", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    short_patience = patience.Patience(
        attempts=3, attempts_to_connect=2, first=0, answer=1, silence=1
    )
    monkeypatch.setattr(patience, "PATIENCE", short_patience._replace(slowest=10.0**6))
    return monkeypatch


@counts(30, 600)
def test_a_server_at_its_worst_gives_the_scores_or_an_error(hasty, truth, count):
    outcomes = set()
    for seed in range(count):
        dice = random.Random(seed)
        with serving_bert() as site:
            faults = [random_fault(dice, slow=seed % 8 == 7) for _ in range(dice.randrange(1, 4))]
            site.faults.extend([None] * dice.randrange(8) + faults * dice.choice([1, 1, 5]))
            outcomes.add(refused(prove_scores, f"{site.url}/m", truth))
        close_session()
    assert outcomes == {True, False}


@counts(12, 600)
def test_a_listing_at_its_worst_gives_the_scores_or_an_error(hasty, truth, count):
    honest, outcomes = Hub._info, set()
    with serving(Hub) as hub:
        stand_in(hub, hasty)
        hub.repositories["owner/bert"] = {"main": bert_folder()}
        for seed in range(count):
            dice = random.Random(seed)

            def lie(self, *about, dice=dice):
                listing = json.loads(honest(self, *about))
                for _ in range(dice.randrange(1, 3)):
                    listing = mutated(listing, dice)
                text = json.dumps(listing).encode()
                return text[: dice.randrange(len(text))] if dice.random() < 0.1 else text

            hasty.setattr(Hub, "_info", lie)
            outcomes.add(refused(prove_scores, "owner/bert", truth))
    close_session()
    assert outcomes == {True, False}
