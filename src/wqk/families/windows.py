"""Local attention: the keys near a query that the query may attend to.

A window is one of four kinds. A `Span` reaches a number of tokens back and ahead, a `ChunkWindow`
is a part of the text, a `Rectangle` is a part of a picture, and the extent of a `LocalWindow` is
unknown. Every kind has the method `allows`; its text is the value in the column ``window`` of a
score table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wqk.families.config import as_text
from wqk.families.rules import LOCAL

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.rules import AttentionRule

# Configuration keys whose windows are parts of the text instead of distances.
CHUNK_KEYS = ("attention_chunk_size", "context_size")
# Kinds of layers with a window. Reference layers (Unlimited OCR) also see all of the prompt.
WINDOWED_KINDS = "(?<!reference_)sliding|local|chunked"


class Window:
    """Local attention of a layer; this module has four kinds."""

    @property
    def is_known(self) -> bool:
        """Return whether positions determine the keys in the window."""
        return True

    def allows(self, query: Any, key: Any) -> Any:
        """Return whether a query may attend to a key, by their positions.

        A causal mask is not part of the window. A window of unknown extent, or in a picture, allows
        every key.

        Parameters
        ----------
        query, key
            Positions in the text, from 0: integers, or arrays that broadcast, of NumPy or PyTorch.

        Returns
        -------
        A truth value, or an array of truth values with the broadcast shape.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Span(Window):
    """Keys at most ``back`` tokens before a query and ``ahead`` tokens after the query.

    Attributes
    ----------
    back, ahead
        Numbers of tokens on either side, without the query's own token.
    size
        The window's size in the score table; None to print both sides.

    Examples
    --------
    >>> window = Span(back=3, ahead=0, size=4)
    >>> str(window), window.allows(query=5, key=2), window.allows(query=5, key=1)
    ('4', True, False)
    >>> str(Span(back=3, ahead=4))
    '3 back, 4 ahead'
    """

    back: int
    ahead: int
    size: int | None = None

    def allows(self, query: Any, key: Any) -> Any:
        """Return whether the key is at most ``back`` before and ``ahead`` after the query."""
        tokens_back = query - key
        return (tokens_back <= self.back) & (-tokens_back <= self.ahead)

    def __str__(self) -> str:
        if self.size is not None:
            return str(self.size)
        return f"{self.back} back, {self.ahead} ahead"


@dataclass(frozen=True)
class ChunkWindow(Window):
    """Keys in the same part of the text, of ``size`` tokens, as the query (Llama 4).

    Examples
    --------
    >>> window = ChunkWindow(4)
    >>> str(window), window.allows(query=5, key=4), window.allows(query=5, key=3)
    ('chunk of 4', True, False)
    """

    size: int

    def allows(self, query: Any, key: Any) -> Any:
        """Return whether the query and the key are in the same chunk."""
        return query // self.size == key // self.size

    def __str__(self) -> str:
        return f"chunk of {self.size}"


@dataclass(frozen=True)
class Rectangle(Window):
    """Keys in the same part of a picture; positions in a row of tokens do not determine the part.

    Examples
    --------
    >>> str(Rectangle((7, 7)))
    '7x7'
    """

    sides: tuple[int, ...]

    @property
    def is_known(self) -> bool:
        """Return False: the part depends on the picture's shape."""
        return False

    def allows(self, query: Any, key: Any) -> Any:
        """Return True for every key."""
        return query - key == query - key

    def __str__(self) -> str:
        return "x".join(map(str, self.sides))


@dataclass(frozen=True)
class LocalWindow(Window):
    """Local attention of unknown extent.

    Examples
    --------
    >>> str(LocalWindow()), LocalWindow().is_known
    ('local', False)
    """

    @property
    def is_known(self) -> bool:
        """Return False."""
        return False

    def allows(self, query: Any, key: Any) -> Any:
        """Return True for every key."""
        return query - key == query - key

    def __str__(self) -> str:
        return "local"


def window_of(
    rule: AttentionRule, config: Config, layer: int, place: int, causal: bool, lifted: bool
) -> Window | None:
    """Return a layer's window; None for full attention.

    Parameters
    ----------
    rule, config
        The rule with the keys of sizes, and the model's configuration.
    layer
        The layer's number.
    place
        The entry of lists of sizes or switches: the layer, or its stage.
    causal
        Whether later tokens are masked.
    lifted
        Whether the configuration lifts the mask of a decoder; the window then has both sides.

    Raises
    ------
    CheckpointError
        The configuration has a size that is not a positive whole number.

    Examples
    --------
    >>> from wqk.families.config import Config
    >>> from wqk.families.rules import AttentionRule
    >>> kinds = ["sliding_attention", "full_attention", "reference_sliding_attention"]
    >>> config = Config({"layer_types": kinds, "sliding_window": 64})
    >>> rule = AttentionRule("decoder", query=("q",), key=("k",), window=("sliding_window",))
    >>> [str(window_of(rule, config, layer, layer, True, False)) for layer in range(3)]
    ['64', 'None', 'None']
    """
    keys = rule.window
    if not keys:
        return None
    if keys[0] == LOCAL:
        return LocalWindow()
    entries = config.get(*keys)
    if isinstance(entries, list) and place < len(entries) and type(entries[place]) is bool:
        return LocalWindow() if entries[place] else None
    is_off = entries == 0
    size = None if is_off else config.optional_length(keys, place)
    if not _has_window(config, keys, layer, size):
        return None
    if size is None:
        return LocalWindow()
    if keys[0] in CHUNK_KEYS:
        return ChunkWindow(size)
    if rule.window_axes > 1:
        return Rectangle((size,) * rule.window_axes)
    return _span(size, rule.window_counts, causal, lifted)


def _has_window(config: Config, keys: Sequence[str], layer: int, size: int | None) -> bool:
    """Return whether a layer has a window, by switches and by the layer's kind."""
    switch = config.get("use_sliding_window")
    if switch is not None and not config.holds("use_sliding_window"):
        return False
    if config.sets_to_null(keys):
        return False
    full_layers = config.get("global_attn_indexes", "global_attention_blocks")
    if isinstance(full_layers, list) and layer in full_layers:
        return False
    kind = config.layer_type(layer)
    windowed_kind = config.get("windowed_kind")  # such layers have windows only if a size is set
    if kind is None or (windowed_kind and size is None):
        return size is not None
    return bool(re.search(as_text(windowed_kind or WINDOWED_KINDS), kind))


def _span(size: int, counts: str, causal: bool, lifted: bool) -> Span:
    """Return the span of a window of this size.

    Parameters
    ----------
    size
        The configured size.
    counts
        Tokens that the size counts, the rule's ``window_counts``: tokens on ``each side``; tokens
        on both sides and the query ``itself``; or, if empty, tokens on both sides, but with a
        causal mask the tokens before the query and the query itself.
    causal, lifted
        As in `window_of`.

    Examples
    --------
    >>> str(_span(8, "", causal=True, lifted=False)), str(_span(8, "itself", False, False))
    ('8', '3 back, 4 ahead')
    """
    if counts == "itself" and not causal and not lifted:
        return Span(back=(size - 1) // 2, ahead=size // 2)
    counts_one_side = counts == "each side" or lifted
    whole_size = 2 * size if counts_one_side else size
    if causal:
        return Span(back=whole_size - 1, ahead=0, size=whole_size)
    return Span(back=whole_size // 2, ahead=whole_size // 2, size=whole_size)
