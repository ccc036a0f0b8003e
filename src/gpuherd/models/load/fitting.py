"""A plan brought together with the model that a class really builds. Pure.

A plan names tensors as the usual class of a family does. A checkpoint may have been saved by another: the bare body
(``LlamaModel``: no ``model.`` before its names), or the body with a small head of its own for labels or scores
(``BertForSequenceClassification``: ``bert.`` before them, and a classifier). The bytes are the same but for that head.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

from gpuherd.models.load.placed import Device, Placement, block_of
from gpuherd.models.names import shown
from gpuherd.models.plan.architecture import Architecture, Block, Tensor

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


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan in the names of a class.

    Attributes:
        base: the model without an adapter.
        placement: where its blocks go; what the class has beyond the plan lies with the last block,
            or where the storage is that it shares.
    """

    base: Architecture
    placement: Placement


def fitted(base: Architecture, placement: Placement, built: Built, stored: Container[str]) -> Fitted | str:
    """The plan in the names of what a class builds, or the first tensor in which they differ, as words.

    Args:
        base: the planned model, without an adapter.
        placement: of the same model, with its adapter if it has one beside it.
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
            return f"{shown(tensor.name)} {how}, planned of shape {tensor.shape}"
    own = (tensor.name for tensor in _beyond(base, built, rename) if tensor.tied_to is None)
    absent = next((name for name in own if name not in stored), None)
    return None if absent is None else f"{shown(absent)}, which is not in the checkpoint"


def _beyond(base: Architecture, built: Built, rename: Callable[[str], str]) -> list[Tensor]:
    """What the class has and the plan has not."""
    planned = {rename(tensor.name) for tensor in base.tensors()}
    return [
        Tensor(name, shape, tied_to=built.tied.get(name))
        for name, shape in built.parameters.items()
        if name not in planned
    ]


def _renamed(base: Architecture, placement: Placement, built: Built, rename: Callable[[str], str]) -> Fitted:
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
    return Fitted(of_class(base), replace(placement, architecture=of_class(placement.architecture), devices=devices))


def _device_of(head: Block, devices: Mapping[str, Device], last: Device) -> Device:
    """Beside the storage that it shares, if it shares one; else with the last block."""
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
