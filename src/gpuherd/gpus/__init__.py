"""The GPUs of the machine: which there are, which are in use, and which to take.

The public names load when first used, so that importing this package costs nothing. Only ``get_optimal_device`` and
``setup_gpu_environment`` need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.gpus.api import (
        auto_select_gpus_for_model,
        get_available_gpus,
        get_gpu_info,
        get_gpu_memory_usage,
        get_optimal_device,
        print_gpu_info,
        select_gpus,
        set_visible_gpus,
        setup_gpu_environment,
    )
    from gpuherd.gpus.query import GpuReader, machine
    from gpuherd.gpus.state import Gpu, GpuProcess, Machine

__all__ = [
    "Gpu",
    "GpuProcess",
    "GpuReader",
    "Machine",
    "auto_select_gpus_for_model",
    "get_available_gpus",
    "get_gpu_info",
    "get_gpu_memory_usage",
    "get_optimal_device",
    "machine",
    "print_gpu_info",
    "select_gpus",
    "set_visible_gpus",
    "setup_gpu_environment",
]

_HOMES = {
    "api": (
        "auto_select_gpus_for_model",
        "get_available_gpus",
        "get_gpu_info",
        "get_gpu_memory_usage",
        "get_optimal_device",
        "print_gpu_info",
        "select_gpus",
        "set_visible_gpus",
        "setup_gpu_environment",
    ),
    "query": ("GpuReader", "machine"),
    "state": ("Gpu", "GpuProcess", "Machine"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__getattr__, __dir__ = on_first_use(__name__, _HOME_OF)
