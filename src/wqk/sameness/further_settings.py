"""Settings that differ between two configurations, but that no plan reads.

The *path* of a setting is the sequence of keys that lead to the setting. Values with one meaning
are equal: spellings of one function, a number and its rounding, a tied output head and a stored
copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from wqk.checkpoints import Checkpoint
from wqk.errors import CheckpointError
from wqk.families import Composed
from wqk.families.config import Config
from wqk.families.model_types import (
    POSITIONS_AND_WINDOWS,
    default_values,
    part_types,
    unread_defaults,
    unread_settings,
)
from wqk.families.naming import embedding_table
from wqk.model import Model
from wqk.sameness.all_tensors import copy_of
from wqk.sameness.mismatches import Mismatch, setting
from wqk.sameness.positions import OF_ROTATION, settle_rotary_base
from wqk.sameness.repairs import Setting
from wqk.sameness.tensor_roles import ATTENDING, MIXERS
from wqk.sameness.tolerances import SAME_FREQUENCY

# Settings of the mixing of tokens that plans do not read, and of norms anywhere.
OF_ATTENTION = re.compile(
    r"(?i)(?:^|_)(?:eps|epsilon)$|head|qkv|mrope|layers?_(?:block_)?types?$|"
    rf"{ATTENDING.pattern}|{MIXERS.pattern}"
)
# Kinds of layers that are attention with a window or without, which plans read.
WINDOWED = re.compile(r"(?:full|global|sliding|local|chunked)(?:_attention)?|attention")
# The setting of an output head that is the table of embeddings.
TIED = "tie_word_embeddings"
# Settings to compare by their effect.
COMPARED_BY_EFFECT = ("layer_types", TIED)
# Names of one function, or of functions that differ by less than rounding.
SPELLINGS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}

SettingPath: TypeAlias = tuple[str, ...]


def further_settings(models: Sequence[Model], everything: bool = True) -> Iterator[Mismatch]:
    """Yield the settings that both configurations contain, that differ, and that no plan reads.

    With ``everything``, settings of tied embeddings are compared by the resulting output heads.
    Settings of a guessed family have no repair.
    """
    reference, candidate = _unread_settings(models)
    for path in sorted(reference.keys() & candidate.keys()):
        expected, actual = reference[path], candidate[path]
        if _are_equal(models, path, expected, actual, everything):
            continue
        steps = [Setting(path, expected)]
        unties = path[-1] == TIED and expected is not True
        if unties and not _stores_output_head(models[1]):
            steps = []  # without a stored head, the setting would leave it random
        if _is_guessed(models):
            steps = []
        yield setting(".".join(path), expected, actual, steps)
    if everything:
        yield from _ties_in_one(models, reference, candidate)


def lost_settings(models: Sequence[Model]) -> list[str]:
    """Return settings that only one of two configurations of a model type contains.

    Both configurations must be written by `transformers`. A setting that is off, or that has the
    default value of the type, is not lost. The defaults of a guessed family are not known; of its
    configurations, all settings of attention that one of them lacks are lost.
    """
    configs = [model.checkpoint.config for model in models]
    model_type = configs[0].get("model_type")
    if any(config.get("model_type") != model_type for config in configs):
        return []
    reference, candidate = _unread_settings(models)
    if _is_guessed(models):
        names = [".".join(path) for path in sorted(reference.keys() ^ candidate.keys())]
        return [name for name in names if of_attention(name, models)]
    if not all("architectures" in config for config in configs):
        return []
    lost = []
    for path in sorted(reference.keys() ^ candidate.keys()):
        if path in reference:
            value, silent_config = reference[path], configs[1]
        else:
            value, silent_config = candidate[path], configs[0]
        is_lost = value and not _have_one_meaning(value, _default(silent_config, path))
        if is_lost and path[-1] not in COMPARED_BY_EFFECT:
            lost.append(".".join(path))
    return lost


def _default(config: Mapping[str, Any], path: SettingPath) -> Any:
    """Return the value that `transformers` uses for a setting that a configuration omits.

    None if the value is unknown, as in a part that the configuration omits completely.
    """
    *parts, key = path
    model_type = config.get("model_type")
    part: Any = config
    for name in parts:
        part = part.get(name)
        if not isinstance(part, Mapping):
            return None
        model_type = part.get("model_type") or part_types(model_type).get(name, model_type)
    defaults = {**unread_defaults(model_type), **default_values(model_type)}
    return defaults.get(key)


def of_attention(name: str, models: Sequence[Model]) -> bool:
    """Return whether attention may depend on a setting, by its name or by the models' types.

    ``name`` is the path of the setting, joined by dots.
    """
    path, _, key = name.rpartition(".")
    if OF_ATTENTION.search(name) or OF_ROTATION.search(name) or key in POSITIONS_AND_WINDOWS:
        return True
    return any(key in Config(model.checkpoint.config, path).switched for model in models)


def _unread_settings(models: Sequence[Model]) -> list[dict[SettingPath, Any]]:
    """Return the settings of each configuration that no plan of either model reads.

    A guessed plan reads neither positions nor windows.
    """
    rules = {repr(plan.rule) for model in models for plan in model.plans}
    guessed = _is_guessed(models)
    configs = [model.checkpoint.config for model in models]
    settings = [unread_settings(config, rules, guessed=guessed) for config in configs]
    for settings_of_model in settings:
        settle_rotary_base(settings_of_model)
    return settings


def _is_guessed(models: Sequence[Model]) -> bool:
    """Return whether the family of a model was guessed."""
    return any(plan.rule.guess for model in models for plan in model.plans)


def _are_equal(
    models: Sequence[Model], path: SettingPath, expected: Any, actual: Any, everything: bool
) -> bool:
    """Return whether two values of a setting have one effect."""
    values = (expected, actual)
    key = path[-1]
    if key == TIED and everything:
        return expected == actual or True not in values or _have_equal_heads(models, values)
    if None in values and not isinstance(expected or actual, float):
        return True  # a whole number or a name that is null is the default of the class
    if key == "layer_types":
        reference, candidate = models
        return bool(_without_windows(reference, expected) == _without_windows(candidate, actual))
    return _have_one_meaning(expected, actual)


def _have_one_meaning(expected: Any, actual: Any) -> bool:
    """Return whether two values are equal up to rounding, or are spellings of one function."""
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=SAME_FREQUENCY)
    expected_name = SPELLINGS.get(str(expected), expected)
    actual_name = SPELLINGS.get(str(actual), actual)
    return bool(expected == actual or expected_name == actual_name)


def _without_windows(model: Model, kinds: Any) -> Any:
    """Return kinds of layers without windows, if the model's plans contain the windows."""
    is_planned = all(plan.rule.window and not plan.rule.guess for plan in model.plans)
    if not is_planned or not isinstance(kinds, list):
        return kinds
    return ["attention" if WINDOWED.fullmatch(str(kind)) else kind for kind in kinds]


