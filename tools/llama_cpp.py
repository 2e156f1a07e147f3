"""Facts about the attention of each architecture in llama.cpp, taken from its sources.

``python -m tools.llama_cpp FOLDER COMMIT`` reads a copy of llama.cpp (the source distribution of
llama-cpp-python contains one) and writes `src/wqk/checkpoints/llama-cpp.toml`, and the model types
of the families of GGUF files. The code of an architecture is regular: a function that reads the
metadata, one that makes the tensors, one that builds the graph. Its statements on windows, scales,
norms and rotary positions are found by patterns; `tests/families/test_llama_cpp.py` proves
the result on models that llama.cpp's own converter has written.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import wqk

PACKAGE = Path(wqk.__file__).parent
TABLE = PACKAGE / "checkpoints" / "llama-cpp.toml"
HEAD = "# Written by tools/llama_cpp.py from llama.cpp's sources.\n"

# Keys of the metadata that only some architectures read.
OPTIONAL = (
    "SCALE",
    "SLIDING_WINDOW",
    "SLIDING_WINDOW_PATTERN",
    "CLAMP_KQV",
    "MAX_ALIBI_BIAS",
    "OUTPUT_SCALE",
    "ROPE_PATTERN",
)


class LlamaSources:
    """The code of all architectures, by their names in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = {f.stem: _plain(f.read_text()) for f in (folder / "src/models").glob("*.cpp")}
        self.all = "\n".join(self.text.values())
        self.heads = _plain((folder / "src/models/models.h").read_text())
        self.model = _plain((folder / "src/llama-model.cpp").read_text())
        self.context = _plain((folder / "src/llama-context.cpp").read_text())
        names = _plain((folder / "src/llama-arch.cpp").read_text())
        names = names[names.index("LLM_ARCH_NAMES = {") :]
        names = names[: names.index("};")]
        self.names = dict(re.findall(r"\{ (LLM_ARCH_\w+), *\"([^\"]+)\"", names))
        self.names.pop("LLM_ARCH_UNKNOWN")
        self.classes = dict(
            re.findall(r"case (LLM_ARCH_\w+):\s+return new (llama_model_\w+)", self.model)
        )
        self.rotary = dict(_rotary_kinds(self.model, self.names))

    def function(self, kind: str, name: str) -> str:
        """A function of a class, of its parents, or of the class whose graph it uses."""
        head = rf"\b{kind}(?:<\w+>)?::{name}(?:<\w+>)?(?:::graph)?\([^;]*?\)"
        definition = re.search(rf"{head} *(const)? *(:[^{{;]*)?{{.*?\n}}", self.all, re.S)
        if definition:
            return definition[0]
        base = re.search(rf"struct {kind} : public (\w+) {{(.*?)\n}};", self.heads, re.S)
        if base is None:
            return ""
        borrowed = re.search(r"using graph = (\w+)::", base[2]) if "graph" in name else None
        return self.function(borrowed[1] if borrowed else base[1], name)

    def graph(self, kind: str) -> str:
        """The graph, with the functions of its own that it calls."""
        text = self.function(kind, "graph")
        called = re.findall(r"\b(build_(?!attn_inp|norm|qkv|ffn|moe)\w+)\(", text)
        return text + "".join(
            self.function(kind, f"graph::{name}") for name in dict.fromkeys(called)
        )


