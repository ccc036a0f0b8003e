"""How many threads the numeric libraries of a worker start: as many as it has cores, and never several times that.

OpenBLAS, MKL and torch each start a pool of their own, a thread for each core of the machine, in every process at once.
Each reads the environment once, when it is loaded, so this is settled before numpy is imported. A worker that the
dispatcher starts has been told its share of the cores (``engines.local.process``); one that is started by hand takes
them all.

It knows environment variables. It imports no library, so that it can come first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from gpuherd.engines.host import cores

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


def settle(environment: MutableMapping[str, str] | None = None, *, at_once: int = 1) -> int:
    """Says in the environment how many threads each library may start, where nobody has said it. Returns the number.

    Call it before numpy, scipy or torch is imported; later it changes nothing for libraries that are loaded.
    """
    target = os.environ if environment is None else environment
    threads = blas_threads(target, cores(), at_once=at_once)
    for name in VARIABLES:
        target.setdefault(name, str(threads))
    # Threads that have nothing to do sleep at once. They would spin for 200 ms (MKL's) or longer beside the threads of
    # the next library, which has work for the same cores.
    target.setdefault("KMP_BLOCKTIME", "0")
    target.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return threads


def before_mkl(environment: MutableMapping[str, str] | None = None) -> None:
    """Chooses MKL's threads before it is loaded: none for one core, so that it needs no OpenMP library at all.

    MKL_DYNAMIC off: it would otherwise take fewer threads when it likes, and round otherwise in another run.
    """
    target = os.environ if environment is None else environment
    if blas_threads(target, cores()) == 1:
        target.setdefault("MKL_THREADING_LAYER", "SEQUENTIAL")
    target.setdefault("MKL_DYNAMIC", "FALSE")
    target.setdefault("KMP_BLOCKTIME", "0")
