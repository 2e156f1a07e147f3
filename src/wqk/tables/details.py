"""Data for images of forms, which do not fit into the rows of a table, in one ``.npz`` file.

=========================  =====  ==================================================================
key                        type   what
=========================  =====  ==================================================================
``contents``               uint8  JSON in UTF-8: ``format``, ``version``, ``gamma``, and ``blocks``
``N/row_norms``            f2     (d_query,), in units of the block's ``norm_unit``
``N/column_norms``         f2     (d_key,), in the same units
``N/outlying_rows``        i4     numbers of the rows beyond mean + gamma · std
``N/outlying_columns``     i4     numbers of the columns beyond mean + gamma · std
``N/image``                i1     (height, width), at most 256 × 256: 127 is ``image_unit`` or more
``N/coupling``             f2     (H, H), upper triangle; absent where the form is not square
=========================  =====  ==================================================================

N counts the blocks. ``contents`` describes them in the same order: checkpoint, revision, step,
stack, kind, layer, circuit and distance, as in a score table, and the two units. All arrays belong
to whole layers; only the coupling is about single heads.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wqk._console import counted
from wqk._files import check_output, write_atomically
from wqk._typing import Array, Float
from wqk.errors import TableError, first_line
from wqk.forms import BilinearForm
from wqk.forms.arrays import on_host
from wqk.forms.images import SATURATION, matrix_image
from wqk.forms.scores import coupling

FORMAT, VERSION = "wqk details", 1
IMAGE_SIDE = 256

# Values of a pixel of either sign, the largest of an int8.
IMAGE_LEVELS = 127


@dataclass(frozen=True)
class LayerKey:
    """Key of a layer's form, with the names and values of a score table's rows."""

    checkpoint: str
    revision: str | None
    step: int | None
    stack: str
    kind: str
    layer: int
    circuit: str
    distance: int


@dataclass(frozen=True, eq=False)
class BlockDetails:
    """Data for images of one layer's form.

    Outlying rows and columns have L2 norms above mean + gamma · std. The image has at most 256 ×
    256 pixels (height, width). Each pixel is the entry of largest magnitude, in steps of
    ``image_unit / 127``, limited to ±``image_unit``.
    """

    key: LayerKey
    row_norms: Float[Array, " d_query"]
    column_norms: Float[Array, " d_key"]
    outlying_rows: np.ndarray  #: Their numbers.
    outlying_columns: np.ndarray  #: Their numbers.
    image: np.ndarray
    image_unit: float  #: The 99.5 % quantile of the pixels' magnitudes.
    #: See `wqk.coupling`; None if the form is not square.
    coupling: Float[Array, "heads heads"] | None = None


@dataclass(frozen=True, repr=False)
class Details:
    """Details of many layers, from one checkpoint or several; made by `wqk.scan`.

    Examples
    --------
    >>> import wqk
    >>> details = wqk.scan(wqk.demo_model("encoder"), details=True).details
    >>> details
    Details(4 layers)
    >>> details.blocks[0].image.shape, details.blocks[0].coupling.shape
    ((128, 128), (4, 4))
    """

    blocks: tuple[BlockDetails, ...]
    gamma: float = 2.0

    def __repr__(self) -> str:
        return f"Details({counted(len(self.blocks), 'layer')})"

    def write(self, path: str | PathLike[str]) -> None:
        """Write an ``.npz`` file, whole or not at all.

        A layer of width 768 with 12 heads takes about 60 kB, a layer of width 16,384 with 128 heads
        about 150 kB.

        Raises
        ------
        OutputError
            The path does not end in ``.npz``, or the file cannot be written.
        """
        path = Path(path)
        check_details_output(path)
        arrays: dict[str, np.ndarray] = {}
        described = []
        for number, block in enumerate(self.blocks):
            entry, packed = _packed(block)
            described.append(entry)
            arrays |= {f"{number}/{name}": array for name, array in packed.items()}
        contents = {"format": FORMAT, "version": VERSION, "gamma": self.gamma, "blocks": described}
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(contents).encode(), np.uint8)
        np.savez_compressed(buffer, contents=text, **arrays)  # type: ignore[arg-type]
        write_atomically(path, buffer.getvalue())


def read_details(path: str | PathLike[str]) -> Details:
    """Read a file that `Details.write` wrote; nothing in the file is executed.

    Raises
    ------
    TableError
        The file does not exist, or does not contain details.
    """
    try:
        if not zipfile.is_zipfile(path) and Path(path).exists():
            raise ValueError("it is not an .npz file")
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            contents = json.loads(_array(file, "contents", np.uint8, 1).tobytes())
            if contents["format"] != FORMAT or contents["version"] != VERSION:
                raise ValueError(f"its format is not {FORMAT!r}, version {VERSION}")
            blocks = tuple(
                _unpacked(entry, file, f"{number}/")
                for number, entry in enumerate(contents["blocks"])
            )
            return Details(blocks, float(contents["gamma"]))
    except FileNotFoundError:
        raise TableError(f"{path}: no such file") from None
    except Exception as error:  # zipfile, NumPy and JSON raise anything for a hostile file
        reason = first_line(error)
        raise TableError(f"{path}: holds no details of a scan ({reason})") from None


def check_details_output(path: Path) -> None:
    """Raise `OutputError` if no details can be written to this path."""
    check_output(path, "a set of details", [".npz"])


def block_details(
    key: LayerKey, heads: BilinearForm, gamma: float = 2.0, layer: BilinearForm | None = None
) -> BlockDetails:
    """Return the details of one layer, from its heads as a stack (G, H/G)."""
    matrix = matrix_image(heads.sum() if layer is None else layer, IMAGE_SIDE, gamma)
    unit = float(np.quantile(np.abs(matrix.pixels), SATURATION)) or 1.0
    image = np.rint(np.clip(matrix.pixels / unit, -1, 1) * IMAGE_LEVELS).astype(np.int8)
    return BlockDetails(
        key=key,
        row_norms=matrix.row_norms,
        column_norms=matrix.column_norms,
        outlying_rows=np.flatnonzero(matrix.outlying_rows).astype(np.int32),
        outlying_columns=np.flatnonzero(matrix.outlying_columns).astype(np.int32),
        image=image,
        image_unit=unit,
        coupling=on_host(coupling(heads)) if heads.is_square else None,
    )


def _packed(block: BlockDetails) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a block's entry in the contents, and its arrays in their small types."""
    largest = max(float(block.row_norms.max()), float(block.column_norms.max()))
    unit = largest or 1.0
    arrays = {
        "row_norms": (block.row_norms / unit).astype(np.float16),
        "column_norms": (block.column_norms / unit).astype(np.float16),
        "outlying_rows": block.outlying_rows,
        "outlying_columns": block.outlying_columns,
        "image": block.image,
    }
    if block.coupling is not None:
        arrays["coupling"] = np.triu(block.coupling).astype(np.float16)
    return {**vars(block.key), "norm_unit": unit, "image_unit": block.image_unit}, arrays


