"""How a process comes to see a simulated machine: the stand-in driver library, and the variable that names its state.

Knows nothing of what the machine is like.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from gpuherd.errors import GpuherdError

STATE_VARIABLE = "GPUHERD_STANDIN"
_LIBRARIES = "LD_LIBRARY_PATH"


def environment(state: Path) -> dict[str, str]:
    """What a child process needs in its environment to see the machine with this state file and no real GPU."""
    from gpuherd.standin import build

    return {STATE_VARIABLE: str(state), _LIBRARIES: ":".join([str(build.library_folder()), *_other_libraries()])}


def forget() -> None:
    """Makes this process and its future children see no driver again (its library stays loaded and says so)."""
    others = _other_libraries()
    os.environ.pop(STATE_VARIABLE, None)
    os.environ.pop(_LIBRARIES, None)
    if others:
        os.environ[_LIBRARIES] = ":".join(others)


def load() -> None:
    """Loads the stand-in driver library so that later loads by name find it; it answers once a machine is active.

    Raises GpuherdError when this process has loaded NVIDIA's own library before.
    """
    from gpuherd.standin import build

    ctypes.CDLL(str(build.library_folder() / build.NVML), ctypes.RTLD_GLOBAL)
    # By name the loader gives the library that was loaded first under it.
    if not hasattr(ctypes.CDLL(build.NVML), "gpuherd_standin_layout"):
        raise GpuherdError("this process has already loaded NVIDIA's driver library; simulate GPUs in a new process")


def _other_libraries() -> list[str]:
    from gpuherd.standin import build

    own = str(build.library_folder())
    return [folder for folder in os.environ.get(_LIBRARIES, "").split(":") if folder and folder != own]
