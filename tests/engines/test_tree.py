"""Processes that hide from their starter are found, stopped and ended; others' are left alone."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.engines.local.process import Launch, LocalProcess, start
from gpuherd.engines.process_tree import (
    Lock,
    ProcessId,
    Seen,
    Traces,
    any_held,
    everyone,
    identify,
    kill,
    locks_held,
    members,
)

# Each writes its pid (and those of its children) into the folder "$1" and counts on for ever in a file of that name.
_COUNT = """
import os, signal, sys, time
folder = sys.argv[1]
def count():
    name = f"{folder}/{os.getpid()}"
    while True:
        with open(name, "ab") as file:
            file.write(b".")
        time.sleep(0.005)
"""
_HIDERS = {
    "plain": "count()",
    "deaf": "signal.signal(15, signal.SIG_IGN); count()",
    "double fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(15, signal.SIG_IGN); count()
    os._exit(0)
count()
""",
    "forks in a loop": """
signal.signal(15, signal.SIG_IGN)
signal.signal(17, signal.SIG_IGN)
if os.fork() == 0:
    while True:  # each generation lives for some milliseconds
        time.sleep(0.004)
        if os.fork() != 0:
            os._exit(0)
count()
""",
    "empties its environment": """
if "again" not in sys.argv:
    if os.fork() == 0:
        signal.signal(15, signal.SIG_IGN)
        os.execve(sys.executable, [sys.executable, "-c", SELF, folder, "again"], {})
count()
""",
    "empties its environment and opens a session": """
if "again" not in sys.argv:
    if os.fork() == 0:
        signal.signal(15, signal.SIG_IGN)
        os.setsid()
        os.execve(sys.executable, [sys.executable, "-c", SELF, folder, "again"], {})
count()
""",
}


class Hidden:
    """A started attempt whose processes count in ``folder``."""

    def __init__(self, root: Path, kind: str, lease: int):
        self.folder = root / "counts"
        self.folder.mkdir()
        body = _COUNT + _HIDERS[kind]
        words = (sys.executable, "-c", f"SELF = {body!r}\n{body}", str(self.folder))
        self.process: LocalProcess = start(
            Launch(
                tag=f"tree-{os.getpid()}/{id(self)}",
                argv=words,
                log=root / "log",
                status=root / "status",
                progress=root / "progress",
                lease_fds=(lease,),
            ),
            os.environ,
        )
        self.process.go()

    def counted(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.folder.iterdir()}


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "gpu.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    with suppress(OSError):
        os.close(descriptor)


@pytest.fixture
def hidden(tmp_path: Path, lease: int) -> Iterator[Callable[[str], Hidden]]:
    made: list[Hidden] = []

    def make(kind: str) -> Hidden:
        made.append(Hidden(tmp_path, kind, lease))
        return made[0]

    yield make
    for one in made:
        kill(one.process.traces.members)
        if one.process.pidfd >= 0:
            one.process.collect()


def processes_expected(kind: str) -> int:
    return 1 if kind in ("plain", "deaf") else 2


def counting(kind: str) -> int:
    """How many of them count; a generation of the loop lives too short for it."""
    return 1 if kind in ("plain", "deaf", "forks in a loop") else 2


@pytest.mark.parametrize("kind", _HIDERS)
def test_every_process_is_stopped_goes_on_and_ends(hidden: Callable[[str], Hidden], kind: str) -> None:
    job = hidden(kind)
    tree = job.process.traces
    wait_until(lambda: len(job.counted()) == counting(kind) and len(tree.members()) > processes_expected(kind))

    job.process.pause()
    # Told all of them; on a busy machine one may not have come to hear it.
    wait_until(lambda: all(process.held for process in tree.members()))
    assert len(tree.members()) > processes_expected(kind)  # and the shell
    still = job.counted()
    time.sleep(0.1)
    assert job.counted() == still

    job.process.resume()
    wait_until(lambda: all(now > still[name] for name, now in job.counted().items()))

    job.process.pause()  # what is paused must end all the same
    job.process.kill()
    wait_until(lambda: tree.members() == (), within_s=2)
    job.process.collect()


def test_no_look_misses_a_chain_of_processes_that_fork_and_end(tmp_path: Path) -> None:
    """However short each of them lives, and however long the look takes."""
    program = f"""
import os, time
os.setsid()
until = time.monotonic() + 60  # should these tests be killed
while time.monotonic() < until and not os.path.exists({str(tmp_path / "over")!r}):
    if os.fork() != 0:
        os._exit(0)
    time.sleep(0.002)
"""
    tag = f"chain-{os.getpid()}"
    subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "GPUHERD_ATTEMPT": tag}).wait()
    try:
        for _ in range(50):
            assert any(each.attempt == tag for each in everyone())
    finally:
        (tmp_path / "over").touch()
    wait_until(lambda: not any(each.attempt == tag for each in everyone()))


def test_terminate_reaches_what_has_left_the_group_and_what_is_paused(hidden: Callable[[str], Hidden]) -> None:
    job = hidden("empties its environment")
    tree = job.process.traces
    wait_until(lambda: len(job.counted()) == 2)
    job.process.pause()
    job.process.terminate()
    wait_until(lambda: len(tree.members()) == 1)  # the deaf one; the shell has ended with its child
    assert tree.members()[0].attempt is None


