"""Where the blocks of a model go on this machine: by a plan, by a device map, on the CPU, or off the GPUs where that is
allowed. Without torch.

Knows the GPUs that this process sees, and their free memory now. All that needs no look at the machine is ``placed``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence

from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.gpus.visible import described, value_in
from gpuherd.models.load.asked import Asked
from gpuherd.models.load.offloading import offloaded
from gpuherd.models.load.placed import (
    CPU,
    Placement,
    all_on,
    check_offload,
    from_device_map,
    from_plan,
    weights_by_device,
)
from gpuherd.models.place.gpus import GpuSpec, parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import MIB
from gpuherd.units import gib

_MOST_ADVICE = 3


class ModelDoesNotFit(GpuherdError):
    """A model has no room: on the GPUs, or in the computer's memory. ``refusal`` is the planner's, where it is its."""

    exit_code = ExitCode.OUT_OF_MEMORY

    def __init__(self, text: str, refusal: AnswerRefusal | None = None) -> None:
        super().__init__(text)
        self.refusal = refusal


class ThisMachine:
    """The GPUs that this process sees, looked at when first asked."""

    def __init__(self, *, simulate: bool) -> None:
        self._simulate = simulate
        self._seen: tuple[GpuSpec, ...] | None = None

    @property
    def visible(self) -> tuple[GpuSpec, ...]:
        """All that CUDA shows, in its order; none where GPUs are only to be pretended."""
        if self._seen is None:
            from gpuherd.gpus.query import machine
            from gpuherd.gpus.visible import count_in_pci_order, visible_now

            # The numbers here are CUDA's only if CUDA counts as we do.
            count_in_pci_order()
            _give_back_memory()
            gpus = () if self._simulate else visible_now(machine().gpus)
            self._seen = tuple(
                GpuSpec(gpu.label, gpu.name, gpu.total_mb * MIB, gpu.free_mb * MIB, gpu.compute_capability, gpu.uuid)
                for gpu in gpus
            )
        return self._seen

    def number(self, card: GpuSpec) -> int | None:
        """The number that CUDA gives this card in this process, None if it is not shown."""
        return next((number for number, seen in enumerate(self.visible) if seen.uuid == card.uuid), None)


Placed = tuple[Placement, tuple[GpuSpec, ...], tuple[str, ...]]


def destination(asked: Asked, architecture: Architecture, precision: Precision, machine: ThisMachine) -> Placed:
    """Where the blocks go, the cards that they go to, and what should be said of that."""
    placed = _placed(asked, architecture, precision, machine)
    _check_memory(asked, placed[0], precision)
    return placed


def _placed(asked: Asked, architecture: Architecture, precision: Precision, machine: ThisMachine) -> Placed:
    if asked.device_map == CPU:
        return _on_cpu(architecture, None)
    if isinstance(asked.device_map, Mapping):
        placement = from_device_map(
            architecture,
            asked.device_map,
            visible=len(machine.visible),
            allow_offload=asked.allow_offload,
            simulated=asked.simulate,
        )
        cards = () if asked.simulate else tuple(machine.visible[number] for number in placement.gpus)
        _check_room(asked, placement, precision, cards)
        return placement, cards, ()
    if isinstance(asked.plan, AnswerRefusal):
        raise _does_not_fit(asked.plan)
    if isinstance(asked.plan, MemoryPlan):
        return _by_plan(asked.plan, machine, simulate=asked.simulate)
    cards, problem = _cards(asked)
    if not cards:
        return _on_cpu(architecture, problem)
    told = make_plan(architecture, cards, precision, asked.workload, asked.reserve, parallel=asked.parallel or "auto")
    if isinstance(told, MemoryPlan):
        return _by_plan(told, machine, simulate=asked.simulate)
    if asked.allow_offload is None:
        raise _does_not_fit(told)
    return _offloaded(asked, told, cards, machine)


def _cards(asked: Asked) -> tuple[tuple[GpuSpec, ...], str | None]:
    """The cards to plan for; none where this machine has no GPU, with the reason."""
    if not isinstance(asked.gpus, str):
        if not asked.gpus:
            raise UsageError("gpus: none are given; device_map='cpu' loads a model on the CPU")
        return tuple(asked.gpus), None
    if asked.gpus != "auto":
        return parse_gpus(asked.gpus), None
    from gpuherd.models.place.inventory import gpus_now

    _give_back_memory()
    # Whoever names the GPUs has chosen them, busy or not: what is free on them counts.
    now = gpus_now(busy_too=value_in(os.environ) is not None)
    if not now.gpus and now.left_out:
        raise ModelDoesNotFit(f"no GPU is free: {'; '.join(now.left_out)}")
    return now.gpus, now.problem


def _give_back_memory() -> None:
    """Gives the driver back what models that this process has let go of leave with torch, which keeps it for itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _by_plan(plan: MemoryPlan, machine: ThisMachine, *, simulate: bool) -> Placed:
    """The placement of a plan; the plan's GPUs are those of this machine, by their UUID, or the first ones."""
    cards = tuple(load.gpu for load in plan.loads)
    real = [card for card in cards if card.uuid is not None]
    if simulate or (not real and not machine.visible):
        note = "no CUDA here: the blocks of all GPUs lie in the CPU's memory" if not simulate else ""
        placement = from_plan(plan, range(len(cards)), simulated=True)
        return placement, (), (*plan.warnings, *((note,) if note else ()))
    numbers = _numbers(cards, machine)
    here = tuple(machine.visible[number] for number in numbers)
    for load, card in zip(plan.loads, here, strict=True):
        if load.usage.total > card.free:
            raise ModelDoesNotFit(
                f"GPU {card.label} ({card.name}) has {gib(card.free)} free now, and the plan needs "
                f"{gib(load.usage.total)} on it"
            )
    return from_plan(plan, numbers), here, plan.warnings


