"""A tensor's place in a weight file, and reading it from there: what all file formats have in common.

Data come by ``os.pread`` in panels of a few MB into the result array. A memory map would be simpler, but the kernel
counts its pages as this process's memory, so that a worker would seem to need a whole checkpoint (docs/dependencies.md
has the figures, and those of the formats' own libraries).
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.tensors.source import (
    ITEM_BYTES,
    READABLE,
    Codes,
    FloatArray,
    Half,
    Run,
    TensorInfo,
    stored_bytes,
)

# What numpy can count; a file may claim any size along an axis if another has size 0.
MAX_AXES = 64
MAX_ELEMENTS = 1 << 62

PANEL_BYTES = 8 << 20
_AS_THEY_ARE: Mapping[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}


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

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """The tensor, or entries ``start`` to ``stop`` of its first axis. Raises BadModel when the file has changed or
        ends too early, or when the format can't be read as floats."""
        shape, strides = self.info.shape, self.strides
        first = 0
        if stop is not None:
            if not shape or not 0 <= start <= stop <= shape[0]:
                raise ValueError(f"{self.info.name}: no entries {start} to {stop} in shape {shape}")
            first = start * (math.prod(shape[1:]) if strides is None else strides[0])
            shape = (stop - start, *shape[1:])
        span = math.prod(shape) if strides is None else _span(shape, strides)
        item = stored_bytes(self.info.dtype, 1) or 1
        with unchanged(self.file) as fd:
            flat = read_floats(fd, self.offset + first * item, span, self.info.dtype, self.label)
        if strides is None:
            return flat.reshape(shape)
        bytes_apart = tuple(step * flat.itemsize for step in strides)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, shape, bytes_apart, writeable=False))

    @property
    def label(self) -> str:
        """The tensor and its file, for messages."""
        return f"tensor {self.info.name!r} of {self.file.path}"

    @property
    def has_blocks(self) -> bool:
        """Whether ``read_block`` can be called: some rows and columns lie in the file as runs of neighbours."""
        return self.strides is None or (len(self.strides) == 2 and 1 in self.strides)

    def read_block(self, rows: Run, columns: Run) -> FloatArray:
        """A block of the tensor seen as rows (``rows_of``); only its bytes are read."""
        return _read_block(self, rows, columns)

    @property
    def half(self) -> Half | None:
        """The format, where it has 16 bits and rows lie in the file as they are: ``read_codes`` can be called."""
        plain = self.strides is None or (len(self.strides) == 2 and self.strides[1] == 1)
        return "BF16" if plain and self.info.dtype == "BF16" else "F16" if plain and self.info.dtype == "F16" else None

    def read_codes(self, rows: Run, columns: Run, target: Codes) -> None:
        """Fills ``target`` with a block (see ``read_block``) as its 16-bit numbers are stored. Raises BadModel."""
        _check_block(self, rows, columns)
        apart = rows_of(self.info.shape)[1] if self.strides is None else self.strides[0]
        first = self.offset + 2 * (rows[0] * apart + columns[0])
        with unchanged(self.file) as fd:
            _read_on(fd, first, 2 * apart * (rows[1] - rows[0]), columns)
            read_codes(fd, first, target, apart, self.label)


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
            return read_floats(fd, first, count * width, dtype, tensor.label).reshape(count, width)
        _read_on(fd, first, count * apart * item, inner)
        return read_float_rows(fd, first, count, width, apart, dtype, tensor.label)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def read_floats(fd: int, offset: int, elements: int, dtype: str, what: str) -> FloatArray:
    """``elements`` numbers stored little-endian from byte ``offset`` on, as a flat array.

    F32 and F64 come as they are; F16 and BF16 as float32, which holds each of their values exactly (infinities and
    NaN too). Memory: the result and one panel. ``what`` names the tensor and its file in errors. Raises BadModel for
    a format that is not one of these four or when the file ends too early.
    """
    _check_readable(dtype, what)
    if dtype in _AS_THEY_ARE:
        return _read_as_is(fd, offset, elements, _AS_THEY_ARE[dtype], what)
    result = np.empty(elements, np.float32)
    step = PANEL_BYTES // 2
    panel = np.empty(min(step, elements), np.dtype("<u2"))
    for start in range(0, elements, step):
        raw = panel[: min(step, elements - start)]
        _fill(fd, offset + 2 * start, raw, what)
        _widen(raw, dtype, result[start : start + len(raw)])
    return result


