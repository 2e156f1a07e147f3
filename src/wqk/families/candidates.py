"""Queries and keys found only by the names of tensors, for models of unknown families.

Candidates of queries and keys are two weights whose names differ only in ``q`` and ``k``, or one
weight with the name of a fused weight. The tensors next to a candidate are sorted: norms of queries
and keys, tensors that do not change the score, unexplained tensors, and signs of a recurrence.
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

# Modules with queries, keys and values together, and the usual layout.
FUSED = {
    r"(?:[wW]_?|to_|attn_|in_)?qkv(?:_.*)?": "sectioned",
    r"c_attn|in_proj(?:_weight)?|W_pack": "sectioned",
    r"query_key_value": "grouped",
}
# Biases with separate names.
BIASES = ("in_proj_bias", "qkv_bias", "q_bias", "v_bias")

NORM_WORDS = {"norm", "norms", "layernorm", "rmsnorm", "ln"}
# Words without information about the kind of projection.
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
    """Tensors of one spelling with names of queries and keys, in every layer.

    Attributes
    ----------
    query, key
        Names without ``.weight`` and the number of the layer; equal for a fused weight.
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
        """The module that contains the projections."""
        return self.query.rpartition(".")[0]

    @property
    def module(self) -> str:
        """The last part of the query's name."""
        return self.query.rpartition(".")[2]

    @property
    def words(self) -> set[str]:
        """Words that distinguish the candidate within the module: ``add`` of ``add_q_proj``."""
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
        Names of the norms before the score, without ``.weight``; empty without norms.
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
    names_by_spelling: dict[str, list[str]] = {}
    for name, info in tensors.items():
        stem = name.removesuffix(".weight")
        is_weight = stem != name or name.endswith("_weight")
        if is_weight and len(info.shape) == 2:
            names_by_spelling.setdefault(without_numbers(stem), []).append(name)
    all_candidates = []
    for query, names in names_by_spelling.items():
        layout_and_key = _layout_and_key(query)
        if layout_and_key is None:
            continue
        layout, key = layout_and_key
        if key in names_by_spelling:
            candidate = Candidate(
                query=query,
                key=key,
                shape=tensors[names[0]].shape,
                key_shape=tensors[names_by_spelling[key][0]].shape,
                layout=layout,
                tensors=tuple(names),
            )
            all_candidates.append(candidate)
    return all_candidates


def _layout_and_key(query: str) -> tuple[str, str] | None:
    """Return the layout of a weight and the name of its keys; None if the weight has no queries.

    Examples
    --------
    >>> _layout_and_key("layers.{layer}.q_proj"), _layout_and_key("layers.{layer}.Wqkv")
    (('separate', 'layers.{layer}.k_proj'), ('sectioned', 'layers.{layer}.Wqkv'))
    """
    path, _, module = query.rpartition(".")
    for pattern, layout in FUSED.items():
        if re.fullmatch(pattern, module):
            return layout, query
    match = QUERY.fullmatch(module)
    if match is None:
        return None
    return "separate", _sibling(path, match, KEY_OF)


def _sibling(path: str, match: re.Match[str], roles: Mapping[str, str]) -> str:
    """Return the name of a module that differs from a query's name only in the role."""
    module = match["before"] + roles[match["role"]] + match["after"]
    return f"{path}.{module}" if path else module


def neighbors_of(candidate: Candidate, others: list[Candidate], tensors: Tensors) -> Neighbors:
    """Sort the tensors in the candidate's module and in the modules within.

    Parameters
    ----------
    candidate
        The candidate.
    others
        All candidates; candidates of the same module share its tensors.
    tensors
        All tensors of the checkpoint.
    """
    rivals = [other for other in others if other.path == candidate.path]
    projections: set[str] = set()
    for rival in rivals:
        projections |= {rival.query.rpartition(".")[2], rival.key.rpartition(".")[2]}
    # The module of a whole layer also holds tensors that have nothing to do with attention.
    is_layer = candidate.path.endswith("}")
    neighbors = Neighbors()
    for name, info in _within(candidate, tensors):
        module, _, parameter = name.rpartition(".")
        is_projection = module in projections and parameter in ("weight", "bias")
        if is_projection or name in projections or name in BIASES:
            continue
        name_words = words_of(module)
        is_of_one_side = len(name_words & {"q", "k"}) == 1
        is_of_attention = not is_layer or bool(name_words & {"q", "k", "kv", "qkv"})
        is_vector_or_matrix = len(info.shape) in (1, 2)
        if is_of_one_side and name_words & NORM_WORDS and parameter in NORM_PARAMETERS:
            _sort_norm(neighbors, candidate, rivals, name, info)
        elif RECURRENT.fullmatch(name):
            neighbors.recurrent.append(name)
        elif is_vector_or_matrix and is_of_attention and not _is_harmless(name, name_words):
            neighbors.unexplained.append(name)
    return neighbors


def _sort_norm(
    neighbors: Neighbors,
    candidate: Candidate,
    rivals: list[Candidate],
    name: str,
    info: TensorInfo,
) -> None:
    """Record a parameter of a norm: of the candidate, of another candidate, or of neither.

    ``name`` is the parameter's name in the candidate's module, such as ``q_norm.weight``.
    """
    module, _, parameter = name.rpartition(".")
    name_words = words_of(module)
    normalized = name_words - {"q", "k"} - NORM_WORDS
    if normalized == candidate.words and len(info.shape) == 1:
        full_name = f"{candidate.path}.{module}"
        if "q" in name_words:
            neighbors.query_norm = full_name
        else:
            neighbors.key_norm = full_name
        neighbors.has_bias |= parameter in ("bias", "beta")
    elif all(normalized != rival.words for rival in rivals):
        neighbors.unexplained.append(name)


def _within(candidate: Candidate, tensors: Tensors) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors in the candidate's modules, each name once, relative to the module.

    A module with the same name in another layer may have another purpose, such as a recurrence.
    """
    modules = {name.removesuffix(".weight").rpartition(".")[0] for name in candidate.tensors}
    yielded: set[str] = set()
    for full_name, info in tensors.items():
        name = without_numbers(full_name).removeprefix(f"{candidate.path}.")
        parts = full_name.split(".")
        # All modules around the tensor, the outermost first.
        enclosing = (".".join(parts[:count]) for count in range(1, len(parts)))
        if name not in yielded and any(module in modules for module in enclosing):
            yielded.add(name)
            yield name, info


def _is_harmless(name: str, name_words: set[str]) -> bool:
    """Return whether a tensor does not affect scores, by name and words of the module.

    A module ``proj`` or ``dense``, without further words, is an output.
    """
    if QUANTIZED.search(name):
        return True
    if not name_words:
        name_words = {"o"} if "." in name else words_of(name)
    is_bare_norm = len(name_words) == 1 and not NORM_WORDS.isdisjoint(name_words)
    return name_words <= HARMLESS and not is_bare_norm


def words_of(module: str) -> set[str]:
    """Return the words of a module's name, without words for a projection.

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
        for pattern, description in RECURRENCES.items():
            if re.search(pattern, module):
                numbers = layers.setdefault(f"{description} ({module})", [])
                if layer not in numbers:
                    numbers.append(layer)
                break
    return layers
