"""From a model's name and a text to subjects that the statements can be tested on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk.attention.verification.running import quiet
from wqk.errors import CheckpointError, CorpusError, first_line
from wqk.theory.models import FAILURES, State, known_types, load_model, states_of
from wqk.theory.subject import Subject
from wqk.theory.text import Text, open_text, vocabulary_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wqk.theory.subject import Objective


def open_subjects(
    ref: str,
    corpus: str | Path,
    *,
    steps: Sequence[int] | None = None,
    batches: int = 8,
    batch: int = 8,
    block: int = 64,
    objective: Objective | None = None,
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
        Number of batches, blocks in each, and tokens in a block. All states see the same ones.
    objective
        ``masked``, ``each`` or ``causal``; by the model's architecture otherwise.
    mask_share
        Fraction of tokens that are masked.
    seed
        Of blocks, masks and freshly drawn weights.
    revision
        Of a Hub repository.

    Raises
    ------
    CorpusError
        The text cannot be read, or is not in the model's vocabulary.
    CheckpointError
        The model cannot be loaded, or not be run on such blocks.
    RunError
        The run has no such step.
    UnknownFamily
        It is no language model.
    MissingPackage
        PyTorch or `transformers` is not installed.
    """
    known_types()  # reports a missing package before anything is read
    states = states_of(ref, steps, revision)
    text = open_text(Path(corpus), states[0].ref, revision)
    blocks = text.blocks(batches, batch, block, seed)

    def subjects() -> Iterator[Subject]:
        for state in states:
            size = text.vocabulary_size
            model, predicts, missing = load_model(
                state, objective, vocabulary_size=size, seed=seed, revision=revision
            )
            mask = None if predicts == "causal" else text.mask_token
            caveat = _doubt(model, text, state, revision)
            name, drawn = _name(state), (mask_share, seed)
            subject = Subject(
                name, model, predicts, blocks, mask, *drawn, state.step, missing, caveat
            )
            _require_run(subject)
            yield subject

    return text, subjects()


def _name(state: State) -> str:
    """The run's name for a step of it, the folder's or the whole id otherwise."""
    path = Path(state.ref)
    if state.step is not None:
        return path.parent.resolve().name
    return path.resolve().name if path.is_dir() else state.ref


def _doubt(model: Any, text: Text, state: State, revision: str | None) -> str:
    """Why the text may not be in the model's tokens; an error where it is not."""
    size = model.get_input_embeddings().num_embeddings
    foreign = CorpusError(
        f"{text.name}: uses another vocabulary ({text.vocabulary_size} entries) than {state.ref} "
        f"({size}); give a text in the model's own tokens"
    )
    if text.vocabulary_size > size:
        raise foreign
    if state.is_fresh:
        return ""
    own = vocabulary_of(state.ref, revision)
    if own is not None and text.vocabulary is not None:
        if any(own.get(entry) != number for entry, number in text.vocabulary.items()):
            raise foreign
        return ""
    if text.vocabulary is not None and text.vocabulary_size != size:
        raise foreign
    reason = "the model has no tokenizer" if own is None else "the text is token ids alone"
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
