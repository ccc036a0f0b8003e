"""Is an exception the want of memory? On a GPU or on the computer, in the words of all libraries that may say so."""

from __future__ import annotations

# Libraries below torch have no class of their own for it.
_WORDS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
    "bad_alloc",
)


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether a smaller batch may help.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in _WORDS)
