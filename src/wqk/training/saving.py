"""Checkpoints that appear whole under their name, go whole, and know their own tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from wqk.errors import CorpusError
from wqk.runs.run import checkpoints_in

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from wqk.training.corpus.store import TokenStore
    from wqk.training.recipe import Recipe

# What is being written or removed lies in here; checkpoints are renamed into and out of it.
STAGING = ".saving"

# What only the latest checkpoint needs, unless all are kept as they are.
FOR_RESUMING = ("optimizer.pt",)

# A token store's special tokens in transformers' words.
TOKEN_NAMES = {
    "padding": "pad_token",
    "mask": "mask_token",
    "unknown": "unk_token",
    "separator": "sep_token",
}


def clear_staging(folder: Path) -> None:
    """Drop what a killed run left half written or half removed."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def publish(folder: Path, step: int, extra: Mapping[str, bytes]) -> None:
    """Give the checkpoint in the staging folder its name, with some files more, all on disk."""
    staged = folder / STAGING / f"checkpoint-{step}"
    for name, content in extra.items():
        (staged / name).write_bytes(content)
    for path in staged.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    staged.rename(folder / staged.name)
    clear_staging(folder)


def thin_out(folder: Path, newest: int, recipe: Recipe) -> None:
    """Remove earlier checkpoints, or what only resuming needs of those that the recipe keeps."""
    staging = folder / STAGING
    for step, path in checkpoints_in(folder):
        if step >= newest or recipe.keep_checkpoints == "all":
            continue
        if step in recipe.kept_steps:
            for name in FOR_RESUMING:
                (path / name).unlink(missing_ok=True)
        else:
            staging.mkdir(exist_ok=True)
            path.rename(staging / path.name)
    clear_staging(folder)


def tokenizer_files(corpus: TokenStore, block: int) -> dict[str, bytes]:
    """Files with which transformers' AutoTokenizer reads a checkpoint's folder.

    Raises
    ------
    CorpusError
        The store's tokenizer is damaged.
    """
    from tokenizers import Tokenizer

    try:
        content = corpus.tokenizer.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise CorpusError(f"{corpus.tokenizer}: is no tokenizer ({reason})") from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block,
        **{TOKEN_NAMES[role]: tokenizer.id_to_token(id) for role, id in corpus.special.items()},
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode(),
    }
