"""The queue's file: one of another version is refused, a damaged one can be kept aside, nobody else can read it."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.jobs.attempts import attempt_of, settled

from gpuherd.cli import main
from gpuherd.errors import ExitCode, GpuherdError, QueueUnreadable, UsageError
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.monitor.status import attempts_of, opened
from gpuherd.jobs.queue import schema
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.queue.schema import VERSION, connect, passing_through
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState, StartRecord
from gpuherd.jobs.run_dir import RunDirectory


@pytest.mark.parametrize(("version", "age"), [(0, "an older"), (VERSION - 1, "an older"), (VERSION + 1, "a newer")])
def test_a_file_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path, version: int, age: str) -> None:
    path = tmp_path / "queue.sqlite"
    with Queue(path) as queue:
        queue.add([Job(name="a", argv=("true",))])
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = path.read_bytes()
    for how in (Queue, QueueReader):
        with pytest.raises(QueueUnreadable, match=f"{age} gpuherd .*keep it aside: mkdir"):
            how(path)
    assert path.read_bytes() == before


def test_only_its_owner_can_read_a_queue(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with Queue(tmp_path / "queue.sqlite") as queue:
            queue.add([Job(name="a", argv=("curl", "--header", "secret"))])
            modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(mask)
    assert modes == {0o600}


def test_a_damaged_queue_can_be_kept_aside_as_the_message_says(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    path = folder / "queue.sqlite"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(QueueUnreadable, match="To keep it aside") as caught:
        Queue(path)
    assert path.read_bytes().startswith(b"this is no")
    subprocess.run(["/bin/sh", "-c", str(caught.value).partition("start a new one: ")[2]], check=True)
    with Queue(path) as queue:
        assert queue.states() == {}
    assert (folder / "damaged" / "queue.sqlite").read_bytes().startswith(b"this is no")


def test_counts_are_those_of_now_whoever_has_changed_the_queue(tmp_path: Path) -> None:
    """They are kept while nothing changes."""
    path = tmp_path / "queue.sqlite"
    with Queue(path) as queue, Queue(path) as other:
        queue.add([Job(name="a", argv=("true",)), Job(name="b", argv=("true",))])
        assert queue.counts().waiting == other.counts().waiting == 2
        other.cancel(["a"], "someone")
        assert (queue.counts().waiting, queue.counts().cancelled) == (1, 1)
        queue.add([Job(name="c", argv=("true",))])
        assert queue.counts().waiting == other.counts().waiting == 2


def test_counts_of_a_transaction_that_was_taken_back_are_forgotten(tmp_path: Path) -> None:
    with Queue(tmp_path / "queue.sqlite") as queue:
        with pytest.raises(KeyboardInterrupt), queue.transaction():
            queue.add([Job(name="a", argv=("true",))])
            assert queue.counts().waiting == 1
            raise KeyboardInterrupt
        assert queue.counts().waiting == 0


def test_what_is_looked_through_once_is_not_kept_in_memory_and_the_cache_is_as_large_as_before(tmp_path: Path) -> None:
    connection = connect(tmp_path / "queue.sqlite")
    with closing(connection), closing(sqlite3.connect(":memory:")) as fresh:

        def pages(of: sqlite3.Connection) -> int:
            return int(of.execute("PRAGMA cache_size").fetchone()[0])

        with pytest.raises(ZeroDivisionError), passing_through(connection):
            assert 0 < pages(connection) < 100
            _ = 1 / 0
        assert pages(connection) == pages(fresh)


NO_TEXT = os.fsdecode(b"\xff")


def test_what_is_no_text_is_no_name_of_a_job(tmp_path: Path) -> None:
    """It may come from any command line."""
    run = RunDirectory(tmp_path)
    with Queue(run.queue) as queue:
        queue.add([Job(name="a", argv=("true",))])
        assert queue.job(NO_TEXT) is None
        assert queue.unknown(["a", NO_TEXT]) == (NO_TEXT,)
        assert queue.cancel([NO_TEXT], "me").jobs == ()
    with pytest.raises(UsageError, match="there is no job"):
        send(run, Request(ControlKind.CANCEL, (NO_TEXT,)))
    with opened(run) as reader:
        assert attempts_of(reader, NO_TEXT) == ()


def test_a_job_that_is_named_twice_is_changed_once(tmp_path: Path) -> None:
    with Queue(tmp_path / "queue.sqlite") as queue:
        queue.add([Job(name="a", argv=("true",)), Job(name="b", argv=("true",))])
        changed = queue.cancel(["a", "b", "a"], "me")
        assert (changed.jobs, changed.refused) == (("a", "b"), ())


# --- damage ---------------------------------------------------------------------------------------------------------

PAGE = 4096
COMMANDS = (
    ["status", "{}"],
    ["status", "--json", "{}"],
    ["cancel", "--run", "{}", "--all"],
    ["retry", "--run", "{}", "j3"],
    ["pause", "--run", "{}", "--all"],
    ["batch", "{}.txt", "--gpus-per-job", "0", "--output-dir", "{}"],
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The queue of a run that is over: every kind of row, and tables of several pages."""
    path = tmp_path_factory.mktemp("finished") / "queue.sqlite"
    with Queue(path) as queue:
        queue.submit([Job(name=f"j{i}", argv=("true", "x" * 50), gpus=0) for i in range(40)])
        run = queue.begin_run(1.0, 1.0)
        for number, queued in enumerate(queue.head(40, time.time()), 1):
            queue.record_starts([StartRecord(attempt_of(queued, number), 0.0, None)], run)
            end = settled(number, AttemptState.DONE, JobState.DONE)
            queue.record_ends([end])
        queue.end_run(run, 3.0)
    return path.read_bytes()


