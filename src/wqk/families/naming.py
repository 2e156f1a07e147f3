"""Names of tensors: a family's and those of token embeddings looked up, and what names alone say.

Two weights whose names differ only in ``q`` and ``k``, or one whose name says that it holds both,
are taken for queries and keys. The tensors next to them are sorted: part of a form, irrelevant to
it, or unexplained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.checkpoints import Part, TensorInfo
from wqk.errors import CheckpointError
from wqk.families.layouts import Composed

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint
    from wqk.families.family import AttentionRule
    from wqk.families.layouts import Projection

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

# Tensors that only one kind of recurrence or convolution over tokens has, what it is, and, where
# that is known, why it has no form.
RECURRENCES = {
    r"\bx_proj_weight$": "Mamba by heads, each of whose forms sees a part of the inner vectors",
    r"\b(?:A_log|ssm_a)$": "a state-space or linear-attention recurrence",
    r"\brg_lru\.recurrent_param$": "a gated linear recurrence, which scores no pairs of tokens",
    r"\bslope_rate$": "lightning attention, which is linear",
    r"\b(?:short)?conv\.conv\.weight$": "a short convolution, which scores no pairs of tokens",
}


@dataclass(frozen=True, eq=False)
class Match:
    """One layer's tensors that match a rule."""

    tensors: Mapping[str, TensorInfo]  # the checkpoint's
    index: tuple[int, ...]
    query: str  # full name of the weight
    key: str
    prefix: str

    @property
    def group(self) -> int:
        """The first index; 0 for attention that there is only once."""
        return self.index[0] if self.index else 0

    def weight(self, spellings: tuple[str, ...]) -> str | None:
        """Full name of the first of these spellings' weights that exists."""
        names = (_stored(self._filled(spelling), self.tensors) for spelling in spellings)
        return next((name for name in names if name in self.tensors), None)

    def part(self, spellings: tuple[str, ...]) -> Part | None:
        """The first of these full names' tensors that exists."""
        names = map(self._filled, spellings)
        return next((Part(name) for name in names if name in self.tensors), None)

    def bias(self, projection: Projection | Composed, names: tuple[str, ...]) -> Part | None:
        """The projection's bias: under a name of its own, or laid out like the outputs."""
        named = self.part(names)
        if named is not None or isinstance(projection, Composed):
            return named
        name = projection.tensor.removesuffix("weight") + "bias"
        # PyTorch's attention has one bias, where keys of another width give it three weights.
        whole = re.sub(r"(?<=\.)[qkv]_proj_bias$", "in_proj_bias", name)
        if not names and whole != name and whole in self.tensors:
            size = projection.heads * projection.head_width
            start = "qkv".index(name[-len("q_proj_bias")]) * size
            return Part(whole, ((start, start + size),))
        return projection.bias_part(name) if not names and name in self.tensors else None

    def norm(self, spellings: tuple[str, ...], what: str, heads: int = 1) -> tuple[Part, ...]:
        """The gain (``weight``) or bias of a norm; one for each head if its name has ``{head}``."""
        # In the oldest files, a norm's gain and bias are gamma and beta.
        endings = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}[what]
        for spelling in spellings:
            numbers = range(heads if "{head}" in spelling else 1)
            # The name of a bare parameter already ends in weight.
            stem = weight_name(spelling).removesuffix("weight")
            stems = [stem.replace("{head}", str(n)) for n in numbers]
            for ending in endings:
                parts = [self.part((f"{stem}{ending}",)) for stem in stems]
                if all(parts):
                    return tuple(part for part in parts if part is not None)
        return ()

    def named(self, spelling: str) -> str:
        """Return the full name of a spelling's weight, whether or not it exists."""
        return weight_name(self._filled(spelling)).replace("{head}", "0")

    def _filled(self, spelling: str) -> str:
        """The full name; ``{last}`` is the highest number that a tensor has."""
        before, mark, after = spelling.partition("{last}")
        if mark:
            start, end = re.escape(self.prefix + before), re.escape(after)
            found = (re.fullmatch(rf"{start}([0-9]{{1,9}}){end}", name) for name in self.tensors)
            last = max((int(match[1]) for match in found if match), default=0)
            spelling = f"{before}{last}{after}"
        return self.prefix + _fill(spelling, self.index)


def find_layers(
    tensors: Mapping[str, TensorInfo], rule: AttentionRule, keyless: int = 0
) -> list[Match]:
    """The layers whose tensors match the rule's first spelling that matches at all.

    The last ``keyless`` layers need no keys of their own.
    """
    spellings = rule.fused or rule.query
    keys = rule.fused or rule.key
    for query, key in zip(spellings, keys, strict=True):
        matches = _matches(tensors, query, rule.prefix)
        if not matches:
            continue
        before = sorted({match["prefix"] for match in matches})
        if len(before) > 1 and before[0]:  # a tensor of exactly this name is the one that is meant
            raise CheckpointError(
                f"two sets of tensors match {query!r}, under "
                f"{before[0]!r} and {before[1]!r}; name one with a family file"
            )
        prefix = before[0]
        if rule.exact:
            _require_shared(prefix, query, tensors)
        found = []
        chosen = (match for match in matches if match["prefix"] == prefix)
        indices = sorted(tuple(int(n) for n in match.groups()[1:]) for match in chosen)
        if not rule.every_layer:  # else the gap is noticed
            _require_plain_weights(tensors, prefix, query, indices)
        for number, index in enumerate(indices):
            stems = [prefix + _fill(spelling, index) for spelling in (query, key)]
            names = [_stored(stem, tensors) for stem in stems]
            needed = names if number < len(indices) - keyless else names[:1]
            missing = [tensor for tensor in needed if tensor not in tensors]
            module = stems[0].rpartition(".")[0] + "."
            inside = (name.removeprefix(module) for name in tensors if name.startswith(module))
            # A recurrence may have queries, too (Kimi Linear).
            if missing and (rule.between or any(map(RECURRENT.fullmatch, inside))):
                continue
            if missing:
                raise CheckpointError(f"incomplete, tensor {missing[0]!r} is missing")
            found.append(Match(tensors, index, names[0], names[1], prefix))
        return found
    return []


