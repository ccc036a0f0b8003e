"""Dispatchers at work, end to end: limits, sharing, giving way, GPUs that fail, a full disk. Real processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.patience import Gate, wait_until
from tests.small_disk import fill, mounted

from gpuherd.jobs import DispatchOptions, Event, EventKind, Job, Outcome, Queue, RunDirectory, run_jobs
from gpuherd.jobs.records import QueuedJob, ResourceRequest, RunSnapshot
from gpuherd.jobs.scheduler.memory import FamilyMemory
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
FAST: dict[str, object] = {"max_checks": 1, "check_interval": 0.02, "cpu_jobs": 4}


class Run:
    """A run folder, a run in a thread, and what was told."""

    def __init__(self, root: Path):
        self.directory = RunDirectory(root)
        self.events: list[Event] = []
        self.outcome: Outcome | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, jobs: list[Job], **options: object) -> Outcome:
        wanted = DispatchOptions(**{**FAST, **options})  # type: ignore[arg-type]
        self.outcome = run_jobs(jobs, wanted, self.directory, on_event=self.events.append, grace_s=0.3)
        return self.outcome

    def start(self, jobs: list[Job], **options: object) -> None:
        self._thread = threading.Thread(target=self, args=(jobs,), kwargs=options)
        self._thread.start()

    def join(self) -> Outcome:
        assert self._thread is not None
        self._thread.join(100)
        assert self.outcome is not None
        return self.outcome

    def told(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]

    def notices(self) -> str:
        return "\n".join(event.text for event in self.told(EventKind.NOTICE))

    def stands_still(self, job: str) -> bool:
        """Whether its main process is stopped (T), or waits (D) for a child that was stopped between vfork and exec."""
        return Path(f"/proc/{self.pid(job)}/stat").read_text().rpartition(")")[2].split()[0] in "TD"

    def reason(self, job: str) -> str:
        """What the queue says of a job that waits."""
        with closing(sqlite3.connect(self.directory.queue)) as queue:
            return str(queue.execute("SELECT reason FROM jobs WHERE name = ?", (job,)).fetchone()[0])

    def pid(self, job: str) -> int:
        with Queue(self.directory.queue, check=False) as queue:
            found = next(record.process for record in queue.running() if record.queued.job.name == job)
        assert found is not None
        return found.pid


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher looks at GPUs and disks four times as often as usual, and a stranger counts as soon."""
    for name in (
        "gpu.manager.WATCH_EVERY_S",
        "gpu.usage.PRESENCE_S",
        "attempts.preempt.DISK_CHECK_S",
        "dispatcher._SPACE_AGAIN_S",
    ):
        module, _, constant = f"gpuherd.jobs.{name}".rpartition(".")
        usual = getattr(sys.modules[module], constant)
        monkeypatch.setattr(f"{module}.{constant}", usual / 4)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def sh(name: str, script: str, **more: object) -> Job:
    return Job(name=name, argv=("/bin/sh", "-c", script), **{"gpus": 0, **more})  # type: ignore[arg-type]


def gpu_job(name: str, uses_mb: int, hold: float, *, ramp: float = 0.2, **more: object) -> Job:
    words = ("--memory-mb", str(uses_mb), "--ramp", str(ramp), "--hold", str(hold))
    return Job(name=name, argv=(sys.executable, "-m", "gpuherd.standin.job", *words), **more)  # type: ignore[arg-type]


def reports(times: int, stage: str) -> str:
    """Words of Python that tell progress so many times, ten a second, and then hang."""
    return (
        "import time; from gpuherd.engines.progress import report\n"
        f"for i in range({times}): report(i, None, {stage}); time.sleep(0.1)\n"
    )


