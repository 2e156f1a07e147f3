"""Runs that continue a finished run, with the same or another objective and mask.

Weights come from the parent. The optimizer, the warmup and the count of steps begin again; blocks
and masks continue after the last of the parent. The recipe contains the parent's recipe and corpus.
Therefore a recipe still determines all numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from wqk.errors import RunError
from wqk.tables.run import Run, open_run
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.recipe import MODEL_FIELDS, NO_START, Recipe, given_fields

# Fields on which the shapes of weights depend.
FIXED = (*MODEL_FIELDS, "preset", "config", "vocabulary_multiple", "block")


@dataclass(frozen=True)
class Parent:
    """A finished run that another run continues."""

    run: Run
    recipe: Recipe
    checkpoint: Path  #: Checkpoint after the last step.

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the files of its weights."""
        digest = hashlib.sha256()
        for path in sorted(self.checkpoint.glob("model*.safetensors")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def settings(self) -> dict[str, Any]:
        """Return folder, step and fingerprint of the parent, for the record of a run."""
        return {
            "folder": str(self.run.folder.resolve()),
            "step": self.recipe.steps,
            "fingerprint": self.fingerprint,
        }


def open_parent(folder: str | PathLike[str]) -> Parent:
    """Open the finished run in a folder; `RunError` if the run is absent or not finished."""
    run = open_run(folder)
    recipe = Recipe.from_json(run.recipe)
    checkpoint = dict(run.checkpoints).get(recipe.steps)
    if checkpoint is None:
        raise RunError(
            f"{folder}: only a finished run can be continued, and this one has no "
            f"checkpoint-{recipe.steps}; finish it with wqk lab train --resume -o {folder}"
        )
    return Parent(run, recipe, checkpoint)


def continued(before: Recipe, run: str, overrides: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a run that continues ``run``, from its last step.

    Omitted fields have the parent's values. An objective without a mode also sets the mode:
    ``masked`` sets full attention (encoder), ``causal`` and ``masked-next`` set a causal mask
    (decoder). If the mode is set, any combination is possible.

    Raises
    ------
    RunError
        A field is unknown, or does not fit the weights of the parent.

    Examples
    --------
    >>> from wqk_lab.training.recipe import make_recipe
    >>> decoder = make_recipe("fast", mode="decoder", steps=100)
    >>> whole = continued(decoder, "decoder-1", {"objective": "masked"})
    >>> lifted = continued(decoder, "decoder-1", {"mode": "encoder"})
    >>> [(recipe.objective, recipe.mode) for recipe in (whole, lifted)]
    [('masked', 'encoder'), ('causal', 'encoder')]
    >>> whole.parent["step"], whole.batches_before
    (100, 100)
    """
    chosen = given_fields(overrides)
    changed = [
        f"{name}: {getattr(before, name)} → {chosen[name]}"
        for name in FIXED
        if name in chosen and chosen[name] != getattr(before, name)
    ]
    if changed:
        raise RunError(
            f"a run that continues {run} has its model and preset; leave out {'; '.join(changed)}"
        )
    if "objective" in chosen:
        chosen.setdefault("mode", "encoder" if chosen["objective"] == "masked" else "decoder")
    parent = {"run": run, "step": before.steps, "recipe": before.to_json()}
    return replace(before, **{**NO_START, **chosen, "parent": parent})


def require_same_tokenizer(parent: Parent, store: TokenStore) -> None:
    """Raise `RunError` if a corpus has another tokenizer than the parent was trained with."""
    tokenizer = parent.checkpoint / "tokenizer.json"
    if not tokenizer.is_file() or tokenizer.read_bytes() != store.tokenizer.read_bytes():
        raise RunError(
            f"{store.folder}: its tokenizer is not that of {parent.run.folder}, whose weights are "
            "continued; build the corpus with that run's vocabulary, or continue on its own corpus"
        )
