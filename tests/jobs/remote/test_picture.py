"""What a display shows of jobs in an engine's hands."""

from __future__ import annotations

from tests.jobs.attempts import attempt_of, running_job

from gpuherd.engines.base import Phase, Sighting
from gpuherd.jobs.job import Job
from gpuherd.jobs.monitor import display
from gpuherd.jobs.records import Counts, Handed, QueuedJob, RunSnapshot
from gpuherd.jobs.remote.dispatcher import in_line_sentence
from gpuherd.jobs.remote.outcome import RemoteAttempt
from gpuherd.jobs.remote.protocol import Claim
from gpuherd.jobs.remote.tracker import begun, gpu_labels, with_begun


def followed(number: int, reason: str | None, *, gpus: int = 1, nodes: int = 1) -> RemoteAttempt:
    queued = QueuedJob(
        id=number,
        job=Job(name=f"j{number}", argv=("true",), gpus=gpus, nodes=nodes),
        tries=0,
        attempts=0,
        not_before=0.0,
        avoid=frozenset(),
        ready_at=0.0,
    )
    handed = Handed("slurm", "batch", number, f"h{number}")
    record = attempt_of(queued, number, process=None, handed=handed, started_at=100.0)
    each = RemoteAttempt(record, handed)
    each.sighting = Sighting(handle=f"h{number}", phase=Phase.WAITING, reason=reason)
    return each


def test_how_many_wait_there_and_what_is_said_most_often_why() -> None:
    waiting = [followed(1, "Priority"), followed(2, "Resources"), followed(3, "Resources"), followed(4, None)]
    assert in_line_sentence(waiting, "SLURM") == "4 wait in SLURM (Resources)"
    waiting[0].claim = Claim(at=1.0, node="n1")
    assert in_line_sentence(waiting[:1], "SLURM") is None
    assert in_line_sentence([followed(1, "bad\x1b[31m")], "SLURM") == "1 waits in SLURM (bad)"


def test_a_line_of_the_display_has_the_node() -> None:
    there = Handed("slurm", "b", 0, "h", "n1")
    line = running_job("a", ("n1:0", "n1:1"), run_s=1.0, handed=there)
    assert display.cells(line)[0] == "GPU n1:0,n1:1"
    assert display.cells(running_job("a", run_s=1.0, handed=there))[0] == "CPU of n1"
    snapshot = RunSnapshot(Counts(running=10, waiting=2), (line,), None, None, in_line=9)
    assert display.counts(snapshot) == "0 of 12 done, 1 running, 9 handed over, 2 waiting"


def test_gpu_time_counts_on_all_nodes() -> None:
    """As many labels as GPUs, each its own; also where the engine does not say which they are."""
    assert len(set(gpu_labels(Claim(at=0.0, node="n1", gpus=("0", "1")), 2, 3))) == 6
    two = Claim(at=0.0, node="n1", gpus=("0", "1"), others=("n2",))
    assert gpu_labels(two, 2, 2) == ("n1:0", "n1:1", "n2:?1", "n2:?2")
    assert gpu_labels(two, 2, 1) == ("n1:0", "n1:1")
    assert gpu_labels(Claim(at=0.0, node="n1"), 2, 1) == ("n1:0", "n1:1")
    assert gpu_labels(Claim(at=0.0, node="n1", gpus=("0",)), 0, 1) == ()


def test_gpus_of_further_nodes_have_their_own_numbers_once_these_are_told() -> None:
    each = followed(1, None, gpus=2, nodes=2)
    each.claim = Claim(at=120.0, node="n1", gpus=("4", "5"), others=("n2",))
    first = begun(each, at=130.0, mono=30.0)
    assert first is not None and first.labels == ("n1:4", "n1:5", "n2:?1", "n2:?2")
    with_begun(each, first)
    assert begun(each, at=140.0, mono=40.0) is None
    each.further = {1: Claim(at=150.0, node="n2", gpus=("0", "3"))}
    second = begun(each, at=160.0, mono=60.0)
    assert second is not None and second.labels == ("n1:4", "n1:5", "n2:0", "n2:3") == second.gpus
    # Nothing else of it changes, and it is told once.
    assert (second.at, second.mono, second.node) == (first.at, first.mono, first.node)
    with_begun(each, second)
    assert begun(each, at=170.0, mono=70.0) is None


def test_nodes_that_share_a_host_are_told_apart() -> None:
    """As those of Ray may; then the host's name alone would make two GPUs one."""
    claim, further = Claim(at=0.0, node="h", gpus=("1",)), {1: Claim(at=0.0, node="h", gpus=("1",))}
    assert gpu_labels(claim, 1, 2, further) == ("h:1", "h+1:1")


def test_a_nodes_clock_is_believed_as_far_as_it_can_be_right() -> None:
    for told, since in ((90.0, 100.0), (150.0, 150.0), (900.0, 200.0)):
        each = followed(1, None)
        each.claim = Claim(at=told, node="n1", gpus=("0",))
        found = begun(each, at=200.0, mono=20.0)
        assert found is not None and found.at == since and found.mono == 20.0 - (200.0 - since)
