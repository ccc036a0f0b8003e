"""All that is decided before a model is loaded, and everything that can be refused: in well under a second, without
torch.

Knows names and headers, and where the blocks go on this machine: by a plan, by a device map, on the CPU, or off the
GPUs where that is allowed; it looks at the GPUs that this process sees, and their free memory now. What needs no look
at the machine is ``placement``; loading itself is ``loading``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, ExitCode, GpuherdError, MissingModel, UsageError
from gpuherd.gpus.visible import described, value_in
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.identity import reference
from gpuherd.models.load.options import CPU, LoadRequest, check, requested_precision
from gpuherd.models.load.placement import (
    BlockPlacement,
    all_on,
    check_offload,
    from_device_map,
    from_plan,
    offloaded,
    weights_by_device,
)
from gpuherd.models.load.pretrained import check_bitsandbytes, check_code, check_gpus
from gpuherd.models.memory.weights import Precision, split_precision
from gpuherd.models.names import ModelRef, parse_model, quoted
from gpuherd.models.place.gpus import Capability, GpuSpec, parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.request import agreed_precision, precision_for
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.units import gib

if TYPE_CHECKING:
    from gpuherd.models.place.inventory import GpusNow

# ---- where the blocks go ---------------------------------------------------------------------------------------------

_MOST_ADVICE = 3


class ModelDoesNotFit(GpuherdError):
    """A model has no room: on the GPUs, or in the computer's memory. ``refusal`` is the planner's, where it is its."""

    exit_code = ExitCode.OUT_OF_MEMORY

    def __init__(self, text: str, refusal: AnswerRefusal | None = None) -> None:
        super().__init__(text)
        self.refusal = refusal


class ThisMachine:
    """The GPUs that this process sees, looked at on first use."""

    def __init__(self, *, simulate: bool) -> None:
        self._simulate = simulate

    @cached_property
    def visible(self) -> tuple[GpuSpec, ...]:
        """All that CUDA shows, in its order; none where GPUs are only to be pretended."""
        from gpuherd.gpus.query import machine
        from gpuherd.gpus.visible import count_in_pci_order, visible_now
        from gpuherd.models.place.inventory import spec_of

        # The numbers here are CUDA's only if CUDA counts as we do.
        count_in_pci_order()
        _give_back_memory()
        gpus = () if self._simulate else visible_now(machine().gpus)
        return tuple(spec_of(gpu, gpu.free_mb) for gpu in gpus)

    def number(self, gpu: GpuSpec) -> int | None:
        """The number that CUDA gives this gpu in this process, None if it is not shown."""
        return next((number for number, seen in enumerate(self.visible) if seen.uuid == gpu.uuid), None)


Placed = tuple[BlockPlacement, tuple[GpuSpec, ...], tuple[str, ...]]


def destination(request: LoadRequest, architecture: Architecture, precision: Precision, machine: ThisMachine) -> Placed:
    """Where the blocks go, the gpus that they go to, and what should be said of that."""
    placed = _placed(request, architecture, precision, machine)
    _check_memory(request, placed[0], precision)
    return placed


def _placed(request: LoadRequest, architecture: Architecture, precision: Precision, machine: ThisMachine) -> Placed:
    if request.device_map == CPU:
        return _on_cpu(architecture, None)
    if isinstance(request.device_map, Mapping):
        placement = from_device_map(
            architecture,
            request.device_map,
            visible=len(machine.visible),
            allow_offload=request.allow_offload,
            simulated=request.simulate,
        )
        gpus = () if request.simulate else tuple(machine.visible[number] for number in placement.gpus)
        _check_gpu_memory(request, placement, precision, gpus)
        return placement, gpus, ()
    if isinstance(request.plan, AnswerRefusal):
        raise _does_not_fit(request.plan)
    if isinstance(request.plan, MemoryPlan):
        return _by_plan(request.plan, machine, simulate=request.simulate)
    now = requested_gpus(request)
    gpus = now.gpus
    if not gpus:
        if request.gpus != "auto":
            raise UsageError("gpus: none are given; device_map='cpu' loads a model on the CPU")
        if now.left_out:
            raise ModelDoesNotFit(f"no GPU is free: {'; '.join(now.left_out)}")
        return _on_cpu(architecture, now.problem)
    outcome = make_plan(
        architecture, gpus, precision, request.workload, request.reserve, parallel=request.parallel or "auto"
    )
    if isinstance(outcome, MemoryPlan):
        return _by_plan(outcome, machine, simulate=request.simulate)
    if request.allow_offload is None:
        raise _does_not_fit(outcome)
    return _offloaded(request, outcome, gpus, machine)


def requested_gpus(request: LoadRequest) -> GpusNow:
    """The GPUs to plan for: those that the request names, else those of this machine that are free."""
    from gpuherd.models.place.inventory import GpusNow, gpus_now

    if not isinstance(request.gpus, str):
        return GpusNow(tuple(request.gpus))
    if request.gpus != "auto":
        return GpusNow(parse_gpus(request.gpus))
    _give_back_memory()
    # Whoever names the GPUs has chosen them, busy or not: what is free on them counts.
    return gpus_now(busy_too=value_in(os.environ) is not None)


def _give_back_memory() -> None:
    """Gives the driver back what models that this process has let go of leave with torch, which keeps it for itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _by_plan(plan: MemoryPlan, machine: ThisMachine, *, simulate: bool) -> Placed:
    """The placement of a plan; the plan's GPUs are those of this machine, by their UUID, or the first ones."""
    gpus = tuple(load.gpu for load in plan.loads)
    real = [gpu for gpu in gpus if gpu.uuid is not None]
    if simulate or (not real and not machine.visible):
        note = "no CUDA here: the blocks of all GPUs lie in the CPU's memory" if not simulate else ""
        placement = from_plan(plan, range(len(gpus)), simulated=True)
        return placement, (), (*plan.warnings, *((note,) if note else ()))
    numbers = _numbers(gpus, machine)
    here = tuple(machine.visible[number] for number in numbers)
    for load, gpu in zip(plan.loads, here, strict=True):
        if load.usage.total > gpu.free:
            raise ModelDoesNotFit(
                f"GPU {gpu.label} ({gpu.name}) has {gib(gpu.free)} free now, and the plan needs "
                f"{gib(load.usage.total)} on it"
            )
    return from_plan(plan, numbers), here, plan.warnings


