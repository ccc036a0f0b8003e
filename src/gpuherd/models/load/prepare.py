"""All that is decided before a model is loaded, and everything that can be refused: in well under a second, without
torch.

Knows names, headers, GPUs and plans. Loading itself is ``loading``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, ExitCode, GpuherdError, UsageError
from gpuherd.models.load.classes import check_code
from gpuherd.models.load.offloading import offloaded
from gpuherd.models.load.options import Offload, wanted_precision
from gpuherd.models.load.placed import (
    CPU,
    Placement,
    all_on,
    check_offload,
    from_device_map,
    from_plan,
    weights_by_device,
)
from gpuherd.models.load.quantised import check_bitsandbytes, check_cards, precision_to_load
from gpuherd.models.names import ModelRef, parse_model, shown
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.capability import Capability
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards import parse_cards
from gpuherd.models.plan.known import known_model
from gpuherd.models.plan.naming import split_precision
from gpuherd.models.plan.placing import Wish
from gpuherd.models.plan.planner import make_plan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.reading import read_architecture
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.wording import gib
from gpuherd.models.plan.workload import MIB, Reserve, Workload

_MOST_ADVICE = 3


class ModelDoesNotFit(GpuherdError):
    """A model has no room: on the GPUs, or in the computer's memory. ``refusal`` is the planner's, where it is its."""

    exit_code = ExitCode.OUT_OF_MEMORY

    def __init__(self, text: str, refusal: Refusal | None = None) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for: the keywords of ``load_model``, which explains them."""

    model: str
    plan: MemoryPlan | Refusal | None = None
    device_map: Mapping[str, Any] | str | None = None
    quantization: str | None = None
    dtype: str | None = None
    adapter: str | None = None
    merge_adapter: bool = False
    allow_offload: Offload | None = None
    parallel: Wish | None = None
    gpus: str | Sequence[Card] = "auto"
    trust_remote_code: bool = False
    workload: Workload = Workload()
    reserve: Reserve = Reserve()
    simulate: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that may be loaded.

    Attributes:
        asked: what was asked for.
        path: the model's folder or file on this machine.
        config: its parsed config.json.
        precision: in which it is loaded.
        placement: where its blocks go.
        capabilities: of the GPUs that it goes to, where they are known.
        adapter: the adapter's folder.
        notes: sentences that a person should read.
    """

    asked: Asked
    path: Path
    config: Mapping[str, Any]
    precision: Precision
    placement: Placement
    capabilities: tuple[Capability | None, ...] = ()
    adapter: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where config and tokenizer are."""
        return self.path if self.path.is_dir() else self.path.parent


def prepare(asked: Asked) -> Prepared:
    """Decides everything about a loading.

    Raises:
        UsageError: options that contradict each other, a device map that can't be, offloading that is not allowed.
        MissingModel, BadModel: the model, its adapter or a shard is not there, damaged, or needs code of its own.
        MissingExtra: bitsandbytes is needed and not there.
        ModelDoesNotFit: with the planner's figures, and what would fit.
    """
    _check(asked)
    name, suffix = split_precision(asked.model)
    wanted = wanted_precision(asked.dtype, asked.quantization, suffix)
    if wanted is not None:
        check_bitsandbytes(wanted)
    machine = _Machine(asked)
    ref = _reference(name)
    if ref.path is None and asked.plan is None and asked.device_map is None:
        # Before gigabytes are fetched.
        early = read_architecture(name)
        _place(asked, early, precision_to_load(early, wanted), machine)
    path = _located(ref)
    path, adapter = _apart(asked, ref, path)
    architecture = replace(_architecture(path), model=asked.model)
    config = _config(path)
    check_code(asked.model, config, architecture, trusted=asked.trust_remote_code)
    if isinstance(asked.plan, MemoryPlan):
        wanted = _agreed(asked.plan, architecture, wanted)
    precision = precision_to_load(architecture, wanted)
    check_bitsandbytes(precision)
    _check_weights(path, precision)
    if adapter is not None:
        _check_adapter(asked, path, adapter, precision)
    placement, cards, notes = _place(asked, architecture, precision, machine)
    if placement.offloads and (precision.is_quantised or adapter is not None):
        what = f"weights in {precision}" if precision.is_quantised else "a model with an adapter"
        raise UsageError(f"{what} can't be offloaded: all blocks must be on GPUs; see 'gpuherd plan' for what fits")
    return Prepared(
        asked=asked,
        path=path,
        config=config,
        precision=precision,
        placement=placement,
        capabilities=tuple(card.capability for card in cards),
        adapter=adapter,
        notes=(*architecture.assumptions, *notes, *check_cards(precision, cards)),
    )


