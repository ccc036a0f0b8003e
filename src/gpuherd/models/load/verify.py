"""Whether a loaded model is what was planned: each tensor on the device of its block, in the right precision, none
missing, and as large as predicted.

``tensors_of`` reads a model as plain data; all comparing is pure. It knows neither plans nor transformers, but what
PEFT and bitsandbytes do to the names and weights of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.models.load.options import CPU, DISK, Device
from gpuherd.models.load.placement import Placement, block_of

_SHOWN = 3
# PEFT wraps the model and the modules that it changes.
_WRAPPING = "base_model.model."
_WRAPPED = re.compile(
    r"\.base_layer|\.original_module|(?<=lora_A)\.default|(?<=lora_B)\.default|(?<=_vector)\.default|"
    r"(?<=lora_embedding_A)\.default|(?<=lora_embedding_B)\.default|(?<=modules_to_save)\.default"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A parameter or buffer of a loaded model.

    Attributes:
        name: its path, as the model without adapters names it.
        device: ``cpu``, ``cuda:0``, ``meta``.
        dtype: ``bfloat16``, ``int8``, ...
        storage: what tensors of one storage have in common, a number beside the device.
        nbytes: bytes of that storage.
        state: bytes of what bitsandbytes keeps beside it.
        codes: whether its numbers are codes of bitsandbytes.
        buffer: it is no parameter.
    """

    name: str
    device: str
    dtype: str
    storage: int
    nbytes: int
    state: int = 0
    codes: bool = False
    buffer: bool = False


def tensors_of(model: Any) -> list[Seen]:
    """All parameters and buffers of a torch module, tied ones under each of their names."""
    tensors = [(name, each, False) for name, each in model.named_parameters(remove_duplicate=False)]
    tensors += [(name, each, True) for name, each in model.named_buffers(remove_duplicate=False)]
    return [_seen(plain_name(name), each, buffer) for name, each, buffer in tensors]


def _seen(name: str, tensor: Any, buffer: bool) -> Seen:
    state = _state_tensors(tensor)
    meta = tensor.device.type == "meta"
    storage = None if meta else tensor.untyped_storage()
    return Seen(
        name=name,
        device=str(tensor.device),
        dtype=str(tensor.dtype).removeprefix("torch."),
        storage=id(tensor) if storage is None else storage.data_ptr(),
        nbytes=0 if storage is None else storage.nbytes(),
        state=sum(each.untyped_storage().nbytes() for each in state),
        codes=bool(state),
        buffer=buffer,
    )


def _state_tensors(weight: Any) -> list[Any]:
    """What bitsandbytes keeps beside a weight; nothing beside a plain one."""
    if getattr(weight, "SCB", None) is not None:
        return [weight.SCB]
    state = getattr(weight, "quant_state", None)
    if state is None:
        return []
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def plain_name(name: str) -> str:
    """The name that a tensor has in the model without PEFT's wrapping.

    >>> plain_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return _WRAPPED.sub("", name.removeprefix(_WRAPPING))


def misplaced(placement: Placement, seen: Iterable[Seen]) -> list[str]:
    """A sentence for each tensor that lies elsewhere than its block was planned to; on ``meta`` above all."""
    devices, on_gpus = placement.by_block, bool(placement.gpus) and not placement.simulated
    problems: list[str] = []
    for each in seen:
        block = block_of(each.name, devices)
        if block is None and each.buffer and each.device != "meta":
            continue
        if block is None:
            problems.append(f"{each.name} is part of no block that was planned")
            continue
        allowed = _devices_for(devices[block], placement.simulated, on_gpus)
        if each.device not in allowed and not (each.buffer and devices[block] in (CPU, DISK)):
            problems.append(f"{each.name} is on {each.device}, planned on {_told(devices[block])}")
    return problems


def _devices_for(device: Device, simulated: bool, on_gpus: bool) -> tuple[str, ...]:
    """Where torch says that a tensor of such a block is. What is offloaded is ``meta`` until it is computed."""
    if isinstance(device, int):
        return (CPU,) if simulated else (f"cuda:{device}",)
    if device == DISK:
        return ("meta",)
    return (CPU, "meta") if on_gpus else (CPU,)


def _told(device: Device) -> str:
    return f"GPU {device}" if isinstance(device, int) else device


def of_other_dtypes(seen: Iterable[Seen], expected: frozenset[str], float32: frozenset[str]) -> list[str]:
    """A sentence for each plain weight of another dtype than expected.

    Args:
        expected: the dtypes that there may be.
        float32: names of those that are kept in float32.
    """
    return [
        f"{each.name} is in {each.dtype}, not in {' or '.join(sorted(expected))}"
        for each in seen
        if not (
            each.buffer or each.codes or each.dtype in expected or (each.dtype == "float32" and each.name in float32)
        )
        and each.dtype.startswith(("float", "bfloat"))
    ]


def untied(seen: Sequence[Seen], ties: Mapping[str, str]) -> list[str]:
    """A sentence for each tensor that shares no storage with the one that it is tied to, though on the same device."""
    by_name = {each.name: each for each in seen}
    pairs = ((by_name.get(name), by_name.get(owner)) for name, owner in ties.items())
    return [
        f"{one.name} is a copy of {other.name}, to which it is tied"
        for one, other in pairs
        if one is not None
        and other is not None
        and one.device == other.device != "meta"
        and one.storage != other.storage
    ]


def bytes_by_device(placement: Placement, seen: Sequence[Seen]) -> dict[Device, int]:
    """Bytes of weights and their quantisation on each planned device, each storage once on each; what is offloaded is
    not counted, nor buffers that no plan knows."""
    devices = placement.by_block
    planned = {tensor.name for tensor in placement.architecture.tensors()}
    found: dict[Device, dict[int, int]] = {}
    for each in (each for each in seen if each.device != "meta" and (not each.buffer or each.name in planned)):
        block = block_of(each.name, devices)
        if block is not None:
            found.setdefault(devices[block], {})[each.storage] = each.nbytes + each.state
    return {device: sum(storages.values()) for device, storages in found.items()}


def bytes_by_dtype(seen: Sequence[Seen]) -> dict[str, int]:
    """Bytes of the weights by dtype, each storage once."""
    found: dict[str, dict[tuple[str, int], int]] = {}
    for each in (each for each in seen if not each.buffer and each.device != "meta"):
        found.setdefault(each.dtype, {})[each.device, each.storage] = each.nbytes
    return {dtype: sum(storages.values()) for dtype, storages in sorted(found.items())}


def in_short(problems: Sequence[str]) -> str:
    """Some of the sentences, and how many more there are."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more
