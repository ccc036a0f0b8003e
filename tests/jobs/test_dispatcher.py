"""``run_jobs`` with real processes and a real queue, on the CPU and on simulated GPUs."""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.errors import ExitCode, JobCannotFit, NoSuchGpu, QueueBusy
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs import Event, EventKind, FailureClass, GpuOptions, Job, Outcome, Queue, RunDirectory, run_jobs
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.records import RunSnapshot
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
FAST = GpuOptions(max_checks=2, check_interval=0.02, cpu_jobs=2)


class Run:
    """One run folder, and what was told about it."""

    def __init__(self, root: Path):
        self.directory = RunDirectory(root)
        self.events: list[Event] = []

    def __call__(self, jobs: list[Job], options: GpuOptions = FAST, rerun: Collection[str] = ()) -> Outcome:
        self.events = []
        return run_jobs(
            jobs, options, self.directory, rerun=rerun, on_event=self.events.append, display=None, grace_s=0.3
        )

    def told(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]

    @property
    def failures(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.directory.failures.read_text().splitlines()]

    def log(self, job: str, number: int = 1) -> str:
        return self.directory.attempt_log(job, number).read_text()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def sh(name: str, script: str, **more: object) -> Job:
    return Job(name=name, argv=("/bin/sh", "-c", script), **{"gpus": 0, **more})  # type: ignore[arg-type]


def test_a_short_job_has_a_kept_gpu_meanwhile_and_no_other_has(run: Run, standin: Standin) -> None:
    standin("2x40GB")
    jobs = [
        sh("first", "sleep 3", gpus=1, timeout_s=20.0),
        sh("large", "true", gpus=2),
        sh("unlimited", "true", gpus=1),
        sh("too-long", "true", gpus=1, timeout_s=30.0),
        *(sh(f"unlimited-{number}", "true", gpus=1) for number in range(12)),
        sh("short", "sleep 0.1", gpus=1, timeout_s=10.0),
    ]
    assert run(jobs, GpuOptions(max_gpus=2, max_checks=2, check_interval=0.02)).done == len(jobs)
    assert [event.job for event in run.told(EventKind.STARTED)][:3] == ["first", "short", "large"]


def test_jobs_run_on_the_cpu_and_are_not_run_again(run: Run, tmp_path: Path) -> None:
    jobs = [
        sh(f"j{i}", f"echo out {i}; echo $CUDA_VISIBLE_DEVICES; touch {tmp_path}/r{i}", result=f"{tmp_path}/r{i}")
        for i in range(5)
    ]
    outcome = run(jobs)
    assert (outcome.done, outcome.failed, outcome.waiting, outcome.exit_code) == (5, 0, 0, ExitCode.OK)
    assert run.log("j3") == "out 3\n\n"
    assert list(run.directory.attempts.iterdir()) == []
    assert run(jobs).done == 5
    assert run.events == []
    (tmp_path / "r2").unlink()
    run(jobs, rerun={"j4"})
    assert {event.job for event in run.told(EventKind.STARTED)} == {"j2", "j4"}
    figures = json.loads(run.directory.gpu_metrics.read_text())
    assert (figures["total_jobs"], figures["successful_jobs"], figures["attempts"], figures["runs"]) == (5, 5, 7, 3)


def test_no_more_than_cpu_jobs_at_once(run: Run) -> None:
    run([sh(f"j{i}", "sleep 0.1") for i in range(6)])
    at_once = most = 0
    for event in run.events:
        at_once += {EventKind.STARTED: 1, EventKind.DONE: -1}.get(event.kind, 0)
        most = max(most, at_once)
    assert most == 2


def test_a_failure_is_tried_again_on_another_gpu_and_told(run: Run, standin: Standin) -> None:
    standin("2x40GB")
    outcome = run(
        [
            sh("bad", "echo 'ValueError: \x1b[31mno'; exit 1", gpus=1, retries=1, title="a bad one"),
            sh("good", "true", gpus=1),
        ]
    )
    assert (outcome.done, outcome.failed, outcome.exit_code) == (1, 1, ExitCode.FAILED)
    assert [f.reason for f in outcome.failures] == ["ValueError: no"]
    first, second = run.failures
    assert first["gpus"] != second["gpus"]
    assert (first["class"], first["retried"], second["retried"], second["attempt"]) == ("crash", True, False, 2)
    assert first["last_lines"] == ["ValueError: no"]
    assert "bad.2.log" in run.told(EventKind.FAILED)[0].text
    # The same command again gives fresh tries.
    assert run([sh("bad", "true", gpus=1), sh("good", "true", gpus=1)]).failed == 0
    assert run.log("bad", 3) == ""


