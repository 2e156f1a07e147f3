"""Queries and keys by the names of tensors alone, for models that no family knows.

Two weights whose names differ only in ``q`` and ``k``, or one weight whose name shows that it holds
both, are candidates of queries and keys. The tensors next to them are sorted: norms of queries and
keys, tensors that do not change the score, unexplained ones, and signs of a recurrence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from wqk.checkpoints import TensorInfo
from wqk.checkpoints.checkpoint import Tensors
from wqk.families.naming import without_numbers

# The end of the name of a module that holds queries: q_proj, query, Wq, to_q, q_lin, attn_q, ...
QUERY = re.compile(r"(?P<before>|.*_|[wW])(?P<role>queries|query|q|Q)(?P<after>|_.*)")
KEY_OF = {"queries": "keys", "query": "key", "q": "k", "Q": "K"}
VALUE_OF = {"queries": "values", "query": "value", "q": "v", "Q": "V"}

# Modules that hold queries, keys and values together, and their usual layout.
FUSED = {
    r"(?:[wW]_?|to_|attn_|in_)?qkv(?:_.*)?": "sectioned",
    r"c_attn|in_proj(?:_weight)?|W_pack": "sectioned",
    r"query_key_value": "grouped",
}
# Biases that have names of their own.
BIASES = ("in_proj_bias", "qkv_bias", "q_bias", "v_bias")

NORM_WORDS = {"norm", "norms", "layernorm", "rmsnorm", "ln"}
# Words that do not show which projection a module is.
FILLERS = {"", "proj", "lin", "linear", "to", "w", "dense", "attn", "layer", "rms"}
ALIASES = {"query": "q", "queries": "q", "key": "k", "keys": "k", "added": "add"}
NORM_PARAMETERS = ("weight", "bias", "gamma", "beta")

# The scales of 8-bit weights, which reading applies.
QUANTIZED = re.compile(r"weight_scale(?:_inv)?$|input_scale$")
# Words of tensors next to queries and keys that do not affect their products: values and outputs,
# with their norms, and rotary tables.
HARMLESS = {
    "o",
    "out",
    "output",
    "c",
    "wo",
    "v",
    "value",
    "values",
    "wv",
    "resid",
    "sub",
    "inner",
    "post",
    "ffn",
    "add",
    "dropout",
    "rotary",
    "emb",
    "inv",
    "freq",
    "rope",
    "freqs",
    *NORM_WORDS,
}
# Queries and keys of positions: their products are terms of another attention's score.
POSITIONAL = {"pos", "position", "rel", "relative"}
# Next to these, a projection feeds a convolution or a recurrence, not a softmax.
RECURRENT = re.compile(
    r"(?:A_log|A_logs|dt_bias|dt_proj|x_proj|b_proj|a_proj|f_[ab]_proj|g_[ab]_proj|beta|decay)\b.*"
    r"|(?:.*_)?conv(?:1d|_.*)?(?:\..*)?|slope_rate|[fi]gate(?:_preact)?\..*"
)

# Tensors that only one kind of recurrence or convolution over tokens has, with a description, and,
# if it is known, the reason why it has no form.
RECURRENCES = {
    r"\bx_proj_weight$": "Mamba by heads, each of whose forms sees a part of the inner vectors",
    r"\b(?:A_log|ssm_a)$": "a state-space or linear-attention recurrence",
    r"\brg_lru\.recurrent_param$": "a gated linear recurrence, which scores no pairs of tokens",
    r"\bslope_rate$": "lightning attention, which is linear",
    r"\b(?:short)?conv\.conv\.weight$": "a short convolution, which scores no pairs of tokens",
}


@dataclass(frozen=True)
class Candidate:
    """Tensors of one spelling that look like the queries and keys of every layer.

    Attributes
    ----------
    query, key
        Names without ``.weight`` and the number of the layer; equal if one weight holds both.
    shape, key_shape
        Shapes of the first layer's weights.
    layout
        ``separate``, ``sectioned`` or ``grouped``.
    tensors
        Full names of the query weights of all layers.
    """

    query: str
    key: str
    shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    layout: str
    tensors: tuple[str, ...]

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
        """Words that distinguish the candidate in its module: ``add`` of ``add_q_proj``."""
        return set() if self.query == self.key else words_of(self.module) - {"q"}

    @property
    def value(self) -> str:
        """The expected name of the values next to queries and keys; empty if fused."""
        match = QUERY.fullmatch(self.module)
        if match is None or self.query == self.key:
            return ""
        return _sibling(self.path, match, VALUE_OF)


@dataclass
class Neighbors:
    """The tensors next to a candidate's queries and keys.

    Attributes
    ----------
    query_norm, key_norm
        Names of the norms before the score, without ``.weight``; empty if there is none.
    has_bias
        Whether these norms have biases, as LayerNorm does.
    unexplained
        Tensors with an unknown effect on the score.
    recurrent
        Tensors that show that the attention has no softmax.
    """

    query_norm: str = ""
    key_norm: str = ""
    has_bias: bool = False
    unexplained: list[str] = field(default_factory=list)
    recurrent: list[str] = field(default_factory=list)


def candidates(tensors: Tensors) -> list[Candidate]:
    """Return all candidates, in the order of the tensors."""
    spellings: dict[str, list[str]] = {}
    for name, info in tensors.items():
        stem = name.removesuffix(".weight")
        if len(info.shape) == 2 and (stem != name or name.endswith("_weight")):
            spellings.setdefault(without_numbers(stem), []).append(name)
    all_candidates = []
    for query, names in spellings.items():
        layout, key = _layout_and_key(query)
        if layout and key in spellings:
            shape, key_shape = tensors[names[0]].shape, tensors[spellings[key][0]].shape
            all_candidates.append(Candidate(query, key, shape, key_shape, layout, tuple(names)))
    return all_candidates


def _layout_and_key(query: str) -> tuple[str, str]:
    """Return the layout of a weight by its name, and the name of the key; empty if it is none."""
    path, _, module = query.rpartition(".")
    for pattern, layout in FUSED.items():
        if re.fullmatch(pattern, module):
            return layout, query
    match = QUERY.fullmatch(module)
    return ("separate", _sibling(path, match, KEY_OF)) if match else ("", "")


def _sibling(path: str, match: re.Match[str], roles: Mapping[str, str]) -> str:
    """Return the name of the module that differs from a query's in the role alone."""
    module = match["before"] + roles[match["role"]] + match["after"]
    return f"{path}.{module}" if path else module


