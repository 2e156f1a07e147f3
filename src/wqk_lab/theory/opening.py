"""From a model's name and a text to subjects that the statements can be tested on.

No code of a repository is ever run: a model that needs its own is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wqk.checkpoints import open_checkpoint
from wqk.errors import (
    CheckpointError,
    CorpusError,
    RunError,
    UnknownFamily,
    first_line,
    required_by,
)
from wqk.live.held_out import predicted_by
from wqk.live.running import load_pretrained, quiet
from wqk.tables.run import SETTINGS, open_run
from wqk_lab.theory.subject import ObjectiveName, Subject
from wqk_lab.theory.text import FAILURES, Text, open_text, vocabulary_of

# Tokens in a block, by default.
BLOCK_TOKENS = 64


def open_subjects(
    ref: str,
    corpus: str | Path,
    *,
    steps: Sequence[int] | None = None,
    batches: int = 8,
    batch: int = 8,
    block: int | None = None,
    objective: ObjectiveName | None = None,
    mask_share: float = 0.15,
    seed: int = 0,
    revision: str | None = None,
) -> tuple[Text, Iterator[Subject]]:
    """Open a text, and a model to run on it: one state of it, or several steps of a run.

    Parameters
    ----------
    ref
        A checkpoint's folder or Hub id; a training run's folder; or, for freshly drawn weights, a
        ``config.json`` or a model type such as ``bert``.
    corpus
        A token store, a text file for the model's own tokenizer, or token ids as .npy.
    steps
        Steps of a run; empty for all that were saved, None for the last.
    batches, batch, block
        Number of batches, blocks in each, and tokens in a block: by default
        `BLOCK_TOKENS`, or a run's own if that is shorter. All states get the same batches.
    objective
        ``masked``, ``each`` or ``causal``; by the model's architecture otherwise.
    mask_share
        Fraction of tokens that are masked.
    seed
        Seed of blocks, masks and freshly drawn weights.
    revision
        Revision of a Hub repository.

    Raises
    ------
    CorpusError
        The text cannot be read, or is not in the model's vocabulary.
    CheckpointError
        The model cannot be loaded, or cannot be run on such blocks.
    RunError
        The run has no such step.
    UnknownFamily
        The model is no language model.
    MissingPackage
        PyTorch or `transformers` is not installed.
    """
    known_types()  # reports a missing package before anything is read
    states = states_of(ref, steps, revision)
    text = open_text(Path(corpus), states[0].ref, revision)
    blocks = text.blocks(batches, batch, block or block_of(ref), seed)

    def subjects() -> Iterator[Subject]:
        for state in states:
            size = text.vocabulary_size
            model, predicts, missing = load_model(state, objective, size, seed, revision)
            mask = None if predicts == "causal" else text.mask_token
            caveat = _doubt(model, text, state, revision)
            subject = Subject(
                state.name,
                model,
                predicts,
                blocks,
                mask_token=mask,
                mask_share=mask_share,
                seed=seed,
                step=state.step,
                missing=missing,
                caveat=caveat,
            )
            _require_run(subject)
            yield subject

    return text, subjects()


@dataclass(frozen=True)
class State:
    """A model to load: a folder, Hub id, configuration file or model type; and its step."""

    ref: str
    step: int | None = None

    @property
    def is_fresh(self) -> bool:
        """True for a configuration file, or a model type without a folder: there are no weights."""
        path = Path(self.ref)
        return path.suffix == ".json" or (self.ref in known_types() and not path.exists())

    @property
    def name(self) -> str:
        """The run's name for one of its steps; otherwise the folder's, or the whole id."""
        path = Path(self.ref)
        if self.step is not None:
            return path.parent.resolve().name
        return path.resolve().name if path.is_dir() else self.ref


def known_types() -> dict[str, set[str]]:
    """Return the objectives of each type of language model: masked, causal or both.

    `MissingPackage` without PyTorch or `transformers`.
    """
    with required_by("testing the theory"):
        import torch  # noqa: F401
        from transformers.models.auto import modeling_auto as auto
    kinds = {
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    type_names = {name for names in kinds.values() for name in names}
    return {name: {kind for kind, names in kinds.items() if name in names} for name in type_names}


def block_of(ref: str) -> int:
    """Return the tokens in a block: `BLOCK_TOKENS`, or the block of a run if it is shorter."""
    if not (Path(ref) / SETTINGS).is_file():
        return BLOCK_TOKENS
    return min(BLOCK_TOKENS, int(open_run(ref).recipe.get("block", BLOCK_TOKENS)))


def states_of(ref: str, steps: Sequence[int] | None, revision: str | None) -> list[State]:
    """Return the states that a reference names; arguments and errors as for `open_subjects`."""
    if revision is not None and (Path(ref).exists() or ref in known_types()):
        raise CheckpointError(f"{ref}: only a Hub repository has revisions; leave out --revision")
    if not (Path(ref) / SETTINGS).is_file():
        if steps is not None:
            raise RunError(f"{ref}: only a training run has steps; leave out --steps")
        return [State(ref)]
    saved = dict(open_run(ref).checkpoints)
    if not saved:
        raise RunError(f"{ref}: no checkpoint has been saved yet")
    chosen_steps = [max(saved)] if steps is None else list(steps) or sorted(saved)
    missing = [step for step in chosen_steps if step not in saved]
    if missing:
        raise RunError(
            f"{ref}: no checkpoint at step {missing[0]}; saved are {', '.join(map(str, saved))}"
        )
    return [State(str(saved[step]), step) for step in chosen_steps]


def load_model(
    state: State,
    objective: ObjectiveName | None = None,
    vocabulary_size: int | None = None,
    seed: int = 0,
    revision: str | None = None,
) -> tuple[Any, ObjectiveName, tuple[str, ...]]:
    """Load a model in float32, with its objective and the tensors that its checkpoint lacks.

    By default it predicts what its architecture is made for. ``vocabulary_size`` is for a bare
    model type, which has no vocabulary of its own; ``seed`` is that of all weights drawn here.
    Errors as for `open_subjects`.
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
            options: dict[str, Any] = {"config": config, "attn_implementation": "eager"}
            if state.is_fresh:
                model = maker.from_config(**options, trust_remote_code=False)
                return model.eval(), objective, ()
            options |= {"revision": revision, "dtype": torch.float32}
            model, report = load_pretrained(maker, state.ref, **options)
        except FAILURES as error:
            raise CheckpointError(f"{state.ref}: cannot be loaded ({first_line(error)})") from error
    return model.eval(), objective, tuple(sorted(report["missing_keys"]))


