"""Which tensor holds a model's token embeddings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint

# What tables of token embeddings are called, without ``.weight``.
NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embedding|word_embeddings|word_embedding|wte"
    r"|embed_in|shared|embeddings|tokens_embed|tok_embedding|embedding)(?:\.weight)?"
)


def embedding_table(checkpoint: Checkpoint, width: int, name: str | None = None) -> str:
    """The tensor (V, ``width``) with one embedding per token, by name or searched for.

    Raises `CheckpointError` if there is none, if it has another width, or if several may be it.
    """
    tensors = checkpoint.tensors()
    if name is not None:
        shape = checkpoint.info(name).shape
        if len(shape) != 2 or shape[1] != width or not shape[0]:
            raise CheckpointError(
                f"{name}: an embedding table must be (tokens, {width}), as wide as the "
                f"queries' input; got {shape}"
            )
        return name
    found = [
        tensor
        for tensor, info in tensors.items()
        if len(info.shape) == 2
        and info.shape[0]
        and info.shape[1] == width
        and NAMES.fullmatch(tensor)
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
