"""The tests that only a real GPU can run, by pytest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu import ROOT, Measurement, needs, python

FILES = (
    "tests/test_real_gpu.py",
    "tests/models/load/test_real_gpu.py",
    "tests/models/memory/test_usage_gpu.py",
    "tests/models/memory/test_training_gpu.py",
)


def measure(_quick: bool) -> Iterator[Measurement]:
    """Each file in a process of its own."""
    for file in FILES:
        yield Measurement(file, partial(tested, file))


def tested(file: str) -> dict[str, Any]:
    """How many passed and were skipped. Raises RuntimeError with the end of pytest's output where one failed."""
    needs("pytest", "pytest_timeout", "hypothesis", "torch", "transformers")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        words = ("-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-m", "", f"--junitxml={results}")
        done = python(*words, cwd=ROOT, check=False)
        if done.returncode not in (0, 5):  # 5: no test in it
            raise RuntimeError(done.stdout[-1400:] + done.stderr[-600:])
        suites = list(ElementTree.parse(results).iter("testsuite"))
    total, skipped = (sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped"))
    return {"passed": total - skipped, "skipped_tests": skipped}