def test_a_shell_that_is_told_to_end_does_not_go_on_with_its_next_command(tmp_path: Path, lease: int) -> None:
    """Each way, many times: it must never look as if the work had been done."""
    for number, way in enumerate([LocalProcess.terminate, LocalProcess.kill] * 10):
        log = tmp_path / f"log{number}"
        words = ("/bin/sh", "-c", "echo up; sleep 30; echo went on")
        tag = f"tree-{os.getpid()}/{number}"
        process = start(
            Launch(tag=tag, argv=words, log=log, status=tmp_path / "s", progress=tmp_path / "p"), os.environ
        )
        process.go()
        wait_until(lambda log=log: log.read_text() == "up\n")  # type: ignore[misc]
        way(process)
        assert select.select([process.pidfd], [], [], 10)[0]
        assert process.collect().signal is not None
        assert "went on" not in log.read_text()


def test_after_the_end_of_the_main_process_its_traces_still_find_the_rest(hidden: Callable[[str], Hidden]) -> None:
    job = hidden("empties its environment and opens a session")
    wait_until(lambda: len(job.counted()) == 2)
    os.killpg(job.process.identity.pid, signal.SIGKILL)
    job.process.collect()
    tree = job.process.traces
    wait_until(lambda: len(tree.members()) == 1)
    assert tree.members()[0].attempt is None
    # It holds the lease: as long as an attempt goes on that has it too, the lock says nothing.
    going_on = Traces("other/1", ProcessId(1, 0, ""), job.process.traces.locks)
    assert members(everyone(), job.process.traces.tag.__eq__, [job.process.traces], [going_on]) == ()
    # Another's lock on the same file, taken by another process, is no trace either.
    other = frozenset(Lock(lock.path, 1) for lock in job.process.traces.locks)
    theirs = Traces(job.process.traces.tag, job.process.identity, other)
    assert members(everyone(), theirs.tag.__eq__, [theirs]) == ()


def test_a_lock_is_seen_where_it_is_held_and_only_there(lease: int, tmp_path: Path) -> None:
    looker = os.open(tmp_path / "gpu.lock", os.O_RDONLY)
    expected = Lock(str(tmp_path / "gpu.lock"), os.getpid())
    assert expected in locks_held(os.getpid(), {str(tmp_path / "gpu.lock")})
    os.set_inheritable(lease, True)
    holder = subprocess.Popen(["/bin/sleep", "5"], pass_fds=(lease,))
    opener = subprocess.Popen(["/bin/sleep", "5"], pass_fds=(looker,))
    assert locks_held(holder.pid) == {expected}
    assert locks_held(opener.pid) == set()
    assert any_held([expected])
    assert not any_held([Lock(expected.path, opener.pid)])
    os.close(lease)  # the other process holds it still
    assert any_held([expected])
    holder.kill()
    holder.wait()
    assert not any_held([expected])
    opener.kill()
    opener.wait()
    os.close(looker)


def process(pid: int, *, session: int, attempt: str | None = None, ticks: int = 0) -> Seen:
    return Seen(ProcessId(pid, ticks, ""), pid, session, False, attempt)


def test_whose_a_process_is() -> None:
    leader = ProcessId(2**22 + 100, 50, "")
    traces = Traces("q/1", leader)
    seen = [
        process(2**22, session=2**22),  # a shell of the user's
        process(2**22 + 1, session=2**22, attempt="q/1"),  # by its tag; the session is not ours for that
        process(2**22 + 2, session=7),  # by the session: a process with the tag is in it, and its leader has ended
        process(2**22 + 7, session=7, attempt="q/1"),
        process(2**22 + 3, session=leader.pid),  # by the session
        process(2**22 + 4, session=9, attempt="q/2"),  # of an attempt that goes on
        process(2**22 + 5, session=9),  # so is this, by the session of that one
        process(2**22 + 6, session=8, attempt="other/1"),  # of another gpuherd
    ]
    ours = members(seen, "q/1".__eq__, [traces], [Traces("q/2", ProcessId(2**22 + 9, 0, ""))])
    assert [one.process.pid - 2**22 for one in ours] == [1, 2, 7, 3]
    # The main process has ended, and its pid is that of another by now, with a session of its own.
    seen.append(process(leader.pid, session=leader.pid, ticks=99))
    ours = members(seen, "q/1".__eq__, [traces])
    assert [one.process.pid - 2**22 for one in ours] == [1, 2, 7]


def test_we_ourselves_and_our_session_are_never_an_attempts() -> None:
    me = identify(os.getpid())
    assert me is not None
    mine = Seen(me, os.getpgid(0), os.getsid(0), False, "q/1")
    beside = process(2**22 + 1, session=os.getsid(0))
    assert members([mine, beside], "q/1".__eq__, [Traces("q/1", ProcessId(os.getsid(0), 0, ""))]) == ()


def test_what_cannot_be_killed_does_not_hold_us_up() -> None:
    stuck = process(2**22 + 5, session=2**22 + 5)
    began = time.monotonic()
    kill(lambda: (stuck,))
    assert time.monotonic() - began < 1
