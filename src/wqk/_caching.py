"""A property that is computed once and cached, without a lock.

Until Python 3.12 `functools.cached_property` computes under one lock for all instances of a class,
which lets threads that score different forms wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801, named as the one it stands for
    """As `functools.cached_property`, without the lock.

    Two threads that ask one instance at the same time may both compute the value.

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

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> Value | cached_property[Value]:
        if instance is None:
            return self
        value = self._compute(instance)
        # The instance's own entry is found before this class attribute from now on.
        instance.__dict__[self._name] = value
        return value
