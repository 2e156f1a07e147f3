"""The state dict in what a training script saved, perhaps inside larger dictionaries."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from wqk.checkpoints.files import is_text
from wqk.checkpoints.pickles import StoredTensor
from wqk.errors import CheckpointError, shortened

# Where scripts keep the weights, first of all.
NESTED_UNDER = (
    "state_dict", "model_state_dict", "model", "module", "language_model", "encoder", "transformer",
)  # fmt: skip


class Held(NamedTuple):
    """The named tensors that were found, and the keys of other weights, such as an average's."""

    tensors: dict[str, StoredTensor]
    passed_over: tuple[str, ...]


def state_dict(content: Any) -> Held:
    """The named tensors, or those in a nested dictionary: of a usual name, or the only one.

    Raises `CheckpointError` if there are none, or several without a usual name.
    """
    passed_over: list[str] = []
    held: list[str] = []
    for _ in range(4):
        if not isinstance(content, dict):
            break
        # Inner dictionaries first: a loss may stand beside them, as a tensor of its own.
        held = [k for k, v in content.items() if isinstance(k, str) and _has_tensors(v)]
        usual = [key for key in NESTED_UNDER if key in held]
        tensors = {k: v for k, v in content.items() if isinstance(v, StoredTensor)}
        if usual or (len(held) == 1 and all(len(v.shape) < 2 for v in tensors.values())):
            chosen = (usual or held)[0]
            passed_over += [key for key in held if key != chosen and _has_layers(content[key])]
            content = content[chosen]
            continue
        named = {key: value for key, value in tensors.items() if isinstance(key, str)}
        if not all(map(is_text, named)):
            raise CheckpointError("a tensor's name is not text")
        if named:
            return Held(named, tuple(passed_over))
        break
    several = f"; {' and '.join(held[:5])} may be; save one of them alone" if held else ""
    raise CheckpointError(shortened(f"contains no state dict of named tensors{several}"))


def _has_tensors(content: Any, depth: int = 3) -> bool:
    """Whether there are tensors in a dictionary, or in one nested in it."""
    return isinstance(content, dict) and (
        any(isinstance(value, StoredTensor) for value in content.values())
        or (depth > 0 and any(_has_tensors(content.get(key), depth - 1) for key in NESTED_UNDER))
    )


def _has_layers(content: dict[Any, Any]) -> bool:
    """Whether there are tensors of numbered layers in a dictionary."""
    return any(isinstance(key, str) and re.search(r"\.\d+\.", key) for key in content)
