"""The tensors of a PyTorch file (``.bin``, ``.pt``, ``.pth``) and where they lie, without torch.

A PyTorch file is a pickle that refers to storages by key, and the storages' raw bytes: in a zip archive since torch
1.6, one after the other before. A pickle can name any function to call. Only the handful that rebuild plain tensors
are known here, and each of them is replaced by one that notes where the tensor lies: nothing of torch or of the file
is ever called, which is stricter than ``torch.load(weights_only=True)``. Unlike it, this costs no import of torch,
needs no memory map, and reads one tensor at a time from the old format too.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, c_strides, check_shape, opened
from gpuherd.models.tensors.source import BY_TORCH, TensorInfo, stored_bytes

MAX_PICKLE_BYTES = 100_000_000
# How often tensors may hold the same numbers, as views of one storage.
MAX_TIMES = 64
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001

_STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "CharStorage": "I8", "ByteStorage": "U8", "ShortStorage": "I16", "IntStorage": "I32", "LongStorage": "I64",
    "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
# Checkpoints of training programs keep the weights under one of these keys.
_NESTS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True, slots=True)
class _Storage:
    """Raw numbers under a key. ``elements`` counts numbers of ``dtype``."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A view of a storage; offset and strides in elements."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _WantsCode(pickle.UnpicklingError):
    """The pickle names a class or function that is not needed for plain tensors."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for ``torch.FloatStorage`` or ``torch.bfloat16``: a number format named in the pickle."""

    dtype: str


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> _Tensor:
    return _Tensor(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_tensor_v3(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    _requires_grad: bool,
    _hooks: object,
    dtype: _Named,
    *_: object,
) -> _Tensor:
    return _Tensor(storage, dtype.dtype, offset, tuple(shape), tuple(strides))


_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}


class _Unpickler(pickle.Unpickler):
    """Builds dictionaries, numbers and our notes of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[(module, name)]
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return _Named(_STORAGES[name])
        if module == "torch" and name in BY_TORCH:
            return _Named(BY_TORCH[name])
        raise _WantsCode(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """``("storage", format, key, device, elements[, view])``."""
        kind, named, key, _device, elements, *view = pid
        if kind != "storage" or (view and view[0] is not None):
            raise pickle.UnpicklingError("unknown kind of reference")
        if not isinstance(named, _Named) or not isinstance(key, str) or type(elements) is not int or elements < 0:
            raise pickle.UnpicklingError("damaged reference to a storage")
        return _Storage(key, named.dtype, elements)


def read_header(path: Path) -> list[StoredTensor]:
    """The file's tensors in the order of its state dictionary; values that are no tensors are left out.

    Raises MissingModel or BadModel, naming the file: truncated, no PyTorch file, or a pickle that wants code.
    """
    with opened(path) as (fd, stamp), open(fd, "rb", closefd=False) as file:
        if stamp.size == 0:
            raise BadModel(f"{path} is empty")
        try:
            if zipfile.is_zipfile(file):
                content, starts = _read_zip(file, path)
            else:
                file.seek(0)
                content, starts = _read_legacy(file, path)
            return _locate(_state_dict(content, path), starts, stamp)
        except _WantsCode as wanted:
            raise BadModel(
                f"{path} is a pickle that wants to run code ({wanted}); it is not opened. "
                "Save the weights as safetensors, or as a plain state dictionary of tensors"
            ) from None
        except BadModel:
            raise
        except Exception as problem:
            # A hostile or damaged pickle can make the unpickler raise anything, and fill our notes with anything.
            raise BadModel(f"{path} is damaged or no PyTorch file: {_short(problem)}") from None


def _short(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem)[:120]}"


def _read_zip(file: IO[bytes], path: Path) -> tuple[Any, dict[str, int]]:
    """The unpickled content, and the first byte of each storage in the file, by key."""
    with zipfile.ZipFile(file) as archive:
        names = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise BadModel(f"{path} is a zip archive, but not of PyTorch weights (it has no data.pkl)")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}constants.pkl" in names:
            raise BadModel(f"{path} is a TorchScript program, not a file of weights")
        if f"{root}byteorder" in names and _beginning(archive, f"{root}byteorder") != b"little":
            raise BadModel(f"{path} was written on a big-endian machine; its weights can't be read here")
        if names[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise BadModel(f"{path}: its pickle of {names[pickles[0]].file_size} bytes is over the limit")
        with archive.open(pickles[0]) as stream:
            content = _Unpickler(stream, encoding="utf-8").load()
    starts = {
        name.removeprefix(f"{root}data/"): _data_start(file, info, path)
        for name, info in names.items()
        if name.startswith(f"{root}data/") and not info.is_dir()
    }
    return content, starts


def _beginning(archive: zipfile.ZipFile, name: str) -> bytes:
    """The first bytes of a small member, which may claim to be large."""
    with archive.open(name) as stream:
        return stream.read(16)


def _data_start(file: IO[bytes], info: zipfile.ZipInfo, path: Path) -> int:
    """Where an archive member's bytes begin: after its local header, whose name and extra field vary in length."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise BadModel(f"{path}: its weights are compressed, which PyTorch does not do")
    file.seek(info.header_offset)
    local = file.read(30)
    if local[:4] != b"PK\x03\x04":
        raise BadModel(f"{path} is damaged: no entry where its list says that {info.filename!r} begins")
    return info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")