def folder_with(queue: bytes, folder: Path) -> RunDirectory:
    """A run folder with this queue, in which jobs have run."""
    folder.mkdir()
    folder.with_suffix(".txt").write_text("true\n")
    run = RunDirectory(folder)
    run.create()
    run.attempt_log("j0", 1).touch()
    run.queue.write_bytes(queue)
    return run


def command(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The command's exit code, and what it says. All that is not ours goes up, as a traceback would."""
    try:
        code = main.run([word.format(folder) for word in words])
    except GpuherdError as problem:
        return problem.exit_code, str(problem)
    return code, capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words[:2]))
def test_a_queue_with_a_page_of_zeros_is_damaged_whatever_is_asked_of_it(
    words: list[str], finished: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in range(len(finished) // PAGE):
        torn = finished[: page * PAGE] + bytes(PAGE) + finished[(page + 1) * PAGE :]
        run = folder_with(torn, tmp_path / f"page{page}")
        code, text = command(words, run.root, capsys)
        if words[0] == "status" and code == ExitCode.OK:
            # A page that it has not read.
            assert "40 of 40 done" in text or '"done": 40' in text, page
            continue
        assert (code, " is damaged (" in text, "mkdir" in text) == (ExitCode.BAD_INPUT, True, True), (page, text)
        assert run.queue.read_bytes() == torn


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words[:2]))
def test_what_is_left_of_a_queue_is_no_new_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_FIRST_PAGE_WITHIN_S", 0.05)
    run = folder_with(b"", tmp_path / "run")
    code, text = command(words, run.root, capsys)
    assert (code, " is damaged (it is empty, " in text) == (ExitCode.BAD_INPUT, True)
    run.queue.unlink()
    os.mkfifo(run.queue)
    code, text = command(words, run.root, capsys)
    assert (code, "is no plain file" in text) == (ExitCode.BAD_INPUT, True)
    run.queue.unlink()
    run.queue.mkdir()
    code, text = command(words, run.root, capsys)
    assert (code, "is a folder" in text) == (ExitCode.BAD_INPUT, True)


def test_an_empty_queue_where_nothing_has_run_is_a_new_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    run.queue.touch()
    with Queue(run.queue) as queue:
        assert queue.states() == {}


def test_a_new_queue_beside_old_logs_is_not_damaged_while_another_process_makes_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    run.attempt_log("j0", 1).touch()
    run.queue.touch()
    opened_at: list[float] = []

    def opens() -> None:
        with Queue(run.queue):
            opened_at.append(time.monotonic())

    other = threading.Thread(target=opens)
    other.start()
    time.sleep(0.1)
    ready_at = time.monotonic()
    with closing(sqlite3.connect(run.queue, isolation_level=None)) as maker:
        maker.execute("PRAGMA journal_mode = WAL")
    other.join()
    assert opened_at[0] >= ready_at


def test_an_error_of_sqlite_is_put_down_to_damage_only_where_there_is_damage(finished: bytes, tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    path.write_bytes(finished)
    with pytest.raises(sqlite3.OperationalError, match="no such table"), Queue(path) as queue:
        queue._db.execute("SELECT * FROM nowhere")
    with pytest.raises(QueueUnreadable, match="is damaged"), Queue(path) as queue:
        queue._db.execute("PRAGMA cache_size = 0")
        path.write_bytes(finished[:PAGE] + bytes(len(finished) - PAGE))
        queue.states()
