"""What the processes of a training have taken of their GPUs, as lines for run.log."""

from __future__ import annotations

from gpuherd.posttrain.training.world import World

_GB = 1 << 30


def memory_summary(world: World) -> list[str]:
    """``GPU Memory Summary:`` and a line a process: the most that torch has given out and kept, and the GPU's size.

    All processes call it together; on a CPU the line says so.
    """
    lines = world.gather(_line(world))
    told = [line for line in lines if line is not None]
    return ["GPU Memory Summary:", *(told or ["  no GPUs: all was computed on the CPU"])]


def _line(world: World) -> str | None:
    if not world.device.startswith("cuda"):
        return None
    import torch

    allocated, reserved = (
        most(world.device) / _GB for most in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    )
    total = torch.cuda.get_device_properties(world.device).total_memory / _GB
    return f"  GPU {world.rank}: {allocated:.2f} GB allocated, {reserved:.2f} GB reserved, {total:.2f} GB total"
