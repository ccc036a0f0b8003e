"""Leases that nobody uses: they can't block others for ever, and are never passed over by two at once."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuherd.gpus import lease_files as files
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs.gpu.leasing import IdleLeaseBreaker

UUID = "GPU-11112222-3333"
IDLE_S = 1000.0
SEATED_AT = 60.0  # when patience is over and the time begins to count


@pytest.fixture
def folder() -> LeaseFolder:
    return LeaseFolder.default()


class Squatter:
    """Holds a lock file of the GPU, with the means that anybody has."""

    def __init__(self, folder: LeaseFolder, kind: int = fcntl.LOCK_EX) -> None:
        self.path = folder.path / f"{UUID}.lock"
        self.fds = [files.open_lock(self.path)]
        assert files.lock(self.fds[0], kind)

    def hold_another_first(self, path: Path, kind: int) -> None:
        """Takes another lock, then lets go of the ones before: at every moment something is held."""
        fd = files.open_lock(path)
        assert files.lock(fd, kind)
        self.leave()
        self.fds = [fd]

    def leave(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@pytest.fixture
def squatter(folder: LeaseFolder) -> Iterator[Squatter]:
    found = Squatter(folder)
    yield found
    found.leave()


def watch(
    vigil: IdleLeaseBreaker,
    start: float,
    end: float,
    *,
    used: bool = False,
    between: Callable[[float], None] | None = None,
) -> None:
    """Looks every 10 s, as a waiting dispatcher would."""
    now = start
    while now <= end:
        vigil.look(UUID, used, now)
        if between is not None:
            between(now)
        now += 10.0


def test_an_unused_lease_is_passed_over_after_its_time_and_not_before(folder: LeaseFolder, squatter: Squatter) -> None:
    vigil = IdleLeaseBreaker(folder, IDLE_S)
    watch(vigil, 0.0, SEATED_AT + IDLE_S - 10)
    assert not vigil.may_pass(UUID, SEATED_AT + IDLE_S - 1)
    assert vigil.pass_over(UUID, SEATED_AT + IDLE_S - 1) is None
    watch(vigil, SEATED_AT + IDLE_S, SEATED_AT + IDLE_S)
    assert vigil.may_pass(UUID, SEATED_AT + IDLE_S)
    assert folder.acquire(UUID) is None
    with vigil.pass_over(UUID, SEATED_AT + IDLE_S) or pytest.fail("not passed over"):
        assert vigil.unused_s(UUID, 1100.0) == 1100.0
        holder = folder.holder(UUID)
        assert holder is not None
        assert holder.pid == os.getpid()
        squatter.leave()
        vigil.close()
        assert folder.acquire(UUID) is None  # who passed over holds it as well as anyone
    with folder.acquire(UUID) or pytest.fail("free"):
        assert len(folder.paths(UUID)) == 1  # what is no longer needed is tidied away


def test_a_gpu_in_use_or_not_watched_for_a_while_begins_anew(folder: LeaseFolder, squatter: Squatter) -> None:
    vigil = IdleLeaseBreaker(folder, IDLE_S)
    watch(vigil, 0.0, 900.0)
    vigil.look(UUID, True, 910.0)
    watch(vigil, 920.0, 1500.0)
    assert not vigil.may_pass(UUID, 1500.0)
    watch(vigil, 1600.0, 2700.0)  # a hole of 100 s
    assert not vigil.may_pass(UUID, 2600.0)
    assert vigil.may_pass(UUID, 2700.0)


def test_our_own_job_on_it_is_no_use_by_others_and_the_next_need_not_wait(
    folder: LeaseFolder, squatter: Squatter
) -> None:
    vigil = IdleLeaseBreaker(folder, IDLE_S)
    watch(vigil, 0.0, 1100.0)
    now = 1100.0
    for _ in range(3):
        lease = vigil.pass_over(UUID, now)
        assert lease is not None
        for _ in range(50):
            now += 10.0
            vigil.ours(UUID, now)
        lease.close()
        now += 10.0
        vigil.look(UUID, False, now)
    assert len(folder.paths(UUID)) <= 4  # the first, a seat, and one or two of ours: they don't pile up


def test_a_lease_that_is_given_back_is_taken_the_ordinary_way(folder: LeaseFolder, squatter: Squatter) -> None:
    vigil, other = IdleLeaseBreaker(folder, IDLE_S), IdleLeaseBreaker(folder, IDLE_S)
    watch(vigil, 0.0, 500.0)
    watch(other, 0.0, 500.0)
    squatter.leave()
    assert folder.acquire(UUID) is None  # both sit
    for now in (510.0, 520.0):
        vigil.look(UUID, False, now)
        other.look(UUID, False, now)
    with folder.acquire(UUID) or pytest.fail("free"):
        pass


def test_who_only_shares_a_lock_can_block_nobody_for_ever_either(folder: LeaseFolder) -> None:
    squatter = Squatter(folder, fcntl.LOCK_SH)
    assert folder.acquire(UUID) is None
    vigil = IdleLeaseBreaker(folder, IDLE_S)
    watch(vigil, 0.0, 2 * SEATED_AT + 20 + IDLE_S)  # it gets up once, in case it is another who waits
    with vigil.pass_over(UUID, 2 * SEATED_AT + 20 + IDLE_S) or pytest.fail("not passed over"):
        pass
    squatter.leave()


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_who_changes_locks_all_the_time_gains_one_more_time_at_most(
    folder: LeaseFolder, squatter: Squatter, kind: int
) -> None:
    vigil = IdleLeaseBreaker(folder, IDLE_S)
    number = 0

    def change(_: float) -> None:
        nonlocal number
        number += 1
        squatter.hold_another_first(folder.path / f"{UUID}.{100 + number}.lock", kind)

    watch(vigil, 0.0, 2 * SEATED_AT + 100 + 2 * IDLE_S, between=change)
    lease = vigil.pass_over(UUID, 2 * SEATED_AT + 100 + 2 * IDLE_S)
    assert lease is not None
    lease.close()


def test_somebody_who_has_passed_over_is_respected(folder: LeaseFolder, squatter: Squatter) -> None:
    first, second = IdleLeaseBreaker(folder, IDLE_S), IdleLeaseBreaker(folder, IDLE_S)
    for now in range(0, 1110, 10):
        first.look(UUID, False, now)
        second.look(UUID, False, now)
    assert first.may_pass(UUID, 1100.0)
    assert second.may_pass(UUID, 1100.0)
    with first.pass_over(UUID, 1100.0) or pytest.fail("not passed over"):
        assert second.pass_over(UUID, 1100.0) is None
        # Even if the first one's job does not use the GPU for some time.
        for now in range(1110, 1110 + int(IDLE_S), 10):
            second.look(UUID, False, now)
            assert second.pass_over(UUID, now) is None
    with second.pass_over(UUID, 2110.0) or pytest.fail("not passed over"):
        assert first.pass_over(UUID, 2110.0) is None


def test_a_seat_that_is_removed_counts_no_more(folder: LeaseFolder, squatter: Squatter) -> None:
    vigil = IdleLeaseBreaker(folder, IDLE_S)
    watch(vigil, 0.0, 1100.0)
    for path in folder.paths(UUID)[1:]:
        path.unlink()
    assert vigil.pass_over(UUID, 1100.0) is None
    vigil.look(UUID, False, 1110.0)
    assert not vigil.may_pass(UUID, 1110.0)


# --- many processes ---------------------------------------------------------------------------------------------

# Honest: waits for the GPU, with a job that takes a moment before it uses it; writes down when it believes to have it.
_HONEST = f"""
import os, sys, time
from pathlib import Path
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs.gpu.leasing import IdleLeaseBreaker
log, used, jobs = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), Path(sys.argv[2]), int(sys.argv[3])
folder = LeaseFolder.default()
vigil = IdleLeaseBreaker(folder, 1.0)
end = time.monotonic() + 60
while jobs and time.monotonic() < end:
    now = time.monotonic()
    vigil.look({UUID!r}, used.exists(), now)
    lease = folder.acquire({UUID!r})
    if lease is None and vigil.may_pass({UUID!r}, now):
        lease = vigil.pass_over({UUID!r}, now)
    if lease is None:
        time.sleep(0.01)
        continue
    os.write(log, b"(")
    time.sleep(0.02)
    used.touch()
    time.sleep(0.02)
    used.unlink()
    os.write(log, b")")
    lease.close()
    vigil.ours({UUID!r}, time.monotonic())
    jobs -= 1