def _check(asked: Asked) -> None:
    """Raises UsageError for keywords that contradict each other."""
    if asked.plan is not None and asked.device_map is not None:
        raise UsageError("a plan and a device map: the plan has its own; give one of them")
    if asked.plan is not None and asked.parallel is not None:
        raise UsageError("a plan and parallel: the plan says how the model is laid out; give one of them")
    if isinstance(asked.device_map, str) and asked.device_map not in ("auto", CPU):
        raise UsageError(f"device map {asked.device_map!r}: it is auto, cpu, or a mapping of module paths to devices")
    if asked.device_map is not None and asked.device_map != "auto" and asked.parallel is not None:
        raise UsageError("a device map and parallel: the map says where everything goes; give one of them")
    if asked.parallel == "tensor" or (isinstance(asked.plan, MemoryPlan) and asked.plan.parallel == "tensor"):
        raise UsageError(
            "each layer over several GPUs takes a process a GPU: use gpuherd.models.load.tensor_parallel, or "
            "'python -m gpuherd.models.load.worker --parallel tensor'"
        )
    if isinstance(asked.plan, Refusal):
        raise _does_not_fit(asked.plan)
    if asked.merge_adapter and asked.adapter is None and asked.quantization is not None:
        raise UsageError("merge_adapter without an adapter, and quantised: there is nothing to merge")


# ---- the model -------------------------------------------------------------------------------------------------------


def _reference(name: str) -> ModelRef:
    """What is meant. A known name without its organisation stands for its id, if it is that model's very name."""
    known = known_model(name)
    if known is not None and "/" not in name and not Path(name).exists():
        if known.model_id.partition("/")[2].lower() != name.strip().lower():
            raise BadModel(
                f"model {shown(name)} is known by its shapes, which are those of {known.model_id}; to load it, give its "
                "own id on the Hugging Face Hub, or its folder"
            )
        name = known.model_id
    return parse_model(name)


def _located(ref: ModelRef) -> Path:
    from gpuherd.models.locate import locate

    return locate(ref)


def _apart(asked: Asked, ref: ModelRef, path: Path) -> tuple[Path, Path | None]:
    """The base model and the adapter, where the model is one or comes with one."""
    from gpuherd.models.adapter import adapter_base, is_adapter

    if is_adapter(path):
        if asked.adapter is not None:
            raise UsageError(f"model {shown(ref.text)} is an adapter itself; give its base as the model")
        base = adapter_base(path)
        if base is None:
            raise BadModel(f"model {shown(ref.text)} is an adapter, and its adapter_config.json names no base model")
        return _located(parse_model(base)), path
    if asked.adapter is None:
        return path, None
    found = _located(parse_model(asked.adapter))
    if not is_adapter(found):
        raise BadModel(f"adapter {shown(asked.adapter)} has no adapter_config.json")
    return path, found


def _architecture(path: Path) -> Architecture:
    return read_architecture(str(path))


def _config(path: Path) -> Mapping[str, Any]:
    from gpuherd.models.checkpoint import read_json

    return read_json((path if path.is_dir() else path.parent) / "config.json")


def _check_weights(path: Path, precision: Precision) -> None:
    """Headers of every weight file: a shard that is missing, a file that is damaged, a pickle with code in it. Those of
    a checkpoint that is loaded as it is stored are its method's own."""
    from gpuherd.models.checkpoint import open_checkpoint

    if precision is not Precision.AS_STORED:
        open_checkpoint(path)


def _check_adapter(asked: Asked, path: Path, adapter: Path, precision: Precision) -> None:
    """Raises BadModel where the adapter is damaged or for another base; UsageError where it can't be merged."""
    from gpuherd.models.adapter import check_adapter, merge
    from gpuherd.models.checkpoint import open_checkpoint

    if asked.merge_adapter and (precision.is_quantised or precision is Precision.AS_STORED):
        raise UsageError(
            f"an adapter can't be merged into weights in {precision} without loss: merge it first with 'gpuherd merge' "
            "and load the merged model, or leave it unmerged"
        )
    check_adapter(adapter)
    if precision is not Precision.AS_STORED:
        merge(open_checkpoint(path), adapter)