def _read_legacy(file: IO[bytes], path: Path) -> tuple[Any, dict[str, int]]:
    """As ``_read_zip``, for the format before torch 1.6: five pickles, then each storage's count and bytes."""
    if _Unpickler(file).load() != LEGACY_MAGIC or _Unpickler(file).load() != LEGACY_PROTOCOL:
        raise BadModel(f"{path} is no file of PyTorch weights")
    system = _Unpickler(file).load()
    if not system.get("little_endian", True):
        raise BadModel(f"{path} was written on a big-endian machine; its weights can't be read here")
    storages: dict[str, _Storage] = {}
    unpickler = _LegacyUnpickler(file, storages)
    content = unpickler.load()
    keys = _Unpickler(file).load()
    starts: dict[str, int] = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        if key not in storages or count != storages[key].elements:
            raise BadModel(f"{path} is damaged: storage {key!r} is not as its list says")
        starts[key] = file.tell()
        file.seek(stored_bytes(storages[key].dtype, count) or 0, 1)
    return content, starts


class _LegacyUnpickler(_Unpickler):
    """Also notes the storages by key, whose sizes the old format needs to find the next one."""

    def __init__(self, file: IO[bytes], storages: dict[str, _Storage]) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def persistent_load(self, pid: Any) -> _Storage:
        storage = super().persistent_load(pid)
        return self._storages.setdefault(storage.key, storage)


def _state_dict(content: Any, path: Path) -> dict[str, _Tensor]:
    """The tensors by name, looked for one level down too."""
    if isinstance(content, dict):
        for candidate in (content, *(content.get(nest) for nest in _NESTS)):
            if isinstance(candidate, dict):
                found = {name: value for name, value in candidate.items() if isinstance(value, _Tensor)}
                if found and all(isinstance(name, str) for name in found):
                    return found
    raise BadModel(f"{path} holds no state dictionary of tensors")


def _locate(tensors: dict[str, _Tensor], starts: Mapping[str, int], file: FileStamp) -> list[StoredTensor]:
    result = []
    seen: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], str] = {}
    claimed: dict[str, int] = {}
    for name, tensor in tensors.items():
        _check(name, tensor, starts, file)
        item = stored_bytes(tensor.dtype, 1) or 1
        same = seen.setdefault((tensor.storage.key, tensor.offset, tensor.shape, tensor.strides), name)
        nbytes = math.prod(tensor.shape) * item
        if same == name:
            _claim(claimed, tensor.storage, nbytes, file)
        info = TensorInfo(name, tensor.shape, tensor.dtype, nbytes, shares=None if same == name else same)
        strides = None if tensor.strides == c_strides(tensor.shape) or nbytes == 0 else tensor.strides
        result.append(StoredTensor(info, file, starts[tensor.storage.key] + tensor.offset * item, strides))
    _check_storages({tensor.storage.key: tensor.storage for tensor in tensors.values()}, starts, file)
    return result


def _check_storages(storages: Mapping[str, _Storage], starts: Mapping[str, int], file: FileStamp) -> None:
    """No two storages over the same bytes: an archive can list one member under any number of names."""
    sizes = {key: stored_bytes(storage.dtype, storage.elements) or 0 for key, storage in storages.items()}
    end = 0
    for key in sorted(sizes, key=lambda key: (starts[key], sizes[key])):
        if sizes[key] and starts[key] < end:
            raise BadModel(f"{file.path} is damaged: its storage {key!r} overlaps another")
        end = max(end, starts[key] + sizes[key])


def _claim(claimed: dict[str, int], storage: _Storage, nbytes: int, file: FileStamp) -> None:
    """Counts what views of a storage hold together: each line of the pickle could claim the whole of it as work."""
    claimed[storage.key] = claimed.get(storage.key, 0) + nbytes
    if claimed[storage.key] > MAX_TIMES * (stored_bytes(storage.dtype, storage.elements) or 0):
        raise BadModel(f"{file.path}: its tensors overlap so much that they hold their numbers {MAX_TIMES} times over")


def _check(name: str, tensor: _Tensor, starts: Mapping[str, int], file: FileStamp) -> None:
    """The tensor must lie within its storage and the storage within the file."""
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    if len(tensor.shape) != len(tensor.strides) or not all(type(number) is int and number >= 0 for number in numbers):
        raise BadModel(f"{file.path}: tensor {name!r} has a damaged entry")
    check_shape(f"{file.path}: tensor {name!r}", tensor.shape)
    key, storage = tensor.storage.key, tensor.storage
    if key not in starts:
        raise BadModel(f"{file.path} is damaged: the numbers of tensor {name!r} are not in it")
    item = stored_bytes(tensor.dtype, 1) or 1
    size = stored_bytes(storage.dtype, storage.elements) or 0
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.strides, strict=True))
    elements = math.prod(tensor.shape)
    # The second test refuses repeated (expanded) views: a few bytes could claim any amount of memory.
    if elements and ((tensor.offset + last + 1) * item > size or elements * item > size):
        raise BadModel(f"{file.path}: tensor {name!r} reaches beyond its storage")
    if starts[key] + size > file.size:
        raise BadModel(f"{file.path} is truncated: the numbers of tensor {name!r} are not all there")
