"""Families from records: which known family fits a model type, or else a rule made from evidence.

    python -m tests.families.deriving.deriving RECORDS [TYPE...]

A type is proven where forms, scale, positions and masks are what the model computed. What proves is
written to the families' data; what is left is printed with what stands in its way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.families.deriving.judging import content_of
from tests.families.deriving.proof import faults
from tests.families.deriving.records import Record, read_record
from wqk.checkpoints import open_checkpoint
from wqk.errors import WqkError
from wqk.families import families
from wqk.families.family import Family, parse_family
from wqk.families.naming import prefixes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.families.deriving.records import Site, Source

    from wqk.checkpoints import Checkpoint

HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "nhead",
         "encoder_attention_heads", "num_encoder_attention_heads", "n_layer_heads")  # fmt: skip
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
             "kv_n_heads", "n_kv_heads")  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers",
          "num_encoder_layers", "depths")  # fmt: skip
OUTPUTS = re.compile(r"(o|out|output|c|linear_out)_?(proj|lin|put)?|wo|proj|dense|Wo|projection")
VALUE = (("query", "value"), ("q_", "v_"), ("_q", "_v"), ("Wq", "Wv"), ("q", "v"), ("queries", "values"))


def fitting_family(
    record: Record, checkpoint: Checkpoint, known: Mapping[str, Family]
) -> tuple[str, list[str]]:
    """The known family that is proven by a record; or else the nearest one and its faults."""
    tensors = checkpoint.tensors()
    nearest: tuple[str, list[str]] = ("", ["no family has such names"])
    for name, family in known.items():
        if family.refusal or not any(prefixes(tensors, rule) for rule in family.attention):
            continue
        try:
            found = faults(record, checkpoint, family)
        except WqkError as error:
            found = [str(error)]
        if not found:
            return name, []
        if not nearest[0] or len(found) < len(nearest[1]):
            nearest = name, found
    return nearest


def rules_of(record: Record, checkpoint: Checkpoint) -> Iterator[list[dict[str, Any]]]:
    """Candidates for a type's rules, one table for each kind of attention in it."""
    groups: dict[tuple[str, str, bool], list[Site]] = {}
    for site in record.sites:
        product = content_of(site)[0]
        query, key = _nearest(product.query_sources), _nearest(product.key_sources)
        if query is None or key is None:
            return
        same = query.given is key.given or query.given.shape == key.given.shape
        named = re.search(r"cross|encoder_attn|encdec|enc_dec", query.parameter.lower())
        place = (_template(query.parameter), _template(key.parameter), bool(named) or not same)
        groups.setdefault(place, []).append(site)
    options = [list(_candidates(record, checkpoint, *place, s)) for place, s in groups.items()]
    # The first candidate of each is tried with all others; few groups have many candidates.
    yield from itertools.islice((list(rules) for rules in itertools.product(*options)), 96)


def _nearest(sources: Sequence[Source]) -> Source | None:
    return next((source for source in sources if source.parameter), None)


def _template(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "#", name.removesuffix(".weight"))


