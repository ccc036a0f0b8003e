"""Loads a model through transformers, each block where a plan says and nowhere else, checks that it did, and reports.

What is loaded, and where to, is decided in ``prepare`` before torch is imported. ``tensors_of`` reads a loaded model as
plain data, which is compared with the plan: whether each tensor is on the device of its block, in the right
precision, none missing, and as large as predicted.
"""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gpuherd.errors import GpuherdError, naming_extras
from gpuherd.models.load.identity import tokenizer_in
from gpuherd.models.load.options import CPU, DISK, Device, LoadRequest, Offload
from gpuherd.models.load.placement import BlockPlacement, block_of, weights_by_device
from gpuherd.models.load.prepare import PreparedModel, prepare
from gpuherd.models.load.pretrained import EXTRAS, check_cuda, expected_dtypes, load_weights, with_adapter
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.names import quoted
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.request import ParallelOption
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.units import gib

# ---- the report ------------------------------------------------------------------------------------------------------

# Tensors are predicted to the byte; what is allowed is one part in a thousand.
TENSOR_TOLERANCE = 0.001
# CUDA's allocator rounds each tensor up to 512 bytes, and libraries keep something of their own.
CUDA_TOLERANCE = 0.03
_CUDA_SLACK = 4 << 20


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The contents of one device.

    Attributes:
        device: as planned: a GPU's number, ``cpu``, ``disk``.
        blocks: in words: ``embedding, layers 0-18``.
        predicted: bytes of weights and their quantisation by the plan's formulas.
        real: bytes that the model's tensors take; None of what is offloaded.
        cuda: bytes that CUDA's allocator gave out for it; None off the GPU.
        planned: bytes that the plan gives the device in all, with cache, workspace and reserve; None without a plan.
    """

    device: Device
    blocks: str
    predicted: int
    real: int | None
    cuda: int | None = None
    planned: int | None = None

    @property
    def error(self) -> float | None:
        """How far the tensors are from the prediction, as a part of it; None where that is not known."""
        if self.real is None or not self.predicted:
            return None
        return self.real / self.predicted - 1

    @property
    def within(self) -> bool:
        """Whether prediction and reality agree within the tolerances."""
        if self.error is not None and abs(self.error) > TENSOR_TOLERANCE:
            return False
        return self.cuda is None or abs(self.cuda - self.predicted) <= CUDA_TOLERANCE * self.predicted + _CUDA_SLACK


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A loaded model.

    Attributes:
        model: as the user named it.
        class_name: its class in transformers.
        precision: of its weights.
        dtypes: torch dtype -> bytes of the weights that have it.
        devices: the contents of each.
        device_map: block -> device, as planned.
        input_device: where token ids go, as torch names it.
        simulated: the GPUs are pretended, and all is in the CPU's memory.
        attention: the implementation that computes attention.
        adapter: what was put on top, and whether it was merged; None without.
        seconds: how long loading took, imports included.
        notes: sentences that a person should read.
    """

    model: str
    class_name: str
    precision: Precision
    dtypes: Mapping[str, int]
    devices: tuple[OnDevice, ...]
    device_map: Mapping[str, Device]
    input_device: str
    simulated: bool
    attention: str
    adapter: str | None
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def within(self) -> bool:
        """Whether predicted and real memory agree on every device."""
        return all(each.within for each in self.devices)

    def lines(self) -> Iterator[str]:
        """The report as log lines."""
        dtypes = ", ".join(f"{dtype} {gib(size)}" for dtype, size in self.dtypes.items())
        yield f"{self.model} is loaded as {self.class_name} in {self.precision} ({dtypes}) in {self.seconds:.1f} s"
        if self.simulated:
            yield "  the GPUs are pretended: all of it is in the CPU's memory"
        for each in self.devices:
            yield f"  {where(each.device)}: {each.blocks}: {_sizes(each)}"
        if self.adapter is not None:
            yield f"  adapter: {self.adapter}"
        for note in self.notes:
            yield f"  note: {note}"

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values; sizes in bytes."""
        return {
            "model": self.model,
            "class": self.class_name,
            "precision": self.precision.value,
            "dtypes": dict(self.dtypes),
            "devices": [
                {
                    "device": each.device,
                    "blocks": each.blocks,
                    **{f"{name}_bytes": getattr(each, name) for name in ("predicted", "real", "cuda", "planned")},
                    "within_tolerance": each.within,
                }
                for each in self.devices
            ],
            "device_map": dict(self.device_map),
            "input_device": self.input_device,
            "simulated": self.simulated,
            "attention": self.attention,
            "adapter": self.adapter,
            "seconds": round(self.seconds, 3),
            "within_tolerance": self.within,
            "notes": list(self.notes),
        }


def where(device: Device) -> str:
    """The device in words: ``GPU 0``, ``cpu``."""
    return f"GPU {device}" if isinstance(device, int) else device


def _sizes(each: OnDevice) -> str:
    if each.real is None:
        return f"{gib(each.predicted)} of weights, offloaded"
    text = f"{gib(each.real)} of weights, predicted {gib(each.predicted)}"
    if each.error is not None and each.real != each.predicted:
        text += f" ({100 * each.error:+.3f} %)"
    if each.cuda is not None:
        text += f", {gib(each.cuda)} given out by CUDA"
    if not each.within:
        text += ": MORE THAN THE TOLERANCE APART"
    return text


# ---- comparing what was loaded with what was planned -----------------------------------------------------------------

_SHOWN = 3
# PEFT wraps the model and the modules that it changes.
_WRAPPING = "base_model.model."
_WRAPPED = re.compile(
    r"\.base_layer|\.original_module|(?<=lora_A)\.default|(?<=lora_B)\.default|(?<=_vector)\.default|"
    r"(?<=lora_embedding_A)\.default|(?<=lora_embedding_B)\.default|(?<=modules_to_save)\.default"
)


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A parameter or buffer of a loaded model.

    Attributes:
        name: its path, as the model without adapters names it.
        device: ``cpu``, ``cuda:0``, ``meta``.
        dtype: ``bfloat16``, ``int8``, ...
        storage: what tensors of one storage have in common, a number and the device.
        nbytes: bytes of that storage.
        state: bytes of what bitsandbytes keeps in addition to it.
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


def tensors_of(model: Any, *, divided: bool = False) -> list[LoadedTensor]:
    """All parameters and buffers of a torch module, tied ones under each of their names.

    ``divided``: the module holds one rank's part of each layer, and its tensors' own bytes count: a part may be a view
    of a larger storage.
    """
    tensors = [(name, each, False) for name, each in model.named_parameters(remove_duplicate=False)]
    tensors += [(name, each, True) for name, each in model.named_buffers(remove_duplicate=False)]
    return [_seen(base_name(name), each, buffer, divided) for name, each, buffer in tensors]


def _seen(name: str, tensor: Any, buffer: bool, divided: bool) -> LoadedTensor:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    state = _state_tensors(tensor)
    meta = tensor.device.type == "meta"
    storage = None if meta else tensor.untyped_storage()
    return LoadedTensor(
        name=name,
        device=str(tensor.device),
        dtype=str(tensor.dtype).removeprefix("torch."),
        storage=id(tensor) if storage is None else storage.data_ptr(),
        nbytes=0 if storage is None else tensor.numel() * tensor.element_size() if divided else storage.nbytes(),
        state=sum(each.untyped_storage().nbytes() for each in state),
        codes=bool(state),
        buffer=buffer,
    )


def _state_tensors(weight: Any) -> list[Any]:
    """Bytes that bitsandbytes keeps in addition to a weight; none for an unquantised one."""
    if getattr(weight, "SCB", None) is not None:
        return [weight.SCB]
    state = getattr(weight, "quant_state", None)
    if state is None:
        return []
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def base_name(name: str) -> str:
    """The name that a tensor has in the model without PEFT's wrapping.

    >>> base_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return _WRAPPED.sub("", name.removeprefix(_WRAPPING))


