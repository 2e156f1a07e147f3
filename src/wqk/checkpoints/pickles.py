"""Pickles read as data: plain values and records of known kinds; nothing in them is executed.

A pickle is a program that builds an object, and may call any function it names. Here a name stands
for a reader of ours or for an inert record, and every other name is refused, so that the worst a
pickle can contain is nonsense.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import IO


class Refused(pickle.UnpicklingError):
    """The pickle names a function or class that is not known to be data."""


class Record:
    """An object as its class's full name, and what it was constructed with."""

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None  # its attributes, in most cases a dictionary

    def extend(self, items: Any) -> None:
        """Ignore items of a subclass of list."""

    append = extend

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore items of a subclass of dict."""


class RecordType(NamedTuple):
    """Stands for a class or function whose results are kept as records."""

    name: str

    def __call__(self, *arguments: Any) -> Record:
        """A record instead of the call."""
        return Record(self.name, arguments)


# Classes of plain values that are stored with weights.
PLAIN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda *_: {},
    ("collections", "defaultdict"): lambda *_: {},
    ("collections", "Counter"): lambda *_: {},
    **{
        (module, name): RecordType(name)
        for module in ("builtins", "__builtin__")
        for name in ("list", "dict", "tuple", "int", "float", "str", "bool", "complex", "slice")
    },
    **{(module, "set"): lambda items=(): list(items) for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
}


class DataUnpickler(pickle._Unpickler):
    """Reads one pickle.

    It is built on the unpickler written in Python: the one in C allocates whatever a pickle claims
    to need. ``known`` replaces classes and functions, by module and name; full names that begin
    with one of ``inert`` are kept as records; ``persistent`` reads the description of an object
    that is stored outside of the pickle.
    """

    # Parts of the unpickler that its types leave out.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        file: IO[bytes],
        known: Mapping[tuple[str, str], Any],
        inert: tuple[str, ...] = (),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._known, self._inert, self._persistent = known, inert, persistent

    def persistent_load(self, pid: Any) -> Any:
        """What replaces an object that is stored outside of the pickle."""
        if self._persistent is None:
            raise Refused("an object outside of the file")
        return self._persistent(pid)

    def find_class(self, module: str, name: str) -> Any:
        """What replaces a class or function; never the class or function itself."""
        reader = self._known.get((module, name)) or PLAIN.get((module, name))
        if reader is not None:
            return reader
        full = f"{module}.{name}"
        if full.startswith(self._inert):
            return RecordType(full)
        raise Refused(full)

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def _construct(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)

    def _construct_with_names(self) -> None:
        self.stack.pop()  # of the arguments
        self._construct()

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_hashable(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_hashable(key)] = value

    def _add_items(self) -> None:
        self.stack[-1].extend(self.pop_mark())

    def _list(self) -> None:
        self.append([])

    def _list_of_items(self) -> None:
        self.append(self.pop_mark())

    def _refuse(self) -> None:
        raise Refused("an operation that no weights need")

    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {
        pickle.BUILD[0]: _build,
        pickle.NEWOBJ[0]: _construct,
        pickle.NEWOBJ_EX[0]: _construct_with_names,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        # Sets become lists: to hash what a file nests takes exponential time.
        pickle.EMPTY_SET[0]: _list,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _list_of_items,
        **dict.fromkeys(
            (
                opcode[0]
                for opcode in (
                    pickle.BYTEARRAY8,
                    pickle.NEXT_BUFFER,
                    pickle.READONLY_BUFFER,
                    pickle.EXT1,
                    pickle.EXT2,
                    pickle.EXT4,
                    pickle.INST,
                    pickle.OBJ,
                )
            ),
            _refuse,
        ),
    }


def _hashable(key: Any) -> Any:
    """A dictionary's key, where it is cheap to hash."""
    if isinstance(key, str | int | float | bytes | Record | None):
        return key
    if isinstance(key, tuple) and all(isinstance(n, str | int | float | bytes) for n in key):
        return key
    raise pickle.UnpicklingError("a dictionary has a key that is neither text nor a number")