def _candidates(
    record: Record, checkpoint: Checkpoint, query: str, key: str, cross: bool, sites: Sequence[Site]
) -> Iterator[dict[str, Any]]:
    tensors = checkpoint.tensors()
    product = content_of(sites[0])[0]
    source, key_source = _nearest(product.query_sources), _nearest(product.key_sources)
    assert source is not None
    assert key_source is not None
    saved = _saved(tensors, source.parameter), _saved(tensors, key_source.parameter)
    if not all(saved):
        return
    shape, key_shape = (tensors[name].shape for name in saved if name)
    width = product.queries.shape[-1]
    names = [content_of(site)[0].query_sources for site in sites]
    spelled = _spelling(tensors, [s.parameter for s in map(_nearest, names) if s], query)
    rule: dict[str, Any] = {"stack": _stack(record, source.parameter, sites)}
    if cross:
        rule["kind"] = "cross"
    config = checkpoint.config
    rule |= _causal(sites, config, cross)
    rule["layers"] = _layers(spelled, config, rule["stack"])
    rule["every_layer"] = False
    norms = list(_norms(tensors, saved[0] or "", saved[1] or "", product))
    rule |= _input_norm(source, spelled, query)
    rule |= _terms(product, sites)
    shared = query == key
    bodies: list[dict[str, Any]] = []
    if shared:
        for order in ("qkv", "kqv", "vqk", "qvk", "qk", "kv"):
            bodies.append({"layout": "sectioned", "fused": spelled, "order": order})
        bodies.append({"layout": "grouped", "fused": spelled})
        bodies.append({"layout": "conv1d", "fused": spelled})
        counts = _keys(config, HEADS, None, rule["stack"])
        key_counts = [None, *_keys(config, KEY_HEADS, None, rule["stack"])]
    else:
        key_spelled = spelled.replace(*_difference(query, key))
        bodies.append({"query": spelled, "key": key_spelled} | _value(tensors, saved[0] or "", spelled))
        counts = _keys(config, HEADS, shape[0] // width, rule["stack"])
        groups = key_shape[0] // width
        key_counts = [None] if groups == shape[0] // width else []
        key_counts += _keys(config, KEY_HEADS, groups, rule["stack"])
    for body, heads, groups_key, norm in itertools.product(bodies, counts, key_counts, norms):
        known = rule | body | norm | {"heads": heads}
        if groups_key:
            known["key_heads"] = groups_key
        elif any(k in config for k in KEY_HEADS):
            known["key_heads"] = []
        yield known


def _saved(tensors: Mapping[str, Any], name: str) -> str | None:
    """The saved tensor of a live one: of its name, or of one that ends alike."""
    for ending in (name, *(name.partition(".")[2::2])):
        if ending in tensors:
            return ending
    found = [n for n in tensors if n.endswith(f".{name}") or name.endswith(f".{n}")]
    return found[0] if len(found) == 1 else None


def _spelling(tensors: Mapping[str, Any], live: Sequence[str], template: str) -> str:
    """A name with ``{layer}`` where its layers differ."""
    names = [_saved(tensors, name) or name for name in live]
    parts = [name.removesuffix(".weight").split(".") for name in names]
    numbers = [i for i, word in enumerate(parts[0]) if word.isdigit()]
    varying = [i for i in numbers if len({p[i] for p in parts}) > 1] or numbers[:1]
    told = iter(["{layer}", "{block}", "{third}"])
    return ".".join(next(told) if i in varying else word for i, word in enumerate(parts[0]))


def _difference(query: str, key: str) -> tuple[str, str]:
    """The last words of two names, in which they differ."""
    a, b = query.split("."), key.split(".")
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a) - 1)
    return ".".join(a[i:]), ".".join(b[i:])


def _stack(record: Record, name: str, sites: Sequence[Site]) -> str:
    words = re.split(r"[._]", name.lower())
    if "decoder" in words:
        return "decoder"
    for stack in ("vision", "audio", "text"):
        if stack in words or stack in re.split(r"[-_]", record.model_type):
            if stack == "text" and sites[0].causal:
                return "decoder"
            return stack
    return "decoder" if sites[0].causal else "encoder"


def _causal(sites: Sequence[Site], config: Mapping[str, Any], cross: bool) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if not cross and all(site.causal for site in sites):
        said["causal"] = True
    tokens = content_of(sites[0])[0].queries.shape[1]
    if any(0 <= site.reach < tokens - 1 for site in sites):
        key = next((k for k in ("sliding_window", "attention_window") if config.get(k)), None)
        if key:
            said["window"] = key
    return said


def _layers(spelled: str, config: Mapping[str, Any], stack: str) -> str:
    own = [f"{stack}_layers", f"num_{stack}_layers"]
    return next((key for key in [*own, *LAYERS] if config.get(key)), LAYERS[0])


def _keys(
    config: Mapping[str, Any], keys: Sequence[str], number: int | None, stack: str
) -> list[str]:
    """Keys of the configuration that hold this number; the stack's own first."""
    own = [f"{stack}_attention_heads", f"{stack}_num_attention_heads", f"num_{stack}_heads"]
    own = own if keys is HEADS else [f"{stack}_num_key_value_heads"]
    fitting = [k for k in [*own, *keys] if _is_count(config.get(k), number)]
    return list(dict.fromkeys(fitting))


def _is_count(value: Any, number: int | None) -> bool:
    if isinstance(value, list):
        return bool(value) and (number is None or number in value)
    return type(value) is int and (number is None or value == number)


