"""Classes of failure from what jobs really print, and text that can't harm a terminal."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.failures import Ending, FailureClass, back_off_s, classify, clean, telling_line

CASES = [
    (Ending(code=65, log_tail="gpuherd: x.csv row 3: bad model"), FailureClass.BAD_INPUT, False, False),
    (Ending(code=66), FailureClass.MISSING, False, False),
    (Ending(code=71), FailureClass.OUT_OF_MEMORY, True, True),
    (Ending(code=73), FailureClass.CANNOT_WRITE, False, False),
    (
        Ending(code=1, log_tail="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        FailureClass.OUT_OF_MEMORY,
        True,
        True,
    ),
    (
        Ending(code=1, log_tail="numpy.MemoryError: Unable to allocate 3.0 GiB for an array"),
        FailureClass.OUT_OF_MEMORY,
        True,
        True,
    ),
    (Ending(code=134, log_tail="terminate called\n  what():  std::bad_alloc"), FailureClass.OUT_OF_MEMORY, True, True),
    (
        Ending(code=1, log_tail="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        FailureClass.GPU_FAULT,
        True,
        True,
    ),
    (Ending(code=1, log_tail="OSError: [Errno 28] No space left on device"), FailureClass.DISK_FULL, True, False),
    (Ending(signal=signal.SIGKILL), FailureClass.KILLED, True, False),
    (Ending(signal=signal.SIGTERM), FailureClass.KILLED, True, False),
    (Ending(signal=signal.SIGSEGV), FailureClass.CRASH, True, True),
    (Ending(code=None), FailureClass.KILLED, True, False),
    (Ending(code=1, log_tail="ValueError: x"), FailureClass.CRASH, True, True),
    (Ending(signal=15, timeout_s=60.0, log_tail="CUDA out of memory"), FailureClass.TIMEOUT, True, True),
    (Ending(code=0, missing_result="/x/y.csv"), FailureClass.NO_RESULT, True, False),
    (Ending(started=False), FailureClass.NEVER_STARTED, True, False),
]


@pytest.mark.parametrize(("ending", "failure", "retry", "elsewhere"), CASES)
def test_classes(ending: Ending, failure: FailureClass, retry: bool, elsewhere: bool) -> None:
    found = classify(ending)
    assert (found.failure, found.retry, found.elsewhere) == (failure, retry, elsewhere)
    assert found.reason


def test_the_reason_is_the_line_that_tells() -> None:
    log = (
        'Loading layer 1\nTraceback (most recent call last):\n  File "x.py", line 3, in <module>\n'
        "ValueError: shape mismatch\n\nKilled\n"
    )
    assert telling_line(log) == "ValueError: shape mismatch"
    assert classify(Ending(code=1, log_tail=log)).reason == "ValueError: shape mismatch"
    assert telling_line("all went well\nbye\n") == "bye"
    assert telling_line(" \n\t\n") is None
    assert "SIGKILL" in classify(Ending(signal=9, log_tail="step 5\nKilled\n")).reason
    assert "step 5" in classify(Ending(signal=9, log_tail="step 5\nKilled\n")).reason


def test_escapes_are_taken_out() -> None:
    assert clean("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x00\x08 \u202eabc") == "red x abc"


@given(st.text(max_size=1000))
def test_any_text_becomes_one_harmless_line(text: str) -> None:
    line = clean(text)
    assert len(line) <= 300
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029\u202e" for c in line)
    found = classify(Ending(code=1, log_tail=text))
    assert found.reason and "\n" not in found.reason


def test_a_hostile_log_is_judged_in_no_time() -> None:
    """Patterns must be linear: 16 kB of the worst kind, well within the test's own time."""
    for piece in ("a.", "Error", "Unable to allocate ", "\x1b[", "\x1b]"):
        classify(Ending(code=1, log_tail=piece * (16_000 // len(piece))))


def test_back_off_grows_and_ends() -> None:
    assert [back_off_s(tries) for tries in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert back_off_s(50) == 60


def test_our_own_workers_prefix_is_no_part_of_the_reason() -> None:
    said = "Loading\nerror: model a: none of its 1 matrices has a valid fit\n"
    assert classify(Ending(code=65, log_tail=said)).reason == "model a: none of its 1 matrices has a valid fit"
    full = classify(Ending(code=1, log_tail="error: [Errno 28] No space left on device"))
    assert full.reason == "[Errno 28] No space left on device"


def test_bytes_that_are_no_utf8_can_be_shown() -> None:
    clean("a\udcff").encode()