def misplaced(placement: BlockPlacement, seen: Iterable[LoadedTensor]) -> list[str]:
    """A sentence for each tensor on another device than its block was planned for; on ``meta`` above all."""
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
            problems.append(f"{each.name} is on {each.device}, planned on {where(devices[block])}")
    return problems


def _devices_for(device: Device, simulated: bool, on_gpus: bool) -> tuple[str, ...]:
    """Where torch says that a tensor of such a block is. What is offloaded is ``meta`` until it is computed."""
    if isinstance(device, int):
        return (CPU,) if simulated else (f"cuda:{device}",)
    if device == DISK:
        return ("meta",)
    return (CPU, "meta") if on_gpus else (CPU,)


def of_other_dtypes(seen: Iterable[LoadedTensor], expected: frozenset[str], float32: frozenset[str]) -> list[str]:
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


def untied(seen: Sequence[LoadedTensor], ties: Mapping[str, str]) -> list[str]:
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


def bytes_by_device(placement: BlockPlacement, seen: Sequence[LoadedTensor]) -> dict[Device, int]:
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


def bytes_by_dtype(seen: Sequence[LoadedTensor]) -> dict[str, int]:
    """Bytes of the weights by dtype, each storage once."""
    found: dict[str, dict[tuple[str, int], int]] = {}
    for each in (each for each in seen if not each.buffer and each.device != "meta"):
        found.setdefault(each.dtype, {})[each.device, each.storage] = each.nbytes
    return {dtype: sum(storages.values()) for dtype, storages in sorted(found.items())}


