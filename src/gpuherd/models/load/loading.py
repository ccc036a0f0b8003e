"""Loads a model through transformers, each block where a plan says and nowhere else, checks that it did, and reports.

What is loaded, and where to, is decided in ``prepare`` before torch is imported; ``verify`` compares the result with
it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gpuherd.errors import GpuherdError, MissingExtra, MissingModel, naming_extras
from gpuherd.gpus.visible import CUDA
from gpuherd.models.load import verify
from gpuherd.models.load.options import Device, LoadRequest, Offload
from gpuherd.models.load.placement import Placement, weights_by_device
from gpuherd.models.load.prepare import Prepared, prepare
from gpuherd.models.load.pretrained import few, fitted_class, from_pretrained, with_adapter
from gpuherd.models.load.support import EXTRAS, classes_for, config_of, expected_dtypes, runs_own_code
from gpuherd.models.names import shown
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.placement import ParallelOption
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import Reserve, Workload
from gpuherd.units import gib

# ---- the report ------------------------------------------------------------------------------------------------------

# Tensors are predicted to the byte; what is allowed is one part in a thousand.
TENSOR_TOLERANCE = 0.001
# CUDA's allocator rounds each tensor up to 512 bytes, and libraries keep something of their own.
CUDA_TOLERANCE = 0.03
_CUDA_SLACK = 4 << 20


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What lies on one device.

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
        precision: in which its weights lie.
        dtypes: torch dtype -> bytes of the weights that have it.
        devices: what lies where.
        device_map: block -> device, as planned.
        input_device: where token ids go, as torch names it.
        simulated: the GPUs are pretended, and all lies in the CPU's memory.
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
            yield f"  {_where(each.device)}: {each.blocks}: {_sizes(each)}"
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
                    "predicted_bytes": each.predicted,
                    "real_bytes": each.real,
                    "cuda_bytes": each.cuda,
                    "planned_bytes": each.planned,
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


def _where(device: Device) -> str:
    return f"GPU {device}" if isinstance(device, int) else device


def _sizes(each: OnDevice) -> str:
    if each.real is None:
        return f"{gib(each.predicted)} of weights, offloaded"
    told = f"{gib(each.real)} of weights, predicted {gib(each.predicted)}"
    if each.error is not None and each.real != each.predicted:
        told += f" ({100 * each.error:+.3f} %)"
    if each.cuda is not None:
        told += f", {gib(each.cuda)} given out by CUDA"
    if not each.within:
        told += ": MORE THAN THE TOLERANCE APART"
    return told


# ---- loading ---------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class WrongPlacement(GpuherdError):
    """A model was loaded, and it is not what was planned: a tensor is on another device, in another dtype, missing."""


@dataclass(eq=False)
class Loaded:
    """A model in memory.

    Attributes:
        model: transformers' (or PEFT's) module, in evaluation mode.
        report: where it lies, and predicted beside real memory.
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
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.tokenizer_folder, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, TypeError, KeyError) as problem:
            raise MissingModel(
                f"{self.tokenizer_folder} has no tokenizer that transformers can use: {problem}"
            ) from None

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
    started = time.monotonic()
    request = LoadRequest(
        model=model,
        plan=plan,
        device_map=device_map,
        quantization=quantization,
        dtype=dtype,
        adapter=adapter,
        merge_adapter=merge_adapter,
        allow_offload=allow_offload,
        parallel=parallel,
        gpus=gpus,
        trust_remote_code=trust_remote_code,
        workload=workload,
        reserve=reserve,
        simulate=simulate,
    )
    if parallel == "tensor":
        from gpuherd.models.load.tensor_parallel import load_tensor_parallel

        return load_tensor_parallel(request)[0]
    return load_prepared(prepare(request), started=started)


def load_prepared(ready: Prepared, *, started: float | None = None) -> Loaded:
    """Loads what was prepared. ``started``: since when the seconds count, of ``time.monotonic``."""
    started = time.monotonic() if started is None else started
    for device, blocks in ready.placement.format_blocks():
        logger.info("%s: %s -> %s", ready.request.model, blocks, f"GPU {device}" if isinstance(device, int) else device)
    with naming_extras(EXTRAS, "loading models takes"):
        import accelerate  # noqa: F401 - a device map needs it, and transformers says so late
        import transformers  # noqa: F401
    _check_cuda(ready.placement)
    trusted = runs_own_code(ready.config, trusted=ready.request.trust_remote_code)
    config = config_of(ready.folder, trusted=trusted)
    model_class, ready, device_map = fitted_class(classes_for(ready.base, config, trusted=trusted), config, ready)
    before = _given_out(ready.placement)
    model, unexpected = from_pretrained(model_class, config, ready, device_map)
    notes = [*ready.notes]
    if unexpected:
        notes.append(f"{len(unexpected)} tensors of the checkpoint have no place in the model: {few(unexpected)}")
    seen = verify.tensors_of(model)
    _judge(ready, seen)
    if ready.adapter is not None:
        model = with_adapter(model, ready.adapter, merge=ready.request.merge_adapter)
        seen = verify.tensors_of(model)
        _refuse(ready, verify.misplaced(ready.placement, seen))
    after = _given_out(ready.placement)
    report = _report(ready, model, seen, {gpu: after[gpu] - before[gpu] for gpu in after}, started, tuple(notes))
    for line in report.lines():
        logger.info("%s", line)
    if not report.within:
        logger.warning("%s: predicted and real memory are further apart than they should be", ready.request.model)
    return Loaded(model, report, ready.folder, ready.tokenizer_folder, ready.request.trust_remote_code)


