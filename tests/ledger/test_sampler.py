"""Processes that no gpuherd records: against an account of our own, on simulated GPUs."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.ledger.uses import use
from tests.patience import wait_until

from gpuherd.engines.process_tree import identify
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Machine
from gpuherd.ledger.files import log_path, month_of, open_files_in, open_path, open_text
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import Kind, Use, line_of
from gpuherd.ledger.sampler import Sampler, uid_of
from gpuherd.standin.machine import SimulatedMachine

ME = os.geteuid()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "ledger"
    place.mkdir()
    return place


@pytest.fixture
def strangers() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(uid: int = ME) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"], user=uid) if uid != ME else subprocess.Popen(["sleep", "600"])
        wait_until(lambda: uid_of(process.pid) == uid)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


class Watch:
    """A sampler whose clock the test sets: the one since boot, and the wall clock."""

    def __init__(self, folder: Path, **more: object) -> None:
        self.now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.ahead = 0.0
        self.recorder = Recorder(folder)
        self.recorder.begin()
        self.sampler = Sampler(self.recorder, GpuReader().snapshot, **more)  # type: ignore[arg-type]

    @property
    def wall(self) -> float:
        return 1.79e9 + self.now + self.ahead

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        sampled = self.sampler.keep_time(self.now, self.wall)
        self.recorder.sample(self.sampler.uses)
        return sampled

    def close(self) -> None:
        self.recorder.sample(self.sampler.uses)
        self.recorder.close()
        self.sampler.close()


def read(folder: Path, reader: int = ME) -> list[Use]:
    return [record.use for record in believed(Ledger(folder, shared=True, reader_uid=reader).read(), reader)]


def held(folder: Path, reader: int = ME) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for each in read(folder, reader):
        found[each.uid] += each.held_s
    return found


needs_root = pytest.mark.skipif(ME != 0, reason="only root can start processes of others")


@needs_root
def test_the_user_is_whom_the_kernel_names(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("2x40GB")
    alice, bob = strangers(4242), strangers(4343)
    machine.occupy(0, 1000, pid=alice.pid)
    machine.occupy(1, 3000, pid=alice.pid)
    machine.occupy(1, 500, pid=bob.pid)
    machine.set_utilisation(1, 0)
    watch = Watch(folder)
    watch.wait(10)
    for _ in range(6):
        watch.wait(10)
    found = {(each.uid, each.label): each for each in read(folder)}
    assert {key: each.held_s for key, each in found.items()} == {
        (4242, "0"): pytest.approx(60),
        (4242, "1"): pytest.approx(30),
        (4343, "1"): pytest.approx(30),
    }
    assert found[4242, "0"].computing_s == pytest.approx(54)
    assert found[4242, "0"].idle_since is None
    assert found[4242, "0"].kind is Kind.OTHER
    assert found[4242, "1"].computing_s == 0.0
    assert found[4242, "1"].mean_mb == pytest.approx(3000)
    assert found[4242, "1"].idle_since == pytest.approx(watch.wall - 60, abs=0.01)
    assert found[4343, "1"].command == "sleep"
    watch.close()


@needs_root
def test_twenty_strangers_that_come_and_go_within_a_percent(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("4x40GB")
    chance = random.Random(3)
    watch = Watch(folder)
    watch.wait(10)
    truth: dict[int, float] = defaultdict(float)
    running: list[tuple[float, int, subprocess.Popen[bytes]]] = []
    on_gpu: dict[int, set[int]] = defaultdict(set)
    to_come = 20
    while to_come or running:
        # One second of the world, by its own account: users on one GPU have equal parts.
        for gpu in range(4):
            for uid in on_gpu[gpu]:
                truth[uid] += 1 / len(on_gpu[gpu])
        watch.wait(1)
        for each in [each for each in running if each[0] <= watch.now]:
            running.remove(each)
            each[2].kill()
            each[2].wait()
            on_gpu[each[1]].clear()
            select.select([watch.sampler], [], [], 10)
            watch.sampler.note_ends(watch.now, watch.wall)
        free = [gpu for gpu in range(4) if not on_gpu[gpu]]
        # They come with a sample: when within ten seconds one came is not for a sampler to know in this virtual time.
        if to_come and free and watch.sampler.due_at - watch.now == watch.sampler._every_s:
            uid = 5000 + to_come % 5
            stranger = strangers(uid)
            machine.occupy(free[0], 900, pid=stranger.pid)
            watch.sampler.due_at = watch.now
            watch.wait(0)
            on_gpu[free[0]].add(uid)
            running.append((watch.now + chance.uniform(20, 300), free[0], stranger))
            to_come -= 1
    assert sum(truth.values()) > 1000
    found = held(folder)
    assert found.keys() == truth.keys()
    assert sum(found.values()) == pytest.approx(sum(truth.values()), rel=0.01)
    for uid, seconds in truth.items():
        assert found[uid] == pytest.approx(seconds, rel=0.02)
    watch.close()


def test_a_gap_between_two_samplers_counts_as_held(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000, pid=strangers().pid)
    first = Watch(folder)
    first.now += 10_000  # the process is older than all this
    first.wait(10)
    first.wait(100)
    now = first.now
    assert held(folder)[ME] == pytest.approx(100)
    # Killed: nothing is closed in order. Its open file names this live process: a dead one has to be in it.
    with closing(first.sampler):
        pass
    process = subprocess.Popen(["true"])
    identity = identify(process.pid)
    process.wait()
    assert identity is not None
    (left,) = open_files_in(folder)
    left.path.unlink()
    open_path(folder, ME, identity, 0).write_bytes(open_text(identity, [line + b"\n" for line in left.lines]))
    second = Watch(folder)
    second.now = now + 50
    second.wait(10)
    second.wait(40)
    assert held(folder)[ME] == pytest.approx(200)
    assert len(read(folder)) == 1
    second.close()
    assert held(folder)[ME] == pytest.approx(200)


def test_only_one_of_a_users_recorders_samples_at_a_time(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000, pid=strangers().pid)
    one, other = Watch(folder), Watch(folder)
    assert one.wait(10)
    assert not other.wait(10)
    assert not other.sampler.samples
    one.close()
    assert other.wait(10)
    other.close()


@needs_root
def test_nobody_samples_while_roots_recorder_does(
    standin: Callable[..., SimulatedMachine], tmp_path: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000, pid=strangers(4242).pid)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o001 == 0 and parent.owner() == "root":
            parent.chmod(parent.stat().st_mode | 0o011)
    root = Watch(folder)
    root.wait(10)
    assert sampled_by(4343, folder) == b"False None"
    root.close()
    assert sampled_by(4343, folder) == b"True None"


def sampled_by(uid: int, folder: Path) -> bytes:
    """Whether a recorder of this user samples, and what hinders it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            recorder = Recorder(folder)
            recorder.begin()
            sampled = Sampler(recorder, Machine).keep_time(1.0, 1e9)
            os.write(write_end, f"{sampled} {recorder.trouble}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as told:
        return told.read()


@needs_root
def test_what_a_user_records_themself_is_left_out(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("2x40GB")
    alice = strangers(4242)
    machine.occupy(0, 1000, pid=alice.pid)
    machine.occupy(1, 1000, pid=alice.pid)
    own, theirs = open_files(folder, 4242, [use("x", uid=4242, gpu=machine.uuid(0))]), 4343
    open_files(folder, theirs, [use("y", uid=4242, gpu=machine.uuid(1))])  # a stranger's word hides nothing
    watch = Watch(folder)
    os.utime(own, (watch.wall, watch.wall))
    watch.wait(10)
    watch.wait(10)
    others = [each for each in read(folder) if each.kind is Kind.OTHER]
    assert [each.label for each in others] == ["1"]
    watch.close()


def open_files(folder: Path, uid: int, uses: list[Use]) -> Path:
    identity = identify(1)
    assert identity is not None
    path = open_path(folder, uid, identity, 0)
    path.write_bytes(open_text(identity, map(line_of, uses)))
    os.chown(path, uid, uid)
    return path


def test_a_job_that_is_about_to_be_recorded_is_waited_for(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    stranger = strangers()
    machine.occupy(0, 1000, pid=stranger.pid)
    watch = Watch(folder, holders=lambda uuids: dict.fromkeys(uuids, user_name(ME)))
    watch.wait(10)
    assert watch.sampler.uses == ()
    watch.wait(10)
    assert watch.sampler.uses == ()
    # It goes on without a record of its own: an older gpuherd's job.
    watch.wait(10)
    assert held(folder)[ME] == pytest.approx(20)
    stranger.send_signal(signal.SIGKILL)
    stranger.wait()
    select.select([watch.sampler], [], [], 10)
    watch.now += 5
    watch.sampler.note_ends(watch.now, watch.wall)
    assert held(folder)[ME] == pytest.approx(25)
    watch.close()


def test_a_driver_that_fails_for_a_moment_ends_nothing(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("2x40GB")
    machine.occupy(0, 1000, pid=strangers().pid)
    watch = Watch(folder)
    watch.wait(10)
    watch.wait(10)
    machine.lose(0)
    watch.wait(10)
    machine.restore(0)
    watch.wait(10)
    assert held(folder)[ME] == pytest.approx(30)
    watch.close()


def test_a_rest_lets_another_sample_and_its_gap_counts(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000, pid=strangers().pid)
    one, other = Watch(folder), Watch(folder)
    one.now += 10_000  # the process is older than all this
    one.wait(10)
    one.wait(10)
    one.sampler.rest(one.now, one.wall)
    one.recorder.sample(one.sampler.uses)
    assert held(folder)[ME] == pytest.approx(10)
    assert list(open_files_in(folder)) == []
    other.now = one.now
    assert other.wait(10)
    assert other.wait(10)
    other.sampler.rest(other.now, other.wall)
    other.recorder.sample(other.sampler.uses)
    # What the other saw in between counts once.
    assert held(folder)[ME] == pytest.approx(20)
    one.wait(50)
    one.wait(10)
    assert held(folder)[ME] == pytest.approx(70)
    one.close()
    other.close()


def test_what_leaves_a_gpu_and_comes_back_counts_for_the_time_it_was_there(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    stranger = strangers()
    there = machine.occupy(0, 1000, pid=stranger.pid)
    watch = Watch(folder)
    watch.wait(10)
    watch.wait(10)
    there.release()
    watch.wait(10)  # it left at some time in between
    watch.wait(10)
    machine.occupy(0, 1000, pid=stranger.pid)
    watch.wait(10)
    watch.wait(10)
    assert held(folder)[ME] == pytest.approx(30)
    watch.close()


def test_a_clock_that_jumps_changes_no_sum(
    standin: Callable[..., SimulatedMachine], folder: Path, strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000, pid=strangers().pid)
    watch = Watch(folder)
    watch.wait(10)
    for ahead in (0.0, 86_400.0 * 400, -86_400.0 * 400, 3_600.0):
        watch.ahead = ahead
        watch.wait(10)
    assert held(folder)[ME] == pytest.approx(40)
    watch.close()
    assert held(folder)[ME] == pytest.approx(40)


def test_hidden_pids_are_nobodys(standin: Callable[..., SimulatedMachine], folder: Path) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000)  # a pid that is none here
    watch = Watch(folder)
    watch.wait(10)
    watch.wait(10)
    machine.hide_pids()
    watch.wait(10)
    assert read(folder) == []
    watch.close()


def test_gpuherd_record_runs_until_it_is_told_to_end(
    standin: Callable[..., SimulatedMachine], strangers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    machine = standin("1x40GB")
    stranger = strangers()
    machine.occupy(0, 1000, pid=stranger.pid)
    words = [sys.executable, "-m", "gpuherd", "record", "--every", "1s"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def recorded() -> float:
        ledger = Ledger.existing()
        return sum(record.use.held_s for record in ledger.read()) if ledger is not None else 0.0

    wait_until(lambda: recorded() >= 2)
    stranger.kill()
    stranger.wait()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in told
    ledger = Ledger.existing()
    assert ledger is not None
    (record,) = ledger.read()
    assert record.use.pid == stranger.pid
    assert not record.is_open


@pytest.mark.parametrize("kind", ["user", "system"])
def test_the_unit_file_names_this_python(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuherd.cli.main import run

    assert run(["record", "--systemd", kind, "--every", "30s"]) == 0
    unit = capsys.readouterr().out
    assert f"ExecStart={sys.executable} -m gpuherd record --every 30s\n" in unit
    assert f"WantedBy={'default' if kind == 'user' else 'multi-user'}.target\n" in unit
    assert ("ReadWritePaths=/var/lib/gpuherd" in unit) is (kind == "system")


def test_the_lock_of_another_is_left_alone(folder: Path, standin: Callable[..., SimulatedMachine]) -> None:
    standin("1x40GB")
    (folder / f"sampler.{ME}.lock").symlink_to(log_path(folder, ME, month_of(0), 0))
    watch = Watch(folder)
    assert not watch.wait(10)
    assert not log_path(folder, ME, month_of(0), 0).exists()
    watch.close()
