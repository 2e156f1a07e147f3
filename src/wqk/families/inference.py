"""A family guessed from tensor names, for models that no family knows.

Queries and keys are siblings: two weights whose names differ only in ``q`` and ``k``, or one weight
whose name says that it holds both. Shapes and the configuration's counts decide the rest. The rules
say how sure the guess is. The tensors next to them are sorted: part of a form, irrelevant to it, or
unexplained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wqk.checkpoints import Checkpoint, TensorInfo
from wqk.errors import UnknownFamily
from wqk.families.family import AttentionRule, Family

# How the name of a module that holds queries ends: q_proj, query, Wq, to_q, q_lin, attn_q, ...
QUERY = re.compile(r"(?P<before>|.*_|[wW])(?P<role>queries|query|q|Q)(?P<after>|_.*)")
KEY_OF = {"queries": "keys", "query": "key", "q": "k", "Q": "K"}
VALUE_OF = {"queries": "values", "query": "value", "q": "v", "Q": "V"}

# Modules that hold queries, keys and values together, and their usual layout.
FUSED = {
    r"(?:[wW]_?|to_|attn_|in_)?qkv(?:_.*)?": "sectioned",
    r"c_attn|in_proj(?:_weight)?|W_pack": "sectioned",
    r"query_key_value": "grouped",
}

NORM_WORDS = {"norm", "norms", "layernorm", "rmsnorm", "ln"}
# Words that do not say which projection a module is.
FILLERS = {"", "proj", "lin", "linear", "to", "w", "dense", "attn", "layer", "rms"}
ALIASES = {"query": "q", "queries": "q", "key": "k", "keys": "k", "added": "add"}
NORM_PARAMETERS = ("weight", "bias", "gamma", "beta")

# The scales of 8-bit weights, which reading applies.
QUANTIZED = re.compile(r"weight_scale(?:_inv)?$|input_scale$")
# Words of tensors next to queries and keys that do not affect their products: values and outputs,
# with their norms, and rotary tables.
HARMLESS = {
    "o", "out", "output", "c", "wo", "v", "value", "values", "wv", "resid", "sub", "inner", "post",
    "ffn", "add", "dropout", "rotary", "emb", "inv", "freq", "rope", "freqs", *NORM_WORDS,
}  # fmt: skip
# Queries and keys of positions: their products are terms of another attention's score.
POSITIONAL = {"pos", "position", "rel", "relative"}
# Next to these, a projection feeds a convolution or a recurrence, not a softmax.
RECURRENT = re.compile(
    r"(?:A_log|A_logs|dt_bias|dt_proj|x_proj|b_proj|a_proj|f_[ab]_proj|g_[ab]_proj|beta|decay)\b.*"
    r"|(?:.*_)?conv(?:1d|_.*)?(?:\..*)?|slope_rate|[fi]gate(?:_preact)?\..*"
)

# Tensors that only one kind of recurrence or convolution over tokens has, what it is, and, where
# that is known, why it has no form.
RECURRENCES = {
    r"\bx_proj_weight$": "Mamba by heads, each of whose forms sees a part of the inner vectors",
    r"\b(?:A_log|ssm_a)$": "a state-space or linear-attention recurrence",
    r"\brg_lru\.recurrent_param$": "a gated linear recurrence, which scores no pairs of tokens",
    r"\bslope_rate$": "lightning attention, which is linear",
    r"\b(?:short)?conv\.conv\.weight$": "a short convolution, which scores no pairs of tokens",
}


@dataclass(frozen=True)
class Candidate:
    """Tensors of one spelling that look like the queries and keys of every layer."""

    query: str  # without ``.weight`` and the layer's number
    key: str  # the same where they are fused
    shape: tuple[int, ...]  # of the first layer's
    key_shape: tuple[int, ...]
    layout: str  # separate, sectioned or grouped
    tensors: tuple[str, ...]  # full names of the queries' weights

    @property
    def path(self) -> str:
        """The module that holds the projections."""
        return self.query.rpartition(".")[0]

    @property
    def module(self) -> str:
        """The last part of the query's name."""
        return self.query.rpartition(".")[2]

    @property
    def words(self) -> set[str]:
        """What distinguishes it from other queries in its module: ``add`` of ``add_q_proj``."""
        return set() if self.query == self.key else _words(self.module) - {"q"}

    @property
    def value(self) -> str:
        """The expected name of the value next to them; empty if fused."""
        match = QUERY.fullmatch(self.module)
        return _sibling(self.path, match, VALUE_OF) if match and self.query != self.key else ""


