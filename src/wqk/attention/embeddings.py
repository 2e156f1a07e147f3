"""A model's table of token embeddings, read in blocks of rows, and its tokens' names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk.checkpoints import Part
from wqk.errors import CheckpointError, HubError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Unpack

    import numpy as np

    from wqk.checkpoints import Checkpoint
    from wqk.checkpoints.options import HubOptions

# What tables of token embeddings are called, without ``.weight``.
NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embedding|word_embeddings|word_embedding|wte"
    r"|embed_in|shared|embeddings|tokens_embed|tok_embedding|embedding)(?:\.weight)?"
)

# Rows of the table that are in memory at a time.
ROWS = 8192


def embedding_table(checkpoint: Checkpoint, width: int, name: str | None = None) -> str:
    """The tensor (V, ``width``) with one embedding per token, by name or searched for.

    Raises `CheckpointError` if there is none, if it has another width, or if several may be it.
    """
    tensors = checkpoint.tensors()
    if name is not None:
        shape = checkpoint.info(name).shape
        if len(shape) != 2 or shape[1] != width:
            raise CheckpointError(
                f"{name}: an embedding table must be (tokens, {width}), as wide as the "
                f"queries' input; got {shape}"
            )
        return name
    found = [
        tensor
        for tensor, info in tensors.items()
        if len(info.shape) == 2 and info.shape[1] == width and NAMES.fullmatch(tensor)
    ]
    # A table that encoder and decoder share is stored under several names.
    found = [t for t in found if t.endswith("shared.weight")] or found
    if len(found) != 1:
        several = f"several might be it: {', '.join(found[:4])}" if found else "none was recognized"
        raise CheckpointError(
            f"{checkpoint.name}: no table of token embeddings of width {width} ({several}); "
            "name the tensor (embeddings=NAME)"
        )
    return found[0]


def embedding_rows(checkpoint: Checkpoint, table: str) -> Iterator[np.ndarray]:
    """The table's rows in order, (at most `ROWS`, D) at a time."""
    count = checkpoint.info(table).shape[0]
    for start in range(0, count, ROWS):
        yield checkpoint.read([Part(table, ((start, min(start + ROWS, count)),))])[0]


def token_names(ref: Any, **hub: Unpack[HubOptions]) -> dict[int, str]:
    """The tokens' names by number, from ``tokenizer.json`` or ``vocab.txt``; empty without one.

    ``ref`` is a folder or a Hub id; nothing else has a tokenizer.
    """
    if not isinstance(ref, str | os.PathLike):
        return {}
    for name, read in (("tokenizer.json", _from_tokenizer), ("vocab.txt", _from_lines)):
        path = _beside(ref, name, hub)
        if path is not None:
            try:
                return read(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{path}: contains no tokenizer ({error})") from None
    return {}


def _beside(ref: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
    """A file next to the weights, fetched from the Hub if necessary."""
    folder = Path(ref) / (hub.get("subfolder") or "")
    if Path(ref).exists():
        path = (folder if folder.is_dir() else folder.parent) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(str(ref), name, **hub))
    except (EntryNotFoundError, LocalEntryNotFoundError, HFValidationError):
        return None
    except Exception as error:  # the client lets errors of its transport through, of any class
        raise HubError(f"{ref}: {name} cannot be fetched ({error})") from None


def _from_tokenizer(path: Path) -> dict[int, str]:
    """The vocabulary of a ``tokenizer.json``, in either form."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    pairs = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((entry[0], number) for number, entry in enumerate(vocabulary))
    )
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or [])
    return {int(number): str(token) for token, number in (*pairs, *added)}


def _from_lines(path: Path) -> dict[int, str]:
    # Not splitlines: a token may itself be a separator of lines, such as U+2028.
    return dict(enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n")))
