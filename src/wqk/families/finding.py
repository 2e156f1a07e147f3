"""The family of a checkpoint: by its model type, or guessed from its tensors' names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.errors import UnknownFamily, concerning
from wqk.families.composites import compose_family
from wqk.families.family import Family, family_of_type
from wqk.families.inference import infer_family
from wqk.families.naming import prefixes

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint


def find_family(
    checkpoint: Checkpoint, heads_per_layer: int | None = None, key_heads: int | None = None
) -> Family:
    """The family that knows the model type and its tensors' names, or a guessed one.

    Parameters
    ----------
    checkpoint
        Only its configuration and the names and shapes of its tensors are used.
    heads_per_layer, key_heads
        Numbers of query and key heads, for a guess; a known family takes them from the
        configuration.

    Raises
    ------
    UnknownFamily
        No family fits and none can be guessed, or the model's attention has no such form.
    """
    with concerning(checkpoint.name):
        family = family_of_type(checkpoint.config.get("model_type"))
        if family and family.refusal:
            raise UnknownFamily(f"{checkpoint.name}: {family.name}: {family.refusal}")
        tensors = checkpoint.tensors()
        if family and any(prefixes(tensors, rule) for rule in family.attention):
            return (compose_family(checkpoint, family) or family) if family.with_parts else family
        composite = None if family else compose_family(checkpoint)
        if composite:
            return composite
        try:
            return infer_family(checkpoint, heads_per_layer, key_heads)
        except UnknownFamily:
            # The known family says best what its tensors should have been called.
            if family:
                return family
            raise
