"""A job is added again, otherwise, in the moment between a decision and the record of its start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.jobs.attempts import attempt_of

from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.queue.store import Overtaken, Queue
from gpuherd.jobs.records import QueuedJob, StartRecord

OLD = Job(name="a", argv=("old",))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue.sqlite") as made:
        made.add([OLD, Job(name="b", argv=("true",))])
        yield made


def start(queue: Queue, decided: tuple[QueuedJob, ...]) -> None:
    """Records the start of what was decided on."""
    records = [attempt_of(queued, number) for number, queued in enumerate(decided, 1)]
    run = queue.begin_run(time.time(), 0.0)
    for record in reversed(records):
        queue.record_starts([StartRecord(record, 0.0, None)], run)


def add_elsewhere(queue: Queue, job: Job) -> None:
    with Queue(queue.path, check=False) as other:
        other.add([job])


@pytest.mark.parametrize(
    "again",
    [Job(name="a", argv=("new",)), Job(name="a", argv=("old",), needs=("b",)), Job(name="a", argv=("old",), gpus=2)],
    ids=["another command", "it needs one that is not done", "more GPUs"],
)
def test_it_is_not_taken_for_started(queue: Queue, again: Job) -> None:
    (decided, *_) = queue.head(9, time.time())
    add_elsewhere(queue, again)
    with pytest.raises(Overtaken, match="a was changed"):
        start(queue, (decided,))
    assert queue.states()["a"] is JobState.WAITING
    assert not list(queue.attempts())


def test_the_same_job_again_changes_nothing(queue: Queue) -> None:
    decided = queue.head(9, time.time())
    add_elsewhere(queue, OLD)
    start(queue, decided)
    assert set(queue.states().values()) == {JobState.RUNNING}
