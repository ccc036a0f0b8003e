"""See and choose GPUs from Python: the functions of the GPU guide.

GPU ids are physical: ``3`` as ``gpuherd gpus`` numbers them, or ``"3:1"`` for a MIG instance. They never change with
CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES), which only decides which of them are available. Functions that take
explicit ids accept every GPU that this process was started with, so that one may choose again after
``set_visible_gpus``; all others look at what is visible now. Memory is that of the whole GPU, whoever uses it, in MB
(2^20 bytes).

Nothing here starts CUDA or ROCm in this process. torch is imported by the functions that return a ``torch.device``,
and only then.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from gpuherd.errors import JobCannotFit, NoSuchGpu, UsageError
from gpuherd.gpus import visible
from gpuherd.gpus.choose import choose
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.query import machine
from gpuherd.gpus.state import Gpu, Machine
from gpuherd.gpus.visible import count_in_pci_order, find, show_only, visible_from_start, visible_now

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

GpuId = int | str
_MB_PER_GB = 1024


class GpuInfo(TypedDict):
    """One GPU in ``get_gpu_info``. Memory in MB; None for what the driver does not report."""

    id: GpuId
    name: str
    compute_capability: str | None
    memory_total: int
    multi_processor_count: int | None
    uuid: str
    pci_bus_id: str | None
    memory_used: int
    memory_free: int
    utilisation: int | None
    temperature: int | None
    power: float | None


def gpu_id(gpu: Gpu) -> GpuId:
    """The id of this GPU in this module: an int, or ``"3:1"`` for a MIG instance."""
    return gpu.index if gpu.mig_position is None else gpu.label


def get_available_gpus() -> list[GpuId]:
    """Ids of the GPUs that this process may use and that work, in CUDA's order; [] without GPUs."""
    return [gpu_id(gpu) for gpu in available(machine(processes=False))]


def get_gpu_info() -> list[GpuInfo]:
    """Properties and figures of each available GPU."""
    return [_info(gpu) for gpu in available(machine(processes=False))]


def get_gpu_memory_usage(device_id: GpuId = 0, *, gpu_id: GpuId | None = None) -> tuple[int, int, float]:
    """Memory of one GPU: (used MB, total MB, percent used); (0, 0, 0.0) on a machine without GPUs.

    ``gpu_id`` is another name for ``device_id``.

    Raises:
        NoSuchGpu: a ValueError; there are GPUs but not this one.
    """
    now = machine(processes=False)
    if not now.gpus:
        return (0, 0, 0.0)
    gpu = named(now, [device_id if gpu_id is None else gpu_id])[0]
    return (gpu.used_mb, gpu.total_mb, _percent(gpu))


def print_gpu_info(gpu_ids: Sequence[GpuId] | None = None) -> None:
    """Prints how many GPUs are available and one line for each, or for those of ``gpu_ids``, on standard output.

    Raises:
        NoSuchGpu: a ValueError; one of ``gpu_ids`` is not there.
    """
    now = machine(processes=False)
    lines = [f"Available GPUs: {len(available(now))}"]
    if now.problem is not None:
        lines.append(f"No GPU can be used: {now.problem}.")
    shown = available(now) if gpu_ids is None or not now.gpus else named(now, gpu_ids)
    sys.stdout.write("\n".join([*lines, *map(_line, shown)]) + "\n")


