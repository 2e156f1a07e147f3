"""Tiny models of transformers, converted by llama.cpp's own converter, and how they are read.

``python -m tests.families.converting`` writes `llama-cpp.jsonl`: of one model of each architecture
that converts, the metadata, the shapes of its attention's tensors, and what is read of them. It
needs llama.cpp's sources (the source distribution of llama-cpp-python contains them), in the folder
that LLAMA_CPP names.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

import wqk
from wqk.checkpoints.files import LocalFile
from wqk.checkpoints.gguf import configuration, open_gguf
from wqk.checkpoints.modules import StateDict

DATA = Path(__file__).parent / "llama-cpp.jsonl"

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1 + n / 10 for n in range(8)],
    "long_factor": [1 + n / 2 for n in range(8)], "original_max_position_embeddings": 64,
}  # fmt: skip

# Settings of a model that change its attention, by its class in transformers and a name.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": {
        "yarn": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    },
    "DeepseekV3ForCausalLM": {
        "yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    },
    "FalconForCausalLM": {"40b": {"new_decoder_architecture": True, "num_kv_heads": 2}},
    "Gemma2ForCausalLM": {"softcap": {"attn_logit_softcapping": 3.0}},
    "GraniteForCausalLM": {"multiplier": {"attention_multiplier": 0.3}},
    "LlamaForCausalLM": {
        "llama3": {"rope_parameters": LLAMA3},
        "yarn": {"rope_parameters": YARN},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    },
    "MptForCausalLM": {"clip": {"attn_config": {"clip_qkv": 0.7, "alibi": True}}},
    "Olmo3ForCausalLM": {"yarn": {"rope_parameters": YARN}},
    "OlmoForCausalLM": {"clip": {"clip_qkv": 0.7}},
    "Phi3ForCausalLM": {
        "long": {"rope_parameters": LONG, "max_position_embeddings": 256,
                 "original_max_position_embeddings": 64},
    },
    "Qwen2ForCausalLM": {"window": {"use_sliding_window": True, "max_window_layers": 1}},
    "StableLmForCausalLM": {"bias": {"use_qkv_bias": True}},
}  # fmt: skip

# What published configurations say and the converter reads; transformers no longer writes it.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {"rotary_pct": 1.0},
    "EuroBertModel": {"classifier_pooling": "mean"},
    "FalconH1ForCausalLM": {"head_dim": 16},
    "GPT2LMHeadModel": {"n_ctx": 256},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 12},
    "MptForCausalLM": {"architectures": ["MPTForCausalLM"]},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
}
# Where the small sizes are not those of any model that llama.cpp knows.
BUILT: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 24},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 24},
    "Gemma3TextModel": {"query_pre_attn_scalar": 24, "use_bidirectional_attention": True},
    # As in published files; the converter takes both for granted.
    "GlmForCausalLM": {"head_dim": 16},
    "PhiForCausalLM": {"num_key_value_heads": 6},
    # llama.cpp knows an expansion by two alone.
    "FalconMambaForCausalLM": {"intermediate_size": 192},
    "MambaForCausalLM": {"intermediate_size": 192},
    "NemotronForCausalLM": {"num_key_value_heads": 2, "head_dim": 16},
}


def jobs(llama_cpp: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Every class that transformers has and the converter knows, with its variants."""
    import transformers

    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import conversion

    conversion.load_all_models()
    names = [n for n in conversion.TEXT_MODEL_MAP if hasattr(transformers, n)] + ["MptForCausalLM"]
    return [
        (name, variant, change)
        for name in names
        for variant, change in {"": {}, **VARIANTS.get(name, {})}.items()
    ]


def build(name: str, change: dict[str, Any], folder: Path) -> None:
    """Save a tiny random model of this class, with a tokenizer that says nothing."""
    import transformers
    from tools.deriving.building import _made, _randomize
    from tools.deriving.shrinking import shrunk

    kind, failed = getattr(transformers, name), None
    for variant in range(3):
        try:
            config = shrunk(kind.config_class(), variant)
            if changes := BUILT.get(name, {}) | change:
                table = config.to_dict() | changes
                table.pop("architectures", None)
                config = type(config)(**table)
            config._attn_implementation = config._experts_implementation = "eager"
            model = _made(kind, config)
            break
        except Exception as error:
            failed = error
    else:
        raise RuntimeError(f"{name} is not built") from failed
    model.config = config
    _randomize(model)
    model.eval().save_pretrained(folder)
    path = folder / "config.json"
    told = json.loads(path.read_text()) | {"architectures": [name]} | PUBLISHED.get(name, {})
    share = (told.get("rope_parameters") or {}).get("partial_rotary_factor")
    told |= {"partial_rotary_factor": share} if share else {}
    path.write_text(json.dumps(told))
    vocabulary = {"type": "BPE", "vocab": {str(n): n for n in range(160)}}
    tokenizer = {"model": vocabulary, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def convert(folder: Path, path: Path) -> None:
    """Convert a folder as llama.cpp's script does, but for its vocabulary."""
    import conversion
    import gguf
    import torch

    logging.disable(logging.WARNING)
    base = conversion.ModelBase
    told = json.loads((folder / "config.json").read_text())
    hparams = told | base.load_hparams(folder, False)
    hparams |= PUBLISHED.get(told["architectures"][0], {})
    hparams["architectures"] = told["architectures"]
    kind = conversion.get_model_class(told["architectures"][0])
    known = base._model_classes[conversion.ModelType.TEXT].values()
    for owner in {owner for one in known for owner in one.__mro__ if "set_vocab" in vars(owner)}:
        owner.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
    kind.no_mtp = True
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=hparams).write()