def read_float_rows(
    fd: int, offset: int, rows: int, width: int, apart: int, dtype: str, what: str
) -> npt.NDArray[np.floating[Any]]:
    """``rows`` rows of ``width`` numbers, neighbours beginning ``apart`` numbers after each other, as (rows, width).

    As ``read_floats`` otherwise. Only the bytes of these numbers are read, with one call to the kernel a row.
    """
    _check_readable(dtype, what)
    item = ITEM_BYTES[dtype]
    if dtype in _AS_THEY_ARE:
        result: FloatArray = np.empty((rows, width), _AS_THEY_ARE[dtype])
        _fill_rows(fd, offset, result, apart * item, what)
        return result
    result = np.empty((rows, width), np.float32)
    step = max(1, PANEL_BYTES // max(1, width * item))
    panel = np.empty((min(step, rows), width), np.dtype("<u2"))
    for start in range(0, rows, step):
        raw = panel[: min(step, rows - start)]
        _fill_rows(fd, offset + start * apart * item, raw, apart * item, what)
        _widen(raw, dtype, result[start : start + len(raw)])
    return result


def read_bytes(
    fd: int, offset: int, shape: tuple[int, int], apart: int, what: str
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Rows of bytes, each beginning ``apart`` bytes after the last one. Raises BadModel when the file is too short."""
    result = np.empty(shape, np.uint8)
    if apart == shape[1]:
        _fill(fd, offset, result.reshape(-1), what)
    else:
        _fill_rows(fd, offset, result, apart, what)
    return result


def read_into(fd: int, offset: int, target: npt.NDArray[np.uint8], what: str) -> None:
    """Fills a flat array with the file's bytes from ``offset`` on. Raises BadModel when the file is too short."""
    _fill(fd, offset, target, what)


def read_codes(fd: int, offset: int, target: Codes, apart: int, what: str) -> None:
    """Fills a 2-D array in C order with 16-bit numbers as they are stored; its rows begin ``apart`` numbers after each
    other. Raises BadModel when the file is too short."""
    if target.shape[1] == apart or len(target) == 1:
        _fill(fd, offset, target.reshape(-1), what)
    else:
        _fill_rows(fd, offset, target, apart * target.itemsize, what)


def _widen(raw: npt.NDArray[np.uint16], dtype: str, target: npt.NDArray[np.float32]) -> None:
    if dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        np.left_shift(raw, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)
    else:
        target[...] = raw.view("<f2")


def _check_readable(dtype: str, what: str) -> None:
    if dtype not in READABLE:
        raise BadModel(f"{what} is stored as {dtype}; only F64, F32, F16 and BF16 can be read as weights")


def _read_as_is(fd: int, offset: int, elements: int, dtype: np.dtype[Any], what: str) -> FloatArray:
    result: FloatArray = np.empty(elements, dtype)
    _fill(fd, offset, result, what)
    return result


def _fill(fd: int, offset: int, array: npt.NDArray[Any], what: str) -> None:
    """Reads exactly the array's bytes from ``offset`` on."""
    _fill_bytes(fd, offset, array.view(np.uint8).data if array.size else memoryview(b""), what)


def _fill_rows(fd: int, offset: int, rows: npt.NDArray[Any], apart: int, what: str) -> None:
    """As ``_fill`` for each row of a 2-D array in C order, whose bytes begin ``apart`` bytes after the last one's."""
    if not rows.size:
        return
    view, length = rows.reshape(-1).view(np.uint8).data, rows.shape[1] * rows.itemsize
    for number in range(len(rows)):
        _fill_bytes(fd, offset + number * apart, view[number * length : (number + 1) * length], what)


def _fill_bytes(fd: int, offset: int, view: memoryview, what: str) -> None:
    done = 0
    while done < len(view):
        try:
            # One call moves at most 2 GiB - 4 KiB; ask for no more than 1 GiB.
            got = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
        except OSError as problem:
            raise BadModel(f"{what} can't be read: {problem.strerror}") from None
        if got == 0:
            raise BadModel(f"{what}: the file ends before the tensor does")
        done += got
