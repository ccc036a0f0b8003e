"""Code that means harm, run for real in each of the sandbox's modes that this kernel has."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.rewards import isolation
from gpuherd.posttrain.rewards import sandbox as sandboxes
from gpuherd.posttrain.rewards.isolation import Mode
from gpuherd.posttrain.rewards.sandbox import Limits, NoProtection, Outcome, Sandbox, Work

MB = 1 << 20


def box(mode: Mode, **limits: float) -> Sandbox:
    """A sandbox of this mode; skips where the kernel has it not."""
    if (problem := _trouble(mode)) is not None:
        pytest.skip(f"{mode} does not work here: {problem}")
    return Sandbox(Limits(**{"seconds": 10.0, **limits}), mode=mode)  # type: ignore[arg-type]


@functools.cache
def _trouble(mode: Mode) -> str | None:
    try:
        Sandbox(mode=mode).run(Work("pass"))
    except GpuherdError as problem:
        return str(problem)
    return None


OTHERS = [pytest.param(each, marks=pytest.mark.slow) for each in (Mode.NAMESPACES, Mode.LANDLOCK)]


@pytest.fixture(params=[Mode.BUBBLEWRAP, *OTHERS])
def mode(request: pytest.FixtureRequest) -> Mode:
    """The one that is taken where it works, and among slow tests the others."""
    found: Mode = request.param
    return found


@pytest.fixture(params=[Mode.BUBBLEWRAP, *OTHERS[:1]])
def isolating(request: pytest.FixtureRequest) -> Mode:
    """The same of those with namespaces."""
    found: Mode = request.param
    return found


@pytest.fixture(params=[Mode.BUBBLEWRAP, Mode.NAMESPACES, Mode.LANDLOCK])
def either(request: pytest.FixtureRequest) -> Mode:
    """All, also among fast tests: what may never fail."""
    found: Mode = request.param
    return found


def tried(first: str, tries: tuple[str, ...]) -> str:
    """Code that tries each, and prints what is raised, or that nothing is."""
    said = "print(f'{type(problem).__name__}: {problem}')"
    body = f"    try: eval(each); print('done')\n    except Exception as problem: {said}\n"
    return f"{first}\nfor each in {list(tries)!r}:\n{body}"


def raised(outcome: Outcome) -> str:
    """What the code raised."""
    report = outcome.reports.get(-1)
    return "" if report is None else report[1]


def test_code_runs_and_is_told_apart_by_how_it_ends(mode: Mode) -> None:
    sandbox = box(mode)
    fine = sandbox.run(Work("print(sum(map(int, input().split())), __name__)", input="1 2 3\n"))
    assert (fine.exit_code, fine.limit, fine.stdout, fine.reports) == (0, None, "6 __main__\n", {-1: None})
    assert fine.cpu_seconds is not None
    assert fine.cpu_seconds > 0
    left = sandbox.run(Work("import sys; sys.exit(3)"))
    assert (left.exit_code, raised(left)) == (1, "SystemExit: 3")
    crashed = sandbox.run(Work("import ctypes; ctypes.string_at(0)"))
    assert crashed.exit_code == -signal.SIGSEGV
    assert -1 not in crashed.reports


def test_tests_and_calls_are_reported_each_by_itself() -> None:
    work = Work(
        "def f(x):\n    return [x, {'k': x / 2}]",
        tests=("assert f(1)[0] == 1", "assert f(1) == 3, 'not three'", "f()", "helper()"),
        calls=(("f", (4,)), ("g", ()), ("f", (1j.real,)), ("complex", (1,))),
        before="def helper():\n    raise KeyError('k')\ncomplex = complex",
    )
    reports = Sandbox().run(work).reports
    assert reports[-1] is None
    assert reports[0] is None
    assert reports[1] == ("assertion", "not three")
    assert reports[2] is not None
    assert reports[2][1].startswith("TypeError: f() missing 1 required")
    assert reports[3] == ("error", "KeyError: 'k'")
    assert reports[4] == ("value", '[4, {"k": 2.0}]')
    assert reports[5] == ("error", "KeyError: 'g'")
    assert reports[7] is not None
    assert "not JSON serializable" in reports[7][1]


def test_a_program_that_leaves_early_has_passed_nothing() -> None:
    cheats = (
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0 0 passed \"\"\\n')\n    except OSError: pass",
    )
    # One after the other in one process, each but the last caught, and the last leaves.
    code = f"for each in {[*cheats[1:], cheats[0]]!r}:\n    try: exec(each)\n    except SystemExit: pass"
    works = [
        Work(code, tests=("assert False",)),
        Work(cheats[1], tests=("assert False",)),
    ]
    for outcome in Sandbox().run_all(works):
        assert 0 not in outcome.reports


def test_no_file_of_the_user_can_be_read(either: Mode, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    tries = [str(secret), os.path.expanduser("~/.ssh/id_rsa"), "/etc/passwd", "/proc/1/environ", "/proc/self/environ"]
    code = "import sys\nfor path in sys.stdin.read().split('\\n'):\n    try:\n        print(open(path).read())\n"
    code += "    except OSError as problem:\n        print(type(problem).__name__)\n"
    code += f"import os\ntry: print(os.listdir({str(tmp_path)!r}))\nexcept OSError: print('PermissionError')\n"
    code += "print(os.listdir('/'))"
    outcome = box(either).run(Work(code, input="\n".join(tries)))
    *said, root = outcome.stdout.splitlines() if either.isolates else [*outcome.stdout.splitlines(), "[]"]
    assert set(said) <= {"PermissionError", "FileNotFoundError"}, outcome.stdout
    assert len(said) == len(tries) + 1
    assert "proc" not in root
    assert either.isolates or "PermissionError" in raised(outcome)


def test_nothing_outside_can_be_written_or_changed(either: Mode, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for path in (tmp_path, victim):
        path.chmod(0o777)
    before = victim.stat()
    tries = (
        "open(v, 'w')",
        "open(v, 'a').write('x')",
        "os.truncate(v, 0)",
        "os.unlink(v)",
        "os.rename(v, v + '2')",
        "os.chmod(v, 0)",
        "os.utime(v, (0, 0))",
        "os.setxattr(v, 'user.x', b'1')",
        "os.symlink(v, v + '3')",
        "os.link(v, v + '4')",
        "os.mkdir(v + '5')",
        "open(os.path.dirname(os.__file__) + '/planted.py', 'w')",
        "open('/etc/planted', 'w')",
        "open('/dev/shm/planted', 'w')",
    )
    code = f"import os\nv = {str(victim)!r}\n" + "".join(
        f"try:\n    {each}\n    print({each!r})\nexcept OSError: pass\n" for each in tries
    )
    outcome = box(either).run(Work(code))
    assert (outcome.exit_code, outcome.stdout) == (0, "")
    after = victim.stat()
    assert victim.read_text() == "whole"
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert [each.name for each in tmp_path.iterdir()] == ["victim"]


@pytest.mark.slow
def test_it_has_an_empty_folder_that_is_gone_afterwards(isolating: Mode) -> None:
    sandbox = box(isolating)
    code = "import os, tempfile\nprint(os.listdir('.'))\nopen('kept', 'w').write('x')\nprint(tempfile.mkstemp()[1])"
    first, second = sandbox.run(Work(code)), sandbox.run(Work(code))
    assert first.stdout.split("\n")[0] == second.stdout.split("\n")[0] == "[]"
    assert not Path(first.stdout.split("\n")[1]).exists()
    assert "PermissionError" in raised(box(Mode.LANDLOCK).run(Work("open('kept', 'w')")))


def test_a_disk_is_not_filled(isolating: Mode) -> None:
    code = (
        "import os\ntotal = 0\ntry:\n    for n in range(100):\n        with open(f'{n}', 'wb') as f:\n"
        "            for _ in range(64): f.write(bytes(1 << 20)); total += 1\n"
        "except OSError as problem:\n    print(total, problem.strerror)\n"
    )
    outcome = box(isolating, disk=8 * MB).run(Work(code))
    total, _, reason = outcome.stdout.strip().partition(" ")
    assert int(total) <= 8, outcome
    assert reason in ("No space left on device", "File too large")
    many = "n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1"
    assert "No space left" in raised(box(isolating, disk=MB).run(Work(many)))


def test_memory_is_limited(mode: Mode) -> None:
    tries = ("bytearray(1 << 30)", "os.memfd_create('x')", "[mmap.mmap(-1, 1 << 26) for _ in range(64)]")
    outcome = box(mode, memory=256 * MB).run(Work(tried("import mmap, os", tries)))
    assert outcome.stdout.splitlines() == [
        "MemoryError: ",
        "PermissionError: [Errno 1] Operation not permitted",
        "OSError: [Errno 12] Cannot allocate memory",
    ]


def test_no_memory_is_held_outside_of_the_limit(either: Mode) -> None:
    """A pipe's slot can keep a huge page whose addresses are given back: 256 slots of 2 MB each."""
    code = """
import ctypes, mmap, os
library, size, held = ctypes.CDLL(None, use_errno=True), 2 << 20, 0
read, write = os.pipe()
class Part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
for _ in range(4):
    memory = mmap.mmap(-1, 2 * size)
    memory.madvise(14)
    memory[::4096] = bytes(2 * size // 4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    part = Part(-(-start // size) * size, 1)
    held += library.vmsplice(write, ctypes.byref(part), 1, 0) > 0
moved = library.tee(read, write, 1, 0), library.splice(read, None, write, None, 1, 0)
print(held, *moved, ctypes.get_errno(), library.prctl(42, 0, 0, 0, 0), library.prctl(41, 0, 0, 0, 0))
"""
    outcome = box(either).run(Work(code))
    assert outcome.stdout == "0 -1 -1 1 1 -1\n", outcome