def in_short(problems: Sequence[str]) -> str:
    """Some of the sentences, and how many more there are."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


# ---- loading ---------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class WrongPlacement(GpuherdError):
    """A model was loaded, and it is not what was planned: a tensor is on another device, in another dtype, missing."""


@dataclass(eq=False)
class Loaded:
    """A model in memory.

    Attributes:
        model: transformers' (or PEFT's) module, in evaluation mode.
        report: where it is, and its predicted and real memory.
        folder: its config.
        tokenizer_folder: its tokenizer: the adapter's, where that brings one, else ``folder``.
    """

    model: Any
    report: LoadReport
    folder: Path
    tokenizer_folder: Path
    trust_remote_code: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first asked for. Raises MissingModel where there is none."""
        return tokenizer_in(self.tokenizer_folder, trust_remote_code=self.trust_remote_code)

    @property
    def input_device(self) -> str:
        """Where token ids go: the device of the embedding, ``cpu`` or ``cuda:0``."""
        return self.report.input_device


def load_model(
    model: str,
    *,
    plan: MemoryPlan | AnswerRefusal | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    quantization: str | None = None,
    dtype: str | None = None,
    adapter: str | None = None,
    merge_adapter: bool = False,
    allow_offload: Offload | None = None,
    parallel: ParallelOption | None = None,
    gpus: str | Sequence[GpuSpec] = "auto",
    trust_remote_code: bool = False,
    workload: Workload = Workload(),  # noqa: B008 - frozen
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    simulate: bool = False,
) -> Loaded:
    """Loads a model as planned, or refuses with figures before anything is read.

    Args:
        model: a folder, a weight file, a Hugging Face id (``@revision`` if wanted), or an adapter's folder or id, whose
            base is then loaded with it. ``-8bit`` and ``-4bit`` at its end quantise it.
        plan: of ``make_plan``, for this model; it is planned here otherwise.
        device_map: ``auto`` (planned, the default), ``cpu``, or module path -> GPU number, ``cuda:0``, ``cpu`` or
            ``disk``.
        quantization: ``int8`` (``8bit``), ``nf4`` (``4bit``), ``nf4-dq``: by bitsandbytes while loading.
        dtype: ``fp32``, ``bf16``, ``fp16``, or a quantisation; the checkpoint's own by default.
        adapter: a LoRA adapter's folder or id; kept as PEFT's modules, or added to the weights (``merge_adapter``).
        allow_offload: ``cpu`` or ``disk``: what fits on no GPU may go there; refused otherwise.
        parallel: as the planner has it: ``auto`` the fewest GPUs, ``layers`` all, ``replica`` one; ``tensor``: this
            process's part of every layer, in each of the processes that torchrun has started.
        gpus: ``auto``: those that are free here (of CUDA_VISIBLE_DEVICES); or words such as ``4x40GB``, or cards: the
            first GPUs here, or pretended ones on a machine without.
        trust_remote_code: run code that the model brings.
        workload: what it is to do: the plan leaves room for its cache and workspace.
        reserve: what the plan keeps free on each GPU.
        simulate: pretend all GPUs: their blocks go to the CPU's memory, and are checked as if there were GPUs.

    Raises:
        UsageError: options that contradict each other, a device map that can't be, offloading that is not allowed.
        MissingModel, BadModel: not there, damaged, weights missing, an adapter for another base, code of its own.
        MissingExtra: a library that is needed is not installed.
        ModelDoesNotFit: with the planner's figures and what would fit.
        WrongPlacement: what was loaded is not what was planned.
    """
    request = LoadRequest(**locals())  # whose fields these parameters are
    started = time.monotonic()
    if parallel == "tensor":
        from gpuherd.models.load.tensor_parallel import load_tensor_parallel

        return load_tensor_parallel(request)[0]
    return load_prepared(prepare(request), started=started)


