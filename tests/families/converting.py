"""Tiny models of transformers, converted by llama.cpp's own converter, and their readings.

``python -m tests.families.converting`` writes `llama-cpp.jsonl`: for a model of each architecture
that converts, the metadata, the shapes of the attention's tensors, and the reading. The program
needs llama.cpp's sources in the folder LLAMA_CPP; the source distribution of llama-cpp-python
contains the sources.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import wqk
from wqk.checkpoints.gguf import configuration, open_gguf
from wqk.checkpoints.modules import StateDict
from wqk.storage.local import LocalFile

DATA = Path(__file__).parent / "llama-cpp.jsonl"

SETTINGS = tomllib.loads(DATA.with_name("converting.toml").read_text(encoding="utf-8"))
VARIANTS, PUBLISHED, BUILT = (SETTINGS[table] for table in ("variants", "published", "built"))


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
    """Save a tiny random model of a class, with an empty tokenizer."""
    import transformers
    from tools.deriving.building import instantiated, randomize
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
            model = instantiated(kind, config)
            break
        except Exception as error:
            failed = error
    else:
        raise RuntimeError(f"{name} is not built") from failed
    model.config = config
    randomize(model)
    model.eval().save_pretrained(folder)
    path = folder / "config.json"
    written_config = (
        json.loads(path.read_text()) | {"architectures": [name]} | PUBLISHED.get(name, {})
    )
    share = (written_config.get("rope_parameters") or {}).get("partial_rotary_factor")
    written_config |= {"partial_rotary_factor": share} if share else {}
    path.write_text(json.dumps(written_config))
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
    config = json.loads((folder / "config.json").read_text())
    hparams = config | base.load_hparams(folder, False)
    hparams |= PUBLISHED.get(config["architectures"][0], {})
    hparams["architectures"] = config["architectures"]
    kind = conversion.get_model_class(config["architectures"][0])
    model_classes = base._model_classes[conversion.ModelType.TEXT].values()
    for owner in {
        owner
        for model_class in model_classes
        for owner in model_class.__mro__
        if "set_vocab" in vars(owner)
    }:
        owner.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
    kind.no_mtp = True
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=hparams).write()


def entry(name: str, path: Path) -> dict[str, Any]:
    """A line of the data: parts of a GGUF file that decide about attention, and the reading."""
    model = wqk.open(path)
    about = open_gguf(LocalFile(path)).about["gguf"]
    architecture = about["general.architecture"]
    kept = {
        key: value
        for key, value in about.items()
        if key == "general.architecture"
        or re.search(
            r"\.(attention|rope|attn_|block_count|embedding_length|context_length|nextn"
            r"|decoder_block|ssm)",
            key,
        )
        or key.startswith("rope_")
    }
    shapes = {
        key: info.shape
        for key, info in model.checkpoint.tensors().items()
        if key.startswith(("blk.", "enc.", "dec.", "token_embd_norm"))
        and re.search(r"attn|norm|ssm_(in|out|x)\.", key)
        and "ffn" not in key
    }
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
    """Facts that are read about the attention; equal layers share an entry."""
    entries: list[dict[str, Any]] = []
    for plan in model.scored:
        rotary = plan.rotary or (plan.positional and plan.positional.rotary)
        facts = {
            "stack": plan.stack,
            "kind": plan.kind,
            "family": plan.family,
            "heads": [plan.query.heads, plan.key.heads, plan.query.head_width],
            "scale": float(f"{plan.score_scale:.7g}"),
            "softcap": plan.softcap,
            "clip": plan.clip,
            "causal": plan.causal,
            "window": None if plan.window is None else str(plan.window),
            "position": plan.position,
            "sinks": plan.sinks is not None,
            "norms": [
                norm and [norm.kind, norm.epsilon]
                for norm in (plan.query.input_norm, plan.query.norm, plan.key.norm)
            ],
            "rotary": rotary
            and [
                rotary.order,
                float(f"{rotary.amplitude:.7g}"),
                *(float(f"{f:.7g}") for f in rotary.frequencies[[0, 1, -1]]),
                len(rotary.frequencies),
            ],
        }
        facts = {key: value for key, value in facts.items() if value not in (None, "", False)}
        matching_entry = next(
            (entry for entry in entries if {**entry, "layers": 0} == {**facts, "layers": 0}), None
        )
        if matching_entry is None:
            entries.append({"layers": [plan.layer], **facts})
        else:
            matching_entry["layers"].append(plan.layer)
    return entries


def model_of(line: dict[str, Any]) -> wqk.Model:
    """A model with a line's metadata and shapes."""
    tensors = unfolded(line["tensors"])
    return wqk.open(StateDict(tensors, configuration(line["metadata"]), line["name"]))


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
