"""Write the candidate with its repair: a folder with the same files and few changes.

The candidate's files are copied into a hidden folder next to the target. The printed code of the
repair then runs on the tensors of the copies. Tensors are read from the copy, and assigned tensors
are written at once, in their stored type (see `wqk.sameness.rewritten_files`). Names, shards,
types, metadata and the bytes of all other tensors do not change. Only a few tensors are in memory
at a time. At the end the folder is renamed to the target; until then, no folder has the name of the
target.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wqk._console import few
from wqk._files import unwritable
from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import View, by_plain_name
from wqk.errors import CheckpointError, shown
from wqk.model import Model
from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.block_weights import BlockWeights
from wqk.sameness.circuits import PlanPair, form_parts
from wqk.sameness.execution import Tensor, as_tensors, run
from wqk.sameness.merges import adapted
from wqk.sameness.repairs import Renumber
from wqk.sameness.rewritten_files import NUMPY_TYPES, FileTensors, TensorLocation, locations_in
from wqk.sameness.stored_block import added_biases
from wqk.sameness.verdicts import Verdict
from wqk.sameness.written_repair import WrittenRepair

# Number of differences without a repair in an error message.
MOST_LISTED = 3


class ExpectedTensors(Mapping[str, Any]):
    """The reference's tensors under the candidate's names and in its layout.

    Tensors of blocks are computed block by block, and the tensors of the last block are kept. All
    other tensors are read without changes.

    Attributes
    ----------
    supplied
        Names of the tensors that were requested.
    """

    def __init__(
        self, models: Sequence[Model], pairs: Sequence[PlanPair], names: Mapping[str, str]
    ) -> None:
        self._checkpoints = [model.checkpoint for model in models]
        self._pair_of: dict[str, PlanPair] = {}
        for pair in pairs:
            for part in form_parts(pair[1]):
                self._pair_of.setdefault(part.name, pair)
            for name in added_biases(pair):
                self._pair_of.setdefault(name, pair)
        self._sources = {candidate: reference for reference, candidate in names.items()}
        self._block: tuple[PlanPair, BlockWeights] | None = None
        self.supplied: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.supplied.append(name)
        pair = self._pair_of.get(name)
        if pair is not None:
            if self._block is None or self._block[0] is not pair:
                self._block = pair, BlockWeights(self._checkpoints, pair)
            tensor = self._block[1].tensors.get(name)
            if tensor is not None:
                return Tensor(tensor.expected.copy())
        # A tensor that the candidate lacks gets the name of the reference.
        source = self._sources.get(name, name)
        return Tensor(self._checkpoints[0].read([Part(source)])[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class AdapterFactors(Mapping[str, tuple[Tensor, Tensor]]):
    """The factors of an adapted reference, by the candidate's names, for printed code.

    Parameters
    ----------
    models, pairs, names
        As for `ExpectedTensors`.
    """

    def __init__(
        self, models: Sequence[Model], pairs: Sequence[PlanPair], names: Mapping[str, str]
    ) -> None:
        self._adapter = adapted(models[0].checkpoint)
        self._sources = {candidate: reference for reference, candidate in names.items()}
        for reference, candidate in pairs:
            parts = zip(form_parts(reference), form_parts(candidate), strict=False)
            for source, target in parts:
                self._sources.setdefault(target.name, source.name)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        source = self._sources.get(name, name)
        factors = None if self._adapter is None else self._adapter.factors(source)
        if factors is None:
            raise KeyError(name)
        return as_tensors(factors)

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
    """Check that a repair is known, and does not depend on a guess.

    Raises
    ------
    CheckpointError
        A cause has no repair, a family was guessed, a difference has no cause, or the candidate is
        an adapter.
    """
    if adapted(models[1].checkpoint) is not None:
        raise CheckpointError(
            "--repair: the candidate is an adapter on its base model, which has no file; "
            "merge the adapter, or exchange the two models: the adapter first, then the merged one"
        )
    plans = [plan for model in models for plan in model.plans]
    guesses = sorted({plan.family for plan in plans if plan.rule.guess})
    if guesses:
        raise CheckpointError(
            f"--repair: a family was guessed ({', '.join(guesses)}), and a guess is not written; "
            "name the family with --family or --other-family"
        )
    unexplained = [cause.mismatch.reason for cause in comparison.causes if not cause.mismatch.steps]
    unexplained += [str(tensor) for tensor in comparison.unrepaired]
    if not any(isinstance(step, Renumber) for step in comparison.steps):
        unexplained += [f"blocks only in {blocks.model}" for blocks in comparison.alone]
    if unexplained:
        listed = "; ".join(unexplained[:MOST_LISTED])
        if len(unexplained) > MOST_LISTED:
            listed += "; …"
        raise CheckpointError(
            f"--repair: no repair is known of this difference: {listed}; nothing was written"
        )


def require_nearer(
    comparison: CheckpointComparison, repaired: CheckpointComparison, folder: Path
) -> None:
    """Remove a repaired copy that is farther from the reference than the candidate.

    Parameters
    ----------
    comparison, repaired
        The comparisons of the candidate, and of its repaired copy, with the reference.
    folder
        The folder of the copy.

    Raises
    ------
    CheckpointError
        A block or a tensor of the copy is farther from the reference.
    """
    if repaired.verdict is not Verdict.DIFFERENT:
        return
    before = _distances(comparison)
    farther = [
        name
        for name, distance in _distances(repaired).items()
        if math.isfinite(distance) and distance > before.get(name, math.inf)
    ]
    if farther:
        shutil.rmtree(folder)
        raise CheckpointError(
            f"--repair: the repaired copy was farther from the reference in {few(farther)}, and "
            "was removed; no repair is known of this difference"
        )


def _distances(comparison: CheckpointComparison) -> dict[str, float]:
    """Return the distance from the reference of each differing block and tensor, by name."""
    distances = {
        str(block.place): block.farthest
        for block in comparison.blocks
        if block.verdict is Verdict.DIFFERENT
    }
    return distances | {tensor.title: tensor.distance for tensor in comparison.differing}


def write_repaired(
    comparison: CheckpointComparison,
    models: Sequence[Model],
    pairs: Sequence[PlanPair],
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
        The models, their pairs of blocks, and the candidate's names of the reference's tensors.
    source
        The candidate: a folder of safetensors files, or one safetensors file.
    folder
        The new folder, which must be absent or empty.

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
        root = source if source.is_dir() else source.parent
        for file in files:
            target = temporary / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        tensors = _tensors_of(temporary, models[1])
        reference = ExpectedTensors(models, pairs, names)
        factors = AdapterFactors(models, pairs, names)
        changes_settings = _run_repair(comparison, temporary, tensors, reference, factors)
        tensors.finish()
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
        added=tuple(tensors.added),
        supplied=tuple(dict.fromkeys(reference.supplied)),
        settings=changes_settings,
        removed=tuple(tensors.removed),
    )


def _files_of(source: Path) -> list[Path]:
    """Return the candidate's files; `CheckpointError` unless it is stored as safetensors."""
    files = [source]
    if not source.is_file():
        files = sorted(path for path in source.rglob("*") if path.is_file())
    if not any(file.suffix == ".safetensors" for file in files):
        raise CheckpointError(
            f"--repair: {source} is no local folder or file of safetensors; "
            "only these can be written; for a GGUF file, run the printed code in the converter, "
            "before quantization"
        )
    return files


