"""Tensors named like attention: queries next to keys, or one weight that contains both.

Two weights whose names differ only in ``q`` and ``k``, or one whose name says that it holds both.
The tensors next to them are sorted: part of a form, irrelevant to it, or unexplained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from wqk.checkpoints import TensorInfo

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

# Tensors that only one kind of recurrence or convolution over tokens has, and what it is.
RECURRENCES = {
    r"\bA_log$": "a state-space or linear-attention recurrence",
    r"\brg_lru\.recurrent_param$": "a gated linear recurrence",
    r"\bslope_rate$": "lightning attention, which is linear",
    r"\bconv\.conv\.weight$": "a short convolution",
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
        match = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.*)", name)
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