def _are_groups_gone() -> bool:
    isolation._remove_left()
    return not isolation._left


def test_a_control_group_counts_what_no_limit_of_addresses_does(mode: Mode) -> None:
    if isolation._base() is None:
        pytest.skip("there is no control group that we may use")
    base = isolation._base()
    # Files in memory count as the program's, and no limit of addresses sees them.
    code = "with open('x', 'wb') as f:\n    for _ in range(512): f.write(bytes(1 << 20))\nprint('written')"
    for each in (Mode.BUBBLEWRAP, Mode.NAMESPACES):
        outcome = box(each, memory=64 * MB, disk=1 << 30).run(Work(code))
        assert (outcome.exit_code, outcome.stdout) != (0, "written\n")
    assert box(mode).run(Work("print(1)")).stdout == "1\n"
    assert base is not None
    wait_until(_are_groups_gone)


def test_memory_is_counted_by_a_group_of_version_2() -> None:
    base = isolation._base()
    if base is None or not (base / "cgroup.controllers").exists():
        pytest.skip("no group of version 2 with the memory controller can be made here")
    with isolation.memory_group("test", 64 * MB) as procs:
        assert procs is not None
        limits = {each: Path(procs).with_name(each) for each in ("memory.max", "memory.oom.group")}
        assert int(limits["memory.max"].read_text()) == 64 * MB + isolation._GUARDS
        assert limits["memory.oom.group"].read_text() == "1\n"
        taking = "import sys; open(sys.argv[1], 'w').write('0'); bytearray(256 << 20); print('taken')"
        done = subprocess.run([sys.executable, "-c", taking, procs], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_two_threads_may_remove_a_group_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class RemovedByAnother:
        def rmdir(self) -> None:
            isolation._left.clear()

        def exists(self) -> bool:
            return False

    monkeypatch.setattr(isolation, "_left", {RemovedByAnother()})
    isolation._remove_left()
    assert not isolation._left


def test_a_group_of_version_2_is_joined_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the limit of memory, also where the memory controller is version 1's: another limit takes its place."""
    found = isolation.places(Path("/proc/self/cgroup"), Path("/proc/self/mountinfo"))
    places = [each for each in found if (each / "cgroup.controllers").exists() and os.access(each, os.W_OK)]
    if not places:
        pytest.skip("no group of version 2 can be made here")
    monkeypatch.setattr(isolation, "_base", lambda: places[0])
    monkeypatch.setattr(isolation, "_LIMITS", ("cgroup.max.descendants",))
    joining = "import sys; open(sys.argv[1], 'w').write('0'); print(open('/proc/self/cgroup').read()); input()"
    with isolation.memory_group("test", 1) as procs:
        assert procs is not None
        group = Path(procs).parent
        joined = subprocess.Popen(
            [sys.executable, "-c", joining, procs], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert joined.stdout is not None
        shown = iter(joined.stdout.readline, "\n")
        assert any(line.startswith("0::") and line.endswith("/gpuherd-test\n") for line in shown)
    assert group.exists() and group in isolation._left  # a process is in it
    joined.communicate("\n")
    assert box(Mode.NAMESPACES).run(Work("print(1)")).stdout == "1\n"
    wait_until(_are_groups_gone)
    assert not group.exists()


def test_control_groups_are_found_where_the_kernel_shows_them(tmp_path: Path) -> None:
    own, mounts = tmp_path / "cgroup", tmp_path / "mountinfo"
    own.write_text("0::/user.slice/user-1.slice/job.scope\n")
    mounts.write_text("35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
    slices = Path("/sys/fs/cgroup/user.slice/user-1.slice")
    assert isolation.places(own, mounts) == [slices / "job.scope", slices]
    own.write_text("4:memory:/docker/a\n1:cpu:/docker/a\n0::/\n")
    mounts.write_text(
        "40 35 0:31 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 35 0:32 /docker/a /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    )
    assert isolation.places(own, mounts) == [Path("/sys/fs/cgroup/memory")]
    assert isolation.places(tmp_path / "none", mounts) == []


def test_no_process_is_made(mode: Mode) -> None:
    tries = (
        "os.fork()",
        "subprocess.run([sys.executable, '-c', ''])",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "os.posix_spawn(sys.executable, ['x'], {})",
        "pty.fork()",
    )
    code = tried("import multiprocessing, os, pty, subprocess, sys", tries)
    outcome = box(mode).run(Work(f"{code}import ctypes\nprint(ctypes.CDLL(None).fork(), ctypes.CDLL(None).vfork())"))
    refused = "PermissionError: [Errno 1] Operation not permitted"
    said = outcome.stdout.splitlines()
    assert [each.startswith(refused) for each in said[:-2]] == [True] * (len(tries) - 1), outcome
    assert said[-2].startswith(("PermissionError", "OSError", "FileNotFoundError"))  # there is no terminal either
    assert said[-1] == "-1 -1"


@pytest.mark.slow
def test_threads_work_and_a_bomb_of_them_does_not(mode: Mode) -> None:
    fine = "import threading\nt = threading.Thread(target=print, args=('hi',)); t.start(); t.join()"
    assert box(mode).run(Work(fine)).stdout == "hi\n"
    bomb = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    outcome = box(mode, memory=256 * MB).run(Work(bomb + "\n"))
    assert "can't start new thread" in raised(outcome)


@pytest.mark.slow
def test_allowed_children_do_not_outlive_the_program(isolating: Mode) -> None:
    sandbox = box(isolating, children=2)
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        for fd in (0, 1, 2): os.close(fd)\n        time.sleep(60)\n        os._exit(0)\n    os._exit(0)\n"
        "time.sleep(0.2)\nprint('ended')"
    )
    started = time.monotonic()
    outcome = sandbox.run(Work(code))
    assert outcome.stdout == "ended\n"
    assert time.monotonic() - started < 8
    assert not _children(os.getpid())
    bomb = (
        "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        "        n += 1\nexcept OSError:\n    print(n)"
    )
    assert sandbox.run(Work(bomb)).stdout == "2\n"
    with pytest.raises(NoProtection, match="namespaces"):
        Sandbox(Limits(children=1), mode=Mode.LANDLOCK)


def test_there_is_no_network(either: Mode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        code = (
            "import socket\nfor kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n"
            "    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):\n"
            "        try:\n            socket.socket(family, kind)\n            print('made')\n"
            "        except OSError as problem:\n            print(problem.strerror)\n"
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')"
        )
        outcome = box(either).run(Work(code))
        assert set(outcome.stdout.split("\n")) == {"Operation not permitted", ""}
        assert "Operation not permitted" in raised(outcome)
        with pytest.raises(TimeoutError):
            server.accept()


def test_nobody_else_can_be_signalled_traced_or_limited(either: Mode) -> None:
    code = (
        "import os, signal, resource\n"
        f"for pid in ({os.getpid()}, os.getppid(), -1, 0):\n"
        "    try:\n        os.kill(pid, signal.SIGTERM)\n        print('killed', pid)\n"
        "    except OSError: pass\n"
        f"    try: resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1)); print('limited')\n"
        "    except OSError: pass\n"
        "import ctypes\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('traced')\n"
        "try: os.setpriority(os.PRIO_PROCESS, 0, 19); print('nice')\nexcept OSError: pass\n"
    )
    outcome = box(either).run(Work("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + code))
    # In its own namespace it may signal itself, the only process that it sees besides the guard.
    itself = {"", "killed -1", "killed 0", "killed 1"} if either.isolates else {""}
    assert set(outcome.stdout.split("\n")) <= itself
    assert outcome.exit_code == 0


def test_shared_memory_of_others_is_left_alone(either: Mode) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    shared = library.shmget(0, 4096, 0o1666)
    assert shared >= 0
    code = (
        "import ctypes\nlibrary = ctypes.CDLL(None)\n"
        f"print([library.shmctl({shared}, 0, None), library.msgctl(0, 0, None), library.semctl(0, 0, 0)])"
    )
    outcome = box(either).run(Work(code))
    assert library.shmctl(shared, 0, None) == 0, "it was taken away"
    assert outcome.stdout == "[-1, -1, -1]\n"


def test_nobody_is_signalled_by_what_becomes_readable() -> None:
    code = (
        "import fcntl, os, socket, struct\none, other = socket.socketpair()\n"
        f"pid = {os.getpid()}\n"
        "for call, what, whom in ((fcntl.fcntl, 8, pid), (fcntl.fcntl, 15, struct.pack('ii', 1, pid)),\n"
        "    (fcntl.ioctl, 0x8901, struct.pack('i', pid)), (fcntl.ioctl, 0x8902, struct.pack('i', pid))):\n"
        "    try:\n        call(one, what, whom)\n    except PermissionError:\n        print('refused')\n"
    )
    assert box(Mode.LANDLOCK).run(Work(code)).stdout == "refused\n" * 4


def test_nothing_is_inherited(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHERD_TEST_SECRET", "hunter2")
    monkeypatch.setenv("LD_PRELOAD", "")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    code = "import os, sys\nprint(sorted(os.environ))\nprint([fd for fd in range(3, 64) if _open(fd)])\n"
    code += (  # capget, of version 3
        "import ctypes, platform, struct\nnumber = 125 if platform.machine() == 'x86_64' else 90\n"
        "found = ctypes.create_string_buffer(24)\nhead = struct.pack('=Ii', 0x20080522, 0)\n"
        "assert ctypes.CDLL(None).syscall(number, head, found) == 0\nprint(*struct.unpack('=6I', found.raw))\n"
        "try: os.setuid(0)\nexcept OSError: pass\nprint(os.getuid())"
    )
    code = (
        "import os\ndef _open(fd):\n    try: os.fstat(fd)\n    except OSError: return False\n    return True\n" + code
    )
    outcome = box(mode).run(Work(code))
    os.close(read)
    os.close(write)
    names, files, rights, user = outcome.stdout.strip().split("\n")
    assert "SECRET" not in names
    assert "," not in files, "more than the pipe of reports"
    assert set(rights.split()) == {"0"}, "it has capabilities"
    assert (user != "0") == (mode.isolates or os.geteuid() != 0)


@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, *OTHERS, pytest.param(Mode.NOTHING, marks=pytest.mark.slow)])
def test_an_endless_loop_that_ignores_signals_ends_in_time(mode: Mode) -> None:
    if mode is not Mode.NOTHING:
        box(mode)
    sandbox = Sandbox(Limits(seconds=0.4), mode=mode, allow_unconfined=True)
    code = (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    started = time.monotonic()
    outcome = sandbox.run(Work(code + "import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)"))
    assert (outcome.limit, outcome.exit_code) == ("time", None)
    assert outcome.stdout == "begun\n"
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_cpu_time_is_limited_too(mode: Mode) -> None:
    outcome = box(mode, seconds=1).run(Work("while True: pass"))
    assert (outcome.limit, outcome.exit_code) == ("time", None)


def test_a_flood_of_output_ends_the_run(mode: Mode) -> None:
    outcome = box(mode, output=MB).run(Work("while True: print('x' * 1000)"))
    assert outcome.limit == "output"
    assert len(outcome.stdout) <= MB
    quiet = box(mode, output=100).run(Work("print('x' * 99)"))
    assert (quiet.limit, len(quiet.stdout)) == (None, 100)


@pytest.mark.slow
def test_large_inputs_are_read_or_left(mode: Mode) -> None:
    sandbox = box(mode)
    large = "x" * (3 * MB)
    assert sandbox.run(Work("import sys\nprint(len(sys.stdin.read()))", input=large)).stdout == f"{len(large)}\n"
    assert sandbox.run(Work("print('never read')", input=large)).stdout == "never read\n"
    assert sandbox.run(Work("print(len(open(0).read()))", input="abc")).stdout == "3\n"


@pytest.mark.slow
def test_runs_are_the_same_and_side_by_side() -> None:
    sandbox = Sandbox(Limits(seconds=20), processes=2)
    code = "print(hash('a'), {'b', 'a', 'c'}, input())"
    outcomes = sandbox.run_all([Work(code, input=str(n)) for n in range(3)])
    assert [each.stdout.split()[-1] for each in outcomes] == [str(n) for n in range(3)]
    assert len({each.stdout.rpartition(" ")[0] for each in outcomes}) == 1
    assert not _children(os.getpid())


def test_where_nothing_protects_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoProtection, match="allow_unconfined=true"):
        Sandbox(mode=Mode.NOTHING)
    allowed = Sandbox(mode=Mode.NOTHING, allow_unconfined=True)
    assert allowed.run(Work("print(1)")).stdout == "1\n"
    assert "no protection but limits" in allowed.protection.told
    found = sandboxes.available()
    assert found.mode in Mode
    assert found.told.startswith("code runs with")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
def test_where_namespaces_are_forbidden_landlock_takes_their_place() -> None:
    """As in most containers: here by a user namespace that may have none in it."""
    code = (
        "from gpuherd.posttrain.rewards.sandbox import *\nprint(available().told)\n"
        "print(Sandbox().run(Work('open(\"/etc/passwd\")')).reports)"
    )
    forbidden = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "-Ur", "sh", "-c", forbidden, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr or "cannot create" in done.stderr:
        pytest.skip(done.stderr)
    told, reports = done.stdout.strip().split("\n")
    assert told.startswith("code runs with Landlock")
    assert "namespaces: the sandbox could not be set up: namespaces: " in told
    assert "PermissionError" in reports


def test_without_bubblewrap_the_namespaces_are_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    box(Mode.NAMESPACES)
    monkeypatch.setattr(sandboxes, "bubblewrap", isolation.bubblewrap.__wrapped__)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GpuherdError, match="bwrap is not installed"):
        Sandbox(mode=Mode.BUBBLEWRAP).run(Work("print(1)"))
    found = sandboxes.available.__wrapped__()
    assert found.mode is Mode.NAMESPACES and found.told.endswith("(bubblewrap: bwrap is not installed)")


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"seconds": 0}, {"memory": 1}, {"disk": 1}, {"open_files": 3}, {"output": 0}, {"children": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong)) if "seconds" not in wrong else "timeout"):
            Limits(**wrong)


@pytest.mark.slow
def test_what_was_started_ends_with_whoever_started_it(mode: Mode) -> None:
    """A training that is killed hard leaves no program behind."""
    box(mode)
    asleep = "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ntime.sleep(60)"
    own = (
        "from gpuherd.posttrain.rewards.sandbox import *\n"
        f"print('started', flush=True)\nSandbox(Limits(seconds=60), mode=Mode('{mode}')).run(Work({asleep!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", own], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while len(started := _descendants(process.pid)) < (3 if mode.isolates else 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)  # the program itself runs by now
        process.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, "something was left behind"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="there is no interpreter that everybody can run")
