"""Named sets of models: lists of Hub ids in text files of the package."""

from __future__ import annotations

from pathlib import Path

from wqk.errors import CheckpointError, UnknownName

SETS_FOLDER = Path(__file__).parent / "data"
SET_PREFIX = "paper:"

# Most characters that are read of a list of refs.
LARGEST_LIST = 2**24


def model_sets() -> list[str]:
    """Return the names of all sets.

    Examples
    --------
    >>> model_sets()
    ['paper:audio', 'paper:encoder-decoder', 'paper:language', 'paper:vision']
    """
    return [SET_PREFIX + path.stem for path in sorted(SETS_FOLDER.glob("*.txt"))]


def model_set(name: str) -> list[str]:
    """Return hub ids of the models in a set; `UnknownName` if the set does not exist.

    Examples
    --------
    >>> model_set("paper:language")[0]
    'google-bert/bert-base-uncased'
    """
    if name not in model_sets():
        raise UnknownName(
            f"{name}: no such set of models; sets are {', '.join(model_sets())}",
            name=name,
            close=model_sets(),
        )
    return read_list(SETS_FOLDER / f"{name.removeprefix(SET_PREFIX)}.txt")


def read_list(path: Path) -> list[str]:
    """Return the lines of a text file that are neither empty nor comments (#).

    Raises `CheckpointError` if the file cannot be read or has no other lines.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST_LIST)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: expected a text file with one ref per line") from None
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    refs = [line for line in lines if line and not line.startswith("#")]
    if not refs:
        raise CheckpointError(f"{path}: lists no checkpoint; expected one ref per line")
    return refs
