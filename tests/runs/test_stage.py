"""A stage: what is there is left, a dry run writes nothing, a failure is an exit code, the same again continues."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from gpuherd.errors import Enqueued, ExitCode, UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.runs.stage import Stage, StageOutcome


@dataclass(frozen=True)
class Counted(StageOutcome):
    """How many jobs have written their file."""

    files: int = 0

    @property
    def is_poor(self) -> bool:
        return self.jobs is not None and self.files == 0


class Counting(Stage[Counted]):
    """Each job writes a file, unless it is told to fail; complete with a file ``done``."""

    kind = "counting"

    def __init__(self, root: Path, codes: Sequence[int], *, dry_run: bool = False, enqueue_only: bool = False) -> None:
        self.steps: list[str] = []
        self.root, self.codes, self.out = root, codes, io.StringIO()
        options = DispatchOptions(cpu_jobs=2)
        console = Console(file=self.out, width=80)
        super().__init__(options, RunDirectory(root), console, dry_run=dry_run, enqueue_only=enqueue_only)

    def existing(self) -> Counted | None:
        self.steps.append("existing")
        return Counted(files=9, already=True) if (self.root / "done").exists() else None

    def prepare(self) -> None:
        self.steps.append("prepare")

    def planned(self) -> Counted:
        return Counted(never=self.never)

    def begin(self) -> None:
        self.steps.append("begin")
        self.root.mkdir(parents=True, exist_ok=True)

    def before_jobs(self) -> None:
        self.steps.append("before jobs")

    def jobs(self) -> Sequence[Job]:
        return [
            Job(
                name=f"job-{number}",
                argv=(
                    sys.executable,
                    "-c",
                    f"open({str(self.root / f'{number}.txt')!r}, 'w'); raise SystemExit({code})",
                ),
                result=str(self.root / f"{number}.txt"),
                retries=0,
            )
            for number, code in enumerate(self.codes)
        ]

    def finish(self, jobs: Outcome | None) -> Counted:
        self.steps.append("finish")
        if jobs is None or jobs.complete:
            (self.root / "done").touch()
        return Counted(jobs, len(list(self.root.glob("*.txt"))))


def test_its_steps_in_their_order_and_the_same_again_finds_it_there(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    stray = root / ".done.0123.tmp"
    stray.touch()
    os.utime(stray, (time.time() - 100,) * 2)
    stage = Counting(root, [0, 0])
    outcome = stage.run()
    assert stage.steps == ["existing", "prepare", "begin", "before jobs", "finish"] and stage.outcome is outcome
    assert (outcome.files, outcome.exit_code, outcome.failures) == (2, ExitCode.OK, ())
    assert not stray.exists(), "what a killed writer left is removed"
    assert [path.name.partition("_")[0] for path in (root / "logs").glob("counting_*.log")] == ["counting"]
    again = Counting(root, [0, 0])
    assert again.run() == Counted(files=9, already=True) and again.steps == ["existing"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    stage = Counting(tmp_path / "run", [0], dry_run=True)
    assert stage.run().exit_code is ExitCode.OK
    assert stage.steps == ["existing", "prepare"] and "nothing was started" in stage.out.getvalue()
    assert not (tmp_path / "run").exists()


def test_a_job_that_fails_is_told_and_the_others_count(tmp_path: Path) -> None:
    outcome = Counting(tmp_path / "run", [0, 65]).run()
    assert outcome.exit_code is ExitCode.FAILED and not (tmp_path / "run" / "done").exists()
    ((title, reason),) = outcome.failures
    assert title == "job-1" and "bad input" in reason
    assert outcome.failure_values() == [{"job": title, "reason": reason}]
    assert Counting(tmp_path / "run", [0, 0]).run().exit_code is ExitCode.OK


class Summing(Stage[Counted]):
    """Needs a stage of jobs, and counts its files here."""

    kind = "summing"

    def __init__(self, root: Path, codes: Sequence[int], *, dry_run: bool = False) -> None:
        self.counting = Counting(root / "counting", codes)
        self.finished_with: list[Outcome | None] = []
        super().__init__(DispatchOptions(), RunDirectory(root), Console(file=io.StringIO()), dry_run=dry_run)

    def needs(self) -> Sequence[Counting]:
        return [self.counting]

    def finish(self, jobs: Outcome | None) -> Counted:
        self.finished_with.append(jobs)
        return Counted(jobs, len(list(self.counting.root.glob("*.txt"))))


def test_the_stages_that_it_needs_run_first(tmp_path: Path) -> None:
    root = tmp_path / "run"
    failed = Summing(root, [0, 65])
    outcome = failed.run()
    assert outcome.exit_code is ExitCode.FAILED and failed.finished_with == [outcome.jobs] and outcome.failures
    done = Summing(root, [0, 0])
    outcome = done.run()
    assert (outcome.exit_code, outcome.files, done.finished_with) == (ExitCode.OK, 2, [None])
    again = Summing(root, [0, 0])
    assert again.run().files == 2 and again.counting.steps == ["existing"]


def test_a_dry_run_is_about_the_jobs_of_the_stages_that_it_needs(tmp_path: Path) -> None:
    stage = Summing(tmp_path / "run", [0, 0, 0], dry_run=True)
    with pytest.raises(UsageError, match="summing has no dry run"):
        stage.run()
    assert stage.outlook is not None and stage.outlook.counts == {1: 3} and not stage.finished_with
    assert not (tmp_path / "run").exists()


def test_what_is_only_queued_is_not_finished(tmp_path: Path) -> None:
    stage = Counting(tmp_path / "run", [0], enqueue_only=True)
    with pytest.raises(Enqueued):
        stage.run()
    assert stage.steps[-1] == "before jobs" and not list((tmp_path / "run").glob("*.txt"))


def test_exit_codes_of_outcomes() -> None:
    stopped = Outcome(1, 0, 1, 0, stopped_by=ExitCode.INTERRUPTED)
    codes = [
        each.exit_code
        for each in (
            Counted(),
            Counted(never=("no",)),
            Counted(Outcome(1, 0, 0, 0)),
            Counted(stopped),
            Counted(files=1),
        )
    ]
    assert codes == [ExitCode.OK, ExitCode.FAILED, ExitCode.FAILED, ExitCode.INTERRUPTED, ExitCode.OK]


def test_a_log_that_is_open_already_is_the_stages_own(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    stage = Counting(tmp_path, [])
    with stage.logged() as outer, stage.logged() as inner:
        assert outer == inner
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [outer.name]
