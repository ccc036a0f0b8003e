"""Our own jobs that hold GPUs without using them: when they are idle, and what becomes of them (``--on-idle``)."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu
from tests.jobs.attempts import attempt_of, settled
from tests.patience import Gate, wait_until

from gpuherd.errors import UsageError
from gpuherd.gpus.idle_held import HOLE_S
from gpuherd.jobs import DispatchOptions, Event, EventKind, Job, Outcome, Queue, RunDirectory, run_jobs
from gpuherd.jobs.attempts import MOST_IDLE_ENDS
from gpuherd.jobs.completion import NoFault
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.gpu.idle_jobs import FIRST_USE, IdleAction, JobIdleRows, JobLook, idle_actions, is_used
from gpuherd.jobs.job import JobState
from gpuherd.jobs.options import ON_IDLE, OnIdle, retuned
from gpuherd.jobs.records import AttemptState, PauseReason, StartRecord
from gpuherd.standin.machine import SimulatedMachine

AFTER_S = 30.0
Standin = Callable[..., SimulatedMachine]


@dataclass
class Story:
    """Looks at one job, one after the other, with what the dispatcher would keep."""

    mode: OnIdle = "requeue"
    after_s: float | None = AFTER_S
    rows: JobIdleRows = field(default_factory=dict)

    def look(self, now: float, *, used: bool = False, paused: bool = False) -> list[IdleAction]:
        looks = [JobLook(1, "train", ("0", "1"), used, paused)]
        actions, self.rows = idle_actions(self.mode, self.after_s, self.rows, looks, now)
        return list(actions)


def test_a_job_that_stops_computing_is_idle_after_the_time() -> None:
    story = Story()
    assert story.look(0.0, used=True) == []
    assert story.look(29.9) == []
    (action,) = story.look(30.0)
    assert (action.kind, action.attempt, action.idle_s) == ("requeue", 1, 30.0)
    assert action.sentence == "has not used GPU 0, 1 for 30 s: it is ended and waits again"


def test_a_job_that_has_not_computed_yet_may_load_its_data() -> None:
    story = Story()
    times = [now * 1.0 for now in range(0, int(AFTER_S * FIRST_USE), 10)]
    assert [story.look(now) for now in times] == [[]] * len(times)
    (action,) = story.look(AFTER_S * FIRST_USE)
    assert action.sentence == "has never used GPU 0, 1 for 2 min 0 s: it is ended and waits again"


def test_it_is_reported_once_and_again_after_it_has_computed() -> None:
    story = Story("notify")
    story.look(0.0, used=True)
    assert [len(story.look(now)) for now in (10.0, 30.0, 40.0, 50.0)] == [0, 1, 0, 0]
    story.look(60.0, used=True)
    assert [len(story.look(now)) for now in (70.0, 90.0, 100.0)] == [0, 1, 0]


def test_what_was_only_reported_is_ended_once_the_option_says_so() -> None:
    story = Story("notify")
    story.look(0.0, used=True)
    assert len(story.look(30.0)) == 1
    story.mode = "cancel"
    assert [action.kind for action in story.look(32.0)] == ["cancel"]


def test_a_paused_job_is_not_idle_and_begins_anew() -> None:
    story = Story()
    story.look(0.0, used=True)
    for now in (20.0, 40.0, 60.0):
        assert story.look(now, paused=True) == []
    assert story.look(89.0) == []
    assert len(story.look(90.0)) == 1


def test_time_without_looks_does_not_count() -> None:
    story = Story()
    story.look(0.0, used=True)
    assert story.look(HOLE_S + 1) == []
    assert len(story.look(HOLE_S + 1 + AFTER_S)) == 1


def test_without_the_option_nothing_is_idle() -> None:
    story = Story(after_s=None)
    assert [story.look(now * 50.0) for now in range(20)] == [[]] * 20


def test_a_gpu_that_can_not_be_read_counts_as_used() -> None:
    idle, busy, unknown = (gpu(n, utilisation_percent=use) for n, use in enumerate((0, 3, None)))
    broken = gpu(3, utilisation_percent=0, problem="lost")
    gpus = {one.uuid: one for one in (idle, busy, unknown, broken)}
    assert not is_used(gpus, [idle.uuid])
    for other in (busy, unknown, broken):
        assert is_used(gpus, [idle.uuid, other.uuid])
    assert is_used(gpus, ["GPU-gone"])


@given(
    st.sampled_from(ON_IDLE),
    st.lists(st.tuples(st.floats(0.1, 40.0), st.sampled_from(["idle", "idle", "used", "paused"])), max_size=40),
)
def test_no_job_is_ended_that_was_used_or_paused_within_the_time(mode: OnIdle, looks: list[tuple[float, str]]) -> None:
    story, now, last, computed = Story(mode), 0.0, None, False
    for wait, state in looks:
        now += wait
        last = now if last is None or state != "idle" else last
        computed = computed or state == "used"
        actions = story.look(now, used=state == "used", paused=state == "paused")
        limit = AFTER_S if computed else AFTER_S * FIRST_USE
        if actions:
            assert (state, len(actions), actions[0].kind) == ("idle", 1, mode)
            assert now - last >= limit
        elif state == "idle" and mode != "notify":
            assert now - last < limit
    assert story.rows.keys() <= {1}


def test_rows_of_jobs_that_have_ended_are_forgotten() -> None:
    story = Story()
    story.look(0.0)
    assert idle_actions("notify", AFTER_S, story.rows, [], 1.0) == ((), {})


def test_the_options_can_be_set_in_a_running_dispatcher_and_are_for_this_machine() -> None:
    options = retuned(DispatchOptions(), {"idle-after": "30m", "on-idle": "pause"})
    assert (options.idle_after, options.on_idle) == (1800.0, "pause")
    assert retuned(options, {"idle-after": "never"}).idle_after is None
    with pytest.raises(UsageError, match="on-idle"):
        retuned(options, {"on-idle": "pausee"})
    with pytest.raises(UsageError, match="above 0"):
        DispatchOptions(idle_after=-1.0)
    with pytest.raises(UsageError, match="--idle-after is for this machine"):
        DispatchOptions(engine="slurm", idle_after=60.0)


# --- real jobs ---------------------------------------------------------------------------------------------------


class Run:
    """A run in a thread, and what was reported."""

    def __init__(self, root: Path):
        self.directory = RunDirectory(root)
        self.events: list[Event] = []
        self.outcome: Outcome | None = None
        self._thread: threading.Thread | None = None

    def start(self, job: Job, **options: object) -> None:
        wanted = {"max_checks": 1, "check_interval": 0.02, "idle_after": 0.6, **options}
        dispatch = DispatchOptions(**wanted)  # type: ignore[arg-type]

        def work() -> None:
            self.outcome = run_jobs([job], dispatch, self.directory, on_event=self.events.append, grace_s=5.0)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def join(self) -> Outcome:
        assert self._thread is not None
        self._thread.join(100)
        assert self.outcome is not None
        return self.outcome

    def told(self, kind: EventKind) -> list[str]:
        return [event.text for event in self.events if event.kind is kind]

    def attempts(self) -> list[tuple[str, str | None]]:
        with Queue(self.directory.queue, check=False) as queue:
            return [(row.state, row.failure_class) for row in queue.attempts()]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuherd.jobs.gpu.manager.WATCH_EVERY_S", 0.1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def machine(standin: Standin) -> SimulatedMachine:
    """One GPU, which is at work until a test says otherwise."""
    made = standin("1x40GB")
    made.set_utilisation(0, 80)
    return made


def sh(script: str, **more: object) -> Job:
    return Job(name="j", argv=("/bin/sh", "-c", script), gpus=1, **more)  # type: ignore[arg-type]


def wait_until_seen(run: Run) -> None:
    """Until it has started, and has been seen to use its GPU."""
    wait_until(lambda: bool(run.told(EventKind.STARTED)))
    time.sleep(0.5)


def test_an_idle_job_is_reported_and_notified_and_goes_on(run: Run, machine: SimulatedMachine, tmp_path: Path) -> None:
    gate, notices = Gate(tmp_path / "gate"), tmp_path / "notices"
    script = tmp_path / "note.py"
    script.write_text(f"import sys; open({str(notices)!r}, 'a').write(sys.stdin.read() + '\\n')")
    run.start(sh(gate.wait), notify_command=f"{sys.executable} {script}")
    wait_until_seen(run)
    assert run.told(EventKind.IDLE) == []
    machine.set_utilisation(0, 0)
    wait_until(lambda: notices.exists() and "idle" in notices.read_text())
    gate.open()
    assert run.join().done == 1
    (text,) = run.told(EventKind.IDLE)
    assert text.startswith("j: has not used GPU 0 for ")
    assert text.endswith(": it goes on")
    notice = json.loads(notices.read_text().splitlines()[0])
    assert (notice["kind"], text in notice["text"]) == ("idle", True)
    assert run.attempts() == [("done", None)]


@pytest.mark.slow
def test_an_idle_job_is_paused_until_a_person_resumes_it(run: Run, machine: SimulatedMachine, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run.start(sh(gate.wait), on_idle="pause")
    wait_until_seen(run)
    machine.set_utilisation(0, 0)
    wait_until(lambda: bool(run.told(EventKind.IDLE)))
    assert "it is paused; gpuherd resume lets it go on" in run.told(EventKind.IDLE)[0]
    machine.set_utilisation(0, 80)
    gate.open()
    time.sleep(0.5)
    assert run.outcome is None, "it stands still, though nobody else uses its GPU"
    with Queue(run.directory.queue, check=False) as queue:
        (record,) = queue.running()
    assert record.paused == {"idle"}
    assert send(run.directory, Request(ControlKind.RESUME, jobs=("j",))).ok
    assert run.join().done == 1
    assert len(run.told(EventKind.IDLE)) == 1
    with Queue(run.directory.queue, check=False) as queue:
        (row,) = queue.attempts()
    assert row.paused_s > 0.4


def test_an_idle_job_goes_back_into_the_queue_with_sigterm_and_loses_no_try(
    run: Run, machine: SimulatedMachine, tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoint"
    script = f"[ -e {saved} ] && exit 0; trap 'echo state > {saved}; exit 3' TERM; while :; do sleep 0.05; done"
    run.start(sh(script, retries=0), on_idle="requeue")
    wait_until_seen(run)
    machine.set_utilisation(0, 0)
    assert run.join().done == 1
    assert run.attempts() == [("requeued", None), ("done", None)]
    assert any("did not use its GPUs; it waits again" in text for text in run.told(EventKind.REQUEUED))


def test_a_job_that_is_idle_again_and_again_fails_with_the_reason(run: Run, machine: SimulatedMachine) -> None:
    machine.set_utilisation(0, 0)
    run.start(sh("exec sleep 60", retries=5), on_idle="requeue", idle_after=0.1)
    assert run.join().failed == 1
    assert run.attempts() == [("requeued", None)] * MOST_IDLE_ENDS + [("failed", "idle")]
    (failure,) = run.outcome.failures  # type: ignore[union-attr]
    assert "had not used its GPUs" in failure.reason
    assert f"as in {MOST_IDLE_ENDS} attempts before" in failure.reason


def test_an_idle_job_is_cancelled(run: Run, machine: SimulatedMachine) -> None:
    run.start(sh("exec sleep 60"), on_idle="cancel")
    wait_until_seen(run)
    machine.set_utilisation(0, 0)
    outcome = run.join()
    assert (outcome.cancelled, outcome.failed) == (1, 0)
    (text,) = run.told(EventKind.CANCELLED)
    assert "cancelled by gpuherd: it has not used GPU 0 for" in text


def test_other_requeues_between_do_not_count_and_a_failure_ends_the_row(tmp_path: Path) -> None:
    ends = iter(range(1, 100))
    with Queue(tmp_path / "queue.sqlite") as queue:
        queue.submit([Job(name="j", argv=("true",), gpus=0, retries=9)])
        began = queue.begin_run(0.0, 0.0)

        def end(state: AttemptState, reason: str) -> int:
            (queued,) = queue.head(1, 1e12)
            record = attempt_of(queued, next(ends))
            queue.record_starts([StartRecord(record, 0.0, None)], began)
            here = queue.ends_in_a_row(queued.id, NoFault.IDLE)
            queue.record_ends([settled(record, state, JobState.WAITING, reason=reason)])
            return here

        idle = [end(AttemptState.REQUEUED, NoFault.IDLE) for _ in range(2)]
        assert (*idle, end(AttemptState.REQUEUED, NoFault.GAVE_WAY), end(AttemptState.REQUEUED, NoFault.IDLE)) == (
            0,
            1,
            2,
            2,
        )
        assert end(AttemptState.FAILED, "crash") == 3
        assert end(AttemptState.REQUEUED, NoFault.IDLE) == 0


def test_a_resume_ends_the_users_pause_and_that_for_idleness(tmp_path: Path) -> None:
    with Queue(tmp_path / "queue.sqlite") as queue:
        queue.submit([Job(name="j", argv=("true",), gpus=0)])
        (queued,) = queue.head(1, 1e12)
        queue.record_starts([StartRecord(attempt_of(queued, 1), 0.0, None)], queue.begin_run(0.0, 0.0))
        queue.mark_paused(1, PauseReason.IDLE, 1.0)
        queue.pause(("j",), "alice", 2.0)
        queue.mark_paused(1, PauseReason.DISK, 3.0)
        assert queue.resume(("j",), 4.0, 0.0).jobs == ("j",)
        assert queue.running()[0].paused == {PauseReason.DISK}
        assert queue.resume(("j",), 5.0, 0.0).refused == ("j is not paused",)
