"""What the CUDA driver says of itself, without starting it here: who has started it can't choose GPUs any more.

Knows libcuda's first three functions; no torch and no NVML.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

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