vigil.close()
sys.exit(jobs)
"""

# Hostile: at every moment it holds some lock, each time another one, made anew or one that is there.
_HOSTILE = f"""
import fcntl, os, random, sys, time
from gpuherd.gpus import lease_files as files
from gpuherd.gpus.leases import LeaseFolder
folder = LeaseFolder.default()
if os.geteuid() == 0:  # another user than the honest: by their files users are told apart
    os.setgroups([]), os.setgid(61_001), os.setuid(61_001)
chance, number, held = random.Random(int(sys.argv[1])), 1000, None
print(flush=True)
while True:
    number += 1
    paths = [*folder.paths({UUID!r}), folder.path / f"{UUID}.{{number}}.lock"]
    fd = files.open_lock(chance.choice(paths))
    if files.lock(fd, chance.choice([fcntl.LOCK_EX, fcntl.LOCK_SH])):
        if held is not None:
            os.close(held)
        held = fd
    else:
        os.close(fd)
    time.sleep(chance.random() * 0.05)
"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_however_one_squats_the_honest_get_the_gpu_and_never_two_of_them(
    folder: LeaseFolder, tmp_path: Path, seed: int
) -> None:
    log, used = tmp_path / "log", tmp_path / "used"
    log.touch()
    for place in (tmp_path, *tmp_path.parents):  # the hostile user must get at the leases
        if place.stat().st_uid == os.geteuid() and not place.stat().st_mode & stat.S_IXOTH:
            place.chmod(place.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
    hostile = subprocess.Popen([sys.executable, "-c", _HOSTILE, str(seed)], stdout=subprocess.PIPE)
    assert hostile.stdout is not None
    hostile.stdout.readline()
    honest = [subprocess.Popen([sys.executable, "-c", _HONEST, str(log), str(used), "4"]) for _ in range(3)]
    try:
        codes = [process.wait(90) for process in honest]
    finally:
        hostile.kill()
        hostile.communicate()
    assert codes == [0, 0, 0]
    assert log.read_text() == "()" * 12


def test_without_a_squatter_nobody_waits(folder: LeaseFolder, tmp_path: Path) -> None:
    log, used = tmp_path / "log", tmp_path / "used"
    log.touch()
    began = time.monotonic()
    honest = [subprocess.Popen([sys.executable, "-c", _HONEST, str(log), str(used), "10"]) for _ in range(3)]
    assert [process.wait(90) for process in honest] == [0, 0, 0]
    assert log.read_text() == "()" * 30
    assert time.monotonic() - began < 30
