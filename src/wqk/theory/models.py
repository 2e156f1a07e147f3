"""The language model of a subject: from a checkpoint, a run, a configuration, or freshly drawn.

No code of a repository is ever run: a model that needs its own is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.attention.verification.running import quiet
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, MissingPackage, RunError, UnknownFamily, first_line
from wqk.runs.run import SETTINGS, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.theory.subject import Objective

# What transformers and PyTorch raise when a model cannot be built or run.
FAILURES = (ValueError, TypeError, LookupError, OSError, RuntimeError, ImportError, AttributeError)

# How the names of architectures end, and what those predict.
ENDINGS: dict[str, Objective] = {
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
}


@dataclass(frozen=True)
class State:
    """A model to load: a folder, Hub id, configuration file or model type; and its step."""

    ref: str
    step: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether there are no weights: a configuration file, or a model type and no folder."""
        return Path(self.ref).suffix == ".json" or (
            self.ref in known_types() and not Path(self.ref).exists()
        )


class Loaded(NamedTuple):
    """A model in float32 and evaluation mode, what it predicts, and what its checkpoint lacks."""

    model: Any
    objective: Objective
    missing: tuple[str, ...]


def known_types() -> dict[str, set[str]]:
    """The model types of the installed `transformers`' language models: masked, causal or both.

    Raises
    ------
    MissingPackage
        PyTorch or `transformers` is not installed.
    """
    try:
        import torch  # noqa: F401
        from transformers.models.auto import modeling_auto as auto
    except ImportError as error:
        raise MissingPackage(
            f"the theory is tested on a running model, and {error.name} is not installed: "
            "pip install 'wqk[train]'"
        ) from None
    kinds = {
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    known = {name for names in kinds.values() for name in names}
    return {name: {kind for kind, names in kinds.items() if name in names} for name in known}


def states_of(
    ref: str, steps: Sequence[int] | None = None, revision: str | None = None
) -> list[State]:
    """The states that a reference stands for; the arguments are those of `open_subjects`.

    Raises
    ------
    RunError
        The run has no checkpoint at a step, or ``ref`` is no run.
    CheckpointError
        A revision is given of something that has none.
    """
    if revision is not None and (Path(ref).exists() or ref in known_types()):
        raise CheckpointError(f"{ref}: only a Hub repository has revisions; leave out --revision")
    if not (Path(ref) / SETTINGS).is_file():
        if steps is not None:
            raise RunError(f"{ref}: only a training run has steps; leave out --steps")
        return [State(ref)]
    saved = dict(open_run(ref).checkpoints)
    if not saved:
        raise RunError(f"{ref}: no checkpoint has been saved yet")
    wanted = [max(saved)] if steps is None else list(steps) or sorted(saved)
    missing = [step for step in wanted if step not in saved]
    if missing:
        raise RunError(
            f"{ref}: no checkpoint at step {missing[0]}; saved are {', '.join(map(str, saved))}"
        )
    return [State(str(saved[step]), step) for step in wanted]


def load_model(
    state: State,
    objective: Objective | None = None,
    *,
    vocabulary_size: int | None = None,
    seed: int = 0,
    revision: str | None = None,
) -> Loaded:
    """Load a model, for the objective of its architecture or another.

    ``vocabulary_size`` is for a bare model type, which has no vocabulary of its own; ``seed`` is
    that of all weights drawn here.

    Raises
    ------
    CheckpointError
        There is no such checkpoint, or `transformers` cannot load it.
    UnknownFamily
        It is no language model.
    """
    import torch
    import transformers

    if not state.is_fresh:
        open_checkpoint(state.ref, revision)  # its errors are clearer than those of transformers
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            config = _config(state.ref, vocabulary_size, revision)
            objective = objective or _objective(config)
            maker = getattr(transformers, _maker(config, objective))
            if state.is_fresh:
                model = maker.from_config(
                    config, attn_implementation="eager", trust_remote_code=False
                )
                return Loaded(model.eval(), objective, ())
            model, report = maker.from_pretrained(
                state.ref,
                config=config,
                revision=revision,
                dtype=torch.float32,
                output_loading_info=True,
                attn_implementation="eager",
                trust_remote_code=False,
            )
        except FAILURES as error:
            raise CheckpointError(f"{state.ref}: cannot be loaded ({first_line(error)})") from error
    return Loaded(model.eval(), objective, tuple(sorted(report["missing_keys"])))


def _config(ref: str, vocabulary_size: int | None, revision: str | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if ref in CONFIG_MAPPING and not Path(ref).exists():
        return CONFIG_MAPPING[ref](vocab_size=vocabulary_size)
    return AutoConfig.from_pretrained(ref, revision=revision, trust_remote_code=False)


def _objective(config: Any) -> Objective:
    """What an architecture predicts: by its name, or by what its model type can be built as."""
    for name in config.architectures or ():
        for ending, objective in ENDINGS.items():
            if name.endswith(ending):
                return objective
    can_be_masked = "masked" in known_types().get(config.model_type, ())
    return "masked" if can_be_masked and not getattr(config, "is_decoder", False) else "causal"


def _maker(config: Any, objective: Objective) -> str:
    """The name of the class that builds the model; the configuration gets the right mask."""
    kinds = known_types().get(config.model_type, set())
    kind = "causal" if objective == "causal" else "masked"
    if kind not in kinds:
        raise UnknownFamily(
            f"transformers has no {kind} language model of type {config.model_type!r}"
        )
    if "masked" in kinds:
        config.is_decoder = kind == "causal"
    return f"AutoModelFor{kind.capitalize()}LM"