def _agreed(plan: MemoryPlan, architecture: Architecture, wanted: Precision | None) -> Precision:
    """The plan's precision. Raises UsageError where the plan is for another model or another precision."""
    planned = {tensor.name: tensor.shape for tensor in plan.architecture.tensors()}
    there = {tensor.name: tensor.shape for tensor in architecture.tensors()}
    other = next((name for name in (*planned, *there) if planned.get(name) != there.get(name)), None)
    if other is not None:
        raise UsageError(
            f"the plan is for {shown(plan.architecture.model)}, where {other} has the shape "
            f"{planned.get(other, 'of no tensor')}; in {shown(architecture.model)} it has {there.get(other, 'none')}. "
            "Plan this model, or give only the plan's device_map"
        )
    if wanted is not None and wanted is not plan.precision:
        raise UsageError(f"the plan is for {plan.precision}, and {wanted} was asked for; plan it in {wanted}")
    return plan.precision


# ---- where it goes ---------------------------------------------------------------------------------------------------


class _Machine:
    """The GPUs that this process sees, looked at when first asked."""

    def __init__(self, asked: Asked) -> None:
        self._simulate = asked.simulate
        self._seen: tuple[Card, ...] | None = None

    @property
    def visible(self) -> tuple[Card, ...]:
        """All that CUDA shows, in its order; none where GPUs are only to be pretended."""
        if self._seen is None:
            from gpuherd.gpus.nvml import machine
            from gpuherd.gpus.own_view import visible_now

            gpus = () if self._simulate else visible_now(machine().gpus)
            self._seen = tuple(
                Card(gpu.label, gpu.name, gpu.total_mb * MIB, gpu.free_mb * MIB, gpu.compute_capability, gpu.uuid)
                for gpu in gpus
            )
        return self._seen

    def number(self, card: Card) -> int | None:
        """The number that CUDA gives this card in this process, None if it is not shown."""
        return next((number for number, seen in enumerate(self.visible) if seen.uuid == card.uuid), None)


Placed = tuple[Placement, tuple[Card, ...], tuple[str, ...]]


def _place(asked: Asked, architecture: Architecture, precision: Precision, machine: _Machine) -> Placed:
    """Where the blocks go, the cards that they go to, and what should be said of that."""
    if asked.device_map == CPU:
        return _on_cpu(asked, architecture, precision, None)
    if isinstance(asked.device_map, Mapping):
        placement = from_device_map(
            architecture,
            asked.device_map,
            visible=len(machine.visible),
            allow_offload=asked.allow_offload,
            simulated=asked.simulate,
        )
        if not placement.gpus:
            _check_memory(asked, placement, precision)
            return placement, (), ()
        cards = () if asked.simulate else tuple(machine.visible[number] for number in placement.gpus)
        _check_room(asked, placement, precision, cards)
        return placement, cards, ()
    if isinstance(asked.plan, MemoryPlan):
        return _by_plan(asked.plan, machine, simulate=asked.simulate)
    cards, problem = _cards(asked)
    if not cards:
        return _on_cpu(asked, architecture, precision, problem)
    told = make_plan(architecture, cards, precision, asked.workload, asked.reserve, parallel=asked.parallel or "auto")
    if isinstance(told, MemoryPlan):
        return _by_plan(told, machine, simulate=asked.simulate)
    if asked.allow_offload is None:
        raise _does_not_fit(told)
    return _offloaded(asked, told, cards, machine)


def _cards(asked: Asked) -> tuple[tuple[Card, ...], str | None]:
    """The cards to plan for; none where this machine has no GPU, with the reason."""
    if not isinstance(asked.gpus, str):
        return tuple(asked.gpus), None
    if asked.gpus != "auto":
        return parse_cards(asked.gpus), None
    from gpuherd.models.plan.cards_now import cards_now

    # Whoever names the GPUs has chosen them, busy or not: what is free on them counts.
    now = cards_now(busy_too="CUDA_VISIBLE_DEVICES" in os.environ)
    if not now.cards and now.left_out:
        raise ModelDoesNotFit(f"no GPU is free: {'; '.join(now.left_out)}")
    return now.cards, now.problem


