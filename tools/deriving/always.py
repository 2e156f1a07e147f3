"""Tensors that models of a type always have, though other types of their family lack them.

python -m tools.deriving.always
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wqk.families
from wqk.errors import WqkError
from wqk.families import families, find_family, plan_attention
from wqk.families.planner import OPTIONAL_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wqk.checkpoints import Checkpoint

FILE = Path(wqk.families.__file__).parent / "always.toml"
HEAD = (
    "# Written by tools/deriving/always.py: by model type, roles of tensors that every model of the"
    "\n# type has. A file without them is incomplete.\n"
)
# Settings by which models of one type have such norms or not.
SWITCH = re.compile(r"q_?k_?(layer_?)?norms?|swin_norm|use_.*norm|qk_|sink")


def always_had(checkpoint: Checkpoint) -> list[str]:
    """Return the roles that all attention of a default model of a type has.

    Empty if a setting of the type decides, or if the model is of several families.
    """
    if any(map(SWITCH.search, _keys(checkpoint.config))):
        return []
    family = find_family(checkpoint)
    if family.name not in families() or family.with_parts:
        return []
    plans = plan_attention(checkpoint, family)
    return [
        role
        for role, is_there in OPTIONAL_ROLES.items()
        if plans and all(getattr(plan.rule, role) and is_there(plan) for plan in plans)
    ]


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)


def default_models() -> Iterator[tuple[str, Any]]:
    """Yield every model type of the shipped families with a small model of its defaults."""
    from tools.deriving.building import build
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    listed = {kind for family in families().values() for kind in family.model_types}
    for kind in sorted(listed & set(CONFIG_MAPPING_NAMES)):
        try:
            yield kind, build(kind, 0)[0]
        except RuntimeError:
            continue


def text_of(roles_by_type: Mapping[str, list[str]]) -> str:
    """Return the file's text."""
    lines = (f"{json.dumps(kind)} = {json.dumps(roles_by_type[kind])}" for kind in roles_by_type)
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write the file."""
    roles_by_type: dict[str, list[str]] = {}
    for kind, model in default_models():
        try:
            roles = always_had(wqk.open(model).checkpoint)
        except WqkError:
            continue
        if roles:
            roles_by_type[kind] = roles
    FILE.write_text(text_of(roles_by_type), encoding="utf-8")


if __name__ == "__main__":
    main()