def _plain(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _rotary_kinds(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the results of `llama_model_rope_type`; `mrope` comes first if sections matter."""
    body = text[text.index("llama_rope_type llama_model_rope_type(") :]
    waiting: list[str] = []
    for line in body.splitlines():
        case = re.match(r"\s+case (LLM_ARCH_\w+):", line)
        kinds = re.findall(r"LLAMA_ROPE_TYPE_(\w+)", line)
        if case:
            waiting.append(case[1])
        elif kinds and waiting:
            yield from ((architecture, " ".join(kinds).lower()) for architecture in waiting)
            waiting = []


def facts(sources: LlamaSources, architecture: str) -> dict[str, Any]:
    """Return the facts about an architecture in which it differs from most."""
    kind = sources.classes.get(architecture)
    if kind is None:
        return {"unread": "llama.cpp has only its name"}
    read = sources.function(kind, "load_arch_hparams")
    tensors = sources.function(kind, "load_arch_tensors")
    graph = sources.graph(kind)
    made: dict[str, Any] = {}
    rotary = sources.rotary.get(architecture, "none")
    order = {"norm": "interleaved", "none": "none"}.get(rotary.split()[-1], "half")
    made["rotary"] = order if len(set(rotary.split())) == 1 or order == "half" else "by sections"
    only = re.search(r"if \(([^{}]*model\.arch == [^{}]*)\) {\s*Qcur = ggml_rope", graph)
    if "ggml_rope" not in graph or (only and f"{architecture} " not in f"{only[1]} "):
        made["rotary"] = "none"
    made |= {"keys": keys} if (keys := _optional(read)) else {}
    made |= _norms(graph, tensors)
    if "use_kq_norm = " in read:
        made["bare_head_norm"] = True
    made |= _window(read)
    made |= _positions(read, graph)
    made |= _scores(sources, architecture, read, graph, tensors)
    return made


def _optional(read: str) -> list[str]:
    """Return the optional keys that the architecture reads."""
    keys_read = re.findall(r"LLM_KV_(?:ATTENTION_)?(\w+)", read)
    return [key.lower() for key in OPTIONAL if key in keys_read]


def _norms(graph: str, tensors: str) -> dict[str, Any]:
    """The norm that is projected from, and those of queries and keys."""
    made: dict[str, Any] = {}
    norms = re.findall(r"build_norm\(([^;]*?)\)\s*;", graph, re.S)
    attention_norms = [n for n in norms if re.search(r"\battn_norm\b", n)]
    bare = [n for n in norms if re.match(r"inpL,\s*(NULL|nullptr),\s*(NULL|nullptr)", n)]
    if attention_norms:
        made["norm"] = _norm_kind(attention_norms[0])
    elif bare:
        made["norm"], made["gain"] = _norm_kind(bare[-1]), False
    elif "layer_out_norm" in graph:
        made["norm"], made["after"] = _norm_kind(norms[-1]), True
    else:
        made["norm"] = "none"
    heads = [n for n in norms if "attn_q_norm" in n]
    if heads:
        made["head_norm"] = _norm_kind(heads[0])
        turned = re.search(r"ggml_rope_\w+\(", graph)
        if turned and graph.index("attn_q_norm") > turned.start():
            made["norm_after_rotary"] = True
    return made


def _norm_kind(call: str) -> str:
    return "rms" if "LLM_NORM_RMS" in call else "layer" if "LLM_NORM" in call else "either"


def _window(read: str) -> dict[str, Any]:
    """Its size where the file is silent or overruled, and which layers have none."""
    kinds = re.findall(r"swa_type\s*=\s*LLAMA_SWA_TYPE_(\w+)", read)
    if not set(kinds) - {"NONE"}:
        return {}
    made: dict[str, Any] = {"kind": next(k for k in kinds if k != "NONE").lower()}
    size = re.search(r"hparams\.n_swa\s*=\s*(\d+)", read)
    key = re.search(r"LLM_KV_ATTENTION_SLIDING_WINDOW,", read)
    if size and int(size[1]):
        fixed = key is not None and key.start() < size.start()
        made["always" if fixed else "size"] = int(size[1])
    pattern = re.search(
        r"(?:load_swa_pattern\(ml, |set_swa_pattern\()(\d+)(, *true|, */\*.*?\*/true)?", read
    )
    if pattern:
        made["every"] = int(pattern[1])
        made |= {"first": True} if pattern[2] else {}
    if re.search(r"is_swa_impl\[il\] = !hparams.is_recr", read):
        made["every"] = 0
    depth = re.match(r"[^;]*if \(hparams\.n_layer\(\) == (\d+)\)", read)
    made |= {"depth": int(depth[1])} if depth else {}
    return {"window": made}


def _positions(read: str, graph: str) -> dict[str, Any]:
    """The rotary positions of windowed layers, and layers that have none."""
    made: dict[str, Any] = {}
    if re.search(r"get_rope_freq_base|rope_freq_base_train_swa : freq_base", graph):
        inherits = re.search(r"freq_base_train_swa\s*=\s*hparams\.rope_freq_base_train", read)
        made["local_base"] = "same" if inherits else "own"
    plain = re.search(r"freq_base, 1\.0,", graph)
    scaled = re.search(r"get_rope_freq_scale|rope_freq_scale_train_swa : freq_scale", graph)
    inherits = re.search(r"freq_scale_train_swa\s*=\s*hparams\.rope_freq_scale_train", read)
    if plain or (scaled and not inherits):
        made["local_scaling"] = False
    if (
        re.search(
            r"use_rope\s*=\s*hparams\.is_swa\(il\)|if \(is_swa( \|\| force_rope)?\) {|"
            r"if \(hparams\.is_swa\(il\)\) {|if \(is_local_layer\)|"
            r"use_rope\s*=\s*is_local_layer",
            graph,
        )
        and not plain
    ):
        made["turned"] = "windowed"
    step = re.search(r"n_no_rope_layer_step\s*=\s*(\d+)", read)
    if "n_no_rope_layer_step" in graph:
        made["turned"] = "every"
        made["unturned_every"] = int(step[1]) if step else 4
        if re.search(r"[^)] il % hparams\.n_no_rope", graph):
            made["unturned_first"] = True
    if "ROPE_SCALING_FINETUNED" in read:
        made["turned"] = "finetuned"
    if re.search(r"is_swa \? nullptr|if \(!hparams\.is_swa\(il\)\) {\s*freq_factors", graph):
        made["factors"] = "full"
    elif re.search(r"rope_factors|freq_factors|rope_freqs", graph):
        made["factors"] = "all"
    return made


def _scores(
    sources: LlamaSources, architecture: str, read: str, graph: str, tensors: str
) -> dict[str, Any]:
    """Scale, limits, mask and what is added to the scores."""
    made: dict[str, Any] = {}
    constant = re.search(r"f_attention_scale\s*=\s*(1\.0f);", read)
    wide = re.search(r"f_attention_scale = type == LLM_TYPE_27B", read)
    out = re.search(r"f_attn_out_scale = ([\d.]+)", read)
    if out:
        made["scale"] = float(out[1])
    elif constant or (
        re.search(r"build_attn\(\s*inp_attn(?:_self)?,[^;]*1\.0f, il\)", graph)
        and not re.search(r"Qcur = ggml_scale", graph)
    ):
        made["scale"] = 1.0
    elif wide:
        made["wide_scale_at"] = int(re.search(r"case (\d+): type = LLM_TYPE_27B", read)[1])
    elif re.search(r"1\.0f/float\(n_embd_head\)", graph):
        made["scale"] = "inverse"
    if re.search(r"causal_attn\s*=\s*false", read):
        made["causal"] = False
    if re.search(r"f_max_alibi_bias\s*=\s*8", read):
        depth = re.search(r"case (\d+): type = LLM_TYPE_13B", read)
        made["alibi_at" if "type == LLM_TYPE_13B" in read else "alibi"] = (
            int(depth[1]) if "type == LLM_TYPE_13B" in read else True
        )
    if "attn_sinks" in graph:
        made["sinks"] = True
    cap = re.search(r"f_attn_logit_softcapping\s*=\s*([\d.]+)", read)
    if "attn_soft_cap" in read or cap:
        made["softcap"] = float(cap[1]) if cap else 50.0
    if "inp_attn_scale" in graph:
        made["temperature"] = True
    log = re.search(r"rope_yarn_log_mul\s*/=\s*([\d.]+)f", read)
    if "YARN_LOG_MUL" in read:
        made["yarn_log"] = 1 / float(log[1]) if log else 1.0
    applies_to_both = re.search(
        rf"model\.arch == {architecture} && mscale_all_dims", sources.context
    )
    made |= {"yarn_both": True} if applies_to_both else {}
    if "ATTN_KV_A_MQA" in tensors:
        made["latent"] = True
    if re.search(r"Qcur_full", graph):
        made["gated"] = True
    if not re.search(
        r"create_tensor_qkv|LLM_TENSOR_(DEC_|ENC_)?ATTN_(Q|QKV|K|KV_A_MQA|Q_A)\b", tensors
    ):
        convolved = "POS_NET_ATTN_Q" in tensors
        made["unread"] = "attention made of convolutions" if convolved else "no attention"
    return made


# Architectures whose attention has no form of its own, as their graphs were read, and the family
# that says why.
REFUSED = {
    "dflash": "draft",
    "eagle3": "draft",
    "gemma4-assistant": "draft",
    "deepseek4": "compressed",
    "glm5-next": "compressed",
    "qwen4exp": "compressed",
    "gptj": "other",
    "graniteswitch": "other",
    "hrm_text": "other",
    "minimax-01": "other",
}


def family_of(name: str, row: Mapping[str, Any]) -> str:
    """The family that reads files of an architecture."""
    if name in REFUSED:
        return f"gguf-{REFUSED[name]}"
    if name in ("t5", "t5encoder"):
        return "gguf-t5"
    if name == "clip":
        return "gguf-vision"
    if "unread" in row:
        return "gguf-without"
    for fact, family in FAMILIES.items():
        if row.get(fact):
            return family
    if row["norm"] in ("layer", "either"):
        return "gguf-layer-norm"
    return "gguf-chameleon" if row.get("head_norm") == "layer" else "gguf"


FAMILIES = {
    "latent": "gguf-latent",
    "gated": "gguf-gated",
    "norm_after_rotary": "gguf-hunyuan",
    "after": "gguf-encoder",
    "bare_head_norm": "gguf-llama4",
}


def write_types(table: Mapping[str, Mapping[str, Any]]) -> None:
    """Write into each family of GGUF files the architectures that it reads."""
    for file in sorted((PACKAGE / "families" / "data").glob("gguf*.toml")):
        types = sorted(
            f"gguf-{name}" for name, row in table.items() if family_of(name, row) == file.stem
        )
        lines = textwrap.wrap(", ".join(map(json.dumps, types)) + ",", 96, break_on_hyphens=False)
        listed = "model_types = [\n" + "".join(f"    {line}\n" for line in lines) + "]"
        if len(types) == 1:
            listed = f"model_types = [{json.dumps(types[0])}]"
        text = re.sub(r"model_types = \[.*?\]", listed, file.read_text("utf-8"), flags=re.S)
        file.write_text(text, "utf-8")


def main(folder: Path, commit: str) -> None:
    sources = LlamaSources(folder)
    table = {name: facts(sources, architecture) for architecture, name in sources.names.items()}
    write_types(table)
    text = HEAD + f'commit = "{commit}"\n\n'
    for name, row in sorted(table.items()):
        text += f"{json.dumps(name)} = {_inline(row)}\n"
    TABLE.write_text(text, encoding="utf-8")


def _inline(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{ " + ", ".join(f"{key} = {_inline(entry)}" for key, entry in value.items()) + " }"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
