"""Lock files that are opened before the GPU can be taken: who holds the lease then, and who does not."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpuherd.gpus.leases import Lease, LeaseFolder

UUID = "GPU-11112222-3333"


@contextmanager
def child_with(lease: Lease) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has inherited the open file, until the block ends."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lease.fd]) as process:
        try:
            yield process
        finally:
            process.kill()


def opened(folder: LeaseFolder) -> Lease:
    """The lock file of a GPU that was taken once, open ahead."""
    taken = folder.acquire(UUID)
    assert taken is not None
    taken.close()
    ahead = folder.open_ahead(UUID)
    assert ahead is not None
    return ahead


def is_free_soon(folder: LeaseFolder) -> bool:
    deadline = time.monotonic() + 20
    while folder.is_held(UUID) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not folder.is_held(UUID)


def test_an_open_lock_file_is_no_lease() -> None:
    folder = LeaseFolder.default()
    assert folder.open_ahead(UUID) is None  # nobody has had it yet
    with opened(folder) as ahead, child_with(ahead):
        assert not folder.is_held(UUID)
        other = folder.acquire(UUID)
        assert other is not None
        assert not other.was_ahead
        other.close()


def test_who_was_given_the_file_before_it_was_locked_holds_the_lease() -> None:
    folder = LeaseFolder.default()
    ahead = opened(folder)
    with child_with(ahead) as child:
        lease = folder.acquire(UUID, ahead=ahead)
        assert lease is not None
        assert lease.was_ahead
        lease.close()
        assert folder.is_held(UUID)
        assert folder.acquire(UUID) is None
        child.kill()
        child.wait()
        assert is_free_soon(folder)


def test_a_file_that_is_not_the_locks_any_more_is_not_locked() -> None:
    """Whoever has only the removed file would hold a lock that nobody sees."""
    folder = LeaseFolder.default()
    ahead = opened(folder)
    with child_with(ahead):
        folder.paths(UUID)[0].unlink()
        lease = folder.acquire(UUID, ahead=ahead)
        assert lease is not None
        assert not lease.was_ahead
        assert folder.is_held(UUID)
        lease.close()
        assert not folder.is_held(UUID)


def test_a_gpu_that_somebody_holds_is_not_had_by_a_file_opened_ahead() -> None:
    folder = LeaseFolder.default()
    ahead = opened(folder)
    before = len(os.listdir("/proc/self/fd"))
    with folder.acquire(UUID) or ahead:
        assert folder.acquire(UUID, ahead=ahead) is None
    assert not folder.is_held(UUID)
    # It was ours no more: the one that could not be locked is closed.
    assert len(os.listdir("/proc/self/fd")) == before - 1
