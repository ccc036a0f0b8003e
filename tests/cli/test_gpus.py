"""``gpuherd gpus`` as users run it: a process of its own, its output, its exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forking

from gpuherd.errors import ExitCode
from gpuherd.gpus.leases import LeaseFolder, LeaseNote
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.gpu.health import Health, to_json
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.standin.machine import SimulatedMachine as Simulated

Standin = Callable[..., Simulated]
# The command's own module under the shared parser: other commands have tests of their own.
RUN = "from gpuherd.cli.main import main; main()"


forking: Forking


@pytest.fixture(scope="module", autouse=True)
def _forking(forking_gpuherd: Forking) -> None:
    """Commands that end by themselves are forks of one process."""
    global forking
    forking = forking_gpuherd


def gpus(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", **variables}
    return forking.start(module="gpuherd", words=("gpus", *words), env=environment).end()


def table(*words: str, **variables: str) -> str:
    done = gpus(*words, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def as_json(*words: str, **variables: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(table("--json", *words, **variables))
    return told


def flat(text: str) -> str:
    """The cells of the last column in one line, whatever the width."""
    return " ".join(text.split())


def test_free_busy_and_lost_gpus_with_the_reason(standin: Standin) -> None:
    machine = standin("4x40GB")
    machine.occupy(1, 1234)
    machine.occupy(2, 300, pid=os.getpid())
    machine.lose(3)
    text = table(COLUMNS="200")
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].isdigit()}
    assert rows["0"].rstrip().endswith("free")
    assert "busy: 1234 MB used (threshold 500)" in rows["1"]
    assert re.search(rf"busy: \S+ runs \S+ \(pid {os.getpid()}, 300 MB\)", rows["2"])
    assert "unusable: it has fallen off the bus" in rows["3"]
    assert "N/A" in rows["3"]
    assert "someone: a process (pid" in text
    assert text.count(f"pid {os.getpid()}") == 1, "what is told as the reason is not told again"


def test_the_table_is_whole_in_eighty_columns(standin: Standin) -> None:
    machine = standin("8x40GB")
    machine.occupy(7, 20_000)
    machine.set_name(7, "NVIDIA A100-SXM4-40GB with a long name for a product")
    # Long words, so that a cut at the right edge would show.
    note = LeaseNote(job="0123456789" * 6)
    with LeaseFolder.default().acquire(machine.uuids[7], note) or pytest.fail("free"):
        text = table()
    assert "0123456789" * 6 in "".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for part in ("20000/40960", "20000 MB used", "(threshold 500)", "A100-SXM4", "240 W", "55 W", "61 C", "90 %"):
        assert part in flat(text)


def test_gpus_that_ones_queues_leave_out_are_told(standin: Standin, tmp_path: Path) -> None:
    machine = standin("3x40GB")
    own, run = RunDirectory(tmp_path / "own"), RunDirectory(tmp_path / "results")
    variables = {"GPUHERD_QUEUE": str(own.root), "COLUMNS": "200"}
    assert "left out" not in table(**variables)
    now = time.time()
    fault = Health(faults=1, until=now + 540, reason="GPU fault (Xid 79)")
    crashes = Health(until=now + 100, reason="3 different jobs in a row crashed on it (exit code 1)")
    for place, states in ((own, {0: fault, 2: Health(until=now - 1, reason="over")}), (run, {0: crashes})):
        place.create()
        with closing(Queue(place.queue)) as queue:
            queue.save_gpu_health({machine.uuids[number]: to_json(health) for number, health in states.items()})
    text = flat(table(**variables))
    assert f"left out for 9 min more: GPU fault (Xid 79) ({own.root})" in text
    assert text.count("left out") == 1
    both = flat(table("--run", str(run.root), **variables))
    assert f"left out for 2 min more: 3 different jobs in a row crashed on it (exit code 1) ({run.root})" in both
    first, second, third = as_json("--run", str(run.root), **variables)["gpus"]
    assert first["left_out"] == [
        {"queue": str(own.root), "until": now + 540, "reason": "GPU fault (Xid 79)"},
        {"queue": str(run.root), "until": now + 100, "reason": crashes.reason},
    ]
    assert second["left_out"] == third["left_out"] == []
    assert first["free"] is True  # it is, for others
    own.queue.write_bytes(b"no queue at all, but a file of some length" * 100)
    assert "damaged" in flat(table(**variables))
    wrong = gpus("--run", str(tmp_path), **variables)
    assert (wrong.returncode, wrong.stdout) == (ExitCode.USAGE, "")


def test_the_threshold_is_the_users(standin: Standin) -> None:
    standin("1x40GB").set_ghost_memory(0, 700)
    assert "threshold 500" in flat(table())
    for flag in ("--gpu-mem-threshold", "--gpu_mem_threshold", "--gpu_memory_threshold"):
        assert "free" in table(flag, "701")


def test_what_gpuherd_holds_is_told_with_its_holder(standin: Standin) -> None:
    machine = standin("2x40GB")
    with LeaseFolder.default().acquire(machine.uuids[1], LeaseNote(job="org/model")) or pytest.fail("free"):
        text = flat(table(COLUMNS="200"))
        assert re.search(rf"held by gpuherd: \S+ \(pid {os.getpid()}\) for \d+ s, job org/model", text)
        first, second = as_json()["gpus"]
    assert (first["free"], first["reason"], first["lease"]) == (True, "", None)
    assert (second["free"], second["reason"]) == (False, "taken by gpuherd")
    assert second["lease"].keys() == {"pid", "user", "since", "job"}
    assert second["lease"]["pid"] == os.getpid()


def test_an_unused_lease_limits_and_memory_errors_are_told(standin: Standin, tmp_path: Path) -> None:
    machine = standin("3x40GB")
    machine.set_ecc_errors(1, 4)
    config = Path(os.environ["XDG_CONFIG_HOME"]) / "gpuherd" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[limits]\nmax_gpus = 2\n")
    policy = tmp_path / "policy.toml"
    policy.write_text("exclude_gpus = [2]\n")
    policy.chmod(0o644)
    with LeaseFolder.default().acquire(machine.uuids[0], LeaseNote("train")) or pytest.fail("free"):
        text = flat(table(COLUMNS="200", GPUHERD_POLICY=str(policy)))
        told = as_json(GPUHERD_POLICY=str(policy))
    assert "job train, and nobody uses it now" in text
    assert "free 4 uncorrectable memory errors" in text
    assert "kept from gpuherd by this machine's policy" in text
    assert "Your runs: at most 2 GPUs by your own settings; they hold 1 now." in text
    assert told["limits"] == {
        "max_gpus": 2,
        "held": 1,
        "reason": "at most 2 GPUs by your own settings",
        "changes_at": None,
        "warnings": [],
    }
    assert [gpu["excluded"] for gpu in told["gpus"]] == [False, False, True]
    assert [gpu["free"] for gpu in told["gpus"]] == [False, True, False]
    assert told["gpus"][1]["uncorrected_errors"] == 4


def test_a_wrong_settings_file_is_a_remark_not_an_end(standin: Standin) -> None:
    standin("1x40GB")
    config = Path(os.environ["XDG_CONFIG_HOME"]) / "gpuherd" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[limits]\nmax_gpu = 2\n")
    assert "did you mean max_gpus?" in flat(table())
    standin("1x40GB").fail(9)
    assert "did you mean max_gpus?" in flat(table()), "also where there are no GPUs"


def test_an_unsafe_lease_folder_is_a_remark_not_an_end(standin: Standin, tmp_path: Path) -> None:
    standin("1x40GB")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    bad = str(tmp_path / "open")
    assert "What gpuherd holds is not known" in table(GPUHERD_LEASE_DIR=bad)
    assert "chmod +t" in as_json(GPUHERD_LEASE_DIR=bad)["lease_problem"]


def test_mig_instances_stand_under_their_gpu(standin: Standin) -> None:
    standin("2x40GB").split_mig(0, [20_000, 10_000])
    lines = table(COLUMNS="120").splitlines()
    labels = [line[:5].strip() for line in lines[1:]]
    assert labels == ["0", "0:0", "0:1", "1"]
    assert "split into MIG instances" in lines[1]
    assert lines[2].split()[:3] == ["0:0", "MIG", "20000MB"]
    assert [gpu["label"] for gpu in as_json()["gpus"]] == labels


def test_json_has_every_field_of_a_gpu(standin: Standin) -> None:
    machine = standin("2x40GB")
    machine.link(0, 1, 4)
    machine.occupy(0, 2000, pid=os.getpid())
    told = as_json()
    assert told.keys() == {
        *("time", "driver_version", "cuda_version", "problem", "lease_problem", "memory_threshold_mb", "limits"),
        *("waiting", "gpus"),
    }
    first = told["gpus"][0]
    assert first.keys() == {field.name for field in fields(Gpu)} | {
        "label",
        "visible",
        "excluded",
        "left_out",
        "lease",
        *("reserved", "next_reserved", "lapsed"),
        "idle",
        "free",
        "reason",
    }
    assert first["processes"][0].keys() == {"pid", "user", "command", "memory_mb", "compute"}
    assert first["peers"] == [{"uuid": machine.uuids[1], "nvlinks": 4, "proximity": "one_switch"}]
    assert first["compute_capability"] == [8, 0]
    documented = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in documented for key in (*told, *first))


def test_hidden_gpus_are_shown_and_told(standin: Standin) -> None:
    standin("3x40GB")
    assert "CUDA_VISIBLE_DEVICES='1' hides from jobs started here: GPU 0, 2" in table(CUDA_VISIBLE_DEVICES="1")
    assert [gpu["visible"] for gpu in as_json(CUDA_VISIBLE_DEVICES="1")["gpus"]] == [False, True, False]
    assert "hides" not in table()


def test_without_gpus_it_is_one_sentence_and_no_error(standin: Standin) -> None:
    standin("1x40GB").fail(9)  # NVML_ERROR_DRIVER_NOT_LOADED
    assert flat(table()) == (
        "No GPUs: the NVIDIA driver is installed but not loaded; try: sudo modprobe nvidia. Jobs run on the CPU."
    )
    assert as_json()["gpus"] == []


@pytest.mark.parametrize("words", [["--watch", "0"], ["--watch", "x"], ["--gpu-mem-threshold", "-1"], ["--jsn"]])
def test_wrong_options_are_usage_errors(words: list[str]) -> None:
    assert gpus(*words).returncode == 2


def test_json_again_and_again_is_one_line_each_until_ctrl_c(standin: Standin) -> None:
    machine = standin("1x40GB")
    command = [sys.executable, "-c", RUN, "gpus", "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["gpus"][0]["used_mb"] == 0
        machine.occupy(0, 3000)
        seen = [json.loads(child.stdout.readline())["gpus"][0]["used_mb"] for _ in range(3)]
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    assert seen[-1] == 3000
    assert (child.returncode, errors) == (0, "")


def test_watching_on_a_terminal_renews_the_table_and_ctrl_c_ends_it_cleanly(standin: Standin) -> None:
    machine = standin("2x40GB")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, "gpus", "--watch", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    read_until(ours, "free")
    machine.occupy(1, 7777)
    read_until(ours, "7777 MB used")
    child.send_signal(signal.SIGINT)
    rest = drain(ours)
    assert child.wait(20) == 0
    assert "Traceback" not in rest
    # A terminal writes ^C where the cursor is: a full last line would make it wrap and spoil the picture.
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", rest).rstrip().endswith("every 0.1 s; Ctrl-C ends it")
    os.close(ours)


def read_until(terminal: int, words: str) -> None:
    seen = ""
    deadline = time.monotonic() + 20
    while words not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65_536).decode()


def drain(terminal: int) -> str:
    """What comes until the other end is closed."""
    seen = ""
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:
            return seen
        if not part:
            return seen
        seen += part.decode()


def test_a_reader_that_goes_away_is_no_error(standin: Standin) -> None:
    standin("8x40GB")
    command = [sys.executable, "-c", RUN, "gpus", "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(20) == 0
        assert child.stderr.read() == ""


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80])
def test_the_state_has_a_column_in_any_window(standin: Standin, width: int) -> None:
    machine = standin("2x40GB")
    machine.occupy(1, 30_000)
    lines = table(COLUMNS=str(width)).splitlines()
    head = lines[0].rstrip()
    assert head.startswith("GPU ") and head.endswith("State and users") and len(head) <= width
    at = head.index("State")
    assert lines[1][at:].strip() == "free"
    assert lines[2][at:].startswith("busy: ")
    assert all(len(line.rstrip()) <= width for line in lines)


def test_a_gpu_that_is_held_and_not_used_is_named_with_its_user(standin: Standin, tmp_path: Path) -> None:
    machine = standin("2x40GB")
    machine.occupy(0, 30_720, pid=os.getpid())
    machine.set_utilisation(0, 0)
    machine.occupy(1, 2_000, pid=os.getpid())
    (tmp_path / "config" / "gpuherd").mkdir(parents=True)
    (tmp_path / "config" / "gpuherd" / "config.toml").write_text("[idle]\nafter = '300ms'\n")
    assert as_json()["gpus"][0]["idle"] is None, "one look can't know for how long"
    command = [sys.executable, "-c", RUN, "gpus", "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            idle, busy = (found["idle"] for found in json.loads(line)["gpus"])
            assert busy is None
            if idle is not None:
                break
        child.send_signal(signal.SIGINT)
    assert idle["idle_s"] >= 0.3
    assert 0 <= time.time() - idle["since"] < 60
    (holder,) = idle["holders"]
    assert (holder["pid"], holder["memory_mb"], idle["used_mb"]) == (os.getpid(), 30_720, 30_720)
    assert "holds 30 GB (pid" in idle["sentence"]


def test_the_table_names_idle_gpus(standin: Standin, tmp_path: Path) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 30_720, pid=os.getpid())
    machine.set_utilisation(0, 0)
    (tmp_path / "config" / "gpuherd").mkdir(parents=True)
    (tmp_path / "config" / "gpuherd" / "config.toml").write_text("[idle]\nafter = '200ms'\n")
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, "gpus", "--watch", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
        start_new_session=True,
    )
    os.close(theirs)
    read_until(ours, "idle for")
    child.send_signal(signal.SIGINT)
    assert "holds 30 GB (pid" in drain(ours)
    assert child.wait(20) == 0
    os.close(ours)
