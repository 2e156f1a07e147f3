"""Weights that are quantized or plain, contrary to the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.quantization.float8 import FLOAT8
from wqk.families import AttentionPlan
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.tensor_names import title_in_block


def misquantized_weights(checkpoint: Checkpoint, plan: AttentionPlan) -> Iterator[Mismatch]:
    """Yield the causes of weights that are quantized or plain against the configuration.

    Weights of one format have one cause; the format of plain weights is the empty text.
    """
    titles_by_format: dict[str, set[str]] = {}
    for side in (plan.query, plan.key, plan.value, plan.output):
        if side is None:
            continue
        for part in side.projection.roles.values():
            format_name = _format_of(checkpoint, part.name)
            is_excluded = _is_excluded(checkpoint.config, part.name.removesuffix(".weight"))
            if is_excluded is bool(format_name):
                titles_by_format.setdefault(format_name, set()).add(title_in_block(part.name))
    for format_name, titles in titles_by_format.items():
        name = "the wrong layers are quantized"
        configured, stored = "quantized", "plain"
        if format_name:
            configured, stored = "plain", f"as {format_name}"
        listed = sorted(titles)
        reason = f"{name}: {', '.join(listed)}: {configured} by the configuration, stored {stored}"
        facts = {"name": name, "tensors": listed, "other_value": format_name or "none"}
        yield Mismatch(Kind.SETTING, reason, facts=facts)


def _format_of(checkpoint: Checkpoint, name: str) -> str:
    """Return the format with few bits in which a tensor is stored; empty for a plain tensor."""
    info = checkpoint.info(name)
    if info.quantized:
        return info.quantized
    return info.dtype if info.dtype in FLOAT8 else ""


def _is_excluded(config: Mapping[str, Any], module: str) -> bool | None:
    """Return whether a configuration excludes the weight of a linear module from quantization.

    None if the configuration has no list of excluded modules, or has rules that are not supported.
    """
    match config.get("quantization_config"):
        case {"quant_method": "awq", "modules_to_not_convert": [*listed]}:
            pass
        case {"quant_method": "bitsandbytes", "llm_int8_skip_modules": [*listed]}:
            pass
        case {
            "quant_method": "compressed-tensors",
            "ignore": [*listed],
            "config_groups": dict(groups),
        }:
            targets = [group.get("targets") for group in groups.values() if isinstance(group, dict)]
            if targets != [["Linear"]]:
                return None
        case _:
            return None
    is_listed = False
    for entry in listed:
        try:
            is_listed |= re.search(_module_pattern(str(entry)), module) is not None
        except re.error:
            return None
    return is_listed


def _module_pattern(text: str) -> str:
    r"""Return the regular expression of an entry of a list of modules.

    Examples
    --------
    >>> _module_pattern("re:^.*lm_head"), _module_pattern("model.layers.0")
    ('(?:^|\\.)(?:.*lm_head)', '(?:^|\\.)(?:layers\\.0(?:\\.|$))')
    """
    if text.startswith("re:"):
        expression = text[3:].removeprefix("^")
    else:
        # Names in a file may have another prefix than in the model that the list was made for.
        module = re.escape(text.removeprefix("model."))
        expression = rf"{module}(?:\.|$)"
    return rf"(?:^|\.)(?:{expression})"
