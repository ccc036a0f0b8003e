"""Leases between real processes and real users: one holder at a time, whoever is killed and whatever is removed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite
from gpuherd.gpus.lease_files import make_folder
from gpuherd.gpus.leases import LeaseFolder, LeaseNote

UUID = "GPU-11112222-3333"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")
ALICE, BOB, CAROL = 61_001, 61_002, 61_003
# The forked children only act as another user and end; from Python 3.12 on, fork warns when a test runner has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A lease folder that every user can reach: not in pytest's own, which each new pytest session closes to others."""
    with tempfile.TemporaryDirectory(prefix="gpuherd-leases-") as name:
        for folder in (Path(name), *Path(name).parents):
            if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & stat.S_IXOTH:
                folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
        make_folder(Path(name) / "shared")
        yield Path(name) / "shared"


@pytest.fixture
def folder(tmp_path: Path) -> LeaseFolder:
    return LeaseFolder.default()


def as_user(uid: int, action: Callable[[], object]) -> str:
    """What ``action`` gives, as a string, when this user does it; in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o077)
            answer = str(action())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@contextmanager
def running(code: str, *arguments: str) -> Iterator[None]:
    """A Python process that does this, from its first line of output on until the block ends."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield
        finally:
            child.kill()


# ---- taking and giving back ----


def test_one_holder_at_a_time_and_each_gpu_by_itself(folder: LeaseFolder) -> None:
    lease = folder.acquire(UUID)
    assert lease is not None
    assert folder.acquire(UUID) is None
    other = folder.acquire("GPU-other")
    assert other is not None
    other.close()
    lease.close()
    with folder.acquire(UUID) or pytest.fail("the GPU is free again") as again:
        assert again.uuid == UUID
    assert folder.holder(UUID) is None


