"""A plugin: tests that need a missing optional package skip, with the package as the reason."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

from wqk.errors import MissingPackage

# Packages of the extras and of development that tests import. Any other missing module is a fault.
OPTIONAL = {
    "accelerate",
    "array_api_strict",
    "datasets",
    "distributed",
    "gguf",
    "matplotlib",
    "nbclient",
    "nbformat",
    "pandas",
    "peft",
    "playwright",
    "plotly",
    "pyarrow",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "torch",
    "transformers",
    "yaml",
}


def missing_package(error: BaseException) -> str | None:
    """Name of the optional package whose absence caused an error; None if there is none."""
    for cause in _causes(error):
        if isinstance(cause, MissingPackage):
            return cause.package or "an optional package"
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            package = cause.name.partition(".")[0]
            if package in OPTIONAL and importlib.util.find_spec(package) is None:
                return package
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what raised it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def skip_without_packages(collector: pytest.Collector) -> None:
    """Let a file skip, with a reason, if a package that it imports is not installed."""
    collect = collector.collect

    def collect_or_skip() -> list[pytest.Item | pytest.Collector]:
        imported = set(sys.modules)
        try:
            return list(collect())
        except Exception as error:
            package = missing_package(error)
            # A module that was imported in part would make later imports of it fail otherwise.
            for name in set(sys.modules) - imported:
                if name.startswith("tests."):
                    del sys.modules[name]
            if package is None:
                raise
            pytest.skip(f"needs {package}", allow_module_level=True)

    collector.collect = collect_or_skip  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Skip files whose optional packages are missing."""
    if isinstance(collector, pytest.File):
        skip_without_packages(collector)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip tests whose fixtures import a missing optional package, or that do while they run."""
    try:
        return (yield)
    except Exception as error:
        if package := missing_package(error):
            pytest.skip(f"needs {package}")
        raise


pytest_runtest_call = pytest_runtest_setup
