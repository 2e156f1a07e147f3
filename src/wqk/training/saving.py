"""Checkpoints that appear and disappear atomically, and include their tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk.attention.verification.running import quiet
from wqk.errors import CorpusError, RunError, all_lines, first_line
from wqk.runs.run import checkpoints_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wqk.training.corpus.store import TokenStore
    from wqk.training.recipe import Recipe

# Where checkpoints are written and removed; they are renamed into and out of it.
STAGING = ".saving"

# Needed only to resume: the states of the optimizer and of the gradient scaler of float16. Random
# numbers have no state: they are a function of the step.
OPTIMIZER, SCALER = "optimizer.pt", "scaler.pt"

# A token store's special tokens as transformers names them.
TOKEN_NAMES = {
    "padding": "pad_token",
    "mask": "mask_token",
    "unknown": "unk_token",
    "separator": "sep_token",
}


def save_checkpoint(
    folder: Path,
    step: int,
    recipe: Recipe,
    model: PreTrainedModel,
    state: Mapping[str, Any],
    tokenizer: Mapping[str, bytes],
) -> None:
    """Add a checkpoint to a run's folder, and remove earlier ones that the recipe does not keep.

    Parameters
    ----------
    state
        States of optimizer and scaler by file name; None for a scaler that is not used.
    tokenizer
        From `tokenizer_files`.
    """
    import torch
    from safetensors import SafetensorError

    clear_staging(folder)
    staged = folder / STAGING / f"checkpoint-{step}"
    try:
        with quiet():
            model.save_pretrained(staged)
        for name, values in state.items():
            if values is not None:
                with (staged / name).open("wb") as file:
                    torch.save(values, file)
        for name, content in tokenizer.items():
            (staged / name).write_bytes(content)
        for path in staged.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        staged.rename(folder / staged.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        clear_staging(folder)
        # torch's own message only names a position in the file; the system's reason precedes it.
        system = getattr(error, "strerror", None) or getattr(error.__context__, "strerror", None)
        reason = system or first_line(error)
        raise RunError(
            f"{folder}: checkpoint-{step} cannot be written ({reason}); free some disk space and "
            "resume"
        ) from None
    clear_staging(folder)
    thin_out(folder, step, recipe)


def load_checkpoint(path: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Load a checkpoint's weights into a model, in place; return the other states by file name."""
    import torch

    files = [path / name for name in (OPTIMIZER, SCALER)]
    try:
        with quiet():
            saved = type(model).from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
        model.load_state_dict(saved.state_dict())
        return {
            file.name: torch.load(file, map_location="cpu", weights_only=True)
            for file in files
            if file.exists()
        }
    except Exception as error:  # the libraries raise anything for a damaged file
        reason = all_lines(error, 160)
        raise RunError(
            f"{path}: cannot be resumed from ({reason}); delete it to resume from an earlier one"
        ) from None


def clear_staging(folder: Path) -> None:
    """Remove what a killed run has left half written or half removed."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def thin_out(folder: Path, newest: int, recipe: Recipe) -> None:
    """Remove earlier checkpoints, or, of those that the recipe keeps, the states for resuming."""
    staging = folder / STAGING
    for step, path in checkpoints_in(folder):
        if step >= newest or recipe.keep_checkpoints == "all":
            continue
        if step in recipe.kept_steps:
            for name in (OPTIMIZER, SCALER):
                (path / name).unlink(missing_ok=True)
        else:
            staging.mkdir(exist_ok=True)
            path.rename(staging / path.name)
    clear_staging(folder)


def tokenizer_files(corpus: TokenStore, block: int) -> dict[str, bytes]:
    """The files that transformers' AutoTokenizer needs in a checkpoint's folder, by name."""
    from tokenizers import Tokenizer

    try:
        content = corpus.tokenizer.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        reason = all_lines(error)
        raise CorpusError(f"{corpus.tokenizer}: not a tokenizer ({reason})") from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block,
        **{TOKEN_NAMES[role]: tokenizer.id_to_token(id) for role, id in corpus.special.items()},
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode(),
    }
