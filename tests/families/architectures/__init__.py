"""The models that prove the families: each a name, a class and a tiny configuration.

They are tables of the TOML files here. A table at any depth may be `like` others: the table has the
keys of the others, too. A key among its `none` is None.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from tests.families.inputs import MODEL_INPUTS as MODEL_INPUTS  # with those of rare models


@dataclass(frozen=True)
class Architecture:
    """A tiny random model of one kind.

    Attributes
    ----------
    name, model
        The test's, and the class in `transformers`.
    config
        Arguments of its configuration.
    blocks
        Number of applications of attention blocks that have to agree; or of each stack and kind.
    hub
        Keys of config.json as older files on the hub have them; None takes a key out.
    spelling
        Patterns and replacements that turn the saved names of tensors into those of older files.
    fed_by_norms
        Whether some queries or keys are projected from what a norm with a gain puts out; not where
        positions are added in between, or where norms come after attention.
    told
        For models that the proofs leave out: the lines about each attention that is verified.
    mixers
        Their layers without a softmax, by the kind.
    """

    name: str
    model: str
    config: dict[str, Any]
    blocks: int | dict[str, dict[str, int]] = 2
    hub: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    fed_by_norms: bool = True
    told: Sequence[str] = ()
    mixers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def block_count(self) -> int:
        if isinstance(self.blocks, int):
            return len(self.told) or self.blocks
        return sum(n for kinds in self.blocks.values() for n in kinds.values())


def whole(table: dict[str, Any]) -> dict[str, Any]:
    """A table with what it shares with others."""
    like, none = (table.get(key, "").split() for key in ("like", "none"))
    entries = {key: whole(v) if isinstance(v, dict) else v for key, v in table.items()}
    entries = {key: v for key, v in entries.items() if key not in ("like", "none")} | dict.fromkeys(
        none
    )
    return reduce(or_, (whole(SHARED[name]) for name in like), {}) | entries


def read(file: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))


PROOFS = ("paper", "language", "vision", "audio")
FILES = {name: read(name) for name in ("shared", *PROOFS, "beside")}
SHARED = reduce(or_, (tables.pop("shared") for tables in FILES.values()))
BERT, GROUPED, TOKENS = (whole(SHARED[name]) for name in ("bert", "grouped", "tokens"))


def named(*files: str) -> dict[str, Architecture]:
    rows = (row for file in files for row in FILES[file].items())
    return {name: Architecture(name, **whole(table)) for name, table in rows}


NAMED, FURTHER = named(*PROOFS), named("beside")
ALL = tuple(NAMED.values())