@dataclass(frozen=True)
class Neighbors:
    """The tensors next to a candidate's queries and keys."""

    query_norm: str  # name of the norm before the score, without ``.weight``; empty if none
    key_norm: str
    has_bias: bool  # whether these norms have biases, as LayerNorm does
    unexplained: tuple[str, ...]  # tensors with an unknown effect on the score
    recurrent: tuple[str, ...]  # tensors that show that this is not softmax attention


def candidates(tensors: Mapping[str, TensorInfo]) -> list[Candidate]:
    """All candidates, in the order of the tensors."""
    spellings: dict[str, list[str]] = {}
    for name, info in tensors.items():
        stem = name.removesuffix(".weight")
        if len(info.shape) == 2 and (stem != name or name.endswith("_weight")):
            spellings.setdefault(without_numbers(stem), []).append(name)
    found = []
    for spelling, names in spellings.items():
        path, _, module = spelling.rpartition(".")
        layout = next((kind for name, kind in FUSED.items() if re.fullmatch(name, module)), "")
        match, key = QUERY.fullmatch(module), spelling
        if not layout and match:
            layout, key = "separate", _sibling(path, match, KEY_OF)
        if layout and key in spellings:
            shape, other = (tensors[spellings[which][0]].shape for which in (spelling, key))
            found.append(Candidate(spelling, key, shape, other, layout, tuple(names)))
    return found


def neighbors_of(
    candidate: Candidate, others: list[Candidate], tensors: Mapping[str, TensorInfo]
) -> Neighbors:
    """Sort the tensors in the candidate's module and its submodules."""
    path = candidate.path
    # A whole layer's module also holds what has nothing to do with attention.
    is_layer = path.endswith("}")
    projections = {
        name.rpartition(".")[2] for c in others if c.path == path for name in (c.query, c.key)
    }
    norms: dict[str, str] = {}
    biases, unexplained, recurrent = False, [], []
    for name, info in _within(candidate, tensors):
        module, _, parameter = name.rpartition(".")
        if module in projections and parameter in ("weight", "bias"):
            continue
        if name in projections or name in ("in_proj_bias", "qkv_bias", "q_bias", "v_bias"):
            continue
        words = _words(module)
        side = words & {"q", "k"}
        if len(side) == 1 and words & NORM_WORDS and parameter in NORM_PARAMETERS:
            normed = words - side - NORM_WORDS
            if normed == candidate.words and len(info.shape) == 1:
                norms[side.pop()] = f"{path}.{module}"
                biases |= parameter in ("bias", "beta")
            elif all(normed != c.words for c in others if c.path == path):
                unexplained.append(name)
        elif RECURRENT.fullmatch(name):
            recurrent.append(name)
        elif _is_harmless(name, words) or len(info.shape) > 2 or not info.shape:
            continue
        elif not is_layer or words & {"q", "k", "kv", "qkv"}:
            unexplained.append(name)
    return Neighbors(
        norms.get("q", ""), norms.get("k", ""), biases, tuple(unexplained), tuple(recurrent)
    )


