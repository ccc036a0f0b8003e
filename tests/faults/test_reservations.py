"""One user's reservation, respected by another's gpuherd, and lapsing when it is not used: with real users."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuherd.gpus.machine_dir import ENVIRONMENT
from gpuherd.gpus.reservation_files import ReservationFolder
from gpuherd.gpus.reservations import Reservation
from gpuherd.standin.machine import SimulatedMachine

ALICE, BOB = 65_534, 65_533
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, standin: Callable[..., SimulatedMachine]) -> Iterator[Path]:
    """A folder that every user can get at, with leases, reservations, a policy and four GPUs."""
    place = Path(tempfile.mkdtemp(prefix="gpuherd-reserved-"))
    place.chmod(0o755)
    for name in ("lock", "shared"):
        (place / name).mkdir()
        (place / name).chmod(0o1777)
    (place / "events").touch()
    (place / "events").chmod(0o666)
    policy = place / "policy.toml"
    policy.write_text('[reservations]\nlapse_after = "60s"\n')
    policy.chmod(0o644)
    state = shutil.copy(standin("4x40GB").path, place / "machine")
    os.chmod(state, 0o666)
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(place / "lock" / "gpuherd"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    monkeypatch.setenv(ENVIRONMENT, str(place / "shared"))
    os.environ["GPUHERD_STANDIN"] = str(state)  # put back by ``standin``
    yield place
    shutil.rmtree(place)


@pytest.fixture
def user(place: Path, new_user: Callable[[str], Any]) -> Callable[[str, int], Any]:
    def make(name: str, uid: int) -> Any:
        return new_user(name).with_uid(uid, place)

    return make


def reserve(uid: int, uuids: Sequence[str], since: float, until: float) -> Reservation:
    os.seteuid(uid)
    try:
        return ReservationFolder.made().add(uuids, since, until, "thesis")
    finally:
        os.seteuid(0)


def uuids() -> list[str]:
    from gpuherd.gpus.query import GpuReader

    return [gpu.uuid for gpu in GpuReader().snapshot().gpus]


def used(user: Any) -> list[str]:
    return [line[2] for line in user.lines() if line[0] == "start" and line[1].startswith(f"{user.root.name}-")]


def test_only_the_owners_jobs_run_there_while_it_lasts(user: Callable[[str, int], Any]) -> None:
    alice, bob = user("alice", ALICE), user("bob", BOB)
    now = time.time()
    made = reserve(ALICE, uuids()[:3], now - 1, now + 3600)
    processes = [each.start([each.job(f"j{number}", 0.02) for number in range(9)]) for each in (alice, bob)]
    for process in processes:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 0, told[-2000:]
    assert set(used(bob)) == {"3"}
    # Hers come first to what she has reserved, and may go elsewhere too.
    assert set(used(alice)) >= {"0", "1", "2"}
    (marked,) = (each for each in ReservationFolder.made().read() if each.id == made.id)
    assert marked.used is not None


def test_before_it_only_jobs_that_surely_end_are_started(user: Callable[[str, int], Any]) -> None:
    bob = user("bob", BOB)
    now = time.time()
    reserve(ALICE, uuids()[:3], now + 1800, now + 3600)
    unknown, told = bob.run([bob.job(f"j{number}", 0.02) for number in range(2)])
    assert unknown == 0, told
    assert set(used(bob)) == {"3"}
    code, told = bob.run([bob.job(f"short{number}", 0.3, timeout_s=600.0) for number in range(4)])
    assert code == 0, told
    assert set(used(bob)) == {"0", "1", "2", "3"}


@pytest.mark.slow
def test_a_job_waits_for_the_end_of_a_reservation_and_says_why(user: Callable[[str, int], Any]) -> None:
    bob = user("bob", BOB)
    now = time.time()
    reserve(ALICE, uuids(), now - 1, now + 20)
    code, told = bob.run([bob.job("j", 0.02)])
    assert code == 0, told
    assert time.time() >= now + 20
    assert "reserved by nobody until" in told
    assert "(thesis)" in told


def test_what_bob_plants_keeps_nobody_off(user: Callable[[str, int], Any], place: Path) -> None:
    """Nor do files in Alice's name, nor one that is altered after hers was made."""
    alice, bob = user("alice", ALICE), user("bob", BOB)
    now = time.time()
    early = reserve(BOB, uuids()[:1], now - 1, now + 3600)
    reserve(ALICE, uuids()[:3], now - 1, now + 3600)
    folder = place / "shared" / "reservations"
    planter = f"""
import json, os
os.setgroups([]), os.setgid({BOB}), os.setuid({BOB})
text = json.dumps({{"uuids": {uuids()!r}, "since": {now - 1}, "until": {now + 3600}}})
for name in ("{ALICE}-aaaa", "0-aaaa"):
    open("{folder}/" + name + ".reservation", "w").write(text)
    open("{folder}/" + name + ".used", "w")
open("{folder}/{early.id}.reservation", "w").write(text)  # all GPUs, and so made later than hers
"""
    subprocess.run(["python3", "-c", planter], check=True)
    processes = [each.start([each.job(f"j{number}", 0.02) for number in range(6)]) for each in (alice, bob)]
    for process in processes:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 0, told[-2000:]
    assert set(used(bob)) == {"3"}
    assert set(used(alice)) == {"0", "1", "2"}


def test_a_dispatcher_that_is_killed_stops_nobody_and_its_jobs_keep_the_reservation(
    user: Callable[[str, int], Any],
) -> None:
    alice, bob = user("alice", ALICE), user("bob", BOB)
    now = time.time()
    reserve(ALICE, uuids()[:3], now - 1, now + 3600)
    running = alice.start([alice.job("long", 3.0)])
    alice.wait_until(lambda: used(alice) != [])
    running.kill()
    running.communicate()
    code, told = bob.run([bob.job(f"j{number}", 0.02) for number in range(3)])
    assert code == 0, told
    assert set(used(bob)) == {"3"}
    code, told = alice.run([alice.job("long", 3.0)])  # taken over
    assert code == 0, told
    assert len(used(alice)) == 1


@pytest.mark.slow
def test_an_unused_reservation_lapses_and_a_used_one_does_not(user: Callable[[str, int], Any]) -> None:
    alice, bob = user("alice", ALICE), user("bob", BOB)
    now = time.time()
    reserve(ALICE, uuids()[:2], now - 1, now + 3600)
    reserve(ALICE, uuids()[2:], now - 1, now + 3600)
    hers = alice.start([alice.job("long", 75.0, gpus=2)])
    alice.wait_until(lambda: used(alice) != [])
    kept = set(used(alice)[0].split(","))
    code, told = bob.run([bob.job(f"j{number}", 2.0) for number in range(2)])
    assert code == 0, told
    assert 59 <= time.time() - now <= 75
    assert set(used(bob)).isdisjoint(kept)
    told, _ = hers.communicate(timeout=100)
    assert hers.returncode == 0, told
