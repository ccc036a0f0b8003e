"""One machine at a time has a queue open on a file system that several see. The only thing that is pretended is the
kernel's table of mounts, which says that the folder is such a one; the other machine is the file that it would leave.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuherd.engines.process_tree import boot_id
from gpuherd.errors import CannotWrite, ExitCode
from gpuherd.jobs import Job, Queue, RunDirectory, clock
from gpuherd.jobs import lock as mounts
from gpuherd.jobs import lock as onehost
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.lock import DispatcherLock, Hold, QueueElsewhere, QueueMachine, refuse_elsewhere
from gpuherd.jobs.monitor.logs import follow
from gpuherd.jobs.monitor.status import read_status
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.run import run_jobs

OTHER_BOOT = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on what the kernel calls NFS."""
    table = tmp_path / "mountinfo"
    table.write_text("36 35 0:50 / / rw,relatime shared:1 - nfs4 server:/export rw\n")
    monkeypatch.setattr(mounts, "_TABLE", table)
    folder = tmp_path / "a run"
    RunDirectory(folder).create()
    return folder


@pytest.fixture
def run(shared: Path) -> RunDirectory:
    found = RunDirectory(shared)
    with closing(Queue(found.queue)) as queue:
        queue.submit([Job(name="a", argv=("true",), gpus=0)])
    return found


def marker(run: RunDirectory) -> Path:
    return run.root / "queue.host"


def other_machine(run: RunDirectory, *, touched_s_ago: float = 1.0) -> Path:
    """What another machine leaves that has the queue open."""
    told = QueueMachine("n1", OTHER_BOOT, 4711, run.queue.stat().st_ino)
    marker(run).write_text(json.dumps(asdict(told)))
    then = time.time() - touched_s_ago
    os.utime(marker(run), (then, then))
    return marker(run)


def test_a_job_may_lock_its_own_file_beside_a_queue_of_elsewhere(run: RunDirectory) -> None:
    """A training on a node, in the folder of the queue that another machine has open: it knows nothing of that."""
    other_machine(run)
    with closing(DispatcherLock(run.root / "train.lock")):
        assert DispatcherLock.holder(run.root / "train.lock") == os.getpid()


def test_nothing_opens_it_while_another_machine_has_it(run: RunDirectory) -> None:
    other_machine(run)
    ways: tuple[Callable[[], object], ...] = (
        lambda: read_status(run),
        lambda: list(follow(run, "a")),
        lambda: Queue(run.queue),
        lambda: DispatcherLock(run.lock),
        lambda: send(run, Request(ControlKind.CANCEL, ("a",))),
        lambda: run_jobs([Job(name="b", argv=("true",), gpus=0)], DispatchOptions(), run),
    )
    for attempt in ways:
        with pytest.raises(QueueElsewhere) as told:
            attempt()
        assert str(told.value) == (
            f"gpuherd on n1 (pid 4711) works on {run.root}, and a queue is opened on one machine at a time: ask there "
            f"(ssh n1 gpuherd status '{run.root}'), or have it end there (ssh n1 gpuherd drain '{run.root}') to go on "
            "here; if n1 is gone, wait 60 seconds"
        )
        assert told.value.exit_code is ExitCode.BUSY
    assert sorted(path.name for path in run.root.iterdir() if path.name.startswith(".queue.host")) == []
    marker(run).unlink()
    assert read_status(run).counts.waiting == 1  # and nothing had changed


def test_one_that_is_silent_is_gone(run: RunDirectory) -> None:
    other_machine(run, touched_s_ago=61.0)
    assert read_status(run).counts.total == 1
    with closing(Queue(run.queue)):
        assert json.loads(marker(run).read_text())["pid"] == os.getpid()
    assert not marker(run).exists()