def _within(
    candidate: Candidate, tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors in the candidate's own modules, by the rest of their names, each once.

    A module of the same name in another layer may be something else, such as a recurrence.
    """
    modules = {name.removesuffix(".weight").rpartition(".")[0] for name in candidate.tensors}
    seen: set[str] = set()
    for full, info in tensors.items():
        name = without_numbers(full).removeprefix(f"{candidate.path}.")
        parts = full.split(".")
        inside = any(".".join(parts[:n]) in modules for n in range(1, len(parts)))
        if inside and name not in seen:
            seen.add(name)
            yield name, info


def recurrent_layers(tensors: Mapping[str, TensorInfo]) -> dict[str, list[int]]:
    """The layers with a recurrence or a convolution over tokens, by its description.

    Examples
    --------
    >>> recurrent_layers(dict.fromkeys(["layers.0.mixer.A_log", "layers.1.attn.q_proj.weight"]))
    {'a state-space or linear-attention recurrence (mixer.A_log)': [0]}
    """
    layers: dict[str, list[int]] = {}
    for name in tensors:
        match = re.fullmatch(r"(?:.*\.)?(?:layers|blk)\.(\d+)\.(.*)", name)
        module = match[2] if match else ""
        kind = next((k for mark, k in RECURRENCES.items() if re.search(mark, module)), None)
        if match and kind:
            found = layers.setdefault(f"{kind} ({module})", [])
            found += [] if int(match[1]) in found else [int(match[1])]
    return layers


def _is_harmless(name: str, words: set[str]) -> bool:
    """Whether a tensor does not affect scores, by its words; ``proj`` and ``dense`` are outputs."""
    named = words or ({"o"} if "." in name else _words(name))
    plain = NORM_WORDS.isdisjoint(named) or len(named) > 1
    return (named <= HARMLESS and plain) or bool(QUANTIZED.search(name))


def _words(module: str) -> set[str]:
    """The words of a module's name, except for those that mean a projection.

    Examples
    --------
    >>> sorted(_words("norm_added_q")), sorted(_words("add_q_proj")), sorted(_words("Wq"))
    (['add', 'norm', 'q'], ['add', 'q'], ['q'])
    """
    words = re.split(r"[._]", re.sub(r"^[wW](?=[qQkKvV]$)", "", module).lower())
    return {ALIASES.get(word, word) for word in words if not word.startswith("{")} - FILLERS


def without_numbers(stem: str) -> str:
    """A name with placeholders for its numbers, the first of which is the layer's."""
    parts, count = [], 0
    for part in stem.split("."):
        if part.isdigit():
            parts.append("{layer}" if count == 0 else f"{{index{count}}}")
            count += 1
        else:
            parts.append(part)
    return ".".join(parts)


def layers_beyond(read: Iterable[str], stored: Iterable[str]) -> list[int]:
    """Layers that are stored behind the last one that is read, by the names of their tensors.

    Examples
    --------
    >>> names = [f"layers.{n}.attn.wq.weight" for n in range(4)]
    >>> layers_beyond(names[:2], names), layers_beyond(names, [*names, "layers.4.mlp.weight"])
    ([2, 3], [])
    """
    known: dict[str, int] = {}
    for name in read:
        if found := _split_at_layer(name):
            key, layer = found
            known[key] = max(layer, known.get(key, 0))
    numbered = filter(None, map(_split_at_layer, stored))
    return sorted({layer for key, layer in numbered if layer > known.get(key, layer)})


def _split_at_layer(name: str) -> tuple[str, int] | None:
    """What stands around the first number of a name, and the number."""
    found = re.search(r"(?:^|(?<=\.))\d{1,9}(?=\.)", name)
    return (
        (name[: found.start()] + "{layer}" + name[found.end() :], int(found[0])) if found else None
    )


def _sibling(path: str, match: re.Match[str], roles: Mapping[str, str]) -> str:
    module = match["before"] + roles[match["role"]] + match["after"]
    return f"{path}.{module}" if path else module


# Keys under which configurations count heads; what precedes them is a part of the model.
HEADS = re.compile(
    r"(?:(?P<part>\w+?)_)??(?:num_attention_heads|attention_heads|num_attn_heads|num_heads|n_heads?"
    r"|nheads?|heads?)"
)
NO_QUERIES = {"key", "kv", "value", "linear", "index", "mamba", "ssm", "query_group"}
KEY_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num",
)  # fmt: skip
HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "d_head")
WIDTHS = ("hidden_size", "d_model", "n_embd", "n_state", "embed_dim")
# Names of nested configurations that belong to the whole model.
WHOLE = {"model", "transformer", "attention", "attn", "args", "params", "model_args", "hparams"}

# Models whose fused weight has another layout than its name suggests.
LAYOUTS = {
    "chatglm": "sectioned",
    "bailing": "sectioned",
    "ling": "sectioned",
    "internlm2": "grouped",
}

CROSS = ("cross", "encoder_attn", "encdec", "enc_dec")
STACKS = {
    "encoder": ("encoder", "enc"),
    "decoder": ("decoder", "dec"),
    "vision": ("vision", "visual", "image", "img", "pixel"),
    "audio": ("audio", "speech"),
    "text": ("text", "language"),
}
MODALITIES = ("vision", "audio", "text")


@dataclass(frozen=True)
class HeadCount:
    """Where a configuration counts heads, and of which part of the model."""

    path: str  # the nested configuration; empty for the whole
    part: str  # what stands before the key: decoder of decoder_attention_heads
    key: str
    config: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        """What a tensor's name has to mention for this to be its number of heads."""
        nested = [name.removesuffix("_config") for name in self.path.split(".") if name]
        named = [name for name in nested if name not in WHOLE]
        # Whisper's own files: n_audio_head, n_text_head.
        part = {"n_audio": "encoder", "n_text": "decoder"}.get(self.part, self.part)
        return [*named, *(word for word in part.split("_") if word)]


