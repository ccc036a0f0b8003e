"""How a run stands, read while a dispatcher works on it, after, and in one that is too large to read whole."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.jobs.attempts import settled

from gpuherd.cli.common import print_tables
from gpuherd.cli.main import run as run_command
from gpuherd.engines.process_tree import identify
from gpuherd.errors import QueueUnreadable, UsageError
from gpuherd.jobs import FailureClass, Job, JobState, Queue, RunDirectory, clock, dispatcher_state
from gpuherd.jobs.completion import NextTry
from gpuherd.jobs.dispatcher_state import DispatcherState, GpuState, StateFile
from gpuherd.jobs.gpu import health as quarantine
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.monitor.format import as_json, as_table, as_tables, json_text, what
from gpuherd.jobs.monitor.job_status import EVERYTHING, JobSelection
from gpuherd.jobs.monitor.status import RunStatus, attempts_of, by_pages, job_names, opened, read_status, status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.records import AttemptRecord, AttemptState, PauseReason, StartRecord
from gpuherd.top.look import Looker


def job(name: str, **more: object) -> Job:
    return Job(name=name, argv=("true", name), **more)  # type: ignore[arg-type]


class Scene:
    """A queue under the hands of a dispatcher that is this very process."""

    def __init__(self, root: Path):
        self.run = RunDirectory(root)
        self.run.create()
        self.queue = Queue(self.run.queue)
        self.run_id = 0
        self.next = 0

    def begin(self) -> None:
        self.run_id = self.queue.begin_run(clock.wall(), clock.mono())

    def start(self, name: str, gpus: tuple[str, ...] = ("GPU-a",), ago_s: float = 0.0) -> AttemptRecord:
        queued = next(each for each in self.queue.head(1000, clock.wall()) if each.job.name == name)
        process = identify(os.getpid())
        assert process is not None
        self.next += 1
        record = AttemptRecord(
            id=self.next,
            queued=queued,
            number=queued.attempts + 1,
            gpus=gpus,
            labels=tuple(str(i) for i in range(len(gpus))),
            process=process,
            log=str(self.run.attempt_log(name, queued.attempts + 1)),
            started_at=clock.wall() - ago_s,
            started_mono=clock.mono() - ago_s,
        )
        self.queue.record_starts([StartRecord(record, 1.0, None)], self.run_id)
        return record

    def end(self, record: AttemptRecord, state: JobState, reason: str | None = None, not_before: float = 0.0) -> None:
        well = state is JobState.DONE
        again = (
            None if not not_before else NextTry(not_before=not_before, request=record.queued.request, avoid=frozenset())
        )
        self.queue.record_ends(
            [
                settled(
                    record,
                    AttemptState.DONE if well else AttemptState.FAILED,
                    state,
                    clock.wall(),
                    mono=clock.mono(),
                    code=0 if well else 1,
                    failure=None if well else FailureClass.CRASH,
                    reason=reason,
                    again=again,
                )
            ]
        )[0]

    def status(self, page: JobSelection | None = None) -> RunStatus:
        return read_status(self.run, page)

    def reason(self, name: str) -> str | None:
        return next(each.reason for each in self.status().jobs if each.name == name)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "run")


def test_a_job_is_never_between_two_states(scene: Scene) -> None:
    """Jobs go from state to state as fast as they can; every look finds each of them, once."""
    names = [f"job-{i}" for i in range(30)]
    scene.queue.submit([job(name) for name in names])
    scene.begin()
    looks: list[list[str]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            told = scene.status(EVERYTHING)
            assert told.counts.total == len(told.jobs) == told.matching
            looks.append(sorted(each.name for each in told.jobs))

    looker = threading.Thread(target=look)
    looker.start()
    for name in names:
        scene.end(scene.start(name), JobState.DONE)
        time.sleep(0.002)
    over.set()
    looker.join(timeout=60)
    assert len(looks) > 1
    assert all(found == sorted(names) for found in looks)


def test_a_run_in_the_middle(scene: Scene) -> None:
    scene.queue.submit([job("a"), job("b"), job("c"), job("d", needs=("a", "c")), job("e", title="the last")])
    scene.begin()
    scene.end(scene.start("b", ago_s=10), JobState.DONE)
    scene.end(scene.start("c"), JobState.FAILED, "it broke")
    running = scene.start("a", ("GPU-a", "GPU-b"), ago_s=5)
    scene.run.attempt_progress(running.id).write_text(json.dumps({"done": 1, "total": 4, "stage": "h.0"}))
    told = scene.status()
    assert (told.counts.total, told.counts.done, told.counts.failed, told.counts.cancelled) == (5, 1, 1, 1)
    assert [(each.name, each.state) for each in told.jobs] == [
        ("a", "running"),
        ("c", "failed"),
        ("e", "waiting"),
        ("d", "cancelled"),
        ("b", "done"),
    ]
    first, failed, waiting, cancelled, _ = told.jobs
    assert first.attempt is not None
    assert (first.attempt.gpus, first.attempt.pid) == (("0", "1"), os.getpid())
    assert first.attempt.progress is not None and first.attempt.progress.stage == "h.0"
    assert first.attempt.run_s is not None and 5 <= first.attempt.run_s < 60
    assert first.attempt.eta_s == pytest.approx(3 * first.attempt.run_s)
    assert failed.reason == "it broke" and failed.attempt is not None and failed.attempt.failure_class == "crash"
    assert waiting.title == "the last" and waiting.command == ("true", "e") and waiting.attempt is None
    assert cancelled.reason == "needs c, which failed"
    assert told.dispatcher is not None and told.dispatcher.pid == os.getpid()
    # By its own progress 15 s of the one that runs are left; one waits, and the mean is 10 s.
    assert told.eta_s == pytest.approx(25, abs=3)


def test_nobody_works_on_it(scene: Scene) -> None:
    scene.queue.submit([job("a")])
    assert scene.status().dispatcher is None
    assert scene.reason("a") == "no gpuherd works on this queue"
    scene.begin()
    assert scene.status().dispatcher is not None
    scene.queue.end_run(scene.run_id, clock.wall())
    assert scene.status().dispatcher is None
    assert scene.status().eta_s is None


@pytest.mark.parametrize("column, value", [("pid", 2**22 + 7), ("boot", "another"), ("started_mono", -1e9)])
def test_a_dispatcher_that_died_is_none(scene: Scene, column: str, value: object) -> None:
    """Its pid is gone, or from before a reboot, or is now that of a process younger than the run."""
    scene.begin()
    with sqlite3.connect(scene.run.queue) as other:
        other.execute(f"UPDATE runs SET {column} = ?", (value,))
    other.close()
    assert scene.status().dispatcher is None


def test_a_dispatcher_that_gave_the_lock_back_is_at_work_no_more(scene: Scene) -> None:
    """An error ended its run, and its process lives on (a notebook)."""
    lock = DispatcherLock(scene.run.lock)
    scene.begin()
    assert scene.status().dispatcher is not None
    lock.close()
    assert scene.status().dispatcher is None


def test_nobody_works_on_a_copy(scene: Scene, tmp_path: Path) -> None:
    scene.begin()
    assert scene.status().dispatcher is not None
    shutil.copytree(scene.run.root, tmp_path / "copy")
    assert read_status(RunDirectory(tmp_path / "copy")).dispatcher is None


def test_why_a_job_waits(scene: Scene) -> None:
    scene.queue.submit([job("a", retries=3), job("b", needs=("a",)), job("c"), job("d")])
    scene.begin()
    assert scene.reason("b") == "needs a"
    assert (scene.reason("a"), scene.reason("c")) == ("is next", "1 waiting job is before it")
    assert scene.reason("d") == "2 waiting jobs are before it"
    assert scene.status(JobSelection(text="d")).jobs[0].reason == "others are before it"
    scene.end(scene.start("a"), JobState.WAITING, "it broke", clock.wall() + 30)
    assert scene.reason("a") == "next try in 30 s after: it broke"
    c = next(each.id for each in scene.status().jobs if each.name == "c")
    file = StateFile(scene.run.state_file)

    def tell(state: DispatcherState, now: float) -> None:
        file.touch()
        file.keep_time(now, lambda: state)

    tell(DispatcherState(pid=os.getpid(), waits={c: "GPU 0: alice runs\x1b[2J python"}), 0.0)
    assert scene.reason("c") == "GPU 0: alice runs python"
    assert scene.reason("d") == "2 waiting jobs are before it"
    tell(DispatcherState(pid=os.getpid(), closed="quiet hours until 18:00"), 5.0)
    assert scene.reason("c") == "quiet hours until 18:00"
    tell(DispatcherState(pid=os.getpid(), mode="draining"), 10.0)
    assert scene.reason("c") == "gpuherd is draining: nothing new is started"
    tell(DispatcherState(pid=os.getpid() + 1, mode="draining"), 20.0)
    assert scene.reason("c") == "1 waiting job is before it", "that file is of another dispatcher"


def test_the_place_in_the_queue_is_by_the_order_that_the_dispatcher_has(scene: Scene) -> None:
    scene.queue.submit(
        [job("short", cost=1.0), job("long", cost=9.0), job("first", priority=1), job("longest", cost=99)]
    )
    scene.begin()
    by_age = [each.name for each in scene.status().jobs]
    file = StateFile(scene.run.state_file)
    file.touch()
    file.keep_time(0.0, lambda: DispatcherState(pid=os.getpid(), settings={"order": "longest"}))
    assert [each.name for each in scene.status().jobs] == ["first", "longest", "long", "short"]
    assert scene.reason("short") == "3 waiting jobs are before it"
    assert by_age == ["first", "short", "long", "longest"]
    page = JobSelection(states=(JobState.WAITING,), offset=2, limit=1)
    assert [(each.name, each.reason) for each in scene.status(page).jobs] == [("long", "2 waiting jobs are before it")]


def test_what_is_left_goes_by_the_cost_of_the_jobs(scene: Scene) -> None:
    scene.queue.submit([job("a", cost=1.0), job("b", cost=2.0), job("c", cost=100.0), job("d")])
    scene.begin()
    scene.end(scene.start("a", ago_s=10.0), JobState.DONE)
    scene.start("b", ago_s=5.0)
    # 10 s for a unit: 15 s of b are left, and 1000 s of c; for d 10 s, the mean.
    assert scene.status().eta_s == pytest.approx(1025.0, abs=2.0)
    # One runs now, though the dispatcher can have two side by side, and says so.
    file = StateFile(scene.run.state_file)
    file.touch()
    file.keep_time(0.0, lambda: DispatcherState(pid=os.getpid(), at_once=2))
    assert scene.status().eta_s == pytest.approx(512.5, abs=2.0)


def test_a_pause_is_no_time_that_jobs_take(scene: Scene) -> None:
    scene.queue.submit([job("a"), job("b"), job("c")])
    scene.begin()
    done = scene.start("a", ago_s=100.0)
    scene.queue.mark_paused(done.id, PauseReason.USER, clock.mono() - 95.0)
    scene.queue.record_ends(
        [settled(done, AttemptState.DONE, JobState.DONE, clock.wall(), mono=clock.mono(), paused_s=90.0)]
    )[0]
    runs = scene.start("b", ago_s=500.0)
    scene.queue.mark_paused(runs.id, PauseReason.USER, clock.mono() - 496.0)
    # 10 s each: 6 s of b, which has worked for 4 s, and c.
    assert scene.status().eta_s == pytest.approx(16.0, abs=2.0)
    scene.queue.mark_resumed(runs.id, PauseReason.USER, clock.mono())
    assert scene.status().eta_s == pytest.approx(16.0, abs=2.0)


def test_gpus_that_are_left_out_count_the_time_down_and_the_rest_knows(scene: Scene) -> None:
    scene.queue.submit([job(name, cost=1.0) for name in "abcdef"])
    scene.begin()
    scene.end(scene.start("a", ago_s=100.0), JobState.DONE)
    out = quarantine.after_fault({}, ["GPU-1"], "Xid 79", now=clock.wall() - 570.0)
    out |= quarantine.after_fault({}, ["GPU-elsewhere"], "Xid 79", now=clock.wall())
    scene.queue.save_gpu_health({uuid: quarantine.to_json(health) for uuid, health in out.items()})
    file = StateFile(scene.run.state_file)
    file.touch()
    here = (GpuState(uuid="GPU-0", label="0"), GpuState(uuid="GPU-1", label="1"))
    file.keep_time(0.0, lambda: DispatcherState(pid=os.getpid(), at_once=1, gpus=here))
    status = scene.status()
    assert status.left_out.keys() == {"1"}
    assert re.fullmatch(r"left out for (30|29) s more: GPU fault \(Xid 79\)", status.left_out["1"])
    # 500 s of work, by one GPU from now on and by another 30 s later.
    assert status.eta_s == pytest.approx(265.0, abs=2.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(as_table(status))
    assert "GPU 1 is left out for" in console.export_text()


def test_since_when_a_waiting_job_could_have_run(scene: Scene) -> None:
    scene.queue.submit([job("a"), job("b", needs=("a",)), job("c", round=1), job("held")])
    scene.queue.pause(("held",), "me", 0.0)
    told = {each.name: each.ready_at for each in scene.status().jobs}
    assert told["a"] == pytest.approx(clock.wall(), abs=30.0)
    assert (told["b"], told["c"], told["held"]) == (None, None, None)
    scene.begin()
    scene.queue.cancel(("held",), "me")
    scene.end(scene.start("a"), JobState.DONE)
    scene.end(scene.start("b"), JobState.DONE)
    later = next(each.ready_at for each in scene.status().jobs if each.name == "c")
    assert later is not None
    assert later > (told["a"] or 0.0)


def test_pages(scene: Scene) -> None:
    scene.queue.submit([job(f"job-{i:02}", priority=i % 3) for i in range(20)])
    scene.begin()
    for name in ("job-00", "job-01"):
        scene.end(scene.start(name), JobState.DONE)
    told = scene.status(JobSelection(states=(JobState.WAITING,), limit=4))
    assert (told.matching, [each.name for each in told.jobs]) == (18, ["job-02", "job-05", "job-08", "job-11"])
    told = scene.status(JobSelection(limit=3, offset=17))
    assert (told.matching, [each.name for each in told.jobs]) == (20, ["job-18", "job-01", "job-00"])
    assert [each.name for each in scene.status(JobSelection(text="B-1", each=1)).jobs] == ["job-11"]
    assert [each.name for each in scene.status(JobSelection(names=("job-04", "none"))).jobs] == ["job-04"]
    assert len(scene.status(EVERYTHING).jobs) == 20
    assert scene.status(JobSelection(text="%")).matching == 0, "a percent sign is a percent sign"


@pytest.mark.parametrize("order", ["age", "longest"])
def test_pages_of_waiting_jobs_are_parts_of_one_order_whatever_keeps_them(scene: Scene, order: str) -> None:
    """With GPUs and without, of two rounds, paused, and with needs that are not met."""
    scene.queue.submit(
        [job(f"job-{i:02}", gpus=i % 3, priority=i % 2, round=i // 12, cost=float(i * 7 % 5)) for i in range(24)]
        + [job(f"after-{i}", needs=("job-00",), gpus=i) for i in range(3)]
    )
    scene.queue.pause(["job-05", "job-10", "job-22"], "someone", clock.mono())
    scene.begin()
    file = StateFile(scene.run.state_file)
    file.touch()
    file.keep_time(0.0, lambda: DispatcherState(pid=os.getpid(), settings={"order": order}))
    with closing(sqlite3.connect(scene.run.queue)) as rows:
        longest = "rank DESC, " if order == "longest" else ""
        found = rows.execute(f"SELECT name FROM jobs ORDER BY blocked > 0 OR held, round, priority DESC, {longest}id")
        expected = [name for (name,) in found]
    assert len(expected) == 27
    for offset in range(0, 27, 4):
        told = scene.status(JobSelection(states=(JobState.WAITING,), limit=4, offset=offset))
        assert [each.name for each in told.jobs] == expected[offset : offset + 4]
        assert told.matching == 27


def test_the_attempts_of_a_job(scene: Scene) -> None:
    scene.queue.submit([job("a")])
    scene.begin()
    scene.end(scene.start("a"), JobState.WAITING, "it broke")
    scene.start("a")
    with opened(scene.run) as reader:
        assert [(each.number, each.state) for each in attempts_of(reader, "a")] == [(1, "failed"), (2, "running")]
        assert attempts_of(reader, "b") == ()
        assert job_names(reader) == ["a"]


def test_a_queue_that_is_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(UsageError, match="no queue in"):
        read_status(run)
    run.queue.write_bytes(b"no database at all" * 100)
    with pytest.raises(QueueUnreadable, match=r"is damaged .*To keep it aside.* mkdir "):
        read_status(run)
    run.queue.unlink()
    sqlite3.connect(run.queue).close()
    with pytest.raises(UsageError, match="no queue in"):
        read_status(run)
    with sqlite3.connect(run.queue) as other:
        other.execute("CREATE TABLE jobs (id)")
    other.close()
    with pytest.raises(QueueUnreadable, match="no gpuherd queue"):
        read_status(run)
    assert not (tmp_path / "attempts").exists(), "looking makes nothing"


def test_a_queue_of_a_newer_gpuherd(scene: Scene) -> None:
    with sqlite3.connect(scene.run.queue) as other:
        other.execute("PRAGMA user_version = 999")
    other.close()
    with pytest.raises(QueueUnreadable, match="newer gpuherd"):
        scene.status()


def test_reading_changes_nothing_and_waits_for_nobody(scene: Scene) -> None:
    scene.queue.submit([job("a")])
    reader = QueueReader(scene.run.queue)
    with pytest.raises(QueueUnreadable, match="readonly"):
        reader.rows("DELETE FROM jobs")
    reader.close()
    writer = sqlite3.connect(scene.run.queue, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE jobs SET priority = 7")
    assert scene.status().jobs[0].priority == 0, "though the writer has not ended"
    writer.execute("COMMIT")
    writer.close()
    assert scene.status().jobs[0].priority == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user for a moment")
def test_a_finished_run_in_a_folder_that_we_may_only_read(scene: Scene) -> None:
    scene.queue.submit([job("a")])
    scene.queue.close()
    os.chmod(scene.run.queue, 0o644)
    for folder in [scene.run.root, *scene.run.root.parents]:
        if not os.stat(folder).st_mode & 0o005:
            os.chmod(folder, 0o755)
    os.chmod(scene.run.root, 0o555)
    os.seteuid(65534)
    try:
        assert scene.status().counts.waiting == 1
    finally:
        os.seteuid(0)
    assert [path.name for path in scene.run.root.glob("queue.sqlite-*")] == []


@pytest.mark.parametrize("forbidden", ["the folder", "the file"])
def test_a_queue_that_this_user_may_not_read(
    scene: Scene, forbidden: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs two users")
    scene.queue.submit([job("a")])
    scene.queue.close()
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    scene.run.root.chmod(0o700 if forbidden == "the folder" else 0o755)
    import gpuherd.jobs.control.client  # noqa: F401 - now: the other user may be unable to read Python's own files

    os.seteuid(65534)
    try:
        for words in (["status", str(scene.run.root)], ["cancel", str(scene.run.root), "a"]):
            with pytest.raises(QueueUnreadable, match=r"permission denied[;,] it is root's"):
                run_command(words)
    finally:
        os.seteuid(0)


def test_twenty_thousand_jobs(scene: Scene) -> None:
    scene.queue.submit([job(f"job-{i:06}") for i in range(20_000)])
    scene.begin()
    quickest = float("inf")
    for _ in range(5):
        began = time.process_time()
        told = scene.status(JobSelection(limit=40))
        quickest = min(quickest, time.process_time() - began)
    assert (told.counts.waiting, len(told.jobs)) == (20_000, 40)
    assert quickest < 0.1  # 0.02 on a slow core; the jobs themselves, read one by one, take half a second


def test_the_state_is_written_once_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    file = StateFile(path)
    asked: list[float] = []

    def at(now: float, state: DispatcherState) -> None:
        def give() -> DispatcherState:
            asked.append(now)
            return state

        file.touch()
        file.keep_time(now, give)

    first, second = (DispatcherState(pid=1, mode=mode, waits={3: "x"}) for mode in ("working", "draining"))
    at(100.0, first)
    written = path.stat().st_ino
    at(100.4, second)
    assert dispatcher_state.read(path, 1) == first
    assert file.due_at == 101.0
    at(101.0, first)
    assert path.stat().st_ino == written, "it is as it was told"
    third = DispatcherState(
        pid=1, gpus=(GpuState(uuid="u", label="0", busy="x", ours=True),), settings={"max_gpus": 4}, at_once=3
    )
    at(101.9, third)
    at(102.1, third)
    assert dispatcher_state.read(path, 1) == third
    assert asked == [100.0, 101.0, 102.1], "nothing is made that is not told"
    file.keep_time(200.0, lambda: second)
    assert dispatcher_state.read(path, 1) == third, "nothing has happened"
    assert dispatcher_state.read(path, 2) is None
    for damage in ("[]", "{", '{"pid": 1}', '{"pid": 1, "mode": "x", "closed": null, "waits": [], "gpus": []}'):
        path.write_text(damage)
        assert dispatcher_state.read(path, 1) is None
    file.remove()
    file.remove()
    assert dispatcher_state.read(path, 1) is None


@pytest.mark.parametrize("height", [12, 24, 60])
def test_on_a_screen_all_states_are_seen_however_many_jobs_run(scene: Scene, height: int) -> None:
    scene.queue.submit([job(f"job-{i}", title=f"a title that is too long for a line {i} " * 3) for i in range(60)])
    scene.begin()
    records = [scene.start(f"job-{i}") for i in range(40)]
    scene.end(records[0], JobState.FAILED, reason="it broke " * 30)
    console = Console(file=io.StringIO(), width=80)
    console.print(as_table(scene.status(JobSelection(each=8)), height))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    # One for when it was made, and one for the cursor.
    assert len(lines) <= height - 2 or height == 12
    shown = Counter(line.split()[0] for line in lines[5:-1])
    assert shown["running"] and shown["failed"] == 1 and (shown["waiting"] or height == 12)
    left = {word: int(number) for number, word in re.findall(r"(\d+) (running|waiting)", " ".join(lines[-2:]))}
    assert shown["running"] + left.get("running", 0) == 39
    assert shown["waiting"] + left["waiting"] == 20


@pytest.mark.parametrize(("height", "whole"), [(None, True), (24, False)])
def test_a_long_path_is_in_one_line(scene: Scene, height: int | None, whole: bool) -> None:
    """Printed it can be copied whole; on a screen it takes one line, for which room was left."""
    folder = Path("/scratch") / "/".join(f"part-{number}" for number in range(20))
    status = replace(scene.status(JobSelection()), folder=folder)
    console = Console(file=io.StringIO(), width=80)
    console.print(as_table(status, height), crop=False)
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()[:2]
    assert (first.rstrip() == str(folder)) is whole and first.startswith("/scratch/part-0/")
    assert second.startswith("0 of 0 done")


def test_a_status_is_printed_with_its_path_in_one_line(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("/scratch") / "/".join(f"part-{number}" for number in range(20))
    print_tables(lambda: as_tables(replace(scene.status(JobSelection()), folder=folder), ()), None)
    assert str(folder) in capsys.readouterr().out.splitlines()[0]


def test_a_folder_that_is_moved_away_while_it_is_read(scene: Scene, tmp_path: Path) -> None:
    scene.queue.submit([job("a")])
    scene.begin()
    with opened(scene.run) as reader:
        scene.run.root.rename(tmp_path / "elsewhere")
        assert status_of(scene.run, reader, EVERYTHING).dispatcher is None


def test_a_state_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    """The disk was full for a while."""
    file = StateFile(tmp_path / "folder" / "standing.json")
    for now in (100.0, 102.0):
        file.touch()
        file.keep_time(now, lambda: DispatcherState(pid=1))
        assert (dispatcher_state.read(tmp_path / "folder" / "standing.json", 1) is not None) == (now == 102.0)
        (tmp_path / "folder").mkdir(exist_ok=True)


def test_a_job_that_ended_while_no_dispatcher_was_there(scene: Scene) -> None:
    scene.queue.submit([job("a"), job("b")])
    scene.begin()
    lives, dead = scene.start("a"), scene.start("b")
    with sqlite3.connect(scene.run.queue) as db:
        db.execute("UPDATE attempts SET start_ticks = start_ticks + 1 WHERE id = ?", (dead.id,))
        db.execute("UPDATE runs SET pid = 1, boot = 'before'")
    db.close()
    told = {each.name: each for each in scene.status().jobs}
    assert told["a"].reason is None and told["a"].attempt is not None and told["a"].attempt.run_s is not None
    assert told["b"].reason == "has ended; how is told when a gpuherd works on it again"
    assert told["b"].attempt is not None and told["b"].attempt.run_s is None
    assert what(told["b"]) == told["b"].reason
    assert lives.process is not None and lives.process.is_alive()


def test_a_waiting_job_tells_what_it_asks_for_and_what_of_that_was_learned(scene: Scene) -> None:
    scene.queue.submit([job("a", memory_mb=30_000, family="f"), job("b", memory_mb=30_000), job("c", gpus=0)])
    for _ in range(2):
        scene.queue.learn("f", 8_000, well=True)
    told = {each.name: each for each in read_status(scene.run).jobs}
    assert (told["a"].memory_mb, told["a"].learned) == (10_256, "2 of its family used at most 8000 MB")
    assert (told["b"].memory_mb, told["b"].learned) == (30_000, None)
    assert told["c"].memory_mb is None
    assert what(told["a"]).endswith("asks for 10256 MB: 2 of its family used at most 8000 MB")


def _ended_jobs(scene: Scene, count: int) -> None:
    """So many jobs that are done, as a long run leaves them; written as rows, for speed."""
    scene.queue.submit([job(f"job-{i:06}", gpus=1, memory_mb=8000, family="one") for i in range(count)])
    scene.queue.close()
    now = clock.wall()
    with closing(sqlite3.connect(scene.run.queue)) as rows, rows:
        rows.execute("INSERT INTO runs VALUES (1, 1, 'an-older-boot', ?, 0, ?, '', 'local')", (now, now))
        rows.execute("UPDATE jobs SET state = 'done', attempts = 1")
        rows.execute(
            "INSERT INTO attempts (job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " started_at, started_mono, ended_at, ended_mono, exit_code, peak_mb) SELECT id, 1, 1, 'done',"
            """ '["GPU-a"]', '["0"]', id, 1, 'an-older-boot', 'logs/' || name || '.1.log', 0.5, ?, 10, ?, 14, 0, 7000"""
            " FROM jobs",
            (now - 100, now - 96),
        )


_COST = """
import resource, sys
from gpuherd.cli.main import run
assert run(sys.argv[1:]) == 0
used = resource.getrusage(resource.RUSAGE_SELF)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used.ru_utime + used.ru_stime, int(peak.split()[1]) / 1024, file=sys.stderr)
"""


def test_many_ended_jobs_are_looked_at(scene: Scene) -> None:
    """In seconds of CPU and MB: one by one and all in memory 20,000 took 3 s and 200 MB."""
    _ended_jobs(scene, 20_000)
    words = [sys.executable, "-c", _COST, "status", str(scene.run.root), "--json"]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    seconds, mb = map(float, done.stderr.split())
    assert seconds < 1.8 and mb < 60  # 0.5 and 25
    console = Console(file=io.StringIO(), width=100)
    began = time.process_time()
    parts = as_tables(*by_pages(scene.run, EVERYTHING))
    for _ in range(2):  # what is above the jobs, and the first table
        console.print(next(parts))
    assert time.process_time() - began < 0.8  # 0.2: the other jobs are not read before the first are shown
    assert isinstance(console.file, io.StringIO) and console.file.getvalue().count("\n") == 3 + 1 + 1 + 500


def test_pages_have_every_job_once_while_jobs_go_on(scene: Scene) -> None:
    names = [f"job-{i:02}" for i in range(30)]
    scene.queue.submit([job(name) for name in names])
    scene.begin()
    records = [scene.start(name) for name in names[:4]]
    status, pages = by_pages(scene.run, EVERYTHING, 7)
    found = [next(pages)]
    for record in records:
        scene.end(record, JobState.DONE)
    scene.start("job-10")
    found += pages
    assert (status.counts.running, status.matching) == (4, 30)
    assert [len(page) for page in found] == [7, 7, 7, 7, 2]
    flat = [each for page in found for each in page]
    assert sorted(each.name for each in flat) == names
    by_name = {each.name: each for each in flat}
    assert (by_name["job-00"].state, by_name["job-10"].state) == ("running", "running")
    assert by_name["job-29"].reason == "24 waiting jobs are before it"


def test_json_of_ended_jobs_is_what_their_status_is(scene: Scene) -> None:
    """It is made by SQLite; that of the others is not."""
    scene.queue.submit(
        [
            job("broken", title='a "title" → of 2 words\n', env={"A": "b"}, memory_mb=100),
            job("needs it", needs=("broken",)),
            job("well", gpus=2),
            job("handed", title=""),
            job("in line", priority=-3),
            job("waits", family="one"),
            job("runs"),
        ]
    )
    scene.begin()
    scene.end(scene.start("broken"), JobState.FAILED, 'it said: "no" \x1b[31m, → \u2028')
    scene.end(scene.start("well", ("GPU-a", "GPU-b")), JobState.DONE)
    for name in ("handed", "in line"):
        scene.end(scene.start(name), JobState.FAILED)
    scene.start("runs")
    with closing(sqlite3.connect(scene.run.queue)) as rows, rows:
        of = "WHERE job = (SELECT id FROM jobs WHERE name = ?)"
        set_to = "UPDATE attempts SET engine = 'slurm', batch = 'b', place = 2, handle = '17', node = ? "
        rows.execute(set_to + of, ("n1", "handed"))
        rows.execute(set_to + of, (None, "in line"))
    for page in (EVERYTHING, replace(EVERYTHING, text="N"), replace(EVERYTHING, states=(JobState.FAILED,))):
        expected = json.loads(json.dumps(as_json(scene.status(page))))
        for lines in (True, False):
            text = "".join(json_text(scene.run, page, lines=lines))
            assert text.isascii() and (text.count("\n") > 20) is lines
            told = json.loads(text)
            assert list(told) == list(expected)
            assert [each["name"] for each in told["jobs"]] == [each["name"] for each in expected["jobs"]] != []
            for ours, theirs in zip(told["jobs"], expected["jobs"], strict=True):
                assert list(ours) == list(theirs)
                assert list(ours["attempt"] or ()) == list(theirs["attempt"] or ())
                if theirs["state"] != "running":
                    assert _equal(ours, theirs), (ours, theirs)
    nothing = "".join(json_text(scene.run, replace(EVERYTHING, text="no such")))
    assert json.loads(nothing)["jobs"] == []


def _equal(ours: object, theirs: object) -> bool:
    """But for what SQLite, which writes 15 digits, leaves of a time of day."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(_equal(ours[key], value) for key, value in theirs.items())
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) < 1e-4
    return ours == theirs


def test_a_view_looks_again_and_again(scene: Scene, standin: Callable[..., Any]) -> None:
    scene.queue.submit([job("done"), job("runs"), job("waits")])
    scene.begin()
    scene.end(scene.start("done"), JobState.DONE)
    running = scene.start("runs")
    looker = Looker(scene.run)
    first = looker.look()
    scene.run.attempt_progress(running.id).write_text(json.dumps({"done": 1, "total": 4}))
    third = looker.look()
    assert first.status and third.status
    assert first.status.jobs[2].name == "done"
    assert third.status.jobs[0].attempt and third.status.jobs[0].attempt.progress
    scene.queue.submit([job("runs"), job("waits"), job("more")])
    last = looker.look()
    assert last.status and [each.name for each in last.status.jobs] == ["runs", "waits", "more"]
    (filtered,) = looker.look("mor").status.jobs  # type: ignore[union-attr]
    assert filtered.name == "more"
    shutil.rmtree(scene.run.root)
    assert looker.look().problem is not None
