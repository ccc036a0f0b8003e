"""Which GPUs a process may use: CUDA_VISIBLE_DEVICES, read and set, and GPUs by the ids that people give."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.errors import CudaAlreadyStarted, NoSuchGpu
from gpuherd.gpus.state import Gpu

# Which GPUs a value of CUDA_VISIBLE_DEVICES shows, and which GPUs a user means by an id. Pure; reads no environment.
#
# Indices are positions in PCI-bus order, as CUDA counts under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

# CUDA reads an index as C's strtol does: blanks, a sign, digits, and whatever follows is ignored ("1abc" is 1).
_INDEX = re.compile(r"\s*([+-]?[0-9]+)")
# Longer numbers name no GPU and would cost time to convert.
_MOST_DIGITS = 9


def visible(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a process with this CUDA_VISIBLE_DEVICES may use, in the order in which it names them.

    None (not set) shows all. Otherwise CUDA's own rules: entries are indices, UUIDs or unique beginnings of UUIDs
    (``GPU-…``, ``MIG-…``); the list ends at the first entry that names no GPU (so ``""`` and ``-1`` show none); a GPU
    named twice makes the whole list show none. The index of a GPU that is split into MIG instances shows its first
    instance. A GPU that is split is itself never shown, since CUDA runs nothing on it.

    One departure: CUDA uses only the first MIG instance of a list. All are given here, since each can serve a job.
    """
    if cuda_visible_devices is None:
        return tuple(gpu for gpu in gpus if not gpu.mig_instances)
    shown: list[Gpu] = []
    for entry in cuda_visible_devices.split(","):
        gpu = _named_by_cuda(gpus, entry)
        if gpu is None:
            break
        if gpu in shown:
            return ()
        shown.append(gpu)
    return tuple(shown)


def hides_all(cuda_visible_devices: str | None) -> bool:
    """Whether this CUDA_VISIBLE_DEVICES shows no GPU on any machine.

    >>> [hides_all(value) for value in ("", "-1", "0", None)]
    [True, True, False, False]
    """
    if cuda_visible_devices is None:
        return False
    first = cuda_visible_devices.split(",")[0]
    match = _INDEX.match(first)
    return not first.strip().startswith(("GPU-", "MIG-")) and (match is None or int(match[1][:_MOST_DIGITS]) < 0)