def neighbors_of(candidate: Candidate, others: list[Candidate], tensors: Tensors) -> Neighbors:
    """Sort the tensors in the candidate's module and in the modules within."""
    path = candidate.path
    rivals = [other for other in others if other.path == path]
    projections: set[str] = set()
    for rival in rivals:
        projections |= {rival.query.rpartition(".")[2], rival.key.rpartition(".")[2]}
    # The module of a whole layer also holds tensors that have nothing to do with attention.
    is_layer = path.endswith("}")
    neighbors = Neighbors()
    for name, info in _within(candidate, tensors):
        module, _, parameter = name.rpartition(".")
        is_projection = module in projections and parameter in ("weight", "bias")
        if is_projection or name in projections or name in BIASES:
            continue
        name_words = words_of(module)
        sides = name_words & {"q", "k"}
        if len(sides) == 1 and name_words & NORM_WORDS and parameter in NORM_PARAMETERS:
            normalized = name_words - sides - NORM_WORDS
            if normalized == candidate.words and len(info.shape) == 1:
                if sides == {"q"}:
                    neighbors.query_norm = f"{path}.{module}"
                else:
                    neighbors.key_norm = f"{path}.{module}"
                neighbors.has_bias |= parameter in ("bias", "beta")
            elif all(normalized != rival.words for rival in rivals):
                neighbors.unexplained.append(name)
        elif RECURRENT.fullmatch(name):
            neighbors.recurrent.append(name)
        elif _is_harmless(name, name_words) or len(info.shape) > 2 or not info.shape:
            continue
        elif not is_layer or name_words & {"q", "k", "kv", "qkv"}:
            neighbors.unexplained.append(name)
    return neighbors


def _within(candidate: Candidate, tensors: Tensors) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors in the candidate's own modules, by their names there, each name once.

    A module of the same name in another layer may be something else, such as a recurrence.
    """
    modules = {name.removesuffix(".weight").rpartition(".")[0] for name in candidate.tensors}
    names: set[str] = set()
    for full_name, info in tensors.items():
        name = without_numbers(full_name).removeprefix(f"{candidate.path}.")
        parts = full_name.split(".")
        is_inside = any(".".join(parts[:count]) in modules for count in range(1, len(parts)))
        if is_inside and name not in names:
            names.add(name)
            yield name, info


def _is_harmless(name: str, name_words: set[str]) -> bool:
    """Return whether a tensor does not affect scores, by its name_words.

    ``proj`` and ``dense`` alone are outputs.
    """
    if QUANTIZED.search(name):
        return True
    if not name_words:
        name_words = {"o"} if "." in name else words_of(name)
    is_bare_norm = len(name_words) == 1 and not NORM_WORDS.isdisjoint(name_words)
    return name_words <= HARMLESS and not is_bare_norm


def words_of(module: str) -> set[str]:
    """Return the words of a module's name, except for those that mean a projection.

    Examples
    --------
    >>> sorted(words_of("norm_added_q")), sorted(words_of("add_q_proj")), sorted(words_of("Wq"))
    (['add', 'norm', 'q'], ['add', 'q'], ['q'])
    """
    name = re.sub(r"^[wW](?=[qQkKvV]$)", "", module)
    parts = [part for part in re.split(r"[._]", name.lower()) if not part.startswith("{")]
    return {ALIASES.get(part, part) for part in parts} - FILLERS


def recurrent_layers(tensors: Tensors) -> dict[str, list[int]]:
    """Return the layers with a recurrence or a convolution over tokens, by its description.

    Examples
    --------
    >>> names = ["a.layers.0.mixer.A_log", "b.layers.0.mixer.A_log", "layers.1.attn.q_proj.weight"]
    >>> recurrent_layers(dict.fromkeys(names))
    {'a state-space or linear-attention recurrence (mixer.A_log)': [0]}
    """
    layers: dict[str, list[int]] = {}
    for name in tensors:
        match = re.fullmatch(r"(?:.*\.)?(?:layers|blk)\.(\d+)\.(.*)", name)
        if match is None:
            continue
        layer, module = int(match[1]), match[2]
        kind = next((k for pattern, k in RECURRENCES.items() if re.search(pattern, module)), None)
        if kind is None:
            continue
        numbers = layers.setdefault(f"{kind} ({module})", [])
        if layer not in numbers:
            numbers.append(layer)
    return layers
