"""A model type's default configuration, made tiny.

Widths, depths and vocabularies are recognized by their names. Heads are chosen so that mistaking
one number for another is noticed: 6 query heads over 2 key heads, of width 24 where hidden/heads is
16; in encoders, and in towers for pictures and sound, 4 heads where the decoder or the text has 6,
and three layers where the decoder has two.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH, TOWER_HEADS = 96, 6, 2, 24, 4
VOCABULARY = 160
SIDE = 64

# Patterns of keys, the first of which that fits decides: what a whole number becomes.
NUMBERS: tuple[tuple[str, int | str], ...] = (
    (r"max_source_positions", 64),
    (r"sliding_window|sliding_window_size|attention_chunk_size|local_attention", 6),
    (r"max_window_layers", 1),
    (r"mamba_n_heads|mamba_num_heads", 12),
    (r"mamba_d_head|mamba_head_dim", 16),
    (
        r"(decoder_|cross_)?num_(global_)?key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num"
        r"|swa_num_key_value_heads|n_kv_heads|kv_n_heads",
        "key heads",
    ),
    (r"(num_)?encoder_(num_)?attention_heads|encoder_heads", "tower heads"),
    (
        r"(num_|n_)?(attention_)?heads?|num_attention_heads|(num_)?decoder_(num_)?attention_heads"
        r"|attention_heads|nhead|.*_num_attention_heads|.*_(num|n)_heads",
        "heads",
    ),
    (
        r"head_dim|kv_channels|attention_head_dim|d_kv|attention_head_size|attention_key_size"
        r"|swa_head_dim",
        "head width",
    ),
    (r"global_head_dim", 32),
    (r"rotary_dim", 8),
    (r"qk_nope_head_dim", 20),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 28),
    (r"v_head_dim", 12),
    (r"q_lora_rank", 40),
    (r"kv_lora_rank", 32),
    (r"index_head_dim", 16),
    (r"index_n_heads", 2),
    (
        r"hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|embedding_size|dim|d_embed"
        r"|emb_dim|embedding_dim|(encoder|decoder|text|vision|output|out|cross|cross_attention|audio"
        r"|backbone|qformer|mm|encoder_hidden|backbone|word_embed_proj|memory_attention|memory_encoder)"
        r"_(hidden_)?(size|dim|proj_dim)|proj_dim|projection_size|hidden_size_per_head",
        "width",
    ),
    (
        r"(.*_)?(intermediate_size|ffn_dim|mlp_dim|d_ff|ffn_hidden_size|feedforward_dim|n_inner"
        r"|feed_forward_size|linear_units|intermediate_dim|ffn_size|dim_feedforward)",
        40,
    ),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k(_experts)?|moe_top_k", 2),
    (r"n_group|topk_group|n_groups", 1),
    (r"num_queries", 8),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length", 256),
    (
        r"(num_hidden_|num_|n_|encoder_|decoder_|text_|e_|c_|dec_|enc_)?(layers?|depth)"
        r"|num_(encoder|decoder|resampler|perceiver)_(hidden_)?layers|(encoder|decoder)_num_layers|n_blocks"
        r"|depth|num_(hidden_)?blocks|num_global_layers|resampler_depth|.*_num_(hidden_)?layers"
        r"|num_hidden_layers_.*|num_hidden_groups|(encoder|decoder)_num_hidden_layers",
        "layers",
    ),
    (r"codebook_size|num_embeddings", 128),
    (r"coordinate_size|shape_size", 16),
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCABULARY),
)
TOWERS = re.compile(r"(vision|visual|image|audio|speech|sound|acoustic|encoder|mm|video)")
KINDS = (
    "layer_types",
    "layers_block_type",
    "block_types",
    "attn_type_list",
    "mlp_layer_types",
    "indexer_types",
    "attention_layers",
)
OVERRIDES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "overrides.json").read_text(encoding="utf-8")
)


def shrunk(config: Any, variant: int = 0) -> Any:
    """A configuration of the same class with small numbers; further variants are less unusual."""
    table = config.to_dict()
    overrides = OVERRIDES.get(config.model_type, {})
    for key, value in overrides.items():
        _put(table, key.split("."), value)
    table = _shrunk(table, "", variant)
    for key, value in overrides.items():
        _put(table, key.split("."), value)
    return type(config)(**table)


def small_file(table: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with small numbers and no other change: old keys stay, absent ones too.

    Only what a class would fill in with a large number is written next to them.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[table["model_type"]]
    small = _shrunk(table, "", 0, made.from_dict(copy.deepcopy(table)).to_dict())
    kept = {key: table[key] for key in ("architectures",) if key in table}
    filled = made.from_dict(copy.deepcopy(small)).to_dict()
    shrunk = _shrunk(filled, "", 0)
    small = kept | _with_large(small, filled, shrunk)
    code = Path(inspect.getfile(made)).with_name(
        made.__module__.rpartition(".")[2].replace("configuration", "modeling") + ".py"
    )
    states_rope = any("rope_" in key for key in small)
    if not states_rope and code.exists() and "mrope_section" in code.read_text(encoding="utf-8"):
        small["rope_parameters"] = shrunk.get("rope_parameters") or {}  # its sections fill a head
    for alias, key in getattr(made, "attribute_map", {}).items():
        if alias in small and key in small:  # two names of one number
            small[alias] = small[key]
    for key, value in OVERRIDES.get(table["model_type"], {}).items():
        path = key.split(".")
        given_table, kept = (
            functools.reduce(lambda t, name: (t or {}).get(name), path[:-1], content) or {}
            for content in (table, small)
        )
        same = path[-1] in given_table and kept.get(path[-1]) == given_table[path[-1]]
        if not same and "layer_types" not in path:
            _put(small, path, value)
    return small


def _with_large(
    small: dict[str, Any], filled: dict[str, Any], shrunk: dict[str, Any]
) -> dict[str, Any]:
    """The table, and the numbers of what fills it up that are not as small as wanted."""
    result = dict(small)
    for key, value in shrunk.items():
        filled_value = filled.get(key)
        if isinstance(value, dict) and isinstance(filled_value, dict) and "rope" not in key:
            # A part that is left out may have other defaults than its type has.
            inner = _with_large(small[key], filled_value, value) if small.get(key) else value
            if inner:
                result[key] = inner
        elif type(value) is int and type(filled_value) is int and value < filled_value:
            result[key] = value
    return result


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        table = table.setdefault(name, {})
    if value == "absent":
        table.pop(path[-1], None)
    else:
        table[path[-1]] = value


def _shrunk(
    table: dict[str, Any], path: str, variant: int, filled: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``filled`` is the same table with everything that its class knows, by default itself."""
    filled = table | dict(filled or {})
    dropped = UNTOLD if any(key in table for key in STAGES) else UNTOLD | OUTPUTS
    small = {key: value for key, value in table.items() if key not in dropped}
    layers = _depth(filled, variant)
    for key, value in table.items():
        if key not in small:
            continue
        if key == "per_layer_config":
            small.pop(key)
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            small[key] = (
                _rotary(value, filled)
                if "rope" in key
                else _shrunk(value, f"{path}.{key}", variant, filled.get(key))
            )
        elif key == "decoder_in_channels" and isinstance(value, list):
            small[key] = [min(n, WIDTH) for n in value]
        elif key == "num_attention_heads_per_layer" and isinstance(value, list):
            small[key] = [HEADS if n == min(value) else HEADS + 2 for n in value[:layers]]
        elif key in STAGES and isinstance(value, list):
            small[key] = [min(n, 1 if i % 2 else 2) for i, n in enumerate(value)]
        elif isinstance(value, list) and (
            key in KINDS or (len(value) > 2 and len(value) == _told_layers(filled))
        ):
            small[key] = value[: 3 if path.endswith("encoder_config") else layers]
        elif isinstance(value, float) and re.search(r"eps(ilon)?$", key):
            small[key] = 1.01 * value  # which no default is
        elif type(value) is int:
            small[key] = _number(key, value, path, layers, variant)
    if "qk_rope_head_dim" in small:
        small.pop("head_dim", None)
        small.pop("qk_head_dim", None)
        small["num_key_value_heads"] = small.get("num_attention_heads")
    _pictures(small, filled)
    _tokens(small)
    return small