def infer_family(checkpoint: Checkpoint, count_heads: bool = True) -> Family:
    """A family, ``inferred``, for a checkpoint of unknown type, or with tensors of other names.

    ``count_heads`` is false if the numbers of heads are known from elsewhere. Raises
    `UnknownFamily` if no two tensors look like queries and keys of softmax attention, or if the
    configuration does not count their heads.
    """
    tensors = checkpoint.tensors()
    named = candidates(tensors)
    # A single block has no number; next to numbered ones it is a pooling head.
    found = [c for c in named if "{layer}" in c.query] or named
    around = {c: neighbors_of(c, found, tensors) for c in found}
    if found and all(neighbors.recurrent for neighbors in around.values()):
        first = next(iter(around.values())).recurrent[0]
        raise UnknownFamily(
            f"tensors named like queries and keys occur next to {first!r}: they go through a "
            "recurrence or a convolution, so their score is not a form of two tokens"
        )
    softmax = [c for c in found if not around[c].recurrent]
    if not softmax:
        kind = checkpoint.config.get("model_type")
        known = f"no family knows the model type {kind!r}" if kind else "it names no model type"
        raise UnknownFamily(
            f"{known}, and none of its {len(tensors)} tensors has a query's name next to a key; "
            "describe them in a family file (family=FILE.toml)"
        )
    counts = list(_head_counts(checkpoint.config))
    rules = []
    for candidate in softmax:
        stack, kind = _role(candidate, softmax, checkpoint.config)
        layout, doubt = _layout(candidate, checkpoint.config)
        partial = _unexplained(candidate, around[candidate], checkpoint.config)
        numbers: dict[str, Any] = {"key_heads": KEY_HEADS}
        if count_heads:
            count = _own_count(candidate, counts, softmax, stack)
            numbers = _numbers(candidate, layout, count)
        confidence = "low" if partial else "medium" if doubt else "high"
        reason = f": {doubt}" if doubt else ""
        rules.append(
            AttentionRule(
                stack=stack,
                kind=kind,
                layout=layout,
                every_layer=False,
                norm="layer" if around[candidate].has_bias else "rms",
                partial=partial,
                guess=f"guessed from the tensors' names ({candidate.query}), confidence "
                f"{confidence}{reason}",
                **_names(candidate, around[candidate]),
                **numbers,
            )
        )
    return Family(name="inferred", model_types=(), attention=tuple(rules))


def _names(candidate: Candidate, around: Neighbors) -> dict[str, Any]:
    """The rule's names of tensors."""
    norms = {"query_norm": around.query_norm, "key_norm": around.key_norm}
    if candidate.query == candidate.key:
        weights = {"fused": candidate.query}
    else:
        weights = {"query": candidate.query, "key": candidate.key, "value": candidate.value}
    return {role: (name,) for role, name in (weights | norms).items() if name}


def _unexplained(candidate: Candidate, around: Neighbors, config: Mapping[str, Any]) -> str:
    """What of the score is not understood; empty if all is."""
    if around.unexplained:
        named = ", ".join(f"{candidate.path}.{name}" for name in around.unexplained[:3])
        return f"what {named} does to the score is not known"
    if not (around.query_norm or around.key_norm):
        switch = next((key for key in config if re.search("q_?k_?(layer_?)?norm", key)), None)
        if switch and config[switch]:
            return f"the configuration's {switch} asks for norms that have no tensors"
    return ""


def _layout(candidate: Candidate, config: Mapping[str, Any]) -> tuple[str, str]:
    """The layout of queries, keys and values in the weight, and what is doubtful about it."""
    if candidate.layout == "separate":
        return "separate", ""
    rows, columns = candidate.shape
    model_type = str(config.get("model_type", "")).lower()
    layout = next((v for k, v in LAYOUTS.items() if model_type.startswith(k)), candidate.layout)
    if layout == "sectioned" and columns == 3 * rows:
        return "conv1d", f"{candidate.module} is taken to be stored (in, out), all queries first"
    order = "all queries first" if layout == "sectioned" else "key heads one after the other"
    return layout, f"{candidate.module} is taken to hold {order}"


