"""Rules made from what was recorded: names, layouts, counts and norms that may be a model's.

Every rule is a candidate that has to be proven: the record contains the parameters that queries and
keys come from, and the configuration which of its keys hold the numbers that the shapes have.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.deriving.judging import beside, content_of, head_biases, is_learned
from tools.deriving.proof import norm_kind
from tools.deriving.writing import rule_table

from wqk.checkpoints import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tools.deriving.records import Product, RunRecord, Site, VectorSource

    from wqk.checkpoints import Checkpoint
    from wqk.families import Family

HEADS = (
    "num_attention_heads_per_layer",
    "num_attention_heads",
    "n_head",
    "num_heads",
    "n_heads",
    "attention_heads",
    "nhead",
    "resampler_n_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_encoder_attention_heads",
    "n_layer_heads",
)
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "kv_n_heads",
    "n_kv_heads",
)
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "depth",
    "encoder_layers",
    "num_encoder_layers",
    "depths",
)
OUTPUTS = re.compile(
    r"(o|(to_|linear_|attention_)?out|output|c)_?(proj(ection)?|lin|put)?"
    r"|wo|dense|Wo|proj(ection)?(_layer)?"
)
VALUE = (
    ("query", "value"),
    ("q_", "v_"),
    ("_q", "_v"),
    ("Wq", "Wv"),
    ("q", "v"),
    ("queries", "values"),
)

# What a guess says because of the shapes, or because it does not know better.
GUESSED = ("defaults", "every_layer", "partial")
HEAD_BIAS = (
    "a learned vector of each head is added to its queries, which adds a term of the key alone"
)


def rules_of(record: RunRecord, checkpoint: Checkpoint) -> Iterator[list[dict[str, Any]]]:
    """Candidates for a type's rules, one table for each kind of attention in it."""
    groups: dict[tuple[str, str, bool], list[Site]] = {}
    for site in record.sites:
        product = content_of(site)[0]
        query, key = nearest(product.query_sources), nearest(product.key_sources)
        if query is None or key is None:
            continue
        same = query.given is key.given or query.given.shape == key.given.shape
        named = re.search(r"cross|encoder_attn|encdec|enc_dec", query.parameter.lower())
        place = (_template(query.parameter), _template(key.parameter), bool(named) or not same)
        groups.setdefault(place, []).append(site)
    options = [
        list(
            itertools.chain.from_iterable(
                _candidates(record, checkpoint, part, *place, sites)
                for part in _parts(checkpoint.config, place[0])
            )
        )
        for place, sites in groups.items()
    ]
    learned = [all(map(is_learned, sites)) for sites in groups.values()]
    # What has learned queries may be left out.
    options = [
        candidates for candidates, no in zip(options, learned, strict=True) if candidates or not no
    ]
    # The first candidate of each is tried with all others; few groups have many candidates.
    yield from itertools.islice((_placed(rules) for rules in itertools.product(*options)), 24)


