"""A model, run by `transformers` in double precision with its attention recorded.

Axes: B texts, H query heads, N tokens (I queries, J keys), D width.
"""

from __future__ import annotations

import inspect
import os
import warnings
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.attention import attention_plans
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import find_family, load_family

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan

# Methods of attention modules that compute a learned term of the score beside the form. One layer's
# may serve the layers after it.
LEARNED_TERMS = ("compute_bias", "disentangled_att_bias", "disentangled_attention_bias")


class Application(NamedTuple):
    """One use of one block's attention."""

    query_input: np.ndarray  # (B, I, D)
    key_input: np.ndarray  # (B, J, D)
    attention: np.ndarray  # probabilities (B, H, I, J)
    term: np.ndarray | None  # the learned term that was computed last


def run(
    ref: Any,
    checkpoint: Checkpoint,
    plans: Sequence[AttentionPlan],
    family: Path | None,
    *,
    text: str | None,
    tokens: Sequence[int] | None,
    length: int,
    seed: int,
    **hub: Any,
) -> tuple[list[list[Application]], dict[int, np.ndarray]]:
    """Run a model once.

    Parameters
    ----------
    ref, family, text, tokens, length, seed, **hub
        As for `wqk.verification.verify`.
    checkpoint, plans
        What ``ref`` holds on disk.

    Returns
    -------
    Every application of the attention of each plan; and which tokens are no padding, (B, N) by N.

    Raises
    ------
    UnknownFamily
        `transformers` has no code for the model, or its modules are not those of the family.
    CheckpointError
        The model cannot be loaded or run, or PyTorch or `transformers` is not installed.
    """
    _require_packages(ref)
    import torch

    known = load_family(family) if family else find_family(checkpoint.config, checkpoint.name)
    with _quiet(), _double_precision():
        try:
            model = _load_model(ref, checkpoint, known.runs_as, hub)
            if text is not None and tokens is None:
                tokens = _tokenized(ref, text, hub)
            inputs = _inputs(model, tokens, length, seed)
            records = _listen(model, plans, attention_plans(open_checkpoint(model), family))
            with torch.no_grad():
                model(**inputs, output_attentions=True)
        except (ValueError, TypeError, LookupError, OSError, RuntimeError, ImportError) as error:
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise CheckpointError(f"{checkpoint.name}: cannot be run ({reason[0]})") from error
    masks = [value.numpy() for name, value in inputs.items() if name.endswith("attention_mask")]
    return records, {mask.shape[1]: mask.astype(bool) for mask in masks}


def _require_packages(ref: Any) -> None:
    if not isinstance(ref, str | os.PathLike) or Path(ref).is_file():
        raise CheckpointError(
            "a model is verified from its folder or from the hub, "
            f"got {ref if isinstance(ref, str | os.PathLike) else type(ref).__name__}; "
            "save it with its config.json and name the folder"
        )
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"a model is verified by running it, and {error.name} is not installed; "
            "pip install 'wqk[train]'"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice: tensors that no attention needs may well be missing."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _double_precision() -> Iterator[None]:
    """Everything that asks PyTorch for float32 gets float64.

    Models compute rotary angles and the softmax in float32 by name, whatever their weights are.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def doubled(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class DoublePrecision(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (torch.Tensor.view, torch.frombuffer):  # bytes as what they are
                return func(*args, **(kwargs or {}))
            func = torch.Tensor.double if func is torch.Tensor.float else func
            named = {key: doubled(value) for key, value in (kwargs or {}).items()}
            return func(*map(doubled, args), **named)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with DoublePrecision():
            yield
    finally:
        torch.set_default_dtype(default)


def _load_model(ref: Any, checkpoint: Checkpoint, runs_as: str, hub: Mapping[str, Any]) -> Any:
    """The model without its head, in float64, with attention that can be looked at."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel

    model_type = checkpoint.config.get("model_type")
    code = model_type if model_type in CONFIG_MAPPING else runs_as
    if code not in CONFIG_MAPPING:
        raise UnknownFamily(
            f"{checkpoint.name}: the installed transformers has no code for model type "
            f"{model_type!r}, so its attention cannot be run and compared"
        )
    config = CONFIG_MAPPING[code].from_pretrained(ref, **hub)
    config._experts_implementation = "eager"  # the fused kernels know no float64
    return AutoModel.from_pretrained(
        ref, config=config, dtype=torch.float64, attn_implementation="eager", **hub
    ).eval()


def _tokenized(ref: Any, text: str, hub: Mapping[str, Any]) -> list[int]:
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(ref, **hub)(text)["input_ids"]
    return tokens


