"""Write the candidate with its repair: a folder with the same files, in which little has changed.

The candidate's files are copied into a hidden folder next to the target. The printed code of the
repair then runs on the tensors of the copies: what it reads comes from the copy, what it assigns is
written at once in the place of the tensor, in its own type. At the end the folder gets its name.
Names, shards, types, metadata and the bytes of all other tensors are those of the candidate, and
memory is that of a few tensors. Until the last step, nothing has the name of the target.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wqk._console import counted
from wqk._files import unwritable
from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import by_plain_name
from wqk.errors import CheckpointError, shown
from wqk.model import Model
from wqk.sameness.answer import CheckpointComparison, few
from wqk.sameness.execution import Tensor, run
from wqk.sameness.expected import Expected
from wqk.sameness.verdicts import Verdict
from wqk.sameness.weights import Pair, form_parts

# NumPy's types of safetensors' floats; bfloat16 is handled by its bits.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class WrittenRepair:
    """A repaired copy of the candidate.

    Attributes
    ----------
    folder
        The folder that was written.
    changed
        Tensors that were changed, by name.
    supplied
        Tensors whose numbers the reference had to supply.
    settings
        Whether the configuration was changed.
    verdict
        Of the comparison of the copy with the reference.
    sentence
        The outcome of the comparison of the copy with the reference.
    """

    folder: str
    changed: tuple[str, ...]
    supplied: tuple[str, ...]
    settings: bool
    verdict: Verdict = Verdict.NOT_DECIDED
    sentence: str = ""

    @property
    def summary(self) -> str:
        """The files, what was changed in them, and the outcome, in sentences."""
        changes = [counted(len(self.changed), "tensor")] if self.changed else []
        if self.settings:
            changes.append("the configuration")
        text = f"Repaired: {self.folder}, with {' and '.join(changes)} changed."
        if self.supplied:
            text += f" Taken from the reference: {few(self.supplied)}."
        return f"{text} Compared with the reference: {self.sentence}"


# -- the files ---------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a tensor in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def places_in(path: Path) -> dict[str, Place]:
    """Return the places of the tensors of a safetensors file, by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        first = 8 + length
        shape = tuple(entry["shape"])
        places[name] = Place(path, entry["dtype"], shape, first + start, first + end)
    return places


def read_place(place: Place) -> np.ndarray:
    """Return the numbers of a tensor; bfloat16 as float32."""
    with place.path.open("rb") as file:
        file.seek(place.start)
        stored = np.frombuffer(file.read(place.end - place.start), TYPES[place.dtype])
    if place.dtype == "BF16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return np.array(stored).reshape(place.shape)


def write_place(place: Place, values: np.ndarray) -> None:
    """Write the numbers of a tensor in its own type, and nothing else."""
    if values.shape != place.shape:
        raise CheckpointError(
            f"--repair: {place.path.name} stores {place.shape}, the repair makes {values.shape}; "
            "only tensors that keep their shape can be written"
        )
    with place.path.open("r+b") as file:
        file.seek(place.start)
        file.write(encoded(values, place.dtype))


def encoded(values: np.ndarray, dtype: str) -> bytes:
    """Return numbers as the bytes of a floating type, rounded to the nearest.

    Examples
    --------
    >>> encoded(np.array([1.0], np.float32), "BF16").hex()
    '803f'
    """
    if dtype != "BF16":
        return np.ascontiguousarray(values, TYPES[dtype]).tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype("<u2")
    is_nan = np.isnan(values)
    rounded[is_nan] = (bits[is_nan] >> np.uint32(16)).astype("<u2") | np.uint16(0x40)
    return rounded.tobytes()