def _tensors_of(folder: Path, candidate: Model) -> FileTensors:
    """Return the tensors of the copied files, for printed code.

    Quantized tensors are left out, because their numbers are not stored directly.
    """
    locations: dict[str, TensorLocation] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        locations |= locations_in(path)
    plain_names = by_plain_name(locations)
    plain, stored_names = {}, {}
    checkpoint = candidate.checkpoint
    while isinstance(checkpoint, View):
        checkpoint = checkpoint.inner
    for name, info in checkpoint.tensors().items():
        stored_names[name] = plain_names.get(name, name)
        location = locations.get(stored_names[name])
        if location is None or location.dtype not in NUMPY_TYPES or info.quantized:
            continue
        if location.shape == info.shape:
            plain[name] = location
    return FileTensors(folder, plain, stored_names)


def _run_repair(
    comparison: CheckpointComparison,
    folder: Path,
    tensors: FileTensors,
    reference: ExpectedTensors,
    factors: AdapterFactors,
) -> bool:
    """Run the printed code on the copied files; return whether the configuration changed."""
    path = folder / "config.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
    config = json.loads(text)
    try:
        run(comparison.repair, tensors, reference, config, factors)
    except KeyError as error:
        raise CheckpointError(
            f"--repair: the candidate stores no plain floating-point tensor {error.args[0]}; "
            "only such tensors can be changed"
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