def test_a_job_that_hangs_is_found_by_its_heartbeat_and_one_that_beats_is_not(run: Run) -> None:
    hangs = Job(name="hangs", argv=(sys.executable, "-c", reports(3, "'a'") + "time.sleep(60)"), gpus=0, retries=0)
    beats = Job(name="beats", argv=(sys.executable, "-c", reports(45, "'a'")), gpus=0, retries=0)
    outcome = run([hangs, beats], heartbeat=3.0)
    assert (outcome.done, outcome.failed) == (1, 1)
    failure = outcome.failures[0]
    assert (failure.job, failure.failure) == ("hangs", "no heartbeat")
    assert "no progress for 3 s" in failure.reason


def test_a_stage_has_its_own_limit(run: Run) -> None:
    slow = Job(name="slow", argv=(sys.executable, "-c", reports(400, "'svd'")), gpus=0, retries=0, stage_timeout_s=1.0)
    quick = Job(
        name="quick", argv=(sys.executable, "-c", reports(50, "str(i // 10)")), gpus=0, retries=0, stage_timeout_s=4.0
    )
    outcome = run([slow, quick])
    assert [(f.job, f.failure) for f in outcome.failures] == [("slow", "timeout")]
    assert "in stage svd" in outcome.failures[0].reason


def test_the_runs_time_limit_is_for_jobs_without_one(run: Run) -> None:
    outcome = run([sh("a", "sleep 30", retries=0), sh("b", "sleep 1", retries=0, timeout_s=60.0)], timeout=0.3)
    assert [f.job for f in outcome.failures] == ["a"]


