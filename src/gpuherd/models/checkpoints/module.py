"""A ``torch.nn.Module`` in memory as a source of tensors, for the Python API.

Walks the state dictionary, so that the matrices are those of the same model saved: names, fused parameters and ties.
Knows torch; reads no file. Numbers are never copied on the CPU where float32 or float64 views will do, and are moved
from a GPU one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.quantized import quantised_as
from gpuherd.models.tensors.source import BY_TORCH, ITEM_BYTES, FloatArray, Run, TensorInfo, stored_bytes

if TYPE_CHECKING:
    import torch

_DTYPES = {**BY_TORCH, "complex64": "C64"}


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A module's weights: a ``BlockSource``. Later changes of the module are seen.

    Attributes:
        config: the module's own config where it has one, as transformers' models do; else empty.
        tensors: entries of the state dictionary, by name, in its order.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _values: Mapping[str, torch.Tensor] = field(repr=False)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """One tensor, or entries of its first axis, as float32 or float64; a view that can't be written to where no
        conversion is needed."""
        value = self._values[name]
        return _floats(value if stop is None else value[start:stop])

    def has_blocks(self, name: str) -> bool:
        """Whether the tensor can be seen as rows below each other without a copy."""
        value = self._values[name]
        return value.dim() == 2 or value.is_contiguous()

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the tensor seen as (all axes but the last, the last axis)."""
        value = self._values[name]
        flat = value if value.dim() == 2 else value.view(-1, value.shape[-1])
        return _floats(flat[rows[0] : rows[1], columns[0] : columns[1]])


def module_source(module: torch.nn.Module) -> ModuleSource:
    """The weights of a module, as its state dictionary names them.

    Raises BadModel when weights are quantised, on the meta device, or spread over several machines.
    """
    values = {name: value for name, value in module.state_dict().items() if _is_tensor(value)}
    if not values:
        raise BadModel(f"a {type(module).__name__} without weights")
    for name, value in values.items():
        _check(name, value)
    infos = _infos(values)
    config = _config(module)
    quantised = quantised_as(config, infos.values()) or _packed(module)
    if quantised is not None:
        raise BadModel(
            f"the module is quantised ({quantised}): its numbers are codes, not weights. "
            "Load it without quantisation, or analyse its checkpoint"
        )
    return ModuleSource(config, infos, values)


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _check(name: str, value: torch.Tensor) -> None:
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise BadModel(
            f"{name!r} is a {type(value).__name__}: quantised or spread over processes. "
            "Give the plain model, or analyse its checkpoint"
        )
    if value.is_meta:
        raise BadModel(f"{name!r} has no numbers yet (meta device): load the weights first")
    if value.layout != torch.strided:
        raise BadModel(f"{name!r} is stored as {value.layout}; only dense tensors can be analysed")


def _packed(module: torch.nn.Module) -> str | None:
    """The kind of a layer that packs its weights out of the state dictionary's sight, None if there is none."""
    for name, layer in module.named_modules():
        if "quantized" in type(layer).__module__ or hasattr(layer, "_packed_params"):
            return f"{type(layer).__name__} {name!r}"
    return None


def _config(module: torch.nn.Module) -> Mapping[str, Any]:
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    as_dict = to_dict() if callable(to_dict) else config
    return as_dict if isinstance(as_dict, Mapping) else {}


def _infos(values: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Names, shapes and formats; a tensor with the place and shape of an earlier one shares it."""
    seen: dict[tuple[Any, ...], str] = {}
    infos = {}
    for name, value in values.items():
        shape = tuple(value.shape)
        place = (value.device, value.data_ptr(), shape, value.stride(), value.dtype)
        same = name if value.numel() == 0 else seen.setdefault(place, name)
        kind = str(value.dtype).removeprefix("torch.")
        dtype = _DTYPES.get(kind, kind)
        nbytes = stored_bytes(dtype, value.numel()) if dtype in ITEM_BYTES else value.numel() * value.element_size()
        infos[name] = TensorInfo(name, shape, dtype, nbytes or 0, shares=None if same == name else same)
    return infos


def _floats(value: torch.Tensor) -> FloatArray:
    import torch

    if not value.dtype.is_floating_point or value.element_size() < 2:
        raise BadModel(f"numbers of {value.dtype} can't be read as weights")
    plain = value.detach()
    wide = plain if plain.dtype in (torch.float32, torch.float64) else plain.float()
    # cpu() and float() copy only where they must; what is left is the module's own memory.
    array: FloatArray = wide.cpu().numpy()
    if array.base is not None or wide is plain:
        array = array.view()
        array.flags.writeable = False
    return array
