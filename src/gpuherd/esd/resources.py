"""What of the machine a worker computes with: how many threads its numeric libraries start, and on which devices.

Threads: OpenBLAS, MKL and torch each start a pool of their own, a thread for each core of the machine, in every process
at once. Each reads the environment once, when it is loaded, so this is settled before numpy is imported. A worker that
the dispatcher starts has been given its share of the cores (``engines.local.process``); one that is started by hand
takes them all.

Devices: the CUDA driver library itself is asked, so that a CPU run needs no torch; no CUDA context is created.

It knows environment variables, the few driver calls that it takes and what ``--device-map`` means. It imports no
numeric library, so that it can come first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from gpuherd.engines.host import cores
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.gpus.visible import CUDA

# Each is read by one library or more; the first that is set says how many threads the others get.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def blas_threads(environment: Mapping[str, str], available: int, *, at_once: int = 1) -> int:
    """How many threads a call of BLAS should take.

    Args:
        environment: what the user or the dispatcher has said; a positive number there is obeyed.
        available: cores of this process.
        at_once: workers, or lanes of one worker, that compute side by side and share the cores.

    Returns:
        1 or more.
    """
    for name in VARIABLES:
        # OMP_NUM_THREADS can be a list, with a number for each level of nesting; the first is that of the outermost.
        word = environment.get(name, "").split(",")[0].strip()
        if word.isascii() and word.isdigit() and int(word) > 0:
            return max(1, int(word) // at_once)
    return max(1, available // at_once)


def settle(environment: MutableMapping[str, str] = os.environ, *, at_once: int = 1) -> int:
    """Sets in the environment how many threads each library may start, where it is not set yet. Returns the number.

    Call it before numpy, scipy or torch is imported; later it changes nothing for libraries that are loaded.
    """
    threads = blas_threads(environment, cores(), at_once=at_once)
    for name in VARIABLES:
        environment.setdefault(name, str(threads))
    # Threads that have nothing to do sleep at once. They would spin for 200 ms (MKL's) or longer beside the threads of
    # the next library, which has work for the same cores.
    environment.setdefault("KMP_BLOCKTIME", "0")
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return threads


def before_mkl(environment: MutableMapping[str, str] = os.environ) -> None:
    """Chooses MKL's threads before it is loaded: none for one core, so that it needs no OpenMP library at all.

    MKL_DYNAMIC off: it would otherwise take fewer threads when it likes, and round otherwise in another run.
    """
    if blas_threads(environment, cores()) == 1:
        environment.setdefault("MKL_THREADING_LAYER", "SEQUENTIAL")
    environment.setdefault("MKL_DYNAMIC", "FALSE")
    environment.setdefault("KMP_BLOCKTIME", "0")


CUDA_SUCCESS = 0
LIBRARY = "libcuda.so.1"


class CudaUnavailable(GpuherdError):
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
    number = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
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
        NoCuda: ``cuda`` was requested and is not available.
    """
    if device_map == "cpu":
        return ("cpu",), "device map is cpu"
    problem = cuda.problem or torch_problem()
    if problem is None:
        return tuple(f"cuda:{index}" for index in range(len(cuda.names) if all_gpus else 1)), None
    if device_map == "cuda":
        raise CudaUnavailable(f"device map is cuda, but there is no usable GPU: {problem}")
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
