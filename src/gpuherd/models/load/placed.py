"""Which device each block of a model goes to: from a plan, or from a device map that somebody wrote. Pure.

A device is the number of a GPU as CUDA counts them in this process, ``cpu`` or ``disk``. Whole blocks only: a block cut
in two computes with tensors of two GPUs, which fails when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.load.options import Offload
from gpuherd.models.names import shown
from gpuherd.models.place.result import GpuLoad, MemoryPlan, format_blocks
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Usage
from gpuherd.models.plan.weights import weight_bytes
from gpuherd.options import did_you_mean

Device = int | str
CPU, DISK = "cpu", "disk"
_CUDA = re.compile(r"(?:cuda:)?(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the blocks of a model go.

    Attributes:
        architecture: the model's.
        devices: of each block, in the order of ``architecture.blocks``.
        simulated: GPUs that are only pretended: their blocks lie in the CPU's memory, under their numbers here.
        loads: what a plan says of each GPU, by its number; empty where there was no plan.
    """

    architecture: Architecture
    devices: tuple[Device, ...]
    simulated: bool = False
    loads: Mapping[int, GpuLoad[Usage]] | None = None

    @property
    def by_block(self) -> dict[str, Device]:
        """Block -> device, as planned."""
        return {block.name: device for block, device in zip(self.architecture.blocks, self.devices, strict=True)}

    @property
    def device_map(self) -> dict[str, Device]:
        """The same as transformers is told it: of pretended GPUs ``cpu``."""
        return {
            name: CPU if self.simulated and isinstance(device, int) else device
            for name, device in self.by_block.items()
        }

    @property
    def gpus(self) -> tuple[int, ...]:
        """The numbers of all GPUs that get a block."""
        return tuple(sorted({device for device in self.devices if isinstance(device, int)}))

    @property
    def input_device(self) -> str:
        """Where token ids go, as torch names it: where the embedding is computed."""
        blocks = zip(self.architecture.blocks, self.devices, strict=True)
        device = next((device for block, device in blocks if block.kind == "embedding"), self.devices[0])
        if device in (CPU, DISK) and self.gpus:
            device = self.gpus[0]
        return CPU if self.simulated or not isinstance(device, int) else f"cuda:{device}"

    @property
    def offloads(self) -> bool:
        """Whether something that belongs to a GPU lies elsewhere: on disk, or on the CPU beside GPUs."""
        return DISK in self.devices or (CPU in self.devices and bool(self.gpus))

    def told(self) -> list[tuple[Device, str]]:
        """Each run of blocks on one device, in words: ``(0, "embedding, layers 0-18")``."""
        runs: list[tuple[Device, str]] = []
        first = 0
        for device, group in groupby(self.devices):
            after_last = first + len(list(group))
            runs.append((device, format_blocks(self.architecture, first, after_last)))
            first = after_last
        return runs


def from_plan(plan: MemoryPlan, numbers: Sequence[int], *, simulated: bool = False) -> Placement:
    """The placement of the plan's first replica; ``numbers`` are those of its GPUs in this process."""
    devices = tuple(numbers[place] for place, load in enumerate(plan.loads) for _ in range(load.first, load.after_last))
    loads = dict(zip(numbers, plan.loads, strict=True))
    return Placement(plan.architecture, devices, simulated, loads)


def all_on(architecture: Architecture, device: Device) -> Placement:
    """Every block on one device."""
    return Placement(architecture, tuple(device for _ in architecture.blocks))


def from_device_map(
    architecture: Architecture,
    device_map: Mapping[str, Any],
    *,
    visible: int,
    allow_offload: Offload | None = None,
    simulated: bool = False,
) -> Placement:
    """The placement that a device map means: module path -> GPU number, ``cuda:0``, ``cpu``, ``disk`` or torch.device.

    Args:
        device_map: a path covers all below it, the longest path counts; ``""`` is the whole model. It is not changed.
        visible: how many GPUs CUDA shows to this process; of simulated ones any number goes.
        allow_offload: ``cpu``: the CPU's memory is allowed beside GPUs; ``disk``: the disk too.

    Raises UsageError: a path that the model has not, a block without a device or on two, a GPU that is not there, a
        device of another kind, offloading that is not allowed.
    """
    wanted = {str(path): device_of(device) for path, device in device_map.items()}
    _check_paths(architecture, wanted)
    placement = Placement(architecture, tuple(_devices(architecture, wanted)), simulated)
    if not simulated and (absent := [number for number in placement.gpus if number >= visible]):
        raise UsageError(
            f"the device map names GPU {absent[0]}, and CUDA shows this process "
            f"{f'GPUs 0 to {visible - 1}' if visible > 1 else 'GPU 0 alone' if visible else 'no GPU'}"
        )
    check_offload(placement, allow_offload)
    _check_first(placement)
    return placement