def test_the_cores_of_a_job_are_the_threads_of_its_libraries(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody may have more main memory than there is."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    print_it = ("sh", "-c", "echo threads=$OMP_NUM_THREADS,$MKL_NUM_THREADS")
    outcome = run(
        [
            Job(name="said", argv=print_it, gpus=0, cpus=3),
            Job(name="own", argv=print_it, gpus=0, cpus=3, env={"OMP_NUM_THREADS": "5"}),
            Job(name="large", argv=("true",), gpus=0, host_memory_mb=2**40),
        ]
    )
    assert (outcome.done, outcome.failed) == (2, 1)
    assert "of main memory; there are" in outcome.failures[0].reason
    logs = {name: run.directory.attempt_log(name, 1).read_text() for name in ("said", "own")}
    assert "threads=3,3" in logs["said"] and "threads=5," in logs["own"]


def test_max_concurrent_and_longest_first(run: Run) -> None:
    run([sh(f"j{cost}", "true", cost=cost) for cost in (1, 5, 3)], max_concurrent=1, order="longest")
    assert [event.job for event in run.told(EventKind.STARTED)] == ["j5", "j3", "j1"]


def test_the_run_time_of_an_earlier_round_is_no_wait_of_a_later_one(run: Run) -> None:
    run([sh("a", "sleep 1.5"), sh("b", "true", round=1)])
    with Queue(run.directory.queue, check=False) as queue:
        attempts = {attempt.job: attempt for attempt in queue.attempts()}
    ended_at = attempts["a"].ended_at
    assert ended_at is not None
    assert attempts["b"].wait_s <= attempts["b"].started_at - ended_at + 0.01


# --- sharing -------------------------------------------------------------------------------------------------------


def most_at_once(run: Run) -> int:
    at_once = most = 0
    for event in run.events:
        at_once += {EventKind.STARTED: 1, EventKind.DONE: -1, EventKind.RETRY: -1}.get(event.kind, 0)
        most = max(most, at_once)
    return most


def test_jobs_share_a_gpu_while_the_sum_of_what_they_declare_fits(run: Run, standin: Standin) -> None:
    """Each takes its memory only a while after its start, as training does."""
    standin("1x40GB")
    jobs = [gpu_job(f"j{i}", 9_000, 0.3, memory_mb=9_500, share=True, family="f") for i in range(9)]
    outcome = run(jobs, share=True)
    assert (outcome.done, outcome.failed) == (9, 0)
    assert run.told(EventKind.RETRY) == []
    assert most_at_once(run) == 4
    with Queue(run.directory.queue) as queue:
        assert all(row.shared_mb == 9_500 for row in queue.attempts())


def test_without_the_option_nobody_shares(run: Run, standin: Standin) -> None:
    standin("1x40GB")
    run([sh(f"j{i}", "sleep 0.1", gpus=1, memory_mb=100, share=True) for i in range(3)])
    assert most_at_once(run) == 1


def test_who_runs_out_of_memory_on_a_shared_gpu_gets_one_for_itself(run: Run, standin: Standin) -> None:
    standin("1x40GB")
    liar = gpu_job("liar", 30_000, 0.1, ramp=1.5, memory_mb=1_000, share=True, retries=0)
    other = gpu_job("other", 20_000, 4.5, ramp=0.0, memory_mb=20_000, share=True)
    outcome = run([other, liar], share=True)
    assert (outcome.done, outcome.failed) == (2, 0)
    assert "on a GPU for itself" in run.told(EventKind.RETRY)[0].text
    with Queue(run.directory.queue) as queue:
        rows = [row for row in queue.attempts() if row.job == "liar"]
    assert [row.shared_mb for row in rows] == [1_000, None]


def test_who_uses_more_than_it_declared_is_told_of_and_its_family_is_believed_less(run: Run, standin: Standin) -> None:
    standin("1x40GB")
    first = gpu_job("first", 25_000, 3.0, ramp=0.0, memory_mb=2_000, share=True, family="f")
    assert run([first], share=True).done == 1
    assert "first uses 25000 MB and declared 2000" in run.notices()
    with Queue(run.directory.queue) as queue:
        assert queue.families(["f"]) == {"f": FamilyMemory(peak_mb=25_000, measured=1)}
    run.events.clear()
    # Two of that family don't fit side by side, whatever they declare.
    more = [sh(f"j{i}", "sleep 0.3", gpus=1, memory_mb=2_000, share=True, family="f") for i in range(2)]
    assert run(more, share=True).done == 2
    assert most_at_once(run) == 1


def test_jobs_of_a_family_that_was_seen_to_use_little_share_a_gpu(run: Run, standin: Standin) -> None:
    standin("1x40GB")
    jobs = [gpu_job(f"j{i}", 5_000, 0.5, memory_mb=30_000, share=True, family="f") for i in range(3)]
    run.directory.create()
    with Queue(run.directory.queue) as queue:
        for _ in range(2):
            queue.learn("f", 8_000, well=True)
    assert run(jobs, share=True).done == 3
    assert most_at_once(run) == 3
    with Queue(run.directory.queue) as queue:
        assert [row.shared_mb for row in queue.attempts()] == [10_256] * 3


def test_where_one_of_a_family_ran_out_of_memory_the_next_gets_a_larger_gpu(run: Run, standin: Standin) -> None:
    standin("1x24GB+1x40GB")
    first = gpu_job("first", 30_000, 0.1, ramp=0.5, memory_mb=20_000, family="f", retries=1)
    assert run([first], gpu_list=(0, 1)).done == 1
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("0",), ("1",)]
    run.events.clear()
    second = gpu_job("second", 30_000, 0.1, ramp=0.5, memory_mb=20_000, family="f", retries=0)
    assert run([second], gpu_list=(0, 1)).done == 1
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("1",)]


def test_what_others_needed_never_fails_a_job_that_asked_for_more(run: Run, standin: Standin) -> None:
    standin("1x16GB+1x40GB")
    run.directory.create()
    with Queue(run.directory.queue) as queue:
        for _ in range(2):
            queue.learn("f", 8_000, well=True)
    large = gpu_job("large", 28_000, 0.1, ramp=0.5, memory_mb=30_000, family="f", retries=0)
    assert run([large], gpu_list=(0, 1)).done == 1
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("0",), ("1",)]
    assert "on a GPU with 30000 MB, as it asked" in run.told(EventKind.RETRY)[0].text
    with Queue(run.directory.queue) as queue:
        # It had a GPU of 16 GB, not the 30000 MB that it asked for.
        assert (queue.families(["f"])["f"].ran_out_mb or 0) <= 16 * 1024


