"""The quantization configuration of a file: the method and typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wqk.errors import CheckpointError, shown


@dataclass(frozen=True)
class Settings:
    """A quantization configuration.

    Attributes
    ----------
    method
        Name of the quantization method, in lower case; empty if not set.
    values
        All keys with their values.
    path
        Key of the configuration in ``config.json``, for messages.
    """

    method: str
    values: Mapping[str, Any]
    path: str = "quantization_config"

    def get(self, *names: str) -> Any:
        """Return the value of the first of these keys that is set; None if no key is set.

        Raises
        ------
        CheckpointError
            Two of these keys, which are synonyms, have different values.
        """
        set_values = [
            (name, self.values[name]) for name in names if self.values.get(name) is not None
        ]
        if not set_values:
            return None
        first_name, first_value = set_values[0]
        for name, value in set_values[1:]:
            if value != first_value:
                raise self.error(
                    f"{first_name} and {name} mean the same and differ; expected one value, got "
                    f"{shown(first_value)} and {shown(value)}; correct the configuration"
                )
        return first_value

    def whole(self, *names: str) -> int | None:
        """Return a whole number; None if not set."""
        value = self.get(*names)
        if value is not None and type(value) is not int:
            raise self._wrong(names[0], "a whole number", value)
        return value

    def switch(self, *names: str) -> bool:
        """Return a truth value; False if not set."""
        value = self.get(*names)
        if value is None:
            return False
        if value not in (True, False):  # AutoGPTQ also writes 0 and 1
            raise self._wrong(names[0], "true or false", value)
        return bool(value)

    def word(self, *names: str) -> str:
        """Return a word in lower case; empty if not set."""
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise self._wrong(names[0], "a word", value)
        return (value or "").lower()

    def error(self, message: str) -> CheckpointError:
        """Return an error about this configuration."""
        return CheckpointError(f"{self.path}: {message}")

    def _wrong(self, name: str, expected: str, value: Any) -> CheckpointError:
        """Return the error for a value of another type."""
        return self.error(
            f"{name} must be {expected}; got {shown(value)}; correct the configuration"
        )


NO_SETTINGS = Settings("", {})
