"""A recipe in the words of transformers' Trainer, and the machine that it meets."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from wqk._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import TrainingArguments

    from wqk.training.recipe import Recipe

# What the Trainer calls our schedules, where its name is another.
SCHEDULES = {"constant": "constant_with_warmup"}


def trainer_arguments(recipe: Recipe, folder: Path, report_to: Sequence[str]) -> TrainingArguments:
    """The Trainer's arguments; what it would do at times of its own is switched off."""
    import torch
    from transformers import TrainingArguments

    accelerated, precision = torch.cuda.is_available(), precision_here(recipe.precision)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says it
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=SCHEDULES.get(recipe.schedule, recipe.schedule),
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        optim="adamw_torch_fused",
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=not accelerated,
        ddp_backend="gloo" if processes > 1 and not accelerated else None,
        ddp_find_unused_parameters=False,
        torch_compile=accelerated,
        seed=recipe.seed,
        report_to=list(report_to) or "none",
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        ignore_data_skip=True,  # a batch is found by its number
        logging_nan_inf_filter=False,  # looking at every loss would wait for the device
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def precision_here(wanted: str) -> str:
    """The precision where the device has it; float32 on a CPU, which repeats to the bit."""
    import torch

    if not torch.cuda.is_available() or (wanted == "bf16" and not torch.cuda.is_bf16_supported()):
        return "float32"
    return wanted


def environment(recipe: Recipe, arguments: TrainingArguments) -> dict[str, Any]:
    """The software and the machine, for the run's settings."""
    import accelerate  # type: ignore[import-untyped]
    import torch
    import transformers

    device = arguments.device
    return {
        "wqk": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": precision_here(recipe.precision),
        "processes": arguments.world_size,
        "threads": torch.get_num_threads(),
    }