def claims(guess: Family, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A guess's rules as tables, without what it takes from the shapes of this one model."""
    tables = []
    for rule in guess.attention:
        table = rule_table(rule)
        spelled = str(table.get("fused") or table["query"])
        table["key_heads"] = [key for key in table.get("key_heads", []) if key in config]
        table["layers"] = _layers(spelled, config, rule.stack)
        table["stack"] = "encoder" if rule.stack == "unknown" else rule.stack
        tables.append({k: v for k, v in table.items() if k not in GUESSED})
    return tables


def _placed(rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cross-attention in the stack of its layers' self-attention; no two alike in one stack."""

    def path(rule: Mapping[str, Any]) -> str:
        return str(rule.get("fused") or rule["query"]).partition(".{layer}")[0]

    stack_by_path = {path(rule): rule["stack"] for rule in rules if rule.get("kind") != "cross"}
    placed = [rule | {"stack": stack_by_path.get(path(rule), rule["stack"])} for rule in rules]
    places = [(rule["stack"], rule.get("kind", "self")) for rule in placed]
    return [
        rule | {"stack": re.sub(r"[._]", "-", path(rule))} if places.count(place) > 1 else rule
        for rule, place in zip(placed, places, strict=True)
    ]


def nearest(sources: Sequence[VectorSource]) -> VectorSource | None:
    """The product with a parameter that is next to queries or keys; else the parameter itself."""
    named = [source for source in sources if source.parameter]
    products = [source for source in named if "leaf" not in source.operations]
    return next(iter(products or named), None)


def _template(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "#", name.removesuffix(".weight"))


def _parts(config: Mapping[str, Any], name: str) -> list[str]:
    """Nested configurations that may have a tensor's numbers: those named alike, the whole's."""
    name_words = set(re.split(r"[._]", name))
    nested = [key for key, value in config.items() if isinstance(value, dict)]
    shared = {key: len(name_words & set(key.removesuffix("_config").split("_"))) for key in nested}
    most = max(shared.values(), default=0)
    return [*(key for key in nested if most and shared[key] == most), ""]


def _candidates(
    record: RunRecord,
    checkpoint: Checkpoint,
    part: str,
    query: str,
    key: str,
    cross: bool,
    sites: Sequence[Site],
) -> Iterator[dict[str, Any]]:
    """Candidates with numbers from a part's configuration (a key), or the whole's (empty)."""
    tensors = checkpoint.tensors()
    product = content_of(sites[0])[0]
    source, key_source = nearest(product.query_sources), nearest(product.key_sources)
    assert source is not None
    assert key_source is not None
    saved = _saved(tensors, source.parameter), _saved(tensors, key_source.parameter)
    if not all(saved):
        return
    shape, key_shape = (tensors[name].shape for name in saved if name)
    width = product.queries.shape[-1]
    names = [content_of(site)[0].query_sources for site in sites]
    spelled = _spelling(tensors, [s.parameter for s in map(nearest, names) if s], query)
    rule: dict[str, Any] = {"stack": _stack(record, source.parameter, sites)}
    if cross:
        rule["kind"] = "cross"
    rule |= {"config": part} if part else {}
    config = checkpoint.config.get(part, checkpoint.config)
    rule |= _causal(sites, config, cross)
    rule["layers"] = _layers(spelled, config, rule["stack"])
    numbers = {re.search(r"\d+", s.parameter) for s in map(nearest, names) if s}
    seen = {int(match[0]) for match in numbers if match}
    count = config.get(rule["layers"])
    if seen != set(range(count if isinstance(count, int) else len(seen))):
        rule["every_layer"] = False
    norms = list(_norms(tensors, saved[0] or "", saved[1] or "", product))
    rule |= input_norm(checkpoint, source)
    rule |= terms(product, sites)
    shared = query == key
    bodies: list[dict[str, Any]] = []
    if shared:
        bodies.append({"layout": "sectioned", "fused": spelled})
        heads = rule.get("heads", "num_attention_heads")
        for order in ("kqv", "vqk", "qvk", "qk"):
            sections = [[role, heads, "*"] for role in order]
            bodies.append({"layout": "sectioned", "fused": spelled, "sections": sections})
        bodies.append({"layout": "grouped", "fused": spelled})
        bodies.append({"layout": "conv1d", "fused": spelled})
        counts = _keys(config, HEADS, None, rule["stack"])
        key_counts = [None, *_keys(config, KEY_HEADS, None, rule["stack"])]
    else:
        key_spelled = spelled.replace(*_difference(query, key))
        bodies.append(
            {"query": spelled, "key": key_spelled}
            | value_and_output(tensors, saved[0] or "", spelled)
        )
        if key_spelled.endswith("kv"):
            bodies.append(bodies[0] | {"value": key_spelled})
        counts = _keys(config, HEADS, shape[0] // width, rule["stack"])
        groups = key_shape[0] // width // (2 if key_spelled.endswith("kv") else 1)
        key_counts = _keys(config, KEY_HEADS, groups, rule["stack"])
        # Without a number, a key head is as wide as a query head.
        key_counts = [None, *key_counts] if groups == shape[0] // width else [*key_counts, None]
    for body, heads, groups_key, norm in itertools.product(bodies, counts, key_counts, norms):
        shared = rule | body | norm | {"heads": heads}
        if groups_key:
            shared["key_heads"] = groups_key
        elif any(k in config for k in KEY_HEADS):
            shared["key_heads"] = []
        yield shared


def _saved(tensors: Mapping[str, Any], name: str) -> str | None:
    """The saved tensor of a live one: of its name, or of one that ends alike."""
    for ending in (name, *(name.partition(".")[2::2])):
        if ending in tensors:
            return ending
    matches = [n for n in tensors if n.endswith(f".{name}") or name.endswith(f".{n}")]
    return matches[0] if len(matches) == 1 else None


def _spelling(tensors: Mapping[str, Any], live: Sequence[str], template: str) -> str:
    """A name with ``{layer}`` where its layers differ."""
    # Where saving puts a word before all names, it is no part of them.
    saved = [_saved(tensors, name) or name for name in live]
    names = [
        name if saved_name.endswith(f".{name}") else saved_name
        for name, saved_name in zip(live, saved, strict=True)
    ]
    parts = [name.removesuffix(".weight").split(".") for name in names]
    numbers = [i for i, word in enumerate(parts[0]) if word.isdigit()]
    varying = [i for i in numbers if len({p[i] for p in parts}) > 1] or numbers[:1]
    placeholders = iter(["{layer}", "{block}", "{third}"])
    return ".".join(next(placeholders) if i in varying else word for i, word in enumerate(parts[0]))


def _difference(query: str, key: str) -> tuple[str, str]:
    """The last words of two names, in which they differ."""
    a, b = query.split("."), key.split(".")
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a) - 1)
    return ".".join(a[i:]), ".".join(b[i:])


def _stack(record: RunRecord, name: str, sites: Sequence[Site]) -> str:
    name_words = re.split(r"[._]", name.lower())
    if "decoder" in name_words:
        return "decoder"
    for stack in ("vision", "audio", "text"):
        if stack in name_words or stack in re.split(r"[-_]", record.model_type):
            if stack == "text" and sites[0].causal:
                return "decoder"
            return stack
    return "decoder" if sites[0].causal else "encoder"


def _causal(sites: Sequence[Site], config: Mapping[str, Any], cross: bool) -> dict[str, Any]:
    masks: dict[str, Any] = {}
    if not cross and all(site.causal for site in sites):
        masks["causal"] = True
    tokens = content_of(sites[0])[0].queries.shape[1]
    if any(0 <= site.reach < tokens - 1 for site in sites):
        key = next((k for k in ("sliding_window", "attention_window") if config.get(k)), None)
        if key:
            masks["window"] = key
    return masks


def _layers(spelled: str, config: Mapping[str, Any], stack: str) -> str:
    stack_keys = [f"{stack}_layers", f"num_{stack}_layers"]
    return next((key for key in [*stack_keys, *LAYERS] if config.get(key)), LAYERS[0])


def _keys(
    config: Mapping[str, Any], keys: Sequence[str], number: int | None, stack: str
) -> list[str]:
    """Keys of the configuration that hold this number; the stack's own first."""
    stack_keys = [f"{stack}_attention_heads", f"{stack}_num_attention_heads", f"num_{stack}_heads"]
    stack_keys = stack_keys if keys is HEADS else [f"{stack}_num_key_value_heads"]
    fitting = [k for k in [*stack_keys, *keys] if _is_count(config.get(k), number)]
    return list(dict.fromkeys(fitting))


def _is_count(value: Any, number: int | None) -> bool:
    if isinstance(value, list):
        return bool(value) and (number is None or number in value)
    return type(value) is int and (number is None or value == number)


NORM_WORDS = re.compile(r"(norm|ln|layernorm|layer_norm)", re.IGNORECASE)


def _norms(
    tensors: Mapping[str, Any], query: str, key: str, product: Any
) -> Iterator[dict[str, Any]]:
    """Norms between projection and score: none, or pairs of vectors next to the projections."""
    yield {}
    parent = query.removesuffix(".linear.weight").removesuffix(".weight").rpartition(".")[0]
    near = [
        name.removesuffix(".weight")
        for name, info in tensors.items()
        if name.startswith(f"{parent}.") and name.endswith(".weight") and len(info.shape) == 1
    ]
    pairs = []
    for a in near:
        word = a.rpartition(".")[2]
        for x, y in (("q", "k"), ("query", "key"), ("Q", "K"), ("queries", "keys")):
            counterpart = re.sub(
                rf"(^|_)?{x}(?=$|_|n)", lambda m, y=y: (m[1] or "") + y, word, count=1
            )
            b = (
                f"{parent}.{counterpart}"
                if a == f"{parent}.{word}"
                else a.replace(word, counterpart)
            )
            if counterpart != word and b in near:
                pairs.append((a, b))
    for a, b in dict.fromkeys(pairs):
        stems = [numbered(name) for name in (a, b)]
        for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0)):
            rule: dict[str, Any] = {"query_norm": stems[0], "key_norm": stems[1]}
            rule |= {"norm": kind} if kind != "rms" else {}
            rule |= {"norm_offset": offset} if offset else {}
            yield rule
    if not pairs and {"rsqrt", "norm", "linalg_vector_norm", "_fused_rms_norm"} & set(
        product.query_sources[0].operations
    ):
        yield {"norm_gain": False}