def _config(ref: str, vocabulary_size: int | None, revision: str | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if ref in CONFIG_MAPPING and not Path(ref).exists():
        return CONFIG_MAPPING[ref](vocab_size=vocabulary_size)
    return AutoConfig.from_pretrained(ref, revision=revision, trust_remote_code=False)


def _objective(config: Any) -> ObjectiveName:
    """Return the objective of an architecture: by its name, or by the models of its type."""
    for predicts in map(predicted_by, config.architectures or ()):
        if predicts in ("masked", "causal"):
            return predicts
    can_be_masked = "masked" in known_types().get(config.model_type, ())
    return "masked" if can_be_masked and not getattr(config, "is_decoder", False) else "causal"


def _maker(config: Any, objective: ObjectiveName) -> str:
    """Return the name of the class that builds the model; the configuration gets the right mask."""
    kinds = known_types().get(config.model_type, set())
    kind = "causal" if objective == "causal" else "masked"
    if kind not in kinds:
        raise UnknownFamily(
            f"transformers has no {kind} language model of type {config.model_type!r}"
        )
    if "masked" in kinds:
        config.is_decoder = kind == "causal"
    return f"AutoModelFor{kind.capitalize()}LM"


def _doubt(model: Any, text: Text, state: State, revision: str | None) -> str:
    """Why the text may not be in the model's tokens; `CorpusError` if it is known not to be."""
    size = model.get_input_embeddings().num_embeddings
    wrong_vocabulary = CorpusError(
        f"{text.name}: uses another vocabulary ({text.vocabulary_size} entries) than {state.ref} "
        f"({size}); give a text in the model's own tokens"
    )
    if text.vocabulary_size > size:
        raise wrong_vocabulary
    if state.is_fresh:
        return ""
    model_vocabulary = vocabulary_of(state.ref, revision)
    if model_vocabulary is not None and text.vocabulary is not None:
        if any(model_vocabulary.get(entry) != number for entry, number in text.vocabulary.items()):
            raise wrong_vocabulary
        return ""
    if text.vocabulary is not None and text.vocabulary_size != size:
        raise wrong_vocabulary
    reason = (
        "the model has no tokenizer" if model_vocabulary is None else "the text is token ids alone"
    )
    return f"the text may not be in the model's own tokens: {reason}"


def _require_run(subject: Subject) -> None:
    """Check that the model can be run on a block, before minutes are spent on it."""
    import torch

    batch = {name: value[:1] for name, value in next(subject.batches()).items()}
    try:
        with quiet(), torch.no_grad():
            subject.model(**batch)
    except FAILURES as error:
        raise CheckpointError(
            f"{subject.name}: cannot be run on blocks of {subject.blocks.shape[-1]} tokens "
            f"({first_line(error)}); try a shorter --block"
        ) from error
