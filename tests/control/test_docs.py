"""docs/control.md says what is so: its commands parse, its snippet runs, its keys and metrics are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuherd.cli.main import build_parser
from gpuherd.jobs import GpuOptions, Job, RunDirectory, run_jobs
from gpuherd.jobs.monitor.format import as_json
from gpuherd.jobs.monitor.metrics import read_metrics
from gpuherd.jobs.monitor.prometheus import exposition
from gpuherd.jobs.monitor.status import opened, read_status
from gpuherd.jobs.options import SETTABLE
from gpuherd.top.app import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "control.md").read_text(encoding="utf-8")


def test_its_commands_parse() -> None:
    lines = re.findall(r"^\$ (gpuherd .*)$", PAGE, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        args, unknown = build_parser().parse_known_args(shlex.split(line, comments=True)[1:])
        assert args.command and not unknown, line


def test_its_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = [Job(name="good", argv=("true",), gpus=0), Job(name="bad", argv=("sh", "-c", "exit 65"), gpus=0)]
    run_jobs(jobs, GpuOptions(), RunDirectory("results"))
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(snippet, "docs/control.md", "exec"), {})
    assert capsys.readouterr().out == "1 ['bad']\n"


def test_its_keys_are_all_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run_jobs([Job(name="a", argv=("true",), gpus=0)], GpuOptions(), run)
    (job,) = as_json(read_status(run))["jobs"]
    assert not [key for key in (*job, *job["attempt"]) if f"`{key}`" not in PAGE]
    flags = {"gpu_memory_threshold": "gpu-mem-threshold", "yield_to_others": "yield"}
    for name in SETTABLE:
        assert f"`--{flags.get(name, name.replace('_', '-'))}" in PAGE


def test_its_metrics_are_all_there(tmp_path: Path, standin: Callable[..., Any]) -> None:
    standin("1x40GB")
    run = RunDirectory(tmp_path)
    run_jobs([Job(name="a", argv=("true",))], GpuOptions(max_checks=1, check_interval=0.01), run)
    with opened(run) as reader:
        told = exposition(read_metrics(run, reader))
    names = set(re.findall(r"# TYPE (\S+)", told))
    assert names <= set(re.findall(r"`(gpuherd_[a-z_]+)", PAGE))
    assert len(names) >= 10


def test_the_help_of_top_and_the_page_tell_the_same_keys() -> None:
    for key in ("enter", "escape", "/", "c ", "r ", "p ", "d ", "q ", "?"):
        assert f"\n{key}" in KEYS
        assert f"| {key.strip()}" in PAGE or f", {key.strip()} |" in PAGE or f"{key.strip()} shows all" in PAGE
