"""Pauses of a running attempt: who may take back which. A real process."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.jobs import DispatchOptions, Job, RunDirectory, clock
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.records import PauseReason, QueuedJob


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return Supervisor(run, f"q{os.getpid()}", DispatchOptions(), grace_s=0.2)


@pytest.fixture
def attempt(supervisor: Supervisor) -> Iterator[Attempt]:
    job = Job(name="j", argv=("sleep", "60"), gpus=0)
    queued = QueuedJob(1, job, 0, 0, 0.0, frozenset(), 0.0)
    made = supervisor.prepare(supervisor.launch(1, queued, 1), (), at=clock.wall(), mono=clock.mono())
    supervisor.let_go(made)
    wait_until(lambda: works(made))
    yield made
    made.process.kill()
    select.select([made.process.pidfd], [], [], 10)
    supervisor.collect(made.process.pidfd)


def state_of(attempt: Attempt) -> str:
    return Path(f"/proc/{pid_of(attempt)}/stat").read_text().rpartition(")")[2].split()[0]


def pid_of(attempt: Attempt) -> int:
    assert attempt.record.process is not None
    return attempt.record.process.pid


def works(attempt: Attempt) -> bool:
    """Whether its command runs by now: before that the shell may stand still for a moment of its own (vfork)."""
    pid = pid_of(attempt)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(Path(f"/proc/{child}/comm").read_text() == "sleep\n" for child in children)


def comes_to(attempt: Attempt, state: str) -> None:
    """Waits for it: the kernel stops a process when that next runs, not at once."""
    wait_until(lambda: state_of(attempt) == state, told=lambda: state_of(attempt))


def test_what_people_want_does_not_end_a_pause_for_the_disk_that_found_no_space_in_the_queue(
    supervisor: Supervisor, attempt: Attempt
) -> None:
    supervisor.set_paused(attempt, frozenset({PauseReason.DISK}), 1.0)
    comes_to(attempt, "T")
    supervisor.enforce(attempt, attempt.record, 2.0)
    comes_to(attempt, "T")
    by_user = replace(attempt.record, paused=frozenset({PauseReason.USER}))
    supervisor.enforce(attempt, by_user, 3.0)
    assert attempt.paused == {PauseReason.DISK, PauseReason.USER}
    supervisor.set_paused(attempt, attempt.paused - {PauseReason.DISK}, 4.0)
    comes_to(attempt, "T")
    supervisor.enforce(attempt, attempt.record, 5.0)
    assert attempt.paused == frozenset()
    comes_to(attempt, "S")


def test_an_old_mark_of_our_own_pause_pauses_nothing_again(supervisor: Supervisor, attempt: Attempt) -> None:
    """The end of the pause found no space in the queue either."""
    supervisor.enforce(attempt, replace(attempt.record, paused=frozenset({PauseReason.DISK})), 1.0)
    comes_to(attempt, "S")
