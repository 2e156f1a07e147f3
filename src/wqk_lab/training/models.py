"""Models of transformers: new for a recipe and a vocabulary, or from a run's checkpoints.

Checkpoints appear and disappear atomically, and include their tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._files import sync
from wqk.errors import CorpusError, RunError, all_lines, first_line, required_by
from wqk.live.running import load_pretrained, quiet
from wqk.tables.run import checkpoints_in
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.recipe import MODEL_FIELDS, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# By the position of the layer norm: encoder and decoder of one architecture.
ARCHITECTURES = {
    "post": {"encoder": "BertForMaskedLM", "decoder": "BertLMHeadModel"},
    "pre": {
        "encoder": "RobertaPreLayerNormForMaskedLM",
        "decoder": "RobertaPreLayerNormForCausalLM",
    },
}

# Folder for writing and removing checkpoints; they are moved from and to this folder.
STAGING = ".saving"

# Needed only to resume: the states of the optimizer and of the gradient scaler of float16. Random
# numbers have no state: they are a function of the step.
OPTIMIZER, SCALER = "optimizer.pt", "scaler.pt"

# A token store's special tokens as transformers names them.
TOKEN_NAMES = {
    "padding": "pad_token",
    "mask": "mask_token",
    "unknown": "unk_token",
    "separator": "sep_token",
}


def build_model(
    recipe: Recipe, vocabulary_size: int, special: Mapping[str, int]
) -> PreTrainedModel:
    """Return a new model with weights from the recipe's seed, without the initialization ``init``.

    An encoder and a decoder of one architecture and seed start with equal weights and differ only
    in the causal mask. Raises `RunError` if transformers lacks the model, or if the model has fewer
    positions than a block has tokens.
    """
    with required_by("training"):
        import torch
        import transformers

    # Ids beyond the store's are neither seen nor predicted.
    multiple = recipe.vocabulary_multiple or 1
    tokens = {
        "vocab_size": -(-vocabulary_size // multiple) * multiple,
        "pad_token_id": special.get("padding"),
        **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id")),
        "sep_token_id": special.get("separator"),
    }
    # On the CPU, because on another device the same seed would draw other numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.config is not None:
            return _own_model(recipe, tokens)
        maker = getattr(transformers, ARCHITECTURES[str(recipe.norm)][recipe.mode])
        config = maker.config_class(**_configuration(recipe), **tokens)
        model: PreTrainedModel = maker._from_config(config, attn_implementation=recipe.attention)
        return model


def available_precision(precision: str) -> str:
    """Return the precision if the device supports it; float32 on a CPU, for reproducibility."""
    import torch

    if not torch.cuda.is_available() or (
        precision == "bf16" and not torch.cuda.is_bf16_supported()
    ):
        return "float32"
    return precision


def read_configuration(path: Path) -> dict[str, Any]:
    """Return a transformers configuration from a JSON file; `RunError` for other files."""
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
    """Return the recipe's values under the names of BERT and its pre-norm variant."""
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
    """Return the model of the user's configuration, with a given vocabulary."""
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
    except Exception as error:  # model classes raise different errors
        reason = all_lines(error)
        raise RunError(
            f"transformers cannot build the {recipe.mode} of type {kind} from this configuration "
            f"({reason})"
        ) from None
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < recipe.block:
        raise RunError(
            f"blocks of {recipe.block} tokens need at least that many positions; the "
            f"configuration has {positions}"
        )
    return model


def save_checkpoint(
    folder: Path,
    step: int,
    recipe: Recipe,
    model: PreTrainedModel,
    state: Mapping[str, Any],
    tokenizer: Mapping[str, bytes],
) -> None:
    """Add a checkpoint to a run's folder, and remove earlier ones that the recipe does not keep.

    ``state`` contains the states of optimizer and scaler by file name; None without a scaler.
    """
    import torch
    from safetensors import SafetensorError

    clear_staging(folder)
    staged = folder / STAGING / f"checkpoint-{step}"
    try:
        with quiet():
            model.save_pretrained(staged)
        for name, values in state.items():
            if values is not None:
                with (staged / name).open("wb") as file:
                    torch.save(values, file)
        for name, content in tokenizer.items():
            (staged / name).write_bytes(content)
        for path in staged.iterdir():
            sync(path)
        staged.rename(folder / staged.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        clear_staging(folder)
        # torch's own message only names a position in the file; the system's reason precedes it.
        system = getattr(error, "strerror", None) or getattr(error.__context__, "strerror", None)
        reason = system or first_line(error)
        raise RunError(
            f"{folder}: checkpoint-{step} cannot be written ({reason}); free some disk space and "
            "resume"
        ) from None
    clear_staging(folder)
    thin_out(folder, step, recipe)


def load_checkpoint(path: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Load a checkpoint's weights into a model, in place; return the other states by file name.

    Raises `RunError` if the files are damaged, or contain other tensors than the model.
    """
    import torch

    try:
        with quiet():
            saved, report = load_pretrained(type(model), path, dtype=torch.float32)
        wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
        if wrong:  # what is missing was drawn at random
            raise ValueError(f"{len(wrong)} tensors do not fit, {wrong[0]} for one")
        model.load_state_dict(saved.state_dict())
        return {
            name: torch.load(path / name, map_location="cpu", weights_only=True)
            for name in (OPTIMIZER, SCALER)
            if (path / name).exists()
        }
    except Exception as error:  # the libraries raise anything for a damaged file
        reason = all_lines(error, 160)
        raise RunError(
            f"{path}: a {type(model).__name__} cannot go on from it ({reason}); a run that is "
            "resumed takes the checkpoint before it once this one is moved away"
        ) from None


def clear_staging(folder: Path) -> None:
    """Remove incomplete files of a killed run."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def thin_out(folder: Path, newest: int, recipe: Recipe) -> None:
    """Remove earlier checkpoints; from checkpoints to keep, remove only the state for resuming."""
    staging = folder / STAGING
    for step, path in checkpoints_in(folder):
        if step >= newest or recipe.keep_checkpoints == "all":
            continue
        if step in recipe.kept_steps:
            for name in (OPTIMIZER, SCALER):
                (path / name).unlink(missing_ok=True)
        else:
            staging.mkdir(exist_ok=True)
            path.rename(staging / path.name)
    clear_staging(folder)


def tokenizer_files(corpus: TokenStore, block: int) -> dict[str, bytes]:
    """Return the files that AutoTokenizer needs in a checkpoint's folder, by name."""
    from tokenizers import Tokenizer

    try:
        content = corpus.tokenizer.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        reason = all_lines(error)
        raise CorpusError(f"{corpus.tokenizer}: not a tokenizer ({reason})") from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block,
        **{TOKEN_NAMES[role]: tokenizer.id_to_token(id) for role, id in corpus.special.items()},
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode(),
    }
