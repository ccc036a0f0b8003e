"""Queues and jobs as the pages show them, also where they are damaged, huge, hostile or gone."""

from __future__ import annotations

import doctest
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.web.scenes import HOSTILE, Scene, job, place_of

from gpuherd.errors import QueueUnreadable
from gpuherd.jobs import JobState
from gpuherd.jobs.dispatcher_state import DispatcherState, GpuState, StateFile
from gpuherd.jobs.lock import _NAME as _MACHINE_FILE
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.web import actions, places, queue_views
from gpuherd.web.actions import Action, Forbidden, carry_out
from gpuherd.web.log_views import read_end
from gpuherd.web.pages import queues
from gpuherd.web.queue_views import PAGE_JOBS, Filter, NotThere, names_of, read_job, read_jobs, read_queue


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "run")


def test_a_queue_says_how_it_stands_and_what_its_next_job_waits_for(scene: Scene) -> None:
    scene.in_all_states()
    view = read_queue(scene.place)
    assert view.problem is None and view.total == 7
    assert view.counts == {"waiting": 3, "running": 1, "done": 1, "failed": 1, "cancelled": 1, "paused": 1}
    assert view.headline.startswith("1 of 7 done, 1 failed, 1 cancelled, 1 running")
    assert view.next_job is not None and view.next_job[0] == "next"
    assert view.next_job[2] == "is next"
    assert view.is_worked and view.dispatcher.startswith(f"gpuherd (pid {os.getpid()}) works on it since")


def test_gpus_are_those_of_the_dispatcher(scene: Scene) -> None:
    scene.queue.submit([job("one")])
    scene.begin()
    scene.run.lock.write_text(f"{os.getpid()} dispatcher\n")
    state = DispatcherState(
        pid=os.getpid(),
        mode="draining",
        gpus=(
            GpuState(uuid="a", label="0"),
            GpuState(uuid="b", label="1", busy="used by \x1b[1mbob"),
            GpuState(uuid="c", label="2", busy="ours", ours=True),
        ),
    )
    file = StateFile(scene.run.state_file)
    file.touch()
    file.keep_time(1e9, lambda: state)
    view = read_queue(scene.place)
    assert view.is_worked and view.is_ending
    assert [(gpu.label, gpu.note, gpu.is_free) for gpu in view.gpus] == [
        ("0", "free", True),
        ("1", "used by bob", False),
        ("2", "runs a job of this queue", False),
    ]
    # A FIFO in its place holds nobody up.
    scene.run.state_file.unlink()
    os.mkfifo(scene.run.state_file)
    assert read_queue(scene.place).gpus == ()


def test_jobs_by_state_by_text_and_what_may_be_done_with_them(scene: Scene) -> None:
    scene.in_all_states()
    view = read_jobs(scene.place, Filter())
    lines = {line.name: line for line in view.jobs}
    assert [line.name for line in view.jobs] == ["busy", "bad", "next", "held", "later", "gone", "good"]
    assert lines["busy"].done == 0.25 and "3/12" in lines["busy"].what and lines["busy"].gpus == "0"
    assert lines["bad"].what == "crash, exit code 3: ValueError: no"
    assert lines["later"].what == "needs next" and lines["later"].gpus == "any 2"
    assert lines["held"].state == "paused"
    assert {name: {kind.value for kind in line.may} for name, line in lines.items()} == {
        "busy": {"cancel", "pause", "priority"},
        "next": {"cancel", "pause", "priority"},
        "later": {"cancel", "pause", "priority"},
        "held": {"cancel", "resume", "priority"},
        "bad": {"retry"},
        "gone": {"retry"},
        "good": set(),
    }
    assert [line.name for line in read_jobs(scene.place, Filter(JobState.FAILED)).jobs] == ["bad"]
    assert [line.name for line in read_jobs(scene.place, Filter(text="OO")).jobs] == ["good"]
    assert read_jobs(scene.place, Filter(text="nothing")).jobs == ()
    assert read_jobs(scene.place, Filter(page=9)).jobs == ()


@given(st.dictionaries(st.sampled_from(["state", "q", "page"]), st.text(max_size=300)))
def test_any_address_makes_a_filter(query: dict[str, str]) -> None:
    found = Filter.of(query)
    assert found.page >= 1 and found.selection.offset < 2**32
    assert len(found.text) <= 200 and "\n" not in found.text and "\x1b" not in found.text


def test_a_job_has_its_command_attempts_needs_and_facts(scene: Scene) -> None:
    scene.in_all_states()
    ids = {line.name: line.id for line in read_jobs(scene.place, Filter()).jobs}
    busy = read_job(scene.place, ids["busy"])
    assert busy.command == "true busy"
    attempt = busy.attempt(None)
    assert attempt is not None and attempt.where == "GPU 0" and not attempt.is_over and attempt.took == "30 s"
    assert attempt.log == scene.run.attempt_log("busy", 1) and busy.attempt(7) is None
    bad = read_job(scene.place, ids["bad"]).attempts
    assert [(each.state, each.ended_by, each.is_over) for each in bad] == [
        ("failed", "crash, exit code 3: ValueError: no", True)
    ]
    later = read_job(scene.place, ids["later"])
    assert later.needs == ((ids["next"], "next", "waiting"),)
    assert ("asks for", "2 GPUs with 2000 MB of free memory each") in later.facts
    assert later.attempts == () and later.attempt(None) is None
    assert names_of(scene.place, (ids["bad"], ids["good"])) == ("bad", "good")
    with pytest.raises(NotThere, match="no job number 4711"):
        read_job(scene.place, 4711)
    with pytest.raises(NotThere, match="no job number 4711"):
        names_of(scene.place, (ids["bad"], 4711))


