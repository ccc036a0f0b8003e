"""``gpuherd session`` as users meet it: real processes, real terminals, simulated GPUs."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.patience import wait_until
from tests.processes import born

from gpuherd.batch import sessions
from gpuherd.batch.options import SessionOptions
from gpuherd.batch.sessions import SessionRecord
from gpuherd.cli.main import build_parser
from gpuherd.cli.main import run as gpuherd
from gpuherd.engines.process_tree import SESSION_VARIABLE, boot_id, identify
from gpuherd.errors import CannotWrite, ExitCode, UsageError
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs import clock
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.ledger import Kind, Ledger, Use
from gpuherd.options import build
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
WORDS = (sys.executable, "-m", "gpuherd", "session", "--max-checks", "1", "--check-interval", "0.02")
SOON = ("--idle-after", "1s", "--warn", "500ms", "--grace", "3s")


def start(*words: str, **how: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [*WORDS, *words], **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    )


def held(machine: SimulatedMachine) -> bool:
    folder = LeaseFolder.existing()
    return folder is not None and folder.holder(machine.uuids[0]) is not None


def records() -> tuple[SessionRecord, ...]:
    return sessions.read(sessions.folder())


def watcher_of(pid: int) -> int:
    wait_until(lambda: any(record.pid == pid for record in records()))
    return next(record.watcher for record in records() if record.pid == pid)


@pytest.fixture
def machine(standin: Standin) -> SimulatedMachine:
    """One GPU that nobody uses."""
    made = standin("1x40GB")
    made.set_utilisation(0, 0)
    return made


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Watchers end with their sessions."""
    yield
    with suppress(CannotWrite):
        for record in records():
            for pid in {record.pid, record.watcher} - {os.getpid()}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_it_becomes_the_command_and_its_watcher_ends_with_it(machine: SimulatedMachine) -> None:
    script = 'read line; echo "$line $1 $CUDA_VISIBLE_DEVICES $$"; exit 7'
    process = start("--name", "mine", "--", "sh", "-c", script, "name", "two words", stdin=subprocess.PIPE)
    watcher = watcher_of(process.pid)
    holder = LeaseFolder.default().holder(machine.uuids[0])
    assert holder is not None and (holder.job, holder.pid) == ("mine", process.pid)
    out, told = process.communicate("hello\n", timeout=60)
    assert (process.returncode, out) == (7, f"hello two words 0 {process.pid}\n")
    assert f"session {process.pid}: gives the GPUs back after 1 h 0 min without use" in told
    wait_until(lambda: born(watcher) is None)
    assert not held(machine)
    assert list(sessions.folder().iterdir()) == []


def test_the_command_has_no_other_children_and_the_watcher_no_pipe_of_its(machine: SimulatedMachine) -> None:
    """A shell that waits for its children must not wait for ours, nor a reader for the end of its output."""
    process = start("--", "sh", "-c", "wait; cat /proc/$$/task/$$/children; exec >&- 2>&-; read line", stdin=-1)
    assert process.stdout is not None and process.stderr is not None
    children = process.stdout.read().split()  # to its end, while the session goes on
    assert len([pid for pid in children if pid.isdigit()]) <= 1, "cat itself"
    watcher = watcher_of(process.pid)
    links = {os.readlink(f"/proc/{watcher}/fd/{number}") for number in range(3)}
    assert links == {"/dev/null"}
    assert os.getsid(watcher) != os.getsid(process.pid)
    assert not any("leases" in os.readlink(path) for path in Path(f"/proc/{watcher}/fd").iterdir() if path.exists())
    process.communicate("x\n", timeout=60)


