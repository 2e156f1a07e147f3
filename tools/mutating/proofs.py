"""The proofs of a family, on models that are built and run once for all of its mutants."""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


def proofs_of(name: str, folder: Path) -> list[Callable[[], None]]:
    """The tests of `test_every_family.py`, `test_proofs.py`, and of settings, about a family.

    Into the folder go the models that they run; a record that is there already is not made again.
    """
    from tests.families import test_every_family, test_proofs
    from tests.families.architectures import ALL
    from tests.families.proving import save
    from tools.deriving.configured import tiny_file
    from tools.deriving.probing import record_type

    from wqk.checkpoints import open_checkpoint
    from wqk.families.family import families

    def built_once(model_type: str, _: Path) -> Any:
        return _record(model_type, folder), open_checkpoint(folder / model_type)

    proofs: list[Callable[[], None]] = []
    if model_type := test_every_family.quickest().get(name):
        _record(model_type, folder)
        test_every_family.recorded = built_once

        def proven() -> None:
            test_every_family.test_the_family_is_what_the_model_computes(name, folder)

        proofs.append(proven)
    for model_type in test_every_family.OTHER_IN_MEMORY:
        if model_type in families()[name].model_types:
            in_memory = folder / "in-memory" / model_type
            proofs.append(
                partial(test_every_family.test_what_runs_is_read_as_its_file, model_type, in_memory)
            )
    every = [
        test_proofs.test_values_and_outputs_are_there_and_every_head_is_another,
        test_proofs.test_the_model_attends_with_the_forms_that_are_read,
        test_proofs.test_the_live_module_holds_the_same_blocks,
        test_proofs.test_the_named_norms_feed_queries_and_keys,
    ]
    for architecture in of_family(ALL).get(name, []):
        model_folder = folder / "architectures" / architecture.name
        saved = architecture, save(architecture, model_folder), model_folder
        proofs += [lambda test=test, saved=saved: test(saved) for test in every]
    for number, (table, settings) in _found().get(name, {}).items():
        model_folder = folder / "settings" / str(number)
        if not (model_folder / "record.json").exists():
            record_type(table["model_type"], model_folder, tiny_file(table, settings))
        proofs.append(partial(_as_it_is_run, model_folder))
    return proofs


def _as_it_is_run(folder: Path) -> None:
    from tools.deriving.configured import recorded_faults

    assert recorded_faults(folder) == []


@cache
def _record(model_type: str, folder: Path) -> Any:
    from tools.deriving.probing import record_type
    from tools.deriving.records import read_record

    if not (folder / model_type / "record.json").exists():
        record_type(model_type, folder / model_type)
    return read_record(folder / model_type)


def of_family(architectures: Iterable[Any]) -> dict[str, list[Any]]:
    """Models of the tables of architectures by the families that read them."""
    from tests.families.test_every_family import model_types

    by_family: dict[str, list[Any]] = {}
    for architecture in architectures:
        kind = architecture.hub.get("model_type") or model_types().get(architecture.model, "")
        for family in _families(kind, architecture.config):
            by_family.setdefault(family, []).append(architecture)
    return by_family


@cache
def _found() -> dict[str, dict[int, tuple[Any, Any]]]:
    """Settings that were once read wrongly, by family: a file, and what stays as it is in it."""
    from tests.families.test_published import FOUND, SETTINGS

    rows: list[tuple[Any, Any]] = [(row, {}) for row in FOUND]
    for row in SETTINGS:
        settings_of_row = {key: value for key, value in row.items() if key != "model_type"}
        rows.append(({"model_type": row["model_type"]}, settings_of_row))
    by_number: dict[str, dict[int, tuple[Any, Any]]] = {}
    for number, (table, settings) in enumerate(rows):
        for family in _families(table["model_type"], table):
            by_number.setdefault(family, {})[number] = table, settings
    return by_number


def _families(model_type: str, config: dict[str, Any]) -> set[str]:
    """The families that read a model of this type, and its parts."""
    from wqk.families.family import families
    from wqk.families.model_types import part_types

    by_type = {kind: f.name for f in families().values() for kind in f.model_types}
    parts = {part.get("model_type") for part in config.values() if isinstance(part, dict)}
    every = {model_type, *parts, *part_types(model_type).values()}
    return {by_type[model_type] for model_type in every & by_type.keys()}


def forget_families() -> None:
    """Let what is read of families' files be read again."""
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "wqk"]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
