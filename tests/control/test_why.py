"""``gpuherd why``, and what ``gpus`` and ``status`` say of turns, while another user waits."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forking
from tests.patience import wait_until

from gpuherd.errors import ExitCode
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs import clock
from gpuherd.jobs.monitor.turns import Turn, WaitingUser
from gpuherd.standin.machine import SimulatedMachine

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of other users")
BOB = 65_533
_RUN = """
import sys
from gpuherd.jobs import GpuOptions, Job, RunDirectory, run_jobs
jobs = [Job(name=f"j{i}", argv=("sleep", "60"), gpus=1) for i in range(3)]
run_jobs(jobs, GpuOptions(max_checks=2, check_interval=0.05), RunDirectory(sys.argv[1]), grace_s=0.2)
"""


@dataclass
class Site:
    """A run with a job on one of two GPUs, whose other jobs wait because it is bob's turn."""

    folder: Path
    forking: Forking

    def gpuherd(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "400"}
        return self.forking.start(module="gpuherd", words=words, env=environment).end()

    def json(self, *words: str) -> dict[str, Any]:
        done = self.gpuherd(*words, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def site(
    tmp_path: Path,
    standin: Callable[..., SimulatedMachine],
    forking_gpuherd: Forking,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    standin("2x40GB")
    (tmp_path / "policy.toml").write_text('[turns]\ngrace = "10m"\n')
    monkeypatch.setenv("GPUHERD_POLICY", str(tmp_path / "policy.toml"))
    path = LeaseFolder.default().path / f"{BOB}.1.0.ticket"
    path.write_text(json.dumps({"gpus": 1, "smallest": 1, "since": clock.mono(), "job_s": 100.0, "jobs": 1}))
    os.chown(path, BOB, BOB)
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    folder = tmp_path / "results"
    run = subprocess.Popen([sys.executable, "-c", _RUN, str(folder)], stdout=subprocess.DEVNULL)
    found = Site(folder, forking_gpuherd)
    try:
        wait_until(lambda: "'s turn (" in found.gpuherd("why", str(folder), "j2").stdout, 20.0, every_s=0.2)
        yield found
    finally:
        run.terminate()
        run.wait()
        os.close(fd)


def test_who_is_before_a_job_and_when_it_starts(site: Site) -> None:
    done = site.gpuherd("why", str(site.folder), "j2")
    assert (done.returncode, done.stderr) == (0, "")
    reason, ahead, heading, first, second, start = done.stdout.splitlines()
    assert "it is uid 65533's turn (0.0 GPU-hours of late, you 0.0)" in reason
    assert ahead == "1 waiting job of its queue is before it"
    assert heading == "users who wait for GPUs of this machine, in the order of their turns:"
    assert first.startswith("  1. uid 65533 (1 GPU, for ")
    assert second.startswith("  2. root (1 GPU, for ")
    assert second.endswith(" - this queue's")
    assert start.startswith("when it starts can't be predicted")  # how long the job that runs takes is not known
    found = site.json("why", str(site.folder), "j1")
    assert (found["job"], found["state"], found["jobs_ahead"]) == ("j1", "waiting", 0)
    # He takes the other for 100 s, and it must be quiet for a moment before the next user has it.
    assert 95 <= found["turn"]["starts_at"] - clock.wall() <= 130
    assert found["turn"]["before"] == {"uid 65533": 1}
    assert [user["uid"] for user in found["turn"]["waiting"]] == [BOB, 0]
    (line,) = site.gpuherd("why", str(site.folder), "j0").stdout.splitlines()
    assert line == "j0 does not wait, it is running"


def test_gpus_and_status_say_who_waits(site: Site) -> None:
    (bob, me) = site.json("gpus")["waiting"]
    assert (bob["user"], bob["gpus"], bob["held"], bob["weight"]) == ("uid 65533", 1, 0, 1.0)
    assert (me["uid"], me["held"]) == (0, 1)
    text = " ".join(site.gpuherd("gpus").stdout.split())
    assert "Waiting for GPUs, in the order of their turns: uid 65533 (1 GPU, for" in text
    text = " ".join(site.gpuherd("status", str(site.folder)).stdout.split())
    assert "for GPUs also wait: uid 65533; the next job starts at about" in text
    status = site.json("status", str(site.folder))
    assert status["turn"]["before"] == {"uid 65533": 1}
    assert sorted(gpu["kept"] for gpu in status["dispatcher"]["gpus"]) == [False, True]


def test_a_job_that_is_not_there_is_refused(site: Site) -> None:
    done = site.gpuherd("why", str(site.folder), "j9")
    assert done.returncode == ExitCode.USAGE
    assert "there is no job j9" in done.stderr


def test_without_a_known_end_nothing_is_predicted() -> None:
    bob = WaitingUser(user="bob\x1b[31m", uid=7, gpus=2, smallest=2, waited_s=10.0, held=3, used_h=1.0, weight=2.0)
    turn = Turn(users=(bob,), uid=1, unknown=2)
    assert turn.start_sentence(0.0) == "when it starts can't be predicted: the end of 2 jobs on GPUs is not known"
    assert turn.ahead == turn.others == (bob,)
    assert bob.sentence == "bob (2 GPUs, at least 2 at once, for 10 s; holds 3, 1.0 GPU-hours of late, weight 2)"
