"""``gpuherd --simulate``: a simulated machine for this command and its jobs, and what becomes of it afterwards.

The machine lives in a folder of its own under XDG_RUNTIME_DIR (or the folder for temporary files), with its own
folder of leases, so that simulated GPUs leave nothing behind on the real machine. The process that made it removes
it when it ends, unless a job outlives it and still needs it. Such a folder, and that of a killed command, is removed
by the next simulation, once nobody uses it. A machine that is to last is a state file which the user names.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.standin import build
from gpuherd.standin.alive import start_of
from gpuherd.standin.driver import STATE_VARIABLE
from gpuherd.standin.machine import Machine

_PREFIX = "gpuherd-simulated-"
_STATE = "machine"
_LEASES = "GPUHERD_LEASE_DIR"


def start(spec: str) -> Machine:
    """See ``gpuherd.standin.activate``."""
    build.library_folder()  # what can fail comes before anything is made
    machine = Machine.open(spec) if _is_path(spec) else _make(spec)
    if machine.path.name != _STATE or not machine.path.parent.name.startswith(_PREFIX):
        leases = machine.path.with_name(machine.path.name + ".leases")
    else:
        leases = machine.path.with_name("leases")
    machine.activate()
    os.environ[_LEASES] = str(leases)
    # torch may be told to count GPUs by asking NVML in place of CUDA; it would then find simulated ones.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    # This process too must keep off real GPUs, should it come to load torch.
    ctypes.CDLL(str(build.library_folder() / build.CUDA), ctypes.RTLD_GLOBAL)
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
