"""Open the two models of a comparison; one may lend its numbers of heads to the other."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.adapters import NotAnAdapter
from wqk.errors import CheckpointError, UnknownFamily
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.configured import is_configured
from wqk.sameness.turned_weights import opened_turned


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
    models = [_opened(opening, errors) for opening in openings]
    known = next((model for model in models if model is not None), None)
    if known is None and heads is None:
        raise errors[0]
    notes: list[str] = []
    for number, opening in enumerate(openings):
        if models[number] is not None:
            continue
        turned = opened_turned(known, opening) if number == 1 and known is not None else None
        if turned is not None:
            models[number] = turned
            continue
        counts, source = (heads, key_heads), "as given"
        if heads is None and known is not None:
            plan, source = known.plans[0], f"as in {known.name}"
            counts = plan.query.heads, plan.key.heads
            if counts[0] == counts[1]:
                counts = counts[0], None
        numbers = {"heads_per_layer": counts[0], "key_heads": counts[1]}
        model = _opened(opening | numbers, errors)
        if model is None:
            raise errors[0]
        config = model.checkpoint.config
        if heads is None and "model_type" in config and is_configured(config):
            raise errors[0]  # transformers would fill in a number, and it is the wrong one
        models[number] = model
        notes.append(f"{model.name} lacks its number of heads: {counts[0]} query heads, {source}")
    return [model for model in models if model is not None], notes


def _with_base(openings: Sequence[dict[str, Any]], base: Any) -> list[dict[str, Any]]:
    """Return the arguments of `wqk.open`, with the base model for each adapter among the two."""
    completed = []
    for opening in openings:
        completed.append(opening | {"base": base} if _is_adapter(opening, base) else opening)
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