def test_what_counts_is_the_clock_of_the_file_system(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    other_machine(run)
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this machine's is wrong by decades
    with pytest.raises(QueueElsewhere):
        refuse_elsewhere(run.queue)


def test_a_folder_that_one_may_only_read_is_judged_by_our_own_clock(run: RunDirectory) -> None:
    if os.getuid() == 0:
        pytest.skip("root writes anywhere")
    other_machine(run)
    run.root.chmod(0o500)
    try:
        with pytest.raises(QueueElsewhere):
            read_status(run)
    finally:
        run.root.chmod(0o700)


def test_the_same_machine_under_another_name_is_the_same_machine(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Queue(run.queue)) as queue:
        queue.begin_run(clock.wall(), clock.mono())
        monkeypatch.setattr("platform.node", lambda: "a-container")
        with closing(Queue(run.queue)) as beside:
            assert beside.counts().waiting == 1
        assert marker(run).exists()  # the second has not taken the first one's away
        assert read_status(run).counts.waiting == 1


def test_a_copied_folder_is_nobodys(run: RunDirectory, tmp_path: Path) -> None:
    other_machine(run)
    copy = RunDirectory(tmp_path / "copy")
    copy.create()
    copy.queue.write_bytes(run.queue.read_bytes())
    (copy.root / "queue.host").write_bytes(marker(run).read_bytes())
    assert read_status(copy).counts.waiting == 1
    Queue(copy.queue).close()


@pytest.mark.parametrize("text", [b"", b"\xff{", b'{"host": 1}', b"[" * 5000])
def test_nonsense_in_its_place_is_nobodys(run: RunDirectory, text: bytes) -> None:
    marker(run).write_bytes(text)
    assert read_status(run).counts.waiting == 1
    with closing(Queue(run.queue)):
        assert json.loads(marker(run).read_text())["host"]


def test_on_a_file_system_of_one_machine_there_is_no_such_file(tmp_path: Path) -> None:
    with closing(Queue(tmp_path / "queue.sqlite")) as queue:
        queue.begin_run(clock.wall(), clock.mono())
        assert not (tmp_path / "queue.host").exists()


def test_a_dispatcher_touches_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onehost, "BEAT_S", 0.01)
    hold = Hold(run.queue)
    hold.keep()
    try:
        os.utime(marker(run), (1.0, 1.0))
        deadline = time.monotonic() + 30
        while marker(run).stat().st_mtime == 1.0 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert marker(run).stat().st_mtime > 1.0
        marker(run).unlink()  # somebody tidied up
        while not marker(run).exists() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert marker(run).exists()
    finally:
        hold.release()
    assert not marker(run).exists()


def test_one_that_slept_over_it_writes_nothing_more(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Queue(run.queue)) as queue:
        queue.begin_run(clock.wall(), clock.mono())
        other_machine(run)
        queue.counts()
        asleep = clock.mono() + 3600
        monkeypatch.setattr("gpuherd.jobs.clock.mono", lambda: asleep)
        with pytest.raises(QueueElsewhere, match="gpuherd on n1"):
            queue.add([Job(name="late", argv=("true",))])
    assert json.loads(marker(run).read_text())["host"] == "n1"  # what is the other's stays
    marker(run).unlink()
    with closing(Queue(run.queue)) as queue:
        assert list(queue.states()) == ["a"]


def test_what_another_left_while_we_slept_is_not_made_fresh_for_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took over and died, or sleeps by now; when it wakes, it must find that we have the queue."""
    with closing(Queue(run.queue)) as queue:
        queue.begin_run(clock.wall(), clock.mono())
        other_machine(run, touched_s_ago=100)
        asleep = clock.mono() + 3600
        monkeypatch.setattr("gpuherd.jobs.clock.mono", lambda: asleep)
        queue.add([Job(name="late", argv=("true",))])
        assert json.loads(marker(run).read_text())["pid"] == os.getpid()
        assert sorted(queue.states()) == ["a", "late"]
    assert not marker(run).exists()


def test_who_has_it_open_for_long_looks_again_before_writing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is no dispatcher, or not yet: its engine was long in answering."""
    with closing(Queue(run.queue)) as queue:
        other_machine(run)
        late = clock.mono() + 100
        monkeypatch.setattr("gpuherd.jobs.clock.mono", lambda: late)
        for _ in range(2):
            with pytest.raises(QueueElsewhere, match="gpuherd on n1"):
                queue.add([Job(name="late", argv=("true",))])
    assert json.loads(marker(run).read_text())["host"] == "n1"


def test_a_log_that_is_followed_is_let_go_when_another_machine_begins(run: RunDirectory) -> None:
    with closing(QueueReader(run.queue)) as reader:
        assert reader.one("SELECT count(*) FROM jobs") is not None
        other_machine(run)
        reader._looks_next = 0.0  # five seconds later
        with pytest.raises(QueueElsewhere):
            reader.one("SELECT count(*) FROM jobs")


def test_of_many_that_find_a_stale_one_each_sees_the_other(run: RunDirectory) -> None:
    """Threads of one process are one machine, so none is refused; what must hold is that the file is whole and goes."""
    other_machine(run, touched_s_ago=100)
    begin, problems = threading.Barrier(8), []

    def take() -> None:
        begin.wait()
        try:
            for _ in range(20):
                Hold(run.queue).release()
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert [path.name for path in run.root.iterdir() if "queue.host" in path.name] == []