def test_an_unused_session_is_ended_with_all_that_it_has_started(machine: SimulatedMachine, tmp_path: Path) -> None:
    pids, log = tmp_path / "pids", tmp_path / "log"
    write = f"open({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10))"
    child = f"import os, time; os.setsid(); {write}; time.sleep(600)"
    script = f"trap 'echo asked' TERM; {sys.executable} -c \"{child}\" & while :; do sleep 0.1; done"
    with log.open("a") as output:
        process = start(*SOON, "--", "sh", "-c", script, stdout=output, stderr=output)
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        machine.occupy(0, 3000, pid=process.pid)
        assert process.wait(60) == -signal.SIGKILL, "it went on after SIGTERM"
    wait_until(lambda: born(int(pids.read_text())) is None)
    wait_until(lambda: not held(machine))
    told = log.read_text()
    assert told.count("asked") == 1
    warning, end = (line for line in told.splitlines() if line.startswith(f"gpuherd: session {process.pid} (session)"))
    assert "is ended in" in warning
    assert f"to keep it: use the GPU, or gpuherd session extend {process.pid} 1h" in warning
    assert "is ended, and gives GPU 0 back: it has not used GPU 0 for" in end


def test_a_file_that_the_command_writes_over_gets_no_lines_of_ours(machine: SimulatedMachine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        process = start(*SOON, "--quiet", "--", "sleep", "600", stdout=output, stderr=output)
        assert process.wait(60) == -signal.SIGTERM
    assert log.read_text() == ""


@pytest.mark.slow
def test_a_session_whose_gpu_is_used_goes_on(machine: SimulatedMachine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("a") as output:
        process = start(*SOON, "--", "sleep", "600", stdout=output, stderr=output)
        watcher_of(process.pid)
        machine.set_utilisation(0, 40)
        time.sleep(2.5)
        assert process.poll() is None
        assert "is ended" not in log.read_text()
        machine.set_utilisation(0, 0)
        wait_until(lambda: "is ended in" in log.read_text(), every_s=0.02)
        machine.set_utilisation(0, 40)
        wait_until(lambda: f"session {process.pid} (session) goes on" in log.read_text())
        machine.set_utilisation(0, 0)
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.slow
def test_its_time_is_up_though_it_is_used(machine: SimulatedMachine, tmp_path: Path) -> None:
    machine.set_utilisation(0, 90)
    log = tmp_path / "log"
    with log.open("a") as output:
        process = start("--for", "1500ms", "--warn", "500ms", "--", "sleep", "600", stdout=output, stderr=output)
        assert process.wait(60) == -signal.SIGTERM
    assert "its time of 2 s is up; to keep it: gpuherd session extend" in log.read_text()


def test_it_is_listed_and_kept_on_request(machine: SimulatedMachine, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(*SOON[:2], "--warn", "900ms", "--name", "work", "--", "sleep", "600")
    watcher_of(process.pid)
    assert gpuherd(["session", "extend", str(process.pid), "1h"]) == 0
    assert f"session {process.pid} (sleep 600) is kept for 1 h 0 min" in capsys.readouterr().out
    time.sleep(2.5)
    assert process.poll() is None
    assert gpuherd(["session", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["sessions"]
    assert (listed["pid"], listed["name"], listed["gpus"], listed["is_watched"]) == (process.pid, "work", ["0"], True)
    assert listed["command"] == "sleep 600"
    assert gpuherd(["session", "list"]) == 0
    words = capsys.readouterr().out
    assert f"{process.pid}" in words
    # A later request for less is none.
    assert gpuherd(["session", "extend"]) == 0
    time.sleep(1.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)


def test_a_killed_watcher_leaves_the_lease_with_the_command(
    machine: SimulatedMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(*SOON, "--", "sleep", "600")
    watcher = watcher_of(process.pid)
    os.kill(watcher, signal.SIGKILL)
    wait_until(lambda: born(watcher) is None)
    time.sleep(1.5)
    assert process.poll() is None
    assert held(machine)
    assert gpuherd(["session", "list"]) == 0
    assert "never: its watcher was killed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="its watcher was killed"):
        gpuherd(["session", "extend", str(process.pid)])
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not held(machine))
    assert records() == ()


def test_what_holds_the_gpu_after_the_command_is_watched_on(machine: SimulatedMachine, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    process = start(*SOON, "--", "sh", "-c", f"sleep 600 & echo $! > {pid}; exit 0")
    assert process.wait(60) == 0
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    wait_until(lambda: born(int(pid.read_text())) is None)
    wait_until(lambda: not held(machine))
    process.communicate(timeout=60)


def test_the_ledger_knows_it_as_a_session(machine: SimulatedMachine) -> None:
    process = start(*SOON, "--name", "mine", "--project", "p", "--", "sleep", "600")
    process.communicate(timeout=60)

    def ended() -> list[Use]:
        ledger = Ledger.existing()
        return [] if ledger is None else [record.use for record in ledger.read() if not record.is_open]

    wait_until(lambda: bool(ended()))
    (use,) = ended()
    assert (use.kind, use.job, use.project, use.command, use.pid) == (Kind.SESSION, "mine", "p", "sleep", process.pid)
    assert 0 < use.held_s < 60


@pytest.mark.slow
def test_what_is_put_into_a_queue_from_a_session_outlives_it(machine: SimulatedMachine, tmp_path: Path) -> None:
    gpuherd_up = shlex.join([sys.executable, "-m", "gpuherd", "up", "--max-checks", "1"])
    environment = {**os.environ, "GPUHERD_QUEUE": str(tmp_path / "queue")}
    machine.set_utilisation(0, 50)
    process = start(*SOON, "--", "sh", "-c", f"{gpuherd_up} && exec sleep 600", env=environment)
    assert process.stdout is not None
    assert "pid" in process.stdout.readline()
    machine.set_utilisation(0, 0)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    pid = DispatcherLock.holder(RunDirectory(tmp_path / "queue").lock)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: born(pid) is None)


def test_notices_go_where_the_settings_say(machine: SimulatedMachine, tmp_path: Path) -> None:
    notices, script = tmp_path / "notices", tmp_path / "note.py"
    script.write_text(f"import sys; open({str(notices)!r}, 'a').write(sys.stdin.read() + '\\n')")
    process = start(*SOON, "--notify-command", f"{sys.executable} {script}", "--", "sleep", "600")
    watcher = watcher_of(process.pid)
    process.communicate(timeout=60)
    wait_until(lambda: born(watcher) is None)
    warned, ended = (json.loads(line) for line in notices.read_text().splitlines())
    assert {warned["kind"], ended["kind"]} == {"session"}
    assert f"gpuherd: session {process.pid} (session) is ended in" in warned["text"]
    assert "gives GPU 0 back" in ended["text"]


@pytest.mark.slow
def test_a_script_that_goes_on_after_the_session_is_not_ended_with_it(
    machine: SimulatedMachine, tmp_path: Path
) -> None:
    """It has the same process group, and is not of the session."""
    words = " ".join([*WORDS, *SOON])
    stubborn = "trap '' TERM HUP; while :; do sleep 0.1; done"
    script = f'sleep 600 & first=$!; {words} -- sh -c "{stubborn}"; echo went on $?; kill $first'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "went on 137" in done.stdout


# --- terminals -------------------------------------------------------------------------------------------------------


@contextmanager
def on_terminal(*words: str) -> Iterator[tuple[int, int]]:
    """The session with a terminal of its own, as a login shell would have; yields our end of it, and its pid."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*WORDS, *words])
    try:
        yield terminal, pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(terminal)


def read_until(terminal: int, word: str, within_s: float = 60.0) -> str:
    said, deadline = "", time.monotonic() + within_s
    while word not in said:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], said
        said += os.read(terminal, 4096).decode("utf-8", "replace")
    return said


def test_a_shell_on_a_terminal_is_warned_there_and_ended(machine: SimulatedMachine) -> None:
    with on_terminal(*SOON, "--", "bash", "--norc", "-i") as (terminal, pid):
        said = read_until(terminal, f"gpuherd: session {pid} (session) is ended, and gives GPU 0 back")
        assert f"gpuherd: session {pid} (session) is ended in" in said
        # Interactive shells ignore SIGTERM; it need not wait for SIGKILL.
        began = time.monotonic()
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGHUP
        assert time.monotonic() - began < 3.0
    wait_until(lambda: not held(machine))


@pytest.mark.slow
def test_what_is_typed_keeps_the_session(machine: SimulatedMachine) -> None:
    """The kernel notes reads of a terminal every 8 seconds at most."""
    words = ("--idle-after", "12s", "--warn", "1s", "--grace", "3s")
    with on_terminal(*words, "--", "bash", "--norc", "-i") as (terminal, pid):
        watcher_of(pid)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            os.write(terminal, b"true\n")
            time.sleep(0.5)
            with suppress(BlockingIOError):
                assert "is ended" not in os.read(terminal, 65536).decode("utf-8", "replace")
        assert born(pid) is not None


def test_ctrl_c_and_ctrl_z_are_the_commands_own_and_the_watcher_goes_on(machine: SimulatedMachine) -> None:
    # No shell: one that is about to start a program when Ctrl-Z comes is not seen to be stopped.
    program = (
        "import signal as s, time; s.signal(2, lambda *_: print('caught', flush=True)); print('ready', flush=True)"
    )
    loop = "for _ in range(900): time.sleep(1)"
    command = shlex.join([*WORDS, "--idle-after", "4s", "--warn", "1s", "--grace", "1s", "--", sys.executable, "-c"])
    inner = f"{command} {shlex.quote(f'{program}{chr(10)}{loop}')}"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "--norc", "-i"])
    try:
        os.write(terminal, inner.encode() + b"\n")
        read_until(terminal, "\nready")
        os.write(terminal, b"\x03")
        read_until(terminal, "caught")
        os.write(terminal, b"\x1a")
        read_until(terminal, "Stopped")
        (record,) = records()
        assert Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        # A stopped session keeps nobody from the GPU for longer than one that runs.
        read_until(terminal, "is ended, and gives GPU 0 back")
        wait_until(lambda: born(record.pid) is None)
        os.write(terminal, b"echo shell goes on\n")
        read_until(terminal, "Terminated")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


# --- files -----------------------------------------------------------------------------------------------------------


def own_record(**more: object) -> SessionRecord:
    process = identify(os.getpid())
    assert process is not None
    values: dict[str, object] = {
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "boot": boot_id(),
        "watcher": process.pid,
        "watcher_ticks": process.start_ticks,
        "name": "session",
        "command": "python",
        "gpus": ("0",),
        "since": 1.0,
        "idle_after_s": 3600.0,
    }
    return SessionRecord(**values | more)  # type: ignore[arg-type]


def test_records_come_back_and_those_of_the_dead_are_removed() -> None:
    place = sessions.folder()
    sessions.write(place, own_record())
    dead = own_record(pid=2**22 + 1, watcher=2**22 + 1)
    sessions.write(place, dead)
    sessions.keep(place, dead, 10.0)
    assert sessions.read(place) == (own_record(),)
    sessions.remove_dead(place)
    assert [path.name for path in place.iterdir()] == [f"{os.getpid()}.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps({"boot": boot_id(), "pid": os.getpid()}),
        json.dumps({"boot": "another", "pid": os.getpid()}),
    ],
    ids=["empty", "list", "cut off", "deep", "too little", "another boot"],
)
def test_files_that_are_no_records_are_passed_over(text: str) -> None:
    place = sessions.folder()
    (place / f"{os.getpid()}.json").write_text(text)
    (place / f"{os.getpid()}.keep").write_text(text)
    assert sessions.read(place) == ()
    assert sessions.kept_until(place, os.getpid(), 0.0) == 0.0


@pytest.mark.parametrize("wrong", [{"since": float("nan")}, {"idle_s": 1e30}, {"start_ticks": -4}, {"gpus": 3}])
def test_absurd_figures_are_no_record(wrong: dict[str, object]) -> None:
    place = sessions.folder()
    sessions.write(place, own_record())
    path = place / f"{os.getpid()}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    assert sessions.read(place) == ()


def test_control_characters_of_a_record_never_reach_a_terminal() -> None:
    place = sessions.folder()
    sessions.write(place, own_record(name="a\x1b[31mb", command="c\nd"))
    (record,) = sessions.read(place)
    assert (record.name, record.command) == ("ab", "c d")


def test_links_pipes_and_large_files_hold_nobody_up(tmp_path: Path) -> None:
    place = sessions.folder()
    (place / "1.json").symlink_to("/etc/passwd")
    os.mkfifo(place / "2.json")
    (place / "3.json").mkdir()
    with (place / "4.json").open("wb") as file:
        file.truncate(1 << 30)
    assert sessions.read(place) == ()
    sessions.remove_dead(place)
    assert [path.name for path in place.iterdir()] == ["3.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_record_or_a_folder_of_somebody_else_is_not_believed() -> None:
    place = sessions.folder()
    sessions.write(place, own_record())
    sessions.keep(place, own_record(), clock.mono() + 99.0)
    assert sessions.kept_until(place, os.getpid(), clock.mono()) > clock.mono()
    for path in place.iterdir():
        os.chown(path, 65_534, 65_534)
    assert sessions.read(place) == ()
    assert sessions.kept_until(place, os.getpid(), clock.mono()) == 0.0
    os.chown(place, 65_534, 65_534)
    with pytest.raises(CannotWrite, match="not your own folder"):
        sessions.folder()


def test_a_session_is_watched_though_its_list_can_not_be_kept(machine: SimulatedMachine) -> None:
    place = sessions.folder()
    place.chmod(0o777)
    process = start(*SOON, "--", "sleep", "600")
    assert process.communicate(timeout=60) and process.returncode == -signal.SIGTERM


def test_which_session_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = own_record(), own_record(pid=77, start_ticks=5)
    assert sessions.chosen((one,), None) is one
    assert sessions.chosen((one, other), 77) is other
    with pytest.raises(UsageError, match="say which session, by its pid"):
        sessions.chosen((one, other), None)
    monkeypatch.setenv(SESSION_VARIABLE, "77.5")
    assert sessions.chosen((one, other), None) is other
    with pytest.raises(UsageError, match="no session with pid 4"):
        sessions.chosen((one,), 4)
    with pytest.raises(UsageError, match="none"):
        sessions.chosen((), None)


# --- options ---------------------------------------------------------------------------------------------------------


def parsed(*words: str) -> SessionOptions:
    args = build_parser(["session"]).parse_args(["session", *words, "--", "bash"])
    return build(SessionOptions, args)


def test_options() -> None:
    assert (parsed().idle_after_s, parsed().warn_s, parsed().num_gpus) == (3600.0, 600.0, 1)
    assert parsed("--idle-after", "8m").warn_s == 120.0
    options = parsed("--num-gpus", "2", "--mem", "20GB", "--for", "8h", "--name", "mine", "--gpu-list", "0,1")
    run = options.run_options
    assert (run.gpus, run.mem, run.name, run.gpu_list) == (2, 20_480, "mine", ("0,1",))
    assert (options.longest, parsed().run_options.name) == (28_800.0, "session")
    assert parsed("--for", "8m").warn_s == 120.0
    for words in (("--idle-after", "5m"), ("--for", "5m")):
        with pytest.raises(UsageError, match="--warn must be shorter"):
            parsed(*words, "--warn", "5m")


@pytest.mark.parametrize("words", [("--idle-after", "0"), ("--num-gpus", "0"), ("--idle", "5m")])
def test_wrong_options(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parsed(*words)
    assert end.value.code == ExitCode.USAGE
    assert words[0] in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_refused_before_any_wait(standin: Standin) -> None:
    standin("1x40GB,busy=1")
    done = subprocess.run([*WORDS, "--", "no-such-program"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert "there is no such program" in done.stderr


def test_without_gpus_it_is_a_plain_command() -> None:
    done = subprocess.run([*WORDS, "--", "echo", "hi"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "hi\n")
    assert "the session is not watched" in done.stderr
    assert records() == ()
