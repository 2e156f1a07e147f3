"""Tiny random models of every type."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import re
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tools.deriving.shrinking import shrunk
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST = 120_000_000  # parameters

# What a configuration may lack, by words of its key.
LACKING = {"dropout": 0.0, "rate": 0.0, "range": 0.02, "intermediate_size": 40, "eps": 1e-6}


def model_classes(model_type: str) -> list[Any]:
    """The classes that are built from a type's configuration: the bare model first."""
    config = CONFIG_MAPPING[model_type]
    mapped = []
    for name, value in vars(modeling_auto).items():
        if (
            name.startswith("MODEL")
            and name.endswith("MAPPING_NAMES")
            and isinstance(value.get(model_type), str)
        ):
            mapped.append((name != "MODEL_MAPPING_NAMES", value[model_type]))
    classes = []
    for _, name in sorted(mapped, key=lambda pair: pair[0]):
        try:
            classes.append(getattr(transformers, name))
        except (AttributeError, ImportError):
            continue
    name = config.__module__.replace(".configuration_", ".modeling_")
    own_classes: list[Any] = []
    for module in (name, name.rpartition(".")[0] + f".modeling_{model_type}"):
        try:
            code = importlib.import_module(module)
        except ImportError:
            continue
        own_classes += [
            v for v in vars(code).values() if inspect.isclass(v) and _is_built_from(v, config)
        ]
    own_classes.sort(
        key=lambda kind: (
            not hasattr(kind, "save_pretrained"),
            not kind.__name__.endswith("Model"),
            -_size(kind),
        )
    )
    loadable = [kind for kind in own_classes if hasattr(kind, "save_pretrained")]
    return list(dict.fromkeys(classes or loadable or own_classes))


def _is_built_from(kind: type, config: type) -> bool:
    """Return whether a class of modules takes such a configuration and no other argument."""
    has_forward = "forward" in vars(kind) or hasattr(kind, "encode")
    if not issubclass(kind, torch.nn.Module) or not has_forward:
        return False
    if re.search("Embedding|Rotary|Projector|MLP|Router", kind.__name__):
        return False
    if getattr(kind, "config_class", None) is config:
        return True
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    needed = [p for p in parameters if p.default is inspect.Parameter.empty]
    annotations = [getattr(p.annotation, "__name__", p.annotation) for p in needed]
    return annotations == [config.__name__]


def _size(kind: type) -> int:
    """Return the length of a class's code, which distinguishes models from their parts."""
    codes = (getattr(value, "__code__", None) for value in vars(kind).values())
    return sum(len(code.co_code) for code in codes if code)


def build(
    model_type: str, variant: int, flat: bool = True, file: Mapping[str, Any] | None = None
) -> tuple[Any, str]:
    """A random model of a variant of the small configuration, and how it was made.

    The configuration is ``file``, a ``config.json`` with small numbers, if it is given.

    Where ``flat``, tables of positions hold the sines and cosines of angles that are zero.

    Raises
    ------
    RuntimeError
        No class makes a model of it; says why.
    """
    classes = model_classes(model_type)
    if not classes:
        raise RuntimeError("transformers has a configuration of this type, but no model")
    made = CONFIG_MAPPING[model_type]
    config = shrunk(made(), variant) if file is None else made.from_dict(copy.deepcopy(dict(file)))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    reasons = []
    for kind in classes[:3]:
        size = _parameters(kind, config) if variant == 3 or file is not None else 0
        if size > LARGEST:
            reasons.append(f"{kind.__name__}: {size} parameters")
            continue
        try:
            model = instantiated(kind, config)
        except Exception as error:
            reasons.append(f"{kind.__name__}: {_line(error)}")
            continue
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            reasons.append(f"{kind.__name__}: too large")
            continue
        model.config = config
        randomize(model)
        for table in position_tables(model) if flat else ():
            with torch.no_grad():
                table[:, : table.shape[1] // 2] = 0
                table[:, table.shape[1] // 2 :] = 1
        return model.eval(), f"{kind.__name__} {variant}"
    raise RuntimeError(" | ".join(reasons)[:500])


def instantiated(kind: Any, config: Any) -> Any:
    """A model; what a part's configuration gets from the whole's is filled in."""
    for _ in range(4):
        torch.manual_seed(0)
        try:
            return kind(config)
        except AttributeError as error:
            lacking = re.search(r"'(\w+Config)' object has no attribute '(\w+)'", str(error))
            value = next((v for word, v in LACKING.items() if lacking and word in lacking[2]), None)
            if lacking is None or value is None:
                raise
            for part in (config, *vars(config).values()):
                if type(part).__name__ == lacking[1]:
                    setattr(part, lacking[2], value)
    raise RuntimeError("its configuration lacks too much")


def _parameters(kind: Any, config: Any) -> int:
    """Number of a model's parameters, which are not made; 0 where its code cannot do without."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in kind(config).parameters())
    except Exception:
        return 0


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]


def position_tables(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that hold sines, then cosines."""
    tables = [m for m in model.modules() if "Sinusoidal" in type(m).__name__]
    return [m.weight for m in tables if isinstance(getattr(m, "weight", None), torch.nn.Parameter)]


def randomize(model: Any) -> None:
    """Attention far from uniform, and gains and biases that are all different."""
    generator = torch.Generator().manual_seed(0)
    tables = set(map(id, position_tables(model)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not (parameter.is_floating_point() and parameter.numel()) or "inv_freq" in name:
                continue
            if id(parameter) in tables:
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.ndim > 1:
                parameter.copy_(1.5 * noise / math.sqrt(parameter[0].numel()))
            else:
                parameter.add_(0.2 * noise)
