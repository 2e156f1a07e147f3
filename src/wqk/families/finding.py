"""Find the family of a checkpoint: a known family, families of the parts, or a guess."""

from __future__ import annotations

from msgspec.structs import replace

from wqk.checkpoints import Checkpoint
from wqk.errors import CheckpointError, UnknownFamily, errors_about
from wqk.families.composites import compose_family
from wqk.families.config import Config
from wqk.families.family import family_of_type
from wqk.families.guessing import infer_family
from wqk.families.rules import Family
from wqk.families.spellings import prefixes


class KnownHeadCounts(CheckpointError):
    """A number of heads was set for a checkpoint whose configuration contains the number."""


def find_family(checkpoint: Checkpoint, count_heads: bool = True) -> Family:
    """Return the family that lists the model type and matches its tensors, or a guessed family.

    Parameters
    ----------
    checkpoint
        Only its configuration and the names and shapes of its tensors are used.
    count_heads
        Whether a guess takes its numbers of heads from the configuration.

    Raises
    ------
    UnknownFamily
        No family fits and no family can be guessed, or the model's attention has no form.
    """
    with errors_about(checkpoint.name):
        family = family_of_type(checkpoint.config.get("model_type"))
        if family is None:
            composite = compose_family(checkpoint)
            return composite or infer_family(checkpoint, count_heads)
        if family.refusal:
            raise UnknownFamily(f"{family.name}: {family.refusal}")
        tensors = checkpoint.tensors()
        if any(prefixes(tensors, rule) for rule in family.attention):
            composite = compose_family(checkpoint, family) if family.with_parts else None
            return composite or family
        try:
            return infer_family(checkpoint, count_heads)
        except UnknownFamily:
            # The error of the known family shows the expected names of tensors.
            return family


def with_head_counts(
    family: Family, checkpoint: Checkpoint, heads_per_layer: int | None, key_heads: int | None
) -> Family:
    """Return the family with numbers of heads added to rules that lack these numbers.

    A guessed family lacks these numbers, and also a family whose configuration omits them.

    Parameters
    ----------
    family, checkpoint
        The family of the checkpoint.
    heads_per_layer, key_heads
        Numbers of query and key heads; None if they are not set.

    Raises
    ------
    KnownHeadCounts
        A number is set, but the configuration contains the number.
    """
    options = {"heads_per_layer": heads_per_layer, "key_heads": key_heads}
    numbers = {key: number for key, number in options.items() if number is not None}
    if not numbers:
        return family
    rules = []
    for rule in family.attention:
        config = Config(checkpoint.config, rule.config, rule.defaults, rule.model_type)
        names = {"heads_per_layer": rule.heads, "key_heads": rule.key_heads}
        lacks_heads = rule.guess or config.in_file(*rule.heads) is None
        lacks_key_heads = bool(rule.key_heads) and config.in_file(*rule.key_heads) is None
        used = {}
        if lacks_heads:
            used = numbers
        elif lacks_key_heads and key_heads is not None:
            used = {"key_heads": key_heads}
        if used:
            # The rule's other settings, such as sections, use the numbers by the rule's names.
            numbers_by_name: dict[str, int] = {}
            for key, number in used.items():
                numbers_by_name |= dict.fromkeys((key, *names[key]), number)
            rule = replace(
                rule,
                heads=("heads_per_layer", *rule.heads) if lacks_heads else rule.heads,
                key_heads=("key_heads", *rule.key_heads),
                defaults=rule.defaults | numbers_by_name,
            )
        rules.append(rule)
    if rules == list(family.attention):
        key, number = next(iter(numbers.items()))
        raise KnownHeadCounts(
            f"family {family.name} knows the number of heads; "
            f"{key.replace('_', ' ')} are only for one that does not; expected none, got {number}; "
            "leave it out"
        )
    return replace(family, attention=tuple(rules))