def _numbers(gpus: Sequence[GpuSpec], machine: ThisMachine) -> list[int]:
    """The number of each gpu in this process: by its UUID; those that are only words are the first ones here."""
    numbers: list[int] = []
    for place, gpu in enumerate(gpus):
        number = machine.number(gpu) if gpu.uuid is not None else place
        if number is None or number >= len(machine.visible):
            raise UsageError(
                f"the plan uses GPU {gpu.label} ({gpu.name}), which CUDA does not show this process "
                f"({described(os.environ)})"
            )
        numbers.append(number)
    return numbers


def _offloaded(request: LoadRequest, refusal: AnswerRefusal, gpus: Sequence[GpuSpec], machine: ThisMachine) -> Placed:
    """As much on the GPUs as goes, the rest where it is allowed."""
    where = request.allow_offload or "cpu"
    found = offloaded(refusal.architecture, gpus, refusal.precision, request.workload, request.reserve, where)
    if found is None:
        raise _does_not_fit(refusal)
    architecture, devices = found
    pretended = request.simulate or (not machine.visible and all(gpu.uuid is None for gpu in gpus))
    used = gpus[: 1 + max(device for device in devices if isinstance(device, int))]
    numbers = list(range(len(used))) if pretended else _numbers(used, machine)
    placement = BlockPlacement(
        architecture,
        tuple(numbers[device] if isinstance(device, int) else device for device in devices),
        simulated=pretended,
    )
    check_offload(placement, request.allow_offload)
    here = () if pretended else tuple(machine.visible[number] for number in placement.gpus)
    _check_gpu_memory(request, placement, refusal.precision, here)
    away = sum(device == where for device in devices)
    note = f"{away} of {len(devices)} blocks are offloaded to {where}: this is many times slower"
    return placement, here, (refusal.reason, note)


def _on_cpu(architecture: Architecture, problem: str | None) -> Placed:
    return all_on(architecture, CPU), (), (f"on the CPU: {problem}",) if problem else ()


def _check_memory(request: LoadRequest, placement: BlockPlacement, precision: Precision) -> None:
    """Raises ModelDoesNotFit where the computer has less memory available than goes there, pretended GPUs' too."""
    import psutil

    sizes = weights_by_device(placement.architecture, placement.devices, precision)
    needed = sum(
        size for device, size in sizes.items() if device == CPU or (placement.simulated and isinstance(device, int))
    )
    available = psutil.virtual_memory().available
    if needed > available:
        raise ModelDoesNotFit(
            f"{request.model} in {precision} puts {gib(needed)} into the computer's memory, of which {gib(available)} "
            "are available"
        )


