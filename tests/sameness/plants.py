"""Mistakes of conversions: each cause in each layout is seen, named and undone.

A plant changes rows of sides, as they are (heads, R, D), whatever tensors of a layout hold them; or
whole tensors as ``nn.Linear`` has them, (n, D); or biases, gains and sinks. The numbers of a layout
do not coincide.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from tests import cases as tables
from tests.families.architectures import Architecture
from tests.sameness.mending import mend
from tests.small import sizes

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.families import AttentionPlan, Composed
from wqk.sameness.mismatches import UNEXPLAINED, Kind

Array = np.ndarray
Tensors = dict[str, Array]

LAYERS, H, G, R = 3, 6, 3, 32
ROTARY = {"rope_theta": 5e4, "rope_type": "default"}
BERT = sizes(H * R, LAYERS, H, vocab_size=40, intermediate_size=48, pad_token_id=0)
BERT |= {"max_position_embeddings": 2048}
GROUPED = BERT | {
    "hidden_size": 288,
    "num_key_value_heads": G,
    "head_dim": R,
    "rope_parameters": ROTARY,
}
WINDOWED = GROUPED | {"sliding_window": 8, "layer_types": ["sliding_attention"] * LAYERS}
LATENT = {key: value for key, value in GROUPED.items() if key != "head_dim"} | {
    "num_key_value_heads": H,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "first_k_dense_replace": LAYERS,
}
EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", BERT),
    "GPT-2": ("GPT2Model", {"vocab_size": 40, "n_embd": H * R, "n_head": H, "n_layer": LAYERS}),
    "OPT": ("OPTModel", BERT | {"ffn_dim": 48, "word_embed_proj_dim": H * R}),
    "LLaMA": ("LlamaForCausalLM", GROUPED),
    "GPT-NeoX": ("GPTNeoXModel", BERT | {"rotary_pct": 0.5}),
    "Falcon": (
        "FalconModel",
        BERT | {"new_decoder_architecture": True, "num_kv_heads": G, "bias": True},
    ),
    "Phi": ("PhiModel", BERT | {"partial_rotary_factor": 0.5}),
    "Phi-3": ("Phi3Model", GROUPED),
    "Qwen 2": ("Qwen2Model", GROUPED),
    "Qwen 3": ("Qwen3Model", GROUPED),
    "Qwen 3.5": ("Qwen3NextModel", GROUPED | EXPERTS | {"layer_types": ["full_attention"] * 3}),
    "T5": (
        "T5EncoderModel",
        {
            "vocab_size": 40,
            "d_model": 288,
            "num_heads": H,
            "d_kv": R,
            "d_ff": 48,
            "num_layers": LAYERS,
        },
    ),
    "Gemma": ("GemmaModel", GROUPED),
    "Gemma 2": ("Gemma2Model", WINDOWED | {"attn_logit_softcapping": 50.0}),
    "Mistral": ("MistralModel", WINDOWED),
    "ModernBERT": ("ModernBertModel", BERT | {"local_attention": 8, "attention_bias": True}),
    "DeepSeek": ("DeepseekV2Model", LATENT),
    "gpt-oss": ("GptOssModel", WINDOWED | EXPERTS),
}


@cache
def right(layout: str) -> tuple[Tensors, dict[str, Any], tuple[AttentionPlan, ...]]:
    """The tensors of a random model, its configuration, and where its heads lie."""
    from tests.families.proving import build

    model = build(Architecture(layout, *LAYOUTS[layout]))
    tensors = {name: value.float().numpy().copy() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    return tensors, config, wqk.open(StateDict(tensors, config, layout)).plans


class Numbers(NamedTuple):
    """Sizes of a side: heads of queries, keys and the side, head width, rotated dimensions."""

    heads: int
    groups: int
    side_heads: int
    width: int
    turned: int
    random: np.random.Generator
    gain: Array | None
    parts: tuple[Array, ...]  # of a fused weight: rows of queries, keys and values


class Plant(NamedTuple):
    """A mistake: the sides that it changes, the change, and the causes that may be named."""

    description: str
    on: str  # of q k v o: sides, one after the other; of their whole weights; or biases, gains
    change: Callable[[Array, Numbers], Array | None]
    kinds: tuple[Kind, ...]


def halved(w: Array, n: Numbers, heads: int = 0) -> Array:
    """Store the rotary pairs of each head, which lie side by side, as halves."""
    count = heads or n.side_heads
    is_whole = n.turned == n.width or heads
    part = w.reshape(count, -1, w.shape[-1]) if is_whole else w[:, : n.turned]
    turned = part.reshape(count, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(part.shape)
    out = turned if is_whole else np.concatenate([turned, w[:, n.turned :]], axis=1)
    return out.reshape(w.shape)


def paired(w: Array, n: Numbers, heads: int = 0) -> Array:
    """Undo `halved`: store rotary halves as pairs."""
    rows = np.arange(n.side_heads * n.width).reshape(n.side_heads, n.width, 1)
    order = halved(rows, n, heads).ravel()
    return w.reshape(-1, w.shape[-1])[np.argsort(order)].reshape(w.shape)


def with_second_head(w: Array, n: Numbers, values: Any) -> Array:
    """Replace the second head."""
    w = w.copy()
    w[1] = values
    return w


def blocks(w: Array, change: Callable[[Array], Array], size: int = 32) -> Array:
    """Blocks (n, D / size, size) of columns changed."""
    return change(w.reshape(len(w), -1, size)).reshape(w.shape)


def largest(b: Array) -> Array:
    return np.abs(b).max(axis=2, keepdims=True)


def low_rank(w: Array, n: Numbers) -> Array:
    up, down = (
        n.random.standard_normal(shape)
        for shape in ((w.shape[0] * w.shape[1], 4), (4, w.shape[-1]))
    )
    return w + (0.02 * up @ down).reshape(w.shape)


def elsewhere(w: Array, n: Numbers) -> None:
    """Stands for weights of another tensor, see `exchanged`."""


def signs(n: Numbers, count: int) -> Array:
    return np.where(np.arange(count) % 7 < 2, -1, 1)


K = Kind
ROWS = (K.ROTARY, K.ROWS, K.DIMENSIONS, K.FUSED)
MOVED = (K.HEADS, K.PAIRING, K.ROWS, K.FUSED, K.COLUMNS)
BLOCK_CHANGES: tuple[tuple[str, Callable[[Array], Array], Kind], ...] = (
    (
        "scales of other rows",
        lambda b: b / largest(b) * np.roll(largest(b), 1, axis=0),
        K.BLOCK_SCALES,
    ),
    ("integers without scales", lambda b: np.rint(b / largest(b) * 127), K.INTEGERS),
    ("zero points off", lambda b: b + 0.1 * largest(b), K.ZERO_POINT),
    ("halves exchanged", lambda b: np.roll(b, b.shape[2] // 2, axis=2), K.COLUMNS),
)


def block_plants(size: int) -> Iterator[Plant]:
    """Yield the mistakes in blocks of a number of columns, where the width is a multiple of it."""
    for description, change, kind in BLOCK_CHANGES:

        def in_blocks(
            w: Array, n: Numbers, change: Callable[[Array], Array] = change
        ) -> Array | None:
            return blocks(w, change, size) if w.shape[1] % size == 0 else None

        yield Plant(f"{description}, blocks of {size}", "q! k! v! o!", in_blocks, (kind,))


PLANTS: tuple[Plant, ...] = (
    Plant("rows in the other rotary order", "q k v qk", halved, ROWS),
    Plant("rows from halves to pairs", "q k v qk", paired, ROWS),
    Plant("converted twice", "q k qk", lambda w, n: halved(halved(w, n), n), ROWS),
    Plant(
        "converted with another number of heads",
        "q k",
        lambda w, n: halved(w, n, n.side_heads // 3) if n.side_heads % 3 == 0 else None,
        ROWS,
    ),
    Plant("dimensions rolled in each head", "q k v", lambda w, n: np.roll(w, 1, 1), ROWS),
    Plant("heads exchanged", "q k v o", lambda w, n: w[[1, 0, *range(2, n.side_heads)]], MOVED),
    Plant("heads rolled", "q k v o", lambda w, n: np.roll(w, 1, 0), MOVED),
    Plant("heads in reverse order", "q k v o", lambda w, n: w[::-1], MOVED),
    Plant(
        "heads by the other grouping",
        "q o",
        lambda w, n: (
            None
            if n.heads == n.groups
            else w.reshape(n.groups, -1, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)
        ),
        MOVED,
    ),
    Plant(
        "all rows in reverse order",
        "q k v",
        lambda w, n: w.reshape(-1, w.shape[-1])[::-1].reshape(w.shape),
        (*ROWS, *MOVED),
    ),
    Plant("a head copied", "q k v o", lambda w, n: with_second_head(w, n, w[0]), (K.COPIES,)),
    Plant(
        "a head drawn anew",
        "q k v o",
        lambda w, n: with_second_head(w, n, 0.02 * n.random.standard_normal(w[0].shape)),
        (K.STRANGERS,),
    ),
    Plant(
        "a head pruned", "q k v o", lambda w, n: with_second_head(w, n, 0), (K.STRANGERS, K.ZERO)
    ),
    Plant(
        "heads averaged",
        "q k v",
        lambda w, n: None if n.side_heads < 2 else np.broadcast_to(w.mean(axis=0), w.shape).copy(),
        (K.AVERAGED,),
    ),
    Plant(
        "columns in the other rotary order",
        "q k v",
        lambda w, n: w.reshape(*w.shape[:2], 2, -1).swapaxes(2, 3).reshape(w.shape),
        (K.COLUMNS,),
    ),
    Plant("columns rolled", "q k v", lambda w, n: np.roll(w, 5, 2), (K.COLUMNS,)),
    Plant("columns in reverse order", "q k v o", lambda w, n: w[..., ::-1], (K.COLUMNS, K.ROWS)),
    Plant(
        "nibbles exchanged",
        "q k v",
        lambda w, n: w.reshape(*w.shape[:2], -1, 2)[..., ::-1].reshape(w.shape),
        (K.COLUMNS,),
    ),
    Plant("all zero", "q k v o", lambda w, n: 0 * w, (K.ZERO,)),
    Plant("times a factor", "q k v o", lambda w, n: 1.7 * w, (K.SCALED,)),
    Plant("of the other sign", "q k v o", lambda w, n: -w, (K.SCALED, K.SIGNS)),
    Plant(
        "rows each with a factor",
        "q k v",
        lambda w, n: w * np.linspace(0.5, 2, w[..., 0].size).reshape(*w.shape[:2], 1),
        (K.ROW_FACTORS,),
    ),
    Plant("signs of rows", "q k v", lambda w, n: w * signs(n, w.shape[1])[:, None], (K.SIGNS,)),
    Plant("signs of columns", "q k v", lambda w, n: w * signs(n, w.shape[-1]), (K.SIGNS,)),
    Plant(
        "columns each with a factor",
        "q k v",
        lambda w, n: w * np.linspace(0.5, 2, w.shape[-1]),
        (K.COLUMN_FACTORS,),
    ),
    Plant(
        "the gain before it folded in",
        "q k v qk",
        lambda w, n: None if n.gain is None or len(n.gain) != w.shape[-1] else w * n.gain,
        (K.GAIN_FOLDED,),
    ),
    Plant("an update of low rank", "q k v o qk", low_rank, (K.ADAPTER,)),
    Plant("weights of another layer", "q k v o qkvo", elsewhere, (K.LAYER,)),
    Plant("sides exchanged", "qk kv", elsewhere, (K.EXCHANGED, K.TENSOR)),
    *block_plants(32),
    *block_plants(16),
    Plant(
        "offsets of blocks of 24",
        "q! k! v! o!",
        lambda w, n: (
            None
            if w.shape[1] % 24
            else blocks(w, lambda b: b + 0.1 * n.random.standard_normal((*b.shape[:2], 1)), 24)
        ),
        (K.ZERO_POINT,),
    ),
    Plant(
        "stored the other way",
        "q! k! v! o!",
        lambda w, n: w.T if w.shape[0] == w.shape[1] else None,
        (K.TRANSPOSED,),
    ),
    Plant(
        "its parts stored the other way",
        "q!",
        lambda w, n: (
            np.concatenate([part.T for part in n.parts])
            if n.parts
            and all(len(part) == w.shape[1] for part in n.parts)
            and np.array_equal(np.concatenate(n.parts), w)
            else None
        ),
        (K.TRANSPOSED,),
    ),
    *(
        Plant(f"fused {description}", "q!", change, (K.FUSED,))
        for description, change in (
            ("in sections", lambda w, n: joined(n, "qkv", 1)),
            ("in the order k q v", lambda w, n: joined(n, "kqv", 1)),
            ("in the order v k q", lambda w, n: joined(n, "vkq", 1)),
            ("per key head", lambda w, n: joined(n, "qkv", n.groups)),
            ("per key head, keys first", lambda w, n: joined(n, "kvq", n.groups)),
            ("in two shards", lambda w, n: joined(n, "qkv", 2)),
            ("in four shards", lambda w, n: joined(n, "qkv", 4)),
        )
    ),
    Plant(
        "all rows rolled by a head",
        "q! k! v!",
        lambda w, n: np.roll(w, n.width, 0),
        (*MOVED, *ROWS),
    ),
    *(
        Plant(f"{description} biases", "qb kb vb", change, (K.BIASES,))
        for description, change in (
            ("no", lambda w, n: 0 * w),
            ("other", lambda w, n: n.random.standard_normal(w.shape)),
            ("rolled", lambda w, n: np.roll(w, 1)),
            ("other signs of", lambda w, n: w * signs(n, len(w))),
        )
    ),
    *(
        Plant(f"{description} gains", "qn kn q# k#", change, (K.NORM, K.SCALED))
        for description, change in (
            ("one more in", lambda w, n: w + 1),
            ("one less in", lambda w, n: w - 1),
            ("plain", lambda w, n: np.ones_like(w)),
            ("reversed", lambda w, n: w[::-1]),
        )
    ),
    *(
        Plant(f"{description} sinks", "s", change, (K.SINKS,))
        for description, change in (
            ("no", lambda w, n: 0 * w),
            ("rolled", lambda w, n: np.roll(w, 1)),
            ("other", lambda w, n: w + 0.5),
        )
    ),
)


def joined(n: Numbers, order: str, shards: int) -> Array | None:
    """Queries, keys and values of a fused weight in shards, each with them in this order."""
    if not n.parts or any(len(part) % shards for part in n.parts):
        return None
    pieces = [np.split(n.parts["qkv".index(letter)], shards) for letter in order]
    return np.concatenate([np.concatenate(shard) for shard in zip(*pieces, strict=True)])


class Setting(NamedTuple):
    """Settings that a conversion lost, as a configuration has them, by dots for its parts."""

    layout: str
    changes: dict[str, Any]
    of_attention: bool = False  # compared by `same` without `--all`, too
    says: tuple[str, ...] = ()  # parts of the reasons, besides the setting's name


SETTINGS = (
    *(Setting(*row) for row in tables.cases(__file__, "settings")),
    Setting("Gemma 2", {"final_logit_softcapping": None}),
    Setting("Mistral", {"sliding_window": None}, True),
)

SIDES = {"q": "query", "k": "key", "v": "value", "o": "output"}
EVERYWHERE = tuple(range(LAYERS))


class Case(NamedTuple):
    """A plant in some layers of a layout, on some sides."""

    layout: str
    plant: Plant
    on: str
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.layout}: {self.plant.description}, {self.on}, layers {self.layers}"


def cases(layout: str) -> list[Case]:
    """All cases of a layout; cases that change nothing are no mistakes."""
    layout_cases = []
    for plant in PLANTS:
        for on, layers in product(plant.on.split(), (EVERYWHERE, (1,))):
            layout_cases.append(Case(layout, plant, on, layers))
    return layout_cases


def planted(case: Case) -> Tensors | None:
    """The tensors with the mistake in them; None where it is none."""
    original, _, plans = right(case.layout)
    tensors = dict(original)
    for plan in plans:
        if plan.layer not in case.layers:
            continue
        if case.plant.change is elsewhere:
            sources = exchanged(plan, plans[plan.layer - 1], case)
            if any(original[a].shape != original[b].shape for a, b in sources.items()):
                return None
            tensors |= {a: original[b].copy() for a, b in sources.items()}
            continue
        for place in places(plan, case.on):
            value = place.take(original)
            new = case.plant.change(value, numbers(plan, place.side, original))
            if new is None or np.array_equal(new, value):
                return None
            place.put(tensors, np.asarray(new, np.float32))
    return None if all(tensors[name] is original[name] for name in original) else tensors


def exchanged(plan: AttentionPlan, before: AttentionPlan, case: Case) -> dict[str, str]:
    """Source of each replaced tensor: the layer before, or the other side."""
    sides = [getattr(plan, SIDES[letter]) for letter in case.on]
    sources = (
        sides[::-1]
        if "exchanged" in case.plant.description
        else [getattr(before, SIDES[o]) for o in case.on]
    )
    pairs = zip(sides, sources, strict=True)
    return {a.tensor: b.tensor for a, b in pairs if a and b and a.tensor != b.tensor}


class Side(NamedTuple):
    """A place that a plant changes: rows of a side, a whole weight, or a vector."""

    side: Any
    name: str
    kind: str  # rows, weight or vector
    projection: Any
    rows: Any = None  # of a vector
    flip: bool = False

    def take(self, tensors: Tensors) -> Array:
        """The rows (heads, R, D), the weight (n, D), or the vector."""
        stored = tensors[self.name]
        if self.kind == "vector":
            return stored.reshape(-1)[self._at(stored)]
        if self.kind == "weight":
            return stored.T if self.flip else stored
        rows = self.projection.part.rows
        return self.projection.take(
            np.concatenate([stored[slice(*e)] for e in rows]) if rows else stored
        )

    def put(self, tensors: Tensors, value: Array) -> None:
        """Write the rows, the weight, or the vector into a copy of the tensor."""
        copy = tensors[self.name] = tensors[self.name].copy()
        if self.kind == "vector":
            copy.reshape(-1)[self._at(copy)] = value
        elif self.kind == "weight":
            copy[:] = value.T if self.flip else value
        else:
            self.projection.put(copy, value)

    def _at(self, stored: Array) -> Array:
        return np.concatenate([np.arange(*e) for e in self.rows or ((0, stored.size),)])


def places(plan: AttentionPlan, on: str) -> Iterator[Side]:
    """Yield the places of a block that a plant changes."""
    turns = turned(plan)
    if on == "s" and plan.sinks:
        yield Side(plan.query, plan.sinks.name, "vector", None, plan.sinks.rows)
    for side in (getattr(plan, SIDES[letter]) for letter in on if letter in SIDES):
        if side is None or (on == "kb" and not turns):
            continue  # without positions a key's bias adds the same to all scores of a query
        projection = (
            side.projection.outer if isinstance(side.projection, Composed) else side.projection
        )
        inner = side.projection.norm if isinstance(side.projection, Composed) else None
        norms = {"n": side.input_norm, "#": side.norm or inner}
        if on[-1] in "bn#":
            norm = norms.get(on[-1])
            vector = side.bias if on[-1] == "b" else norm and norm.gain and norm.gain[0]
            if vector:
                yield Side(side, vector.name, "vector", None, vector.rows)
        else:
            part = "weight" if on[-1] == "!" else "rows"
            flip = projection.transposed != (on[0] == "o")
            yield Side(side, projection.tensor, part, projection, None, flip)


def turned(plan: AttentionPlan) -> int:
    """Number of dimensions of a head that turn with positions."""
    rotary = plan.rotary or plan.axial
    return 0 if rotary is None else 2 * len(rotary.frequencies)


def numbers(plan: AttentionPlan, side: Any, original: Tensors) -> Numbers:
    """Sizes of a side, and what plants need besides."""
    projection = side.projection.outer if isinstance(side.projection, Composed) else side.projection
    norm, parts = side.input_norm, []
    for fused_side in (plan.query, plan.key, plan.value):
        side_projection = fused_side and fused_side.projection
        if (
            side_projection
            and not isinstance(side_projection, Composed)
            and side_projection.tensor == projection.tensor
            and side_projection.outputs
        ):
            stored = (
                original[side_projection.tensor].T
                if side_projection.transposed
                else original[side_projection.tensor]
            )
            parts.append(np.concatenate([stored[slice(*ends)] for ends in side_projection.outputs]))
    return Numbers(
        plan.query.heads,
        plan.key.heads,
        projection.heads,
        projection.head_width,
        min(turned(plan) or projection.head_width, projection.head_width),
        np.random.default_rng(plan.layer),
        original[norm.gain[0].name] + norm.offset if norm and norm.gain else None,
        tuple(parts) if len(parts) == 3 else (),
    )


class Verdict(NamedTuple):
    """Outcome of a plant."""

    named: str  # unseen, tensor, distance, partly, wrong or right
    repaired: bool | None  # whether the repair made them the same; None where none is printed
    sentence: str


def tried(case: Case) -> Verdict | None:
    """Plant it, compare, run the repairs, compare again; None where it is no mistake."""
    tensors, (original, config, plans) = planted(case), right(case.layout)
    if tensors is None or (case.on == "qk" and case.plant.kinds == ROWS and not turned(plans[0])):
        return None  # without positions, rows of queries and keys in one order are the same
    first = StateDict(original, config, "a")
    comparison = wqk.same(first, StateDict(tensors, config, "b"))
    causes = []
    for block in comparison.blocks:
        causes.extend(block.mismatches)
    kinds, named = {cause.verdict for cause in causes}, "right"
    if not causes:
        named = "unseen" if comparison.same else "tensor"
    elif kinds - {*case.plant.kinds} - UNEXPLAINED:
        named = "wrong"
    elif kinds & UNEXPLAINED:
        named = "distance" if kinds <= UNEXPLAINED else "partly"
    if not any(cause.repair for cause in causes):
        return Verdict(named, None, comparison.sentence)
    mended = dict(tensors)
    mend(comparison.repair, mended, original, dict(config))
    return Verdict(named, wqk.same(first, StateDict(mended, config, "b")).same, comparison.sentence)
