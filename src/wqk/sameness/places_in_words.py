"""Short labels of blocks and layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wqk._console import spans
from wqk.families import Place


def places_in_words(places: Sequence[Place]) -> str:
    """Describe blocks in a few words, without repetitions.

    Examples
    --------
    >>> places_in_words([Place("decoder", "self", layer) for layer in (0, 0, 1, 1, 2, 5)])
    'decoder self, layers 0-2, 5'
    """
    layers: dict[str, set[int]] = {}
    for place in places:
        layers.setdefault(f"{place.stack} {place.kind}", set()).add(place.layer)
    return "; ".join(
        f"{attention}, {layers_in_words(numbers)}" for attention, numbers in layers.items()
    )


def layers_in_words(numbers: Collection[int]) -> str:
    """Return numbers of layers as ranges, after the noun.

    Examples
    --------
    >>> layers_in_words({2}), layers_in_words({0, 1, 2, 5})
    ('layer 2', 'layers 0-2, 5')
    """
    noun = "layers" if len(numbers) > 1 else "layer"
    return f"{noun} {spans(numbers)}"
