"""The program that confines itself and then runs code that a model wrote: ``sandbox`` starts it, no module imports it.

It knows the standard library alone, since it is started by its path (``python -I -S confine.py SPEC``), and Linux. Its
one argument is the specification as JSON. How the program ended is reported through a pipe, as one line of JSON.

    bubblewrap  ``bwrap`` has made namespaces and a root folder as those below, and runs this program as the first
                process in them, still with the rights to mount the folder to work in and, for root, to become nobody.
    namespaces  its own users, mounts, processes, network and System V objects. It sees the interpreter, the system's
                libraries and an empty folder in memory, and nothing else. Two processes guard it: the outer one, and
                the first of the new process namespace, with whose end the kernel ends all others in it.
    landlock    where the kernel does not let everybody have namespaces: rules for files (none can be written), and a
                filter of system calls that also keeps it from sockets, signals and other process groups.
    nothing     limits alone.

In all of them: limits of time, memory, open files and core dumps, no privileges to be gained, an environment of its
own.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x10000000 | 0x20000000 | 0x40000000
_NEW_USERS = 0x10000000
_PRIVATE, _BIND, _RECURSIVE, _DETACH = 1 << 18, 4096, 16384, 2
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_READ_ONLY_ATTRIBUTES = struct.pack("=QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
_AT_RECURSIVE, _AT_HERE = 0x8000, -100
_PDEATHSIG, _NO_NEW_PRIVS, _SECCOMP, _FILTER, _NO_HUGE_PAGES = 1, 38, 22, 2, 41
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_NOBODY = 65534
_ANSWER_ENDED = 3  # of ``exchange_tests``
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_WORK = "/sandbox"
_COVERED = ("/mnt", "/media", "/srv", "/opt", "/tmp")  # noqa: S108 - one of these is covered by the new root


def main(spec: dict[str, Any]) -> None:
    """Runs the program of the specification and reports how it ended."""
    os.set_inheritable(spec["status_to"], False)  # the code must not tell for us how it ended
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if spec["mode"] == "bubblewrap":
        _in_bubblewrap(spec)
    if os.getppid() != spec["parent"]:  # it ended before we could be tied to it
        sys.exit(1)
    if spec["group"]:
        with suppress(OSError):  # a group that only looked as if it might be used
            Path(spec["group"]).write_text("0")
    try:
        if spec["mode"] == "namespaces":
            _in_namespaces(spec)
        else:
            _in_group(spec)
    except Exception as problem:  # whatever it is, somebody waits to be told
        _report(spec, {"problem": _message(problem)})
        sys.exit(1)


def _in_namespaces(spec: dict[str, Any]) -> None:
    _enter_namespaces()
    if os.fork():
        os.wait()
        return
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _as_first_process(spec, _own_root)


def _in_bubblewrap(spec: dict[str, Any]) -> NoReturn:
    def prepare(spec: dict[str, Any]) -> None:
        _mount_work(_WORK, spec["limits"])

    _as_first_process(spec, prepare)


def _as_first_process(spec: dict[str, Any], prepare: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Runs the program as the first process of a process namespace, after its files were prepared."""
    try:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # the first process is deaf to signals by default
        signal.alarm(spec["limits"]["seconds"] + 5)
        prepare(spec)
        _run(spec)
    except Exception as problem:
        _report(spec, {"problem": _message(problem)})
    finally:
        os._exit(0)  # and with it all that is left in here


def _in_group(spec: dict[str, Any]) -> None:
    """In a process group that all its processes stay in, and that is killed in the end."""
    try:
        _run(spec)
    finally:
        os.killpg(0, signal.SIGKILL)


def _run(spec: dict[str, Any]) -> None:
    """Runs the program in a process of its own, waits for it, and reports how it ended.

    Where an answer is tested, the program runs the tests, and a second process runs the answer. The report is of the
    one that ended first: the tests' exit code shows when that was the answer.
    """
    guard, answer = os.getpid(), None
    program, kept = spec["program"], []
    if spec["answer"]:
        ours, theirs = socket.socketpair()
        answer = os.fork()
        if not answer:
            ours.close()
            os.close(spec["reports_to"])
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # its input would tell it the tests
            _become(spec, guard, [*spec["answer"], str(theirs.fileno())], theirs.fileno())
        theirs.close()
        program, kept = [*program, str(ours.fileno())], [ours.fileno()]
    child = os.fork()
    if not child:
        _become(spec, guard, program, *kept)
    if answer:
        ours.close()
    status, seconds = _waited(child)
    if answer:
        if status != _ANSWER_ENDED and answer not in _ended:
            os.kill(answer, signal.SIGKILL)
        of_answer, more = _waited(answer)
        status, seconds = of_answer if status == _ANSWER_ENDED else status, seconds + more
    _report(spec, {"status": status, "cpu_seconds": seconds})


