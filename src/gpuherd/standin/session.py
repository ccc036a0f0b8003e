"""``gpuherd --simulate``: the meaning of its words, and the simulated machine for this command and its jobs.

The machine lives in a folder of its own under XDG_RUNTIME_DIR (or the folder for temporary files), with its own folder
of leases, so that simulated GPUs leave nothing behind on the real machine. The process that made it removes it when it
ends, unless a job outlives it and still needs it. Such a folder, and that of a killed command, is removed by the next
simulation, once no process uses it. A machine that is to last is a state file which the user names.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import hide_makers_but
from gpuherd.standin import driver
from gpuherd.standin.driver import STATE_VARIABLE
from gpuherd.standin.machine import Machine
from gpuherd.standin.state import MAX_GPUS, MAX_LINKS, MAX_MIG_INSTANCES, start_of

_PREFIX = "gpuherd-simulated-"
_STATE = "machine"
_LEASES = "GPUHERD_LEASE_DIR"


def start(spec: str) -> Machine:
    """See ``gpuherd.standin.activate``."""
    driver.library_folder()  # what can fail comes before anything is made
    machine = Machine.open(spec) if _is_path(spec) else _make(spec)
    if machine.path.name != _STATE or not machine.path.parent.name.startswith(_PREFIX):
        leases = machine.path.with_name(machine.path.name + ".leases")
    else:
        leases = machine.path.with_name("leases")
    machine.activate()
    os.environ[_LEASES] = str(leases)
    os.environ.update(hide_makers_but(machine.maker))
    # torch may be told to count GPUs by asking NVML in place of CUDA; it would then find simulated ones.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    # This process too must keep off real GPUs, should it come to load torch.
    ctypes.CDLL(str(driver.library_folder() / driver.CUDA), ctypes.RTLD_GLOBAL)
    _announce(machine)
    return machine


def _is_path(spec: str) -> bool:
    if Path(spec).exists():
        return True
    if "/" in spec:
        raise UsageError(f"--simulate: there is no state file {spec}; make one with gpuherd.standin.machine")
    return False


def _make(spec: str) -> Machine:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK | os.X_OK):
        base = Path(tempfile.gettempdir())
    _sweep(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as problem:
        raise CannotWrite(f"can't make a folder for simulated GPUs in {base}: {problem.strerror}") from problem
    try:
        machine = Machine.create(folder / _STATE, spec, attribute=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    atexit.register(_remove_if_unused, folder, os.getpid())
    return machine


def _announce(machine: Machine) -> None:
    count = len(machine.uuids)
    gpus = "1 GPU is" if count == 1 else f"{count} GPUs are"
    sys.stderr.write(f"gpuherd: {gpus} simulated; jobs run on the CPU.\n")
    sys.stderr.flush()


def _remove_if_unused(folder: Path, creator: int) -> None:
    # A forked child runs this too; the machine is its parent's.
    if os.getpid() == creator and not _used_by_others(folder / _STATE):
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Removes what killed simulations of this user have left in ``base``."""
    for folder in base.glob(_PREFIX + "*"):
        state = folder / _STATE
        with suppress(OSError, UsageError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if not Machine.open(state).creator_alive() and not _used_by_others(state):
                shutil.rmtree(folder, ignore_errors=True)


def _used_by_others(state: Path) -> bool:
    """Whether another process of this user has the machine in its environment."""
    word = f"{STATE_VARIABLE}={state}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            if word in (process / "environ").read_bytes().split(b"\0") and start_of(int(process.name)):
                return True
    return False


# --- the words -------------------------------------------------------------------------------------------------------

# ``8x40GB``, ``4x24GB+2x80GB,busy=2@20s,nvlink=4,mig=gpu1:20GB+20GB``, ``4xMI300X``.

GRAMMAR = "write for example 8x40GB, 4x24GB+2x80GB, 4xMI300X or 4x40GB,busy=2@20s"

_GROUP = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(GB|MB)", re.ASCII | re.IGNORECASE)
_KIND = re.compile(r"(?:(\d+)x)?(.+)", re.ASCII | re.IGNORECASE)
_BUSY = re.compile(r"(?:(\d+)|(gpu\d+(?:\+gpu\d+)*))(?:@(\d+(?:\.\d+)?)s?)?", re.ASCII | re.IGNORECASE)
_MIG = re.compile(r"gpu(\d+):(.+)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Busy:
    """GPUs that somebody else uses from the start: for ``seconds``, or for good (None)."""

    gpus: tuple[int, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Spec:
    """A machine to simulate. ``memory_mb`` has one entry a GPU, in PCI order (MB = 2^20 bytes; 1 GB = 1024 MB)."""

    memory_mb: tuple[int, ...]
    busy: tuple[Busy, ...] = ()
    nvlinks: int = 0  # links within each pair of neighbours (0-1, 2-3, ...)
    mig: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (GPU, MB of each of its instances)
    maker: Maker = Maker.NVIDIA
    names: tuple[str, ...] = ()  # of the kind of each GPU, where kinds are given in place of sizes


def parse(text: str) -> Spec:
    """The machine that ``text`` describes. Raises UsageError with the word that is wrong and an example.

    >>> parse("2x24GB+80GB,busy=1@20s")
    Spec(memory_mb=(24576, 24576, 81920), busy=(Busy(gpus=(0,), seconds=20.0),), nvlinks=0, mig=())
    """
    groups, *options = text.strip().split(",")
    gpus = [gpu for group in groups.split("+") for gpu in _gpus(group)]
    memory = tuple(gpu.memory_mb for gpu in gpus)
    if not 1 <= len(memory) <= MAX_GPUS:
        raise UsageError(f"--simulate {text!r} asks for {len(memory)} GPUs; 1 to {MAX_GPUS} can be simulated")
    busy: list[Busy] = []
    mig: list[tuple[int, tuple[int, ...]]] = []
    nvlinks = 0
    for option in options:
        name, _, value = option.partition("=")
        if name == "busy":
            busy.append(_busy(value, len(memory)))
        elif name == "nvlink":
            nvlinks = _nvlinks(value)
        elif name == "mig":
            mig.append(_mig(value, memory))
        else:
            raise UsageError(f"--simulate: unknown option {option!r}; there are busy=, nvlink= and mig=")
    makers = {gpu.maker for gpu in gpus}
    if len(makers) > 1:
        raise UsageError(f"--simulate {text!r}: GPUs of one maker can be simulated at a time, not of NVIDIA and AMD")
    names = tuple(gpu.name for gpu in gpus) if all(gpu.name for gpu in gpus) else ()
    return Spec(memory, tuple(busy), nvlinks, tuple(mig), makers.pop(), names)


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A GPU of a group: by its size, or by the name of its kind."""

    memory_mb: int
    maker: Maker = Maker.NVIDIA
    name: str = ""


def _gpus(word: str) -> tuple[_Simulated, ...]:
    match = _KIND.fullmatch(word.strip())
    if match is not None and _GROUP.fullmatch(word.strip()) is None:
        from gpuherd.models.plan.kinds import kind_named

        kind = kind_named(match[2])
        if kind is not None:
            gpu = _Simulated(kind.memory // (1 << 20), kind.maker, f"{kind.maker} Simulated {kind.name}")
            return (gpu,) * min(int(match[1] or 1), MAX_GPUS + 1)
    return tuple(map(_Simulated, _sizes(word)))


def _sizes(word: str) -> tuple[int, ...]:
    match = _GROUP.fullmatch(word.strip())
    if match is None:
        raise UsageError(f"--simulate: {word!r} describes no GPUs; {GRAMMAR}")
    count, size, unit = match.groups()
    mb = round(float(size) * (1024 if unit.upper() == "GB" else 1))
    if not 1 <= mb <= 1 << 24:
        raise UsageError(f"--simulate: {word!r}: a GPU has 1 MB to 16384 GB")
    # One GPU too many is enough for the caller to refuse; a huge count must not fill the memory first.
    return (mb,) * min(int(count or 1), MAX_GPUS + 1)


def _busy(value: str, gpus: int) -> Busy:
    match = _BUSY.fullmatch(value)
    if match is None:
        raise UsageError(f"--simulate: busy={value!r} is wrong; write busy=2 (two GPUs), busy=gpu0+gpu3 or busy=2@20s")
    count, names, seconds = match.groups()
    which = tuple(range(int(count))) if count else tuple(int(name[3:]) for name in names.split("+"))
    if len(which) > gpus or any(gpu >= gpus for gpu in which):
        raise UsageError(f"--simulate: busy={value!r}: there are {gpus} GPUs, gpu0 to gpu{gpus - 1}")
    return Busy(which, None if seconds is None else float(seconds))


def _nvlinks(value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) <= MAX_LINKS):
        raise UsageError(f"--simulate: nvlink={value!r} is no number of links from 0 to {MAX_LINKS}")
    return int(value)


def _mig(value: str, memory: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    match = _MIG.fullmatch(value)
    if match is None:
        raise UsageError(f"--simulate: mig={value!r} is wrong; write mig=gpu1:20GB+20GB")
    gpu = int(match[1])
    sizes = tuple(mb for group in match[2].split("+") for mb in _sizes(group))
    if gpu >= len(memory):
        raise UsageError(f"--simulate: mig={value!r}: there are {len(memory)} GPUs, gpu0 to gpu{len(memory) - 1}")
    if len(sizes) > MAX_MIG_INSTANCES or sum(sizes) > memory[gpu]:
        raise UsageError(
            f"--simulate: mig={value!r}: a GPU has at most {MAX_MIG_INSTANCES} instances, together {memory[gpu]} MB"
        )
    return gpu, sizes
