"""Which GPUs a process may use: the environment variables of CUDA and ROCm, and GPUs by the ids that users give.

The only module that names these variables; others use it to find out what an environment shows
(``visible_in``), and what a process needs in its environment to see some GPUs (``environment``).

NVIDIA: CUDA_VISIBLE_DEVICES names GPUs, as CUDA counts them under CUDA_DEVICE_ORDER=PCI_BUS_ID.

AMD: ROCR_VISIBLE_DEVICES names GPUs for the ROCm runtime, on which everything else runs. HIP_VISIBLE_DEVICES, or where
that is not set CUDA_VISIBLE_DEVICES, then picks among those, by their new numbers. A job gets both: the first chooses,
the second is 0, 1, … since some versions of PyTorch count GPUs by it alone. CUDA_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL
are removed: an inherited value would pick among the job's GPUs by numbers that mean others.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from gpuherd.errors import CudaAlreadyStarted, NoSuchGpu
from gpuherd.gpus.state import SIMULATED, Gpu, Maker

CUDA, ORDER, PCI_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
ROCR, HIP = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# All that restrict a process to GPUs, and so are gpuherd's to set.
VARIABLES = (CUDA, ORDER, ROCR, HIP, "GPU_DEVICE_ORDINAL")

# CUDA reads an index as C's strtol does: blanks, a sign, digits, and whatever follows is ignored ("1abc" is 1).
_INDEX = re.compile(r"\s*([+-]?[0-9]+)")
# Longer numbers name no GPU and would cost time to convert.
_MOST_DIGITS = 9


# --- the makers' runtimes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runtime:
    """How programs on one maker's GPUs find them.

    Attributes:
        name: its usual name.
        naming: the variables whose values name GPUs, in the order in which they count. The first shows none when empty.
        showing: the variables that show the GPUs of these names, in this order, and no other of this maker.
        visible: the GPUs that a process with this environment may use, in the order in which the runtime counts them.
        torch_version: where ``torch.version`` has the version that torch is built for.
        count: a program that prints an error code and how many GPUs the runtime finds, the options of Python that it
            runs with, and the problem when it can't run.
    """

    name: str
    naming: tuple[str, ...]
    showing: Callable[[Sequence[str]], dict[str, str]]
    visible: Callable[[Sequence[Gpu], Mapping[str, str]], tuple[Gpu, ...]]
    torch_version: str
    count: tuple[str, tuple[str, ...], str]


def _show_to_cuda(names: Sequence[str]) -> dict[str, str]:
    return {ORDER: PCI_ORDER, CUDA: ",".join(names)}


def _show_to_rocm(names: Sequence[str]) -> dict[str, str]:
    return {ROCR: ",".join(names), HIP: ",".join(map(str, range(len(names))))}


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


def _visible_to_rocm(gpus: Sequence[Gpu], variables: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Like ROCm's runtime and then HIP: each list ends at the first entry that names no GPU or one that it has named.

    One departure: HIP takes an empty value for one that is not set. Here it shows none, as CUDA's does.
    """
    shown = tuple(gpus)
    if ROCR in variables:
        shown = _listed(variables[ROCR], lambda name: _named_by_rocm(gpus, name))
    picks = next((variables[name] for name in (HIP, CUDA) if name in variables), None)
    if picks is None:
        return shown
    return _listed(picks, lambda name: shown[int(name)] if _is_index(name) and int(name) < len(shown) else None)


def _listed(value: str, gpu_of: Callable[[str], Gpu | None]) -> tuple[Gpu, ...]:
    shown: list[Gpu] = []
    for entry in value.split(","):
        gpu = gpu_of(entry.strip())
        if gpu is None or gpu in shown:
            break
        shown.append(gpu)
    return tuple(shown)


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS


def _named_by_rocm(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if _is_index(name):
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    folded = name.casefold()
    found = [gpu for gpu in gpus if folded.startswith("gpu-") and gpu.uuid.casefold().startswith(folded)]
    return found[0] if len(found) == 1 and len(name) > len("GPU-") else None


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


_LIBRARY = "libcuda.so.1"
_COUNT_CUDA = f"""
import ctypes
cuda = ctypes.CDLL({_LIBRARY!r})
count = ctypes.c_int()
code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(code, count.value)
"""
# HIP's library has no fixed name and lies in torch's own folder.
_COUNT_ROCM = "import torch; print(0, torch.cuda.device_count())"

RUNTIMES: Mapping[Maker, Runtime] = {
    Maker.NVIDIA: Runtime(
        name="CUDA",
        naming=(CUDA,),
        showing=_show_to_cuda,
        visible=lambda gpus, variables: visible(gpus, variables.get(CUDA)),
        torch_version="cuda",
        count=(_COUNT_CUDA, ("-I", "-S"), f"the CUDA driver library {_LIBRARY} can't be loaded"),
    ),
    Maker.AMD: Runtime(
        name="ROCm",
        naming=(ROCR, HIP, CUDA),
        showing=_show_to_rocm,
        visible=_visible_to_rocm,
        torch_version="hip",
        count=(_COUNT_ROCM, (), "torch can't be loaded"),
    ),
}


# --- what a process needs to see some GPUs ----------------------------------------------------------------------------


def environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables that show a process these GPUs, in this order, and no other; () hides the GPUs of every maker."""
    if not gpus:
        return {name: value for runtime in RUNTIMES.values() for name, value in runtime.showing(()).items()}
    maker = gpus[0].maker
    # On a simulated machine nothing may come to real GPUs of another maker.
    hidden = hide_makers_but(maker) if gpus[0].uuid.endswith(SIMULATED) else {}
    return showing([gpu.visible_name for gpu in gpus], maker) | hidden


def hide_makers_but(maker: Maker) -> dict[str, str]:
    """The variables that hide the GPUs of all other makers, less those that this maker's runtime reads too."""
    others = [name for runtime in RUNTIMES.values() for name in runtime.naming]
    return dict.fromkeys((name for name in others if name not in RUNTIMES[maker].naming), "")


def showing(names: Sequence[str], maker: Maker) -> dict[str, str]:
    """As ``environment``, for GPUs of which only the names are known."""
    return RUNTIMES[maker].showing(names)


def without(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment less all that restricts a process to GPUs."""
    return {name: value for name, value in variables.items() if name not in VARIABLES}


def chosen_in(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that restricts a process to GPUs: passed on where an engine has chosen them."""
    return {name: variables[name] for name in VARIABLES if name in variables}


def narrowed(variables: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The environment of a child that is to see only these of the GPUs that this environment names."""
    for maker, runtime in RUNTIMES.items():
        if maker is not Maker.NVIDIA and runtime.naming[0] in variables:
            return without(variables) | runtime.showing(names)
    return {**variables, CUDA: ",".join(names)}


def hide_unless_named(variables: MutableMapping[str, str]) -> None:
    """Hides all GPUs from this environment where an engine that chooses GPUs has named none: they are others'."""
    if not any(runtime.naming[0] in variables for runtime in RUNTIMES.values()):
        variables.update(environment(()))


# --- what an environment says -----------------------------------------------------------------------------------------


def variable_of(maker: Maker) -> str:
    """The variable by which people choose this maker's GPUs; empty it hides them all."""
    return RUNTIMES[maker].naming[0]


def naming_in(variables: Mapping[str, str], maker: Maker | None = None) -> dict[str, str]:
    """The variables of an environment that name this maker's GPUs, in the order in which they count. Where the maker is
    not known, those that name any GPU; or the first, where none does."""
    runtimes = RUNTIMES.values() if maker is None else (RUNTIMES[maker],)
    order = [name for runtime in runtimes for name in runtime.naming]
    found = {name: variables[name] for name in order if name in variables}
    if maker is not None:
        return found
    return {name: value for name, value in found.items() if value.strip()} or dict(list(found.items())[:1])


def setting(variables: Mapping[str, str], maker: Maker | None = None) -> str | None:
    """How an environment restricts a process to GPUs, for people: ``CUDA_VISIBLE_DEVICES=0,1``; None where it doesn't.

    >>> setting({"CUDA_VISIBLE_DEVICES": "2"}), setting({"ROCR_VISIBLE_DEVICES": "", "PATH": "/bin"}), setting({})
    ('CUDA_VISIBLE_DEVICES=2', 'ROCR_VISIBLE_DEVICES=', None)
    """
    return " ".join(f"{name}={value}" for name, value in naming_in(variables, maker).items()) or None


def described(variables: Mapping[str, str]) -> str:
    """The same for a log, a line each; that the first is not set where nothing is.

    >>> described({}), described({"CUDA_VISIBLE_DEVICES": "0,1"})
    ('CUDA_VISIBLE_DEVICES: not set', 'CUDA_VISIBLE_DEVICES: 0,1')
    """
    return "\n".join(f"{name}: {value}" for name, value in naming_in(variables).items()) or f"{CUDA}: not set"


def value_in(variables: Mapping[str, str], maker: Maker | None = None) -> str | None:
    """The list of GPUs that an environment shows, as it stands there: "" for none, None where nothing is set."""
    return next(iter(naming_in(variables, maker).values()), None)


def named_in(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the GPUs that an environment shows, whichever maker's; () where it names none."""
    found = next((value for value in naming_in(variables).values() if value.strip()), "")
    return tuple(name.strip() for name in found.split(",") if name.strip())


def visible_in(gpus: Sequence[Gpu], variables: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment may use, in the order in which its runtime counts them."""
    return RUNTIMES[gpus[0].maker].visible(gpus, variables) if gpus else ()


def hides_all(variables: Mapping[str, str], maker: Maker) -> bool:
    """Whether an environment shows no GPU of this maker on any machine.

    >>> [hides_all({} if value is None else {CUDA: value}, Maker.NVIDIA) for value in ("", "-1", "0", None)]
    [True, True, False, False]
    """
    return any(name in variables and _names_none(variables[name]) for name in RUNTIMES[maker].naming)


def _names_none(value: str) -> bool:
    first = value.split(",")[0].strip()
    match = _INDEX.match(first)
    return not first.upper().startswith(("GPU-", "MIG-")) and (match is None or int(match[1][:_MOST_DIGITS]) < 0)


# --- GPUs by the ids of people ----------------------------------------------------------------------------------------


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


# --- this process -----------------------------------------------------------------------------------------------------

# A process that was started with one of the variables may not go beyond it. What ``show_only`` sets later is a choice,
# which can be made anew until the runtime starts; so the values from before are remembered.

_SUCCESS = 0
# Starting CUDA or ROCm takes a second or so for each GPU on a machine that does not keep its driver loaded.
_PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class _Choice:
    """The variables as we have set them, and as they were before."""

    after: Mapping[str, str]
    before: Mapping[str, str]


_choice: _Choice | None = None


def _present() -> dict[str, str]:
    """The variables now. Values that are not our choice were given to us, and end the choice."""
    global _choice
    now = chosen_in(os.environ)
    now.pop(ORDER, None)
    if _choice is not None and _choice.after != now:
        _choice = None
    return now


def started_with() -> Mapping[str, str]:
    """The variables as this process was given them, whatever was chosen since."""
    now = _present()
    return now if _choice is None else _choice.before


def visible_now(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that this process sees, in the order of its runtime."""
    _warn_of_other_order(gpus)
    return visible_in(gpus, _present())


def visible_from_start(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that this process may choose from."""
    _warn_of_other_order(gpus)
    return visible_in(gpus, started_with())


def show_only(gpus: Sequence[Gpu], names: Sequence[str] = ()) -> None:
    """Makes this process, and its future children, see only these GPUs; or these names, on a machine without any.

    Raises:
        CudaAlreadyStarted: the runtime runs in this process with other GPUs, so that a change would have no effect.
    """
    global _choice
    wanted = showing(names, Maker.NVIDIA) if names and not gpus else environment(gpus)
    naming = [name for name in wanted if name != ORDER]
    present = {name: os.environ[name] for name in naming if name in os.environ}
    if started():
        asked = {name: wanted[name] for name in naming if wanted[name] or name == CUDA}
        if asked.items() <= present.items():
            return
        name = variable_of(gpus[0].maker if gpus else Maker.NVIDIA)
        before = f"with {present[name]!r}" if name in present else "without it"
        raise CudaAlreadyStarted(
            f"{name} can't become {wanted[name]!r}: this process has started CUDA "
            f"{before}, and CUDA reads it only then; choose GPUs before anything uses CUDA, or in a new process"
        )
    before_us = started_with()
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ |= wanted
    _choice = _Choice({name: wanted[name] for name in naming}, before_us)


def count_in_pci_order() -> None:
    """Makes CUDA number GPUs as gpuherd does, unless it has started already or the user wants another order."""
    if not started():
        os.environ.setdefault(ORDER, PCI_ORDER)


def started() -> bool:
    """Whether CUDA runs in this process, whichever library has started it; HIP, if torch has started it.

    torch.cuda.is_available() is enough to start CUDA, and torch.cuda.is_initialized() does not report that; the driver
    does. It is not started here: a process that has started it can't choose GPUs any more.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    import ctypes  # here: starting jobs needs none of it

    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    return int(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == _SUCCESS


def count_in_child(maker: Maker = Maker.NVIDIA) -> tuple[int, str]:
    """How many GPUs the runtime finds with this process's environment, and, when none, why: tried in a child."""
    import subprocess

    runtime = RUNTIMES[maker]
    program, options, trouble = runtime.count
    command = [sys.executable, *options, "-c", program]
    try:
        child = subprocess.run(
            command, capture_output=True, encoding="ascii", errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"{runtime.name} could not be tried in a child process ({error})"
    words = child.stdout.split()
    if child.returncode != 0 or len(words) != 2:
        return 0, trouble
    code, count = int(words[0]), int(words[1])
    if code != _SUCCESS:
        return 0, f"the {runtime.name} driver finds no usable GPU (error {code})"
    return count, "" if count else f"the {runtime.name} driver finds no usable GPU"


def _warn_of_other_order(gpus: Sequence[Gpu]) -> None:
    """Indices mean other GPUs to CUDA when it counts from the fastest and the GPUs differ."""
    if os.environ.get(ORDER) == "FASTEST_FIRST" and len({gpu.name for gpu in gpus if gpu.mig_parent is None}) > 1:
        import logging  # here: starting jobs needs none of it

        logging.getLogger(__name__).warning(
            "%s=FASTEST_FIRST on a machine with different GPUs: GPU ids here are in PCI order; set %s=%s",
            ORDER,
            ORDER,
            PCI_ORDER,
        )