def test_bad_input_is_never_tried_again(run: Run) -> None:
    outcome = run([sh("bad", "echo 'row 3: no weights'; exit 65", retries=5)])
    assert [(f.failure, f.reason, f.attempt) for f in outcome.failures] == [
        (FailureClass.BAD_INPUT, "row 3: no weights", 1)
    ]


def test_a_success_without_its_result_is_a_failure(run: Run, tmp_path: Path) -> None:
    outcome = run([sh("empty", "true", result=str(tmp_path / "r"), retries=0)])
    assert outcome.failures[0].failure is FailureClass.NO_RESULT


def test_what_can_not_be_started_fails_with_the_reason_and_the_rest_runs(run: Run) -> None:
    jobs = [
        Job(name="none", argv=("no-such-program-here",), gpus=0),
        sh("lost", "true", cwd="/no/such"),
        sh("ok", "true"),
    ]
    outcome = run([*jobs, sh("after", "true", needs=("none",))])
    assert (outcome.done, outcome.failed, outcome.cancelled) == (1, 2, 1)
    assert "no such program: 'no-such-program-here'" in outcome.failures[0].reason
    assert "/no/such" in outcome.failures[1].reason


def test_needs_are_run_in_order(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "order"
    names = ["d", "c", "b", "a"]
    needs = {"d": ("c",), "c": ("b",), "b": ("a",), "a": ()}
    outcome = run([sh(name, f"echo {name} >> {log}", needs=needs[name]) for name in names])
    assert outcome.done == 4
    assert log.read_text().split() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("script", ["sleep 60", "trap '' TERM; while :; do sleep 0.05; done"])
def test_a_job_over_its_time_is_ended_even_if_it_ignores_term(run: Run, script: str) -> None:
    began = time.monotonic()
    outcome = run([sh("slow", script, timeout_s=0.2, retries=0)])
    assert [(f.failure, f.reason) for f in outcome.failures] == [
        (FailureClass.TIMEOUT, "stopped after its time limit of 0.2 s")
    ]
    assert time.monotonic() - began < 40  # it would go on for a minute, or for ever


def test_nothing_that_a_job_leaves_behind_survives_the_run(run: Run, tmp_path: Path) -> None:
    """A daemon that forks twice, opens its own session and ignores TERM."""
    pids = tmp_path / "pids"
    script = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists({str(pids)!r}): time.sleep(0.01)
"""
    outcome = run([Job(name="daemon", argv=(sys.executable, "-c", script), gpus=0)])
    assert outcome.done == 1
    for pid in pids.read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or ") Z " in state.read_text()


def test_a_second_dispatcher_is_refused(run: Run) -> None:
    run.directory.create()
    lock = DispatcherLock(run.directory.lock)
    with pytest.raises(QueueBusy):
        run([sh("a", "true")])
    lock.close()


# --- GPUs -----------------------------------------------------------------------------------------------------


def test_each_job_sees_its_own_gpus(run: Run, standin: Standin) -> None:
    standin("4x40GB")
    say = "echo $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES; sleep 0.2"
    assert run([sh(f"j{i}", say, gpus=2) for i in range(4)]).done == 4
    seen = [run.log(f"j{i}").split() for i in range(4)]
    assert {order for order, _ in seen} == {"PCI_BUS_ID"}
    assert sorted(gpus for _, gpus in seen) == ["0,1", "0,1", "2,3", "2,3"]


def test_the_list_is_an_order_of_preference_and_max_gpus_a_limit(run: Run, standin: Standin) -> None:
    standin("4x40GB")
    options = GpuOptions(max_checks=1, check_interval=0.02, gpu_list=("3,1", 0), max_gpus=2)
    run([sh(f"j{i}", "sleep 0.1", gpus=1) for i in range(5)], options)
    used = [event.gpus for event in run.told(EventKind.STARTED)]
    assert used[:2] == [("3",), ("1",)]
    assert set(used) == {("3",), ("1",)}


def test_a_gpu_that_someone_uses_is_left_alone_until_it_is_free(run: Run, standin: Standin) -> None:
    machine = standin("1x40GB")
    occupation = machine.occupy(0, 2_000)
    timer = threading.Timer(0.5, occupation.release)
    began = time.monotonic()
    timer.start()
    assert run([sh("j", "true", gpus=1)]).done == 1
    assert time.monotonic() - began >= 0.5
    timer.join()


def test_the_first_start_takes_max_checks_and_the_next_only_one(run: Run, standin: Standin) -> None:
    standin("1x40GB")
    began = time.monotonic()
    jobs = [sh(f"j{i}", "true", gpus=1) for i in range(6)]
    assert run(jobs, GpuOptions(max_checks=3, check_interval=2.0)).done == 6
    took = time.monotonic() - began
    assert 4.0 <= took < 12.0  # three checks for each job would make it 24 s


def test_a_gpu_leased_by_another_gpuherd_is_left_alone(run: Run, standin: Standin) -> None:
    machine = standin("2x40GB")
    lease = LeaseFolder.default().acquire(machine.uuid(0))
    assert lease is not None
    assert run([sh(f"j{i}", "true", gpus=1) for i in range(3)]).done == 3
    assert {event.gpus for event in run.told(EventKind.STARTED)} == {("1",)}
    lease.close()


class Watcher:
    """A display that keeps every picture."""

    every_s = 0.02

    def __init__(self, look: Callable[[RunSnapshot], None] = lambda picture: None) -> None:
        self.pictures: list[RunSnapshot] = []
        self._look = look

    def event(self, event: Event) -> None:
        pass

    def snapshot(self, snapshot: RunSnapshot) -> None:
        self.pictures.append(snapshot)
        self._look(snapshot)


def test_the_display_is_told_why_a_job_waits_and_how_far_it_is(tmp_path: Path, standin: Standin) -> None:
    machine = standin("1x40GB")
    occupation, seen = machine.occupy(0, 2_000), tmp_path / "seen"

    def look(picture: RunSnapshot) -> None:
        """The GPU becomes free when the wait was told, and the job ends when its progress was."""
        if "2000 MB used" in (picture.waiting_for or ""):
            occupation.release()
        if any(job.attempt is not None and job.attempt.progress is not None for job in picture.running):
            seen.touch()

    code = (
        "import os, time; from gpuherd.engines.progress import report; report(2, 8, 'half')\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.02)"
    )
    watcher = Watcher(look)
    job = Job(name="j", argv=(sys.executable, "-c", code))
    run_jobs([job], FAST, RunDirectory(tmp_path / "run"), display=watcher)
    assert any("2000 MB used" in (picture.waiting_for or "") for picture in watcher.pictures)
    attempts = [line.attempt for picture in watcher.pictures for line in picture.running if line.attempt is not None]
    told = [attempt for attempt in attempts if attempt.progress is not None]
    assert told
    assert told[0].progress is not None
    assert (told[0].progress.done, told[0].progress.total, told[0].gpus) == (2, 8, ("0",))
    assert told[0].eta_s is not None


def test_a_driver_that_fails_in_mid_run_is_waited_for(run: Run, standin: Standin) -> None:
    machine = standin("2x40GB")

    def trouble() -> None:
        time.sleep(0.15)
        machine.fail(999)
        time.sleep(0.5)
        machine.fail(None)

    thread = threading.Thread(target=trouble)
    thread.start()
    outcome = run([sh(f"j{i}", "sleep 0.1", gpus=1) for i in range(10)])
    thread.join()
    assert (outcome.done, outcome.failed) == (10, 0)


def test_all_gpus_are_used_and_what_is_waited_for_is_told(run: Run, standin: Standin) -> None:
    machine = standin("6x40GB")
    theirs = machine.occupy(5, 1000)
    at_once = [sh(f"j{i}", "sleep 3", gpus=1) for i in range(6)]
    timer = threading.Timer(2.0, theirs.release)
    timer.start()
    outcome = run(at_once, GpuOptions(max_checks=60, check_interval=0.05))
    timer.join()
    assert outcome.done == 6
    assert {event.gpus for event in run.told(EventKind.STARTED)} == {(str(gpu),) for gpu in range(6)}
    (told,) = [event.text for event in run.told(EventKind.NOTICE) if "waiting for GPUs" in event.text]
    assert re.search(r"j0 waits: GPU 0(, \d)*: free for \d+ of 60 checks", told)


@pytest.mark.parametrize("code", [9, 999])
def test_jobs_on_gpus_wait_for_a_driver_that_is_late(
    run: Run, standin: Standin, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("gpuherd.jobs.gpu.watch.DRIVER_PAUSE_S", 0.05)
    machine = standin("2x40GB")
    machine.fail(code)
    told = 'test -n "$CUDA_VISIBLE_DEVICES"'
    jobs = [sh("one", told, gpus=1, retries=0), sh("two", told, gpus=2, retries=0), sh("cpu", "true")]
    waits: list[str | None] = []

    def answers() -> None:
        wait_until(lambda: bool(run.told(EventKind.DONE)))
        wait_until(run.directory.state_file.exists)
        wait_until(lambda: len(json.loads(run.directory.state_file.read_text())["waits"]) == 2)
        waits.extend(json.loads(run.directory.state_file.read_text())["waits"].values())
        machine.fail(None)

    thread = threading.Thread(target=answers)
    thread.start()
    outcome = run(jobs, replace(FAST, gpu_list=("1", "0")))
    thread.join()
    assert (outcome.done, outcome.failed) == (3, 0)
    assert run.told(EventKind.DONE)[0].job == "cpu"
    assert [event.gpus for event in run.told(EventKind.STARTED) if event.job == "two"] == [("1", "0")]
    assert len(waits) == 2
    assert all("driver" in str(reason) for reason in waits)
    notices = [event.text for event in run.told(EventKind.NOTICE)]
    assert any("wait until the driver answers" in text for text in notices)
    assert any("the NVIDIA driver answers: 2 GPUs" in text for text in notices)


def test_where_no_driver_is_installed_or_gpus_are_hidden_jobs_run_on_the_cpu(
    run: Run, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = 'test -z "$CUDA_VISIBLE_DEVICES"'
    assert run([sh("none", told, gpus=1, retries=0)]).done == 1
    standin("1x40GB").fail(9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run([sh("hidden", told, gpus=1, retries=0)]).done == 1


def test_a_gpu_on_which_jobs_crash_that_succeed_elsewhere_is_left_out_and_told_of(
    run: Run, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuherd.jobs.gpu.health.FIRST_CRASH_S", 1.0)
    standin("4x40GB")
    script = 'test "$CUDA_VISIBLE_DEVICES" != 2 && sleep 0.1'
    # One of them fails everywhere: that is no GPU's fault.
    jobs = [sh(f"j{i}", script if i else "exit 1", gpus=1, retries=1) for i in range(60)]
    outcome = run(jobs)
    assert (outcome.done, outcome.failed) == (59, 1)
    (first, *_) = [event.text for event in run.told(EventKind.NOTICE) if "left out" in event.text]
    assert re.match(r"GPU 2 is left out for 1 s more: \d different jobs in a row crashed on it", first)
    again = [event.text for event in run.told(EventKind.NOTICE) if "used again" in event.text]
    assert again[0] == "GPU 2 is used again: the time is over, and the next job that fits tries it"
    assert all("GPU 2" in event.text for event in run.told(EventKind.NOTICE) if "left out" in event.text)
    assert len([event for event in run.told(EventKind.RETRY) if event.gpus == ("2",)]) <= 9


def test_a_lost_gpu_is_not_used(run: Run, standin: Standin) -> None:
    standin("2x40GB").lose(0)
    assert run([sh(f"j{i}", "true", gpus=1) for i in range(3)]).done == 3
    assert {event.gpus for event in run.told(EventKind.STARTED)} == {("1",)}


def test_a_job_that_runs_out_of_memory_is_tried_elsewhere(run: Run, standin: Standin) -> None:
    standin("1x8GB+1x40GB")
    argv = (sys.executable, "-m", "gpuherd.standin.job", "--memory-mb", "20000")
    assert (
        run(
            [Job(name="big", argv=argv, retries=1)], GpuOptions(max_checks=1, check_interval=0.02, gpu_list=(0, 1))
        ).done
        == 1
    )
    assert run.failures[0]["class"] == "out of memory"
    assert [event.gpus for event in run.told(EventKind.STARTED)] == [("0",), ("1",)]


def test_memory_that_a_job_declares_is_heeded(run: Run, standin: Standin) -> None:
    standin("1x8GB+1x40GB")
    assert run([sh("big", "true", gpus=1, memory_mb=20_000)]).done == 1
    assert run.told(EventKind.STARTED)[0].gpus == ("1",)


def test_without_gpus_jobs_run_on_the_cpu_and_it_is_said(run: Run) -> None:
    assert run([sh("j", "echo [$CUDA_VISIBLE_DEVICES]", gpus=1)]).done == 1
    assert run.log("j") == "[]\n"
    assert "jobs run on the CPU, 2 at once" in run.told(EventKind.NOTICE)[0].text


def test_requests_that_no_machine_here_can_meet(run: Run, standin: Standin) -> None:
    standin("2x40GB")
    with pytest.raises(JobCannotFit, match="job j asks for 3 GPUs; there are 2 to use"):
        run([sh("j", "true", gpus=3)])
    with pytest.raises(JobCannotFit, match="max_gpus is 1"):
        run([sh("j", "true", gpus=2)], GpuOptions(max_gpus=1))
    with pytest.raises(NoSuchGpu, match="7"):
        run([sh("j", "true", gpus=1)], GpuOptions(gpu_list=(0, 7)))
    outcome = run([sh("j", "true", gpus=3), sh("k", "true", gpus=1)])
    assert (outcome.done, outcome.failed) == (1, 1)
    assert outcome.failures[0].reason == "asks for 3 GPUs; there are 2 to use"


def test_an_inherited_choice_of_gpus_is_kept(run: Run, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    standin("4x40GB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    run([sh(f"j{i}", "echo $CUDA_VISIBLE_DEVICES", gpus=1) for i in range(2)])
    assert {run.log(f"j{i}") for i in range(2)} == {"2\n"}


def test_cores_are_shared_out(run: Run, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    standin("4x40GB")
    run([sh(f"j{i}", "echo $OMP_NUM_THREADS", gpus=1) for i in range(8)])
    assert int(run.log("j0")) == max(1, len(os.sched_getaffinity(0)) // 4)


def test_leases_are_there_while_a_job_runs_and_gone_after(run: Run, standin: Standin) -> None:
    machine = standin("1x40GB")
    folder = LeaseFolder.default()
    held: list[bool] = []

    def look(event: Event) -> None:
        held.append(folder.holder(machine.uuid(0)) is not None)

    run_jobs([sh("j", "sleep 0.2", gpus=1)], FAST, run.directory, on_event=look)
    assert held == [True, False]  # told of the start while it runs, and of the end after it
    assert folder.holder(machine.uuid(0)) is None


def test_attempts_tell_who_ran_when_and_where(run: Run, standin: Standin) -> None:
    machine = standin("1x40GB")
    run([sh(f"j{i}", "true", gpus=1) for i in range(3)])
    queue = Queue(run.directory.queue)
    rows = list(queue.attempts())
    queue.close()
    assert [row.gpu_uuids for row in rows] == [(machine.uuid(0),)] * 3
    for before, after in itertools.pairwise(rows):
        assert before.ended_at is not None
        assert before.ended_at <= after.started_at


def test_a_short_job_costs_little(run: Run) -> None:
    """Our own processor time for a job that does nothing; the aim is 1.5 ms on a quiet machine."""
    jobs = [Job(name=f"j{i}", argv=("/bin/true",), gpus=0) for i in range(200)]
    run(jobs[:1])
    began = time.process_time()
    assert run(jobs).done == 200
    assert (time.process_time() - began) / 200 < 0.006