def test_hostile_names_come_without_signs_that_steer(scene: Scene) -> None:
    scene.queue.submit([job(HOSTILE, title=HOSTILE), job("x" * 10_000), job("long", argv=("echo", "\x1b[2J" * 9000))])
    lines = read_jobs(scene.place, Filter()).jobs
    assert lines[0].title == "<b onmouseover=alert(1)>'\"&{{7*7}} </b>"
    assert len(lines[1].title) == 300
    command = read_job(scene.place, lines[2].id).command
    assert "\x1b" not in command and len(command) < 21_000
    assert "\\x1b[2J" in command


@pytest.mark.parametrize("how", ["noise", "newer", "other", "view", "folder", "fifo", "nonsense"])
def test_a_queue_that_can_not_be_read_is_named_with_the_reason(scene: Scene, how: str) -> None:
    scene.in_all_states()
    root = scene.run.root
    scene.queue.close()
    path = scene.run.queue
    if how in ("newer", "other", "view", "nonsense"):
        with closing(sqlite3.connect(path)) as db:
            if how == "newer":
                db.execute("PRAGMA user_version = 99")
            elif how == "other":
                db.execute("PRAGMA application_id = 1")
            elif how == "view":
                db.execute("DROP TABLE families")
                db.execute(
                    "CREATE VIEW families AS WITH RECURSIVE f(name, peak_mb) AS"
                    " (SELECT '', 1 UNION ALL SELECT name, peak_mb FROM f) SELECT * FROM f"
                )
            else:
                db.execute("UPDATE jobs SET spec = '[1]', not_before = 'x'")
            db.commit()
    else:
        for each in root.glob("queue.sqlite*"):
            each.unlink()
        if how == "noise":
            path.write_bytes(os.urandom(20_000))
        elif how == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    began = time.monotonic()
    place = place_of(root)
    view = read_queue(place)
    assert view.problem is not None and view.total == 0
    with pytest.raises(QueueUnreadable):
        read_jobs(place, Filter())
    assert time.monotonic() - began < 5


def test_a_queue_that_goes_while_it_is_shown(scene: Scene) -> None:
    scene.in_all_states()
    place = scene.place
    number = read_jobs(place, Filter()).jobs[0].id
    scene.queue.close()
    shutil.rmtree(scene.run.root)
    assert "there is no queue in" in str(read_queue(place).problem)
    with pytest.raises(NotThere):
        read_jobs(place, Filter())
    with pytest.raises(NotThere):
        read_job(place, number)


def test_of_many_jobs_a_page_is_read(scene: Scene) -> None:
    _pages_of_many(scene, 3000)


@pytest.mark.slow
def test_of_100_000_jobs_a_page_is_read_in_a_moment(scene: Scene) -> None:
    _pages_of_many(scene, 100_000)


def _pages_of_many(scene: Scene, many: int) -> None:
    scene.queue.submit([job(f"job-{number:06d}", priority=number % 3) for number in range(many)])
    place = scene.place
    view = read_jobs(place, Filter())
    assert view.matching == many and len(view.jobs) == PAGE_JOBS and view.pages == many // PAGE_JOBS
    last = read_jobs(place, Filter(page=view.pages))
    assert len(last.jobs) == PAGE_JOBS and {line.id for line in last.jobs}.isdisjoint(line.id for line in view.jobs)
    took = []
    for chosen in (Filter(), Filter(), Filter(JobState.WAITING), Filter(text=f"{many - 1:06d}"), Filter(page=20)):
        began = time.thread_time()
        assert read_jobs(place, chosen).jobs
        took.append(time.thread_time() - began)
    assert max(took) < 0.2, took


def test_two_threads_may_look_at_once(scene: Scene) -> None:
    scene.in_all_states()
    place, found = scene.place, list[int]()
    looks = [threading.Thread(target=lambda: found.append(len(read_jobs(place, Filter()).jobs))) for _ in range(8)]
    for look in looks:
        look.start()
    for look in looks:
        look.join()
    assert found == [7] * 8


@pytest.mark.timeout(30)
def test_fifos_in_place_of_files_hold_nobody_up(scene: Scene) -> None:
    scene.in_all_states()
    for path in (
        scene.run.lock,
        scene.run.state_file,
        scene.run.attempt_progress(scene.busy.id),
        scene.run.queue.with_name(_MACHINE_FILE),
        scene.run.run_json,
        scene.run.attempt_log("busy", 1),
    ):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert read_queue(scene.place).total == 7
    assert DispatcherLock.holder(scene.run.lock) is None
    busy = read_job(scene.place, 3)
    attempt = busy.attempt(None)
    assert busy.line.done is None and attempt is not None and read_end(attempt.log, os.geteuid()) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_queue_that_this_user_may_not_read_is_named_with_its_owner() -> None:
    place = Path(tempfile.mkdtemp(prefix="gpuherd-web-"))
    try:
        scene = Scene(place / "run")
        scene.in_all_states()
        scene.run.root.chmod(0o755)
        place.chmod(0o755)
        os.seteuid(12345)
        found = place_of(scene.run.root)
        assert not found.trusted and found.owner == "root"
        problem = read_queue(found).problem
        assert problem is not None and "permission denied; it is root's" in problem
        with pytest.raises(Forbidden):
            carry_out(found, Action("cancel", all_jobs=True))
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


@pytest.mark.parametrize("module", [actions, places, queue_views, queues], ids=lambda module: module.__name__)
def test_examples_in_the_texts_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted > 0