def _by_plan(plan: MemoryPlan, machine: _Machine, *, simulate: bool) -> Placed:
    """The placement of a plan; the plan's GPUs are those of this machine, by their UUID, or the first ones."""
    cards = tuple(load.card for load in plan.loads)
    real = [card for card in cards if card.uuid is not None]
    if simulate or (not real and not machine.visible):
        note = "no CUDA here: the blocks of all GPUs lie in the CPU's memory" if not simulate else ""
        placement = from_plan(plan, range(len(cards)), simulated=True)
        return placement, (), (*plan.warnings, *((note,) if note else ()))
    numbers: list[int] = []
    for place, card in enumerate(cards):
        number = machine.number(card) if card.uuid is not None else place
        if number is None or number >= len(machine.visible):
            raise UsageError(
                f"the plan uses GPU {card.label} ({card.name}), which CUDA does not show this process "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
            )
        numbers.append(number)
    here = tuple(machine.visible[number] for number in numbers)
    for load, card in zip(plan.loads, here, strict=True):
        if load.usage.total > card.free:
            raise ModelDoesNotFit(
                f"GPU {card.label} ({card.name}) has {gib(card.free)} free now, and the plan needs "
                f"{gib(load.usage.total)} on it"
            )
    return from_plan(plan, numbers), here, plan.warnings


def _offloaded(asked: Asked, refusal: Refusal, cards: Sequence[Card], machine: _Machine) -> Placed:
    """As much on the GPUs as goes, the rest where it is allowed."""
    where = asked.allow_offload or CPU
    found = offloaded(refusal.architecture, cards, refusal.precision, asked.workload, asked.reserve, where)
    if found is None:
        raise _does_not_fit(refusal)
    architecture, devices = found
    pretended = asked.simulate or (not machine.visible and all(card.uuid is None for card in cards))
    numbers = [place if card.uuid is None else machine.number(card) for place, card in enumerate(cards)]
    placement = Placement(
        architecture,
        tuple((numbers[device] or 0) if isinstance(device, int) else device for device in devices),
        simulated=pretended,
    )
    check_offload(placement, asked.allow_offload)
    if where == CPU:
        _check_memory(asked, placement, refusal.precision)
    away = sum(device == where for device in devices)
    note = f"{away} of {len(devices)} blocks are offloaded to {where}: this is many times slower"
    return placement, tuple(cards) if not pretended else (), (refusal.reason, note)


def _on_cpu(asked: Asked, architecture: Architecture, precision: Precision, problem: str | None) -> Placed:
    placement = all_on(architecture, CPU)
    _check_memory(asked, placement, precision)
    return placement, (), (f"on the CPU: {problem}",) if problem else ()


def _check_memory(asked: Asked, placement: Placement, precision: Precision) -> None:
    """Raises ModelDoesNotFit where the computer has less memory available than goes there."""
    import psutil

    needed = weights_by_device(placement.architecture, placement.devices, precision).get(CPU, 0)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ModelDoesNotFit(
            f"{asked.model} in {precision} puts {gib(needed)} into the computer's memory, of which {gib(available)} "
            "are available"
        )


def _check_room(asked: Asked, placement: Placement, precision: Precision, cards: Sequence[Card]) -> None:
    """Raises ModelDoesNotFit where the weights alone are more than what is free on a GPU of a device map."""
    needed = weights_by_device(placement.architecture, placement.devices, precision)
    for number, card in zip(placement.gpus, cards, strict=False):
        taken = needed[number] + asked.reserve.context
        if taken > card.free:
            raise ModelDoesNotFit(
                f"the device map puts {gib(taken)} on GPU {number} ({card.name}), which has {gib(card.free)} free now"
            )


def _does_not_fit(refusal: Refusal) -> ModelDoesNotFit:
    """The refusal as an error, with what would fit."""
    advice = [f"{' '.join(each.words)}: {each.sentence}" for each in refusal.alternatives[:_MOST_ADVICE]]
    told = f". What would fit: {'; '.join(advice)}" if advice else ""
    return ModelDoesNotFit(refusal.reason + told, refusal)
