"""The picture of a run's jobs where an engine beyond this machine ran them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.jobs.attempts import attempt_of, settled

from gpuherd.jobs import Job, JobState, Queue
from gpuherd.jobs.records import AttemptState, Begun, Handed, StartRecord
from gpuherd.posttrain.report.jobs import read_timeline


def test_time_in_the_engines_line_is_none_that_a_job_ran(tmp_path: Path) -> None:
    names = ("CD_a_r0_collect_0", "CD_a_r0_train", "CD_a_r0_evaluate")
    with Queue(tmp_path / "queue.sqlite") as queue:
        queue.submit([Job(name=name, argv=("true",)) for name in names])
        run = queue.begin_run(0.0, 0.0, engine="slurm")
        for number, queued in enumerate(queue.head(9, 10.0), start=1):
            attempt = replace(attempt_of(queued, number), process=None, handed=Handed("slurm", "b", number))
            queue.record_starts([StartRecord(attempt, 0.0, None)], run)
        begun = Begun(attempt=1, node="n1", gpus=("n1:0",), labels=("n1:0",), at=3601.0, mono=3601.0)
        queue.record_begun([begun, replace(begun, attempt=2, gpus=(), labels=())])
        done = [settled(number, AttemptState.DONE, JobState.DONE, 7201.0) for number in (1, 2)]
        queue.record_ends([*done, settled(3, AttemptState.REQUEUED, JobState.WAITING, 7201.0)])
    found = read_timeline(tmp_path / "queue.sqlite", ["CD"])
    assert [(bar.job, bar.lanes, bar.start, bar.end) for bar in found.bars] == [
        ("CD_a_r0_collect_0", ("GPU n1:0",), 0.0, 3600.0),
        ("CD_a_r0_train", ("CPU of n1",), 0.0, 3600.0),
    ]
    assert found.gpu_hours == {"collect": 1.0, "train": 0.0}
