"""Run folders as the pages find them: a queue with jobs in all states, under the hands of this very process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.jobs.attempts import settled

from gpuherd.engines.process_tree import identify
from gpuherd.jobs import FailureClass, Job, JobState, Queue, RunDirectory, clock
from gpuherd.jobs.records import AttemptRecord, AttemptState, StartRecord
from gpuherd.web.places import Place, Places, key_of

HOSTILE = "<b onmouseover=alert(1)>\x1b[31m'\"&{{7*7}}\u202e</b>"


def job(name: str, **more: Any) -> Job:
    return Job(**{"name": name, "argv": ("true", name), **more})


def place_of(root: Path) -> Place:
    """The run folder as the pages know it."""
    found = Places([root]).find(key_of(root))
    assert found is not None
    return found


class Scene:
    """A queue, and what a dispatcher would record there."""

    def __init__(self, root: Path):
        self.run = RunDirectory(root)
        self.run.create()
        self.queue = Queue(self.run.queue)
        self._run_id = self._last = 0

    @property
    def place(self) -> Place:
        return place_of(self.run.root)

    def begin(self) -> None:
        self._run_id = self.queue.begin_run(clock.wall(), clock.mono())

    def start(self, name: str, *, log: str = "", ago_s: float = 0.0) -> AttemptRecord:
        queued = next(each for each in self.queue.head(1000, clock.wall()) if each.job.name == name)
        process = identify(os.getpid())
        assert process is not None
        self._last += 1
        path = self.run.attempt_log(name, queued.attempts + 1)
        path.write_text(log)
        record = AttemptRecord(
            id=self._last,
            queued=queued,
            number=queued.attempts + 1,
            gpus=("GPU-a",),
            labels=("0",),
            process=process,
            log=str(path),
            started_at=clock.wall() - ago_s,
            started_mono=clock.mono() - ago_s,
        )
        self.queue.record_starts([StartRecord(record, 1.0, None)], self._run_id)
        return record

    def end(self, record: AttemptRecord, state: JobState, reason: str | None = None) -> None:
        well = state is JobState.DONE
        self.queue.record_ends(
            [
                settled(
                    record,
                    AttemptState.DONE if well else AttemptState.FAILED,
                    state,
                    clock.wall(),
                    mono=clock.mono(),
                    code=0 if well else 3,
                    failure=None if well else FailureClass.CRASH,
                    reason=reason,
                    again=None,
                )
            ]
        )

    def in_all_states(self) -> None:
        """done, failed (with two attempts at least), running with progress, waiting, held, cancelled."""
        names = ("good", "bad", "busy", "next", "held", "gone", "later")
        self.queue.submit([job(name) for name in names[:-1]] + [job("later", needs=("next",), gpus=2, memory_mb=2000)])
        self.begin()
        self.end(self.start("good"), JobState.DONE)
        self.end(self.start("bad", log="Traceback\nValueError: no\n"), JobState.FAILED, "ValueError: no")
        # Its process is this one: nothing may be asked for it that would end or stop it.
        self.busy = record = self.start("busy", log="epoch 1\nepoch 2\n", ago_s=30.0)
        self.run.attempt_progress(record.id).write_text('{"done": 3, "total": 12, "stage": "train"}')
        self.queue.pause(("held",), "me", clock.mono())
        self.queue.cancel(("gone",), "me")