def _require_plain_weights(
    tensors: Mapping[str, TensorInfo],
    prefix: str,
    spelling: str,
    indices: list[tuple[int, ...]],
) -> None:
    """Check that no layer stores its queries differently, such as quantized next to plain ones."""
    within = re.compile(rf"{re.escape(prefix)}{_numbered(spelling)}\.(?!bias$).+")
    for match in filter(None, map(within.fullmatch, tensors)):
        if tuple(map(int, match.groups())) not in indices:
            raise CheckpointError(
                f"incomplete, {match[0]!r} takes the place of the weight in some layers: quantized "
                "or adapted weights cannot be scored; dequantize or merge them first"
            )


def _require_shared(prefix: str, spelling: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that a prefix that a family file leaves out precedes all attention of the model."""
    other = next((c.query for c in candidates(tensors) if not c.query.startswith(prefix)), None)
    if prefix and other:
        raise CheckpointError(
            f"the family file names {spelling!r}, which is there only under {prefix!r}, "
            f"beside {other!r}; write the whole name, {prefix + spelling!r}"
        )


def prefixes(tensors: Mapping[str, TensorInfo], rule: AttentionRule) -> dict[str, list[str]]:
    """Full names of the queries' weights that match any spelling, by their prefix."""
    found: dict[str, list[str]] = {}
    for spelling in rule.fused or rule.query:
        for match in _matches(tensors, spelling, rule.prefix):
            found.setdefault(match["prefix"], []).append(match[0])
    return found


def _matches(
    tensors: Mapping[str, TensorInfo], spelling: str, prefix: str | None
) -> list[re.Match[str]]:
    """The full names of weights of this spelling, under the given prefix or under any."""
    before = r"(?:.+\.)?" if prefix is None else re.escape(prefix)
    for name in (weight_name(spelling), spelling):
        pattern = re.compile(rf"(?P<prefix>{before}){_numbered(name)}")
        if found := [match for match in map(pattern.fullmatch, tensors) if match]:
            return found
    return []


def _numbered(spelling: str) -> str:
    """A pattern of the names with this spelling, with a group for each number."""
    return re.sub(r"\\\{\w+\\\}", r"([0-9]{1,9})", re.escape(spelling))


def _fill(spelling: str, index: tuple[int, ...]) -> str:
    """The spelling with its ``{layer}`` and further indices filled in, in their order."""
    spelling = spelling.replace("{previous}", str(index[0] - 1 if index else 0))
    numbers = iter(index)
    return re.sub(r"\{\w+\}", lambda _: str(next(numbers)), spelling)


def _stored(stem: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Full name of the weight; of a bare parameter the stem itself."""
    name = weight_name(stem)
    return stem if name not in tensors and stem in tensors else name


def weight_name(stem: str) -> str:
    """Full name of the weight; names of bare parameters already end in ``weight``."""
    return stem if stem.endswith("weight") else f"{stem}.weight"


# What tables of token embeddings are called, without ``.weight``.
NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embedding|word_embeddings|word_embedding|wte"
    r"|embed_in|shared|embeddings|tokens_embed|tok_embedding|embedding)(?:\.weight)?"
)


def embedding_table(checkpoint: Checkpoint, width: int, name: str | None = None) -> str:
    """The tensor (V, ``width``) with one embedding per token, by name or searched for.

    Raises `CheckpointError` if there is none, if it has another width, or if several may be it.
    """
    tensors = checkpoint.tensors()
    if name is not None:
        shape = checkpoint.info(name).shape
        if len(shape) != 2 or shape[1] != width or not shape[0]:
            raise CheckpointError(
                f"{name}: an embedding table must be (tokens, {width}), as wide as the "
                f"queries' input; got {shape}"
            )
        return name
    found = [
        tensor
        for tensor, info in tensors.items()
        if len(info.shape) == 2
        and info.shape[0]
        and info.shape[1] == width
        and NAMES.fullmatch(tensor)
    ]
    # A table that encoder and decoder share is stored under several names.
    found = [t for t in found if t.endswith("shared.weight")] or found
    if len(found) != 1:
        several = f"several might be it: {', '.join(found[:4])}" if found else "none was recognized"
        raise CheckpointError(
            f"{checkpoint.name}: no table of token embeddings of width {width} ({several}); "
            "name the tensor (embeddings=NAME)"
        )
    return found[0]


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
    >>> names = ["a.layers.0.mixer.A_log", "b.layers.0.mixer.A_log", "layers.1.attn.q_proj.weight"]
    >>> recurrent_layers(dict.fromkeys(names))
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
