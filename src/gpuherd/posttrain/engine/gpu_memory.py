"""What has been taken of GPUs, as lines for run.log: the words are those that people look for.

What nobody measured (on a CPU, on simulated GPUs) is N/A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.posttrain.engine.world import World

_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The most that was taken of a GPU, in bytes; None where nobody measured it.

    Attributes:
        label: as people call it.
        allocated, reserved: by torch: for tensors, and with what its allocator keeps.
        total: the GPU's.
    """

    label: str
    allocated: int | None
    reserved: int | None
    total: int | None


def memory_summary(gpus: Sequence[GpuMemory]) -> list[str]:
    """The lines of a summary.

    >>> print("\\n".join(memory_summary([GpuMemory("0", 45 << 30, 48 << 30, 80 << 30)])))
    GPU Memory Summary:
      GPU 0: 45.00 GB allocated, 48.00 GB reserved, 80.00 GB total
    """
    lines = ["GPU Memory Summary:"]
    for gpu in gpus:
        parts = ((gpu.allocated, "allocated"), (gpu.reserved, "reserved"), (gpu.total, "total"))
        lines.append(f"  GPU {gpu.label}: " + ", ".join(f"{_gb(value)} {word}" for value, word in parts))
    return lines if gpus else [*lines, "  no GPUs: all was computed on the CPU"]


def measured(label: str, device: str) -> GpuMemory | None:
    """The most that this process has taken of its GPU so far; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return GpuMemory(
        label,
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        torch.cuda.get_device_properties(device).total_memory,
    )


def of_world(world: World) -> list[GpuMemory]:
    """What each process has taken, by rank; all call it together."""
    return [each for each in world.gather(measured(str(world.rank), world.device)) if each is not None]


def _gb(value: int | None) -> str:
    return "N/A" if value is None else f"{value / _GB:.2f} GB"
