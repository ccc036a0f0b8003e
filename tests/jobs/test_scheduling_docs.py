"""What docs/scheduling.md says is so: its snippet runs, and its table of failures names every class."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from gpuherd.jobs.attempts.failures import FailureClass

TEXT = (Path(__file__).parents[2] / "docs/scheduling.md").read_text(encoding="utf-8")


def test_the_snippet_prints_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == "[(1, 0)]\n"


def test_every_class_of_failure_is_in_the_table() -> None:
    for failure in FailureClass:
        assert f"\n| {failure.value} |" in TEXT


def test_the_corpus_is_as_large_as_the_page_says() -> None:
    logs = Path(__file__).parent / "failure_logs"
    count = sum(path.read_text(encoding="utf-8").count("=== ") for path in logs.glob("*.txt"))
    assert f"holds {count} ends of logs" in TEXT
