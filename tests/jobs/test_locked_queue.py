"""Another program keeps the queue's file locked: somebody has stopped a ``gpuherd submit`` in the middle, say."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from gpuherd.jobs import DispatchOptions, Event, EventKind, Job, Queue, RunDirectory, run_jobs

PATIENCE_S = 60.0


def wait_for(path: Path, text: str = "") -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and text in path.read_text()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_dispatcher_waits_for_it_and_what_has_ended_meanwhile_is_recorded_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    locked, ran, was_told = tmp_path / "locked", tmp_path / "ran", []
    has_started = threading.Event()

    def keep_locked() -> None:
        assert has_started.wait(PATIENCE_S)
        with closing(sqlite3.connect(run.queue, timeout=PATIENCE_S, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked.touch()
            # The dispatcher has given up for a moment, and says why.
            was_told.append(wait_for(run.state_file, "the queue can't be written (database is locked)"))
            other.execute("ROLLBACK")

    def on_event(event: Event) -> None:
        if event.kind is EventKind.STARTED:
            has_started.set()

    other = threading.Thread(target=keep_locked)
    other.start()
    script = f"while [ ! -e {locked} ]; do sleep 0.02; done; echo once >>{ran}"
    try:
        jobs = [Job(name="a", argv=("sh", "-c", script), gpus=0)]
        outcome = run_jobs(jobs, DispatchOptions(), run, on_event=on_event, grace_s=0.3)
    finally:
        other.join()
    assert was_told == [True]
    assert (outcome.done, ran.read_text()) == (1, "once\n")
    with closing(Queue(run.queue)) as queue:
        assert [attempt.state for attempt in queue.attempts()] == ["done"]
