"""One tensor of a merged model, from the files of base and adapter into a file of the result. Needs torch.

What the adapter leaves alone goes from file to file in the kernel; the rest is read into memory that is used again for
the next tensor.
"""

from __future__ import annotations

import errno
import os
from typing import BinaryIO

import torch

from gpuherd.errors import BadModel
from gpuherd.models.checkpoint import Checkpoint
from gpuherd.models.dtypes import read_into
from gpuherd.models.merge_arithmetic import NotFinite, Scratch, merged_tensor
from gpuherd.models.merge_plan import Written
from gpuherd.models.merged import Merged
from gpuherd.models.stored import FileStamp, StoredTensor, read_stored, unchanged

_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE = 1 << 30
# What a file system answers that can't do this; there the bytes are read and written.
_NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_BLOCK = 1 << 23


class TensorWriter:
    """Writes tensors of one merged model."""

    def __init__(self, base: Checkpoint, merged: Merged) -> None:
        self._base = base
        self._merged = merged
        self._scratch = Scratch()

    def append(self, file: BinaryIO, tensor: Written) -> None:
        """Appends a tensor's bytes. Raises BadModel when a file has changed, is damaged, or doesn't suit the format."""
        stored = self._merged.replaced.get(tensor.name) or self._base.stored[tensor.name]
        assert isinstance(stored, StoredTensor)  # noqa: S101 - merging.look_over has refused the others
        if tensor.action == "copy" and stored.strides is None:
            _copy(file, stored)
            return
        weights = _read(stored, tensor.dtype, self._scratch)
        edit = self._merged.edits.get(tensor.name)
        if edit is not None:
            try:
                weights = merged_tensor(edit, weights, self._scratch)
            except NotFinite:
                raise BadModel(
                    f"merged, {tensor.name!r} would hold NaN or infinities: the base is damaged there, or the "
                    "adapter's factors and lora_alpha are too large"
                ) from None
        if tensor.dtype == "F16" and (edit is not None or stored.info.dtype != "F16"):
            _check_range(tensor, weights)
        _write(file, weights)


def _copy(file: BinaryIO, stored: StoredTensor) -> None:
    """The stored bytes as they are, from file to file."""
    file.flush()
    with unchanged(stored.file) as source:
        _send(file.fileno(), source, stored.offset, stored.info.nbytes, stored.file)


def _send(target: int, source: int, offset: int, nbytes: int, stamp: FileStamp) -> None:
    while nbytes:
        try:
            sent = os.sendfile(target, source, offset, min(nbytes, _PIECE))
        except OSError as problem:
            if problem.errno not in _NO_SENDFILE:
                raise
            sent = os.write(target, os.pread(source, min(nbytes, _BLOCK), offset))
        if sent == 0:
            raise BadModel(f"{stamp.path} ends before its last tensor does")
        offset += sent
        nbytes -= sent


def _read(stored: StoredTensor, dtype: str, scratch: Scratch) -> torch.Tensor:
    """A tensor in the format that it is to be written in."""
    if stored.strides is None and stored.info.dtype in _FORMATS:
        what = f"tensor {stored.info.name!r} of {stored.file.path}"
        raw = scratch.bytes("weights", stored.info.nbytes)
        with unchanged(stored.file) as source:
            read_into(source, stored.offset, raw.numpy(), what)
        weights = raw.view(_FORMATS[stored.info.dtype]).reshape(stored.info.shape)
    elif stored.info.dtype in _FORMATS:
        weights = torch.from_numpy(read_stored(stored))
    else:
        raise BadModel(
            f"tensor {stored.info.name!r} of {stored.file.path} has the format {stored.info.dtype} and skips "
            "numbers of its storage, which can't be copied; save the model as safetensors first"
        )
    return weights.to(_FORMATS[dtype])


def _check_range(tensor: Written, weights: torch.Tensor) -> None:
    if not torch.isfinite(weights).all():
        raise BadModel(f"{tensor.name!r} has numbers beyond fp16's 65504; write the result in bf16 (--dtype bf16)")


def _write(file: BinaryIO, weights: torch.Tensor) -> None:
    flat = weights.contiguous().reshape(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)