_ended: dict[int, tuple[int, float]] = {}  # processes that were waited for: exit code and CPU time


def _waited(process: int) -> tuple[int, float]:
    """Waits for a process, and reaps others that end meanwhile. Returns its exit code and CPU time."""
    while process not in _ended:
        ended, status, usage = os.wait4(-1, 0)
        _ended[ended] = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    return _ended[process]


def _become(spec: dict[str, Any], guard: int, program: list[str], *inherited: int) -> NoReturn:
    """Gives up all that is not needed, and becomes the program, which ends with its guard."""
    try:
        for each in inherited:
            os.set_inheritable(each, True)
        _prctl(_NO_NEW_PRIVS, 1)
        _prctl(_NO_HUGE_PAGES, 1)  # of which a pipe's slot could keep a whole one, outside of the limit of memory
        if spec["mode"] in ("bubblewrap", "namespaces"):
            tasks = spec["limits"]["tasks"]
            if os.geteuid() != 0:  # a user stays who he is, and both guards count too
                tasks += 2
                _drop_capabilities()
            else:
                os.setgroups([])
                os.setresgid(_NOBODY, _NOBODY, _NOBODY)
                os.setresuid(_NOBODY, _NOBODY, _NOBODY)
                if spec["mode"] == "bubblewrap":  # in which root's processes are not counted by themselves
                    _called(_LIBC.unshare(_NEW_USERS), "a namespace of users")
            os.chdir(_WORK)
            # Counted in this namespace; outside of one it would count all that the user runs.
            resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
        else:
            os.chdir(spec["folder"])
            if os.geteuid() == 0:
                _drop_capabilities()
        _prctl(_PDEATHSIG, signal.SIGKILL)  # after the change of users, which undoes it
        if os.getppid() != guard:
            os._exit(127)
        _limit(spec["limits"])
        if spec["mode"] == "landlock":
            _restrict_files(spec["readable"])
        if spec["filter"]:
            _filter(bytes.fromhex(spec["filter"]))
        os.execve(program[0], program, spec["environment"])  # noqa: S606
    except Exception as problem:
        _report(spec, {"problem": _message(problem)})
    os._exit(127)


# ---- namespaces ------------------------------------------------------------------------------------------------------


def _enter_namespaces() -> None:
    """New namespaces, in which this user is who he is; for root nobody exists too, for the code to run as."""
    user, group, root = os.geteuid(), os.getegid(), os.geteuid() == 0
    if not root:
        _called(_LIBC.unshare(_NEW_NAMESPACES), "namespaces")
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")
        return
    # Two users can only be mapped from outside: by a child that was made before, and stays there.
    ready, entered = os.pipe()
    outside = os.getpid()
    mapping = os.fork()
    if not mapping:
        os.close(entered)
        failed = 1
        with suppress(OSError):
            if os.read(ready, 1):
                for name in ("gid_map", "uid_map"):
                    Path(f"/proc/{outside}/{name}").write_text(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n", encoding="utf-8")
                failed = 0
        os._exit(failed)
    os.close(ready)
    _called(_LIBC.unshare(_NEW_NAMESPACES), "namespaces")
    os.write(entered, b"1")
    os.close(entered)
    if os.waitpid(mapping, 0)[1]:
        raise OSError(1, "users can't be mapped into a namespace")


def _own_root(spec: dict[str, Any]) -> None:
    """A root folder in memory that has the readable paths, a few devices and an empty folder to work in."""
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    base = next((each for each in _COVERED if Path(each).is_dir() and _free(each, spec)), None)
    if base is None:
        raise FileNotFoundError(2, f"there is no folder that a new root could cover: none of {', '.join(_COVERED)}")
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in map(Path, (*spec["readable"], *_DEVICES)):
        place = Path(base + str(path))
        if path.is_symlink():  # /lib, which leads to /usr/lib
            place.symlink_to(path.readlink())
        elif path.exists():
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            _mount(str(path), str(place), None, _BIND | _RECURSIVE)
    Path(base + _WORK).mkdir()
    Path(base + "/tmp").symlink_to(_WORK)  # noqa: S108
    attributes = ctypes.create_string_buffer(_READ_ONLY_ATTRIBUTES, len(_READ_ONLY_ATTRIBUTES))
    _called(
        _system_call(_MOUNT_SETATTR, _AT_HERE, base.encode(), _AT_RECURSIVE, attributes, len(_READ_ONLY_ATTRIBUTES)),
        "read-only mounts",
    )
    _mount_work(base + _WORK, spec["limits"])
    os.chdir(base)
    _called(_system_call(_PIVOT_ROOT[os.uname().machine], b".", b"."), "a root of its own")
    _called(_LIBC.umount2(b".", _DETACH), "leaving the old root")
    os.chdir("/")


def _mount_work(place: str, limits: dict[str, int]) -> None:
    """The folder to work in: empty, in memory."""
    room = f"size={limits['disk']},nr_inodes={limits['inodes']},mode=1777"
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV | _NOEXEC, room)


