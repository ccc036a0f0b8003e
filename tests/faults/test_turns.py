"""Three users take turns on one machine: real users, whose gpuherds know of each other by leases and tickets alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.patience import wait_until

from gpuherd.gpus.tickets import TicketReader
from gpuherd.jobs import clock
from gpuherd.standin.machine import SimulatedMachine

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")

# "$1" is the user, "$2" the file of events, "$3" the result, "$4" how long it runs.
_JOB = (
    'echo "start $1 $CUDA_VISIBLE_DEVICES $(date +%s.%N)" >>"$2"; sleep "$4";'
    ' echo "end $1 $CUDA_VISIBLE_DEVICES $(date +%s.%N)" >>"$2"; : >"$3"'
)
UIDS = {"alice": 65_531, "bob": 65_532, "carol": 65_533}


@dataclass
class Lab:
    """A machine with four GPUs and its users."""

    place: Path
    new_user: Callable[[str], Any]
    started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, name: str, jobs: int, seconds: float, **more: object) -> None:
        """Starts a user's gpuherd on so many jobs."""
        home = self.place / name
        home.mkdir(exist_ok=True)
        os.chown(home, UIDS[name], UIDS[name])
        user = self.new_user(name)
        user.root, user.uid = home / "run", UIDS[name]
        work = []
        for number in range(jobs):
            result = str(home / f"{number}.result")
            words = ["/bin/sh", "-c", _JOB, "job", name, str(self.place / "events"), result, str(seconds)]
            work.append({"name": f"j{number}", "argv": words, "result": result, **more})
        self.started[name] = user.start(work)

    def spans(self) -> dict[str, list[tuple[float, float]]]:
        """When each user's jobs ran, by their own account, a span for each GPU."""
        open_since: dict[tuple[str, str], float] = {}
        found = defaultdict(list)
        for line in (self.place / "events").read_text().splitlines():
            kind, user, gpus, at = line.split()
            for gpu in gpus.split(","):
                if kind == "start":
                    open_since[user, gpu] = float(at)
                else:
                    found[user].append((open_since.pop((user, gpu)), float(at)))
        return found

    def join(self, *names: str) -> None:
        """Waits for the end of these users' runs; all must succeed."""
        for name in names or tuple(self.started):
            told, _ = self.started[name].communicate(timeout=240)
            assert self.started[name].returncode == 0, f"{name}: {told[-2000:]}"

    def waiting(self) -> set[int]:
        """The users who wait."""
        folder = self.place / "lock" / "gpuherd"
        return {ticket.uid for ticket in TicketReader().read(folder, clock.mono())} if folder.exists() else set()


