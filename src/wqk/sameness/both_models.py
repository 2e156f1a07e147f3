"""Open the two models of a comparison; one model may supply numbers of heads to the other."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.adapters import NotAnAdapter
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import KnownHeadCounts
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
        Numbers of heads, for a model without these numbers in its files; by default the numbers of
        the other model.
    base
        Base model of the model that is an adapter, instead of the base that the adapter names.

    Returns
    -------
    tuple
        The models, and notes on supplied numbers of heads.

    Raises
    ------
    CheckpointError, UnknownFamily
        A model cannot be opened, even with these numbers; the numbers contradict a model, or no
        model lacks them; or a base is set, and no model is an adapter.
    """
    if base is not None:
        openings = _with_base(openings, base)
    errors: list[Exception] = []
    opened = [_opened(opening, errors) for opening in openings]
    if heads is not None or key_heads is not None:
        opened = _with_supplied(opened, openings, heads, key_heads)
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
                if not complete.plans:
                    raise errors[0]  # a model without attention has no numbers of heads
                counts = _head_counts_of(complete)
            model = _opened_with(counts, opening, errors)
            config = model.checkpoint.config
            if heads is None and "model_type" in config and is_configured(config):
                raise errors[0]  # transformers would use a wrong default
            notes.append(counts.note(model))
        models.append(model)
    return models, notes


def _with_supplied(
    opened: Sequence[Model | None],
    openings: Sequence[dict[str, Any]],
    heads: int | None,
    key_heads: int | None,
) -> list[Model | None]:
    """Return opened models; models whose configuration lacks a supplied number have the number.

    Raises
    ------
    KnownHeadCounts
        Both models were opened, and no configuration lacks the number.
    CheckpointError
        The number does not fit the tensors.
    """
    models: list[Model | None] = []
    refusals: list[KnownHeadCounts] = []
    for model, opening in zip(opened, openings, strict=True):
        if model is not None:
            try:
                model = open_model(**opening, heads_per_layer=heads, key_heads=key_heads)
            except KnownHeadCounts as refusal:
                refusals.append(refusal)
        models.append(model)
    if len(refusals) == len(models):
        raise refusals[0]
    return models


class _SuppliedHeads(NamedTuple):
    """Numbers of heads, for a model without these numbers in its files.

    Attributes
    ----------
    heads
        Number of query heads.
    key_heads
        Number of key heads; None for the number of query heads.
    source
        Origin of the numbers, in words.
    """

    heads: int | None
    key_heads: int | None
    source: str

    def note(self, model: Model) -> str:
        """Return a note on a model that was read with these numbers."""
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
    """Open a model with numbers of heads; raise the first of ``errors`` if this also fails."""
    numbers = {"heads_per_layer": counts.heads, "key_heads": counts.key_heads}
    model = _opened(opening | numbers, [])
    if model is None:
        raise errors[0]
    return model


def _with_base(openings: Sequence[dict[str, Any]], base: Any) -> list[dict[str, Any]]:
    """Return the arguments of `wqk.open`, with the base model for each adapter among the models."""
    completed = []
    for opening in openings:
        if _is_adapter(opening, base):
            opening = opening | {"base": base}
        completed.append(opening)
    if not any("base" in opening for opening in completed):
        raise CheckpointError("neither of the two models is a LoRA adapter; leave out base=")
    return completed


def _is_adapter(opening: dict[str, Any], base: Any) -> bool:
    """Return whether the arguments of `wqk.open` open an adapter."""
    if not isinstance(opening["ref"], str | PathLike):
        return False
    access = {name: value for name, value in opening.items() if name != "family"}
    try:
        open_checkpoint(**access, base=base)
    except NotAnAdapter:
        return False
    return True


def _opened(opening: dict[str, Any], errors: list[Exception]) -> Model | None:
    """Open a model; on failure, return None and append the error to a list."""
    try:
        return open_model(**opening)
    except (CheckpointError, UnknownFamily) as error:
        errors.append(error)
        return None
