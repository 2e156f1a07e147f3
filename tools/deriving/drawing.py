"""Settings that change attention, drawn at random, and what is read wrongly under them.

python -m tools.deriving.drawing OUT.jsonl [--seed N] [--each N] [TYPE...]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.deriving.configured import configuration_faults, overlaid
from tools.deriving.probing import in_a_process
from tools.deriving.shrinking import HEADS, TOWER_HEADS, TOWERS

if TYPE_CHECKING:
    from collections.abc import Iterator

# Fields of a class that have to do with its attention.
ABOUT_ATTENTION = re.compile(
    r"attn|attention|qk|qkv|rope|rotary|window|cap|causal|clip|bias|multiplier|interleave|position"
    r"|is_decoder|alibi|partial|parallel|new_decoder|scale|temperature|norm_before"
)
NOT_ABOUT = re.compile(
    r"output_|mlp_|drop|type_vocab|std|_ids?$|range|layer_scale|max_position|loss|scale_fmt"
)

# Settings with which a class contradicts itself: whether BigBird's self-attention sees an encoder's
# outputs depends on its inputs; whether BridgeTower's text is masked, on how attention is computed;
# a mask of Grounding DINO's own, of true and false, is added to its text's scores as 1 and 0.
CONTRADICTORY = {
    "big_bird": "add_cross_attention",
    "bridgetower": "text_config.is_decoder",
    "grounding-dino": "text_config.is_decoder",
    "mm-grounding-dino": "text_config.is_decoder",
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    YARN | {"attention_factor": 1.3, "truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
)


def settings(model_type: str) -> list[tuple[str, list[Any]]]:
    """Keys of a type, with dots for those of its parts, and other values that they may take."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    setting_list = _settings(CONFIG_MAPPING[model_type]().to_dict())
    return [setting for setting in setting_list if setting[0] != CONTRADICTORY.get(model_type)]


def draw(model_type: str, number: int, seed: int) -> dict[str, Any]:
    """One to four settings of a type that are not its defaults, as keys of its configuration."""
    setting_list = settings(model_type)
    chance = random.Random(f"{model_type} {number} {seed}")
    drawn: dict[str, Any] = {}
    for path, values in chance.sample(setting_list, min(len(setting_list), chance.randint(1, 4))):
        *parts, key = path.split(".")
        value: dict[str, Any] = {key: copy.deepcopy(chance.choice(values))}
        if key in ("layer_types", "no_rope_layers"):
            value["num_hidden_layers"] = len(value[key])
        for part in reversed(parts):
            value = {part: value}
        drawn = overlaid(drawn, value)
    return drawn


def _settings(fields: dict[str, Any], within: str = "") -> Iterator[tuple[str, list[Any]]]:
    heads = TOWER_HEADS if TOWERS.search(within) else HEADS
    for key, value in fields.items():
        if key.endswith("_config") and isinstance(value, dict) and "backbone" not in key:
            yield from _settings(value, f"{within}{key}.")
        elif values := _values(key, value, fields, heads):
            yield within + key, values
            if key == "rope_parameters":
                yield f"{within}rope_scaling", [*SCALINGS]
                if not _is_nested(value):
                    yield f"{within}rope_theta", [50.0, 500000]


def _values(key: str, value: Any, fields: dict[str, Any], heads: int) -> list[Any]:
    """Other values of a setting; none where it does not change attention."""
    nested = fields.get("layer_types") or []
    match key, value:
        case "num_key_value_heads", int() if "kv_lora_rank" not in fields:
            return [1, heads]
        case "head_dim", int() | None if "qk_rope_head_dim" not in fields:
            return [16, 32]
        case "sliding_window" | "attention_chunk_size", _:
            return [4, 9]
        case "layer_types", [*_] if "full_attention" in nested and len({*nested}) == 2:
            other_kind = next(kind for kind in nested if kind != "full_attention")
            return [["full_attention", other_kind], [other_kind, "full_attention"]]
        case "no_rope_layers", list():
            return [[0, 1], [1, 0]]
        case "rope_parameters", dict() if not _is_nested(value):
            theta = {"rope_theta": 3000.0}
            sections = {name: size for name, size in value.items() if "section" in name}
            return [theta | sections | scaling for scaling in SCALINGS if "rope_type" in scaling]
        case "rope_parameters", dict():
            return [
                {
                    kind: scaling and scaling | {"rope_theta": 77.0}
                    for kind, scaling in value.items()
                }
            ]
        case "partial_rotary_factor" | "rotary_pct", _:
            return [0.5, 1.0]
        case "position_embedding_type", "absolute":
            return ["relative_key", "relative_key_query"]
        case "q_lora_rank", int():
            return [None]
        case "attn_logit_softcapping" | "clip_qkv", None:
            return [0.8, 5.0]
        case "rms_norm_eps" | "layer_norm_eps" | "norm_eps", float():
            return [3e-07]
        case _, bool() if ABOUT_ATTENTION.search(key) and not NOT_ABOUT.search(key):
            return [not value]
        case _, float() if ABOUT_ATTENTION.search(key) and not NOT_ABOUT.search(key):
            return [value * 0.6] if value > 0 else []
    return []


def _is_nested(rope: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def outcome(model_type: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """List the faults of a type with these settings, found in a process with limits."""
    row: dict[str, Any] = {"type": model_type, "settings": drawn}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "faults.json"

        def work() -> None:
            try:
                fault_list = configuration_faults(
                    {"model_type": model_type}, Path(scratch) / "model", drawn
                )
                path.write_text(json.dumps({"faults": fault_list}))
            except Exception as error:  # of the model's code
                path.write_text(json.dumps({"not built": f"{type(error).__name__}: {error}"[:300]}))

        ended = in_a_process(work)
        return row | (json.loads(path.read_text()) if path.exists() else {"not built": ended})


def main() -> None:
    """Prove types with drawn settings; those that are wrong without any are listed apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--each", type=int, default=4, help="draws of each type")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    outcome("llama", {})  # what is loaded late is loaded once, for all processes
    with tempfile.TemporaryDirectory() as scratch:
        configuration_faults({"model_type": "llama"}, Path(scratch) / "model")
    counts: Counter[str] = Counter()
    with arguments.out.open("w", encoding="utf-8") as out:
        for model_type in arguments.types or CONFIG_MAPPING_NAMES:
            for number in range(-1, arguments.each):
                try:
                    drawn = draw(model_type, number, arguments.seed) if number >= 0 else {}
                except Exception as error:  # of the configuration's code
                    row = {"type": model_type, "not built": str(error)[:300]}
                else:
                    row = outcome(model_type, drawn)
                print(json.dumps(row), file=out, flush=True)
                plain = "not built" if "not built" in row else "wrong" if row["faults"] else "right"
                counts[plain if number >= 0 else f"{plain} by default"] += 1
                if number < 0 and plain != "right":
                    break
    print(dict(counts))


if __name__ == "__main__":
    main()