@pytest.mark.slow
def test_who_ran_out_on_the_largest_gpu_is_tried_there_again_and_on_no_smaller_one(run: Run, standin: Standin) -> None:
    standin("1x24GB+1x40GB")
    large = gpu_job("large", 50_000, 0.1, ramp=0.5, memory_mb=20_000, retries=2)
    assert run([large], gpu_list=(1, 0)).failed == 1
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("1",)] * 3


def test_a_family_says_nothing_of_a_job_on_more_gpus_than_it_asked_for() -> None:
    job = Job(name="j", argv=("x",), gpus=1, gpus_at_most=2, memory_mb=20_000, family="f")
    queued = QueuedJob(1, job, 0, 1, 0.0, frozenset(), 0.0)
    assert (queued.family, queued.may_ask_less) == ("f", True)
    wider = replace(queued, adapted=ResourceRequest(2, 20_000, False))
    assert (wider.family, wider.may_ask_less) == (None, False)
    assert not replace(queued, avoid=frozenset({"GPU-a"})).may_ask_less


# --- strangers and GPUs that fail ------------------------------------------------------------------------------------


def test_a_job_goes_back_into_the_queue_for_a_stranger(run: Run, standin: Standin, gate: Gate) -> None:
    machine = standin("2x40GB")
    run.start([sh("j", gate.wait, gpus=1)], yield_to_others="requeue", gpu_list=(0, 1))
    wait_until(lambda: bool(run.told(EventKind.STARTED)))
    stranger = machine.occupy(0, 3_000)
    wait_until(lambda: len(run.told(EventKind.STARTED)) == 2)
    gate.open()
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("0",), ("1",)]
    assert "goes back into the queue" in run.notices()
    assert run.join().done == 1
    with Queue(run.directory.queue) as queue:
        assert [row.state for row in queue.attempts()] == ["requeued", "done"]
    stranger.release()


def test_a_job_stands_still_for_a_stranger_and_goes_on_after(run: Run, standin: Standin, gate: Gate) -> None:
    machine = standin("1x40GB")
    run.start([sh("j", gate.wait.replace("sleep", "echo x; sleep"), gpus=1)], yield_to_others="pause")
    wait_until(lambda: bool(run.told(EventKind.STARTED)))
    stranger = machine.occupy(0, 3_000)
    wait_until(lambda: "is paused" in run.notices())
    log = run.directory.attempt_log("j", 1)
    wait_until(lambda: run.stands_still("j"))
    before = log.read_text()
    time.sleep(0.5)
    assert log.read_text() == before
    gate.open()
    stranger.release()
    assert run.join().done == 1
    assert "goes on: nobody else uses its GPUs" in run.notices()
    with Queue(run.directory.queue) as queue:
        (row,) = queue.attempts()
    assert row.paused_s > 0.5


def test_a_gpu_that_the_driver_reports_is_left_out(run: Run, standin: Standin, gate: Gate) -> None:
    machine = standin("2x40GB")
    run.start([sh("bad", f"{gate.wait}; exit 1", gpus=1, retries=1)], gpu_list=(0, 1))
    wait_until(lambda: bool(run.told(EventKind.STARTED)))
    machine.xid(0, 79)
    gate.open()
    run.join()
    with Queue(run.directory.queue) as queue:
        assert [row.failure_class for row in queue.attempts()] == ["GPU fault", "crash"]
        assert list(queue.gpu_health()) == [machine.uuid(0), machine.uuid(1)]
    # The next start knows it too.
    run.events.clear()
    assert run([sh(f"k{i}", "true", gpus=1) for i in range(3)], gpu_list=(0, 1)).done == 3
    assert {event.gpus for event in run.told(EventKind.STARTED)} == {("1",)}


def test_more_memory_after_running_out_of_it(run: Run, standin: Standin) -> None:
    """A larger GPU though the smaller one is free and preferred; the retry's wish is for the larger kind."""
    standin("2x8GB+1x40GB")
    outcome = run([gpu_job("big", 20_000, 0.0)], gpu_list=(0, 1, 2))
    assert outcome.done == 1
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("0",), ("2",)]
    assert "on a GPU of more than" in run.told(EventKind.RETRY)[0].text


