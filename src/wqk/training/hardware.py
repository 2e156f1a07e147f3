"""The hardware and software of a run."""

from __future__ import annotations

import os
import platform
from typing import Any

from wqk._version import __version__


def available_precision(wanted: str) -> str:
    """The precision, if the device supports it; float32 on a CPU, so that runs are reproducible."""
    import torch

    if not torch.cuda.is_available() or (wanted == "bf16" and not torch.cuda.is_bf16_supported()):
        return "float32"
    return wanted


def idle_gpus() -> int:
    """Number of this machine's GPUs that a run without torchrun leaves idle."""
    import torch

    return 0 if "WORLD_SIZE" in os.environ else max(0, torch.cuda.device_count() - 1)


def environment(precision: str, device: Any, processes: int) -> dict[str, Any]:
    """The software and hardware of a run, for ``run.json``."""
    import accelerate  # type: ignore[import-untyped]
    import torch
    import transformers

    return {
        "wqk": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": available_precision(precision),
        "processes": processes,
        "threads": torch.get_num_threads(),
    }
