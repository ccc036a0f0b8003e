"""Number formats of stored tensors, and reading them from a file as numpy floats.

Data come by ``os.pread`` in panels of a few MB into the result array. A memory map would be simpler, but the kernel
counts its pages as this process's memory, so that a worker would seem to need a whole checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel

FloatArray = npt.NDArray[np.floating[Any]]

PANEL_BYTES = 8 << 20

# Bytes per element, by safetensors' names.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
# Bits per element of the formats that are narrower than a byte. They are known, so that a header with them can be
# checked, and never read as weights.
ITEM_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

Half = Literal["BF16", "F16"]
Codes = npt.NDArray[np.uint16]

READABLE = frozenset({"F16", "BF16", "F32", "F64"})
_AS_THEY_ARE: Mapping[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}


def stored_bytes(dtype: str, elements: int) -> int | None:
    """Bytes that so many elements take in a file, None for an unknown format or a part of a byte."""
    if dtype in ITEM_BITS:
        bits = elements * ITEM_BITS[dtype]
        return bits // 8 if bits % 8 == 0 else None
    return elements * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else None


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

    As ``read_floats`` otherwise. Only the bytes of the numbers asked for are read, with one call to the kernel a row.
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
