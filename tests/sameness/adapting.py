"""An adapter on a tiny model, as PEFT saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests import small

RANK, ALPHA = 4, 16


def adapter_on(
    folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], size: float = 0.1
) -> tuple[Path, dict[str, np.ndarray]]:
    """Save an adapter next to its base model; return its folder and its update of each tensor."""
    base = small.save(folder / "base", tensors, config)
    random, factors, update = np.random.default_rng(3), {}, {}
    for name, value in tensors.items():
        if ".q_proj.weight" in name or ".k_proj.weight" in name:
            up = size * random.standard_normal((len(value), RANK)).astype(np.float32)
            down = random.standard_normal((RANK, value.shape[1])).astype(np.float32)
            module = name.removesuffix(".weight")
            factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            update[name] = ALPHA / RANK * up @ down
    about = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "k_proj"]}
    return small.adapter(folder / "adapter", base, factors, **about), update