@pytest.fixture
def lab(
    monkeypatch: pytest.MonkeyPatch, standin: Callable[..., SimulatedMachine], new_user: Callable[[str], Any]
) -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(policy: str = "") -> Lab:
        place = Path(tempfile.mkdtemp(prefix="gpuherd-turns-"))
        place.chmod(0o755)
        for name in ("lock", "shared"):
            (place / name).mkdir()
            (place / name).chmod(0o1777)
        rules = place / "policy.toml"
        rules.write_text(f'[turns]\ngrace = "3s"\nslice = "500ms"\n{policy}')
        for name in ("machine", "events"):
            (place / name).touch()
        shutil.copy(standin("4x40GB").path, place / "machine")
        for name in ("machine", "events"):
            (place / name).chmod(0o666)
        monkeypatch.setenv("GPUHERD_LEASE_DIR", str(place / "lock" / "gpuherd"))
        monkeypatch.setenv("GPUHERD_MACHINE_DIR", str(place / "shared"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
        monkeypatch.setenv("GPUHERD_POLICY", str(rules))
        os.environ["GPUHERD_STANDIN"] = str(place / "machine")  # put back by ``standin``
        made.append(Lab(place, new_user))
        return made[-1]

    yield make
    for each in made:
        for process in each.started.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
        shutil.rmtree(each.place)


def shares(spans: Mapping[str, list[tuple[float, float]]]) -> dict[str, float]:
    """The share of GPU time of each user, from when all have begun until the first has nothing left to begin."""
    begin = max(min(since for since, _ in mine) for mine in spans.values())
    end = min(max(since for since, _ in mine) for mine in spans.values())
    used = {
        user: sum(max(0.0, min(until, end) - max(since, begin)) for since, until in mine)
        for user, mine in spans.items()
    }
    total = sum(used.values())
    return {user: seconds / total for user, seconds in used.items()}


@pytest.mark.parametrize(
    ("weights", "jobs"),
    [
        pytest.param({"alice": 2, "bob": 1, "carol": 1}, 24, id="weights"),
        pytest.param({"alice": 1, "bob": 1, "carol": 1}, 40, id="equal", marks=pytest.mark.slow),
        pytest.param({"alice": 3, "bob": 2, "carol": 1}, 40, id="uneven", marks=pytest.mark.slow),
    ],
)
def test_shares_follow_the_weights(lab: Callable[..., Lab], weights: dict[str, int], jobs: int) -> None:
    lines = [f'[users."uid {UIDS[name]}"]\nweight = {weight}' for name, weight in weights.items()]
    machine = lab("\n".join(lines))
    for name, weight in weights.items():
        machine.start(name, jobs * weight, 0.8)
    machine.join()
    found = shares(machine.spans())
    for name, weight in weights.items():
        assert found[name] == pytest.approx(weight / sum(weights.values()), abs=0.08), found
    assert not list((machine.place / "lock" / "gpuherd").glob("*.ticket"))


def test_one_who_comes_late_gets_a_turn_and_one_who_is_killed_stops_nobody(lab: Callable[..., Lab]) -> None:
    machine = lab()
    machine.start("alice", 60, 0.6)
    machine.start("bob", 60, 0.6)
    wait_until(lambda: {"alice", "bob"} <= machine.spans().keys())
    machine.start("carol", 8, 0.6)
    wait_until(lambda: "carol" in machine.spans())
    left = {UIDS["alice"], UIDS["bob"]} & machine.waiting()
    assert left == {UIDS["alice"], UIDS["bob"]}, "the others still had jobs, and let carol go first"
    machine.started["alice"].kill()
    machine.started["alice"].communicate()
    wait_until(lambda: UIDS["alice"] not in machine.waiting())
    machine.join("bob", "carol")
    spans = machine.spans()
    assert (len(spans["bob"]), len(spans["carol"])) == (60, 8)


@pytest.mark.slow
def test_a_job_on_all_gpus_is_not_starved_by_a_stream_of_small_ones(lab: Callable[..., Lab]) -> None:
    machine = lab()
    machine.start("alice", 150, 0.4)
    wait_until(lambda: "alice" in machine.spans())
    machine.start("bob", 1, 0.5, gpus=4)
    wait_until(lambda: "bob" in machine.spans())
    assert UIDS["alice"] in machine.waiting()
    machine.join()


def test_a_planted_ticket_delays_by_the_grace_at_most_once_a_gpu(lab: Callable[..., Lab]) -> None:
    """One who only pretends to wait, for ever and with ever new tickets, costs a few seconds."""
    machine = lab()
    folder = machine.place / "lock" / "gpuherd"
    folder.mkdir()
    folder.chmod(0o1777)
    code = (
        "import os, sys, time; from pathlib import Path; from gpuherd.gpus.tickets import Need, OwnTicket;"
        "from gpuherd.jobs import clock;"
        f"os.setgroups([]); os.setgid({UIDS['bob']}); os.setuid({UIDS['bob']}); own = OwnTicket()\n"
        "while True: own.keep(Path(sys.argv[1]), Need(gpus=4), clock.mono()); time.sleep(0.5)"
    )
    import sys

    liar = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    try:
        wait_until(lambda: machine.waiting() == {UIDS["bob"]})
        began = time.monotonic()
        machine.start("alice", 20, 0.1)
        machine.join("alice")
        assert time.monotonic() - began < 3 * 3.0 + 15
    finally:
        liar.kill()
        liar.wait()