def entry(name: str, path: Path) -> dict[str, Any]:
    """A line of the data: what of a GGUF file decides how its attention is read, and how it is."""
    model = wqk.open(path)
    about = open_gguf(LocalFile(path)).about["gguf"]
    architecture = about["general.architecture"]
    kept = {
        key: value
        for key, value in about.items()
        if key == "general.architecture"
        or re.search(r"\.(attention|rope|attn_|block_count|embedding_length|context_length|nextn"
                     r"|decoder_block|ssm)", key) or key.startswith("rope_")
    }  # fmt: skip
    shapes = {
        key: info.shape
        for key, info in model.checkpoint.tensors().items()
        if key.startswith(("blk.", "enc.", "dec.", "token_embd_norm"))
        and re.search(r"attn|norm|ssm_(in|out|x)\.", key) and "ffn" not in key
    }  # fmt: skip
    assert f"gguf-{architecture}" == model.checkpoint.config["model_type"]
    return {"name": name, "metadata": kept, "tensors": folded(shapes), "read": reading(model)}


def folded(shapes: dict[str, Any]) -> dict[str, list[Any]]:
    """Names with a star for the layer, and their shapes with the layers that have them."""
    table: dict[str, list[Any]] = {}
    for name, shape in shapes.items():
        star = re.sub(r"(?<=blk\.)\d+", "*", name)
        layers = [int(n) for n in re.findall(r"blk\.(\d+)", name)]
        rows = table.setdefault(star, [])
        row = next((row for row in rows if row[0] == list(shape)), None)
        if row is None:
            rows.append([list(shape), layers])
        else:
            row[1] += layers
    return table


def unfolded(table: dict[str, list[Any]]) -> StateDict | Any:
    """The shapes again, with zeros."""
    return {
        name.replace("*", str(layer)): np.broadcast_to(np.float32(0), shape)
        for name, rows in table.items()
        for shape, layers in rows
        for layer in layers or [0]
    }


def reading(model: wqk.Model) -> list[dict[str, Any]]:
    """What is read of the attention, layers that are alike together."""
    found: list[dict[str, Any]] = []
    for plan in model.scored:
        rotary = plan.rotary or (plan.positional and plan.positional.rotary)
        told = {
            "stack": plan.stack, "kind": plan.kind, "family": plan.family,
            "heads": [plan.query.heads, plan.key.heads, plan.query.head_width],
            "scale": float(f"{plan.scale:.7g}"), "softcap": plan.softcap, "clip": plan.clip,
            "causal": plan.causal, "window": plan.window, "position": plan.position,
            "sinks": plan.sinks is not None,
            "norms": [
                norm and [norm.kind, norm.epsilon]
                for norm in (plan.query.input_norm, plan.query.norm, plan.key.norm)
            ],
            "rotary": rotary and [
                rotary.order, float(f"{rotary.amplitude:.7g}"),
                *(float(f"{f:.7g}") for f in rotary.frequencies[[0, 1, -1]]),
                len(rotary.frequencies),
            ],
        }  # fmt: skip
        told = {key: value for key, value in told.items() if value not in (None, "", False)}
        same = next((one for one in found if {**one, "layers": 0} == {**told, "layers": 0}), None)
        if same is None:
            found.append({"layers": [plan.layer], **told})
        else:
            same["layers"].append(plan.layer)
    return found


def read_again(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The reading of a line's metadata and shapes."""
    tensors = unfolded(line["tensors"])
    return reading(wqk.open(StateDict(tensors, configuration(line["metadata"]), line["name"])))


def main() -> None:
    import tempfile

    llama_cpp = Path(os.environ["LLAMA_CPP"])
    lines, seen = [], set()
    for name, variant, change in jobs(llama_cpp):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            try:
                build(name, change, Path(folder) / "model")
                convert(Path(folder) / "model", path)
                line = entry(f"{name} {variant}".strip(), path)
            except Exception as error:
                print(f"{name} {variant}: {type(error).__name__}: {error!s:.120}")
                continue
        architecture = line["metadata"]["general.architecture"]
        if variant or architecture not in seen:
            lines.append(json.dumps(line))
        seen.add(architecture)
    DATA.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