def _free(folder: str, spec: dict[str, Any]) -> bool:
    """True where no readable path lies in a folder that will be covered."""
    return not any(path == folder or path.startswith(folder + "/") for path in spec["readable"])


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if each is None else each.encode() for each in (source, target, kind, data)]
    done = _LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _called(done, f"mounting {target}")


# ---- landlock --------------------------------------------------------------------------------------------------------


def _restrict_files(readable: Sequence[str]) -> None:
    """From here on these paths can be read and run, and nothing can be written."""
    version = _system_call(_LANDLOCK_CREATE, None, 0, 1)
    if version < 3:  # before that truncation was not seen to
        raise OSError(38, f"Landlock of version 3 is needed, and here is {max(0, version)}")
    execute, write, look, list_folder, cut, control = 1, 2, 4, 8, 1 << 14, 1 << 15
    handled = (1 << 15) - 1 | (control if version >= 5 else 0)
    attributes = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _system_call(_LANDLOCK_CREATE, attributes, size, 0)
    _called(rules, "Landlock")
    for path in (*readable, *_DEVICES):
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if path in _DEVICES:
            allowed = look | (write | cut if path == "/dev/null" else 0)
        else:
            allowed = execute | look | (list_folder if Path(path).is_dir() else 0)
        rule = struct.pack("=Qi", allowed, place)
        _called(_system_call(_LANDLOCK_ADD, rules, 1, rule, 0), f"a rule for {path}")
        os.close(place)
    _called(_system_call(_LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


# ---- all of them -----------------------------------------------------------------------------------------------------


def _limit(limits: dict[str, int]) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        # The kernel warns at the first limit of CPU time and kills at the last.
        last = most + 1 if what == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else most
        resource.setrlimit(what, (most, last))


def _filter(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    _prctl(_SECCOMP, _FILTER, ctypes.create_string_buffer(whole, len(whole)))


def _drop_capabilities() -> None:
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _called(_system_call(_CAPSET[os.uname().machine], header, none), "dropping capabilities")


def _prctl(option: int, *arguments: Any) -> None:
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    filled = [*given, *(ctypes.c_ulong(0) for _ in range(4 - len(given)))]
    _called(_LIBC.prctl(option, *filled), f"prctl {option}")


def _system_call(number: int, *arguments: Any) -> int:
    """A system call that the C library has no function for; below 0 where it failed."""
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_LIBC.syscall(ctypes.c_long(number), *given))


def _called(result: int, purpose: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{purpose}: {os.strerror(error)}")


def _message(problem: Exception) -> str:
    """A problem in words, with its file."""
    if not isinstance(problem, OSError):
        return f"{type(problem).__name__}: {problem}"
    return f"{problem.strerror or problem}{f' ({problem.filename})' if problem.filename else ''}"


def _report(spec: dict[str, Any], said: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(spec["status_to"], json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
