"""Which device each block of a model goes to: from a plan, from a device map, or off the GPUs where that is allowed.
Pure.

A device is the number of a GPU as CUDA counts them in this process, ``cpu`` or ``disk``. Whole blocks only: a block cut
in two computes with tensors of two GPUs, which fails when it runs. ``fitted`` brings a placement together with the
model that a class of transformers really builds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture, Block, Tensor
from gpuherd.models.load.options import CPU, DISK, Device, Offload
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.usage import CostTable, Usage
from gpuherd.models.memory.weights import Precision, weight_bytes
from gpuherd.models.names import quoted
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.result import GpuLoad, MemoryPlan, format_blocks
from gpuherd.models.place.split import cuts_allowed, ties_together
from gpuherd.options import did_you_mean

_CUDA = re.compile(r"(?:cuda:)?(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """Where the blocks of a model go.

    Attributes:
        architecture: the model's.
        devices: of each block, in the order of ``architecture.blocks``.
        simulated: GPUs that are only pretended: their blocks are in the CPU's memory, under their numbers here.
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
        """The same for transformers: ``cpu`` for simulated GPUs."""
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
        """Whether something that belongs to a GPU is elsewhere: on disk, or on the CPU although there are GPUs."""
        return DISK in self.devices or (CPU in self.devices and bool(self.gpus))

    def format_blocks(self) -> list[tuple[Device, str]]:
        """Each run of blocks on one device, in words: ``(0, "embedding, layers 0-18")``."""
        runs: list[tuple[Device, str]] = []
        first = 0
        for device, group in groupby(self.devices):
            after_last = first + len(list(group))
            runs.append((device, format_blocks(self.architecture, first, after_last)))
            first = after_last
        return runs


def from_plan(plan: MemoryPlan, numbers: Sequence[int], *, simulated: bool = False) -> BlockPlacement:
    """The placement of the plan's first replica; ``numbers`` are those of its GPUs in this process."""
    devices = tuple(numbers[place] for place, load in enumerate(plan.loads) for _ in range(load.first, load.after_last))
    loads = dict(zip(numbers, plan.loads, strict=True))
    return BlockPlacement(plan.architecture, devices, simulated, loads)


def all_on(architecture: Architecture, device: Device) -> BlockPlacement:
    """Every block on one device."""
    return BlockPlacement(architecture, tuple(device for _ in architecture.blocks))


def from_device_map(
    architecture: Architecture,
    device_map: Mapping[str, Any],
    *,
    visible: int,
    allow_offload: Offload | None = None,
    simulated: bool = False,
) -> BlockPlacement:
    """The placement that a device map means: module path -> GPU number, ``cuda:0``, ``cpu``, ``disk`` or torch.device.

    Args:
        device_map: a path covers all below it, the longest path counts; ``""`` is the whole model. It is not changed.
        visible: how many GPUs CUDA shows to this process; of simulated ones any number goes.
        allow_offload: ``cpu``: the CPU's memory is allowed in addition to GPUs; ``disk``: the disk too.

    Raises UsageError: a path that the model has not, a block without a device or on two, a GPU that is not there, a
        device of another kind, offloading that is not allowed.
    """
    requested = {str(path): device_of(device) for path, device in device_map.items()}
    _check_paths(architecture, requested)
    placement = BlockPlacement(architecture, tuple(_devices(architecture, requested)), simulated)
    if not simulated and (absent := [number for number in placement.gpus if number >= visible]):
        raise UsageError(
            f"the device map names GPU {absent[0]}, and CUDA shows this process "
            f"{f'GPUs 0 to {visible - 1}' if visible > 1 else 'GPU 0 alone' if visible else 'no GPU'}"
        )
    check_offload(placement, allow_offload)
    _check_first(placement)
    return placement


def _check_first(placement: BlockPlacement) -> None:
    """Embeddings that are added to each other need one device: not every model carries one to the other's."""
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


