"""Checked values of a model's configuration, by the keys of a family."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from wqk.checkpoints.checkpoint import as_number
from wqk.errors import CheckpointError, did_you_mean, shown
from wqk.families.expressions import PLAIN_KEY, NotANumber, evaluate, holds, keys_in
from wqk.families.model_types import default_values, part_types, switches, unread_keys

# More heads or layers than this are a broken configuration, not a model. Lengths have no limit.
LARGEST_COUNT = 100_000

# A message lists at most this many numbers of a configuration.
FEW_NUMBERS = 8

# Classes that lift the causal mask of a decoder and keep its model type: LLM2Vec's, under both of
# their names, the wrapper of DiffuGPT and DiffuLLaMA, and classes with "bidirectional" in their
# names (LFM 2.5's encoders, Voyage 4 nano).
UNMASKED = re.compile(
    r"(Llama|Mistral|Qwen2|Gemma2?)(Encoder|Bi)(Model|For(MaskedLM|MNTP))|DiscreteDiffusionModel"
    r"|\w+Bidir(ectional)?([A-Z]\w*)?"
)


class Config:
    """A configuration in the format of transformers, for one attention of the model.

    Parameters
    ----------
    config
        The whole configuration.
    nested
        Key of the part that belongs to the attention (``text_config``), with dots for nested parts;
        empty for the whole configuration.
    defaults
        Values of keys that the configuration omits, and that have no default in transformers.
    model_type
        The model type whose defaults apply if the type of the configuration has no defaults.

    Attributes
    ----------
    own_type
        Model type of the part.
    ignored_keys
        Keys that transformers ignores in models of the type.
    unread
        The ignored keys that the configuration sets.
    switched
        Keys that change attention and that no rule reads, with other values than their defaults.

    Examples
    --------
    >>> Config({"model_type": "gpt2", "num_attention_heads": 4}).get("n_head")
    4
    >>> Config({"model_type": "gpt2", "n_head": 2, "num_attention_heads": 4}).get("n_head")
    2
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        nested: str = "",
        defaults: Mapping[str, Any] | None = None,
        model_type: str = "",
    ) -> None:
        part = _part(config, nested)
        chosen = config if part is None else part
        whole_type = config.get("model_type")
        part_type = None if part is None else part.get("model_type")
        self.own_type = part_type or part_types(whole_type).get(nested, whole_type)
        part_in_class = f"{whole_type}.{nested}"  # the part as the whole model's class fills it
        type_defaults = {
            **(default_values(self.own_type) or default_values(model_type)),
            **default_values(part_in_class),
        }
        self.ignored_keys = {*unread_keys(self.own_type), *unread_keys(part_in_class)}
        chosen = _with_known_names(chosen, type_defaults.get("names", {}))
        self._in_file = {}
        for key, value in (defaults or {}).items():
            if key not in type_defaults:
                self._in_file[key] = value
        for key, value in chosen.items():
            if value is not None and key not in self.ignored_keys:
                self._in_file[key] = value
        self._defaults = {key: value for key, value in type_defaults.items() if key not in chosen}
        self._defaults["is_part"] = bool(nested)
        self._defaults.setdefault("model_type", self.own_type)
        self._nulls = {key for key, value in chosen.items() if value is None}
        rotary = chosen.get("rope_parameters")
        keys = {**rotary, **chosen} if isinstance(rotary, dict) else chosen
        self.unread = [key for key in keys if key in self.ignored_keys and key not in self._nulls]
        self.switched = []
        for key, default in switches(self.own_type).get("attention", {}).items():
            if chosen.get(key) not in (None, default):
                self.switched.append(key)

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that is not null; keys of the file come first.

        A key is an expression of `wqk.families.expressions`: a dot leads into a nested part, and
        ``size // 2 + 1`` is computed from a key.
        """
        value = self.in_file(*keys)
        if value is not None:
            return value
        return next((value for value in map(self._value, keys) if value is not None), None)

    def in_file(self, *keys: str) -> Any:
        """Return a value as `get` does, without defaults: only values in the file, and numbers."""
        for key in keys:
            value = self._evaluated(key, self._look_up_in_file)
            if value is None and not PLAIN_KEY.fullmatch(key):
                value = self._partly_in_file(key)
            if value is not None:
                return value
        return None

    def _partly_in_file(self, expression: str) -> Any:
        """Return the value of an expression with defaults, if the file sets any of its keys."""
        names: list[str] = []

        def look_up(name: str) -> Any:
            names.append(name)
            return self._look_up(name)

        value = self._evaluated(expression, look_up)
        is_set = any(self._look_up_in_file(name) is not None for name in names)
        return value if is_set else None

    def near_whole_numbers(self, key: str) -> str:
        """Return the end of a message on an absent number: a similar key, or the whole numbers.

        The end is empty if the configuration has many whole numbers, and none under a similar key.

        Examples
        --------
        >>> config = Config({"n_layers": 2, "n_att": 6, "causal": True})
        >>> config.near_whole_numbers("n_layer"), config.near_whole_numbers("heads")
        ("; did you mean 'n_layers'?", '; the configuration has n_layers (2), n_att (6)')
        """
        numbers = {name: value for name, value in self._in_file.items() if type(value) is int}
        advice = did_you_mean(key, numbers)
        if advice or not 0 < len(numbers) <= FEW_NUMBERS:
            return advice
        listed = ", ".join(f"{name} ({shown(value)})" for name, value in numbers.items())
        return f"; the configuration has {listed}"

    def default(self, key: str) -> Any:
        """Return the value that `transformers` uses if the key is absent."""
        return self._defaults.get(key)

    def _look_up_in_file(self, name: str) -> Any:
        return _nested(self._in_file, name)

    def _look_up(self, name: str) -> Any:
        """Return a key's value, from the file or by default; a dot leads into a nested part."""
        value = self._look_up_in_file(name)
        return _nested(self._defaults, name) if value is None else value

    def _value(self, expression: str) -> Any:
        """Return the value of an expression, from the file and from defaults."""
        return self._evaluated(expression, self._look_up)

    def _evaluated(self, expression: str, look_up: Callable[[str], Any]) -> Any:
        """Return the value of an expression with keys from ``look_up``; None if a key is unset.

        Conditions always use the file and defaults.
        """
        try:
            return evaluate(expression, look_up, self._look_up)
        except NotANumber as error:
            raise self.wrong([error.key], error.expected, error.value) from None

    def holds(self, condition: str) -> bool:
        """Return whether a condition holds, such as ``multi_query and not alibi``; true if empty.

        Examples
        --------
        >>> config = Config({"alibi": False, "attn_config": {"clip": 8.0}})
        >>> config.holds("attn_config.clip and not alibi")
        True
        >>> config.holds("attn_config.clip == 8.0")
        True
        >>> Config({"pos_att_type": "p2c|c2p"}).holds("'c2p' in pos_att_type")
        True
        """
        try:
            return holds(condition, self._look_up)
        except NotANumber as error:
            raise self.wrong([error.key], error.expected, error.value) from None

    def whole(self, keys: Sequence[str], layer: int = 0) -> int:
        """Return a required count; see `optional_whole`."""
        return _required(keys, self.optional_whole(keys, layer))

    def optional_whole(self, keys: Sequence[str], layer: int = 0) -> int | None:
        """Return a count; None if no key is set. A list has a count for each layer."""
        value = self._entry(keys, layer)
        if isinstance(value, list):
            return None
        if value is not None and (type(value) is not int or not 0 < value <= LARGEST_COUNT):
            raise self.wrong(keys, f"a whole number from 1 to {LARGEST_COUNT:,}", value)
        return value

    def _entry(self, keys: Sequence[str], layer: int) -> Any:
        """Return the value of these keys: the layer's entry of a list, or all of a short list."""
        value = self.get(*keys)
        return value[layer] if isinstance(value, list) and layer < len(value) else value

    def optional_length(self, keys: Sequence[str], layer: int = 0) -> int | None:
        """Return a number of tokens (of a window, or of the longest text); None if unset.

        A list contains a number for each layer. Numbers may be arbitrarily large, because no memory
        depends on them.

        Examples
        --------
        >>> Config({"sliding_window": 131072}).optional_length(["sliding_window"])
        131072
        """
        value = self._entry(keys, layer)
        if value is not None and (type(value) is not int or not 0 < value < 2**63):
            raise self.wrong(keys, "a positive whole number", value)
        return value

    def length(self, keys: Sequence[str]) -> int:
        """Return a required number of tokens; see `optional_length`."""
        return _required(keys, self.optional_length(keys))

    def wrong(self, keys: Sequence[str], expected: str, value: Any) -> CheckpointError:
        """Return the error for an invalid value of these keys.

        Examples
        --------
        >>> print(Config({}).wrong(["n_head"], "a positive whole number", "4"))
        config.json: n_head must be a positive whole number, got '4'; correct it
        """
        return CheckpointError(
            f"config.json: {' or '.join(keys)} must be {expected}, got {shown(value)}; correct it"
        )

    @property
    def lifts_mask(self) -> bool:
        """Return whether a decoder attends in both directions.

        This is true if ``is_causal`` is false, or if the model's class lifts the mask.

        Examples
        --------
        >>> Config({"architectures": ["MistralBiModel"]}).lifts_mask
        True
        >>> Config({"architectures": ["MistralForCausalLM"]}).lifts_mask
        False
        """
        if self.get("is_causal") is False:
            return True
        classes: list[Any] = []
        architectures, remote = self.get("architectures"), self.get("auto_map")
        if isinstance(architectures, list):
            classes += architectures
        if isinstance(remote, dict):
            classes += remote.values()
        names = [name.rpartition(".")[2] for name in classes if isinstance(name, str)]
        return any(map(UNMASKED.fullmatch, names))

    @property
    def head_widths(self) -> set[int]:
        """Head widths of attention in all layers; empty if the configuration sets no width.

        Keys of widths are ``head_dim``, ``global_head_dim``, ….
        """
        settings = self._defaults | self._in_file
        by_layer = self.get("per_layer_config")
        tables = [settings]
        if isinstance(by_layer, dict):
            tables += [table for table in by_layer.values() if isinstance(table, dict)]
        widths: set[int] = set()
        for table in tables:
            for key, value in table.items():
                if key.endswith("head_dim") and not key.startswith(("linear_", "mamba_")):
                    widths.update(self._widths(key, value))
        return widths if "head_dim" in settings else set()

    def _widths(self, key: str, value: Any) -> list[int]:
        """Return the widths of heads under a key: one width, or a list of widths."""
        widths = value if isinstance(value, list) else [value]
        smallest = 1 if key == "head_dim" else 0  # latent heads may have no positions
        if not all(type(width) is int and width >= smallest for width in widths):
            raise self.wrong([key], "a positive whole number", value)
        return widths

    def pruned_heads(self, layer: int) -> int:
        """Return the number of heads that were pruned from a layer of self-attention.

        Examples
        --------
        >>> config = Config({"pruned_heads": {"0": [1, 3]}})
        >>> config.pruned_heads(0), config.pruned_heads(1)
        (2, 0)
        """
        by_layer = self.get("pruned_heads") or {}
        pruned = by_layer.get(str(layer), []) if isinstance(by_layer, dict) else None
        if not isinstance(pruned, list):
            raise self.wrong(["pruned_heads"], "a list of heads for each layer", by_layer)
        return len(pruned)

    def optional_number(self, keys: Sequence[str], layer: int = 0) -> float | None:
        """Return a finite number; None if no key is set. A list has one for each layer."""
        value = self._entry(keys, layer)
        number = None if value is None else as_number(value)
        if number is None and value is not None:
            raise self.wrong(keys, "a number", value)
        return number

    def product(self, factors: Sequence[str | float], names: Mapping[str, float]) -> float:
        """Return the product of factors such as ``head_width ** -0.5`` or ``attention_multiplier``.

        A factor is an expression of the names in ``names``, keys of the configuration, and numbers.
        ``layer_number`` counts layers from 1; ``score_terms`` is the number of terms of DeBERTa's
        score.

        Raises
        ------
        CheckpointError
            A factor is not a positive number, or the product is not finite.

        Examples
        --------
        >>> config = Config({"pos_att_type": ["c2p", "p2c"]})
        >>> config.product(["head_width ** -0.5", "score_terms ** -1"], {"head_width": 64})
        0.041666666666666664
        """
        layer_number = names.get("layer", 0) + 1
        values = {**names, "layer_number": layer_number, "score_terms": self._terms()}
        result = 1.0
        for factor in map(str, factors):
            try:
                result *= self._factor(factor, values)
            except OverflowError:
                raise CheckpointError(
                    f"config.json: {factor} is too large; expected a finite number; correct it"
                ) from None
        if not 0 < result < math.inf:
            raise CheckpointError(
                f"config.json: the scale {' · '.join(map(str, factors))} is {result:g}; expected a "
                "finite number above 0; correct its keys"
            )
        return result

    def _factor(self, factor: str, known: Mapping[str, float]) -> float:
        """Return the value of a factor of names in ``known``, keys and numbers.

        Raises
        ------
        CheckpointError
            The value is not a positive number.
        """

        def look_up(key: str) -> Any:
            return known[key] if key in known else self.optional_number((key,))

        try:
            value = evaluate(factor, look_up, self._look_up)
        except NotANumber as error:
            raise CheckpointError(
                f"config.json: the scale {factor} needs {error.expected} for {error.key}, got "
                f"{shown(error.value)}; correct it"
            ) from None
        if not isinstance(value, int | float) or value <= 0:
            keys = " or ".join(sorted(keys_in(factor) - known.keys())) or factor
            raise CheckpointError(
                f"config.json: the scale needs a positive {keys}; expected {factor} above 0, got "
                f"{shown(value)}; correct it"
            )
        return value

    def _terms(self) -> int:
        """Return the number of terms in DeBERTa's score: of content, and of positions."""
        return 1 + sum(self.holds(f"'{kind}' in pos_att_type") for kind in ("c2p", "p2c"))

    def layer_type(self, layer: int) -> str | None:
        """Return the kind of a layer, such as ``sliding_attention``; None if kinds are not set.

        The kinds are in a list, or follow from the rule of the model type (see `kind_of_layer`).
        """
        kinds = self._listed_kinds()
        rule = self.default("kinds") or {}
        layers = self.optional_whole(("num_hidden_layers",)) if rule else None
        # The rule of some types sets the kind of the last layer, whatever the list has there.
        is_last = layers is not None and layer == layers - 1
        is_forced = bool(rule.get("forced")) and is_last
        if kinds is not None and layer < len(kinds) and not is_forced:
            return as_text(kinds[layer])
        if not rule:
            return None
        every, after = rule.get("every", ""), rule.get("after", "")
        return kind_of_layer(
            rule,
            layer,
            layers,
            period=self.optional_whole((every,)) if every else None,
            after=self.get(after) if after else None,
        )

    def _listed_kinds(self) -> list[str] | None:
        """Return the kinds of layers that the configuration lists; None without a list."""
        kinds = self.get("layer_types", "attention_layers")
        if kinds is None:
            kinds = _expanded(self.get("attention_types")) or self._kinds_by_number()
        if kinds is None:
            return None
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise self.wrong(["layer_types", "attention_layers"], "a list of names", kinds)
        return kinds

    def _kinds_by_number(self) -> list[Any] | None:
        """Return the kinds of all layers from a list of numbers of kinds; None without a list."""
        for key, names in (self.get("kinds_by_number") or {}).items():
            numbers = self.get(key)
            if isinstance(numbers, list):
                return [names.get(str(number), number) for number in numbers]
        return None

    def stage(self, depths: Sequence[str], index: Sequence[int]) -> tuple[int, int]:
        """Return the indices of a block in lists of numbers of heads, and in lists of windows.

        The index is the layer. If the configuration lists the ``depths`` of stages, lists have an
        entry for each stage, and the first block of a stage has the window of the previous stage.

        Examples
        --------
        >>> config = Config({"depths": [1, 2, 7]})
        >>> config.stage(["depths"], [3]), config.stage(["depths"], [1, 0])
        ((2, 1), (1, 0))
        """
        number, *within = index or (0,)
        listed = self.get(*depths)
        if not isinstance(listed, list):
            return number, number
        if within:
            stage, block = number, within[0]
        else:
            counts = [self.whole(depths, stage) for stage in range(len(listed))]
            ends = [*accumulate(counts)]
            stage = sum(number >= end for end in ends[:-1])
            block = number - (ends[stage - 1] if stage else 0)
        has_window_of_stage_before = block == 0 and stage > 0
        return stage, stage - 1 if has_window_of_stage_before else stage

    def sets_to_null(self, keys: Sequence[str]) -> bool:
        """Return whether the file sets one of these keys to null."""
        return bool(self._nulls.intersection(keys))