@dataclass
class FileTensors(MutableMapping[str, Any]):
    """Tensors of files, for printed code: each is read when it is used, and written at once.

    Attributes
    ----------
    places
        By the names of the candidate's tensors.
    changed
        Names of the tensors that were written.
    """

    places: Mapping[str, Place]
    changed: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Tensor:
        return Tensor(read_place(self.places[name]))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.places:
            raise CheckpointError(
                f"--repair: the candidate has no tensor {name}; "
                "only tensors that are already in its files can be written"
            )
        values = value.array if isinstance(value, Tensor) else np.asarray(value)
        write_place(self.places[name], values)
        self.changed.append(name)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a repair deletes no tensor")

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class ExpectedTensors(Mapping[str, Any]):
    """The reference's tensors under the candidate's names and in its layout.

    Tensors of blocks are made block by block, and those of the last block are kept; all others are
    read as they are.

    Attributes
    ----------
    supplied
        Names that were asked for.
    """

    def __init__(
        self, models: Sequence[Model], pairs: Sequence[Pair], names: Mapping[str, str]
    ) -> None:
        self._checkpoints = [model.checkpoint for model in models]
        self._pair_of: dict[str, Pair] = {}
        for pair in pairs:
            for part in form_parts(pair[1]):
                self._pair_of.setdefault(part.name, pair)
        self._sources = {candidate: reference for reference, candidate in names.items()}
        self._block: tuple[Pair, Expected] | None = None
        self.supplied: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.supplied.append(name)
        pair = self._pair_of.get(name)
        if pair is not None:
            if self._block is None or self._block[0] is not pair:
                self._block = pair, Expected(self._checkpoints, pair)
            tensor = self._block[1].tensors.get(name)
            if tensor is not None:
                return Tensor(tensor.expected.copy())
        return Tensor(self._checkpoints[0].read([Part(self._sources[name])])[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


# -- all of it ---------------------------------------------------------------------------------


def require_local(candidate: Any, revision: str | None) -> Path:
    """Return the path of the candidate; `CheckpointError` unless it is a local folder or file."""
    is_path = isinstance(candidate, str | os.PathLike)
    if not is_path or revision is not None or not Path(candidate).exists():
        raise CheckpointError(
            f"--repair: the candidate must be a local folder or file, got {shown(candidate)}"
        )
    return Path(candidate)


def require_repairable(comparison: CheckpointComparison, models: Sequence[Model]) -> None:
    """Check that a repair is known, and that it is no guess.

    Raises
    ------
    CheckpointError
        A cause has no repair, a family was guessed, or a difference has no cause.
    """
    plans = [plan for model in models for plan in model.plans]
    guesses = sorted({plan.family for plan in plans if plan.rule.guess})
    if guesses:
        raise CheckpointError(
            f"--repair: a family was guessed ({', '.join(guesses)}), and a guess is not written; "
            "name the family with --family or --other-family"
        )
    unexplained = [cause.mismatch.reason for cause in comparison.causes if not cause.mismatch.steps]
    unexplained += [str(tensor) for tensor in comparison.unrepaired]
    unexplained += [f"blocks only in {name}" for name, places, _ in comparison.alone if places]
    if unexplained:
        listed = "; ".join(unexplained[:3]) + ("; …" if len(unexplained) > 3 else "")
        raise CheckpointError(f"--repair: no repair is known of: {listed}; nothing was written")


def write_repaired(
    comparison: CheckpointComparison,
    models: Sequence[Model],
    pairs: Sequence[Pair],
    names: Mapping[str, str],
    source: Path,
    folder: Path,
) -> WrittenRepair:
    """Write a copy of the candidate's files with the repair of a comparison.

    Parameters
    ----------
    comparison
        The comparison of the two models.
    models, pairs, names
        The models, their pairs of blocks, and the candidate's name of each reference's tensor.
    source
        The candidate: a folder of safetensors files, or one such file.
    folder
        The new folder; it must not exist, or be empty.

    Raises
    ------
    CheckpointError
        The repair is not known, or the candidate is not stored as plain safetensors.
    OutputError
        The folder cannot be written.
    """
    require_repairable(comparison, models)
    files = _files_of(source)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"--repair: {folder} exists and is not an empty folder")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        for file in files:
            target = temporary / file.relative_to(source if source.is_dir() else source.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        tensors = FileTensors(_places(temporary, models[1]))
        reference = ExpectedTensors(models, pairs, names)
        changes_settings = _run_repair(comparison, temporary, tensors, reference)
        _sync(temporary)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return WrittenRepair(
        folder=str(folder),
        changed=tuple(dict.fromkeys(tensors.changed)),
        supplied=tuple(dict.fromkeys(reference.supplied)),
        settings=changes_settings,
    )


def _files_of(source: Path) -> list[Path]:
    """Return the candidate's files; `CheckpointError` unless it is stored as safetensors."""
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    if not any(file.suffix == ".safetensors" for file in files):
        raise CheckpointError(
            f"--repair: {source} is no local folder or file of safetensors; "
            "only these can be written"
        )
    return files


def _places(folder: Path, candidate: Model) -> dict[str, Place]:
    """Return the places of the candidate's tensors in the copied files.

    Quantized tensors are left out, since they have no numbers of their own.
    """
    places: dict[str, Place] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        places |= places_in(path)
    stored_names = by_plain_name(places)
    plain = {}
    for name, info in candidate.checkpoint.tensors().items():
        place = places.get(stored_names.get(name, name))
        if place is None or place.dtype not in TYPES or info.quantized:
            continue
        if place.shape == info.shape:
            plain[name] = place
    return plain


def _run_repair(
    comparison: CheckpointComparison,
    folder: Path,
    tensors: FileTensors,
    reference: ExpectedTensors,
) -> bool:
    """Run the printed code on the copied files; return whether the configuration changed."""
    path = folder / "config.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
    config = json.loads(text)
    try:
        run(comparison.repair, tensors, reference, config)
    except KeyError as error:
        raise CheckpointError(
            f"--repair: the candidate stores no plain floating-point tensor {error.args[0]}; "
            "only tensors that are already in its files can be written"
        ) from None
    if config == json.loads(text):
        return False
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())