def check_offload(placement: BlockPlacement, allowed: Offload | None) -> None:
    """Raises UsageError where a placement leaves the GPUs and that was not allowed."""
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
    """The block of a tensor or module: the longest of these names that its path begins with."""
    known = blocks if isinstance(blocks, set | dict | frozenset) else set(blocks)
    while path:
        if path in known:
            return path
        path = path.rpartition(".")[0]
    return None


def _check_paths(architecture: Architecture, requested: Mapping[str, Device]) -> None:
    """Every path of the map must be one of the model."""
    known = {""}
    for path in [block.name for block in architecture.blocks] + [tensor.name for tensor in architecture.tensors()]:
        while path not in known:
            known.add(path)
            path = path.rpartition(".")[0]
    for path in requested:
        if path not in known:
            hint = did_you_mean(path, known, show=repr)
            raise UsageError(f"device map: {quoted(architecture.model)} has no part {quoted(path)}{hint}")


def _devices(architecture: Architecture, requested: Mapping[str, Device]) -> Iterable[Device]:
    """The device of each block."""
    for block in architecture.blocks:
        paths = [tensor.name for tensor in block.tensors] or [block.name]
        found = {path: requested[key] for path in paths if (key := _longest(path, requested)) is not None}
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


def _longest(path: str, requested: Mapping[str, Device]) -> str | None:
    while path not in requested:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _and(devices: Iterable[Device]) -> str:
    words = list(dict.fromkeys(f"GPU {device}" if isinstance(device, int) else str(device) for device in devices))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ---- offloading ------------------------------------------------------------------------------------------------------

# accelerate computes an offloaded block on the first GPU: its weights come there temporarily, and what it keeps of each
# sequence stays there. So the first GPU must have room for the largest of them and for all that they keep.


def offloaded(
    architecture: Architecture,
    gpus: Sequence[GpuSpec],
    precision: Precision,
    workload: Workload,
    reserve: Reserve,
    where: Offload,
) -> tuple[Architecture, tuple[Device, ...]] | None:
    """As many leading blocks as can be on the gpus, one gpu after the other, the others at ``where``.

    Returns the architecture, its tied blocks side by side, and the device of each block, gpus by their number; None
    where the gpus have no room even so.
    """
    architecture = ties_together(architecture) or architecture
    table = CostTable(architecture, precision, workload, reserve)
    count = len(architecture.blocks)
    cuts = cuts_allowed(architecture)
    for kept in reversed(cuts[1:-1]):
        taken = max(sum(table.weights(block, block + 1)) for block in range(kept, count))
        aside = taken + table.cache(kept, count).largest
        needed = max(table.workspace(kept, count))
        devices = _filled(table, gpus, [cut for cut in cuts if cut <= kept], aside, needed)
        if devices is not None:
            return architecture, (*devices, *([where] * (count - kept)))
    return None


def _filled(
    table: CostTable, gpus: Sequence[GpuSpec], cuts: Sequence[int], aside: int, workspace: int
) -> tuple[Device, ...] | None:
    """The gpu of each block before the last cut; the first gpu keeps ``aside`` free, and that much workspace."""
    devices: list[Device] = []
    for number, gpu in enumerate(gpus):
        first = after = len(devices)
        for cut in (cut for cut in cuts if cut > first):
            usage = table.usage(first, cut, gpu)
            more = max(0, workspace - usage.workspace) + aside if number == 0 else 0
            if usage.total + more > gpu.free:
                break
            after = cut
        devices += [number] * (after - first)
        if number == 0 and not devices:
            return None
    return tuple(devices) if len(devices) == cuts[-1] else None


# ---- the names of a class --------------------------------------------------------------------------------------------

# A plan names tensors as the usual class of a family does. A checkpoint may have been saved by another: the bare body
# (``LlamaModel``: no ``model.`` before its names), or the body with a small head of its own for labels or scores
# (``BertForSequenceClassification``: ``bert.`` before them, and a classifier). The bytes are the same but for the head.

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Built:
    """What a class builds.

    Attributes:
        parameters, buffers: name -> shape; tied parameters under each of their names.
        tied: parameters that share another's storage -> that other.
        prefix: what stands before the names of the body's modules in classes with a head: ``base_model_prefix``.
    """

    parameters: Shapes
    buffers: Shapes
    tied: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""


