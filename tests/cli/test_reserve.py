"""``gpuherd reserve`` as users run it, and reservations in ``gpuherd gpus``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forking
from tests.patience import wait_until

from gpuherd.errors import ExitCode
from gpuherd.gpus.machine_dir import ENVIRONMENT
from gpuherd.gpus.reservation_files import ReservationFolder
from gpuherd.standin.machine import SimulatedMachine

UID = os.geteuid()
Standin = Callable[..., SimulatedMachine]
forking: Forking


@pytest.fixture(scope="module", autouse=True)
def _forking(forking_gpuherd: Forking) -> None:
    global forking
    forking = forking_gpuherd


@pytest.fixture(autouse=True)
def _shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setenv(ENVIRONMENT, str(place))


def gpuherd(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return forking.start(module="gpuherd", words=words, env={**os.environ, "COLUMNS": "120", **variables}).end()


def reserve(*words: str, **variables: str) -> Any:
    done = gpuherd("reserve", *words, "--json", **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_from_making_to_cancelling(standin: Standin) -> None:
    machine = standin("4x40GB")
    plan = reserve("--gpus", "2", "--from", "in 1h", "--for", "2d", "--dry-run")
    assert plan["labels"] == ["0", "1"]
    assert reserve("list")["reservations"] == []
    made = reserve("--gpus", "2", "--from", "in 1h", "--for", "2d", "--name", "camera\x1b[31m ready")
    assert (made["labels"], made["uuids"]) == (["0", "1"], sorted(machine.uuids[:2]))
    assert (made["state"], made["name"], made["shared"], made["uid"]) == ("to_come", "camera ready", True, UID)
    assert made["until"] - made["since"] == 172_800
    assert abs(made["since"] - time.time() - 3600) < 60
    second = gpuherd("reserve", "--gpu-list", "3", "--for", "90m")
    assert second.returncode == 0
    assert second.stderr == ""
    assert ": GPU 3 from " in second.stdout
    table = gpuherd("reserve", "list")
    lines = table.stdout.splitlines()
    assert lines[0].split() == ["Id", "User", "GPUs", "From", "Until", "State", "Name"]
    assert "in force, not used yet" in lines[1]
    assert "0,1" in lines[2]
    assert "camera ready" in lines[2]
    refused = gpuherd("reserve", "--gpus", "3", "--from", "in 2h", "--for", "1h")
    assert refused.returncode == ExitCode.BUSY
    assert "3 GPUs are not free from" in refused.stderr
    assert "has GPU 0, 1 from" in refused.stderr
    assert made["id"] in refused.stderr
    short = made["id"].partition("-")[2]
    assert gpuherd("reserve", "cancel", short).stdout == f"{made['id']} is cancelled\n"
    assert gpuherd("reserve", "cancel", short).returncode == ExitCode.USAGE
    assert len(reserve("list")["reservations"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), ExitCode.USAGE, "say how many GPUs with --gpus N, or which with --gpu-list"),
        (("--gpus", "1", "--gpu-list", "0", "--for", "1h"), ExitCode.USAGE, "say how many GPUs"),
        (("--gpus", "1"), ExitCode.USAGE, "say for how long with --for"),
        (("--gpus", "0", "--for", "1h"), ExitCode.USAGE, "above 0"),
        (("--gpus", "1", "--for", "soon"), ExitCode.USAGE, "is not a length of time"),
        (("--gpus", "1", "--from", "frday", "--for", "1h"), ExitCode.USAGE, 'write "fri 18:00"'),
        (("--gpus", "1", "--from", "2001-01-01", "--for", "1h"), ExitCode.USAGE, "is in the past"),
        (("--gpus", "9", "--for", "1h"), ExitCode.BUSY, "this machine has 4"),
        (("--gpu-list", "7", "--for", "1h"), ExitCode.USAGE, "7"),
        (("--gpus", "1", "--for", "30d"), ExitCode.USAGE, "at most 7 d 0 h are allowed"),
    ],
)
def test_what_is_refused(standin: Standin, words: tuple[str, ...], code: int, message: str) -> None:
    standin("4x40GB")
    done = gpuherd("reserve", *words)
    assert done.returncode == code
    assert message in done.stderr
    assert reserve("list")["reservations"] == []


def test_without_gpus_there_is_nothing_to_reserve() -> None:
    done = gpuherd("reserve", "--gpus", "1", "--for", "1h")
    assert done.returncode == ExitCode.BUSY
    assert "there are no GPUs to reserve" in done.stderr


def test_where_the_machine_was_not_set_up_it_is_said(standin: Standin, tmp_path: Path) -> None:
    standin("1x40GB")
    variables = {ENVIRONMENT: str(tmp_path / "own")}
    done = gpuherd("reserve", "--gpus", "1", "--for", "1h", **variables)
    assert done.returncode == 0
    assert "only your own gpuherds know of it" in done.stderr
    assert reserve("list", **variables)["shared"] is False


def test_gpus_names_the_reservation_now_and_the_next(standin: Standin) -> None:
    machine = standin("2x40GB")
    now = time.time()
    folder = ReservationFolder.made()
    current = folder.add(machine.uuids[:1], now - 60, now + 3600, "thesis")
    later = folder.add(machine.uuids[:1], now + 7200, now + 9000)
    lapsed = folder.add(machine.uuids[1:], now - 7200, now + 3600)
    os.utime(folder.path)
    table = gpuherd("gpus").stdout
    assert "reserved by you until" in table
    assert "(thesis)" in table
    assert "reserved by you from" in table
    first, second = json.loads(gpuherd("gpus", "--json").stdout)["gpus"]
    assert (first["reserved"]["id"], first["next_reserved"]["id"]) == (current.id, later.id)
    assert first["free"] is True
    # It was made just now, so that it has not lapsed yet.
    assert second["reserved"]["id"] == lapsed.id
    assert second["lapsed"] is None


@pytest.mark.skipif(UID != 0, reason="only root can become other users")
def test_a_gpu_that_another_has_reserved_is_not_free(standin: Standin) -> None:
    machine = standin("2x40GB")
    now = time.time()
    folder = ReservationFolder.made()
    made = folder.add(machine.uuids[:1], now - 60, now + 3600)
    for path in folder.path.glob(f"{made.id}.*"):
        os.chown(path, 65_534, 65_534)
        path.rename(path.with_name(path.name.replace("0-", "65534-", 1)))
    first, second = json.loads(gpuherd("gpus", "--json").stdout)["gpus"]
    assert (first["free"], second["free"]) == (False, True)
    assert first["reason"].startswith("reserved by nobody until")
    assert "reserved by nobody until" in gpuherd("gpus").stdout
    # Root may cancel it all the same.
    assert gpuherd("reserve", "cancel", f"65534-{made.id.partition('-')[2]}").returncode == 0
    assert reserve("list")["reservations"] == []


def test_a_command_in_the_foreground_keeps_the_reservation_in_use_until_it_ends(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = standin("2x40GB")
    policy = tmp_path / "policy.toml"
    policy.write_text('[reservations]\nlapse_after = "60s"\n')
    policy.chmod(0o644)
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    now = time.time()
    folder = ReservationFolder.made()
    made = folder.add(machine.uuids[1:], now - 1, now + 3600)
    command = [sys.executable, "-m", "gpuherd", "run", "--max-checks", "2", "--check-interval", "0.02", "--"]
    script = 'echo "$CUDA_VISIBLE_DEVICES"; read line'
    process = subprocess.Popen(
        [*command, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"  # the reserved one, though 0 is free too
    (marked,) = folder.read()
    assert marked.used is not None
    markers = _markers(made.id)
    assert len(markers) == 2  # the one that marks, and the one that records for the ledger
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert set(markers).isdisjoint(map(int, children))  # nothing that a shell's wait would wait for
    process.communicate("\n", timeout=30)
    wait_until(lambda: _markers(made.id) == [])


def _markers(identity: str) -> list[int]:
    """Processes of ``gpuherd run`` without a terminal and files that mark a reservation."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            here = f"{ENVIRONMENT}={os.environ[ENVIRONMENT]}".encode()
            if b"gpuherd" in words and b"run" in words and here in environment:
                found.append(int(name))
    return found
