"""What docs/what-if.md shows works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode
from gpuherd.jobs import Job, Queue

PAGE = Path(__file__).parents[2] / "docs" / "what-if.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_python_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    rules, people = blocks("python")
    exec(compile(rules, str(PAGE), "exec"), {})
    shown = capsys.readouterr().out
    assert "policy=gpuherd 2401 " in shown and "policy=guides 6407 " in shown
    exec(compile(people, str(PAGE), "exec"), {})
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in found] == ["alice", "bob", "carol"]
    assert all(float(hours) == pytest.approx(2.0) and 0.9 < float(of_due) < 1.1 for _, hours, of_due in found)


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.yaml").write_text("jobs: [{command: echo a}, {command: echo b, gpus: 2}]\n")
    (tmp_path / "results").mkdir()
    queue = Queue(tmp_path / "results" / "queue.sqlite")
    queue.submit([Job(name="a", argv=("x",))])
    queue.close()
    commands = [line for block in blocks("console") for line in block.splitlines()]
    assert len(commands) == 7
    for line in commands:
        words = shlex.split(line.removeprefix("$ gpuherd "), comments=True)
        # Nothing has run in that folder, so that a length must be said.
        more = ["--seconds", "5m"] if "results" in words else []
        assert run([*words, *more]) == ExitCode.OK
    assert "2.670" in capsys.readouterr().out
