"""Two users' runs on one machine: no GPU is ever used by both, by the account of the jobs themselves."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuherd.standin.machine import SimulatedMachine


@pytest.mark.parametrize(
    ("jobs", "users"),
    [
        (40, 2),
        pytest.param(200, 2, id="acceptance", marks=pytest.mark.slow),
        pytest.param(100, 4, marks=pytest.mark.slow),
    ],
)
def test_no_gpu_is_ever_used_by_two(
    new_user: Callable[[str], Any],
    four_gpus: SimulatedMachine,
    find_overlaps: Callable[[list[list[str]]], list[str]],
    jobs: int,
    users: int,
) -> None:
    everyone = [new_user(f"user{i}") for i in range(users)]
    processes = [user.start([user.job(f"j{i}", 0.002 * (i % 3)) for i in range(jobs)]) for user in everyone]
    for process in processes:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 0, told[-2000:]
    lines = everyone[0].lines()
    assert find_overlaps(lines) == []
    ends = Counter(line[1] for line in lines if line[0] == "end")
    assert ends == {f"user{u}-j{i}": 1 for u in range(users) for i in range(jobs)}
    # They really shared: each had more than one GPU, and more than one had the same GPU.
    by_gpu = {line[2]: {other[1].partition("-")[0] for other in lines if other[2] == line[2]} for line in lines}
    assert len(by_gpu) == 4
    assert any(len(who) > 1 for who in by_gpu.values())


@pytest.fixture
def open_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can get at, as they can at /tmp; the leases lie in it."""
    place = Path(tempfile.mkdtemp(prefix="gpuherd-users-"))
    place.chmod(0o755)
    (place / "lock").mkdir()
    (place / "lock").chmod(0o1777)  # as /run/lock is: whoever comes first makes the folder of leases in it
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(place / "lock" / "gpuherd"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
@pytest.mark.parametrize(
    ("jobs", "kill_seed"),
    [
        pytest.param(60, None, id="short", marks=pytest.mark.slow),
        pytest.param(60, 1, id="short-killed"),
        pytest.param(200, None, id="acceptance", marks=pytest.mark.slow),
        *(pytest.param(200, seed, marks=pytest.mark.slow) for seed in range(2, 8)),
    ],
)
def test_two_uids_never_use_one_gpu_together(
    open_place: Path,
    standin: Callable[..., SimulatedMachine],
    new_user: Callable[[str], Any],
    find_overlaps: Callable[[list[list[str]]], list[str]],
    jobs: int,
    kill_seed: int | None,
) -> None:
    """Two users who may not write each other's files; with a seed their dispatchers are killed again and again."""
    machine = standin("4x40GB")
    state = shutil.copy(machine.path, open_place / "machine")
    os.chmod(state, 0o666)
    os.environ["GPUHERD_STANDIN"] = str(state)  # put back by ``standin``
    events = open_place / "events"
    events.touch()
    events.chmod(0o666)
    everyone = []
    for name, uid in (("alice", 65_534), ("bob", 65_533)):
        user = new_user(name).with_uid(uid, open_place)
        everyone.append((user, [user.job(f"j{i}", 0.002 * (i % 3)) for i in range(jobs)]))
    chance = random.Random(kill_seed)
    if kill_seed is not None:
        for _ in range(8):
            running = [user.start(work) for user, work in everyone]
            for process in running:
                try:
                    process.communicate(timeout=chance.uniform(0.05, 0.6))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
    for process in [user.start(work) for user, work in everyone]:
        told, _ = process.communicate(timeout=200)
        assert process.returncode == 0, told[-2000:]
    lines = everyone[0][0].lines()
    assert find_overlaps(lines) == []
    once = {f"{user.root.name}-j{i}": 1 for user, _ in everyone for i in range(jobs)}
    assert Counter(line[1] for line in lines if line[0] == "start") == once
    assert Counter(line[1] for line in lines if line[0] == "end") == once
    by_gpu = {line[2]: {other[1].partition("-")[0] for other in lines if other[2] == line[2]} for line in lines}
    assert len(by_gpu) == 4
    assert any(len(who) > 1 for who in by_gpu.values())
    locks = {path.stat().st_uid for path in (open_place / "lock" / "gpuherd").glob("*.lock")}
    assert locks <= {user.uid for user, _ in everyone}
    assert [pid for user, _ in everyone for pid in user.processes()] == []


def test_the_check_itself_finds_an_overlap(find_overlaps: Callable[[list[list[str]]], list[str]]) -> None:
    lines = [["start", "a", "0,1"], ["start", "b", "1"], ["end", "a", "0,1"], ["end", "b", "1"]]
    assert find_overlaps(lines) == ["GPU 1: b began while a ran"]
