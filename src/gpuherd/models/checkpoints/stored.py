"""A tensor's place in a weight file, and reading it from there: what safetensors and PyTorch files have in common."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.tensors.dtypes import (
    Codes,
    FloatArray,
    Half,
    read_codes,
    read_float_rows,
    read_floats,
    stored_bytes,
)
from gpuherd.models.tensors.source import Run, TensorInfo

# What numpy can count; a file may claim any size along an axis beside one of none.
MAX_AXES = 64
MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as it was when its header was read; a file that no longer looks so has been changed since.

    ``inode`` tells a file apart that was put in its place with the same size and time.
    """

    path: Path
    size: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in a file.

    Attributes:
        info: name, shape and format.
        file: the file, as it was when its header was read.
        offset: byte of the tensor's first element.
        strides: elements between neighbours along each axis; None when they lie in C order without gaps.
    """

    info: TensorInfo
    file: FileStamp
    offset: int
    strides: tuple[int, ...] | None = None

    def read(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """The tensor, or entries ``start`` to ``stop`` of its first axis (see ``read_stored``)."""
        return read_stored(self, start, stop)

    @property
    def has_blocks(self) -> bool:
        """Whether ``read_block`` can be asked: some rows and columns lie in the file as runs of neighbours."""
        return self.strides is None or (len(self.strides) == 2 and 1 in self.strides)

    def read_block(self, rows: Run, columns: Run) -> FloatArray:
        """A block of the tensor seen as rows (``rows_of``); only its bytes are read."""
        return _read_block(self, rows, columns)

    @property
    def half(self) -> Half | None:
        """The format, where it has 16 bits and rows lie in the file as they are: ``read_codes`` can be asked."""
        plain = self.strides is None or (len(self.strides) == 2 and self.strides[1] == 1)
        return "BF16" if plain and self.info.dtype == "BF16" else "F16" if plain and self.info.dtype == "F16" else None

    def read_codes(self, rows: Run, columns: Run, target: Codes) -> None:
        """Fills ``target`` with a block (see ``read_block``) as its 16-bit numbers are stored. Raises BadModel."""
        _check_block(self, rows, columns)
        apart = rows_of(self.info.shape)[1] if self.strides is None else self.strides[0]
        first = self.offset + 2 * (rows[0] * apart + columns[0])
        with unchanged(self.file) as fd:
            _read_on(fd, first, 2 * apart * (rows[1] - rows[0]), columns)
            read_codes(fd, first, target, apart, _what(self))


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's shape as that of its rows below each other: all axes but the last, and the last."""
    return math.prod(shape[:-1]), shape[-1]


def check_shape(where: str, shape: tuple[int, ...]) -> None:
    """Raises BadModel for a shape that no array can have, of a tensor without elements too."""
    if len(shape) > MAX_AXES:
        raise BadModel(f"{where} has {len(shape)} axes; the limit is {MAX_AXES}")
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise BadModel(f"{where} has a size along its axes that no array can have")


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, FileStamp]]:
    """A regular file opened for reading. Raises MissingModel or BadModel with the file's name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingModel(f"{path} is not there") from None
    except OSError as problem:
        raise BadModel(f"{path} can't be opened: {problem.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadModel(f"{path} is no regular file")
        yield fd, _stamp(path, status)
    finally:
        os.close(fd)


def _stamp(path: Path, status: os.stat_result) -> FileStamp:
    return FileStamp(path, status.st_size, status.st_mtime_ns, status.st_ino)


@contextmanager
def unchanged(file: FileStamp) -> Iterator[int]:
    """The file opened again for reading. Raises BadModel if it is not as it was, before the reading or after it."""
    with opened(file.path) as (fd, stamp):
        if stamp != file:
            raise BadModel(_changed(file))
        yield fd
        if _stamp(file.path, os.fstat(fd)) != file:
            raise BadModel(_changed(file))


def _changed(file: FileStamp) -> str:
    return f"{file.path} was changed while it was being read"


def read_stored(tensor: StoredTensor, start: int | None = None, stop: int | None = None) -> FloatArray:
    """The tensor, or entries ``start`` to ``stop`` of its first axis. Raises BadModel when the file has changed or
    ends too early, or when the format can't be read as floats."""
    info, strides = tensor.info, tensor.strides
    shape = info.shape
    first = 0
    if start is not None and stop is not None:
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"{info.name}: no entries {start} to {stop} in shape {shape}")
        step = strides[0] if strides is not None else math.prod(shape[1:])
        first = start * step
        shape = (stop - start, *shape[1:])
    span = math.prod(shape) if strides is None else _span(shape, strides)
    item = stored_bytes(info.dtype, 1) or 1
    with unchanged(tensor.file) as fd:
        flat = read_floats(fd, tensor.offset + first * item, span, info.dtype, _what(tensor))
    if strides is None:
        return flat.reshape(shape)
    bytes_apart = tuple(step * flat.itemsize for step in strides)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, shape, bytes_apart, writeable=False))


def _what(tensor: StoredTensor) -> str:
    return f"tensor {tensor.info.name!r} of {tensor.file.path}"


def _read_block(tensor: StoredTensor, rows: Run, columns: Run) -> FloatArray:
    width = _check_block(tensor, rows, columns)
    if tensor.strides is None or tensor.strides[1] == 1:
        return _runs(tensor, rows, columns, width if tensor.strides is None else tensor.strides[0])
    return _runs(tensor, columns, rows, tensor.strides[1]).T


def _check_block(tensor: StoredTensor, rows: Run, columns: Run) -> int:
    """The width of the tensor's rows. Raises ValueError for a block that is not in it."""
    height, width = rows_of(tensor.info.shape)
    if not (0 <= rows[0] <= rows[1] <= height and 0 <= columns[0] <= columns[1] <= width):
        raise ValueError(f"{tensor.info.name}: no block {rows} x {columns} in {height} x {width}")
    return width


def _read_on(fd: int, first: int, nbytes: int, strip: Run) -> None:
    """Strips across a long tensor follow: it is quicker to have the disk read on than to wait for each run."""
    if strip[0] == 0:
        os.posix_fadvise(fd, first, nbytes, os.POSIX_FADV_WILLNEED)


def _runs(tensor: StoredTensor, outer: Run, inner: Run, apart: int) -> FloatArray:
    """Entries ``inner`` of each of the runs ``outer`` that begin ``apart`` elements after each other."""
    dtype, count, width = tensor.info.dtype, outer[1] - outer[0], inner[1] - inner[0]
    item = stored_bytes(dtype, 1) or 1
    first = tensor.offset + (outer[0] * apart + inner[0]) * item
    with unchanged(tensor.file) as fd:
        if width == apart or count == 1:
            return read_floats(fd, first, count * width, dtype, _what(tensor)).reshape(count, width)
        _read_on(fd, first, count * apart * item, inner)
        return read_float_rows(fd, first, count, width, apart, dtype, _what(tensor))


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