NORM_WORDS = re.compile(r"(norm|ln|layernorm|layer_norm)", re.IGNORECASE)


def _norms(
    tensors: Mapping[str, Any], query: str, key: str, product: Any
) -> Iterator[dict[str, Any]]:
    """Norms between projection and score: none, or pairs of vectors beside the projections."""
    yield {}
    parent = query.rpartition(".")[0].rpartition(".")[0]
    near = [
        name.removesuffix(".weight")
        for name, info in tensors.items()
        if name.startswith(f"{parent}.") and name.endswith(".weight") and len(info.shape) == 1
    ]
    pairs = []
    for a in near:
        word = a.rpartition(".")[2]
        for x, y in (("q", "k"), ("query", "key"), ("Q", "K"), ("queries", "keys")):
            other = re.sub(rf"(^|_)?{x}(?=$|_|n)", lambda m, y=y: (m[1] or "") + y, word, count=1)
            b = f"{parent}.{other}" if a == f"{parent}.{word}" else a.replace(word, other)
            if other != word and b in near:
                pairs.append((a, b))
    for a, b in dict.fromkeys(pairs):
        stems = [_numbered(name) for name in (a, b)]
        for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0)):
            rule: dict[str, Any] = {"query_norm": stems[0], "key_norm": stems[1]}
            rule |= {"norm": kind} if kind != "rms" else {}
            rule |= {"norm_offset": offset} if offset else {}
            yield rule
    if not pairs and {"rsqrt", "norm", "linalg_vector_norm", "_fused_rms_norm"} & set(
        product.query_sources[0].operations
    ):
        yield {"norm_gain": False}


def _numbered(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "{layer}", name, count=1)


def _input_norm(source: Source, spelled: str, query: str) -> dict[str, Any]:
    if not source.norm or not source.norm[1]:
        return {}
    kind, gain, _, offset = source.norm
    stem = _numbered(gain.removesuffix(".weight"))
    if "{layer}" not in stem:
        return {}
    # The norm of the same layer, rather than one of the layer before.
    own, norm = re.search(r"\d+", source.parameter), re.search(r"\d+", gain)
    if not own or not norm or own[0] != norm[0]:
        return {}
    rule: dict[str, Any] = {"input_norm": stem}
    rule |= {"input_norm_kind": "layer"} if kind == "layer" else {}
    rule |= {"input_norm_offset": 1.0} if offset == "1" else {}
    return rule


def _terms(product: Any, sites: Sequence[Site]) -> dict[str, Any]:
    if product.terms or any(len(site.products) > len(content_of(site)) for site in sites):
        return {"position": "relative"}
    return {}


def _value(tensors: Mapping[str, Any], query: str, spelled: str) -> dict[str, Any]:
    """The value's and the output's spellings, by what lies beside the queries."""
    parent, _, word = query.removesuffix(".weight").rpartition(".")
    found: dict[str, Any] = {}
    for before, after in VALUE:
        if word.startswith(before) or before in word:
            value = f"{parent}.{word.replace(before, after, 1)}"
            if f"{value}.weight" in tensors and value != query.removesuffix(".weight"):
                found["value"] = spelled.rpartition(".")[0] + "." + word.replace(before, after, 1)
                break
    heads = tensors[query].shape[0]
    grand = parent.rpartition(".")[0]
    for stem, near in ((parent, spelled.rpartition(".")[0]),
                       (f"{grand}.output", spelled.rpartition(".")[0].rpartition(".")[0] + ".output")):  # fmt: skip
        outputs = [
            name
            for name, info in tensors.items()
            if name.rpartition(".")[0].rpartition(".")[0] == stem
            and name.endswith(".weight")
            and len(info.shape) == 2
            and info.shape[1] == heads
            and OUTPUTS.fullmatch(name.removesuffix(".weight").rpartition(".")[2])
        ]
        if len(outputs) == 1:
            found["output"] = f"{near}.{outputs[0].removesuffix('.weight').rpartition('.')[2]}"
            break
    return found


