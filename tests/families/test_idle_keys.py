"""Keys of recorded configurations, by the reason why no forward pass depends on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wqk.families.model_types import idle_reason

FOLDER = Path(__file__).parent
RECORDED = ("published.jsonl", "found.jsonl", "settings.jsonl")
# The reviewed list; `python tests/families/test_idle_keys.py` writes it.
LISTED = FOLDER / "idle-keys.json"
ACTIVE = "may change a forward pass"


def keys_of(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a configuration and of its nested parts."""
    for key, value in config.items():
        yield key
        if isinstance(value, dict) and key.endswith("_config"):
            yield from keys_of(value)


def model_types_by_key() -> dict[str, set[str]]:
    """Return, for every key of the recorded configurations, the model types that have it."""
    types: dict[str, set[str]] = {}
    for name in RECORDED:
        for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            config = row.get("config", row)
            for key in keys_of(config):
                types.setdefault(key, set()).add(config["model_type"])
    return types


def keys_by_reason() -> dict[str, list[str]]:
    """Return the keys that fall under each reason, and the active keys."""
    reasons: dict[str, list[str]] = {}
    for key in sorted(model_types_by_key()):
        reasons.setdefault(idle_reason(key) or ACTIVE, []).append(key)
    return dict(sorted(reasons.items()))


def test_every_key_falls_under_the_reason_that_was_reviewed() -> None:
    """A pattern that is too wide would hide settings from `same`; the list shows what it takes."""
    listed = json.loads(LISTED.read_text(encoding="utf-8"))
    reviewed = {key: reason for reason, keys in listed.items() for key in keys}
    types = model_types_by_key()
    moved = {
        f"{key} of {', '.join(sorted(types[key])[:3])}": (reviewed.get(key), reason)
        for reason, keys in keys_by_reason().items()
        for key in keys
        if reviewed.get(key) != reason
    }
    assert moved == {}
    assert reviewed.keys() == types.keys()


if __name__ == "__main__":
    LISTED.write_text(json.dumps(keys_by_reason(), indent=1) + "\n", encoding="utf-8")
