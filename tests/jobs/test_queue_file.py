"""The queue's file: an old one goes on, a damaged one can be kept aside, nobody else can read it."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.jobs.attempts import attempt_of, settled

from gpuherd.cli import main
from gpuherd.errors import ExitCode, GpuherdError, QueueUnreadable, UsageError
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import Control, ControlKind
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.monitor.status import attempts_of, opened
from gpuherd.jobs.queue import schema
from gpuherd.jobs.queue.schema import VERSION, connect, passing_through
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState, Handed
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.memory import FamilyMemory

_INDEXES_OF_2 = """
CREATE INDEX jobs_count ON jobs (submission, state);
CREATE INDEX jobs_by_age ON jobs ((gpus > 0), round, priority DESC, id)
    WHERE state = 'waiting' AND blocked = 0 AND held = 0;
CREATE INDEX jobs_by_cost ON jobs ((gpus > 0), round, priority DESC, cost DESC, id)
    WHERE state = 'waiting' AND blocked = 0 AND held = 0;
"""
_SINCE_5 = {"attempts": ("engine", "batch", "place", "handle", "node"), "runs": ("host", "engine")}
_V1 = (Path(__file__).parent / "queue_v1.sql").read_text()


def without_engines(db: sqlite3.Connection) -> None:
    """Takes away what version 5 has beside version 4."""
    for table, columns in _SINCE_5.items():
        for column in columns:
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")


def old_file(path: Path) -> None:
    """As version 1 left it: one job done, one running, one waiting that needs the running one."""
    with sqlite3.connect(path) as db:
        db.executescript(_V1)
        db.execute("INSERT INTO meta VALUES ('queue', 'abc'), ('submission', '1'), ('inode', '')")
        db.execute(f"PRAGMA application_id = {0x67706864}")  # "gphd"
        db.execute("PRAGMA user_version = 1")
        db.execute("INSERT INTO runs (pid, boot, started_at, started_mono) VALUES (1, 'b', 1.0, 1.0)")
        for number, (name, state, blocked) in enumerate(
            [("a", "done", 0), ("b", "running", 0), ("c", "waiting", 1)], 1
        ):
            spec = (
                f'{{"argv":["true"],"cwd":null,"env":{{}},"gpus":1,"identity":null,"memory_mb":{number * 100},'
                f'"name":"{name}","needs":[],"priority":0,"result":null,"retries":1,"timeout_s":null,"title":null}}'
            )
            db.execute(
                "INSERT INTO jobs (id, name, spec, gpus, priority, submission, state, blocked, ready_at)"
                " VALUES (?,?,?,1,0,1,?,?,1.0)",
                (number, name, spec, state, blocked),
            )
        db.execute("INSERT INTO needs VALUES (3, 2)")
        db.execute(
            "INSERT INTO attempts (id, job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " started_at, started_mono) VALUES (1, 2, 1, 1, 'running', '[]', '[]', 1, 2, 'b', 'log', 0, 1.0, 1.0)"
        )
    db.close()
    path.chmod(0o644)


def test_a_file_of_version_1_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    old_file(path)
    with Queue(path) as queue:
        (record,) = queue.running()
        assert (record.queued.job.name, record.queued.memory_mb, record.paused) == ("b", 200, frozenset())
        end = settled(1, AttemptState.DONE, JobState.DONE)
        queue.record_ends([end])
        assert [(q.job.name, q.memory_mb) for q in queue.head(9, time.time())] == [("c", 300)]
        queue.add([Job(name="d", argv=("true",), needs=("a",))])
        assert queue.families(["f"]) == {}
    with Queue(path) as queue:  # a second time it is one of this version
        assert queue.states() == {"a": "done", "b": "done", "c": "waiting", "d": "waiting"}
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
    db.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_somebody_elses_file_of_version_1_goes_on_too() -> None:
    with TemporaryDirectory() as shared:
        Path(shared).chmod(0o777)
        path = Path(shared) / "queue.sqlite"
        old_file(path)
        path.chmod(0o666)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with Queue(path) as queue:
                    code = 0 if len(queue.states()) == 3 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_of_version_2_goes_on_with_its_order(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    with Queue(path) as queue:
        queue.add([Job(name=name, argv=("true",), cost=cost) for name, cost in (("a", 1.0), ("b", None), ("c", 9.0))])
        queue.learn("f", 900)
    with sqlite3.connect(path) as db:
        without_engines(db)
        db.execute("DROP TABLE family_ends")
        for index in ("jobs_by_rank", "jobs_of_kind", "jobs_of_kind_by_rank"):
            db.execute(f"DROP INDEX {index}")
        columns = "id, name, spec, gpus, priority, submission, state, blocked, tries, attempts, not_before, avoid,"
        columns += " ready_at, reason, held, memory_mb, share, cost, round, cancelled_by, doomed"
        kept = db.execute(f"SELECT {columns} FROM jobs").fetchall()
        db.executescript("PRAGMA legacy_alter_table = ON; ALTER TABLE jobs RENAME TO with_rank;")
        table = db.execute("SELECT sql FROM sqlite_master WHERE name = 'with_rank'").fetchone()[0]
        table = table.replace("with_rank", "jobs").replace('"', "").replace(",\n    rank REAL NOT NULL DEFAULT 0", "")
        assert "rank" not in table
        db.executescript(f"DROP TABLE with_rank; {table};")
        db.executemany(f"INSERT INTO jobs ({columns}) VALUES ({','.join('?' * 21)})", kept)
        db.executescript(_INDEXES_OF_2)
        db.execute("PRAGMA user_version = 2")
    db.close()
    with Queue(path) as queue:
        assert [q.job.name for q in queue.head(9, time.time(), "longest")] == ["c", "a", "b"]
        names = {row[0] for row in queue._db.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        assert "jobs_of_kind" in names and "jobs_by_cost" not in names
        assert queue.families(["f"]) == {"f": FamilyMemory(peak_mb=900)}


def test_a_dispatcher_of_version_3_at_work_goes_on_in_the_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    with Queue(path):
        pass
    with sqlite3.connect(path, isolation_level=None) as old:
        without_engines(old)
        old.execute("DROP TABLE family_ends")
        old.execute("PRAGMA user_version = 3")
        with Queue(path) as queue:
            queue.learn("f", 100, well=True)
            # What version 3 does at the end of a job.
            old.execute("INSERT OR REPLACE INTO families VALUES (?, ?)", ("f", 900))
            old.execute("INSERT OR REPLACE INTO families VALUES (?, ?)", ("g", 700))
            assert queue.families(["f", "g"]) == {
                "f": FamilyMemory(peak_mb=900, measured=1),
                "g": FamilyMemory(peak_mb=700),
            }
    old.close()


def test_an_old_and_a_new_file_have_the_same_tables(tmp_path: Path) -> None:
    old_file(tmp_path / "old.sqlite")
    found = []
    for name in ("old", "new"):
        with Queue(tmp_path / f"{name}.sqlite"), sqlite3.connect(tmp_path / f"{name}.sqlite") as db:
            tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
            columns = {t: {row[1:5] for row in db.execute(f"PRAGMA table_info({t})")} for t in tables}
            indexes = set(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"))
        db.close()
        found.append((columns, indexes))
    assert found[0] == found[1]


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


def test_counts_that_need_not_be_exact_are_a_moment_old_where_counting_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Queue(tmp_path / "queue.sqlite") as queue:
        queue.add([Job(name="a", argv=("true",))])
        # It takes no time by this clock, so that every one is of now.
        assert queue.counts(exact=False).waiting == 1
        queue.add([Job(name="b", argv=("true",))])
        assert queue.counts(exact=False).waiting == 2
        monkeypatch.setattr(time, "monotonic", _slow_clock(now))
        queue.add([Job(name="c", argv=("true",))])
        assert queue.counts(exact=False).waiting == 3
        queue.add([Job(name="d", argv=("true",))])
        assert queue.counts(exact=False).waiting == 3
        assert queue.counts().waiting == 4
        queue.add([Job(name="e", argv=("true",))])
        now.append(now[-1] + 3.0)
        assert queue.counts(exact=False).waiting == 5


def _slow_clock(now: list[float]) -> Callable[[], float]:
    """A tenth of a second goes by with every look at it."""

    def look() -> float:
        now.append(now[-1] + 0.1)
        return now[-1]

    return look


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
        send(run, Control(ControlKind.CANCEL, (NO_TEXT,)))
    with opened(run) as reader:
        assert attempts_of(reader, NO_TEXT) == ()


def test_a_job_that_is_named_twice_is_changed_once(tmp_path: Path) -> None:
    with Queue(tmp_path / "queue.sqlite") as queue:
        queue.add([Job(name="a", argv=("true",)), Job(name="b", argv=("true",))])
        changed = queue.cancel(["a", "b", "a"], "me")
        assert (changed.jobs, changed.refused) == (("a", "b"), ())


def test_a_file_of_version_4_goes_on_with_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    with Queue(path) as queue:
        queue.add([Job(name="a", argv=("true",)), Job(name="b", argv=("true",), needs=("a",))])
        run = queue.begin_run(1.0, 1.0)
        (queued,) = queue.head(9, time.time())
        queue.record_start(attempt_of(queued, 1), run, wait_s=0.0, leased_mono=None)
    with sqlite3.connect(path) as db:
        without_engines(db)
        db.execute("PRAGMA user_version = 4")
    db.close()
    with Queue(path) as queue:
        (record,) = queue.running()
        assert record.handed is None and record.process is not None
        end = settled(1, AttemptState.DONE, JobState.DONE)
        queue.record_ends([end])
        (queued,) = queue.head(9, time.time())
        run = queue.begin_run(3.0, 3.0, "slurm")
        handed = replace(attempt_of(queued, 2), process=None, handed=Handed("slurm", "batch", 0))
        queue.record_start(handed, run, wait_s=0.0, leased_mono=None)
        queue.record_handles({2: "7_0"})
        (record,) = queue.running()
        assert (record.process, record.handed) == (None, Handed("slurm", "batch", 0, "7_0"))
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
        assert db.execute("SELECT host, engine FROM runs ORDER BY id").fetchall()[0] == ("", "local")
    db.close()


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
            queue.record_start(attempt_of(queued, number), run, wait_s=0.0, leased_mono=None)
            end = settled(number, AttemptState.DONE, JobState.DONE)
            queue.record_end(end)
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
