"""Effects of configuration keys: each is perturbed by itself, with the same weights.

    python -m tools.deriving.perturbing OUT.jsonl [--share N/M] [TYPE...]
    python -m tools.deriving.perturbing OUT.jsonl --write

Every type gets a line, with an outcome of each of its keys. Types that have a line are left out;
a process that is ended leaves those that it had finished. Of the lines, ``switches.toml`` is made:
keys that are taken for idle by their names and are not, and those that change attention and that
no family reads.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tools.deriving.building import build, instantiated, randomize
from tools.deriving.parts import line
from tools.deriving.probing import in_a_process
from tools.deriving.running import PROJECTIONS, TracedRun
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import wqk.families
from wqk.families.family import family_of_type
from wqk.families.model_types import idle_reason, keys_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SWITCHES = Path(wqk.families.__file__).parent / "switches.toml"
HEAD = "# Written by tools/deriving/perturbing.py: what types compute with, and no family reads.\n"
# What is put out, kept or lost next to what is computed; rounding, where all is double; and what
# tensors tell.
BESIDE = re.compile("^output_|^return_|^use_cache$|loss|upcast|fp32|float32|^tie_")
SECONDS = 60  # of one processor, for a type
CLOSE = 1e-9  # of double precision, as a share of the largest number
ATTENTION, OUTPUT, NOTHING = "attention", "output", "nothing"
TENSORS, REFUSED = "tensors", "not built"
RANK = (ATTENTION, OUTPUT, NOTHING, TENSORS, REFUSED)
# What attention is given besides activations: positions and masks are its own matter.
OF_ATTENTION = re.compile(
    r"pos(?!.*embed)|mask|rotary|freq|cos|sin|bias|grid|seq|past|cache|ind|shape|rel|out"
)
# Functions between layers, and a factor of what goes into the first: not all that an attention is
# given can be forced, as where its mask is made of activations.
UPSTREAM = re.compile("act$|activation|scale_embedding")
ACTIVATIONS = ("gelu", "relu", "silu", "gelu_new", "swish", "gelu_pytorch_tanh", "relu2", "tanh")
# Dictionaries of settings that are read as a whole, and keys that every type has and none uses.
ROTARY = {"rope_parameters", "rope_scaling"}


class Perturbed:
    """A type's tiny model, what it was given, and what it computed."""

    def __init__(self, model_type: str) -> None:
        reasons = []
        for variant in range(4):
            try:
                run = TracedRun(_with_head(model_type, build(model_type, variant, flat=False)[0]))
            except Exception as error:  # of the model's code; another variant may do
                reasons.append(f"{type(error).__name__}: {error}"[:200])
                continue
            if run.fed:
                break
            reasons += run.notes
        else:
            raise RuntimeError(" | ".join(dict.fromkeys(reasons)) or "nothing to give")
        model = run.model
        self.type, self.kind = model_type, type(model)
        self.table = model.config.to_dict()
        self.weights = model.state_dict()
        self.owners = {*map(self._owner(model), {site.module for site in run.sites})}
        self.fed, self.dtype, self.given = run.fed, torch.float64, dict[Any, Any]()
        try:
            self.base = self._computed(self.model({}), keep=True)
        except Exception:  # single precision alone
            self.dtype = torch.float32
            self.base = self._computed(self.model({}), keep=True)
        if not same(self.base, self._computed(self.model({}))):
            raise RuntimeError("it computes something else each time")

    @staticmethod
    def _owner(model: Any) -> Any:
        """Return the innermost module around a softmax that projects queries or keys."""

        def owner(name: str) -> str:
            path = name
            while path:
                inner = (n for n, _ in model.get_submodule(path).named_modules() if n)
                if any(PROJECTIONS.fullmatch(n.rpartition(".")[2]) for n in inner):
                    return path
                path = path.rpartition(".")[0]
            return name

        return owner

    def model(self, changes: Mapping[str, Any]) -> Any:
        """The model with some keys changed, and the same weights."""
        table = copy.deepcopy(self.table)
        for path, value in changes.items():
            *parts, key = path.split("/")
            place = table
            for part in parts:
                place = place[part]
            place[key] = value
        config = CONFIG_MAPPING[self.type].from_dict(table)
        config._attn_implementation = config._experts_implementation = "eager"
        with no_init_weights():
            model = instantiated(self.kind, config)
        model.config = config
        model.load_state_dict(self.weights)
        with contextlib.suppress(AttributeError):  # a module that is no model
            model.tie_weights()
        return model.eval().to(self.dtype)

    def _computed(self, model: Any, keep: bool = False, forced: bool = False) -> dict[str, Any]:
        """Return the outputs of a model and its attentions; with earlier inputs if forced."""
        outputs: dict[str, Any] = {}
        hooks, count = [], dict[str, int]()
        self.reshaped = False

        def entering(name: str) -> Any:
            def hook(module: Any, args: Any, kwargs: Any) -> Any:
                bound = inspect.signature(module.forward).bind(*args, **kwargs)
                place = name, count.get(name, 0)
                count[name] = place[1] + 1
                kept = self.given.setdefault(place, {}) if keep else self.given.get(place, {})
                for key, value in bound.arguments.items():
                    if not isinstance(value, torch.Tensor) or OF_ATTENTION.search(key):
                        continue
                    if keep:
                        kept[key] = value.detach().clone()
                    elif forced and key in kept:
                        self.reshaped |= kept[key].shape != value.shape
                        bound.arguments[key] = kept[key].clone()
                return (bound.args, bound.kwargs) if forced else None

            return hook

        def leaving(name: str) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                outputs.setdefault(name, []).extend(tensors(output))

            return hook

        for name in self.owners - {""}:
            module = model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(leaving(name)))
        for number, (part, inputs) in enumerate(self.fed):
            inputs = {
                key: value.to(self.dtype)
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else copy.deepcopy(value)
                for key, value in inputs.items()
            }
            torch.manual_seed(0)
            module = model.get_submodule(part)
            output = module(**inputs)
            named = output.items() if isinstance(output, dict) else [("", output)]
            outputs |= {f"output {number} {key}": [*tensors(value)] for key, value in named}
        for hook in hooks:
            hook.remove()
        return outputs

    def outcome(self, changes: Mapping[str, Any]) -> str:
        """Return the effect of keys: on attention, on other outputs, none, or on the tensors."""
        try:
            model = self.model(changes)
        except Exception as error:
            return TENSORS if "Error(s) in loading state_dict" in str(error) else REFUSED
        try:
            outputs = self._computed(model)
        except Exception:
            return REFUSED
        if same(self.base, outputs):
            return NOTHING
        if not self.owners or any(map(UPSTREAM.search, map(_last, changes))):
            return OUTPUT
        try:
            outputs = self._computed(model, forced=True)
        except Exception:  # of the shapes of what was forced
            self.reshaped = True
        if self.reshaped:  # it attends over something else, which may be its windows
            return ATTENTION if any("window" in path for path in changes) else OUTPUT
        owned = [{k: v for k, v in run.items() if k in self.owners} for run in (self.base, outputs)]
        return OUTPUT if owned[0].keys() == owned[1].keys() and same(*owned) else ATTENTION

    def outcomes(self, values_by_key: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
        """The outcome of each key, with a slash for those within others.

        Keys that are taken for idle are changed together, and apart where that changes something.
        """
        table = dict(keys(self.table))
        options = {path: others(path, value, values_by_key) for path, value in table.items()}
        yield from self._together([path for path in table if idle_reason(_last(path))], options)
        for path in table:
            if not idle_reason(_last(path)):
                yield path, self._apart(path, options[path])

    def _together(
        self, paths: Sequence[str], options: Mapping[str, Sequence[Any]]
    ) -> Iterator[tuple[str, str]]:
        if len(paths) == 1:
            yield paths[0], self._apart(paths[0], options[paths[0]])
        elif self.outcome({path: options[path][0] for path in paths}) == NOTHING:
            yield from ((path, NOTHING) for path in paths)
        elif paths:
            half = len(paths) // 2
            yield from self._together(paths[:half], options)
            yield from self._together(paths[half:], options)

    def _apart(self, path: str, options: Sequence[Any]) -> str:
        worst, tried = REFUSED, 0
        for option in options:
            worst = min(worst, outcome := self.outcome({path: option}), key=RANK.index)
            tried += outcome == NOTHING
            # Half of an odd number is that of the even one before it.
            if worst in (ATTENTION, OUTPUT) or tried > (type(option) is int):
                break
        return worst


def _with_head(model_type: str, model: Any) -> Any:
    """The model that predicts tokens, where there is one."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if isinstance(name, str) and name != type(model).__name__:
        with contextlib.suppress(Exception):  # of the model's code
            headed = instantiated(getattr(transformers, name), model.config)
            if len(headed.state_dict()) >= len(model.state_dict()):  # not a decoder alone
                randomize(headed)
                return headed.eval()
    return model


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of numbers in an output."""
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors(inner)


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two runs have equal outputs, as far as both have them."""
    return first.keys() & second.keys() != set() and all(
        len(first[name]) == len(second[name]) and all(map(_close, first[name], second[name]))
        for name in first.keys() & second.keys()
    )


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if torch.equal(first, second):
        return True
    if first.dtype != torch.float64:
        return bool(torch.equal(first.nan_to_num(), second.nan_to_num()))
    first, second = first.nan_to_num(), second.nan_to_num()
    finite = first.abs()[first.abs() < 1e30]
    scale = float(finite.max()) if finite.numel() else 1.0
    return bool((first - second).abs().max() <= CLOSE * scale)


def keys(table: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values; those of a part that has a type of its own are that type's."""
    for key, value in table.items():
        part = isinstance(value, dict) and value.get("model_type")
        if part in CONFIG_MAPPING_NAMES or key in ROTARY or key == "model_type":
            continue
        if isinstance(value, dict) and value and all(type(k) is str for k in value):
            yield from keys(value, f"{within}{key}/")
        else:
            yield within + key, value


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def others(path: str, value: Any, values_by_key: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return other values of a key: values of other types, if it is no number or switch."""
    key = _last(path)
    seen = [v for v in values_by_key.get(key, ()) if v != value and type(v) is type(value)]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value or 2, value // 2 or 3, value - 1]
        case float():
            return [value + 0.01 if 0 <= value < 0.01 else value * 0.6, value + 1]
        case str():
            alternatives = ACTIVATIONS if value in ACTIVATIONS else seen
            return [*[v for v in alternatives if v != value][:4], f"{value}x"]
        case None:
            return [*[v for v in values_by_key.get(key, ()) if v is not None][:3], 1, True]
        case [first, *rest]:
            turned = [value[::-1]] if value[::-1] != value else []
            return turned + [
                [first_value, *rest] for first_value in others(key, first, values_by_key)[:2]
            ]
        case list() | tuple():
            return [[1], ["x"]]
    return [{"0": [1]}, {"a": 1}]


def known_values(types: Iterable[str] = CONFIG_MAPPING_NAMES) -> dict[str, list[Any]]:
    """Values that types have by default, by key."""
    values_by_key: dict[str, list[Any]] = {}
    for model_type in types:
        try:
            pairs = list(keys(CONFIG_MAPPING[model_type]().to_dict()))
        except Exception:  # some cannot be made of nothing
            continue
        for path, value in pairs:
            seen = values_by_key.setdefault(_last(path), [])
            if isinstance(value, (int, float, str, bool)) and value not in seen:
                seen.append(value)
    return values_by_key


def perturbed(model_type: str, values_by_key: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the line of a type."""
    row: dict[str, Any] = {"type": model_type}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "outcomes"

        def work() -> None:
            with path.open("w", encoding="utf-8") as file:
                try:
                    model = Perturbed(model_type)
                    for key, outcome in model.outcomes(values_by_key):
                        print(json.dumps([key, outcome]), file=file, flush=True)
                except Exception as error:  # of the model's code
                    print(json.dumps(["", str(error)[:300]]), file=file)

        ended = in_a_process(work, SECONDS)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    keys = dict(json.loads(line) for line in lines)
    ended = keys.pop("", "") or ended
    return row | ({"ended": ended} if ended else {}) | {"keys": keys}


def switches_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcomes of a type that are kept: keys that `wqk` would otherwise ignore."""
    family = family_of_type(row["type"])
    read = keys_of(*family.attention) if family else set()
    outcome_by_path = {
        path: outcome for path, outcome in row["keys"].items() if not BESIDE.search(_last(path))
    }
    idle = (path for path, outcome in outcome_by_path.items() if outcome in (ATTENTION, OUTPUT))
    computed = sorted({_last(path) for path in idle if idle_reason(_last(path))})
    switch_paths = sorted(
        path for path, outcome in outcome_by_path.items() if outcome == ATTENTION and family
    )
    attention = {
        _last(path): value
        for path in switch_paths
        if _last(path) not in read and (value := _default(row["type"], path)) is not None
    }
    kept = {"attention": attention, "computed": computed}
    return {name: paths for name, paths in kept.items() if paths}


def _default(model_type: str, path: str) -> Any:
    """Return the default of a class: ``null`` for no value, None if it is not a plain value."""
    try:
        value = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # some cannot be made of nothing
        return "null"
    for key in path.split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return "null"
    return None if re.search("{|Infinity", json.dumps(value)) else value


def main() -> None:
    """Perturb every key of every type, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--share", default="0/1", help="one of so many processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no type after these")
    parser.add_argument("--write", action="store_true", help="write switches.toml of the lines")
    arguments = parser.parse_args()
    if arguments.write:
        rows = map(json.loads, arguments.out.read_text(encoding="utf-8").splitlines())
        tables = {row["type"]: table for row in rows if (table := switches_of(row))}
        lines = (line(kind, table) for kind, table in sorted(tables.items()))
        SWITCHES.write_text(HEAD + "".join(lines), encoding="utf-8")
        return
    part, parts = map(int, arguments.share.split("/"))
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    values_by_key = known_values()
    perturbed("llama", values_by_key)
    done = arguments.out.read_text(encoding="utf-8").splitlines() if arguments.out.exists() else []
    remaining = dict.fromkeys(arguments.types or [*CONFIG_MAPPING_NAMES][part::parts])
    for text in done:
        remaining.pop(json.loads(text)["type"], None)
    with arguments.out.open("a", encoding="utf-8") as out:
        end = time.monotonic() + arguments.seconds
        for model_type in remaining:
            if time.monotonic() > end:
                break
            print(json.dumps(perturbed(model_type, values_by_key)), file=out, flush=True)


if __name__ == "__main__":
    main()
