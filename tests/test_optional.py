"""Only a missing optional package makes a test skip: any other missing module is a fault."""

from __future__ import annotations

import importlib.util

import pytest
from tests.optional import missing_package

from wqk.errors import MissingPackage


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def find_other(name: str, package: str | None = None) -> object:
        return None if name == "torch" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_other)


@pytest.mark.usefixtures("without_torch")
def test_the_package_behind_an_error_is_found() -> None:
    absent = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    assert missing_package(absent) == "torch"
    wrapped = RuntimeError("while a file was imported")
    wrapped.__cause__ = absent
    assert missing_package(wrapped) == "torch"
    assert missing_package(MissingPackage("needs plotly", package="plotly")) == "plotly"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("name", ["numpyy", "wqk.no_such_module", "tests.no_such_file"])
def test_other_missing_modules_are_faults(name: str) -> None:
    assert missing_package(ModuleNotFoundError(f"No module named '{name}'", name=name)) is None


def test_a_module_that_is_missing_within_an_installed_package_is_a_fault() -> None:
    pytest.importorskip("torch")
    absent = ModuleNotFoundError("No module named 'torch.no_such'", name="torch.no_such")
    assert missing_package(absent) is None
