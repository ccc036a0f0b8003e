"""Classes of failure from what jobs really print, and text that can't harm a terminal."""

from __future__ import annotations

import errno
import signal
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.attempts import diagnosed

from gpuherd.errors import clean
from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass, back_off_s, error_line
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.runs.worker import is_out_of_memory

CASES = [
    (diagnosed(code=65, log_tail="gpuherd: x.csv row 3: bad model"), FailureClass.BAD_INPUT, False, False),
    (diagnosed(code=66), FailureClass.MISSING, False, False),
    (diagnosed(code=71), FailureClass.OUT_OF_MEMORY, True, True),
    (diagnosed(code=73), FailureClass.CANNOT_WRITE, False, False),
    (
        diagnosed(code=1, log_tail="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        FailureClass.OUT_OF_MEMORY,
        True,
        True,
    ),
    (
        diagnosed(code=1, log_tail="numpy.MemoryError: Unable to allocate 3.0 GiB for an array"),
        FailureClass.OUT_OF_MEMORY,
        True,
        True,
    ),
    (
        diagnosed(code=134, log_tail="terminate called\n  what():  std::bad_alloc"),
        FailureClass.OUT_OF_MEMORY,
        True,
        True,
    ),
    (
        diagnosed(code=1, log_tail="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        FailureClass.GPU_FAULT,
        True,
        True,
    ),
    (diagnosed(code=1, log_tail="OSError: [Errno 28] No space left on device"), FailureClass.DISK_FULL, True, False),
    (diagnosed(signal=signal.SIGKILL), FailureClass.KILLED, True, False),
    (diagnosed(signal=signal.SIGTERM), FailureClass.KILLED, True, False),
    (diagnosed(signal=signal.SIGSEGV), FailureClass.CRASH, True, True),
    (diagnosed(code=None), FailureClass.KILLED, True, False),
    (diagnosed(code=1, log_tail="ValueError: x"), FailureClass.CRASH, True, True),
    (
        diagnosed(signal=15, passed=Passed(LimitKind.WHOLE, 60.0), log_tail="CUDA out of memory"),
        FailureClass.TIMEOUT,
        True,
        True,
    ),
    (diagnosed(code=0, missing_result="/x/y.csv"), FailureClass.NO_RESULT, True, False),
    (diagnosed(started=False), FailureClass.NEVER_STARTED, True, False),
]


@pytest.mark.parametrize(("found", "failure", "retry", "elsewhere"), CASES)
def test_classes(found: Diagnosis, failure: FailureClass, retry: bool, elsewhere: bool) -> None:
    assert (found.failure, found.retry, found.elsewhere) == (failure, retry, elsewhere)
    assert found.reason


def test_the_reason_is_the_line_that_tells() -> None:
    log = (
        'Loading layer 1\nTraceback (most recent call last):\n  File "x.py", line 3, in <module>\n'
        "ValueError: shape mismatch\n\nKilled\n"
    )
    assert error_line(log) == "ValueError: shape mismatch"
    assert diagnosed(code=1, log_tail=log).reason == "ValueError: shape mismatch"
    assert error_line("all went well\nbye\n") == "bye"
    assert error_line(" \n\t\n") is None
    assert "SIGKILL" in diagnosed(signal=9, log_tail="step 5\nKilled\n").reason
    assert "step 5" in diagnosed(signal=9, log_tail="step 5\nKilled\n").reason


def test_escapes_are_taken_out() -> None:
    assert clean("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x00\x08 \u202eabc") == "red x abc"


@given(st.text(max_size=1000))
def test_any_text_becomes_one_harmless_line(text: str) -> None:
    line = clean(text)
    assert len(line) <= 300
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029\u202e" for c in line)
    found = diagnosed(code=1, log_tail=text)
    assert found.reason and "\n" not in found.reason


def test_a_hostile_log_is_judged_in_no_time() -> None:
    """Patterns must be linear: 16 kB of the worst kind, well within the test's own time."""
    for piece in ("a.", "Error", "Unable to allocate ", "\x1b[", "\x1b]"):
        diagnosed(code=1, log_tail=piece * (16_000 // len(piece)))


def test_back_off_grows_and_ends() -> None:
    assert [back_off_s(tries) for tries in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert back_off_s(50) == 60


def test_our_own_workers_prefix_is_no_part_of_the_reason() -> None:
    said = "Loading\nerror: model a: none of its 1 matrices has a valid fit\n"
    assert diagnosed(code=65, log_tail=said).reason == "model a: none of its 1 matrices has a valid fit"
    full = diagnosed(code=1, log_tail="error: [Errno 28] No space left on device")
    assert full.reason == "[Errno 28] No space left on device"


def test_bytes_that_are_no_utf8_can_be_shown() -> None:
    clean("a\udcff").encode()


# As the libraries word it, with the class that they raise.
NO_MEMORY = [
    RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("NCCL Error 1: unhandled cuda error\nCuda failure 2 'out of memory'"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried"),
    RuntimeError("unable to mmap 4096 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    MemoryError("Unable to allocate 3.00 GiB for an array with shape (805306368,) and data type float32"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."),
]


@pytest.mark.parametrize("problem", NO_MEMORY, ids=lambda problem: str(problem)[:50])
def test_every_form_of_no_memory_is_known_as_an_exception_and_in_a_log(problem: Exception) -> None:
    assert is_out_of_memory(problem)
    log = "".join(traceback.format_exception_only(problem))
    assert diagnosed(code=1, log_tail=log).failure is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnSsyevd`"),
        ValueError("CUDA error: out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_what_is_no_want_of_memory(problem: BaseException) -> None:
    assert not is_out_of_memory(problem)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_no_memory_as_libraries_really_raise_it(library: str) -> None:
    empty = pytest.importorskip(library).empty
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        empty(1 << 46)
    assert is_out_of_memory(caught.value)
