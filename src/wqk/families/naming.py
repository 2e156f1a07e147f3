"""Names of tensors: the full name of a weight, numbers of layers in names, token embeddings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from wqk.errors import CheckpointError, demo_advice

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint

# Names of tables of token embeddings.
EMBEDDING_NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embedding|word_embeddings|word_embedding|wte"
    r"|embed_in|shared|embeddings|tokens_embed|tok_embedding|embedding)(?:\.weight)?"
)


def weight_name(stem: str) -> str:
    """Return the full name of a weight; names of bare parameters already end in ``weight``."""
    return stem if stem.endswith("weight") else f"{stem}.weight"


def without_numbers(stem: str) -> str:
    """Return a name with placeholders for its numbers; the first number is the layer.

    Examples
    --------
    >>> without_numbers("layers.3.experts.7.q_proj")
    'layers.{layer}.experts.{index1}.q_proj'
    """
    parts: list[str] = []
    count = 0
    for part in stem.split("."):
        if part.isdigit():
            parts.append("{layer}" if count == 0 else f"{{index{count}}}")
            count += 1
        else:
            parts.append(part)
    return ".".join(parts)


def layers_beyond(read: Iterable[str], stored: Iterable[str]) -> list[int]:
    """Return layers that are stored after the last layer that is read, by names of tensors.

    Examples
    --------
    >>> names = [f"layers.{n}.attn.wq.weight" for n in range(4)]
    >>> layers_beyond(names[:2], names), layers_beyond(names, [*names, "layers.4.mlp.weight"])
    ([2, 3], [])
    """
    last_read: dict[str, int] = {}
    for pattern, layer in _numbered(read):
        last_read[pattern] = max(layer, last_read.get(pattern, 0))
    beyond = set()
    for pattern, layer in _numbered(stored):
        if pattern in last_read and layer > last_read[pattern]:
            beyond.add(layer)
    return sorted(beyond)


def _numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the results of `_split_at_layer` for the names that contain a number."""
    for name in names:
        split = _split_at_layer(name)
        if split is not None:
            yield split


def _split_at_layer(name: str) -> tuple[str, int] | None:
    """Return a name with a placeholder for its first number, and the number."""
    match = re.search(r"(?:^|(?<=\.))\d{1,9}(?=\.)", name)
    if match is None:
        return None
    return f"{name[: match.start()]}{{layer}}{name[match.end() :]}", int(match[0])


def embedding_table(
    checkpoint: Checkpoint,
    width: int,
    name: str | None = None,
    contents: str = "",
) -> str:
    """Return the name of the tensor (V, ``width``) with an embedding for each token.

    Parameters
    ----------
    checkpoint
        The checkpoint.
    width
        Width of the embeddings.
    name
        The tensor; by default, found by names and shapes.
    contents
        Contents of a checkpoint that has attention only, in words.

    Raises
    ------
    CheckpointError
        No tensor, or more than one tensor, may be the table.
    """
    tensors = checkpoint.tensors()
    if name is not None:
        shape = checkpoint.info(name).shape
        if len(shape) != 2 or shape[1] != width or not shape[0]:
            raise CheckpointError(
                f"{name}: an embedding table must be (tokens, {width}), as wide as the "
                f"queries' input; got {shape}; name another tensor (embeddings=NAME)"
            )
        return name
    tables = []
    for tensor, info in tensors.items():
        is_table = len(info.shape) == 2 and info.shape[0] > 0 and info.shape[1] == width
        if is_table and EMBEDDING_NAMES.fullmatch(tensor):
            tables.append(tensor)
    # A table that encoder and decoder share is stored under several names.
    tables = [table for table in tables if table.endswith("shared.weight")] or tables
    if not tables and contents:
        raise CheckpointError(
            f"{checkpoint.name}: no token embeddings; expected a checkpoint with all weights, got "
            f"one with {contents} only{demo_advice(checkpoint.name)}"
        )
    if len(tables) != 1:
        reason, condition = "none was recognized", "if the checkpoint has one, "
        if tables:
            reason, condition = f"several might be it: {', '.join(tables[:4])}", ""
        raise CheckpointError(
            f"{checkpoint.name}: no table of token embeddings of width {width} ({reason}); "
            f"{condition}name the tensor (embeddings=NAME){demo_advice(checkpoint.name)}"
        )
    return tables[0]