# ---- before ----------------------------------------------------------------------------------------------------------


def _check_cuda(placement: Placement) -> None:
    """Raises MissingExtra where GPUs are planned that torch can't use, and nobody wants them pretended."""
    if placement.simulated or not placement.gpus:
        return
    import torch

    check_torch(torch.cuda.device_count())
    if torch.cuda.device_count() <= max(placement.gpus):
        raise GpuherdError(
            f"the plan uses GPU {max(placement.gpus)}, and torch sees {torch.cuda.device_count()} GPUs; was "
            f"{CUDA} changed after CUDA had started?"
        )


def check_torch(gpus: int) -> None:
    """Raises MissingExtra where GPUs are planned and torch sees none; ``gpus``: how many it sees."""
    import torch

    if not gpus:
        build = "has no CUDA" if torch.version.cuda is None else "can't use this machine's driver"
        raise MissingExtra(
            f"the plan is for GPUs, and torch {torch.__version__} {build}; install torch with CUDA (see gpuherd "
            "doctor), load with device_map='cpu', or pretend the GPUs with simulate"
        )


# ---- after -----------------------------------------------------------------------------------------------------------


def _judge(ready: Prepared, seen: Sequence[verify.Seen]) -> None:
    """Raises WrongPlacement where the model is not what was planned."""
    tensors = list(ready.base.tensors())
    ties = {tensor.name: tensor.tied_to for tensor in tensors if tensor.tied_to is not None}
    in_fp16 = ready.precision.computes_in is Precision.FP16
    float32 = frozenset(each.name for each in tensors if each.keeps_fp32 or (each.fp32_in_fp16 and in_fp16))
    problems = verify.misplaced(ready.placement, seen)
    problems += verify.of_other_dtypes(seen, expected_dtypes(ready.precision), float32)
    problems += verify.untied(seen, ties)
    _refuse(ready, problems)


def _refuse(ready: Prepared, problems: Sequence[str]) -> None:
    if problems:
        raise WrongPlacement(f"{shown(ready.request.model)} is not where it was planned: {verify.in_short(problems)}")


def _given_out(placement: Placement) -> dict[int, int]:
    """Bytes that CUDA's allocator has given out on each planned GPU; nothing where they are pretended."""
    if placement.simulated or not placement.gpus:
        return {}
    import torch

    gc.collect()
    return {gpu: torch.cuda.memory_allocated(gpu) for gpu in placement.gpus}


def _report(
    ready: Prepared,
    model: Any,
    seen: Sequence[verify.Seen],
    cuda: Mapping[int, int],
    started: float,
    notes: tuple[str, ...],
) -> LoadReport:
    placement, loads = ready.placement, ready.placement.loads or {}
    predicted = weights_by_device(placement.architecture, placement.devices, ready.precision)
    real = verify.bytes_by_device(placement, seen)
    blocks: dict[Any, list[str]] = {}
    for device, words in placement.format_blocks():
        blocks.setdefault(device, []).append(words)
    devices = tuple(
        OnDevice(
            device=device,
            blocks=", ".join(words),
            predicted=predicted[device],
            real=real.get(device),
            cuda=cuda.get(device) if isinstance(device, int) else None,
            planned=loads[device].usage.total if isinstance(device, int) and device in loads else None,
        )
        for device, words in blocks.items()
    )
    adapter = None
    if ready.adapter is not None:
        adapter = f"{ready.adapter} ({'merged' if ready.request.merge_adapter else 'beside the weights'})"
    return LoadReport(
        model=ready.request.model,
        class_name=type(
            model if ready.adapter is None or ready.request.merge_adapter else model.get_base_model()
        ).__name__,
        precision=ready.precision,
        dtypes=verify.bytes_by_dtype(seen),
        devices=devices,
        device_map=placement.by_block,
        input_device=placement.input_device,
        simulated=placement.simulated,
        attention=str(getattr(model.config, "_attn_implementation", None) or "unknown"),
        adapter=adapter,
        seconds=time.monotonic() - started,
        notes=notes,
    )