# -- output heads ------------------------------------------------------------------------------


def _ties_in_one(
    models: Sequence[Model],
    reference: Mapping[SettingPath, Any],
    candidate: Mapping[SettingPath, Any],
) -> Iterator[Mismatch]:
    """Yield tied embeddings in only one configuration, if the output heads differ."""
    for path in sorted(reference.keys() ^ candidate.keys()):
        ties = (reference.get(path), candidate.get(path))
        if path[-1] == TIED and True in ties and not _have_equal_heads(models, ties):
            yield setting(".".join(path), *ties)


def _have_equal_heads(models: Sequence[Model], ties: Sequence[Any]) -> bool:
    """Return whether both models use their embeddings as output head: tied, or stored again.

    ``ties`` are the values of the setting in both models. If a configuration lacks the setting, a
    head that is not stored is tied. Some encoder-decoder models scale the inputs of tied heads
    (T5).
    """
    for model, is_tied in zip(models, ties, strict=True):
        table = _embeddings(model)
        if table is None:
            return False
        if is_tied is True:
            continue
        heads = _tables_of_one_shape(model.checkpoint, table)
        if not heads and is_tied is not None:
            return False
        if not all(copy_of(model.checkpoint, name, [table]) for name in heads):
            return False
    if False not in ties:
        return True
    stacks = {plan.stack for plan in models[0].plans}
    return len(stacks) < 2


def _embeddings(model: Model) -> str | None:
    """Return the name of the table of token embeddings; None if unknown."""
    plan = (*model.plans, *model.mixers)[0]
    projection = plan.query.projection
    if isinstance(projection, Composed):
        projection = projection.inner
    shape = model.checkpoint.info(projection.tensor).shape
    width = shape[0] if projection.transposed else shape[-1]
    try:
        return embedding_table(model.checkpoint, width)
    except CheckpointError:
        return None


def _tables_of_one_shape(checkpoint: Checkpoint, table: str) -> list[str]:
    """Return the names of further tensors with the shape of a table, such as output heads."""
    shape = checkpoint.info(table).shape
    tensors = checkpoint.tensors().items()
    return [name for name, info in tensors if info.shape == shape and name != table]


def _stores_output_head(model: Model) -> bool:
    """Return whether a file stores an output head besides its embeddings."""
    table = _embeddings(model)
    return table is not None and bool(_tables_of_one_shape(model.checkpoint, table))