def numbered(name: str) -> str:
    """A name with ``{layer}`` for its first number."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "{layer}", name, count=1)


def input_norm(checkpoint: Checkpoint, source: VectorSource) -> dict[str, Any]:
    """The norm of the same layer whose output is projected."""
    if not source.norm or not source.norm[1]:
        return {}
    _, gain, bias, offset = source.norm
    saved = [_saved(checkpoint.tensors(), name) if name else None for name in (gain, bias)]
    layer_number, norm = re.search(r"\d+", source.parameter), re.search(r"\d+", gain)
    if not saved[0] or not layer_number or not norm or layer_number[0] != norm[0]:
        return {}
    values = [
        np.asarray(checkpoint.read([Part(name)])[0], np.float64) if name else 0.0 for name in saved
    ]
    kind = norm_kind(source.given, np.asarray(values[0]) + float(offset), values[1])
    if kind not in ("rms", "layer"):
        return {}
    rule: dict[str, Any] = {"input_norm": numbered(saved[0].removesuffix(".weight"))}
    rule |= {"input_norm_kind": "layer"} if kind == "layer" else {}
    rule |= {"input_norm_offset": 1.0} if offset == "1" else {}
    return rule


def terms(product: Product, sites: Sequence[Site]) -> dict[str, Any]:
    """Name the terms that are added to the score."""
    if head_biases(product):
        return {"position": "relative", "note": HEAD_BIAS}
    if product.terms or any(map(beside, sites)):
        return {"position": "relative"}
    return {}


def value_and_output(
    tensors: Mapping[str, Any], query: str, spelled: str, width: int = 0
) -> dict[str, Any]:
    """The value's and the output's spellings, by what lies next to the queries.

    The width of all heads is that of the queries, where these have a tensor of their own.
    """
    query, inner = _without_inner(query.removesuffix(".weight"))
    parent, _, word = query.rpartition(".")
    within = _without_inner(spelled)[0].rpartition(".")[0]
    names: dict[str, Any] = {}
    for before, after in VALUE:
        if word.startswith(before) or before in word:
            counterpart = word.replace(before, after, 1)
            if counterpart != word and f"{parent}.{counterpart}{inner}.weight" in tensors:
                names["value"] = f"{within}.{counterpart}{inner}"
                break
    width = width or tensors[f"{query}{inner}.weight"].shape[0]
    grand, around = parent.rpartition(".")[0], within.rpartition(".")[0]
    places = [(parent, within), (f"{grand}.output", f"{around}.output")]
    if parent.endswith("self") or "self_attn." in parent:
        places.append((grand, around))
    for stem, near in places:
        outputs = [
            name.removesuffix(".weight").removeprefix(f"{stem}.")
            for name, info in tensors.items()
            if name.startswith(f"{stem}.")
            and name.endswith(".weight")
            and len(info.shape) == 2
            and info.shape[1] == width
        ]
        outputs = [name for name in outputs if OUTPUTS.fullmatch(_without_inner(name)[0])]
        if len(outputs) == 1:
            names["output"] = f"{near}.{outputs[0]}"
            break
    return names


def _without_inner(name: str) -> tuple[str, str]:
    """A name, and the module within it that has the weight, where one wraps it."""
    inner = ".linear" if name.endswith(".linear") else ""
    return name.removesuffix(inner), inner