def _numbers(cards: Sequence[GpuSpec], machine: ThisMachine) -> list[int]:
    """The number of each card in this process: by its UUID; those that are only words are the first ones here."""
    numbers: list[int] = []
    for place, card in enumerate(cards):
        number = machine.number(card) if card.uuid is not None else place
        if number is None or number >= len(machine.visible):
            raise UsageError(
                f"the plan uses GPU {card.label} ({card.name}), which CUDA does not show this process "
                f"({described(os.environ)})"
            )
        numbers.append(number)
    return numbers


def _offloaded(asked: Asked, refusal: AnswerRefusal, cards: Sequence[GpuSpec], machine: ThisMachine) -> Placed:
    """As much on the GPUs as goes, the rest where it is allowed."""
    where = asked.allow_offload or "cpu"
    found = offloaded(refusal.architecture, cards, refusal.precision, asked.workload, asked.reserve, where)
    if found is None:
        raise _does_not_fit(refusal)
    architecture, devices = found
    pretended = asked.simulate or (not machine.visible and all(card.uuid is None for card in cards))
    used = cards[: 1 + max(device for device in devices if isinstance(device, int))]
    numbers = list(range(len(used))) if pretended else _numbers(used, machine)
    placement = Placement(
        architecture,
        tuple(numbers[device] if isinstance(device, int) else device for device in devices),
        simulated=pretended,
    )
    check_offload(placement, asked.allow_offload)
    here = () if pretended else tuple(machine.visible[number] for number in placement.gpus)
    _check_room(asked, placement, refusal.precision, here)
    away = sum(device == where for device in devices)
    note = f"{away} of {len(devices)} blocks are offloaded to {where}: this is many times slower"
    return placement, here, (refusal.reason, note)


def _on_cpu(architecture: Architecture, problem: str | None) -> Placed:
    return all_on(architecture, CPU), (), (f"on the CPU: {problem}",) if problem else ()


def _check_memory(asked: Asked, placement: Placement, precision: Precision) -> None:
    """Raises ModelDoesNotFit where the computer has less memory available than goes there, pretended GPUs' too."""
    import psutil

    sizes = weights_by_device(placement.architecture, placement.devices, precision)
    needed = sum(
        size for device, size in sizes.items() if device == CPU or (placement.simulated and isinstance(device, int))
    )
    available = psutil.virtual_memory().available
    if needed > available:
        raise ModelDoesNotFit(
            f"{asked.model} in {precision} puts {gib(needed)} into the computer's memory, of which {gib(available)} "
            "are available"
        )


def _check_room(asked: Asked, placement: Placement, precision: Precision, cards: Sequence[GpuSpec]) -> None:
    """Raises ModelDoesNotFit where the weights alone are more than what is free on a GPU."""
    needed = weights_by_device(placement.architecture, placement.devices, precision)
    for number, card in zip(placement.gpus, cards, strict=False):
        taken = needed[number] + asked.reserve.context
        if taken > card.free:
            raise ModelDoesNotFit(
                f"{gib(taken)} would lie on GPU {number} ({card.name}), which has {gib(card.free)} free now"
            )


def _does_not_fit(refusal: AnswerRefusal) -> ModelDoesNotFit:
    """The refusal as an error, with what would fit."""
    advice = [f"{' '.join(each.words)}: {each.sentence}" for each in refusal.alternatives[:_MOST_ADVICE]]
    told = f". What would fit: {'; '.join(advice)}" if advice else ""
    return ModelDoesNotFit(refusal.reason + told, refusal)