def _check_first(placement: Placement) -> None:
    """Embeddings that are added to each other lie on one device: not every model carries one to the other's."""
    blocks = [
        each
        for each in zip(placement.architecture.blocks, placement.devices, strict=True)
        if not all(tensor.buffer for tensor in each[0].tensors)
    ]
    for (one, here), (other, there) in pairwise(blocks):
        again = all(tensor.tied_to is not None for tensor in other.tensors)
        if one.kind == other.kind == "embedding" and here != there and not again:
            raise UsageError(
                f"device map: {one.name!r} and {other.name!r} make the first hidden states together, and lie on "
                f"{_and((here, there))}; give both one device"
            )


def check_offload(placement: Placement, allowed: Offload | None) -> None:
    """Raises UsageError where a placement leaves the GPUs and nobody has allowed it."""
    if not placement.offloads or allowed == DISK or (allowed == CPU and DISK not in placement.devices):
        return
    away = [(name, device) for name, device in placement.by_block.items() if device in (CPU, DISK)]
    on_disk = DISK in placement.devices
    raise UsageError(
        f"{len(away)} of {len(placement.devices)} blocks would lie on {_and(device for _, device in away)} "
        f"({away[0][0]} first), where they are computed many times more slowly; allow it with --allow-offload "
        f"{DISK if on_disk else CPU}, or see 'gpuherd plan' for what fits"
    )


def device_of(device: Any) -> Device:
    """A device as it stands in a map: a number, ``cpu`` or ``disk``. Raises UsageError.

    >>> device_of("cuda:1"), device_of(3), device_of("cpu")
    (1, 3, 'cpu')
    """
    text = str(device).strip().lower()
    if text in (CPU, DISK):
        return text
    found = None if isinstance(device, bool) else _CUDA.fullmatch("cuda:0" if text == "cuda" else text)
    if found is None:
        raise UsageError(f"device map: {device!r} is no device; it is a GPU's number, 'cuda:0', 'cpu' or 'disk'")
    return int(found[1])


def weights_by_device(architecture: Architecture, devices: Sequence[Device], precision: Precision) -> dict[Device, int]:
    """Bytes of weights and of their quantisation on each device; a storage that tensors share counts once on each."""
    owners = {tensor.name: tensor for tensor in architecture.tensors()}
    storages: dict[Device, set[str]] = {}
    for block, device in zip(architecture.blocks, devices, strict=True):
        storages.setdefault(device, set()).update(tensor.tied_to or tensor.name for tensor in block.tensors)
    return {device: sum(sum(weight_bytes(owners[name], precision)) for name in sorted(names))
            for device, names in storages.items()}  # fmt: skip


def block_of(path: str, blocks: Iterable[str]) -> str | None:
    """The block that a tensor or module lies in: the longest of these names that its path begins with."""
    known = blocks if isinstance(blocks, set | dict | frozenset) else set(blocks)
    while path:
        if path in known:
            return path
        path = path.rpartition(".")[0]
    return None


def _check_paths(architecture: Architecture, wanted: Mapping[str, Device]) -> None:
    """Every path of the map must be one of the model."""
    known = {""}
    for path in [block.name for block in architecture.blocks] + [tensor.name for tensor in architecture.tensors()]:
        while path not in known:
            known.add(path)
            path = path.rpartition(".")[0]
    for path in wanted:
        if path not in known:
            hint = did_you_mean(path, known, show=repr)
            raise UsageError(f"device map: {shown(architecture.model)} has no part {shown(path)}{hint}")


def _devices(architecture: Architecture, wanted: Mapping[str, Device]) -> Iterable[Device]:
    """The device of each block."""
    for block in architecture.blocks:
        paths = [tensor.name for tensor in block.tensors] or [block.name]
        found = {path: wanted[key] for path in paths if (key := _longest(path, wanted)) is not None}
        if len(found) < len(paths):
            missing = next(path for path in paths if path not in found)
            raise UsageError(f"device map: it says nothing of {missing!r}; name {block.name!r}, or '' for all the rest")
        here = sorted(set(found.values()), key=str)
        if len(here) > 1:
            raise UsageError(
                f"device map: {block.name!r} is cut in two ({_and(here)}); a block computes on one device, so give "
                "the whole of it one"
            )
        yield here[0]


def _longest(path: str, wanted: Mapping[str, Device]) -> str | None:
    while path not in wanted:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _and(devices: Iterable[Device]) -> str:
    words = list(dict.fromkeys(f"GPU {device}" if isinstance(device, int) else str(device) for device in devices))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
