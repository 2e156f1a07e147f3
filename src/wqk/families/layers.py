"""The numbers of a model's layers, and whether any is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.family import AttentionRule
    from wqk.families.naming import Match


def complete_layers(
    found: list[Match], config: Config, rule: AttentionRule
) -> list[tuple[int, Match]]:
    """The layers with their numbers, after a look that none is missing.

    Layers beyond the configured number, such as heads for multi-token prediction, are not the
    model's and are left out, as loading the model leaves them out.
    """
    single = len(found[0].index) == 1
    numbered = [(f.index[0] if single else i, f) for i, f in enumerate(found)]
    depths = config.get(*rule.counts.layers)
    if isinstance(depths, list):
        _require_stages(found, config, rule, len(depths))
        return numbered
    count = config.optional_whole(rule.counts.layers)
    if not rule.counts.every_layer or not single:
        return numbered
    numbered = numbered if count is None else [pair for pair in numbered if pair[0] < count]
    count = count or len(numbered)
    missing = sorted(set(range(count)) - {number for number, _ in numbered})
    if missing:
        raise CheckpointError(
            f"{config.name}: incomplete, the {rule.stack} has {count} layers and layer "
            f"{missing[0]} has no query weights"
        )
    return numbered


def _require_stages(found: list[Match], config: Config, rule: AttentionRule, stages: int) -> None:
    """See that no layer of any stage is missing; the configuration lists the stages' depths."""
    there = {match.index for match in found}
    for stage in range(stages):
        for block in range(config.whole(rule.counts.layers, stage)):
            if (stage, block) not in there:
                count = config.whole(rule.counts.layers, stage)
                raise CheckpointError(
                    f"{config.name}: incomplete, stage {stage} of the {rule.stack} has {count} "
                    f"layers and layer {block} has no query weights"
                )
