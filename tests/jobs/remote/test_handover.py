"""Jobs handed to an engine beyond this machine, end to end: real leaders, real files, a small real engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.remote.conftest import Cluster, Follower, MakeJob, Run
from tests.jobs.remote.process_engine import ProcessEngine, lose
from tests.patience import Gate, wait_until

from gpuherd.engines.base import EngineAway
from gpuherd.errors import CannotWrite, JobCannotFit, UsageError
from gpuherd.jobs import DispatchOptions, EventKind, Queue, work_off
from gpuherd.jobs.control.client import poke
from gpuherd.jobs.control.messages import ControlKind
from gpuherd.jobs.dispatcher_state import read
from gpuherd.jobs.remote import spool, submit, tracker
from gpuherd.jobs.remote.protocol import order_of


def alive(run: Run) -> bool:
    """Whether a process that the queue calls running is there."""
    with Queue(run.directory.queue, check=False) as queue:
        return any(record.process is not None and record.process.is_alive() for record in queue.running())


def test_jobs_are_done_there_and_recorded_here(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    jobs = [sh(f"j{i}", f"echo out {i}; echo $CUDA_VISIBLE_DEVICES > {tmp_path}/seen{i}", gpus=2) for i in range(3)]
    outcome = run([*jobs, sh("cpu", "sleep 0.1"), sh("bad", "echo ValueError: no; exit 3", retries=0)])
    assert (outcome.done, outcome.failed, outcome.exit_code) == (4, 1, 1)
    assert outcome.failures[0].reason == "ValueError: no"
    assert [(Path(run.directory.logs) / f"j{i}.1.log").read_text() for i in range(3)] == [
        f"out {i}\n" for i in range(3)
    ]
    with Queue(run.directory.queue) as queue:
        attempts = {attempt.job: attempt for attempt in queue.attempts()}
    assert all(len((tmp_path / f"seen{i}").read_text().split(",")) == 2 for i in range(3))
    assert len(attempts["j0"].gpus) == 2 and attempts["j0"].gpu_uuids[0].startswith(("n1:", "n2:"))
    assert attempts["cpu"].gpus == () and (attempts["cpu"].run_s or 0) >= 0.1
    assert {batch["gpus"]: len(batch["titles"]) for batch in cluster.orders.batches()} == {2: 3, 0: 2}
    assert [path.name for path in run.directory.handover.iterdir() if not path.name.endswith(".out")] == ["engine.json"]
    assert run.metrics()["gpu_hours"] > 0
    assert len(run.told(EventKind.HANDED)) == 2 and len(run.told(EventKind.STARTED)) == 5


def test_what_is_the_same_on_every_node_goes_together(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    jobs = [
        sh("a", cpus=2, host_memory_mb=500),
        sh("b"),
        sh("c", nodes=2),
        sh("d", timeout_s=100.0),
    ]
    run(jobs, cpus_per_job=2, host_mem=500, array_limit=3)
    asked = {tuple(batch["titles"]): batch for batch in cluster.orders.batches()}
    assert set(asked) == {("a", "b"), ("c",), ("d",)}
    assert asked["c",]["nodes"] == 2
    assert (asked["a", "b"]["cpus"], asked["a", "b"]["memory_mb"], asked["a", "b"]["at_once"]) == (2, 500, 3)
    # The job's own limit must have passed before the notice of the cluster's: grace, notice and a minute after it.
    assert asked["d",]["time_s"] == 300 and asked["a", "b"]["time_s"] is None


def test_more_than_any_node_has_is_refused_before_anything_is_changed(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    with pytest.raises(JobCannotFit, match="job big: asks for 5 GPUs on a node; the largest has 4"):
        run([sh("big", gpus=5)])
    assert run.states() == {} and cluster.orders.batches() == []
    outcome = run([sh("big", gpus=5), sh("small", gpus=1), sh("after", needs=("big",))])
    assert (outcome.done, outcome.failed, outcome.cancelled) == (1, 1, 1)
    assert "the largest has 4" in outcome.failures[0].reason


def test_this_machine_refuses_jobs_that_span_nodes(run: Run, sh: MakeJob) -> None:
    with pytest.raises(JobCannotFit, match=r"spans 2 nodes.*--engine slurm or --engine ray"):
        run([sh("wide", nodes=2)], engine="local")
    outcome = run([sh("wide", nodes=2), sh("narrow")], engine="local", cpu_jobs=2)
    assert (outcome.done, outcome.failed) == (1, 1)


def test_at_most_so_many_are_there_at_once(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    jobs = [sh(f"j{i}", priority=i) for i in range(5)]
    run(jobs, at_most=2)
    batches = [batch["titles"] for batch in cluster.orders.batches()]
    assert batches[0] == ["j4", "j3"] and [title for batch in batches for title in batch] == [
        "j4",
        "j3",
        "j2",
        "j1",
        "j0",
    ]


# --- jobs that follow others -----------------------------------------------------------------------------------------


def test_a_chain_is_handed_over_before_its_first_job_has_ended(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    cluster.orders.hold()
    run.start([sh("a"), sh("b", needs=("a",)), sh("c", needs=("a", "b")), sh("d", needs=("c",), round=1)])
    wait_until(lambda: len(cluster.orders.batches()) == 3)
    _, second, third = cluster.orders.batches()
    assert second["after"] == [cluster.handle("a")]
    assert third["after"] == [cluster.handle("a"), cluster.handle("b")]
    cluster.orders.release()
    assert run.join().done == 4
    assert len(cluster.orders.batches()) == 4  # a later round only when this one is over
    with Queue(run.directory.queue) as queue:
        attempts = {attempt.job: attempt for attempt in queue.attempts()}
    # The time in which it could not have run, for want of what it needs, is none that it waited.
    ended_at = attempts["a"].ended_at
    assert ended_at is not None and attempts["b"].wait_s <= attempts["b"].started_at - ended_at + 0.01


def test_what_followed_a_failure_is_taken_back_and_cancelled(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    run.start([sh("a", "sleep 0.5; exit 3", retries=0), sh("b", needs=("a",)), sh("c", needs=("b",)), sh("free")])
    outcome = run.join()
    assert (outcome.done, outcome.failed, outcome.cancelled) == (1, 1, 2)
    first, second = sorted(text for text in run.told(EventKind.CANCELLED) if "needs" in text)
    assert first == "b: cancelled, it needs a, which failed"
    # Which of the two goes back into the queue first is the engine's matter.
    assert second in ("c: cancelled, it needs a, which failed", "c: cancelled, it needs b, which was cancelled")
    run.ask(ControlKind.RETRY, "a")
    assert run.states() == {"a": "waiting", "b": "waiting", "c": "waiting", "free": "done"}


def test_what_followed_a_failure_that_is_tried_again_follows_the_next_try(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    script = f"sleep 0.3; [ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 3; }}"
    outcome = run([sh("a", script), sh("b", f"echo ran >>{tmp_path}/b", needs=("a",))])
    assert outcome.done == 2
    assert (tmp_path / "b").read_text() == "ran\n"
    assert run.told(EventKind.REQUEUED) == ["b: what it was to follow has not succeeded; it waits again"]
    assert [batch["titles"] for batch in cluster.orders.batches()] == [["a"], ["b"], ["a"], ["b"]]


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_what_the_engine_has_forgotten_meanwhile_is_followed_by_none(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, death: signal.Signals
) -> None:
    """Somebody cancelled it while nobody followed, or while the follower's machine slept; and what is forgotten counts
    as succeeded there."""
    cluster.settings = {"remembers_s": 1.0}
    cluster.orders.hold()
    jobs = [sh("a", f"echo a >>{tmp_path}/ran"), sh("x"), sh("b", f"echo b >>{tmp_path}/ran", needs=("a",))]
    follower = Follower(run, cluster, tmp_path)
    follower.start(jobs, at_most=2)
    wait_until(lambda: run.handle("a") is not None)
    cluster.orders.think()  # it is stopped before an answer, not halfway through one that tells of the cancelling
    wait_until(lambda: cluster.orders.is_asked)
    follower.signal(death)
    cluster.orders.end(cluster.handle("a"), "cancelled", by="root")
    wait_until(lambda: cluster.told("a").get("end") == "cancelled")
    cluster.orders.forget(cluster.handle("a"))
    cluster.orders.release()
    wait_until(lambda: cluster.told("x").get("end") == "ok")
    cluster.orders.speak()
    if death is signal.SIGSTOP:
        time.sleep(1.1)
        follower.signal(signal.SIGCONT)
    else:
        follower.join()
        follower.start(jobs, at_most=2)
    assert follower.join() == 0
    assert (tmp_path / "ran").read_text() == "a\nb\n"
    assert run.states() == {"a": "done", "x": "done", "b": "done"}
    titles = [title for batch in cluster.orders.batches() for title in batch["titles"]]
    assert titles.count("b") == 1, "it went over behind what nobody knew any more"


def test_what_a_cluster_begins_too_early_does_not_run_and_costs_no_try(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    cluster.orders.begin_early("b")
    run.start(
        [
            sh("a", f"{gate.wait}; echo a >>{tmp_path}/ran"),
            sh("b", f"echo b >>{tmp_path}/ran", needs=("a",), retries=0),
            sh("c", f"echo c >>{tmp_path}/ran", needs=("b",), retries=0),
        ]
    )
    run.wait_for(EventKind.REQUEUED, 2)
    cluster.orders.begin_early("b", early=False)
    gate.open()
    outcome = run.join()
    assert (outcome.done, outcome.exit_code) == (3, 0)
    assert (tmp_path / "ran").read_text() == "a\nb\nc\n"
    assert set(run.told(EventKind.REQUEUED)) == {
        "b: the cluster began it before what it needs had succeeded; it waits again",
        "c: what it was to follow has not succeeded; it waits again",
    }
    assert [text.partition(":")[0] for text in run.told(EventKind.STARTED)] == ["a", "b", "c"]


# --- what a cluster does to jobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("preempted", "gave its place to another job"),
        ("time_up", "time on the cluster was up"),
        ("failed", "asked it to make room"),
    ],
)
def test_a_job_that_must_make_room_goes_on_in_another_turn(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, how: str, words: str
) -> None:
    """``failed``: somebody sent its leader a signal."""
    saved = tmp_path / "saved"
    script = f"[ -e {saved} ] && exit 0; trap 'touch {saved}; exit 1' TERM; touch {tmp_path}/up; sleep 60 & wait"
    run.start([sh("a", script, retries=0)])
    wait_until((tmp_path / "up").exists)
    cluster.orders.end(cluster.handle("a"), how)
    assert run.join().done == 1
    assert words in run.told(EventKind.REQUEUED)[0]


def test_a_lost_node_takes_nothing_with_it(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    again = f"[ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; sleep 60; }}"
    run.start([sh("a", again, retries=0), sh("b", "sleep 0.2")])
    wait_until((tmp_path / "up").exists)
    cluster.orders.end(cluster.handle("a"), "node_lost", kill=True)
    assert run.join().done == 2
    assert run.told(EventKind.REQUEUED) == ["a: its node was lost; it waits again"]


def test_many_jobs_that_a_cluster_has_lost_are_told_in_one_line(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    again = f"[ -e {tmp_path}/up.$0 ] || {{ touch {tmp_path}/up.$0; sleep 60; }}"
    names = [f"j{number}" for number in range(8)]
    run.start([sh(name, again.replace("$0", name), retries=0) for name in names])
    wait_until(lambda: len(list(tmp_path.glob("up.*"))) == len(names))
    handles = [cluster.handle(name) for name in names]
    cluster.orders.away()
    for name in names:
        lose(cluster.told(name)["pid"])
    for handle in handles:
        cluster.orders.forget(handle)
    time.sleep(1.0)  # what their nodes might still tell is waited for no longer than that
    cluster.orders.back()
    assert run.join().done == len(names)
    assert len(run.told(EventKind.REQUEUED)) <= 3
    assert any(
        "jobs, j" in text and text.endswith("its node was lost; it waits again")
        for text in run.told(EventKind.REQUEUED)
    )


def test_out_of_main_memory_is_a_failure_and_says_so(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    run.start([sh("a", f"touch {tmp_path}/up; sleep 60", retries=0)])
    wait_until((tmp_path / "up").exists)
    cluster.orders.end(cluster.handle("a"), "out_of_memory", kill=True)
    outcome = run.join()
    assert outcome.failures[0].failure == "out of memory"
    assert "SLURM ended it in an oom-kill event" in outcome.failures[0].reason


@pytest.mark.parametrize("begun", [False, True])
def test_what_an_administrator_cancels_is_cancelled_for_good(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, begun: bool
) -> None:
    if not begun:
        cluster.orders.hold()
    run.start([sh("a", f"touch {tmp_path}/up; sleep 60"), sh("b", needs=("a",)), sh("c")])
    if begun:
        wait_until((tmp_path / "up").exists)
    else:
        wait_until(lambda: len(cluster.orders.handles()) == 3)
    cluster.orders.end(cluster.handle("a"), "cancelled", by="root")
    if not begun:
        cluster.orders.release()
    outcome = run.join()
    assert (outcome.done, outcome.cancelled) == (1, 2)
    assert "a: cancelled by root in SLURM" in run.told(EventKind.CANCELLED)


def test_a_leader_that_can_not_begin_counts_as_a_failure(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    """Else a job whose node can't run gpuherd at all would be handed over for ever."""
    cluster.orders.hold()
    run.start([sh("a", retries=1)])
    for count in (1, 2):
        run.wait_for(EventKind.HANDED, count)
        handle = cluster.handle("a")
        number = int(handle.rpartition("_")[0].rpartition("-")[2])
        run.directory.engine_output(handle.rpartition("_")[0], 0).write_text("ModuleNotFoundError: gpuherd\n")
        assert not run.directory.attempt_claim(number).exists()
        cluster.orders.end(handle, "failed")
    outcome = run.join()
    assert outcome.failures[0].failure == "never started"
    assert outcome.failures[0].attempt == 2


