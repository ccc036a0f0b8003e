"""SIGKILL of the follower at any instant: each job runs once, and its end is recorded once."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest
from tests.jobs.handover.conftest import Cluster, Follower, MakeJob, Run

from gpuherd.jobs import Queue
from gpuherd.jobs.records import AttemptState

JOBS = 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_instants(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, seed: int) -> None:
    """40 jobs, a third of them in chains, and up to 30 deaths: before and after each step of a hand-over, while the
    engine is being told, while ends are recorded."""
    chance = random.Random(seed)
    ran = tmp_path / "ran"
    ran.mkdir()
    # A second run of a job would fail here, and be a failure in the record.
    once = "set -C; : >{ran}/{name} || exit 9; sleep {s}"
    jobs = [
        sh(
            f"j{i}",
            once.format(ran=ran, name=f"j{i}", s=chance.choice([0, 0.2, 1.0])),
            retries=0,
            needs=(f"j{i - 1}",) if i % 3 == 2 else (),
            gpus=chance.choice([0, 1]),
        )
        for i in range(JOBS)
    ]
    follower = Follower(run, cluster, tmp_path)
    kills = 0
    while kills < 30:
        follower.start(jobs, at_most=chance.choice([2, 3, 5]))
        follower.wait_for("begins")
        try:
            code = follower.join(chance.uniform(0.0, 0.6))
        except subprocess.TimeoutExpired:
            follower.signal(signal.SIGKILL)
            follower.join()
            kills += 1
            continue
        assert code == 0, follower.out()
        break
    assert follower.start(jobs).join() == 0, follower.out()
    assert kills >= 10, "it was done before it was killed often enough"
    assert sorted(path.name for path in ran.iterdir()) == sorted(job.name for job in jobs)
    with Queue(run.directory.queue) as queue:
        attempts = list(queue.attempts())
    done = [attempt for attempt in attempts if attempt.state is AttemptState.DONE]
    assert sorted(attempt.job for attempt in done) == sorted(job.name for job in jobs)
    assert all(attempt.state is AttemptState.REQUEUED for attempt in attempts if attempt not in done)
