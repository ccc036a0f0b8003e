"""What docs/jobs.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuherd.jobs import Queue

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert len(snippets) == 4
    told = capsys.readouterr().out
    assert "3 0 []" in told
    assert "with another priority: second" in told
    assert "2 queue.sqlite" in told
    queue = Queue(tmp_path / "results" / "queue.sqlite")
    assert sorted(row.job for row in queue.attempts()) == ["model-0", "model-1", "model-1", "model-2"]
    queue.close()
