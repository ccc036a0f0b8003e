"""Set up this process for the GPUs that it shall use: the actions of the GPU guide.

The variable is set before CUDA starts, or an error says that it is too late. Nothing here starts CUDA in this process.
torch is imported by the functions that return a ``torch.device``, and only then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.errors import NoSuchGpu, UsageError
from gpuherd.gpus import cuda
from gpuherd.gpus.nvml import machine
from gpuherd.gpus.own_view import VISIBLE, count_in_pci_order, show_only, visible_now
from gpuherd.gpus.selection import GpuId, named, select_gpus
from gpuherd.gpus.state import Machine

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def set_visible_gpus(gpu_ids: Sequence[GpuId]) -> None:
    """Makes CUDA in this process, and in its future children, see only these GPUs, as 0, 1, … in this order.

    Sets CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID; [] hides all GPUs. On a machine without GPUs the ids
    are set as they are.

    Raises:
        NoSuchGpu: a ValueError; one of them is not among the GPUs that this process was started with.
        CudaAlreadyStarted: CUDA runs in this process with other GPUs. Setting the same ones again is fine.
    """
    now = machine(processes=False)
    names = [gpu.cuda_name for gpu in named(now, gpu_ids)] if now.gpus else [str(gpu_id) for gpu_id in gpu_ids]
    show_only(names)


def get_optimal_device(gpu_ids: Sequence[GpuId] | None = None) -> torch.device:
    """The ``torch.device`` to work on: ``cuda:0``, the first visible GPU, or ``cpu`` where no GPU works.

    Args:
        gpu_ids: use the first of these GPUs. The device has its position among the visible GPUs, since CUDA
            renumbers them: after ``set_visible_gpus([2, 3])``, GPU 3 is ``cuda:1``. [] gives the CPU.

    Returns:
        A device that works. Where there are GPUs but torch can't use them (a CPU build, a driver that is too old,
        simulated GPUs) it is the CPU, and a warning says why.

    Raises:
        NoSuchGpu: a ValueError; the GPU is not visible to this process.
        UsageError: torch is not installed.
    """
    torch_module = _torch()
    now = machine(processes=False)
    count_in_pci_order()
    shown = [gpu for gpu in visible_now(now.gpus) if gpu.problem is None]
    if (gpu_ids is not None and len(gpu_ids) == 0) or not now.gpus or (gpu_ids is None and not shown):
        return _cpu(torch_module)
    position = 0
    if gpu_ids is not None:
        wanted = named(now, gpu_ids[:1])[0]
        if wanted not in shown:
            ids = ", ".join(gpu.label for gpu in shown) or "none"
            raise NoSuchGpu(f"GPU {wanted.label} is not visible to CUDA in this process ({VISIBLE} shows: {ids})")
        position = shown.index(wanted)
    obstacle = _obstacle(torch_module, now, position)
    if obstacle is not None:
        logger.warning("using the CPU although there are GPUs: %s", obstacle)
        return _cpu(torch_module)
    device: torch.device = torch_module.device("cuda", position)
    return device


def setup_gpu_environment(
    gpu_ids: Sequence[GpuId] | None = None, num_gpus: int | None = None, *, driver_wait_s: float = 0
) -> torch.device:
    """Selects GPUs (``select_gpus``), makes them the visible ones (``set_visible_gpus``) and returns the first.

    Returns:
        ``cuda:0``, or ``cpu`` where no GPU works.

    Raises:
        NoSuchGpu: a ValueError; one of ``gpu_ids`` is not there.
        CudaAlreadyStarted: CUDA runs in this process with other GPUs.
        UsageError: torch is not installed.
    """
    _torch()  # before anything is changed
    chosen = select_gpus(gpu_ids, num_gpus, driver_wait_s=driver_wait_s)
    set_visible_gpus(chosen)
    return get_optimal_device(chosen)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"torch is needed for a torch.device: pip install 'gpuherd[esd]' ({error})") from None
    return torch


def _cpu(torch_module: Any) -> torch.device:
    device: torch.device = torch_module.device("cpu")
    return device


def _obstacle(torch_module: Any, now: Machine, position: int) -> str | None:
    """Why torch can't use the visible GPU at this position, None if it can."""
    built_for = torch_module.version.cuda
    if built_for is None:
        return f"torch {torch_module.__version__} is built without CUDA; install a CUDA build of torch"
    if now.cuda_version is not None and _major(built_for) > _major(now.cuda_version):
        return (
            f"torch {torch_module.__version__} is built for CUDA {built_for}, "
            f"the driver is for CUDA {now.cuda_version}; update the driver or install an older build of torch"
        )
    if cuda.started():
        count, reason = int(torch_module.cuda.device_count()), "CUDA was started with other GPUs"
    else:
        count, reason = cuda.count_in_child()
    if position < count:
        return None
    return reason or f"CUDA finds {count} GPUs, and this would be number {position + 1}"


def _major(version: str) -> int:
    return int(version.split(".")[0])