def _inputs(model: Any, tokens: Sequence[int] | None, length: int, seed: int) -> dict[str, Any]:
    """What the model is given: its main input, and a text to go on with for one with a decoder."""
    import torch

    if model.main_input_name not in MAIN_INPUTS:
        raise UnknownFamily(
            f"{type(model).__name__}: no rule makes an input {model.main_input_name!r}; "
            f"known are {', '.join(MAIN_INPUTS)}"
        )
    random = np.random.default_rng(seed)
    inputs = MAIN_INPUTS[model.main_input_name](model.config, tokens, length, random)
    if getattr(model.config, "is_encoder_decoder", False):
        # Two tokens more, so that rows and columns of cross-attention cannot be mistaken.
        written = None if tokens is None else [*tokens, *tokens[:2]]
        decoder = token_input(model.config, written, length + 2, random)
        inputs |= {f"decoder_{name}": value for name, value in decoder.items()}
    accepted = inspect.signature(model.forward).parameters
    given = {name: torch.from_numpy(v) for name, v in inputs.items() if name in accepted}
    return given | ({"use_cache": False} if "use_cache" in accepted else {})


def token_input(
    config: Any, tokens: Sequence[int] | None, length: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """The given text; or two random ones, the second of which is shorter and padded."""
    if tokens is not None:
        numbers = np.asarray([tokens], np.int64)
        return {"input_ids": numbers, "attention_mask": np.ones_like(numbers)}
    padding = getattr(config, "pad_token_id", None) or 0
    numbers = random.integers(0, config.get_text_config().vocab_size - 1, (2, length))
    numbers += numbers >= padding
    mask = np.ones_like(numbers)
    mask[1, -(length // 4) :] = 0
    return {"input_ids": np.where(mask, numbers, padding), "attention_mask": mask}


# How a model's main input is made, by the name that `transformers` gives it.
MAIN_INPUTS: dict[str, Callable[..., dict[str, np.ndarray]]] = {"input_ids": token_input}


def _listen(
    model: Any, plans: Sequence[AttentionPlan], live: Sequence[AttentionPlan]
) -> list[list[Application]]:
    """Empty records of the plans' blocks, which fill when the model is run."""
    latest: list[np.ndarray] = []
    for module in model.modules():
        for name in LEARNED_TERMS:
            if hasattr(module, name):
                setattr(module, name, _remembering(getattr(module, name), latest))
    in_model = {_place(plan): plan for plan in live}
    records: list[list[Application]] = []
    for plan in plans:
        if _place(plan) not in in_model:
            raise UnknownFamily(
                f"{type(model).__name__}, as transformers loads it, has no {plan.rule.kind}-"
                f"attention in layer {plan.layer} of a {plan.stack}, but the checkpoint has"
            )
        records.append([])
        _attach(model, in_model[_place(plan)], records[-1], latest)
    return records


def _place(plan: AttentionPlan) -> tuple[str, str, int]:
    return plan.stack, plan.rule.kind, plan.layer


def _remembering(method: Callable[..., Any], latest: list[np.ndarray]) -> Callable[..., Any]:
    """The same method, which leaves its last result in a list."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        latest[:] = [result.numpy()]
        return result

    return remembered


def _attach(
    model: Any, plan: AttentionPlan, record: list[Application], latest: list[np.ndarray]
) -> None:
    """Record what the modules of the query and the key are given, and what their parent gives."""
    query, key = (part.tensor.rpartition(".")[0] for part in (plan.query, plan.key))
    shared = _shared_path(query, key)
    given: dict[str, Any] = {}

    def keeping(side: str) -> Callable[[Any, Any], None]:
        def keep(module: Any, args: Any) -> None:
            # The first input of a pass: relative positions may go through the same projection.
            given.setdefault(side, args[0].numpy())

        return keep

    def attended(module: Any, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else ()
        found = [value.numpy() for value in outputs if _is_attention(value)]
        if not found or len(given) < 2:
            raise UnknownFamily(
                f"{shared} ({type(module).__name__}) does not project queries and keys and report "
                "their attention"
            )
        record.append(
            Application(given["query"], given["key"], found[-1], latest[0] if latest else None)
        )
        given.clear()

    model.get_submodule(query).register_forward_pre_hook(keeping("query"))
    model.get_submodule(key).register_forward_pre_hook(keeping("key"))
    model.get_submodule(shared).register_forward_hook(attended)


def _shared_path(query: str, key: str) -> str:
    """The module that holds both projections, or the one that holds the fused one."""
    if query == key:
        return query.rpartition(".")[0]
    names = zip(query.split("."), key.split("."), strict=False)
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], names))


def _is_attention(value: Any) -> bool:
    """Whether something is a tensor of probabilities (B, H, I, J)."""
    return getattr(value, "ndim", 0) == 4 and bool(np.allclose(value.sum(-1).numpy(), 1.0))
