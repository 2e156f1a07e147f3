"""Open the two models of a comparison; one may lend its numbers of heads to the other."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.adapters import NotAnAdapter
from wqk.errors import CheckpointError, UnknownFamily
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.block_settings import is_configured
from wqk.sameness.transposed_weights import opened_transposed


def open_both(
    openings: Sequence[dict[str, Any]],
    heads: int | None,
    key_heads: int | None,
    base: Any | None = None,
) -> tuple[list[Model], list[str]]:
    """Open both models.

    Parameters
    ----------
    openings
        The arguments of `wqk.open` for the reference and for the candidate.
    heads, key_heads
        Numbers of heads of the model that does not contain its own; by default the other model's.
    base
        Base model of the adapter among the two, in place of the one that the adapter names.

    Returns
    -------
    tuple
        The models, and notes on numbers that one of them lacks.

    Raises
    ------
    CheckpointError, UnknownFamily
        A model cannot be opened, also with these numbers; or there is a base, and no adapter.
    """
    if base is not None:
        openings = _with_base(openings, base)
    errors: list[Exception] = []
    opened = [_opened(opening, errors) for opening in openings]
    complete = next((model for model in opened if model is not None), None)
    if complete is None and heads is None:
        raise errors[0]
    models: list[Model] = []
    notes: list[str] = []
    for number, (model, opening) in enumerate(zip(opened, openings, strict=True)):
        is_candidate = number == 1
        if model is None and is_candidate and complete is not None:
            model = opened_transposed(complete, opening)
        if model is None:
            counts = _SuppliedHeads(heads, key_heads, "as given")
            if heads is None and complete is not None:
                counts = _head_counts_of(complete)
            model = _opened_with(counts, opening, errors)
            config = model.checkpoint.config
            if heads is None and "model_type" in config and is_configured(config):
                raise errors[0]  # transformers would fill in a number, and it is the wrong one
            notes.append(counts.note(model))
        models.append(model)
    return models, notes


class _SuppliedHeads(NamedTuple):
    """Numbers of heads for a model that does not contain its own.

    Attributes
    ----------
    heads
        Number of query heads.
    key_heads
        Number of key heads; None for that of the query heads.
    source
        Where the numbers are from.
    """

    heads: int | None
    key_heads: int | None
    source: str

    def note(self, model: Model) -> str:
        """Return the note that a model was read with these numbers."""
        return f"{model.name} lacks its number of heads: {self.heads} query heads, {self.source}"


def _head_counts_of(model: Model) -> _SuppliedHeads:
    """Return the numbers of heads of a model's first block."""
    plan = model.plans[0]
    query_heads, key_heads = plan.query.heads, plan.key.heads
    differing_key_heads = None if key_heads == query_heads else key_heads
    return _SuppliedHeads(query_heads, differing_key_heads, f"as in {model.name}")


def _opened_with(
    counts: _SuppliedHeads, opening: dict[str, Any], errors: Sequence[Exception]
) -> Model:
    """Open a model with numbers of heads; raise the first of ``errors`` if that fails, too."""
    numbers = {"heads_per_layer": counts.heads, "key_heads": counts.key_heads}
    model = _opened(opening | numbers, [])
    if model is None:
        raise errors[0]
    return model


def _with_base(openings: Sequence[dict[str, Any]], base: Any) -> list[dict[str, Any]]:
    """Return the arguments of `wqk.open`, with the base model for each adapter among the two."""
    completed = []
    for opening in openings:
        if _is_adapter(opening, base):
            opening = opening | {"base": base}
        completed.append(opening)
    if not any("base" in opening for opening in completed):
        raise CheckpointError("neither of the two models is a LoRA adapter; leave out base=")
    return completed


def _is_adapter(opening: dict[str, Any], base: Any) -> bool:
    """Return whether a model, given by the arguments of `wqk.open`, is an adapter."""
    if not isinstance(opening["ref"], str | PathLike):
        return False
    access = {name: value for name, value in opening.items() if name != "family"}
    try:
        open_checkpoint(**access, base=base)
    except NotAnAdapter:
        return False
    return True


def _opened(opening: dict[str, Any], errors: list[Exception]) -> Model | None:
    """Open a model; None, and an error on the list, if that fails."""
    try:
        return open_model(**opening)
    except (CheckpointError, UnknownFamily) as error:
        errors.append(error)
        return None
