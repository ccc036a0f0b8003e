"""The tensors of a merged model: an adapter's sums as PEFT's ``merge_and_unload`` computes and rounds them on a CPU,
bit for bit, and writing them. Needs torch.

``edits`` merges without rounding, for analysis; this is for weights that are to be saved and used. What PEFT 0.21 does:
factors become float32 (float64 for a float64 base), the whole product B A is taken at once and multiplied by s, and the
sum is rounded to the base's format once. Only for embeddings and fused experts the update itself is rounded before it
is added. DoRA's norms are those of the unrounded sum. The very same products of torch are taken of tensors of the same
shapes, because another order of summation would round differently; what is done number by number may be done in any
order, and is done in pieces that stay in the processor's cache.

What the adapter leaves alone goes from file to file in the kernel; the rest is read into memory that is used again for
the next tensor.
"""

from __future__ import annotations

import errno
import math
import os
from typing import BinaryIO

import torch

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import Checkpoint
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, read_rows, unchanged
from gpuherd.models.lora.edits import BiasEdit, Edit, ExpertEdit, Factors, MatrixEdit, OneExpertEdit
from gpuherd.models.lora.merge_plan import MergedTensor
from gpuherd.models.lora.update import Merged

# ---- sums ------------------------------------------------------------------------------------------------------------

# Numbers that are scaled, widened, added and rounded at a time: 1 MB of float32.
PIECE = 1 << 18
# Factors of a mixture's two parameters.
KEPT_FACTORS = 4


class UpdateNotFinite(ArithmeticError):
    """A sum that is no number, or beyond the range of its format."""


class Scratch:
    """Memory that is used again for each tensor: getting it anew from the system costs more than the sums."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._factors: dict[tuple[str, bool], torch.Tensor] = {}

    def bytes(self, purpose: str, count: int) -> torch.Tensor:
        """Room for so many bytes; what was there for this purpose before is overwritten."""
        kept = self._kept.get(purpose)
        if kept is None or kept.numel() < count:
            self._kept.pop(purpose, None)
            kept = self._kept[purpose] = torch.empty(count, dtype=torch.uint8)
        return kept[:count]

    def floats(self, purpose: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for a float32 tensor."""
        return self.bytes(purpose, 4 * math.prod(shape)).view(torch.float32).view(shape)

    def factor(self, tensor: StoredTensor, weight: torch.Tensor) -> torch.Tensor:
        """A factor that many tensors need; the last few are kept."""
        key = (tensor.info.name, weight.dtype is torch.float64)
        if key not in self._factors:
            if len(self._factors) >= KEPT_FACTORS:
                self._factors.pop(next(iter(self._factors)))
            self._factors[key] = _factor(tensor, weight)
        return self._factors[key]


def merged_tensor(edit: Edit, weight: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The base's tensor with the adapter's edit in it, in the same format; ``weight`` may be changed in place.

    Memory: the update in float32 (DoRA: twice), in the shape of the weight. Raises NotFinite.
    """
    if isinstance(edit, MatrixEdit) and _is_linear_lora(edit, weight):
        _add_in_pieces(edit.factors, weight, scratch)
        return weight
    merged = _edited(edit, weight, scratch)
    if merged.dtype is not torch.float16:  # whose narrow range is looked at where it is written
        _check_finite(merged)
    return merged


def _edited(edit: Edit, weight: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    if isinstance(edit, BiasEdit):
        weight += _factor(edit.bias, weight) * edit.scaling
        return weight
    if isinstance(edit, ExpertEdit):
        weight += _expert_update(edit, weight).to(weight.dtype)
        return weight
    if isinstance(edit, OneExpertEdit):
        weight += _update_of_one(edit, weight, scratch).to(weight.dtype)
        return weight
    update = _matrix_update(edit, weight)
    if edit.factors.magnitude is not None:
        return _rescaled(edit, edit.factors.magnitude, weight, update)
    if edit.factors.embedding:
        update = update.to(weight.dtype)
    weight += update
    return weight


def _factor(tensor: StoredTensor, weight: torch.Tensor) -> torch.Tensor:
    """A factor as PEFT has it: float32, or float64 for a float64 base. Raises BadModel where it is damaged."""
    factor = torch.from_numpy(tensor.read()).to(torch.float64 if weight.dtype is torch.float64 else torch.float32)
    if not torch.isfinite(factor).all():
        raise BadModel(f"{tensor.file.path}: {tensor.info.name!r} holds NaN or infinities; the adapter is damaged")
    return factor


def _both(factors: Factors, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _factor(factors.a, weight), _factor(factors.b, weight)


def _is_linear_lora(edit: MatrixEdit, weight: torch.Tensor) -> bool:
    """Whether it is a Linear's LoRA, which nearly all are."""
    factors = edit.factors
    return (
        weight.ndim == len(factors.a.info.shape) == 2
        and weight.dtype is not torch.float64
        and not (edit.transposed or factors.embedding or factors.magnitude is not None)
    )


def _add_in_pieces(factors: Factors, weight: torch.Tensor, scratch: Scratch) -> None:
    """weight += s B A with one rounding, in place."""
    a, b = _both(factors, weight)
    product = scratch.floats("product", tuple(weight.shape))
    torch.matmul(b, a, out=product)
    sums, numbers = product.view(-1), weight.view(-1)
    widened = scratch.floats("piece", (PIECE,))
    for start in range(0, len(numbers), PIECE):
        piece, target = sums[start : start + PIECE], numbers[start : start + PIECE]
        piece.mul_(factors.scaling)
        piece.add_(widened[: len(target)].copy_(target))
        _check_finite(piece)
        target.copy_(piece)


def _check_finite(numbers: torch.Tensor) -> None:
    # A sum is quick and nearly always enough; it may itself be too large.
    if not math.isfinite(numbers.sum().item()) and not torch.isfinite(numbers).all():
        raise UpdateNotFinite


def _matrix_update(edit: MatrixEdit, weight: torch.Tensor) -> torch.Tensor:
    """s B A in the orientation of the stored weight."""
    a, b = _both(edit.factors, weight)
    product: torch.Tensor
    if a.ndim == 2:
        product = b @ a
        product *= edit.factors.scaling
        return product.T if edit.transposed else product
    if tuple(weight.shape[2:4]) == (1, 1):  # a convolution with kernels of one position
        product = b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)
        return product.unsqueeze(2).unsqueeze(3) * edit.factors.scaling
    convolve = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[a.ndim]
    product = convolve(a.transpose(0, 1), b)
    return product.transpose(0, 1) * edit.factors.scaling