# --- an engine that is away, refuses, or loses what it was told ------------------------------------------------------


def test_an_engine_that_is_away_ends_nothing(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run.start([sh("a", gate.wait), sh("b", needs=("a",)), sh("late", gate.wait, priority=-1)], at_most=2)
    run.wait_for(EventKind.STARTED)
    cluster.orders.away()
    wait_until(lambda: any("does not answer" in text for text in run.told(EventKind.NOTICE)))
    state = read(run.directory.state_file, os.getpid())
    assert state is not None
    gate.open()
    run.wait_for(EventKind.DONE)  # by the node's own file
    cluster.orders.back()
    assert run.join().done == 3
    notices = run.told(EventKind.NOTICE)
    assert sum("does not answer" in text for text in notices) == 1
    assert "SLURM answers again" in notices


def test_a_start_without_an_answer_changes_nothing(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    cluster.engine()
    cluster.orders.away()
    with pytest.raises(EngineAway):
        run([sh("a")])
    assert run.states() == {}


@pytest.mark.parametrize("order", ["lose_answer", "swallow"])
def test_an_answer_that_never_came(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, order: str) -> None:
    getattr(cluster.orders, order)()
    outcome = run([sh(f"j{i}", f"echo {i} >>{tmp_path}/ran") for i in range(3)])
    assert outcome.done == 3
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1", "2"]
    requeued = run.told(EventKind.REQUEUED)
    assert len(requeued) == (3 if order == "swallow" else 0)


def test_a_disk_too_full_for_the_engines_own_files_ends_no_run(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the attempt is recorded: that the engine has none of it is found out, and it goes again."""
    real, tries = ProcessEngine.submit, []

    def submit(engine: ProcessEngine, batch: Any) -> Sequence[str]:
        tries.append(batch.name)
        if len(tries) == 1:
            raise CannotWrite(f"can't write {batch.name}.sh: No space left on device")
        return real(engine, batch)

    monkeypatch.setattr(ProcessEngine, "submit", submit)
    assert run([sh("a", f"echo a >>{tmp_path}/ran")]).done == 1
    assert (tmp_path / "ran").read_text() == "a\n" and len(tries) == 2
    assert any("No space left on device" in text for text in run.told(EventKind.NOTICE))


def test_one_that_the_engine_forgets_and_that_had_begun_is_lost(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    again = f"[ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; sleep 60; }}"
    run.start([sh("a", again)])
    wait_until((tmp_path / "up").exists)
    lose(cluster.told("a")["pid"])
    cluster.orders.forget(cluster.handle("a"))
    assert run.join().done == 1
    assert "its node was lost" in run.told(EventKind.REQUEUED)[0]


def test_a_refusal_that_may_pass_is_waited_for(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    cluster.engine()
    cluster.orders.refuse("Job violates accounting/QOS policy (job submit limit)", may_pass=True)
    run.start([sh("a"), sh("b")])
    wait_until(lambda: any("takes no more jobs now" in text for text in run.told(EventKind.NOTICE)))
    wait_until(lambda: len({path.name for path in run.directory.handover.glob("*.json")}) <= 2)
    cluster.orders.accept()
    assert run.join().done == 2
    # What was not taken is no attempt, and each of them would be a line.
    assert run.told(EventKind.REQUEUED) == [] and len(run.told(EventKind.NOTICE)) == 1
    with Queue(run.directory.queue) as queue:
        assert [(attempt.job, attempt.number) for attempt in queue.attempts()] == [("a", 1), ("b", 1)]


def test_refusals_that_go_on_are_told_as_a_count(
    run: Run, cluster: Cluster, sh: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "REFUSAL_EVERY_S", 0.0)
    monkeypatch.setattr(submit, "back_off_s", lambda _: 0.05)
    cluster.orders.refuse("job submit limit", may_pass=True)
    run.start([sh("a")])
    run.wait_for(EventKind.NOTICE, 3)
    cluster.orders.accept()
    assert run.join().done == 1
    assert run.told(EventKind.NOTICE)[:3] == [
        "SLURM takes no more jobs now, and is asked again and again: job submit limit",
        "SLURM takes no more jobs now (2 times so far): job submit limit",
        "SLURM takes no more jobs now (3 times so far): job submit limit",
    ]


def test_what_is_too_much_at_once_goes_in_smaller_batches(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    cluster.engine()
    cluster.orders.refuse("Job violates accounting/QOS policy (job submit limit)", may_pass=True, most=2)
    assert run([sh(f"j{i}") for i in range(5)]).done == 5
    sizes = [len(batch["titles"]) for batch in cluster.orders.batches()]
    assert max(sizes) == 2 and sum(sizes) == 5
    assert sum("takes no more jobs now" in text for text in run.told(EventKind.NOTICE)) == 1


def test_a_refusal_for_good_is_told_once_a_batch_in_the_engines_words(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    cluster.engine()
    cluster.orders.refuse("Requested node configuration is not available", may_pass=False)
    outcome = run([sh("a"), sh("b", needs=("a",)), sh("c"), sh("d", cpus=2)])
    assert (outcome.failed, outcome.cancelled) == (3, 1)
    words = "SLURM refuses it: Requested node configuration is not available"
    assert {(each.job, each.reason) for each in outcome.failures} == {(name, words) for name in "acd"}
    assert run.told(EventKind.FAILED) == [f"2 jobs, a to c: {words}", f"d: {words}"]
    assert run.told(EventKind.REQUEUED) == [] and run.told(EventKind.NOTICE) == []
    with Queue(run.directory.queue) as queue:
        assert list(queue.attempts()) == []
    cluster.orders.accept()
    assert run([sh("a"), sh("b", needs=("a",)), sh("c"), sh("d", cpus=2)]).done == 4
    assert run.directory.attempt_log("a", 1).exists()


def test_decisions_outlive_a_killed_follower(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    """Of gpuherd's user and of an administrator; and no job gets more tries than it was given."""
    gate = Gate(tmp_path / "gate")
    jobs = [sh("here", gate.wait), sh("there", gate.wait), sh("bad", f"{gate.wait}; exit 3", retries=2), sh("paused")]
    follower = Follower(run, cluster, tmp_path)
    follower.start(jobs, at_most=3)
    wait_until(lambda: all(run.handle(name) is not None for name in ("here", "there", "bad")))
    assert run.ask(ControlKind.PAUSE, "paused").ok
    follower.kill()
    assert run.ask(ControlKind.CANCEL, "here").ok
    cluster.orders.end(cluster.handle("there"), "cancelled", by="root")
    wait_until(lambda: cluster.told("there").get("end") == "cancelled")  # else the gate may end it first
    gate.open()
    for tries in (2, 3, 3):
        follower.start(jobs, at_most=3)
        wait_until(lambda tries=tries: run.attempts("bad") == list(range(1, tries + 1)))  # type: ignore[misc]
        follower.kill()
    follower.start(jobs, at_most=3).wait_for("is continued")
    assert run.ask(ControlKind.RESUME, "paused").ok
    assert follower.join() == 1
    assert run.states() == {"here": "cancelled", "there": "cancelled", "bad": "failed", "paused": "done"}
    assert run.attempts("bad") == [1, 2, 3]
    follower.start([*jobs[:3], sh("paused")])
    follower.wait_for("3 jobs that had failed or were cancelled wait again, with fresh tries: here, there, bad")
    assert follower.join() == 1


# --- what people ask -------------------------------------------------------------------------------------------------


def test_cancel_in_the_line_and_at_work(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    run.start([sh("a", f"touch {tmp_path}/up; sleep 60"), sh("b", needs=("a",)), sh("c", needs=("a",))])
    wait_until((tmp_path / "up").exists)
    wait_until(lambda: len(cluster.orders.handles()) == 3)
    assert run.ask(ControlKind.CANCEL, "b").ok
    wait_until(lambda: run.states()["b"] == "cancelled")
    assert run.ask(ControlKind.CANCEL, "a").ok
    outcome = run.join()
    assert outcome.cancelled == 3
    wait_until(lambda: cluster.told("a").get("end") == cluster.told("b").get("end") == "cancelled")


def test_pause_holds_what_waits_here_and_says_what_goes_on_there(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    run.start([sh("a", gate.wait), sh("b")], at_most=1)
    run.wait_for(EventKind.STARTED)
    answer = run.ask(ControlKind.PAUSE)
    assert answer.ok and answer.changed == ("b",)
    assert "a is in the hands of SLURM and goes on there" in answer.text
    assert not run.ask(ControlKind.PAUSE, "a").ok
    gate.open()
    run.wait_for(EventKind.DONE)
    assert run.states() == {"a": "done", "b": "waiting"}
    assert run.ask(ControlKind.RESUME).ok
    assert run.join().done == 2


def test_set_changes_how_many_go_at_once(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run.start([sh(f"j{i}", gate.wait) for i in range(3)], max_concurrent=1)
    run.wait_for(EventKind.HANDED)
    assert run.ask(ControlKind.SET, max_concurrent="3").ok
    run.wait_for(EventKind.STARTED, 3)
    gate.open()
    assert run.join().done == 3


def test_a_time_limit_out_of_the_settings_read_again_holds_for_what_goes_then(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    run.start([sh("a", gate.wait), sh("b", gate.wait)], at_most=1)
    run.wait_for(EventKind.STARTED)
    settings = Path(os.environ["XDG_CONFIG_HOME"]) / "gpuherd" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('[defaults]\ntimeout = "7m"\n')
    answer = run.ask(ControlKind.RELOAD)
    assert "new: timeout" in answer.text
    assert run.ask(ControlKind.SET, at_most="2").ok
    wait_until(lambda: len(cluster.orders.batches()) == 2)
    (name,) = (each["name"] for each in cluster.orders.batches() if each["titles"] == ["b"])
    _, order = order_of(run.directory.manifest(name), 0)
    assert order.job.timeout_s == 420
    gate.open()
    assert run.join().done == 2


def test_drain_and_stop(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run.start([sh("a", gate.wait), sh("b")], at_most=1)
    run.wait_for(EventKind.STARTED)
    assert run.ask(ControlKind.DRAIN).ok
    gate.open()
    outcome = run.join()
    assert (outcome.done, outcome.waiting) == (1, 1)
    run.start([sh("b", f"touch {tmp_path}/up; sleep 60"), *(sh(f"c{i}", needs=("b",)) for i in range(3))])
    wait_until((tmp_path / "up").exists)
    assert run.ask(ControlKind.STOP).ok
    outcome = run.join()
    assert (outcome.done, outcome.waiting) == (0, 4)
    assert set(run.states().values()) == {"waiting", "cancelled"} or set(run.states().values()) == {"waiting", "done"}
    wait_until(lambda: all(cluster.orders.state.end(handle) is not None for handle in cluster.orders.handles()))


def test_all_that_is_taken_back_at_once_is_one_question(
    run: Run, cluster: Cluster, sh: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "AT_A_TIME_S", 1000.0)  # in pieces, where the machine is slow
    cluster.orders.hold()
    run.start([sh(f"j{i}") for i in range(12)])
    wait_until(lambda: len(cluster.orders.handles()) == 12)
    assert run.ask(ControlKind.STOP).ok
    assert run.join().waiting == 12
    assert cluster.engines[-1].cancels == 1
    wait_until(lambda: all(cluster.orders.state.end(handle) is not None for handle in cluster.orders.handles()))


def test_what_takes_long_is_done_in_pieces(
    run: Run, cluster: Cluster, sh: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short they are, all is done."""
    monkeypatch.setattr(tracker, "AT_A_TIME_S", 0.0)
    monkeypatch.setattr(submit, "AT_A_TIME_S", 0.0)
    cluster.orders.hold()
    run.start([sh("a"), sh("b", cpus=2), sh("c", cpus=3), sh("d", needs=("a",))])
    wait_until(lambda: len(cluster.orders.handles()) == 4)
    assert run.ask(ControlKind.STOP).ok
    assert run.join().waiting == 4


def test_cancel_while_nobody_follows(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    follower = Follower(run, cluster, tmp_path)
    follower.start([sh("a", f"touch {tmp_path}/up; sleep 60"), sh("b", needs=("a",)), sh("c", "sleep 60")])
    wait_until((tmp_path / "up").exists)
    wait_until(lambda: len(cluster.orders.handles()) == 3)
    follower.kill()
    assert run.ask(ControlKind.CANCEL, "a", "b").ok
    assert run.states() == {"a": "cancelled", "b": "cancelled", "c": "running"}
    wait_until(lambda: cluster.told("a").get("end") == "cancelled")


def test_what_follows_one_that_is_cancelled_while_nobody_follows(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    """It is taken out of the engine's line and cancelled too, through a whole chain; what needs another is not."""
    cluster.orders.hold()
    follower = Follower(run, cluster, run.directory.root.parent)
    chain = [sh("a"), sh("b", needs=("a",)), sh("c", needs=("b",)), sh("d"), sh("e", needs=("d",))]
    follower.start([*chain, sh("f", needs=("c", "d"))], at_most=5).wait_for("e: handed to")
    wait_until(lambda: len(cluster.orders.handles()) == 5)
    follower.kill()
    assert run.ask(ControlKind.CANCEL, "a").ok
    cancelled = dict.fromkeys("abcf", "cancelled")
    assert run.states() == {**cancelled, "d": "running", "e": "running"}
    for name in ("a", "b", "c"):
        wait_until(lambda name=name: cluster.told(name)["phase"] == "ended")  # type: ignore[misc]
    cluster.orders.release()
    follower.start([*chain[3:]])
    assert follower.join() == 0
    assert {name: state for name, state in run.states().items() if name in "de"} == {"d": "done", "e": "done"}


# --- coming and going ------------------------------------------------------------------------------------------------


def test_ctrl_c_once_follows_to_the_end_and_twice_takes_back(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    follower = Follower(run, cluster, tmp_path)
    follower.start([sh("a", gate.wait), sh("b")], at_most=1)
    follower.wait_for("started a")
    follower.signal(signal.SIGINT)
    follower.wait_for("nothing more is handed over")
    gate.open()
    assert follower.join() == 130
    assert run.states() == {"a": "done", "b": "waiting"}
    follower.start([sh("b", f"touch {tmp_path}/up; sleep 60")])
    wait_until((tmp_path / "up").exists)
    follower.signal(signal.SIGINT)
    follower.wait_for("nothing more is handed over")
    follower.signal(signal.SIGINT)
    assert follower.join() == 130
    assert run.states()["b"] == "waiting"
    wait_until(lambda: cluster.told("b").get("end") == "cancelled")
    assert follower.start([sh("b")]).join() == 0


def test_an_engine_that_takes_long_to_answer_keeps_nobody_waiting(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    follower = Follower(run, cluster, tmp_path)
    follower.start([sh("a", gate.wait), sh("b"), sh("c", needs=("a",))], at_most=1)
    follower.wait_for("started a")
    cluster.orders.think()
    wait_until(lambda: cluster.orders.is_asked)
    run.ask(ControlKind.CANCEL, "b")
    assert run.states()["b"] == "cancelled"
    follower.signal(signal.SIGINT)
    follower.wait_for("nothing more is handed over")
    gate.open()
    cluster.orders.speak()
    assert follower.join() == 130
    assert run.states() == {"a": "done", "b": "cancelled", "c": "waiting"}
    cluster.orders.think()
    follower.start([sh("d", "sleep 60")])
    follower.wait_for("started d")
    follower.signal(signal.SIGTERM)
    assert follower.join() == 143  # nor does it wait for the answer at its end
    cluster.orders.speak()
    follower.start([sh("d", "sleep 60")])
    follower.wait_for("followed again")
    run.ask(ControlKind.CANCEL, "d")
    follower.join()
    assert run.states()["d"] == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_go_on_without_their_follower_and_are_followed_again(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, number: signal.Signals
) -> None:
    gate = Gate(tmp_path / "gate")
    jobs = [
        sh("long", f"echo long >>{tmp_path}/ran; {gate.wait}"),
        sh("short", f"echo short >>{tmp_path}/ran"),
        sh("bad", "exit 3", retries=0),
        sh("next", f"echo next >>{tmp_path}/ran", needs=("short",)),
        sh("waits", f"echo waits >>{tmp_path}/ran", round=1),
    ]
    follower = Follower(run, cluster, tmp_path)
    cluster.orders.hold()
    follower.start(jobs)
    wait_until(lambda: len(cluster.orders.handles()) == 4)
    follower.signal(number)
    assert follower.join() == (143 if number == signal.SIGTERM else -9)
    cluster.orders.release()
    wait_until(lambda: cluster.told("next").get("end") == "ok")
    assert run.states()["next"] == "running"
    follower.start(jobs)
    follower.wait_for("in the hands of SLURM from before")
    gate.open()
    assert follower.join() == 1
    assert run.states() == {"long": "done", "short": "done", "bad": "failed", "next": "done", "waits": "done"}
    assert sorted((tmp_path / "ran").read_text().split()) == ["long", "next", "short", "waits"]
    with Queue(run.directory.queue) as queue:
        assert all(attempt.number == 1 for attempt in queue.attempts())


def test_followers_that_are_killed_again_and_again_give_a_lost_job_up_in_the_end(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    grace_s = 2.5
    patience_s = grace_s + 0.5
    job = sh("a", f"[ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; sleep 60; }}")
    follower = Follower(run, cluster, tmp_path, grace_s=grace_s)
    follower.start([job])
    wait_until((tmp_path / "up").exists)
    follower.kill()
    lose(cluster.told("a")["pid"])
    cluster.orders.forget(cluster.handle("a"))
    missing_since = time.monotonic()
    for _ in range(20):
        follower.start([job])
        follower.wait_for("from before")
        time.sleep(0.8)
        if "its node was lost" in follower.out():
            break
        follower.kill()
    assert "its node was lost" in follower.out()
    assert time.monotonic() >= missing_since + patience_s
    assert follower.join() == 0
    assert run.states() == {"a": "done"}
    assert run.attempts("a") == [1, 2]
    assert not run.directory.gone.exists()


def test_what_was_called_back_by_a_dead_follower_is_nobody_elses_doing(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    on = tmp_path / "on"
    script = f"[ -e {on} ] && exit 0; trap '' TERM; touch {tmp_path}/up; until [ -e {on} ]; do sleep 0.05; done; exit 4"
    job = sh("a", script, retries=0)
    follower = Follower(run, cluster, tmp_path, grace_s=30)
    follower.start([job])
    wait_until((tmp_path / "up").exists)
    follower.signal(signal.SIGINT)
    follower.wait_for("nothing more is handed over")
    follower.signal(signal.SIGINT)
    wait_until(lambda: cluster.orders.state.order(cluster.handle("a")) is not None)
    follower.signal(signal.SIGINT)
    assert follower.join() == 130
    on.touch()
    assert follower.start([job]).join() == 0
    assert run.states() == {"a": "done"}


def test_a_folder_belongs_to_the_engine_that_has_its_jobs(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    follower = Follower(run, cluster, tmp_path)
    follower.start([sh("a", gate.wait)])
    follower.wait_for("started a")
    follower.kill()
    for engine in ("local", "ray"):
        with pytest.raises(UsageError, match=r"1 job of .* in the hands of SLURM; go on with --engine slurm"):
            run([sh("b")], engine=engine)
    assert run.states() == {"a": "running"}
    gate.open()
    assert follower.start([sh("a", gate.wait)]).join() == 0
    # And the other way round: what a dispatcher has left here must end here, alive or settled when it is dead.
    follower.start([sh("here", f"sleep 0.5; touch {tmp_path}/over")], engine="local")
    follower.wait_for("started here")
    follower.kill()
    with pytest.raises(UsageError, match=r"1 job of .* runs on this machine; go on with --engine local"):
        run([sh("here")])
    wait_until((tmp_path / "over").exists)
    wait_until(lambda: not alive(run))
    outcome = run([sh("here", f"sleep 0.5; touch {tmp_path}/over")])
    assert outcome.done == 1
    with Queue(run.directory.queue) as queue:
        assert [attempt.number for attempt in queue.attempts() if attempt.job == "here"] == [1]


def test_a_copied_folder_leaves_the_originals_jobs_alone(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    follower = Follower(run, cluster, tmp_path)
    follower.start([sh("a", f"echo a >>{tmp_path}/ran; {gate.wait}")])
    follower.wait_for("started a")
    copy = run.copied(tmp_path / "copy")
    copy.start([sh("a")])
    wait_until(lambda: (tmp_path / "ran").read_text() == "a\na\n")
    assert all(cluster.orders.state.order(handle) is None for handle in cluster.orders.handles())
    gate.open()
    assert copy.join().done == 1
    assert follower.join() == 0


def test_a_queue_that_stays_takes_jobs_that_come_later(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    ready = threading.Event()
    run.directory.create()
    options = DispatchOptions(engine="slurm")
    work = threading.Thread(
        target=work_off, args=(run.directory, options), kwargs={"serve": True, "on_ready": ready.set, "grace_s": 0.3}
    )
    work.start()
    assert ready.wait(60)
    with Queue(run.directory.queue, check=False) as queue:
        queue.add([sh("a"), sh("b", needs=("a",))])
    poke(run.directory)
    wait_until(lambda: set(run.states().values()) == {"done"})
    assert run.ask(ControlKind.STOP).ok
    work.join(60)
    assert not work.is_alive()


def test_what_is_over_is_cleared_away_while_the_run_goes_on(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of which we have claimed something ourselves is left lying for a while."""
    monkeypatch.setattr(tracker, "SWEEP_S", 0.05)
    monkeypatch.setattr(spool, "SWEEP_AGE_S", 0.0)
    gate = Gate(tmp_path / "gate")
    run.start([sh("a", gate.wait), sh("b", cpus=2, needs=("a",)), sh("c", cpus=3)])
    wait_until(lambda: len(cluster.orders.batches()) == 3)
    (claimed,) = (each["name"] for each in cluster.orders.batches() if each["titles"] == ["b"])
    assert run.directory.manifest(claimed).exists()
    assert run.ask(ControlKind.CANCEL, "b").ok
    wait_until(lambda: not run.directory.manifest(claimed).exists())
    gate.open()
    outcome = run.join()
    assert (outcome.done, outcome.cancelled) == (2, 1)


def test_the_files_that_hold_the_environment_are_for_their_owner_alone(run: Run, cluster: Cluster, sh: MakeJob) -> None:
    cluster.orders.hold()
    run.start([sh("a")])
    wait_until(lambda: len(cluster.orders.handles()) == 1)
    (manifest,) = run.directory.handover.glob("gpuherd-*.json")
    assert manifest.stat().st_mode & 0o777 == 0o600
    assert (run.directory.handover / "engine.json").stat().st_mode & 0o777 == 0o600
    cluster.orders.release()
    assert run.join().done == 1
