"""Plan a block again with settings of the reference: the fewest settings that restore its plan.

Before the repair of a setting is reported, the setting is applied and the model is planned again.
The *attention configuration* of a plan is the part of the configuration that describes its
attention: the whole configuration, or a nested part such as ``text_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from wqk.checkpoints.checkpoint import Overlay
from wqk.errors import WqkError
from wqk.families import AttentionPlan
from wqk.families.model_types import keys_of
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.circuits import PlanPair
from wqk.sameness.mismatches import Mismatch
from wqk.sameness.repairs import Setting

# A differing setting, and the candidate's plan once it is repaired.
RepairedPlan = tuple[Mismatch, AttentionPlan]


class RestoringSettings(NamedTuple):
    """Settings that make a plan agree with the reference's plan.

    Attributes
    ----------
    keys
        Keys of the settings.
    steps
        Changes of the candidate's configuration.
    plan
        The candidate's plan after these changes.
    """

    keys: Sequence[str]
    steps: list[Setting]
    plan: AttentionPlan


def fewest_settings(
    keys: Sequence[str], restore: Callable[[Sequence[str]], RestoringSettings | None]
) -> RestoringSettings | None:
    """Return the fewest settings that restore a plan; None if all settings do not suffice.

    Parameters
    ----------
    keys
        The keys of the settings. A key is left out if the remaining keys suffice.
    restore
        Function that returns the plan with the settings of some keys; None if this plan is not the
        expected plan.
    """
    fewest = restore(keys)
    if fewest is None:
        return None
    for key in keys:
        fewer_keys = [kept for kept in fewest.keys if kept != key]
        fewest = restore(fewer_keys) or fewest
    return fewest


# Settings that a candidate of another model type needs in addition.
OF_TYPE = ("model_type", "architectures")


def find_restoring_settings(
    models: Sequence[Model], pair: PlanPair, view: Callable[[AttentionPlan], Any]
) -> RestoringSettings | None:
    """Return the fewest of the reference's settings that make ``view`` of both plans equal.

    If the candidate's model type does not use a setting, the candidate needs the reference's type,
    too.

    Parameters
    ----------
    models, pair
        The two models, and the plans of the two blocks.
    view
        Function that returns the compared part of a plan.

    Returns
    -------
    RestoringSettings or None
        None if no settings suffice, or if the attention configurations have different paths.
    """
    reference, candidate = pair
    if reference.rule.config != candidate.rule.config:
        return None
    for type_keys in ((), OF_TYPE):
        trial = _SettingsTrial(models, pair, view, type_keys)
        restoring = fewest_settings(trial.differing_keys, trial.restore)
        if restoring is not None:
            return restoring
    return None


class _SettingsTrial:
    """A trial of the reference's settings in the candidate's configuration.

    Parameters
    ----------
    models, pair, view
        As for `find_restoring_settings`.
    type_keys
        Settings of the model type that the candidate always takes from the reference.
    """

    def __init__(
        self,
        models: Sequence[Model],
        pair: PlanPair,
        view: Callable[[AttentionPlan], Any],
        type_keys: Sequence[str],
    ) -> None:
        self._reference_plan, self._candidate_plan = pair
        self._candidate = models[1]
        self._view = view
        self._expected, self._actual = attention_configs(models, pair)
        reference_config, candidate_config = (model.checkpoint.config for model in models)
        type_settings = {key: reference_config.get(key) for key in type_keys}
        self._whole = {**candidate_config, **type_settings}
        self._type_steps = [Setting((key,), value) for key, value in type_settings.items()]

    @property
    def differing_keys(self) -> list[str]:
        """Keys of the differing settings that plans read."""
        read = {*keys_of(self._reference_plan.rule), "pruned_heads"}
        return [
            key
            for key in self._expected | self._actual
            if key in read and self._expected.get(key) != self._actual.get(key)
        ]

    def restore(self, keys: Sequence[str]) -> RestoringSettings | None:
        """Plan the candidate with some settings of the reference.

        None if the new plan still differs from the reference's.
        """
        config = {key: value for key, value in self._actual.items() if key not in keys}
        config |= {key: self._expected[key] for key in keys if key in self._expected}
        plan = replanned(self._candidate, self._candidate_plan, config, self._whole)
        if plan is None or self._view(plan) != self._view(self._reference_plan):
            return None
        prefix = config_path(self._candidate_plan)
        steps = [
            Setting((*prefix, key), self._expected.get(key), removed=key not in self._expected)
            for key in keys
        ]
        return RestoringSettings(keys, [*self._type_steps, *steps], plan)


def attention_configs(models: Sequence[Model], pair: PlanPair) -> list[dict[str, Any]]:
    """Return the attention configuration of each of two blocks."""
    return [attention_config(model, plan) for model, plan in zip(models, pair, strict=True)]


def attention_config(model: Model, plan: AttentionPlan) -> dict[str, Any]:
    """Return the part of a model's configuration that describes the attention of a plan."""
    config = model.checkpoint.config
    if not plan.rule.config:
        return dict(config)
    return dict(config.get(plan.rule.config) or {})


def config_path(plan: AttentionPlan) -> tuple[str, ...]:
    """Return the keys that lead to a plan's attention configuration; empty for the whole."""
    return (plan.rule.config,) if plan.rule.config else ()


def replanned(
    model: Model,
    plan: AttentionPlan,
    own_config: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
) -> AttentionPlan | None:
    """Plan a block again with another configuration; None if the configuration is invalid.

    Parameters
    ----------
    model, plan
        The model, and the present plan of the block.
    own_config
        The new attention configuration.
    whole
        The configuration around the attention configuration; the model's own by default.
    """
    config = dict(model.checkpoint.config if whole is None else whole)
    if plan.rule.config:
        config[plan.rule.config] = own_config
    else:
        type_settings = {key: config[key] for key in OF_TYPE if key in config}
        config = {**own_config, **type_settings}
    checkpoint = Overlay(model.checkpoint, {}, config)
    try:
        new_plans = open_model(checkpoint, family=model.family_file).plans
    except WqkError:
        return None
    return next((new_plan for new_plan in new_plans if new_plan.place == plan.place), None)