def kind_of_layer(
    rule: Mapping[str, Any],
    layer: int,
    layers: int | None = None,
    period: int | None = None,
    after: object = None,
) -> str:
    """Return the kind of a layer by a rule.

    Parameters
    ----------
    rule
        Kinds of the ``first`` layers, kinds that ``repeat``, and the kind of the ``last`` layer. A
        rule may count ``backward``.
    layer
        Number of the layer.
    layers
        Number of layers.
    period
        Length of the repetition, if the configuration sets a length.
    after
        The first layer of the kind ``then``.

    Examples
    --------
    >>> rule = {"repeat": ["sliding", "sliding", "full"]}
    >>> [kind_of_layer(rule, layer, period=2) for layer in range(4)]
    ['sliding', 'full', 'sliding', 'full']
    """
    repeat, first = rule["repeat"], rule.get("first", [])
    if rule.get("backward") and layers is not None:
        layer = layers - 1 - layer
    if "last" in rule and layers is not None and layer == layers - 1:
        return str(rule["last"])
    if type(after) is int and layer >= after:
        return str(rule["then"])
    if layer < len(first):
        return str(first[layer])
    if period is None or len(repeat) < 2:
        return str(repeat[layer % len(repeat)])
    # One layer of each period is different from the others: the first or the last.
    is_first_special = repeat[0] != repeat[1] and repeat[0] != repeat[-1]
    if is_first_special:
        return str(repeat[0] if layer % period == 0 else repeat[1])
    return str(repeat[-1] if layer % period == period - 1 else repeat[0])


