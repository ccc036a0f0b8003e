"""Which devices a worker may compute on: asks the CUDA driver library itself, so that a CPU run needs no torch.

Knows the few driver calls that it takes and what ``--device-map`` means. Creates no CUDA context.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.gpus.visible import CUDA

CUDA_SUCCESS = 0
LIBRARY = "libcuda.so.1"


class NoCuda(GpuherdError):
    """--device-map cuda was given and there is no GPU that could be used."""

    exit_code = ExitCode.MISSING


@dataclass(frozen=True, slots=True)
class CudaDevices:
    """The names of the GPUs that CUDA shows to this process, in its order; ``problem`` says why there are none."""

    names: tuple[str, ...] = ()
    problem: str | None = None


def cuda_devices() -> CudaDevices:
    """What the CUDA driver shows under this process's CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return CudaDevices(problem="no CUDA driver on this machine")
    code = driver.cuInit(0)
    if code != CUDA_SUCCESS:
        return CudaDevices(problem=_no_device_reason(driver, code))
    number = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(number))
    if code != CUDA_SUCCESS or number.value == 0:
        return CudaDevices(problem=_no_device_reason(driver, code))
    return CudaDevices(names=tuple(_device_name(driver, index) for index in range(number.value)))


def choose_devices(
    device_map: str, cuda: CudaDevices, torch_problem: Callable[[], str | None], *, all_gpus: bool
) -> tuple[tuple[str, ...], str | None]:
    """The devices to compute on, and why not on a GPU when it is the CPU.

    Args:
        device_map: ``auto``, ``cpu`` or ``cuda``.
        cuda: what the driver shows.
        torch_problem: imports torch and says why it can't use the GPUs, None if it can; called only when GPUs are
            there and wanted.
        all_gpus: use every GPU that is shown, else the first.

    Raises:
        NoCuda: ``cuda`` was asked for and can't be had.
    """
    if device_map == "cpu":
        return ("cpu",), "device map is cpu"
    problem = cuda.problem or torch_problem()
    if problem is None:
        return tuple(f"cuda:{index}" for index in range(len(cuda.names) if all_gpus else 1)), None
    if device_map == "cuda":
        raise NoCuda(f"device map is cuda, but there is no usable GPU: {problem}")
    return ("cpu",), problem


def torch_problem() -> str | None:
    """Why torch can't use CUDA here, None if it can. Imports torch."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; pip install 'gpuherd[esd]'"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU-only build; reinstall torch with CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) can't use this driver; see gpuherd doctor"
    return None


def _no_device_reason(driver: ctypes.CDLL, code: int) -> str:
    visible = os.environ.get(CUDA)
    if visible is not None and not visible.strip():
        return f"{CUDA} is empty"
    reason = _error_text(driver, code) if code != CUDA_SUCCESS else "no device"
    hint = f" ({CUDA}={visible!r})" if visible is not None else ""
    return f"the CUDA driver says: {reason}{hint}"


def _error_text(driver: ctypes.CDLL, code: int) -> str:
    """The driver's own words for an error code."""
    text = ctypes.c_char_p()
    lookup = getattr(driver, "cuGetErrorString", None)  # a stand-in driver need not have it
    if lookup is None or lookup(code, ctypes.byref(text)) != CUDA_SUCCESS or not text.value:
        return f"error {code}"
    return text.value.decode(errors="replace")


def _device_name(driver: ctypes.CDLL, index: int) -> str:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    if (
        driver.cuDeviceGet(ctypes.byref(device), index) != CUDA_SUCCESS
        or driver.cuDeviceGetName(name, len(name), device) != CUDA_SUCCESS
    ):
        return "name unknown"
    return name.value.decode(errors="replace")