def load_prepared(ready: PreparedModel, *, started: float | None = None) -> Loaded:
    """Loads what was prepared. ``started``: since when the seconds count, of ``time.monotonic``."""
    started = time.monotonic() if started is None else started
    for device, blocks in ready.placement.format_blocks():
        logger.info("%s: %s -> %s", ready.request.model, blocks, where(device))
    with naming_extras(EXTRAS, "loading models takes"):
        import accelerate  # noqa: F401 - a device map needs it, and transformers says so late
        import transformers  # noqa: F401
    check_cuda(ready.placement)
    before = _given_out(ready.placement)
    model, ready = load_weights(ready)
    tensors = tensors_of(model)
    _check_as_planned(ready, tensors)
    if ready.adapter is not None:
        model = with_adapter(model, ready.adapter, merge=ready.request.merge_adapter)
        tensors = tensors_of(model)
        refuse_placement(ready, misplaced(ready.placement, tensors))
    after = _given_out(ready.placement)
    placement = ready.placement
    report = load_report(
        ready,
        model,
        tensors,
        _devices(ready, tensors, {gpu: after[gpu] - before[gpu] for gpu in after}),
        device_map=placement.by_block,
        input_device=placement.input_device,
        simulated=placement.simulated,
        started=started,
    )
    for line in report.lines():
        logger.info("%s", line)
    if not report.within:
        logger.warning("%s: predicted and real memory are further apart than they should be", ready.request.model)
    return Loaded(model, report, ready.folder, ready.tokenizer_folder, ready.request.trust_remote_code)


def load_report(
    ready: PreparedModel,
    model: Any,
    tensors: Sequence[LoadedTensor],
    devices: Sequence[OnDevice],
    *,
    device_map: Mapping[str, Device],
    input_device: str,
    simulated: bool,
    started: float,
) -> LoadReport:
    """The report on a model, or on this rank's part of one. ``started``: since when the seconds count."""
    unmerged = ready.adapter is not None and not ready.request.merge_adapter
    adapter = None
    if ready.adapter is not None:
        adapter = f"{ready.adapter} ({'beside the weights' if unmerged else 'merged'})"
    return LoadReport(
        model=ready.request.model,
        class_name=type(model.get_base_model() if unmerged else model).__name__,
        precision=ready.precision,
        dtypes=bytes_by_dtype(tensors),
        devices=tuple(devices),
        device_map=device_map,
        input_device=input_device,
        simulated=simulated,
        attention=str(getattr(model.config, "_attn_implementation", None) or "unknown"),
        adapter=adapter,
        seconds=time.monotonic() - started,
        notes=ready.notes,
    )


def wrong_dtypes(ready: PreparedModel, tensors: Sequence[LoadedTensor]) -> list[str]:
    """A sentence for each weight of another dtype than planned."""
    in_fp16 = ready.precision.computes_in is Precision.FP16
    kept = [each for each in ready.base.tensors() if each.keeps_fp32 or (each.fp32_in_fp16 and in_fp16)]
    return of_other_dtypes(tensors, expected_dtypes(ready.precision), frozenset(each.name for each in kept))


def refuse_placement(ready: PreparedModel, problems: Sequence[str]) -> None:
    """Raises WrongPlacement where there are problems."""
    if problems:
        raise WrongPlacement(f"{quoted(ready.request.model)} is not where it was planned: {in_short(problems)}")


def _check_as_planned(ready: PreparedModel, tensors: Sequence[LoadedTensor]) -> None:
    """Raises WrongPlacement where the model is not what was planned."""
    ties = {tensor.name: tensor.tied_to for tensor in ready.base.tensors() if tensor.tied_to is not None}
    problems = [*misplaced(ready.placement, tensors), *wrong_dtypes(ready, tensors), *untied(tensors, ties)]
    refuse_placement(ready, problems)


def _given_out(placement: BlockPlacement) -> dict[int, int]:
    """Bytes that CUDA's allocator has given out on each planned GPU; nothing where they are pretended."""
    if placement.simulated or not placement.gpus:
        return {}
    import torch

    gc.collect()
    return {gpu: torch.cuda.memory_allocated(gpu) for gpu in placement.gpus}


def _devices(ready: PreparedModel, tensors: Sequence[LoadedTensor], cuda: Mapping[int, int]) -> list[OnDevice]:
    """The contents of each planned device. ``cuda``: bytes that CUDA's allocator gave out on each GPU."""
    placement, loads = ready.placement, ready.placement.loads or {}
    predicted = weights_by_device(placement.architecture, placement.devices, ready.precision)
    real = bytes_by_device(placement, tensors)
    blocks: dict[Device, list[str]] = {}
    for device, words in placement.format_blocks():
        blocks.setdefault(device, []).append(words)
    return [
        OnDevice(
            device=device,
            blocks=", ".join(words),
            predicted=predicted[device],
            real=real.get(device),
            cuda=cuda.get(device) if isinstance(device, int) else None,
            planned=loads[device].usage.total if isinstance(device, int) and device in loads else None,
        )
        for device, words in blocks.items()
    ]
