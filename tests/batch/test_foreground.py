"""``gpuherd run`` as users meet it: waits, takes GPUs, and is the command from then on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.batch.options import RunOptions
from gpuherd.batch.run import NoGpuFree, Waiter
from gpuherd.errors import ExitCode
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs.gpu.watch import watch_for_plan
from gpuherd.jobs.options import GpuOptions
from gpuherd.standin.machine import SimulatedMachine

FAST = ("--max-checks", "2", "--check-interval", "0.02")
COMMAND = (sys.executable, "-m", "gpuherd", "run")


def run(*words: str, fast: bool = True, **how: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *(FAST if fast else ()), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **how)  # type: ignore[call-overload,no-any-return]


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *FAST, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def held(machine: SimulatedMachine) -> list[str]:
    folder = LeaseFolder.existing()
    return [] if folder is None else [uuid for uuid in machine.uuids if folder.holder(uuid) is not None]


def test_it_becomes_the_command(standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("4x40GB")
    script = 'echo "$1 $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $$"; exit 7'
    process = start("--num-gpus", "2", "--", "sh", "-c", script, "name", "two words")
    out, told = process.communicate(timeout=30)
    assert process.returncode == 7
    assert out == f"two words 0,1 PCI_BUS_ID {process.pid}\n"  # the very process: signals reach the command itself
    assert "on GPU 0, 1" in told
    assert held(machine) == []


def test_the_gpus_are_held_until_the_last_process_has_ended(
    standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    machine = standin("2x40GB")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start("--name", "mine", "--", "sh", "-c", f"(cat {fifo}) & echo ready; exit 0")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.wait(timeout=30) == 0
    folder = LeaseFolder.default()
    holder = folder.holder(machine.uuids[0])
    assert holder is not None
    assert holder.job == "mine"
    assert held(machine) == [machine.uuids[0]]
    fifo.write_text("")
    wait_until(lambda: not held(machine))
    process.communicate()


def test_signals_are_the_commands_own(standin: Callable[..., SimulatedMachine]) -> None:
    standin("1x40GB")
    process = start("--", "sh", "-c", 'trap "echo caught; exit 3" TERM; echo ready; while :; do sleep 0.02; done')
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "caught\n"
    assert process.returncode == 3
    # Python ignores SIGPIPE; a command that found it so would write on into a pipe that nobody reads.
    process = start("--", "sh", "-c", "while :; do echo line || exit 9; done")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == -signal.SIGPIPE
    assert process.stderr is not None
    process.stderr.close()


def test_nothing_of_ours_leaks_into_the_command(standin: Callable[..., SimulatedMachine]) -> None:
    standin("2x40GB")
    names = {name for name in os.environ if name.startswith("GPUHERD_")}
    program = (
        "import json, os\n"
        "from contextlib import suppress\n"
        "files = []\n"
        "for descriptor in range(3, 200):\n"
        "    with suppress(OSError):\n"
        "        files.append(os.readlink(f'/proc/self/fd/{descriptor}'))\n"
        "print(json.dumps([[name for name in os.environ if name.startswith('GPUHERD_')], files]))"
    )
    read_end, write_end = os.pipe()
    bare = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, pass_fds=[read_end])
    ran = run("--num-gpus", "2", "--", sys.executable, "-c", program, pass_fds=[read_end])
    os.close(read_end)
    os.close(write_end)
    (environment, files), (_, expected) = json.loads(ran.stdout), json.loads(bare.stdout)
    assert set(environment) == names
    assert len([file for file in files if "leases" in file]) == 2
    assert [file for file in files if "leases" not in file] == expected


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--", "no-such-program"], 127, "no-such-program: there is no such program"),
        (["--", "./absent/program"], 127, "there is no such program"),
        (["--", "/etc/passwd"], 126, "is no program"),
        (["--num-gpus", "3", "--", "true"], ExitCode.USAGE, "asks for 3 GPUs; there are 2"),
        (["--mem", "50GB", "--", "true"], ExitCode.USAGE, "51200 MB"),
        (["--gpu-list", "7", "--", "true"], ExitCode.USAGE, "7"),
        (["--wait", "1s", "--no-wait", "--", "true"], ExitCode.USAGE, "not both"),
        (["--json", "--", "true"], ExitCode.USAGE, "--json goes with --dry-run"),
        (["--num-gpu", "1", "--", "true"], ExitCode.USAGE, "--num-gpus"),
        (["--mem", "lots", "--", "true"], ExitCode.USAGE, "is not a size"),
        ([], ExitCode.USAGE, "no command"),
    ],
)
def test_what_is_refused_at_once(
    standin: Callable[..., SimulatedMachine], words: list[str], code: int, told: str
) -> None:
    machine = standin("2x40GB")
    ran = run(*words)
    assert ran.returncode == code, ran.stderr
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr
    assert held(machine) == []


def test_a_program_that_the_kernel_refuses(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    machine = standin("1x40GB")
    program = tmp_path / "program"
    program.write_text("no program at all")
    program.chmod(0o755)
    ran = run("--", str(program))
    assert ran.returncode == 126
    assert "Exec format error" in ran.stderr
    assert held(machine) == []


def test_the_wait_can_have_an_end(standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("2x40GB")
    machine.set_ghost_memory(0, 30_000)
    machine.set_ghost_memory(1, 30_000)
    ran = run("--wait", "200ms", "--", "true")
    assert ran.returncode == ExitCode.BUSY
    assert "waiting for 1 GPU: GPU 0" in ran.stderr
    assert "did not become free in 0.2 s" in ran.stderr
    ran = run("--no-wait", "--", "true")
    assert ran.returncode == ExitCode.BUSY
    assert "can't be had at once" in ran.stderr
    machine.set_ghost_memory(1, 0)
    assert run("--no-wait", "--quiet", "--", "true").returncode == 0
    ran = run("--no-wait", "--num-gpus", "2", "--", "true")
    assert ran.returncode == ExitCode.BUSY


def test_it_starts_when_a_gpu_becomes_free(standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("1x40GB")
    machine.set_ghost_memory(0, 30_000)
    process = start("--", "sh", "-c", "echo began")
    time.sleep(0.5)
    assert process.poll() is None
    machine.set_ghost_memory(0, 0)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "began\n")


def test_without_gpus_and_for_none(standin: Callable[..., SimulatedMachine]) -> None:
    ran = run("--", "sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"')
    assert (ran.returncode, ran.stdout) == (0, "[]\n")
    assert "runs on the CPU" in ran.stderr
    assert run("--num-gpus", "2", "--", "true").returncode == ExitCode.USAGE
    standin("1x40GB")
    ran = run("--num-gpus", "0", "--", "sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"')
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")


def test_a_dry_run_starts_nothing(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    machine = standin("2x40GB")
    ran = run("--dry-run", "--", "touch", str(tmp_path / "file"))
    assert ran.stdout == "would run on GPU 0 after 2 checks, 0.02 s apart\n"
    machine.set_ghost_memory(0, 30_000)
    told = json.loads(run("--dry-run", "--json", "--num-gpus", "2", "--", "a b", fast=False).stdout)
    assert told["exit_code"] == 127  # no such program, whoever asks
    told = json.loads(run("--dry-run", "--json", "--num-gpus", "2", "--", "true").stdout)
    assert told["gpus"] == []
    assert "30000 MB" in told["waits_for"]
    assert not (tmp_path / "file").exists()
    assert held(machine) == []


def test_many_at_once_never_have_the_same_gpu(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    standin("3x40GB")
    log = tmp_path / "log"
    script = f'echo "start $CUDA_VISIBLE_DEVICES" >>{log}; sleep 0.1; echo "end $CUDA_VISIBLE_DEVICES" >>{log}'
    processes = [start("--num-gpus", str(1 + number % 2), "--quiet", "--", "sh", "-c", script) for number in range(8)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    busy: set[str] = set()
    starts = 0
    for line in log.read_text().splitlines():
        kind, gpus = line.split()
        taken = set(gpus.split(","))
        if kind == "start":
            starts += 1
            assert not busy & taken
            busy |= taken
        else:
            busy -= taken
    assert starts == 8


def test_ctrl_c_while_it_waits_leaves_nothing(standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("1x40GB")
    machine.set_ghost_memory(0, 30_000)
    process = start("--", "true")
    assert process.stderr is not None
    assert "waiting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert held(machine) == []


def test_the_users_own_limit_holds_across_several(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    machine = standin("2x40GB")
    config = Path(os.environ["XDG_CONFIG_HOME"], "gpuherd", "config.toml")
    config.parent.mkdir(parents=True)
    config.write_text("[limits]\nmax_gpus = 1\n[defaults]\ngpu_list = [1]\n")
    refused = run("--num-gpus", "2", "--", "true")
    assert refused.returncode == ExitCode.USAGE
    assert "you may hold 1" in refused.stderr
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    first = start("--", "sh", "-c", f"echo $CUDA_VISIBLE_DEVICES; cat {fifo}")
    assert first.stdout is not None
    assert first.stdout.readline() == "1\n"  # the settings' default for --gpu-list
    assert held(machine) == [machine.uuids[1]]
    second = run("--gpu-list", "0", "--wait", "300ms", "--", "true")
    assert second.returncode == ExitCode.BUSY
    assert "at most 1 GPU by your own settings" in second.stderr
    fifo.write_text("")
    first.communicate(timeout=30)
    assert run("--gpu-list", "0", "--wait", "20s", "--", "true").returncode == 0
    config.write_text('[limits]\nquiet_hours = ["Mon-Sun"]\nquiet_max_gpus = 0\n')
    quiet = run("--no-wait", "--", "true")
    assert quiet.returncode == ExitCode.BUSY
    assert "can't be had at once: at most 0 GPUs in your quiet hours (Mon-Sun)" in quiet.stderr
    config.write_text("[limits]\nmax_gpu = 1\n")
    wrong = run("--", "true")
    assert wrong.returncode == ExitCode.USAGE
    assert "did you mean max_gpus?" in wrong.stderr


def test_a_driver_that_is_late_is_waited_for_and_not_passed_over(
    standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuherd.jobs.gpu.watch.DRIVER_PAUSE_S", 0.05)
    machine = standin("1x40GB")
    machine.fail(9)
    told: list[str] = []
    options = RunOptions(max_checks=1, check_interval=0.02)
    assert "not loaded" in str(Waiter(options, told.append).look()[1])
    with pytest.raises(NoGpuFree, match="not loaded"):
        Waiter(replace(options, no_wait=True), told.append).take()
    back = threading.Timer(0.3, machine.fail, [None])
    back.start()
    taken = Waiter(options, told.append).take()
    back.join()
    assert [gpu.uuid for gpu in taken.gpus] == list(machine.uuids)
    assert any("waiting for 1 GPU" in line and "not loaded" in line for line in told)
    for lease in taken.leases:
        lease.close()


def test_a_plan_that_depends_on_the_gpus_waits_for_a_late_driver(
    standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpuherd.jobs.gpu.watch.DRIVER_PAUSE_S", 0.05)
    machine = standin("2x40GB")
    machine.fail(999)
    back = threading.Timer(1.0, machine.fail, [None])
    back.start()
    assert len(watch_for_plan(GpuOptions()).gpus) == 2
    back.join()
    assert "waiting for the NVIDIA driver" in caplog.text
