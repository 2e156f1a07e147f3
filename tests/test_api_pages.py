"""The pages of the Python reference: classes that public calls return have a description."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import wqk

PAGES = Path(__file__).parents[1] / "docs" / "api"


def described() -> tuple[set[str], set[str]]:
    """Names of classes with an entry of their own, and of modules with all members."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES.glob("*.md"))
    classes = set(re.findall(r"autoclass:: ([\w.]+)", text))
    return classes, set(re.findall(r"automodule:: ([\w.]+)", text))


def public_calls() -> Iterator[Callable[..., Any]]:
    """Public functions of the package, and public methods and properties of its classes."""
    for name in dir(wqk):
        member = getattr(wqk, name)
        if inspect.isfunction(member):
            yield inspect.unwrap(member)
        elif inspect.isclass(member):
            for attribute, value in inspect.getmembers(member):
                function = getattr(value, "fget", None) or getattr(value, "func", None) or value
                if not attribute.startswith("_") and inspect.isfunction(function):
                    yield inspect.unwrap(function)


def classes_in(annotation: Any) -> Iterator[type]:
    """Classes of the package in an annotation."""
    arguments = typing.get_args(annotation)
    if isinstance(annotation, type) and not arguments and annotation.__module__.startswith("wqk"):
        yield annotation
    for argument in arguments:
        yield from classes_in(argument)


def test_every_class_that_a_public_call_returns_is_on_a_page() -> None:
    classes, modules = described()
    returned: set[type] = set()
    for function in public_calls():
        try:
            annotation = typing.get_type_hints(function).get("return")
        except NameError:  # a class that is only imported for checkers, such as matplotlib's Figure
            continue
        returned.update(classes_in(annotation))
    assert len(returned) > 30
    missing = []
    for returned_class in returned:
        name = f"{returned_class.__module__}.{returned_class.__qualname__}"
        public_name = f"{returned_class.__module__.split('.')[0]}.{returned_class.__qualname__}"
        packaged_name = ".".join(
            [*returned_class.__module__.split(".")[:2], returned_class.__qualname__]
        )
        is_described = {name, public_name, packaged_name} & classes
        if not is_described and returned_class.__module__ not in modules:
            missing.append(name)
    assert sorted(missing) == []