def _required(keys: Sequence[str], value: int | None) -> int:
    """Return a value; `CheckpointError` if the value is None."""
    if value is None:
        alternatives = " or ".join(keys).replace(" | ", " or ")
        raise CheckpointError(
            f"config.json lacks {alternatives}; expected a positive whole number; add it"
        )
    return value


def _expanded(runs: Any) -> list[Any] | None:
    """Return the kinds of layers from runs of layers (GPT-Neo): ``[[["global", "local"], 6]]``."""
    if not isinstance(runs, list):
        return None
    kinds: list[Any] = []
    for run in runs:
        match run:
            case [[*names], int(times)] if 0 < times <= LARGEST_COUNT:
                kinds += names * times
    return kinds


def _nested(table: Mapping[str, Any], name: str) -> Any:
    """Return the value of a key; a dot leads into a nested part."""
    value: Any = table
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_text(value: Any) -> str:
    """Return a value as text; numbers that are too long to print are described."""
    return value if isinstance(value, str) else shown(value)


def _part(config: Mapping[str, Any], nested: str) -> dict[str, Any] | None:
    """Return the nested part of a configuration; None if the part is absent or not a table."""
    part: Any = config
    for key in filter(None, nested.split(".")):
        part = part.get(key) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else None


def _with_known_names(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with its keys added under the names of the type's class.

    The keys of the file remain, because a family file of the user may read these keys.
    """
    named = dict(config)
    for key, name in names.items():
        if key in config:
            named.setdefault(name, config[key])
    return named
