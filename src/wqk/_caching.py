"""A property that is computed once and cached, without a lock.

Before Python 3.12, `functools.cached_property` holds one lock for all instances of a class, so that
threads that score different forms would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801, named like the standard one
    """As `functools.cached_property`, but two threads may both compute an instance's value.

    Examples
    --------
    >>> class Circle:
    ...     radius = 2
    ...     @cached_property
    ...     def area(self):
    ...         print("computed")
    ...         return 3 * self.radius**2
    >>> circle = Circle()
    >>> circle.area + circle.area
    computed
    24
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Value:
        if instance is None:  # accessed on the class, for its documentation
            return self  # type: ignore[return-value]
        value = self._compute(instance)
        # From now on, the instance's own attribute takes precedence.
        instance.__dict__[self._name] = value
        return value
