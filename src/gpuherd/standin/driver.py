"""The stand-in driver libraries: compiled once, and how a process comes to load them."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuherd.errors import CannotWrite, GpuherdError
from gpuherd.gpus.state import Maker

STATE_VARIABLE = "GPUHERD_STANDIN"
_LIBRARIES = "LD_LIBRARY_PATH"


def environment(state: Path) -> dict[str, str]:
    """What a child process needs in its environment to see the machine with this state file and no real GPU."""

    return {STATE_VARIABLE: str(state), _LIBRARIES: ":".join([str(library_folder()), *_other_libraries()])}


def forget() -> None:
    """Makes this process and its future children see no driver again (its library stays loaded and reports none)."""
    others = _other_libraries()
    os.environ.pop(STATE_VARIABLE, None)
    os.environ.pop(_LIBRARIES, None)
    if others:
        os.environ[_LIBRARIES] = ":".join(others)


def load() -> None:
    """Loads the stand-in driver libraries so that later loads by name find them; they answer once a machine is active.

    Raises GpuherdError when this process has loaded a maker's own library before.
    """
    for maker, library in LIBRARIES.items():
        ctypes.CDLL(str(library_folder() / library), ctypes.RTLD_GLOBAL)
        # By name the loader gives the library that was loaded first under it.
        if not hasattr(ctypes.CDLL(library), "gpuherd_standin_layout"):
            raise GpuherdError(
                f"this process has already loaded {maker}'s driver library; simulate GPUs in a new process"
            )


def _other_libraries() -> list[str]:

    own = str(library_folder())
    return [folder for folder in os.environ.get(_LIBRARIES, "").split(":") if folder and folder != own]


# --- compiling, once, into the user's cache --------------------------------------------------------------------------

# The C compiler is the system's (cc, gcc, clang) or the one in the ziglang wheel, so that none has to be installed.

NVML = "libnvidia-ml.so.1"
AMD_SMI = "libamd_smi.so"
CUDA = "libcuda.so.1"
LIBRARIES = {Maker.NVIDIA: NVML, Maker.AMD: AMD_SMI}

_SOURCES = {NVML: "nvml.c", AMD_SMI: "amdsmi.c", CUDA: "cuda.c"}
_FLAGS = ("-std=c99", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")

_log = logging.getLogger(__name__)


def compiler() -> list[str] | None:
    """The first words of a compile command, or None when there is no C compiler."""
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def library_folder() -> Path:
    """The folder with the libraries under the names that the loader looks for, compiled now if they are not there.

    Raises GpuherdError when there is no compiler or it fails, CannotWrite when the cache folder can't be written.
    """
    cache = _cache_folder()
    folder = cache / f"standin-{_key()}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="standin-building-", dir=cache) as temporary:
            building = Path(temporary) / "done"
            building.mkdir()
            for library, source in _SOURCES.items():
                _compile(source, building, library)
            _publish(building, folder)
    except OSError as problem:
        raise CannotWrite(
            f"can't keep the simulated driver in {cache}: {problem.strerror}; set XDG_CACHE_HOME to a folder of yours"
        ) from problem
    return folder


def entry_points(maker: Maker = Maker.NVIDIA) -> tuple[str, ...]:
    """The functions of the stand-in library that can be made to fail, under the newest of their names."""
    source = _source(_SOURCES[LIBRARIES[maker]]).read_text()
    defined = re.findall(r"^(?:API int |FIGURE\(|TEXT\(|NOT_HERE\()(\w+)", source, re.MULTILINE)
    # All ways to initialise are one, and so many names of it; and a name of an error needs no machine.
    never = ("nvmlInit", "nvmlInitWithFlags", "amdsmi_status_code_to_string")
    return tuple(name for name in defined if name not in never)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path("~/.cache").expanduser()) / "gpuherd"
    except RuntimeError as problem:  # a user without a home folder
        raise CannotWrite("no home folder to keep the simulated driver in; set XDG_CACHE_HOME") from problem


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


def _key() -> str:
    """Changes whenever a compiled library would differ."""
    digest = hashlib.sha256(repr((_FLAGS, platform.machine(), platform.libc_ver())).encode())
    for source in (*_SOURCES.values(), "state.h"):
        digest.update(_source(source).read_bytes())
    return digest.hexdigest()[:16]


def _compile(source: str, folder: Path, library: str) -> None:
    words = compiler()
    if words is None:
        raise GpuherdError(
            "simulated GPUs need a C compiler and there is none: pip install 'gpuherd[simulate]' brings one"
        )
    command = [*words, *_FLAGS, f"-Wl,-soname,{library}", "-o", str(folder / library), str(_source(source))]
    _log.debug("compiling: %s", command)
    # The wheel's compiler keeps a cache of its own, which needs no home folder here and leaves nothing behind.
    environment = os.environ | {name: str(folder.parent) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        raise GpuherdError(
            f"{' '.join(words)} could not compile the simulated driver: {last[0]}; "
            "another compiler may: pip install 'gpuherd[simulate]' brings one"
        )
    if library.endswith(".1"):  # some programs look for the name without a version
        (folder / library.removesuffix(".1")).symlink_to(library)


def _publish(building: Path, folder: Path) -> None:
    try:
        building.rename(folder)
    except OSError:
        # Another process was first with the same libraries.
        if not folder.is_dir():
            raise
