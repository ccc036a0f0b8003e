"""A quota that is used up while jobs are in an engine's hands: nothing is lost, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.jobs.remote.conftest import Cluster, Follower, MakeJob, Run
from tests.patience import Gate, wait_until
from tests.small_disk import fill, mounted


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds 4 MB."""
    with mounted(tmp_path / "quota", "4m") as folder:
        yield folder


def has_no_space(output: Path) -> bool:
    """Whether a node has said so."""
    return "No space left on device" in output.read_text()


def test_it_waits_for_space_and_each_job_is_done_once(
    quota: Path, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    run, gate = Run(quota / "run"), Gate(tmp_path / "gate")
    follower = Follower(run, cluster, tmp_path)
    cluster.orders.hold()
    jobs = [
        sh("ends", f"echo x >> {tmp_path}/ran.ends; {gate.wait}"),
        sh("begins", f"echo x >> {tmp_path}/ran.begins"),
        sh("late", f"echo x >> {tmp_path}/ran.late", needs=("begins",)),
    ]
    follower.start(jobs, min_disk=0)
    follower.wait_for("handed over late")
    printed = {title: cluster.output(title) for title in ("ends", "begins")}
    for output in printed.values():
        output.write_text("so that there is room for a word\n")
    cluster.orders.release("ends")
    follower.wait_for("started ends")
    big = fill(quota)
    gate.open()
    cluster.orders.release("begins")
    # One node can't tell of its job's end, and the other can't claim what it is to begin with.
    for output in printed.values():
        wait_until(partial(has_no_space, output), told=output.read_text)
    assert not (tmp_path / "ran.begins").exists()
    assert follower.alive()
    big.unlink()
    cluster.orders.release()
    assert follower.join() == 0, follower.out()
    assert run.states() == {"ends": "done", "begins": "done", "late": "done"}
    assert all((tmp_path / f"ran.{job.name}").read_text() == "x\n" for job in jobs)