SCALES: tuple[tuple[str, ...], ...] = (
    (), ("scaling",), ("attention_multiplier",), ("query_pre_attn_scalar ** -0.5",),
    ("scale",), ("hidden_size ** -0.5",), ("head_dim ** -0.5",), ("d_model ** -0.5",),
    ("embed_dim ** -0.5",),
)  # fmt: skip
ROTARY: tuple[dict[str, Any], ...] = (
    {"order": "half"}, {"order": "interleaved"},
    {"order": "half", "default_fraction": 0.5}, {"order": "interleaved", "default_fraction": 0.5},
)  # fmt: skip


def derive(record: Record, checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    """Rules that are proven by a record; or none, and the faults of the best that was tried."""
    best: list[str] = ["no rule could be made from what was recorded"]
    for rules in rules_of(record, checkpoint):
        rules, found = _mended(record, checkpoint, rules)  # noqa: PLW2901
        if not found:
            return rules, []
        wrong = sum("read" in fault for fault in found)
        if wrong == 0 or len(found) < len(best):
            best = found
    return [], best


def _mended(
    record: Record, checkpoint: Checkpoint, rules: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scale and rotary positions are tried one after the other where only they are at fault."""
    found = _faults(record, checkpoint, rules)
    if any("read" in fault for fault in found):
        return rules, found
    for scale in SCALES:
        if not any(fault.startswith("scale") for fault in found):
            break
        changed = [rule | {"scale": list(scale)} for rule in rules]
        told = _faults(record, checkpoint, changed)
        if len(told) < len(found):
            rules, found = changed, told
    for rotary in ROTARY:
        if not any("rotary" in fault for fault in found):
            break
        changed = [
            rule | ({"rotary": rotary} if rule.get("kind") != "cross" else {}) for rule in rules
        ]
        told = _faults(record, checkpoint, changed)
        if len(told) < len(found):
            rules, found = changed, told
    if any("rotary" in fault for fault in found):
        changed = [
            rule | ({"position": "rotary, of its own kind"} if rule.get("kind") != "cross" else {})
            for rule in rules
        ]
        told = _faults(record, checkpoint, changed)
        if len(told) < len(found):
            rules, found = changed, told
    return rules, found


def _faults(record: Record, checkpoint: Checkpoint, rules: list[dict[str, Any]]) -> list[str]:
    try:
        family = parse_family(family_text("derived", ["derived"], rules), "derived")
        return faults(record, checkpoint, family)
    except WqkError as error:
        return [f"cannot be read: {error}"]


def family_text(name: str, types: Sequence[str], rules: Sequence[Mapping[str, Any]]) -> str:
    """A family file."""
    lines = [f"name = {json.dumps(name)}", f"model_types = {json.dumps(list(types))}"]
    for rule in rules:
        lines += ["", "[[attention]]"]
        rotary = rule.get("rotary")
        for key, value in rule.items():
            if key == "rotary" or (key == "layout" and value == "separate"):
                continue
            if key == "order" and value == "qkv":
                continue
            lines.append(f"{key} = {json.dumps(value)}")
        if rotary:
            lines += ["", "[attention.rotary]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in rotary.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    known = dict(families())
    listed = {kind for family in known.values() for kind in family.model_types}
    types = given.types or sorted(p.name for p in given.records.iterdir() if p.is_dir())
    counts: Counter[str] = Counter()
    rows = []
    for model_type in types:
        folder = given.records / model_type
        if model_type in listed or not (folder / "config.json").exists():
            continue
        record = read_record(folder)
        if not record.sites:
            continue
        checkpoint = open_checkpoint(folder)
        try:
            name, found = fitting_family(record, checkpoint, known)
            rules: list[dict[str, Any]] = []
            if found:
                rules, found = derive(record, checkpoint)
                if rules:
                    name = model_type.replace("_", "-")
                    text = family_text(name, [model_type], rules)
                    known[name] = parse_family(text, name)
        except Exception as error:  # noqa: BLE001
            name, found, rules = "", [f"{type(error).__name__}: {error}"], []
        outcome = "left" if found else "new" if rules else "known"
        counts[outcome] += 1
        rows.append({"type": model_type, "outcome": outcome, "family": name, "rules": rules, "faults": found})
        print(f"{model_type:32} {outcome:6} {name:24} {'; '.join(found)[:200]}", flush=True)
    if given.out:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(counts, file=sys.stderr)


if __name__ == "__main__":
    main()