def _number(key: str, value: int, path: str, layers: int, variant: int) -> int:
    rule = next((number for pattern, number in NUMBERS if re.fullmatch(pattern, key)), None)
    heads = TOWER_HEADS if TOWERS.search(path) else HEADS
    match rule:
        case None:
            return value
        case "layers" if ENCODERS.fullmatch(key) or path.endswith("encoder_config"):
            return min(value, 3)
        case "layers":
            return min(value, layers if key in DEPTHS else 2)
        case int():
            return min(value, rule) if variant < 3 else value
    if variant == 3 or (value == 1 and "heads" in str(rule)):
        return value
    table = {
        "heads": (heads, heads, 4),
        "tower heads": (TOWER_HEADS, TOWER_HEADS, 4),
        "key heads": (KEY_HEADS, heads, 4),
        "head width": (HEAD_WIDTH, 16, 16),
        "width": (min(value, WIDTH), min(value, WIDTH), min(value, 64)),
    }
    return table[str(rule)][variant]


# Encoders next to a decoder are deeper than it, so that one depth is not taken for the other.
ENCODERS = re.compile(r"(num_)?enc(oder)?_(num_)?(hidden_)?layers|e_layers")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")


STAGES = ("depths", "blocks_per_stage")
UNTOLD = {
    "transformers_version",
    "quantization_config",
    "architectures",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "_name_or_path",
}
# Of backbones, by number of a stage, which may be that of a layer.
OUTPUTS = {"stage_names", "out_features", "out_indices", "_out_features", "_out_indices"}