def test_a_user_without_rights_is_protected_like_root(tmp_path: Path) -> None:
    import gpuherd

    subprocess.run(["cp", "-r", str(Path(gpuherd.__file__).parent), str(tmp_path)], check=True)
    for path in (tmp_path, *tmp_path.parents):
        if path != Path("/tmp") and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path)], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from gpuherd.posttrain.rewards.sandbox import *\n"
        "for mode in (Mode.BUBBLEWRAP, Mode.NAMESPACES, Mode.LANDLOCK):\n"
        "    found = Sandbox(mode=mode).run(Work('import os\\nprint(os.getuid())\\nos.fork()'))\n"
        "    print(mode, found.stdout.strip(), found.reports)\n"
    )
    old = subprocess.run(["/usr/bin/python3", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"])
    if old.returncode:
        pytest.skip("the system's interpreter is too old")
    command = ["/usr/bin/python3", "-B", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, user=65534, group=65534, extra_groups=[])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("65534") == 3
    assert done.stdout.count("PermissionError") == 3


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        text = "".join(each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(each) for each in text.split() if _sandboxed(int(each))]
    return []


def _sandboxed(pid: int) -> bool:
    with suppress(OSError):
        return b"status_to" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in _tasks(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            for each in (task / "children").read_text().split():
                found += [int(each), *_descendants(int(each))]
    return found


def _tasks(pid: int) -> Iterator[Path]:
    yield from Path(f"/proc/{pid}/task").glob("*")