def _check_gpu_memory(
    request: LoadRequest, placement: BlockPlacement, precision: Precision, gpus: Sequence[GpuSpec]
) -> None:
    """Raises ModelDoesNotFit where the weights alone are more than what is free on a GPU."""
    needed = weights_by_device(placement.architecture, placement.devices, precision)
    for number, gpu in zip(placement.gpus, gpus, strict=False):
        taken = needed[number] + request.reserve.context
        if taken > gpu.free:
            raise ModelDoesNotFit(
                f"{gib(taken)} would lie on GPU {number} ({gpu.name}), which has {gib(gpu.free)} free now"
            )


def _does_not_fit(refusal: AnswerRefusal) -> ModelDoesNotFit:
    """The refusal as an error, with what would fit."""
    advice = [f"{' '.join(each.words)}: {each.sentence}" for each in refusal.alternatives[:_MOST_ADVICE]]
    return ModelDoesNotFit(refusal.with_advice(advice), refusal)


# ---- everything together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that may be loaded.

    Attributes:
        request: what is to be loaded.
        path: the model's folder or file on this machine.
        config: its parsed config.json.
        precision: in which it is loaded.
        base: the model as transformers builds it, without an adapter.
        placement: where its blocks go, those of an unmerged adapter too.
        capabilities: of the GPUs that it goes to, where they are known.
        adapter: the adapter's folder.
        notes: sentences that a person should read.
    """

    request: LoadRequest
    path: Path
    config: Mapping[str, Any]
    precision: Precision
    base: Architecture
    placement: BlockPlacement
    capabilities: tuple[Capability | None, ...] = ()
    adapter: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the config is."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is."""
        return tokenizer_folder(self.path, self.adapter)


Placing = Callable[[LoadRequest, Architecture, Precision, ThisMachine], Placed]


def prepare(request: LoadRequest, placing: Placing = destination) -> PreparedModel:
    """Decides everything about a loading; ``placing`` where the blocks go.

    Raises:
        UsageError: options that contradict each other, a device map that can't be, offloading that is not allowed.
        MissingModel, BadModel: the model, its adapter or a shard is not there, damaged, or needs code of its own.
        MissingExtra: bitsandbytes is needed and not there.
        ModelDoesNotFit: with the planner's figures, and what would fit.
    """
    check(request)
    name, suffix = split_precision(request.model)
    requested = agreed_precision(request.model, suffix, requested_precision(request.dtype, request.quantization))
    if requested is not None:
        check_bitsandbytes(requested)
    machine = ThisMachine(simulate=request.simulate)
    ref = reference(name, exact=True)

    def fetched(what: ModelRef) -> Path:
        if what.path is None and (early := _before_it_is_fetched(what)) is not None:
            placing(request, early, precision_for(early, requested)[0], machine)
        return _located(what, request)

    path, adapter = _apart(request, ref, fetched)
    architecture = _architecture(request, path)
    config = _config(path)
    check_code(request.model, config, trusted=request.trust_remote_code)
    if isinstance(request.plan, MemoryPlan):
        requested = _agreed(request.plan, architecture, requested)
    precision, assumed = precision_for(architecture, requested)
    check_bitsandbytes(precision)
    in_memory = _with_unmerged_adapter(request, architecture, adapter, precision)
    placement, gpus, notes = placing(request, in_memory, precision, machine)
    codes = precision.is_quantised or precision is Precision.AS_STORED
    if placement.offloads and (codes or adapter is not None):
        what = f"weights in {precision}" if codes else "a model with an adapter"
        raise UsageError(f"{what} can't be offloaded: all blocks must be on GPUs; see 'gpuherd plan' for what fits")
    return PreparedModel(
        request=request,
        path=path,
        config=config,
        precision=precision,
        base=architecture,
        placement=placement,
        capabilities=tuple(gpu.capability for gpu in gpus),
        adapter=adapter,
        notes=(*in_memory.assumptions, *((assumed,) if assumed else ()), *notes, *check_gpus(precision, gpus)),
    )


# ---- the model -------------------------------------------------------------------------------------------------------


def located(request: LoadRequest) -> tuple[Path, Path | None]:
    """The model's folder or file on this machine, and that of its adapter, fetched if need be; nothing is planned.

    Raises as ``prepare``.
    """
    return _apart(request, reference(request.model, exact=True), lambda what: _located(what, request))


def tokenizer_folder(model: Path, adapter: Path | None) -> Path:
    """Where the tokenizer is: an adapter is saved with the one, and the chat template, that it was trained with."""
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        return adapter
    return model if model.is_dir() else model.parent