# A plan in the names of a class: the model without an adapter, and where its blocks go. What the class has beyond the
# plan goes with the last block, or where the storage is that it shares.
Fitted = tuple[Architecture, BlockPlacement]


def fitted(base: Architecture, placement: BlockPlacement, built: Built, stored: Container[str]) -> Fitted | str:
    """The plan in the names of what a class builds, or the first tensor in which they differ, as words.

    Args:
        base: the planned model, without an adapter.
        placement: of the same model, with its adapter if it has an unmerged one.
        stored: names of the tensors in the checkpoint: what the class has beyond the plan must be there.
    """
    prefix = built.prefix
    renamings: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: f"{prefix}.{name}",
        lambda name: name.removeprefix(f"{prefix}."),
    )
    differences: list[str] = []
    for rename in renamings if prefix else renamings[:1]:
        difference = _difference(base, built, rename, stored)
        if difference is None:
            return _renamed(base, placement, built, rename)
        differences.append(difference)
    return differences[0]


def _difference(base: Architecture, built: Built, rename: Callable[[str], str], stored: Container[str]) -> str | None:
    """The first planned tensor that the model has not, or not alike; the first of its own that is stored nowhere."""
    for tensor in base.tensors():
        name, there = rename(tensor.name), built.buffers if tensor.buffer else built.parameters
        if there.get(name) != tensor.shape:
            how = f"of shape {there[name]}" if name in there else "not at all"
            return f"{quoted(tensor.name)} {how}, planned of shape {tensor.shape}"
    own = (tensor.name for tensor in _beyond(base, built, rename) if tensor.tied_to is None)
    absent = next((name for name in own if name not in stored), None)
    return None if absent is None else f"{quoted(absent)}, which is not in the checkpoint"


def _beyond(base: Architecture, built: Built, rename: Callable[[str], str]) -> list[Tensor]:
    """What the class has and the plan has not."""
    planned = {rename(tensor.name) for tensor in base.tensors()}
    return [
        Tensor(name, shape, tied_to=built.tied.get(name))
        for name, shape in built.parameters.items()
        if name not in planned
    ]


def _renamed(base: Architecture, placement: BlockPlacement, built: Built, rename: Callable[[str], str]) -> Fitted:
    beyond = _beyond(base, built, rename)
    blocks = [rename(block.name) for block in base.blocks]
    modules = dict.fromkeys(tensor.name.partition(".")[0] for tensor in beyond if block_of(tensor.name, blocks) is None)
    heads = tuple(
        Block(module, "head", tuple(each for each in beyond if each.name.partition(".")[0] == module))
        for module in modules
    )
    inside = [each for each in beyond if block_of(each.name, blocks) is not None]

    def of_class(architecture: Architecture) -> Architecture:
        return replace(
            architecture, blocks=(*(_block(block, inside, blocks, rename) for block in architecture.blocks), *heads)
        )

    renamed = dict(zip(blocks, placement.devices, strict=True))
    devices = (*placement.devices, *(_device_of(head, renamed, placement.devices[-1]) for head in heads))
    return of_class(base), replace(placement, architecture=of_class(placement.architecture), devices=devices)


def _device_of(head: Block, devices: Mapping[str, Device], last: Device) -> Device:
    """With the storage that it shares, if it shares one; else with the last block."""
    homes = (block_of(tensor.tied_to, devices) for tensor in head.tensors if tensor.tied_to is not None)
    return next((devices[home] for home in homes if home is not None), last)


def _block(block: Block, inside: list[Tensor], blocks: list[str], rename: Callable[[str], str]) -> Block:
    name = rename(block.name)
    tensors = tuple(
        replace(tensor, name=rename(tensor.name), tied_to=None if tensor.tied_to is None else rename(tensor.tied_to))
        for tensor in block.tensors
    )
    return replace(
        block, name=name, tensors=(*tensors, *(each for each in inside if block_of(each.name, blocks) == name))
    )
