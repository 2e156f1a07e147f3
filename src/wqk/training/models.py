"""Models: transformers' own classes for a recipe and a vocabulary, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk.errors import RunError, all_lines, required_by
from wqk.training.recipe import MODEL_FIELDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wqk.training.recipe import Recipe

# By the position of the layer norm: configuration, encoder and decoder of one architecture.
ARCHITECTURES = {
    "post": {"config": "BertConfig", "encoder": "BertForMaskedLM", "decoder": "BertLMHeadModel"},
    "pre": {
        "config": "RobertaPreLayerNormConfig",
        "encoder": "RobertaPreLayerNormForMaskedLM",
        "decoder": "RobertaPreLayerNormForCausalLM",
    },
}


def build_model(
    recipe: Recipe, vocabulary_size: int, special: Mapping[str, int]
) -> PreTrainedModel:
    """A new model whose weights are determined by the recipe's seed.

    An encoder and a decoder of one architecture and seed start with equal weights and differ only
    in the causal mask.

    Parameters
    ----------
    recipe
        Determines the model; ``recipe.init`` is not applied here.
    vocabulary_size, special
        Of the token store: the number of ids, and those of ``padding`` and others.

    Raises
    ------
    RunError
        transformers has no such model, or it has fewer positions than a block has tokens.
    MissingPackage
        transformers or torch is not installed.
    """
    with required_by("training"):
        import torch
        import transformers

    # Ids beyond the store's are neither seen nor predicted.
    multiple = recipe.vocabulary_multiple or 1
    tokens = {
        "vocab_size": -(-vocabulary_size // multiple) * multiple,
        "pad_token_id": special.get("padding"),
        "bos_token_id": None,
        "cls_token_id": None,
        "eos_token_id": None,
        "sep_token_id": special.get("separator"),
    }
    # On the CPU, because on another device the same seed would draw other numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.config is not None:
            return _own_model(recipe, tokens)
        names = ARCHITECTURES[str(recipe.norm)]
        config = getattr(transformers, names["config"])(**_configuration(recipe), **tokens)
        model: PreTrainedModel = getattr(transformers, names[recipe.mode])._from_config(
            config, attn_implementation=recipe.attention
        )
        return model


def read_configuration(path: Path) -> dict[str, Any]:
    """A transformers configuration from a JSON file.

    Raises
    ------
    RunError
        The file has no JSON object.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise RunError(
            f"{path} contains no JSON object; a configuration's values replace "
            f"{', '.join(MODEL_FIELDS)}"
        )
    return config


def _configuration(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values under the names of BERT and its pre-norm variant."""
    before = recipe.norm == "pre"
    return {
        "hidden_size": recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "intermediate_size": recipe.intermediate,
        "hidden_dropout_prob": recipe.dropout,
        "attention_probs_dropout_prob": recipe.dropout,
        "initializer_range": recipe.initial_std,
        # RoBERTa counts positions from padding + 1.
        "max_position_embeddings": recipe.block + (1 if before else 0),
        "type_vocab_size": 1 if before else 2,
        "is_decoder": recipe.mode == "decoder",
        "use_cache": False,
    }


def _own_model(recipe: Recipe, tokens: Mapping[str, Any]) -> PreTrainedModel:
    """The model of the user's configuration, with this vocabulary."""
    import transformers

    values = {**(recipe.config or {}), **tokens, "is_decoder": recipe.mode == "decoder"}
    kind = values.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise RunError(
            f"the configuration's model_type must be known to transformers; got {kind!r}"
        )
    automatic = {
        "encoder": transformers.AutoModelForMaskedLM,
        "decoder": transformers.AutoModelForCausalLM,
    }[recipe.mode]
    try:
        config = transformers.AutoConfig.for_model(kind, **{**values, "use_cache": False})
        model: PreTrainedModel = automatic.from_config(
            config, attn_implementation=recipe.attention, trust_remote_code=False
        )
    except Exception as error:  # every model class has its own
        reason = all_lines(error)
        raise RunError(
            f"transformers builds no {recipe.mode} of type {kind} from this configuration "
            f"({reason})"
        ) from None
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < recipe.block:
        raise RunError(
            f"blocks of {recipe.block} tokens need at least that many positions; the "
            f"configuration has {positions}"
        )
    return model
