"""An adapter on a tiny model, as PEFT saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

RANK, ALPHA = 4, 16


def adapter_on(
    folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], size: float = 0.1
) -> tuple[Path, dict[str, np.ndarray]]:
    """The adapter's folder, beside its base; and what it adds to the tensors."""
    from safetensors.numpy import save_file

    base, own = folder / "base", folder / "adapter"
    base.mkdir()
    own.mkdir()
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config))
    random, factors, update = np.random.default_rng(3), {}, {}
    for name, value in tensors.items():
        if ".q_proj.weight" in name or ".k_proj.weight" in name:
            up = size * random.standard_normal((len(value), RANK)).astype(np.float32)
            down = random.standard_normal((RANK, value.shape[1])).astype(np.float32)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            update[name] = ALPHA / RANK * up @ down
    save_file(factors, own / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "k_proj"],
    }  # fmt: skip
    (own / "adapter_config.json").write_text(json.dumps(about))
    return own, update
