"""More than 200 ends of logs, written after what programs really print, each with the class that it must be given.

``failure_logs/<class>.txt`` holds many logs; a line ``=== name code=1`` (or ``signal=9``, or neither for an end without
a status) begins each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.jobs.attempts import diagnosed

from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass

LOGS = Path(__file__).parent / "failure_logs"
CLASSES = {
    "bad-input": FailureClass.BAD_INPUT,
    "cannot-write": FailureClass.CANNOT_WRITE,
    "crash": FailureClass.CRASH,
    "disk-full": FailureClass.DISK_FULL,
    "gpu-fault": FailureClass.GPU_FAULT,
    "killed": FailureClass.KILLED,
    "missing": FailureClass.MISSING,
    "out-of-host-memory": FailureClass.OUT_OF_MEMORY,
    "out-of-memory": FailureClass.OUT_OF_MEMORY,
}


def corpus() -> Iterator[tuple[str, str, Diagnosis]]:
    """Each log: its file, its name, and the diagnosis of an attempt that left it."""
    for path in sorted(LOGS.glob("*.txt")):
        for part in path.read_text(encoding="utf-8").removeprefix("=== ").split("\n=== "):
            header, _, log = part.partition("\n")
            name, *evidence = header.split()
            told = dict(pair.split("=") for pair in evidence)
            code, signal = told.get("code"), told.get("signal")
            end = diagnosed(int(code) if code else None, int(signal) if signal else None, log_tail=log)
            yield path.stem, name, end


ENTRIES = list(corpus())


@pytest.mark.parametrize(
    ("kind", "found"),
    [(kind, found) for kind, _, found in ENTRIES],
    ids=[f"{kind}/{name}" for kind, name, _ in ENTRIES],
)
def test_each_log_has_its_class(kind: str, found: Diagnosis) -> None:
    assert found.failure is CLASSES[kind], found.reason
    assert found.on_host == (kind == "out-of-host-memory")
    assert 0 < len(found.reason) <= 300
    # Launchers speak last, and say nothing of the cause.
    assert "ChildFailedError" not in found.reason
    assert "See root cause above" not in found.reason


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(ENTRIES) > 200
    assert len({(kind, name) for kind, name, _ in ENTRIES}) == len(ENTRIES)
    assert {kind for kind, _, _ in ENTRIES} == CLASSES.keys()


def test_the_reason_is_what_a_person_needs_to_know() -> None:
    found = {f"{kind}/{name}": diagnosis for kind, name, diagnosis in ENTRIES}
    assert found["missing/ranks-miss-a-file"].reason == (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train/shard-0001.npy'"
    )
    assert found["missing/gated-new"].reason == "OSError: You are trying to access a gated repo."
    assert found["crash/vllm-engine"].reason.startswith("AssertionError: Sampled token IDs")
    assert found["out-of-memory/coloured"].reason.startswith("torch.OutOfMemoryError: CUDA out of memory.")