def _told_layers(table: dict[str, Any]) -> int:
    if any(key in table for key in STAGES):  # lists are of stages
        return -1
    for key in DEPTHS:
        if type(table.get(key)) is int:
            return int(table[key])
    return -1


def _depth(table: dict[str, Any], variant: int) -> int:
    """Two layers, or as many as it takes for each kind of layer to be there."""
    depth = 2
    for key in KINDS:
        kinds = table.get(key)
        if isinstance(kinds, list):
            depth = max(
                [depth, *(1 + kinds.index(kind) for kind in set(map(str, kinds)) if kind in kinds)]
            )
    period = table.get("attn_layer_period")
    if type(period) is int:
        depth = max(depth, 1 + table.get("attn_layer_offset", 0))
    for key in ("no_rope_layers", "layer_rope_theta"):
        if isinstance(table.get(key), list) and table[key]:
            depth = max([depth, *(1 + table[key].index(kind) for kind in set(table[key]))])
    return min(depth, 12)


def _rotary(rope: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Sections of a rotation are cut down to the heads' width."""
    small = dict(rope)
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        rope = {"mrope_section": [1, 1, 1], **rope}
    for key, value in rope.items():
        if isinstance(value, dict):
            small[key] = _rotary(value, table)
        elif key in ("short_factor", "long_factor"):
            small[key] = value[: _pairs(rope, table)]
        elif "section" in key and isinstance(value, list):
            pairs = _pairs(rope, table)
            sizes = [pairs * n // max(1, sum(value)) for n in value]
            # What is left goes to the section that is like no other.
            odd = next((i for i, n in enumerate(value) if value.count(n) == 1), 0)
            sizes[odd] += pairs - sum(sizes)
            small[key] = sizes
    return small


def _pairs(rope: dict[str, Any], table: dict[str, Any]) -> int:
    """Return the number of pairs of a small head's dimensions that turn."""
    width = HEAD_WIDTH if table.get("head_dim") else WIDTH // HEADS
    fraction = rope.get("partial_rotary_factor") or table.get("partial_rotary_factor") or 1
    return int(width * fraction) // 2


def _pictures(small: dict[str, Any], table: dict[str, Any]) -> None:
    """Pictures of a few patches."""
    patch = table.get("patch_size")
    patch = patch if type(patch) is int and patch > 0 else 16
    if "image_embedding_size" in table:
        small["image_embedding_size"] = SIDE // patch
    for key in ("image_size", "img_size", "input_size", "pretrain_image_size"):
        value = table.get(key)
        side = patch * 2 * max(1, round(SIDE / patch / 2))  # patches that can be merged
        if type(value) is int and value > side:
            small[key] = side
        elif isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value):
            small[key] = [min(v, side) for v in value]


def _tokens(small: dict[str, Any]) -> None:
    """Special tokens beyond the vocabulary get numbers at its end."""
    number = VOCABULARY - 1
    for key, value in small.items():
        if re.fullmatch(r".*_token_(id|index)|.*_id|.*_token_ids?", key) and type(value) is int:
            if value >= VOCABULARY:
                small[key] = number
                number -= 1
        elif re.fullmatch(r".*_token_ids?", key) and isinstance(value, list):
            small[key] = [min(v, VOCABULARY - 1) if type(v) is int else v for v in value]