def test_where_there_are_no_hard_links(folder: LeaseFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    test_one_holder_at_a_time_and_each_gpu_by_itself(folder)


def test_a_closed_lease_says_so(folder: LeaseFolder) -> None:
    lease = folder.acquire(UUID)
    assert lease is not None
    lease.close()
    lease.close()
    with pytest.raises(ValueError, match="closed"):
        _ = lease.fd


def test_the_holder_is_told_without_any_command_line(folder: LeaseFolder) -> None:
    assert folder.holder(UUID) is None
    before = time.time()
    with folder.acquire(UUID, LeaseNote(job="org/model")) or pytest.fail("free"):
        holder = folder.holder(UUID)
        assert holder is not None
        assert (holder.pid, holder.job) == (os.getpid(), "org/model")
        assert holder.user is not None
        assert holder.since is not None
        assert before <= holder.since <= time.time()
    (note,) = folder.path.glob("*.note")
    assert json.loads(note.read_text()).keys() == {"pid", "uid", "since", "job"}
    assert folder.holder(UUID) is None


def test_looking_never_makes_taking_fail(folder: LeaseFolder) -> None:
    code = f"""
from gpuherd.gpus.leases import LeaseFolder
folder = LeaseFolder.default()
print(flush=True)
while True:
    folder.holder({UUID!r})
"""
    with folder.acquire(UUID) or pytest.fail("free"):
        pass  # the lock file is there now
    with running(code):
        for _ in range(300):
            lease = folder.acquire(UUID)
            assert lease is not None
            lease.close()


def test_mig_uuids_of_the_old_form_and_hostile_names(folder: LeaseFolder) -> None:
    with folder.acquire("MIG-GPU-aaaa/1/0") or pytest.fail("free"):
        assert folder.acquire("MIG-GPU-aaaa/1/0") is None
    for name in ("", "../GPU", "GPU-\0", "GPU-a\n", "x" * 300):
        with pytest.raises(ValueError, match="no GPU UUID"):
            folder.acquire(name)
    assert {path.parent for path in folder.path.parent.rglob("*.lock")} == {folder.path}


# ---- processes that die ----

TAKER = f"""
import subprocess, sys, time
from gpuherd.gpus.leases import LeaseFolder, LeaseNote
lease = LeaseFolder.default().acquire({UUID!r}, LeaseNote(job="nightly"))
assert lease is not None
job = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=sys.stdin, pass_fds=[lease.fd])
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], stdin=subprocess.DEVNULL)
print(job.pid, other.pid, flush=True)
time.sleep(60)
"""


def test_the_lease_outlives_a_killed_taker_and_ends_with_the_job(folder: LeaseFolder) -> None:
    taker = subprocess.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert taker.stdout is not None
    assert taker.stdin is not None
    job, other = map(int, taker.stdout.readline().split())
    with taker.stdout, killed_in_the_end(job), killed_in_the_end(other):
        held = folder.holder(UUID)
        taker.send_signal(signal.SIGKILL)
        taker.wait()
        assert folder.acquire(UUID) is None
        after = folder.holder(UUID)
        assert held is not None
        assert after is not None
        assert after.job == held.job == "nightly"
        assert after.user == held.user
        taker.stdin.close()  # the job ends; the other child of the taker lives on and must not hold the lease
        deadline = time.monotonic() + 10
        while (lease := folder.acquire(UUID)) is None:
            assert time.monotonic() < deadline, "the lease did not end with the job"
            time.sleep(0.01)
        lease.close()
        os.kill(other, 0)


@contextmanager
def killed_in_the_end(pid: int) -> Iterator[None]:
    """Kills a grandchild of ours in the end, if it is still there."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


RACER = f"""
import os, sys, time
from gpuherd.gpus.leases import LeaseFolder
folder = LeaseFolder.default()
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
won = 0
while won < 200:
    lease = folder.acquire({UUID!r})
    if lease is None:
        time.sleep(0.0002)
        continue
    os.write(log, b"(")
    if won % 10 == 0:
        time.sleep(0.001)
    os.write(log, b")")
    lease.close()
    won += 1
"""


def test_two_processes_race_two_hundred_times_each_and_never_hold_it_both(folder: LeaseFolder, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(log)]) for _ in range(2)]
    assert [racer.wait(60) for racer in racers] == [0, 0]
    assert log.read_text() == "()" * 400


# ---- files that are removed, replaced or foreign ----

REMOVER = """
import sys
from pathlib import Path
lock = Path(sys.argv[1])
print(flush=True)
while True:
    lock.unlink(missing_ok=True)
"""


def test_a_lock_file_that_is_removed_under_us_never_gives_a_lease_on_a_file_nobody_sees(folder: LeaseFolder) -> None:
    lock = folder.path / f"{UUID}.lock"
    taken = 0
    with running(REMOVER, str(lock)):
        for _ in range(100):
            try:
                lease = folder.acquire(UUID)
            except CannotWrite as error:
                assert "again and again" in str(error) or "comes and goes" in str(error)
                continue
            assert lease is not None
            taken += 1
            lease.close()
    assert taken > 0
    lease = folder.acquire(UUID)
    assert lease is not None
    assert os.fstat(lease.fd).st_ino == lock.stat().st_ino
    lease.close()


AT_THE_LOCK = f"""
import fcntl, os, sys
from gpuherd.gpus.leases import LeaseFolder
folder = LeaseFolder.default()
folder.acquire({UUID!r}).close()
lock = folder.path / "{UUID}.lock"
calls = 0
def when_locking(event, _):
    global calls
    if event == "fcntl.flock":
        calls += 1
        at_call(calls)
"""
REMOVED = """
def at_call(number):
    if number == 1:
        lock.unlink()
sys.addaudithook(when_locking)
lease = folder.acquire(sys.argv[1])
assert os.fstat(lease.fd).st_ino == lock.stat().st_ino
"""
LOOKED_AT = """
looker = os.open(lock, os.O_RDONLY)
def at_call(number):
    if number == 1:  # someone looks just now, and is done when we try again
        fcntl.flock(looker, fcntl.LOCK_SH)
    if number == 3:
        os.close(looker)
sys.addaudithook(when_locking)
assert folder.acquire(sys.argv[1]) is not None
"""


@pytest.mark.parametrize("what_happens", [REMOVED, LOOKED_AT], ids=["removed", "looked at"])
def test_between_opening_and_locking_the_file(folder: LeaseFolder, what_happens: str) -> None:
    """The two things that can happen in that instant: the file is removed, or someone looks whether it is locked."""
    subprocess.run([sys.executable, "-c", AT_THE_LOCK + what_happens, UUID], check=True, timeout=60)


def test_two_that_look_at_once_do_not_take_each_other_for_a_holder(folder: LeaseFolder) -> None:
    with folder.acquire(UUID) or pytest.fail("free"):
        pass
    with (folder.path / f"{UUID}.lock").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert folder.holder(UUID) is None


@pytest.mark.parametrize("kind", ["symlink", "folder", "fifo"])
def test_what_is_no_plain_file_is_refused(folder: LeaseFolder, tmp_path: Path, kind: str) -> None:
    lock = folder.path / f"{UUID}.lock"
    if kind == "symlink":
        lock.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(CannotWrite, match="remove it"):
        folder.acquire(UUID)
    assert not (tmp_path / "elsewhere").exists()
    assert folder.holder(UUID) is None


def test_a_note_that_cannot_be_written_costs_no_lease(folder: LeaseFolder) -> None:
    (folder.path / f"{UUID}.{os.geteuid()}.note").mkdir()
    with folder.acquire(UUID) or pytest.fail("free"):
        holder = folder.holder(UUID)
        assert holder is not None
        assert (holder.pid, holder.since) == (os.getpid(), None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"pid": 1}', '{"pid": "x", "uid": 0, "since": 1, "job": null}', "[" * 4000, "\xff\x00"],
)
def test_a_damaged_note_is_no_note(folder: LeaseFolder, text: str) -> None:
    with folder.acquire(UUID) or pytest.fail("free"):
        (folder.path / f"{UUID}.{os.geteuid()}.note").write_text(text, encoding="latin-1")
        holder = folder.holder(UUID)
        assert holder is not None
        assert (holder.pid, holder.job) == (os.getpid(), None)


@pytest.mark.parametrize("job", ["\x1b[2J", "a\nb", "x" * 500])
def test_a_note_that_would_spoil_the_terminal_is_no_note(folder: LeaseFolder, job: str) -> None:
    with folder.acquire(UUID, LeaseNote(job=job)) or pytest.fail("free"):
        holder = folder.holder(UUID)
        assert holder is not None
        assert holder.job is None


# ---- the folder ----


def test_the_folder_is_made_open_for_all_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(tmp_path / "new" / "leases"))
    assert LeaseFolder.existing() is None
    before = os.umask(0o077)
    try:
        folder = LeaseFolder.default()
        lease = folder.acquire(UUID)
    finally:
        os.umask(before)
    assert lease is not None
    lease.close()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o644}
    assert LeaseFolder.existing() is not None
    assert [path.name for path in folder.path.parent.iterdir()] == ["leases"]


def test_many_processes_make_the_folder_at_once_and_agree(tmp_path: Path) -> None:
    code = f"""
from gpuherd.gpus.leases import LeaseFolder
lease = LeaseFolder.default().acquire({UUID!r})
print(lease is not None, flush=True)
input()
"""
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate("\n")
    assert sorted(answers) == ["False"] * 3 + ["True"]


def unsafe_folders(base: Path) -> Iterator[tuple[Path, str]]:
    real = base / "real"
    real.mkdir(mode=0o700)
    (base / "link").symlink_to(real)
    yield base / "link", "symbolic link"
    (base / "file").touch()
    yield base / "file", "is a file"
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    yield base / "open", r"chmod \+t"
    (base / "dangling").symlink_to(base / "nowhere")
    yield base / "dangling", "symbolic link"


def test_unsafe_folders_are_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, words in unsafe_folders(tmp_path):
        monkeypatch.setenv("GPUHERD_LEASE_DIR", str(path))
        with pytest.raises(CannotWrite, match=words):
            LeaseFolder.default()
        with pytest.raises(CannotWrite, match=words):
            LeaseFolder.existing()
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(CannotWrite, match="can't be made"):
        LeaseFolder.default()


# ---- two users ----


@ROOT
def test_a_second_user_can_neither_take_nor_remove_nor_forge_a_lease(shared: Path) -> None:
    folder = LeaseFolder(shared)
    reading, writing = os.pipe()
    alice = os.fork()
    if alice == 0:
        os.setgid(ALICE)
        os.setuid(ALICE)
        os.umask(0o077)
        held = LeaseFolder(shared).acquire(UUID, LeaseNote(job="alice's"))
        os.write(writing, b"y" if held else b"n")
        signal.pause()
    assert os.read(reading, 1) == b"y"
    try:
        assert as_user(BOB, lambda: LeaseFolder(shared).acquire(UUID)) == "None"
        told = folder.holder(UUID)
        assert told is not None
        assert (told.pid, told.user, told.job) == (alice, f"uid {ALICE}", "alice's")
        seen_by_bob = as_user(BOB, lambda: LeaseFolder(shared).holder(UUID))
        assert seen_by_bob == str(told)
        assert "PermissionError" in as_user(BOB, lambda: (shared / f"{UUID}.lock").unlink())

        # Bob writes that Alice, and that he himself, holds Alice's GPU under her pid.
        def forge(uid: int, name: str) -> None:
            note = {"pid": alice, "uid": uid, "since": time.time() + 1e6, "job": "forged"}
            (shared / name).write_text(json.dumps(note))
            (shared / name).chmod(0o644)

        as_user(BOB, lambda: forge(ALICE, f"{UUID}.{ALICE}0.note"))
        as_user(BOB, lambda: forge(BOB, f"{UUID}.{BOB}.note"))
        assert folder.holder(UUID) == told
    finally:
        os.kill(alice, signal.SIGKILL)
        os.waitpid(alice, 0)
        os.close(reading)
        os.close(writing)
    assert as_user(BOB, lambda: LeaseFolder(shared).acquire(UUID) is not None) == "True"


@ROOT
def test_two_users_who_both_claim_a_taker_that_has_ended_are_not_believed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(shared))
    taker = subprocess.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert taker.stdout is not None
    assert taker.stdin is not None
    job, other = map(int, taker.stdout.readline().split())
    with taker.stdin, taker.stdout, killed_in_the_end(job), killed_in_the_end(other):
        taker.kill()
        taker.wait()
        note = {"pid": taker.pid, "uid": BOB, "since": time.time() + 1e6, "job": "forged"}
        path = shared / f"{UUID}.{BOB}.note"

        def forge() -> None:
            path.write_text(json.dumps(note))
            path.chmod(0o644)

        as_user(BOB, forge)
        assert path.exists()
        holder = LeaseFolder(shared).holder(UUID)
        assert holder is not None
        assert (holder.user, holder.job) == (None, None)


@ROOT
def test_a_note_in_place_of_anothers_is_not_believed(shared: Path) -> None:
    """Bob was first to write a note under Alice's name; it counts for nothing and does not stop her."""
    forged = json.dumps({"pid": 1, "uid": ALICE, "since": 0, "job": "forged"})
    as_user(BOB, lambda: (shared / f"{UUID}.{ALICE}.note").write_text(forged))

    def take_and_tell() -> object:
        lease = LeaseFolder(shared).acquire(UUID)
        assert lease is not None
        return LeaseFolder(shared).holder(UUID)

    answer = as_user(ALICE, take_and_tell)
    assert f"user='uid {ALICE}'" in answer
    assert "forged" not in answer


@ROOT
def test_a_folder_closed_to_a_user_is_told_with_its_owner(shared: Path) -> None:
    shared.chmod(0o755)
    answer = as_user(ALICE, lambda: LeaseFolder(shared))
    assert answer.startswith("CannotWrite")
    assert "chmod 1777" in answer


@ROOT
@pytest.mark.parametrize("what", ["closed", "fifo", "folder", "link"])
def test_what_a_stranger_has_put_in_the_place_of_a_lock_file_keeps_nobody_from_the_gpu(shared: Path, what: str) -> None:
    lock = shared / f"{UUID}.lock"

    def put() -> None:
        if what == "closed":
            os.close(os.open(lock, os.O_CREAT | os.O_WRONLY, 0o600))
        elif what == "fifo":
            os.mkfifo(lock)
        elif what == "folder":
            lock.mkdir()
        else:
            lock.symlink_to("/etc/passwd")

    as_user(BOB, put)

    def take_twice() -> str:
        first = LeaseFolder(shared).acquire(UUID)
        second = LeaseFolder(shared).acquire(UUID)
        return f"{first is not None} {second} {LeaseFolder(shared).holder(UUID) is not None}"

    assert as_user(ALICE, take_twice) == "True None True"
    assert as_user(ALICE, take_twice) == "True None True"  # and again, when that has ended
    assert len(list(shared.glob("*.lock"))) == 2


@ROOT
def test_a_lease_stays_one_when_who_made_the_first_lock_file_removes_it(shared: Path) -> None:
    """A lock on a removed file is one that nobody sees; so whoever can't rely on it keeps a file of their own."""
    assert as_user(BOB, lambda: LeaseFolder(shared).acquire(UUID) is not None) == "True"
    assert (shared / f"{UUID}.lock").stat().st_uid == BOB

    def take_while_bob_removes() -> str:
        lease = LeaseFolder(shared).acquire(UUID)
        as_root_again = (shared / f"{UUID}.lock").exists()
        return f"{lease is not None} {as_root_again} {LeaseFolder(shared).acquire(UUID)}"

    with held_by_user(ALICE, shared):
        as_user(BOB, lambda: (shared / f"{UUID}.lock").unlink())
        assert not (shared / f"{UUID}.lock").exists()
        for user in (BOB, CAROL):
            assert as_user(user, lambda: LeaseFolder(shared).acquire(UUID)) == "None"
    assert as_user(CAROL, take_while_bob_removes) == "True True None"


@contextmanager
def held_by_user(uid: int, shared: Path) -> Iterator[int]:
    """Another user's process that holds the GPU until the block ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        held = LeaseFolder(shared).acquire(UUID)
        os.write(writing, b"y" if held else b"n")
        signal.pause()
    try:
        assert os.read(reading, 1) == b"y"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_what_one_holds_oneself_is_counted(folder: LeaseFolder) -> None:
    me = os.geteuid()
    assert folder.held_by(me) == frozenset()
    with folder.acquire(UUID) or pytest.fail("free"), folder.acquire("MIG-GPU-aaaa/1/0") or pytest.fail("free"):
        assert folder.held_by(me) == {UUID, "MIG-GPU-aaaa_1_0"}
        assert folder.held_by(me + 1) == frozenset()
    assert folder.held_by(me) == frozenset()


COUNTER = """
import os, sys
from gpuherd.gpus.leases import LeaseFolder
folder = LeaseFolder.default()
taken = []
for number in range(20):
    with folder.counting() as mine:
        assert mine
        if len(folder.held_by(os.geteuid())) < 3:
            taken.append(folder.acquire(f"GPU-{sys.argv[1]}-{number}"))
print(len(taken), flush=True)
input()
"""


def test_several_processes_together_never_take_more_than_they_count_to(folder: LeaseFolder) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", COUNTER, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(4)
    ]
    taken = [int(racer.stdout.readline()) for racer in racers if racer.stdout is not None]
    assert len(folder.held_by(os.geteuid())) == 3
    for racer in racers:
        racer.communicate("\n")
    assert sum(taken) == 3


@ROOT
def test_nobody_else_can_keep_a_user_from_counting(shared: Path) -> None:
    def squat() -> None:
        path = shared / f".counting-{ALICE}.0"
        path.write_text("")
        path.chmod(0o644)

    as_user(BOB, squat)

    def count() -> str:
        with LeaseFolder(shared).counting() as mine:
            return str(mine)

    assert as_user(ALICE, count) == "True"
    assert (shared / f".counting-{ALICE}.1").stat().st_uid == ALICE


@ROOT
def test_a_taker_that_is_killed_while_it_makes_the_lock_file_leaves_the_gpu_to_others(shared: Path) -> None:
    """The worst instant: the file is there but not yet opened to other users, and the umask is strict."""

    def die_when_a_file_is_opened_to_others(event: str, _: object) -> None:
        if event == "os.chmod":
            os.kill(os.getpid(), signal.SIGKILL)

    def take_and_die() -> None:
        sys.addaudithook(die_when_a_file_is_opened_to_others)
        LeaseFolder(shared).acquire(UUID)

    assert as_user(ALICE, take_and_die) == ""
    assert as_user(BOB, lambda: LeaseFolder(shared).acquire(UUID) is not None) == "True"


def test_takers_that_are_killed_leave_no_growing_litter(folder: LeaseFolder) -> None:
    code = f"""
import os, signal, sys
from gpuherd.gpus.leases import LeaseFolder
def die(event, _):
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
LeaseFolder.default().acquire({UUID!r})
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(list(folder.path.iterdir())) == 2  # the lock, and one note that got no name
    with folder.acquire(UUID) or pytest.fail("free"):
        holder = folder.holder(UUID)
        assert holder is not None
        assert holder.since is not None
    assert {path.suffix for path in folder.path.iterdir()} == {".lock", ".note"}
    assert len(list(folder.path.iterdir())) == 2