def select_gpus(
    gpu_ids: Sequence[GpuId] | None = None,
    num_gpus: int | None = None,
    min_memory_mb: int | None = None,
    *,
    driver_wait_s: float = 0,
) -> list[GpuId]:
    """The ids of the GPUs that meet these requirements. ``gpu_ids`` takes precedence over the others.

    Args:
        gpu_ids: exactly these, in this order.
        num_gpus: the first so many; fewer, with a warning, when there are not enough.
        min_memory_mb: only GPUs with at least so much memory in total.
        driver_wait_s: an installed driver that shows no GPU is waited for so many seconds at most. By default it is
            not: on a machine that has a driver and no GPU that would be for nothing.

    Returns:
        Ids, all available ones without any requirement; [] with a warning on a machine without GPUs.

    Raises:
        NoSuchGpu: a ValueError; one of ``gpu_ids`` is not there, no GPU has ``min_memory_mb``, or ``num_gpus`` is
            below 0.
    """
    if num_gpus is not None and num_gpus < 0:
        raise NoSuchGpu(f"num_gpus={num_gpus}; the least is 0")
    now = machine(processes=False, driver_wait_s=driver_wait_s)
    if gpu_ids is not None and (now.gpus or not gpu_ids):
        return _ids(named(now, gpu_ids))
    gpus = available(now)
    if not gpus:
        _warn_of_none(now)
        return []
    large = [gpu for gpu in gpus if gpu.total_mb >= (min_memory_mb or 0)]
    if not large:
        largest = max(gpu.total_mb for gpu in gpus)
        raise NoSuchGpu(f"no GPU has {min_memory_mb} MB of memory; the largest available has {largest} MB")
    if num_gpus is not None and num_gpus > len(large):
        logger.warning("%d GPUs were asked for and %d are available: %s", num_gpus, len(large), _ids(large))
    return _ids(large[:num_gpus])


def auto_select_gpus_for_model(
    model_size_gb: float | str, safety_margin: float = 1.5, *, driver_wait_s: float = 0
) -> list[GpuId]:
    """The fewest GPUs that together have room for a model now, least loaded and best linked first.

    Room is free memory, whoever uses the rest. GPUs that are free by the rule of ``gpuherd.gpus.idle`` are taken
    before those that others use, if as few of them do. Among sets of equal size the best linked wins, then the least
    used (see ``gpuherd.gpus.choose``). A size alone ignores layers, dtypes and answers: for a model that has a name
    or a folder ``gpuherd.models.place.resources`` has a function of this name, which plans it.

    Args:
        model_size_gb: size of the model in GB of 2^30 bytes; a name is refused with a hint.
        safety_margin: the room needed is so many times the size.
        driver_wait_s: as for ``select_gpus``.

    Returns:
        GPU ids. All available GPUs, with a warning that has the figures, when the model does not fit on all of them
        together: a caller that shards and offloads (FSDP) may still run. [] with a warning without GPUs.

    Raises:
        JobCannotFit: a ValueError; a size or margin that is no number above 0, or a name in place of a size.
    """
    if isinstance(model_size_gb, str):
        raise JobCannotFit(
            f"{model_size_gb!r} is no size in GB; for a model's name: "
            "gpuherd.models.place.resources.auto_select_gpus_for_model"
        )
    needed_mb = model_size_gb * _MB_PER_GB * safety_margin
    if not (model_size_gb > 0 and safety_margin > 0 and math.isfinite(needed_mb)):
        raise JobCannotFit(f"model_size_gb={model_size_gb}, safety_margin={safety_margin}: both must be above 0")
    now = machine(topology=True, driver_wait_s=driver_wait_s)
    gpus = available(now)
    if not gpus:
        _warn_of_none(now)
        return []
    idle = [gpu for gpu in gpus if check(gpu, IdleRule()).free]
    for count in range(1, len(gpus) + 1):
        for candidates in (idle, gpus):
            chosen = choose(candidates, count, total_mb=math.ceil(needed_mb))
            if chosen is not None:
                return _ids(chosen)
    logger.warning(
        "a model of %g GB needs %d MB with its safety margin of %g; all %d GPUs together have %d MB free",
        model_size_gb,
        math.ceil(needed_mb),
        safety_margin,
        len(gpus),
        sum(gpu.free_mb for gpu in gpus),
    )
    return _ids(gpus)


def available(now: Machine) -> tuple[Gpu, ...]:
    """The GPUs of this snapshot that CUDA shows this process and that work."""
    return tuple(gpu for gpu in visible_now(now.gpus) if gpu.problem is None)


