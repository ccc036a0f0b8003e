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
            flat = read_floats(fd, self.offset + first * item, (1, span), span, self.info.dtype, self.label).reshape(-1)
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
        width = _check_block(self, rows, columns)
        if self.strides is None or self.strides[1] == 1:
            return _runs(self, rows, columns, width if self.strides is None else self.strides[0])
        return _runs(self, columns, rows, self.strides[1]).T

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
            read_rows(fd, first, target, 2 * apart, self.label)


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
        if width != apart and count != 1:
            _read_on(fd, first, count * apart * item, inner)
        return read_floats(fd, first, (count, width), apart, dtype, tensor.label)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def read_floats(fd: int, offset: int, shape: tuple[int, int], apart: int, dtype: str, what: str) -> FloatArray:
    """Rows of numbers stored little-endian from byte ``offset`` on, which begin ``apart`` numbers after each other.

    F32 and F64 come as they are; F16 and BF16 as float32, which holds each of their values exactly (infinities and
    NaN too). Memory: the result and one panel. ``what`` names the tensor and its file in errors. Only the bytes of
    these numbers are read, with one call to the kernel a row where rows are apart. Raises BadModel for a format that is
    not one of these four or when the file ends too early.
    """
    if dtype not in READABLE:
        raise BadModel(f"{what} is stored as {dtype}; only F64, F32, F16 and BF16 can be read as weights")
    item = ITEM_BYTES[dtype]
    result: FloatArray = np.empty(shape, _AS_THEY_ARE.get(dtype, np.float32))
    if dtype in _AS_THEY_ARE:
        read_rows(fd, offset, result, apart * item, what)
        return result
    if shape[1] == apart or shape[0] == 1:  # one run of numbers, which panels may cut anywhere
        target, apart = result.reshape(-1, 1), 1
    else:
        target = result
    step = max(1, PANEL_BYTES // max(1, target.shape[1] * item))
    panel = np.empty((min(step, len(target)), target.shape[1]), np.dtype("<u2"))
    for start in range(0, len(target), step):
        wide = target[start : start + step]
        raw = panel[: len(wide)]
        read_rows(fd, offset + start * apart * item, raw, apart * item, what)
        if dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            np.left_shift(raw, np.uint32(16), out=wide.view(np.uint32), dtype=np.uint32)
        else:
            wide[...] = raw.view("<f2")
    return result


def read_rows(fd: int, offset: int, target: npt.NDArray[Any], apart: int, what: str) -> None:
    """Fills a 2-D array in C order with the file's bytes as they are; its rows begin ``apart`` bytes after each other.
    Raises BadModel when the file is too short."""
    if not target.size:
        return
    view, length = target.reshape(-1).view(np.uint8).data, target.shape[1] * target.itemsize
    if apart == length:  # all rows at once
        length = len(view)
    for number, start in enumerate(range(0, len(view), length)):
        done, first = 0, offset + number * apart
        while done < length:
            try:
                # One call moves at most 2 GiB - 4 KiB; ask for no more than 1 GiB.
                stop = min(done + (1 << 30), length)
                got = os.preadv(fd, [view[start + done : start + stop]], first + done)
            except OSError as problem:
                raise BadModel(f"{what} can't be read: {problem.strerror}") from None
            if got == 0:
                raise BadModel(f"{what}: the file ends before the tensor does")
            done += got
