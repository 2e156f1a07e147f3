"""Names of tensors: layers and numbers in names, titles, and pairs of names of two checkpoints.

A name such as ``model.layers.3.mlp.up_proj.weight`` begins with the *prefix* of its layer,
``model.layers.3.``. A *title* is the short name that reasons and tables contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from wqk.checkpoints import TensorInfo

# Numbers of layers and experts in names, with the dots around them.
NUMBERS = re.compile(r"\.\d+\.")
# A name up to its first number.
LAYER_PREFIX = re.compile(r".*?\.\d+\.")
# Prefixes that wrappers put before a name.
WRAPPERS = re.compile(r"^(?:(?:module|model|_orig_mod|base_model)\.)+")


# -- parts of one name -------------------------------------------------------------------------


def layer_prefix(name: str) -> str:
    """Return a name up to its first number; empty for a name without numbers.

    Examples
    --------
    >>> layer_prefix("model.layers.3.mlp.up_proj.weight"), layer_prefix("lm_head.weight")
    ('model.layers.3.', '')
    """
    match = LAYER_PREFIX.match(name)
    return match[0] if match else ""


def pattern_of(name: str) -> str:
    """Return a name without its numbers.

    Examples
    --------
    >>> pattern_of("layers.12.mlp.experts.3.w1.weight")
    'layers.*.mlp.experts.*.w1.weight'
    """
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def numbers_of(name: str) -> list[int]:
    """Return the numbers of layers and experts in a name.

    Examples
    --------
    >>> numbers_of("layers.12.mlp.experts.3.w1.weight")
    [12, 3]
    """
    return [int(word) for word in name.split(".") if word.isdigit()]


def bias_of(weight: str) -> str:
    """Return the name of the bias of a weight.

    Examples
    --------
    >>> bias_of("layers.0.q_proj.weight")
    'layers.0.q_proj.bias'
    """
    return f"{weight.removesuffix('.weight')}.bias"


# -- titles ------------------------------------------------------------------------------------


def title_in_block(name: str) -> str:
    """Return the title of a tensor of attention: its name without the parts that a block shares.

    Examples
    --------
    >>> title_in_block("layers.0.self_attn.q_proj.weight"), title_in_block("h.0.q_proj.bias")
    ('q_proj', 'q_proj.bias')
    >>> title_in_block("layer.0.attention.output.dense.weight")
    'output.dense'
    """
    parts = [word for word in name.removesuffix(".weight").split(".") if not word.isdigit()]
    names_no_module = parts[-1] in ("bias", "dense")
    return ".".join(parts[-2:]) if names_no_module else parts[-1]


def title_in_layer(name: str) -> str:
    """Return the title of any tensor: the end of its name, without numbers and ``weight``.

    Examples
    --------
    >>> title_in_layer("model.layers.3.mlp.gate_proj.weight"), title_in_layer("lm_head.weight")
    ('gate_proj', 'lm_head')
    >>> title_in_layer("layers.0.mixer.A_log")
    'mixer.A_log'
    """
    parts = [word for word in name.split(".") if not word.isdigit()]
    if parts[-1] == "weight" and len(parts) > 1:
        return parts[-2]
    return ".".join(parts[-2:])


# -- names of two checkpoints ------------------------------------------------------------------


def paired_names(
    reference: Mapping[str, TensorInfo],
    candidate: Mapping[str, TensorInfo],
    example: tuple[str, str] | None = None,
) -> dict[str, str]:
    """Return the candidate's names of the reference's tensors, where names agree.

    Prefixes of wrappers are ignored.

    Parameters
    ----------
    reference, candidate
        The tensors of both checkpoints, by name.
    example
        The names of one tensor in the reference and in the candidate. If one name is the end of the
        other, the beginning of the longer name is ignored as well.

    Examples
    --------
    >>> paired_names({"model.norm.weight": ...}, {"norm.weight": ...})
    {'model.norm.weight': 'norm.weight'}
    """
    pairs = {name: name for name in reference if name in candidate}
    shortenings: list[Callable[[str], str]] = [lambda name: WRAPPERS.sub("", name)]
    if example is not None:
        shorter, longer = sorted(example, key=len)
        if longer.endswith(shorter):
            prefix = longer.removesuffix(shorter)
            shortenings.append(lambda name: name.removeprefix(prefix))
    for shorten in shortenings:
        paired = set(pairs.values())
        name_by_shortened: dict[str, str] = {}
        for name in candidate:
            if name not in paired:
                name_by_shortened.setdefault(shorten(name), name)
        for name in reference:
            shortened = shorten(name)
            if name not in pairs and shortened in name_by_shortened:
                pairs[name] = name_by_shortened[shortened]
    return pairs
