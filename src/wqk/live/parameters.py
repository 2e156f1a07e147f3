"""The weights of a model in memory, as the pass that is running uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.modules import open_live
from wqk.checkpoints.wrapping import plain_name, with_adapter, without_adapter


class LiveWeights(Checkpoint):
    """A model's weights as its passes use them: what is read are tensors on their own device.

    They are looked up at every reading, since FSDP and others replace parameters during a pass, and
    widened to at least float32; no gradients flow through them.
    """

    def __init__(self, model: Any) -> None:
        found = open_live(model)
        self.name, self.config = found.name, found.config
        self._tensors, self.adapted = found.tensors(), found.adapted
        self._owners: dict[str, tuple[Any, str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name in (*module._parameters, *module._buffers):
                full = plain_name(f"{prefix}.{name}" if prefix else name)
                self._owners[without_adapter(full)] = (module, name)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._tensors

    def current(self, name: str) -> Any:
        """A parameter or buffer itself, by its plain name."""
        module, attribute = self._owners[name]
        return getattr(module, attribute)

    def read(self, parts: Sequence[Part]) -> list[Any]:
        """The wanted rows of each part, joined, on their own device."""
        return [self._read(part) for part in parts]

    def _read(self, part: Part) -> Any:
        import torch

        tensor = self.current(part.name).detach()
        if part.name in self.adapted:
            tensor = with_adapter(tensor, self.adapted[part.name], part.name)
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if part.rows is not None:
            ranges = part.row_ranges(tuple(tensor.shape))
            tensor = torch.cat([tensor[start:stop] for start, stop in ranges])
        return tensor if tensor.element_size() > 2 else tensor.float()