def _unpacked(entry: Mapping[str, Any], file: Mapping[str, np.ndarray], at: str) -> BlockDetails:
    """Return a block from an untrusted file."""
    key = msgspec.convert(entry, LayerKey)
    unit, image_unit = float(entry["norm_unit"]), float(entry["image_unit"])
    row_norms = _norms(file, f"{at}row_norms", unit)
    column_norms = _norms(file, f"{at}column_norms", unit)
    image = _array(file, f"{at}image", np.int8, 2)
    if max(image.shape) > IMAGE_SIDE:
        raise ValueError(f"{at}image is larger than {IMAGE_SIDE} × {IMAGE_SIDE}: {image.shape}")
    coupling_matrix = None
    if f"{at}coupling" in file:
        upper = _array(file, f"{at}coupling", np.float16, 2).astype(np.float32)
        if upper.shape[0] != upper.shape[1]:
            raise ValueError(f"{at}coupling is not square: {upper.shape}")
        coupling_matrix = np.triu(upper) + np.triu(upper, 1).T
    return BlockDetails(
        key=key,
        row_norms=row_norms,
        column_norms=column_norms,
        outlying_rows=_numbers(file, f"{at}outlying_rows", len(row_norms)),
        outlying_columns=_numbers(file, f"{at}outlying_columns", len(column_norms)),
        image=image,
        image_unit=image_unit,
        coupling=coupling_matrix,
    )


def _norms(file: Mapping[str, np.ndarray], name: str, unit: float) -> np.ndarray:
    """Return norms of rows or columns, stored relative to a unit."""
    return _array(file, name, np.float16, 1).astype(np.float32) * np.float32(unit)


def _array(
    file: Mapping[str, np.ndarray], name: str, dtype: type, axes: int, least: int = 1
) -> np.ndarray:
    """Return an array of the file after checks of type, number of axes and size."""
    array = file[name]
    if array.dtype != dtype or array.ndim != axes or array.size < least:
        raise ValueError(
            f"{name} must be {np.dtype(dtype).name} with {axes} axes, "
            f"got {array.dtype.name} of shape {array.shape}"
        )
    return array


def _numbers(file: Mapping[str, np.ndarray], name: str, length: int) -> np.ndarray:
    """Return the numbers of outlying rows or columns; possibly empty."""
    array = _array(file, name, np.int32, 1, least=0)
    if array.size and not 0 <= array.min() <= array.max() < length:
        raise ValueError(f"{name} names rows or columns that do not exist")
    return array