def _located(ref: ModelRef, request: LoadRequest) -> Path:
    """The folder or file on this machine, fetched if need be with all that loading takes."""
    from gpuherd.models.checkpoints.hub import locate

    return locate(ref, for_loading=True, with_code=request.trust_remote_code)


def _before_it_is_fetched(ref: ModelRef) -> Architecture | None:
    """What a model of the Hub is by its headers: what has no place is refused before gigabytes are fetched.

    None of an adapter, and of what can't be asked for now but is here already.
    """
    from gpuherd.models.checkpoints.hub import cached_copy
    from gpuherd.models.checkpoints.hub_headers import OnlyAdapter

    try:
        return read_architecture(ref.text)
    except OnlyAdapter:
        return None
    except MissingModel:
        if cached_copy(ref) is None:
            raise
        return None


def _apart(request: LoadRequest, ref: ModelRef, fetched: Callable[[ModelRef], Path]) -> tuple[Path, Path | None]:
    """The base model and the adapter, where the model is one or comes with one."""
    from gpuherd.models.lora.adapter import is_adapter, taken_apart

    if request.adapter is None:
        path, adapter = taken_apart(ref, fetched)
        if adapter is None and request.merge_adapter:
            raise UsageError("merge_adapter: there is no adapter to merge; name one")
        return path, adapter
    path = fetched(ref)
    if is_adapter(path):
        raise UsageError(f"model {quoted(ref.text)} is an adapter itself; give its base as the model")
    found = _located(parse_model(request.adapter), request)
    if not is_adapter(found):
        raise BadModel(f"adapter {quoted(request.adapter)} has no adapter_config.json")
    return path, found


def _architecture(request: LoadRequest, path: Path) -> Architecture:
    """The architecture by the headers of its weights, every one of which is looked at: a shard that is missing, a
    damaged file, a pickle with code in it are found here."""
    if path.suffix.lower() == ".gguf" or (path.is_dir() and not (path / "config.json").exists() and _has_gguf(path)):
        raise BadModel(
            f"{quoted(request.model)} is a GGUF file, which can be planned and analysed, but is not loaded here: give "
            "the model that it was made from, quantised on the way if need be (--quantization nf4)"
        )
    found = read_architecture(str(path))
    if found.source != "weights":
        raise MissingModel(f"{quoted(request.model)} can be planned by its config, but there are no weights to load")
    return replace(found, model=request.model)


def _has_gguf(folder: Path) -> bool:
    return any(file.suffix.lower() == ".gguf" for file in folder.iterdir())


def _config(path: Path) -> Mapping[str, Any]:
    from gpuherd.models.checkpoints.open import read_json

    return read_json((path if path.is_dir() else path.parent) / "config.json")


def _with_unmerged_adapter(
    request: LoadRequest, base: Architecture, adapter: Path | None, precision: Precision
) -> Architecture:
    """What a model with an adapter keeps in memory: of one that is merged the base alone.

    Raises BadModel where the adapter is damaged or for another base, UsageError where it can't be merged.
    """
    if adapter is None:
        return base
    from gpuherd.models.describe.reading import with_adapter

    unmerged = with_adapter(base, adapter)
    if not request.merge_adapter:
        return unmerged
    if precision.is_quantised or precision is Precision.AS_STORED:
        raise UsageError(
            f"an adapter can't be merged into weights in {precision} without loss: merge it first with 'gpuherd merge' "
            "and load the merged model, or leave it unmerged"
        )
    return base


def _agreed(plan: MemoryPlan, architecture: Architecture, requested: Precision | None) -> Precision:
    """The plan's precision. Raises UsageError where the plan is for another model or another precision."""
    planned = {tensor.name: tensor.shape for tensor in plan.architecture.tensors()}
    there = {tensor.name: tensor.shape for tensor in architecture.tensors()}
    other = next((name for name in (*planned, *there) if planned.get(name) != there.get(name)), None)
    if other is not None:
        raise UsageError(
            f"the plan is for {quoted(plan.architecture.model)}, where {other} has the shape "
            f"{planned.get(other, 'of no tensor')}; in {quoted(architecture.model)} it has {there.get(other, 'none')}. "
            "Plan this model, or give only the plan's device_map"
        )
    if requested is not None and requested is not plan.precision:
        raise UsageError(f"the plan is for {plan.precision}, and {requested} was asked for; plan it in {requested}")
    return plan.precision