# --- the disk ------------------------------------------------------------------------------------------------------


class Pictures:
    every_s = 0.05

    def __init__(self) -> None:
        self.waits: list[str | None] = []

    def event(self, event: Event) -> None:
        pass

    def snapshot(self, snapshot: RunSnapshot) -> None:
        self.waits.append(snapshot.waiting_for)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB of its own."""
    with mounted(tmp_path / "disk", "24m") as folder:
        yield folder


def test_below_the_least_space_jobs_pause_and_none_starts(small_disk: Path, gate: Gate) -> None:
    run = Run(small_disk / "run")
    ticks = gate.wait.replace("sleep", "echo x; sleep")
    run.start([sh("j", ticks), sh("k", "true", needs=("j",)), sh("l", "sleep 0.4"), sh("m", "true", needs=("l",))])
    # Default: --min-disk 200 MB, of which there are not so many here.
    wait_until(lambda: "at least 200 MB must be free (--min-disk)" in run.notices())
    time.sleep(0.3)
    assert run.told(EventKind.STARTED) == []
    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    wait_until(lambda: len(run.told(EventKind.STARTED)) >= 2)
    big = fill(small_disk, leave=10 << 20)
    wait_until(lambda: "what runs is paused" in run.notices().partition("space on the disk again")[2])
    log = run.directory.attempt_log("j", 1)
    wait_until(lambda: run.stands_still("j"))
    before = log.read_text()
    time.sleep(0.4)
    assert log.read_text() == before
    gate.open()
    big.unlink()
    assert run.join().done == 4


def test_a_job_that_fails_where_little_space_is_holds_no_other_job_up(small_disk: Path, run: Run) -> None:
    """24 MB are less than --min-disk, also on a file system that can't be written at all; neither is the cause."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    bug = sh("bug", "exit 3", cwd=str(small_disk), retries=0)
    read_only = sh("read only", "echo x > x", cwd=str(small_disk), retries=0)
    full = sh("no space", "echo No space left on device; exit 1", cwd=str(small_disk), retries=0)
    run.start([bug, read_only, full, *(sh(f"j{i}", "sleep 0.2") for i in range(8))])
    wait_until(lambda: run.outcome is not None, within_s=20.0)
    assert (run.join().done, run.join().failed) == (8, 3)
    assert "--min-disk" not in run.notices()


def test_a_job_whose_own_disk_is_full_waits_for_space_there_and_all_others_go_on(small_disk: Path, run: Run) -> None:
    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    big = fill(small_disk)
    writes = sh("writes", "head -c 1000000 /dev/zero > x && sync", cwd=str(small_disk), retries=0)
    run.start([writes, *(sh(f"j{i}", "sleep 0.3") for i in range(8))])
    wait_until(lambda: len(run.told(EventKind.DONE)) == 8)
    wait_until(lambda: "at least 200 MB must be free (--min-disk)" in run.reason("writes"))
    assert [event.job for event in run.told(EventKind.RETRY)] == ["writes"]
    assert "what runs is paused" not in run.notices()
    big.unlink()
    assert run.join().done == 9
    assert len(run.told(EventKind.RETRY)) == 1


def test_an_end_that_can_not_be_written_is_kept_until_it_can(small_disk: Path, gate: Gate) -> None:
    run = Run(small_disk / "run")
    jobs = [sh("j", gate.wait), sh("k", "true", needs=("j",)), *(sh(f"x{i}", gate.wait) for i in range(3))]
    run.start(jobs, min_disk=0)
    wait_until(lambda: len(run.told(EventKind.STARTED)) == 4)
    big = fill(small_disk)
    gate.open()
    time.sleep(1.8)
    # The queue's file may have a page to spare for the first of them; not for all that ended.
    assert run.outcome is None
    big.unlink()
    assert run.join().done == 5
    with Queue(run.directory.queue) as queue:
        assert [row.state for row in queue.attempts()] == ["done"] * 5