def named(now: Machine, gpu_ids: Sequence[GpuId]) -> tuple[Gpu, ...]:
    """The working GPUs of these ids, among all that this process was started with.

    Raises:
        NoSuchGpu: a ValueError; some are not there, or don't work.
    """
    allowed = visible_from_start(now.gpus)
    chosen: list[Gpu] = []
    missing: list[GpuId] = []
    for wanted in gpu_ids:
        try:
            chosen += [gpu for gpu in find(allowed, [wanted]) if gpu not in chosen]
        except NoSuchGpu:
            missing.append(wanted)
    if missing:
        ids = _ids([gpu for gpu in allowed if gpu.problem is None])
        raise NoSuchGpu(f"Requested GPU IDs {missing} are not available. Available GPUs: {ids}")
    for gpu in chosen:
        if gpu.problem is not None:
            raise NoSuchGpu(f"GPU {gpu.label} can't be used: {gpu.problem}")
    return tuple(chosen)


def _warn_of_none(now: Machine) -> None:
    hidden = f"{visible.variable_of(now.maker)} shows none that works"
    logger.warning("no GPU is available: %s", now.problem or hidden)


def _ids(gpus: Sequence[Gpu]) -> list[GpuId]:
    return [gpu_id(gpu) for gpu in gpus]


def _percent(gpu: Gpu) -> float:
    return 100 * gpu.used_mb / gpu.total_mb if gpu.total_mb else 0.0


def _capability(gpu: Gpu) -> str | None:
    return None if gpu.compute_capability is None else "{}.{}".format(*gpu.compute_capability)


def _line(gpu: Gpu) -> str:
    memory = f"{gpu.total_mb} MB total, {gpu.used_mb} MB used ({_percent(gpu):.1f}%)"
    return f"GPU {gpu.label}: {gpu.name} ({memory}, Compute {_capability(gpu) or 'N/A'})"


def _info(gpu: Gpu) -> GpuInfo:
    return GpuInfo(
        id=gpu_id(gpu),
        name=gpu.name,
        compute_capability=_capability(gpu),
        memory_total=gpu.total_mb,
        multi_processor_count=gpu.multi_processor_count,
        uuid=gpu.uuid,
        pci_bus_id=gpu.pci_bus_id,
        memory_used=gpu.used_mb,
        memory_free=gpu.free_mb,
        utilisation=gpu.utilisation_percent,
        temperature=gpu.temperature_c,
        power=gpu.power_w,
    )


# --- setting up this process ------------------------------------------------------------------------------------------


def set_visible_gpus(gpu_ids: Sequence[GpuId]) -> None:
    """Makes this process, and its future children, see only these GPUs, as 0, 1, … in this order.

    Sets CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID, or for AMD GPUs ROCR_VISIBLE_DEVICES and
    HIP_VISIBLE_DEVICES; [] hides all GPUs. On a machine without GPUs the ids are set as they are.

    Raises:
        NoSuchGpu: a ValueError; one of them is not among the GPUs that this process was started with.
        CudaAlreadyStarted: CUDA runs in this process with other GPUs. Setting the same ones again is fine.
    """
    now = machine(processes=False)
    if now.gpus:
        show_only(named(now, gpu_ids))
    else:
        show_only((), [str(gpu_id) for gpu_id in gpu_ids])


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
            variable, runtime = visible.variable_of(now.maker), visible.RUNTIMES[now.maker].name
            raise NoSuchGpu(f"GPU {wanted.label} is not visible to {runtime} in this process ({variable} shows: {ids})")
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
    runtime = visible.RUNTIMES[now.maker].name
    built_for = getattr(torch_module.version, visible.RUNTIMES[now.maker].torch_version)
    if built_for is None:
        return f"torch {torch_module.__version__} is built without {runtime}; install a {runtime} build of torch"
    if now.cuda_version is not None and _major(built_for) > _major(now.cuda_version):
        return (
            f"torch {torch_module.__version__} is built for CUDA {built_for}, "
            f"the driver is for CUDA {now.cuda_version}; update the driver or install an older build of torch"
        )
    if visible.started():
        count, reason = int(torch_module.cuda.device_count()), f"{runtime} was started with other GPUs"
    else:
        count, reason = visible.count_in_child(now.maker)
    if position < count:
        return None
    return reason or f"{runtime} finds {count} GPUs, and this would be number {position + 1}"


def _major(version: str) -> int:
    return int(version.split(".")[0])