def _rescaled(edit: MatrixEdit, magnitude: StoredTensor, weight: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """DoRA: m (W + s B A) / |W + s B A|, rounded at the end."""
    total = weight + update
    magnitudes = _factor(magnitude, weight)
    if total.ndim > 2:
        norms = total.norm(p=2, dim=tuple(range(1, total.ndim)), keepdim=True)
        factor: torch.Tensor = magnitudes.reshape(norms.shape) / norms
    else:
        norms = torch.linalg.norm(total.T if edit.transposed else total, dim=1)
        factor = (magnitudes.reshape(-1) / norms).view((1, -1) if edit.transposed else (-1, 1))
    return (factor * total).to(weight.dtype)


def _update_of_one(edit: OneExpertEdit, weight: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """s B[e] A[e] of one expert, of its fused parameter's outputs that the weight holds."""
    a, b = (scratch.factor(tensor, weight) for tensor in (edit.factors.a, edit.factors.b))
    a = a.reshape(edit.experts, -1, a.shape[-1])[edit.expert : edit.expert + 1]
    b = b.reshape(b.shape[0], -1, edit.experts)[:, :, edit.expert : edit.expert + 1]
    update: torch.Tensor = torch.einsum("o r e, e r i -> e o i", b, a)[0, slice(*edit.rows)]
    return update * edit.factors.scaling


def _expert_update(edit: ExpertEdit, weight: torch.Tensor) -> torch.Tensor:
    """s B[e] A[e] of all experts, in the shape of the parameter."""
    a, b = _both(edit.factors, weight)
    if edit.experts == 1:
        product = (b @ a) * edit.factors.scaling
        return (product.T if edit.transposed else product).unsqueeze(0)
    a = a.reshape(edit.experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, edit.experts)
    update: torch.Tensor = torch.einsum("o r e, e r i -> e i o" if edit.transposed else "o r e, e r i -> e o i", b, a)
    return update * edit.factors.scaling


# ---- writing ---------------------------------------------------------------------------------------------------------

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

    def append(self, file: BinaryIO, tensor: MergedTensor) -> None:
        """Appends a tensor's bytes. Raises BadModel when a file has changed, is damaged, or doesn't suit the format."""
        stored = self._merged.replaced.get(tensor.name) or self._base.stored[tensor.name]
        assert isinstance(stored, StoredTensor)  # noqa: S101 - merge.prepare_merge has refused the others
        if tensor.action == "copy" and stored.strides is None:
            _copy(file, stored)
            return
        weights = _read(stored, tensor.dtype, self._scratch)
        edit = self._merged.edits.get(tensor.name)
        if edit is not None:
            try:
                weights = merged_tensor(edit, weights, self._scratch)
            except UpdateNotFinite:
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
        raw = scratch.bytes("weights", stored.info.nbytes)
        with unchanged(stored.file) as source:
            read_rows(source, stored.offset, raw.numpy()[None], stored.info.nbytes, stored.label)
        weights = raw.view(_FORMATS[stored.info.dtype]).reshape(stored.info.shape)
    elif stored.info.dtype in _FORMATS:
        weights = torch.from_numpy(stored.read())
    else:
        raise BadModel(
            f"{stored.label} has the format {stored.info.dtype} and skips "
            "numbers of its storage, which can't be copied; save the model as safetensors first"
        )
    return weights.to(_FORMATS[dtype])


def _check_range(tensor: MergedTensor, weights: torch.Tensor) -> None:
    if not torch.isfinite(weights).all():
        raise BadModel(f"{tensor.name!r} has numbers beyond fp16's 65504; write the result in bf16 (--dtype bf16)")


def _write(file: BinaryIO, weights: torch.Tensor) -> None:
    flat = weights.contiguous().reshape(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)
