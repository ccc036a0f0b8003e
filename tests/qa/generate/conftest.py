"""Runs of answers made in the test's own process by the very steps of the command: no job, the same files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.qa import small_models

from gpuherd.errors import ExitCode
from gpuherd.models.load.jobs import Resources
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generate import worker
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.generate.experiment import JobPlan, plan_jobs, work_of
from gpuherd.qa.generate.finish import finish
from gpuherd.qa.generate.prepared import PreparedRun, prepare, write
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run, record_of, run_of_path
from gpuherd.runs.shard_file import Shard


@dataclass
class Begun:
    """A run that has begun: everything before its jobs."""

    config: GenerateConfig
    folder: QADirectory
    prepared: PreparedRun
    plan: JobPlan
    shards: tuple[Shard, ...]

    def answer(self, numbers: Iterable[int] | None = None) -> None:
        """Does the work of these shards, of all by default."""
        for number in range(len(self.shards)) if numbers is None else numbers:
            words = [f"--model={self.config.model}", f"--folder={self.folder.root}", f"--shard={number}"]
            assert worker.main(words) == ExitCode.OK

    def finish(self) -> Run:
        """Makes it complete."""
        finish(self.folder, self.prepared, self.shards)
        return run_of_path(self.folder.root)


Begin = Callable[..., Begun]


def untracked(items: Sequence[Any], title: str) -> Sequence[Any]:
    return items


def begin_run(config: GenerateConfig) -> Begun:
    """The steps of the command up to its jobs, on a machine without GPUs."""
    folder = QADirectory(Path(config.runs_dir) / config.name())
    kept = record_of(folder) if folder.run_json.exists() else None
    prepared = prepare(config, kept, folder, untracked)
    plan = plan_jobs(config, prepared, Resources((), 2))
    folder.create()
    write(prepared, folder)
    shards = work_of(config, prepared, folder).begin(plan.asks.at_once)
    return Begun(config, folder, prepared, plan, shards)


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-four facts as a file."""
    return small_models.write_questions(tmp_path_factory.mktemp("data") / "facts.jsonl", 24)


@pytest.fixture
def begin(tmp_path: Path, trained: Path, questions: Path) -> Begin:
    """``begin(samples=2, ...)`` begins a run of the trained model on the facts."""

    def make(**options: Any) -> Begun:
        said = {"model": str(trained), "dataset": str(questions), "runs_dir": str(tmp_path / "runs")}
        return begin_run(GenerateConfig(**(said | {"max_new_tokens": 12} | options)))

    return make


def answers_of(run: Run) -> list[Answered]:
    return list(run.answers())
