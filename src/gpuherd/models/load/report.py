"""What came of loading: where each block lies, in which dtype, and predicted beside real memory. Plain data, and its
words. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuherd.models.load.placed import Device
from gpuherd.models.plan.precision import Precision
from gpuherd.units import gib

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
