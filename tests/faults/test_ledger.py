"""Dispatchers that are killed at any instant: the ledger still says what the queue says, each attempt once."""

from __future__ import annotations

import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from gpuherd.jobs import RunDirectory
from gpuherd.jobs.monitor.status import opened
from gpuherd.ledger.reader import Ledger, believed
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
