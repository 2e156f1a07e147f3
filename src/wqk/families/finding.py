"""The family of a checkpoint: by its model type, or guessed from its tensors' names."""

from __future__ import annotations

from msgspec.structs import replace

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.formats import refuse_mlx
from wqk.errors import CheckpointError, UnknownFamily, errors_about
from wqk.families.composites import compose_family
from wqk.families.config import Config
from wqk.families.family import Family, family_of_type
from wqk.families.inference import infer_family
from wqk.families.naming import prefixes


def find_family(checkpoint: Checkpoint, count_heads: bool = True) -> Family:
    """The family that knows the model type and its tensors' names, or a guessed one.

    Parameters
    ----------
    checkpoint
        Only its configuration and the names and shapes of its tensors are used.
    count_heads
        Whether the configuration has to tell a guess its numbers of heads.

    Raises
    ------
    UnknownFamily
        No family fits and none can be guessed, or the model's attention has no such form.
    """
    with errors_about(checkpoint.name):
        family = family_of_type(checkpoint.config.get("model_type"))
        if family and family.refusal:
            raise UnknownFamily(f"{family.name}: {family.refusal}")
        tensors = checkpoint.tensors()
        refuse_mlx(tensors)
        if family and any(prefixes(tensors, rule) for rule in family.attention):
            return (compose_family(checkpoint, family) or family) if family.with_parts else family
        composite = None if family else compose_family(checkpoint)
        if composite:
            return composite
        try:
            return infer_family(checkpoint, count_heads)
        except UnknownFamily:
            # The known family says best what its tensors should have been called.
            if family:
                return family
            raise


def with_head_counts(
    family: Family, checkpoint: Checkpoint, heads_per_layer: int | None, key_heads: int | None
) -> Family:
    """The family with these numbers of query and key heads where it does not know its own.

    A guess does not, nor does a family whose configuration leaves them out. Raises
    `CheckpointError` if a number is not needed.
    """
    given = {"heads_per_layer": heads_per_layer, "key_heads": key_heads}
    given = {key: number for key, number in given.items() if number is not None}
    rules = []
    for rule in family.attention if given else ():
        config = Config(checkpoint.config, rule.config, rule.defaults)
        if rule.guess or config.get(*rule.heads) is None:
            rule = replace(
                rule,
                heads=("heads_per_layer", *rule.heads),
                key_heads=("key_heads", *rule.key_heads),
                defaults=rule.defaults | given,
            )
        rules.append(rule)
    if given and rules == list(family.attention):
        key, number = next(iter(given.items()))
        raise CheckpointError(
            f"family {family.name} knows the number of heads; "
            f"{key.replace('_', ' ')} are only for one that does not, got {number}; leave it out"
        )
    return replace(family, attention=tuple(rules)) if given else family