def _named_by_cuda(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    name = entry.strip()
    if name.startswith(("GPU-", "MIG-")):
        named = _by_uuid(gpus, name)
        return _first_instance(gpus, named[0]) if len(named) == 1 else None
    match = _INDEX.match(entry)
    if match is None or len(match[1]) > _MOST_DIGITS:
        return None
    index = int(match[1])
    whole = [gpu for gpu in gpus if gpu.index == index and gpu.mig_parent is None]
    return _first_instance(gpus, whole[0]) if whole else None


def _by_uuid(gpus: Sequence[Gpu], beginning: str) -> list[Gpu]:
    """The GPU of exactly this UUID, else all whose UUID begins so."""
    exact = [gpu for gpu in gpus if gpu.uuid == beginning]
    return exact or [gpu for gpu in gpus if gpu.uuid.startswith(beginning)]


def _first_instance(gpus: Sequence[Gpu], gpu: Gpu) -> Gpu | None:
    if not gpu.mig_instances:
        return gpu
    return next((instance for instance in gpus if instance.mig_parent == gpu.uuid), None)


def find(gpus: Sequence[Gpu], ids: Sequence[str | int]) -> tuple[Gpu, ...]:
    """The GPUs that a user means by these ids, in that order; one named twice comes once.

    An id is an index (``3``), a MIG instance of a GPU (``3:1``), or a UUID or a unique beginning of one. The index or
    UUID of a GPU that is split into MIG instances means all its instances.

    Raises:
        NoSuchGpu: an id names no GPU of ``gpus`` or a UUID's beginning more than one. The message names it, and the
            GPUs that there are.
    """
    found: dict[str, Gpu] = {}
    for wanted in ids:
        for gpu in _named_by_user(gpus, str(wanted).strip()):
            found[gpu.uuid] = gpu
    return tuple(found.values())


def _named_by_user(gpus: Sequence[Gpu], wanted: str) -> Sequence[Gpu]:
    if wanted.startswith(("GPU-", "MIG-")):
        named = _by_uuid(gpus, wanted)
    else:
        named = [gpu for gpu in gpus if gpu.label == wanted]
    # A split GPU is meant whether it is in the list itself or only its instances are.
    instances = [gpu for gpu in gpus if _is_parent(gpu, wanted)]
    meant = {gpu.uuid: gpu.label for gpu in named} | {gpu.mig_parent: str(gpu.index) for gpu in instances}
    if len(meant) > 1:
        several = ", ".join(f"{label} ({uuid})" for uuid, label in meant.items())
        raise NoSuchGpu(f"GPU id {wanted!r} fits several GPUs: {several}; write more of the UUID")
    if not meant:
        raise NoSuchGpu(f"there is no GPU {wanted!r} here; {_those_that_are(gpus)}")
    return instances or named


def _is_parent(instance: Gpu, wanted: str) -> bool:
    """Whether this is a MIG instance and ``wanted`` names the GPU that it is a part of."""
    if instance.mig_parent is None:
        return False
    return str(instance.index) == wanted or (wanted.startswith("GPU-") and instance.mig_parent.startswith(wanted))


def _those_that_are(gpus: Sequence[Gpu]) -> str:
    usable = [gpu.label for gpu in gpus if not gpu.mig_instances]
    return f"available GPUs: {', '.join(usable)}" if usable else "no GPU is available"


def is_named(gpu: Gpu, names: Sequence[str]) -> bool:
    """Whether one of these names means this GPU: an index or UUID, of its whole GPU too, or a label like 3:1."""
    return any(name in (gpu.label, str(gpu.index), gpu.uuid, gpu.mig_parent) for name in names)


# What the CUDA driver says of itself, without starting it here: who has started it can't choose GPUs any more.
#
# Knows libcuda's first three functions; no torch and no NVML.

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
# Starting CUDA takes a second or so for each GPU on a machine that does not keep its driver loaded.
_PATIENCE_S = 120

_COUNT = f"""
import ctypes
cuda = ctypes.CDLL({_LIBRARY!r})
count = ctypes.c_int()
code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(code, count.value)
"""


def started() -> bool:
    """Whether CUDA runs in this process, whichever library has started it.

    torch.cuda.is_available() is enough to start it, and torch.cuda.is_initialized() does not tell; the driver does.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    return int(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == _SUCCESS


def count_in_child() -> tuple[int, str]:
    """How many GPUs CUDA finds with this process's environment, and, when none, why. Asked in a child process."""
    command = [sys.executable, "-I", "-S", "-c", _COUNT]
    try:
        child = subprocess.run(
            command, capture_output=True, encoding="ascii", errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"CUDA could not be tried in a child process ({error})"
    words = child.stdout.split()
    if child.returncode != 0 or len(words) != 2:
        return 0, f"the CUDA driver library {_LIBRARY} can't be loaded"
    code, count = int(words[0]), int(words[1])
    if code != _SUCCESS:
        return 0, f"the CUDA driver finds no usable GPU (error {code})"
    return count, "" if count else "the CUDA driver finds no usable GPU"


# Which of the machine's GPUs this process may use: its own CUDA_VISIBLE_DEVICES, read and set.
#
# A process that was started with the variable may not go beyond it. What ``show_only`` sets later is a choice, which
# can be made anew until CUDA starts; so the value from before is remembered.

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What we set the variable to, and what it was before."""

    value: str
    before: str | None


_choice: _Choice | None = None


def _present() -> str | None:
    """CUDA_VISIBLE_DEVICES now. A value that is not our choice was given to us, and ends the choice."""
    global _choice
    value = os.environ.get(VISIBLE)
    if _choice is not None and _choice.value != value:
        _choice = None
    return value


def started_with() -> str | None:
    """CUDA_VISIBLE_DEVICES as this process was given it, whatever was chosen since."""
    value = _present()
    return value if _choice is None else _choice.before


def visible_now(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows this process, in CUDA's order."""
    _warn_of_other_order(gpus)
    return visible(gpus, _present())


def visible_from_start(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that this process may choose from."""
    _warn_of_other_order(gpus)
    return visible(gpus, started_with())


def show_only(names: Sequence[str]) -> None:
    """Sets CUDA_VISIBLE_DEVICES to these names and CUDA_DEVICE_ORDER so that indices are in PCI order.

    Raises:
        CudaAlreadyStarted: CUDA runs in this process with another value, so that setting it would have no effect.
    """
    global _choice
    value = ",".join(names)
    present = os.environ.get(VISIBLE)
    if started():
        if value == present:
            return
        raise CudaAlreadyStarted(
            f"{VISIBLE} can't become {value!r}: this process has started CUDA "
            f"{'without it' if present is None else f'with {present!r}'}, and CUDA reads it only then; "
            "choose GPUs before anything uses CUDA, or in a new process"
        )
    _choice = _Choice(value, started_with())
    os.environ[VISIBLE] = value
    os.environ[ORDER] = PCI_ORDER


def count_in_pci_order() -> None:
    """Makes CUDA number GPUs as this room does, unless it has started already or the user wants another order."""
    if not started():
        os.environ.setdefault(ORDER, PCI_ORDER)


def _warn_of_other_order(gpus: Sequence[Gpu]) -> None:
    """Indices mean other GPUs to CUDA when it counts from the fastest and the GPUs differ."""
    if os.environ.get(ORDER) == "FASTEST_FIRST" and len({gpu.name for gpu in gpus if gpu.mig_parent is None}) > 1:
        logger.warning(
            "%s=FASTEST_FIRST on a machine with different GPUs: GPU ids here are in PCI order; set %s=%s",
            ORDER,
            ORDER,
            PCI_ORDER,
        )
