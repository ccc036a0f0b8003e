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
from gpuherd.models.dtypes import FloatArray, read_floats, stored_bytes
from gpuherd.models.source import TensorInfo


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as it was when its header was read; a file that no longer looks so has been changed since."""

    path: Path
    size: int
    modified_ns: int


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
        yield fd, FileStamp(path, status.st_size, status.st_mtime_ns)
    finally:
        os.close(fd)


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
    what = f"tensor {info.name!r} of {tensor.file.path}"
    with opened(tensor.file.path) as (fd, stamp):
        if stamp != tensor.file:
            raise BadModel(f"{tensor.file.path} was changed while it was being read")
        flat = read_floats(fd, tensor.offset + first * item, span, info.dtype, what)
    if strides is None:
        return flat.reshape(shape)
    bytes_apart = tuple(step * flat.itemsize for step in strides)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, shape, bytes_apart, writeable=False))


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
