"""Subjects for testing the statements, from a model's name and a text.

Code of a repository is never run: a model that needs such code raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from wqk.checkpoints import open_checkpoint
from wqk.errors import (
    CheckpointError,
    CorpusError,
    RunError,
    UnknownFamily,
    WqkError,
    demo_advice,
    first_line,
    required_by,
)
from wqk.families.plans import part_names
from wqk.live.held_out import predicted_by
from wqk.live.running import learned_positions, load_pretrained, most_positions, quiet
from wqk.model import open as open_model
from wqk.tables.run import SETTINGS, open_run
from wqk_lab.theory.subject import NO_MASK, ObjectiveName, Subject
from wqk_lab.theory.text import FAILURES, Corpus, Text, name_of, open_text, vocabulary_of
from wqk_lab.training.corpus.reading import is_readable

# Tokens in a block, by default.
BLOCK_TOKENS = 64
# Fewest tokens in a block.
FEWEST_TOKENS = 4
# Entries of a vocabulary, where the number does not matter.
ANY_SIZE = 1000

Checked = TypeVar("Checked")


def open_subjects(
    ref: str,
    corpus: Corpus,
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
    """Open a text, and a model to run on the text: one state, or several steps of a run.

    Parameters
    ----------
    ref
        A checkpoint's folder or Hub id; a training run's folder; or, for freshly drawn weights, a
        ``config.json`` or a model type such as ``bert``.
    corpus
        A token store, a text file for the model's tokenizer, or token ids: an .npy file, an array
        or a tensor, (N,), or (B, N) as from ``model.generate``, with a document in each row.
    steps
        Steps of a run; empty for all saved steps, None for the last step.
    batches, batch, block
        Number of batches, blocks in each batch, and tokens in a block: by default `BLOCK_TOKENS`,
        or the shorter block of a run, or the number of positions of the model. All states get the
        same batches.
    objective
        ``masked``, ``each`` or ``causal``; by default, from the model's architecture.
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
        The model cannot be loaded, or cannot be run on these blocks.
    RunError
        The run lacks a chosen step.
    UnknownFamily
        The model is not a language model.
    MissingPackage
        PyTorch or `transformers` is not installed.
    """
    known_types()  # reports a missing package before anything is read
    states = states_of(ref, steps, revision)
    outline = _outline(states[0], objective, revision)
    length, shortened = _block_length(ref, block, outline)
    problems = _Problems()
    problems.collect(lambda: _require_positions(length, states[0], outline))
    text = problems.collect(lambda: open_text(corpus, states[0].ref, revision))
    blocks = None
    if text is None:
        problems.collect(lambda: _require_tokenizer(corpus, states[0], outline, revision))
    else:
        problems.collect(lambda: _require_vocabulary(text, states[0], outline, revision))
        problems.collect(lambda: _require_mask(text, outline))
        blocks = problems.collect(lambda: text.blocks(batches, batch, length, seed))
    problems.report(states[0], name_of(corpus))
    assert text is not None
    assert blocks is not None

    def subjects() -> Iterator[Subject]:
        for state in states:
            size = text.vocabulary_size
            model, predicts, missing = load_model(state, objective, size, seed, revision)
            mask = None if predicts == "causal" else text.mask_token
            vocabulary_size = model.get_input_embeddings().num_embeddings
            caveat = _doubt(vocabulary_size, text, state, revision)
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
                shortened=shortened,
                is_fresh=state.is_fresh,
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
        """True for a configuration file, or a model type without a folder: without weights."""
        path = Path(self.ref)
        return path.suffix == ".json" or (self.ref in known_types() and not path.exists())

    @property
    def name(self) -> str:
        """Name of the run for one of its steps; else the name of the folder, or the whole id."""
        path = Path(self.ref)
        if self.step is not None:
            return path.parent.resolve().name
        return path.resolve().name if path.is_dir() else self.ref


@dataclass(frozen=True)
class _Outline:
    """Facts about a model from its configuration; None if unknown.

    Attributes
    ----------
    objective
        Objective of the model.
    vocabulary_size
        Number of rows of the table of embeddings; None also for a bare model type.
    positions, learned_positions
        Number of positions of the model; and number of rows of its table of positions, if any.
    """

    objective: ObjectiveName | None = None
    vocabulary_size: int | None = None
    positions: int | None = None
    learned_positions: int | None = None


def _outline(state: State, objective: ObjectiveName | None, revision: str | None) -> _Outline:
    """Read a model's configuration, and create the model without weights."""
    import torch
    import transformers

    is_bare = state.ref in known_types() and not Path(state.ref).exists()
    try:
        with quiet(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            config = _config(state.ref, ANY_SIZE if is_bare else None, revision)
            objective = objective or _objective(config)
            maker = getattr(transformers, _maker(config, objective))
            model = maker.from_config(config, trust_remote_code=False)
            size = model.get_input_embeddings().num_embeddings
            return _Outline(
                objective=objective,
                vocabulary_size=None if is_bare else size,
                positions=most_positions(model),
                learned_positions=learned_positions(model),
            )
    except (*FAILURES, WqkError):  # `load_model` raises a clearer error
        return _Outline()


def _block_length(ref: str, block: int | None, outline: _Outline) -> tuple[int, str]:
    """Return the tokens in a block, and the reason if they are fewer than by default."""
    if block is not None:
        return block, ""
    length, positions = block_of(ref), outline.positions
    if positions is None or not FEWEST_TOKENS <= positions < length:
        return length, ""
    reason = f"blocks of {positions} tokens instead of {length}, the model has no more positions"
    return positions, reason


def _require_positions(length: int, state: State, outline: _Outline) -> None:
    rows = outline.learned_positions
    if rows is not None and length > rows:
        raise CheckpointError(
            f"{state.name}: --block {length}: the model has {rows} positions; take {rows} or less"
        )


def _require_vocabulary(text: Text, state: State, outline: _Outline, revision: str | None) -> None:
    if outline.vocabulary_size is not None:
        _doubt(outline.vocabulary_size, text, state, revision)


def _require_tokenizer(
    corpus: Corpus, state: State, outline: _Outline, revision: str | None
) -> None:
    """Raise an error with the size of the vocabulary if a text needs a missing tokenizer.

    The error complements the error of `open_text`. Without a mask token, token ids only allow the
    prediction of the next token.
    """
    size = outline.vocabulary_size
    if size is None or not isinstance(corpus, str | PathLike):
        return
    if not Path(corpus).is_file() or not is_readable(Path(corpus)):
        return
    if vocabulary_of(state.ref, revision) is None:
        ids = ", or give token ids: corpus=IDS.npy"
        advice = ids if outline.objective == "causal" else ""
        raise CorpusError(f"the model's vocabulary has {size} entries{advice}")


def _require_mask(text: Text, outline: _Outline) -> None:
    if outline.objective in ("masked", "each") and text.mask_token is None:
        raise CorpusError(NO_MASK)


class _Problems:
    """Errors of several checks, to be reported together."""

    def __init__(self) -> None:
        self.errors: list[WqkError] = []

    def collect(self, check: Callable[[], Checked]) -> Checked | None:
        """Return the result of a check; if it raises an error, store the error and return None."""
        try:
            return check()
        except (CheckpointError, CorpusError) as error:
            self.errors.append(error)
            return None

    def report(self, state: State, corpus: str) -> None:
        """Raise all errors as one, after the checkpoint's missing weights."""
        if not self.errors:
            return
        # The message begins with the name of the model, and has no room to repeat the name.
        problems = [
            str(error).removeprefix(f"{state.ref}: ").removeprefix(f"{state.name}: ")
            for error in self.errors
        ]
        lack = _lack_of_weights(state)
        if len(self.errors) == 1 and not lack:
            raise self.errors[0]
        if lack:  # first, because no other text would help
            problems.insert(0, lack)
        numbered = [f"({number}) {problem}" for number, problem in enumerate(problems, start=1)]
        message = f"{state.name} on {corpus}: {'; '.join(numbered)}"
        raise type(self.errors[0])(message) from None


def _lack_of_weights(state: State) -> str:
    """Describe a checkpoint with only queries and keys; empty for others. Reads no weights."""
    if state.is_fresh or not Path(state.ref).exists():  # a Hub repository is not fetched for this
        return ""
    try:
        model = open_model(state.ref)
    except WqkError:
        return ""
    if {*model.checkpoint.tensors()} - part_names(model.plans):
        return ""
    return (
        f"most statements need more than the checkpoint's queries and keys{demo_advice(state.ref)}"
    )


def known_types() -> dict[str, set[str]]:
    """Return the objectives of each type of language model: masked, causal or both.

    `MissingPackage` without PyTorch or `transformers`.
    """
    with required_by("testing the theory"):
        import torch  # noqa: F401
        from transformers.models.auto import modeling_auto as auto
    type_names_by_objective = {
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    objectives_by_type: dict[str, set[str]] = {}
    for objective, type_names in type_names_by_objective.items():
        for type_name in type_names:
            objectives_by_type.setdefault(type_name, set()).add(objective)
    return objectives_by_type


def block_of(ref: str) -> int:
    """Return the tokens in a block: `BLOCK_TOKENS`, or the block of a run if shorter."""
    if not (Path(ref) / SETTINGS).is_file():
        return BLOCK_TOKENS
    return min(BLOCK_TOKENS, int(open_run(ref).recipe.get("block", BLOCK_TOKENS)))


def states_of(ref: str, steps: Sequence[int] | None, revision: str | None) -> list[State]:
    """Return the states of a reference; arguments and errors as for `open_subjects`."""
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
    """Load a model in float32, with the objective and the checkpoint's missing tensors.

    By default, the objective follows from the architecture. ``vocabulary_size`` is for a model type
    without a configuration, which has no vocabulary; ``seed`` is the seed of all weights drawn
    here. Errors as for `open_subjects`.
    """
    import torch
    import transformers

    if not state.is_fresh:
        open_checkpoint(state.ref, revision)  # clearer errors than from transformers
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
    """Return the objective of an architecture, from its name or from models of its type."""
    for predicts in map(predicted_by, config.architectures or ()):
        if predicts in ("masked", "causal"):
            return predicts
    can_be_masked = "masked" in known_types().get(config.model_type, ())
    is_decoder = getattr(config, "is_decoder", False)
    return "masked" if can_be_masked and not is_decoder else "causal"


def _maker(config: Any, objective: ObjectiveName) -> str:
    """Return the name of the model's class; the configuration gets the right mask."""
    kinds = known_types().get(config.model_type, set())
    kind = "causal" if objective == "causal" else "masked"
    if kind not in kinds:
        raise UnknownFamily(
            f"transformers has no {kind} language model of type {config.model_type!r}"
        )
    if "masked" in kinds:
        config.is_decoder = kind == "causal"
    return f"AutoModelFor{kind.capitalize()}LM"


def _doubt(size: int, text: Text, state: State, revision: str | None) -> str:
    """Return the reason why the text may not be in the model's tokens; `CorpusError` if it is not.

    ``size`` is the number of entries of the model's table of embeddings.
    """
    wrong_vocabulary = CorpusError(
        f"{text.name}: uses another vocabulary ({text.vocabulary_size} entries) than {state.ref} "
        f"({size}); give a text in the model's own tokens, such as a store made with the model's "
        "tokenizer: wqk lab corpus FILE --tokenizer FILE|ID -o STORE"
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
    reason = "the text is token ids alone"
    if model_vocabulary is None:
        reason = "the model has no tokenizer"
    return f"the text may not be in the model's own tokens: {reason}"


def _require_run(subject: Subject) -> None:
    """Check that the model can be run on a block, before a long computation."""
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
