"""Tensor-parallel files as one: tensors that are split over several files, joined on reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import Piece, PiecedFile
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from wqk.checkpoints.checkpoint import Part
    from wqk.checkpoints.files import WeightFile


def join_files(
    files: Sequence[WeightFile], axis: Callable[[str, tuple[int, ...]], int | None]
) -> PiecedFile:
    """Files that each hold some rows or columns of a model's tensors, in order, as one file.

    ``axis`` gives the axis along which a tensor of some name and shape is split; None if every file
    has all of it.

    Raises
    ------
    CheckpointError
        Pieces of a tensor differ in type, or along an axis that is not split.
    """
    tensors: dict[str, TensorInfo] = {}
    pieces: dict[str, list[Piece]] = {}
    for name in dict.fromkeys(name for file in files for name in file.tensors):
        holding = [file for file in files if name in file.tensors]
        first = holding[0].tensors[name]
        along = axis(name, first.shape) if len(holding) > 1 else None
        if along is None:
            holding, along = holding[:1], 0
        infos = [file.tensors[name] for file in holding]
        if len({(i.dtype, *i.shape[:along], *i.shape[along + 1 :]) for i in infos}) > 1:
            raise CheckpointError(
                f"{files[0].source.name}: the pieces of {name!r} in {len(infos)} files do not fit "
                "together"
            )
        shape, begin, pieces[name] = list(first.shape), [0] * len(first.shape), []
        for file, info in zip(holding, infos, strict=True):
            pieces[name].append(Piece(tuple(begin), info.shape, _reader(file, name)))
            if shape:
                begin[along] += info.shape[along]
                shape[along] = begin[along]
        tensors[name] = TensorInfo(first.dtype, tuple(shape), sum(info.nbytes for info in infos))
    return PiecedFile(files[0].source, tensors, pieces)


def _reader(file: WeightFile, name: str) -> Callable[[Part], np.ndarray]:
    return lambda part: file.read(part._replace(name=name))
