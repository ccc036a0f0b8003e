"""What lies in a run's folder from elsewhere begins nothing, ends nothing, and is taken for nothing of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.jobs.remote.conftest import Cluster, Follower, MakeJob, Run
from tests.patience import Gate, wait_until

from gpuherd.jobs import EventKind, Queue
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.remote.protocol import Claim, EndReport, take, write_ended


def test_reports_of_a_queue_that_was_here_before_are_none_of_ours(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    """As where queue.sqlite was removed, or is an older one than the folder."""
    run.directory.create()
    run.directory.handover.mkdir()
    assert take(run.directory.attempt_claim(1), Claim(at=1.0, node="n1"))
    write_ended(run.directory.attempt_ended(1), EndReport(at=2.0, ran_s=1.0, code=0))
    assert run([sh("a", f"touch {tmp_path}/ran")]).done == 1
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_an_older_queue_knows_nothing_of_begins_no_more(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    """Somebody has put a copy from before back into the file; what was handed over since is still in line there."""
    assert run([sh("first")]).done == 1
    before = run.directory.queue.read_bytes()
    cluster.orders.hold()
    follower = Follower(run, cluster, tmp_path)
    jobs = [sh("first"), sh("a", f"echo a >>{tmp_path}/ran"), sh("b", f"echo b >>{tmp_path}/ran", needs=("a",))]
    follower.start(jobs).wait_for("b: handed to")
    follower.kill()
    unknown = [batch["name"] for batch in cluster.orders.batches()][1:]
    for name in ("queue.sqlite-wal", "queue.sqlite-shm"):
        (run.directory.root / name).unlink()
    run.directory.queue.write_bytes(before)  # the same file, so that its batches have the same names
    run.events.clear()
    run.start(jobs)
    run.wait_for(EventKind.HANDED, 2)
    assert len(unknown) == 2 and not any(run.directory.manifest(name).exists() for name in unknown)
    assert len({batch["name"] for batch in cluster.orders.batches()}) == 5
    cluster.orders.release()
    assert run.join().done == 3
    wait_until(lambda: all(cluster.orders.state.end(f"{name}_0") in ("failed", "never") for name in unknown))
    assert (tmp_path / "ran").read_text() == "a\nb\n"


@pytest.mark.parametrize("engine", ["slurm", "local"])
def test_a_copy_whose_first_start_was_killed_leaves_the_originals_jobs_alone(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, engine: str
) -> None:
    gate = Gate(tmp_path / "gate")
    follower = Follower(run, cluster, tmp_path)
    follower.start([sh("a", f"echo a >>{tmp_path}/ran; {gate.wait}")])
    follower.wait_for("started a")
    copy = run.copied(tmp_path / "copy")
    with Queue(copy.directory.queue) as queue:
        assert queue.copied
        queue.begin_run(1.0, 1.0)  # and dead before it has put back what is the original's
    with Queue(copy.directory.queue) as queue:
        assert not queue.copied
    assert send(copy.directory, Request(ControlKind.CANCEL, jobs=("a",))).ok
    copy.start([sh("a"), sh("b", f"echo b >>{tmp_path}/ran")], engine=engine)
    assert copy.join().done == 1
    assert (tmp_path / "ran").read_text() == "a\nb\n"
    assert copy.states() == {"a": "cancelled", "b": "done"}
    assert all(cluster.orders.state.order(handle) is None for handle in cluster.orders.handles())
    gate.open()
    assert follower.join() == 0
    wait_until(lambda: run.states() == {"a": "done"})