def _role(
    candidate: Candidate, others: Sequence[Candidate], config: Mapping[str, Any]
) -> tuple[str, str]:
    """Stack and kind of attention, from the words of a name."""
    words = candidate.query.lower().split(".")
    # The second attention of a block, in diffusers and in PyTorch's own decoder.
    second = any(
        name in words and any(f".{first}." in other.query for other in others)
        for first, name in (("attn1", "attn2"), ("self_attn", "multihead_attn"))
    )
    crosses = second or any(word.startswith(CROSS) for word in words)
    kind = "cross" if crosses or candidate.shape[1] != candidate.key_shape[1] else "self"
    for stack, names in STACKS.items():
        if any(word == name or word.startswith(f"{name}_") for word in words for name in names):
            return stack, kind
    architectures = config.get("architectures")
    named = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    causal = "CausalLM" in named or "gpt" in str(config.get("model_type", "")).lower()
    return ("decoder" if causal else "unknown"), kind


def _head_counts(config: Mapping[str, Any], path: str = "") -> Iterator[HeadCount]:
    """Every number of heads in a configuration and in the configurations within."""
    for key, value in config.items():
        is_count = isinstance(key, str) and key not in HEAD_WIDTHS
        match = HEADS.fullmatch(key) if is_count else None
        if isinstance(value, dict) and path.count(".") < 3:
            yield from _head_counts(value, f"{path}.{key}" if path else key)
        elif match and value is not None and not isinstance(value, str | bool | dict):
            part = match["part"] or ""
            if not any(word in f"_{part}_" for word in (f"_{no}_" for no in NO_QUERIES)):
                yield HeadCount(path, part, key, config)


def _own_count(
    candidate: Candidate,
    counts: Sequence[HeadCount],
    others: Sequence[Candidate],
    stack: str,
) -> HeadCount:
    """The candidate's number of heads; an error if only other parts of the model have one."""
    named = [
        word for part in candidate.query.lower().split(".") for word in (part, *part.split("_"))
    ]

    def is_named(word: str) -> bool:
        synonyms = STACKS.get(word, (word,))
        return any(name.startswith(synonyms) for name in named)

    fitting = [count for count in counts if all(map(is_named, count.words))]
    modality = stack if stack in MODALITIES else ""
    is_one_of_many = (
        any(not any(name in other.query.lower() for name in STACKS[modality]) for other in others)
        if modality
        else False
    )
    suitable = [
        count
        for count in fitting
        if count.words or not (is_one_of_many or _is_other(candidate, count))
    ]
    if not suitable:
        of = f" of {candidate.path}" if counts else ""
        raise UnknownFamily(
            f"the configuration does not give the number of heads{of}, and shapes alone "
            "do not determine it; give it with wqk.open(ref, heads_per_layer=N), or with "
            "--heads-per-layer N"
        )
    return max(suitable, key=lambda count: len(count.words))


def _is_other(candidate: Candidate, count: HeadCount) -> bool:
    """Whether a configuration's width is not that of the candidate's inputs."""
    width = next((count.config[key] for key in WIDTHS if key in count.config), None)
    counted = count.config[count.key]
    return isinstance(width, int) and isinstance(counted, int) and width not in candidate.shape


def _numbers(candidate: Candidate, layout: str, count: HeadCount) -> dict[str, Any]:
    """The rule's keys for the numbers of heads, and the part of the model that counts them."""
    names = [f"{count.part}_{key}" for key in KEY_HEADS] if count.part else list(KEY_HEADS)
    defaults: dict[str, Any] = {}
    heads = count.config[count.key]
    if isinstance(heads, int) and heads > 0:
        width = _head_width(candidate, layout, heads, count)
        if layout == "sectioned" and width and not any(count.config.get(key) for key in names):
            rest = candidate.shape[0] - heads * width
            if rest > 0 and rest % (2 * width) == 0 and heads % (rest // (2 * width)) == 0:
                defaults = {"key_heads": rest // (2 * width)}
    keys = {"heads": (count.key,), "key_heads": (*names, "key_heads")}
    return {**keys, "config": count.path, "defaults": defaults}


def _head_width(candidate: Candidate, layout: str, heads: int, count: HeadCount) -> int | None:
    """The configured width of a head; an error if the queries hold more, such as a gate."""
    key = next((k for k in HEAD_WIDTHS if isinstance(count.config.get(k), int)), None)
    if key is None or count.part:
        return candidate.shape[1] // heads if candidate.shape[1] % heads == 0 else None
    width: int = count.config[key]
    if layout == "separate" and candidate.shape[0] != heads * width:
        raise UnknownFamily(
            f"{candidate.query} has {candidate.shape[0]} outputs, which is not {heads} "
            f"heads of the configured width {width} ({key}): it contains more than queries"
        )
    return width