def test_who_found_a_stale_one_late_leaves_alone_what_is_there_by_then(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third machine takes over between our look and our hand."""
    other_machine(run, touched_s_ago=100)
    look, third = onehost._read_host, QueueMachine("n2", OTHER_BOOT.replace("4", "5"), 12, run.queue.stat().st_ino)
    looks = []

    def read_and_be_overtaken(queue: Path) -> onehost._Found | None:
        found = look(queue)
        looks.append(found)
        if len(looks) == 3:  # the constructor's, then that of the file in the way, then whether it is fresh
            marker(run).write_text(json.dumps(asdict(third)))
        return found

    monkeypatch.setattr(onehost, "_read_host", read_and_be_overtaken)
    with pytest.raises(QueueElsewhere, match="gpuherd on n2"):
        Hold(run.queue)
    assert json.loads(marker(run).read_text())["host"] == "n2"
    assert sorted(path.name for path in run.root.iterdir() if path.name.startswith(".queue.host")) == []


@pytest.mark.parametrize("age_s", [0.0, 100.0])
def test_the_right_to_take_it_away_is_ones_at_a_time(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    other_machine(run, touched_s_ago=100)
    right = run.root / ".queue.host.removing"
    right.write_text("of another, at work or killed")
    os.utime(right, (time.time() - age_s,) * 2)
    monkeypatch.setattr(onehost, "_TURN_S", 0.001)
    if age_s:
        with closing(Queue(run.queue)):
            assert json.loads(marker(run).read_text())["pid"] == os.getpid()
        assert not right.exists()
    else:
        with pytest.raises(CannotWrite, match="look at it, and remove it"):
            Queue(run.queue)
        assert json.loads(marker(run).read_text())["host"] == "n1"


@pytest.mark.parametrize("age_s", [None, 120])
def test_where_there_are_no_hard_links_it_is_made_without(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, age_s: float | None
) -> None:
    def refused(source: Path, target: Path, **_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if age_s is not None:  # and one that means nothing any more lies there
        other_machine(run, touched_s_ago=age_s)
    monkeypatch.setattr("os.link", refused)
    with closing(Queue(run.queue)):
        assert json.loads(marker(run).read_text())["pid"] == os.getpid()
    assert not marker(run).exists()
    assert not [each for each in run.root.iterdir() if each.name.startswith(".queue.host")]


def test_the_lock_names_the_machine_that_holds_it(run: RunDirectory) -> None:
    with closing(DispatcherLock(run.lock)):
        run.lock.write_text(f"12 dispatcher {OTHER_BOOT} n2\n")  # as over NFS, which passes locks on
        with pytest.raises(QueueElsewhere, match=r"gpuherd on n2 \(pid 12\)"):
            DispatcherLock(run.lock)
        with pytest.raises(QueueElsewhere, match="ssh n2"):
            DispatcherLock.holder(run.lock)


def test_a_file_system_without_locks_is_told(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(CannotWrite, match="gives no locks"):
        DispatcherLock(run.lock)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ann/run", "nfs4"),
        ("/homework", "ext4"),
        ("/scratch/with space/run", "lustre"),
        ("/home/ann/sshfs/x", "fuse.sshfs"),
    ],
)
def test_the_kind_of_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /home rw - ext4 /dev/sdb rw\n"
        "3 1 0:6 / /home rw shared:2 - nfs4 server:/home rw\nnonsense\n"
        "4 1 0:7 / /scratch/with\\040space rw - lustre mds:/x rw\n5 3 0:8 / /home/ann/sshfs rw - fuse.sshfs n1: rw\n"
    )
    monkeypatch.setattr(mounts, "_TABLE", table)
    assert mounts.kind_of(path) == kind


def test_without_the_table_nothing_is_known_and_it_may_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "_TABLE", tmp_path / "none")
    assert mounts.may_be_shared(mounts.kind_of(tmp_path))


def test_a_whole_run_has_it_for_as_long_as_it_lasts(shared: Path) -> None:
    folder = RunDirectory(shared)
    script = "test -e queue.host && cp queue.host seen"
    outcome = run_jobs([Job(name="a", argv=("sh", "-c", script), gpus=0, cwd=str(shared))], DispatchOptions(), folder)
    assert outcome.done == 1
    assert json.loads((shared / "seen").read_text())["pid"] == os.getpid()
    assert not (shared / "queue.host").exists()


def test_what_a_killed_process_of_this_machine_left_holds_nobody_up(run: RunDirectory) -> None:
    gone = 2**22 + 1  # above the highest pid that there can be
    told = QueueMachine("here", boot_id(), gone, run.queue.stat().st_ino)
    marker(run).write_text(json.dumps(asdict(told)))
    with closing(Queue(run.queue)):
        assert json.loads(marker(run).read_text())["pid"] == os.getpid()
