"""Dispatchers that are killed at any instant: the ledger still says what the queue says, each attempt once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuherd.jobs import RunDirectory
from gpuherd.jobs.monitor.status import opened
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.shares import Shares
from gpuherd.standin.machine import SimulatedMachine


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_the_ledger_agrees_with_the_queue_after_kills(
    new_user: Callable[[str], Any], four_gpus: SimulatedMachine, seed: int
) -> None:
    user, chance = new_user("alice"), random.Random(seed)
    jobs = [user.job(f"j{i}", 0.002 * (i % 5)) for i in range(60)]
    for _ in range(6):
        process = user.start(jobs)
        try:
            process.communicate(timeout=chance.uniform(0.5, 2.5))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    code, told = user.run(jobs)
    assert code == 0, told[-2000:]
    with opened(RunDirectory(user.root)) as reader:
        rows = reader.rows("SELECT id, ended_mono - started_mono AS s FROM attempts WHERE gpus <> '[]'")
    theirs = {row["id"]: row["s"] for row in rows}
    ledger = Ledger.existing()
    assert ledger is not None
    ours: dict[int, float] = defaultdict(float)
    for record in believed(ledger.read(), os.geteuid()):
        assert not record.is_open
        ours[int(record.use.id.split("/")[1])] += record.use.held_s
    assert len(theirs) >= 60
    assert ours.keys() == theirs.keys()
    for attempt, seconds in theirs.items():
        assert ours[attempt] == pytest.approx(seconds, abs=0.005)


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can get at, with leases and a ledger of all users, as setup-machine makes them."""
    place = Path(tempfile.mkdtemp(prefix="gpuherd-ledger-"))
    place.chmod(0o755)
    for name in ("leases", "machine", "machine/ledger"):
        (place / name).mkdir()
        (place / name).chmod(0o1777)
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(place / "leases"))
    monkeypatch.setenv("GPUHERD_MACHINE_DIR", str(place / "machine"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_users_of_one_machine_have_one_ledger(
    common: Path, standin: Callable[..., SimulatedMachine], new_user: Callable[[str], Any]
) -> None:
    machine = standin("4x40GB")
    state = shutil.copy(machine.path, common / "state")
    os.chmod(state, 0o666)
    os.environ["GPUHERD_STANDIN"] = str(state)  # put back by ``standin``
    events = common / "events"
    events.touch()
    events.chmod(0o666)
    running = []
    for name, uid in (("alice", 65_534), ("bob", 65_533)):
        user = new_user(name).with_uid(uid, common)
        running.append((uid, user, user.start([user.job(f"j{i}", 0.05) for i in range(20)])))
    for _, _, process in running:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 0, told[-2000:]
        assert "recorded" not in told
    ledger = Ledger.existing()
    assert ledger is not None
    assert ledger.shared
    records = list(believed(ledger.read(), 7))
    held = Shares(Ledger(ledger.folder, shared=True, reader_uid=7)).used_by_user(time.time())
    for uid, user, _ in running:
        with opened(RunDirectory(user.root)) as reader:
            found = reader.rows("SELECT ended_mono - started_mono AS s FROM attempts WHERE gpus <> '[]'")
        theirs = sum(row["s"] for row in found)
        mine = [record for record in records if record.use.uid == uid]
        assert {record.observer_uid for record in mine} == {uid}
        assert sum(record.use.held_s for record in mine) == pytest.approx(theirs, rel=0.01)
        assert held[uid] == pytest.approx(theirs, rel=0.01)
