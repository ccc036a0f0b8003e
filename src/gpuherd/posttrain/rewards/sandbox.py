"""Runs code that a model wrote, in a process of its own that can do no harm: ``confine`` shuts it in, under bubblewrap
where that is installed and works.

It has no network, no access to files but the interpreter's and the system's libraries, an empty folder in memory, and
limits of time, memory, disk, output and processes. Whatever it leaves behind is killed with it. Which protection the
kernel gives here is found out once, by trying; where it gives none, nothing is run unless that is asked for.

What it does not protect from: bugs of the kernel, and side channels between processes of one machine.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.rewards.isolation import (
    Mode,
    Protection,
    bubblewrap,
    filter_for,
    interpreter,
    memory_group,
    readable,
)

_MOST_PROCESSES = 8
_STARTING_SECONDS = 30.0  # a busy machine's, before the code itself runs; not counted among its own
_CHUNK = 1 << 16
_HARNESS = Path(__file__).with_name("harness.py")
_EXCHANGE, _TESTS = (Path(__file__).with_name(f"exchange{each}.py") for each in ("", "_tests"))
_SHARED = f"{__name__.rpartition('.')[0]}.exchange"  # by which name the tests' program imports it
_CONFINE = Path(__file__).with_name("confine.py")
# By what a run was ended, in words.
LIMITS = {"time": "out of time", "output": "too much output", "killed": "killed from outside"}


class NoProtection(GpuherdError):
    """No way to confine code written by a model works on this machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a run.

    Attributes:
        seconds: on the clock; CPU time has the same limit, rounded up.
        memory: bytes of address space, of all its processes together.
        disk: bytes in its folder, which is in memory too.
        open_files: at once in a process.
        output: bytes of both outputs together; more ends the run.
        children: processes that it may have in addition to the first one; threads are limited by memory, with
            namespaces also to 64.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    disk: int = 16 << 20
    open_files: int = 64
    output: int = 1 << 20
    children: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise UsageError(f"timeout={self.seconds}; seconds above 0, and 3600 at most")
        at_least(self, memory=32 << 20, disk=4096, open_files=16, output=1, children=0)


@dataclass(frozen=True, slots=True)
class Work:
    """A program to run.

    Attributes:
        code: Python source.
        input: what it reads from its standard input.
        tests: Python sources that are run one after the other, and ``calls`` as (name of a function, arguments): what
            these return is reported as JSON. Both run in a process separate from that of the code, whose module
            is then called ``answer`` and not ``__main__``.
        before: source that is run before the code, and before the tests.
        given: the beginning of the code that is not its author's; the tests have what it defines from there.
        entry: the function that ``given`` leaves to be written.
    """

    code: str
    input: str = ""
    tests: tuple[str, ...] = ()
    calls: tuple[tuple[str, tuple[object, ...]], ...] = ()
    before: str = ""
    given: str = ""
    entry: str = ""

    @property
    def tested(self) -> bool:
        """Whether there are tests or calls, which a second process runs."""
        return bool(self.tests or self.calls)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        exit_code: of the process; negative for a signal; None where it was killed for a limit of ours.
        limit: which one: ``time`` or ``output``; ``killed`` where something else ended it from outside (the machine's
            want of memory); None where it ended by itself.
        stdout, stderr: as far as they were read; bytes that are no UTF-8 replaced.
        reports: by place (-1 the code itself, then tests, then calls) what was reported: None for a success without a
            value, ``("value", JSON)``, or (kind, message) of what was raised. What did not end is missing.
        cpu_seconds: of the process; None where it was killed.
    """

    exit_code: int | None
    limit: str | None
    stdout: str
    stderr: str
    reports: dict[int, tuple[str, str] | None] = field(default_factory=dict)
    cpu_seconds: float | None = None


class Sandbox:
    """Runs code, several at once.

    Attributes:
        limits: of each run.
        protection: what keeps code in.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        processes: int | None = None,
        allow_unconfined: bool = False,
        mode: Mode | None = None,
    ):
        """Finds out what protection there is.

        Args:
            processes: so many runs side by side; None: one a core, eight at most.
            allow_unconfined: run code also where there is no protection.
            mode: this one and no other; None: the strongest that works.

        Raises NoProtection.
        """
        self.limits = limits or Limits()
        self._processes = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        self.protection = available() if mode is None else Protection(mode, filter_for(mode) is not None)
        if self.protection.mode is Mode.NOTHING and not allow_unconfined:
            raise NoProtection(
                f"code of strangers is not run: {'; '.join(self.protection.why) or 'no protection was asked for'}; a "
                "kernel with user namespaces or Landlock protects from it, and so may bubblewrap, once installed; "
                "allow_unconfined=true runs it without"
            )
        if self.protection.mode is Mode.LANDLOCK and self.limits.children:
            raise NoProtection("children are only allowed with namespaces, where none of them can stay behind")

    def run(self, work: Work) -> Outcome:
        """Runs one. Raises GpuherdError where it could not be started."""
        return run_once(work, self.limits, self.protection.mode)

    def run_all(self, works: Sequence[Work]) -> list[Outcome]:
        """Runs all, some side by side; in their order."""
        if len(works) < 2 or self._processes == 1:
            return [self.run(each) for each in works]
        with ThreadPoolExecutor(self._processes) as pool:
            return list(pool.map(self.run, works))


@functools.cache
def available() -> Protection:
    """The strongest protection that works here, tried once a process."""
    why: list[str] = []
    for mode in (Mode.BUBBLEWRAP, Mode.NAMESPACES, Mode.LANDLOCK):
        filtered = filter_for(mode) is not None
        if mode is Mode.LANDLOCK and not filtered:
            why.append(f"landlock: no filter of system calls is known for {os.uname().machine}")
            continue
        try:
            tried = run_once(Work("print(6 * 7)"), Limits(seconds=20), mode)
        except GpuherdError as problem:
            why.append(f"{mode}: {problem}")
            continue
        if tried.stdout == "42\n" and tried.exit_code == 0:
            return Protection(mode, filtered, tuple(why))
        why.append(f"{mode}: {tried.stderr.strip() or tried.limit or tried.exit_code}")
    return Protection(Mode.NOTHING, filter_for(Mode.NOTHING) is not None, tuple(why))


# ---- one run ---------------------------------------------------------------------------------------------------------


def run_once(work: Work, limits: Limits, mode: Mode) -> Outcome:
    """Runs something. Raises NoProtection elsewhere than on Linux, GpuherdError where the mode does not work here."""
    if sys.platform != "linux":
        raise NoProtection("code of strangers is run on Linux only")
    try:
        return _run(work, limits, mode)
    except OSError as problem:  # the machine's fault and not the code's: no process, no file, no memory is left
        raise GpuherdError(f"the sandbox could not be started: {problem}") from None


def _run(work: Work, limits: Limits, mode: Mode) -> Outcome:
    nonce = secrets.token_hex(16)
    # The other modes have a folder in memory, or none.
    room = tempfile.TemporaryDirectory() if mode is Mode.NOTHING else nullcontext("/")
    with room as folder, memory_group(nonce, limits.memory * (1 + work.tested)) as group:
        status_from, status_to = os.pipe()
        reports_from, reports_to = os.pipe()
        try:
            spec = {**_spec(work, limits, mode, status_to, reports_to, folder), "group": group}
            process = subprocess.Popen(
                _command(spec, mode),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(status_to, reports_to),
                start_new_session=True,
                env={},
                cwd="/",
                bufsize=0,
            )
        finally:
            os.close(status_to)
            os.close(reports_to)
        try:
            return _watched(process, status_from, reports_from, _given(work, nonce), nonce, limits)
        finally:
            _killed(process)
            os.close(status_from)
            os.close(reports_from)


def _watched(
    process: subprocess.Popen[bytes], status_from: int, reports_from: int, given: bytes, nonce: str, limits: Limits
) -> Outcome:
    """Feeds and reads a run until it ends or is over a limit of ours."""
    stdin, stdout, stderr = (_pipe(each) for each in (process.stdin, process.stdout, process.stderr))
    read = {stdout: bytearray(), stderr: bytearray(), status_from: bytearray(), reports_from: bytearray()}
    limit, left, deadline = None, memoryview(given), time.monotonic() + _STARTING_SECONDS + limits.seconds
    started = False
    os.set_blocking(stdin, False)
    with selectors.DefaultSelector() as ready:
        for each in read:
            ready.register(each, selectors.EVENT_READ)
        ready.register(stdin, selectors.EVENT_WRITE)
        while ready.get_map() and limit is None:
            for key, _ in ready.select(max(0.0, deadline - time.monotonic())):
                if key.fd == stdin:
                    left = _fed(stdin, left)
                elif chunk := os.read(key.fd, _CHUNK):
                    read[key.fd] += chunk
                else:
                    ready.unregister(key.fd)
            if stdin in ready.get_map() and (not left or status_from not in ready.get_map()):
                ready.unregister(stdin)  # all is given, or nobody is there to read it
                _pipe_closed(process.stdin)
            if not started and read[reports_from].startswith(nonce.encode()):
                started, deadline = True, time.monotonic() + limits.seconds  # the harness's first word: now it runs
            if sum(map(len, (read[stdout], read[stderr], read[reports_from]))) > limits.output + len(given):
                limit = "output"
            elif time.monotonic() >= deadline:
                limit = "time"
    status_report = _line(read[status_from])
    # Before the code ran, which could say so too.
    if not started and not status_report and read[stderr].startswith(b"bwrap: "):
        raise GpuherdError(bytes(read[stderr]).decode(errors="replace").strip())
    if isinstance(status_report.get("problem"), str):
        raise GpuherdError(f"the sandbox could not be set up: {status_report['problem']}")
    status, seconds = status_report.get("status"), status_report.get("cpu_seconds")
    if limit is None and not isinstance(status, int):
        limit = "killed"
    if status in (-signal.SIGXCPU, -signal.SIGKILL) and isinstance(seconds, float) and seconds >= limits.seconds:
        limit = "time"
    return Outcome(
        exit_code=status if isinstance(status, int) and limit is None else None,
        limit=limit,
        stdout=read[stdout][: limits.output].decode(errors="replace"),
        stderr=read[stderr][: limits.output].decode(errors="replace"),
        reports=_reports(bytes(read[reports_from]), nonce),
        cpu_seconds=seconds if isinstance(seconds, float) else None,
    )


def _command(spec: dict[str, object], mode: Mode) -> list[str]:
    """The command that starts ``confine``: by its path, or as text where bubblewrap has hidden its file."""
    python = [interpreter(), "-I", "-S"]
    if mode is not Mode.BUBBLEWRAP:
        return [*python, str(_CONFINE), json.dumps(spec)]
    wrapped = [*bubblewrap(), "--", *python, "-c", _CONFINE.read_text(encoding="utf-8"), json.dumps(spec)]
    if spec["group"] is None:
        return wrapped
    return ["/bin/sh", "-c", '{ echo 0 > "$0"; } 2>/dev/null; exec "$@"', str(spec["group"]), *wrapped]


def _spec(work: Work, limits: Limits, mode: Mode, status_to: int, reports_to: int, folder: str) -> dict[str, object]:
    """The specification that ``confine`` reads from its argument."""
    program = filter_for(mode, limits.children > 0)
    os_limits = {
        "seconds": math.ceil(limits.seconds + _STARTING_SECONDS),
        "cpu_seconds": math.ceil(limits.seconds) + 1,  # the interpreter's start is among them
        "memory": limits.memory // (1 + limits.children),
        "disk": limits.disk,
        "inodes": 1 + limits.disk // 4096,
        "open_files": limits.open_files,
        "tasks": 64 if limits.children == 0 else 1 + work.tested + limits.children,
    }
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/sandbox" if mode.isolates else folder,
        "TMPDIR": "/sandbox" if mode.isolates else folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    python = [interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c"]
    harness = [*python, _tests_program() if work.tested else _HARNESS.read_text(encoding="utf-8")]
    return {
        "mode": mode.value,
        "parent": os.getpid(),
        "status_to": status_to,
        "reports_to": reports_to,
        "folder": folder,
        "readable": readable(),
        "limits": os_limits,
        "filter": "" if program is None else program.hex(),
        # A socket's number is put behind where there are two that talk to each other.
        "program": [*harness, str(reports_to)],
        "answer": [*python, _answer_program()] if work.tested else None,
        "environment": environment,
    }


@functools.cache
def _answer_program() -> str:
    """The source of the program that runs an answer for its tests."""
    source = _EXCHANGE.read_text(encoding="utf-8")
    return (
        f"import sys\nnames = {{'__name__': 'exchange'}}\nexec(compile({source!r}, 'exchange', 'exec'), names)\n"
        "names['run_answer'](int(sys.argv[1]))\n"
    )


@functools.cache
def _tests_program() -> str:
    """The source of the program that runs the tests. ``exchange`` is a module while it is read, and none that a test
    could import."""
    shared, source = (each.read_text(encoding="utf-8") for each in (_EXCHANGE, _TESTS))
    return (
        f"import sys, types\nnames, shared = {{'__name__': 'exchange_tests'}}, types.ModuleType({_SHARED!r})\n"
        f"sys.modules[{_SHARED!r}] = shared\nexec(compile({shared!r}, 'exchange', 'exec'), shared.__dict__)\n"
        f"exec(compile({source!r}, 'exchange_tests', 'exec'), names)\n"
        f"del sys.modules[{_SHARED!r}], shared\nnames['run_tests'](*map(int, sys.argv[1:]))\n"
    )


def _given(work: Work, nonce: str) -> bytes:
    """The harness's standard input: a length in 8 hex digits, JSON of that length, and the code's own input."""
    told = {each.name: getattr(work, each.name) for each in fields(work) if each.name != "input"}
    said = json.dumps({"nonce": nonce, **told}).encode()
    return f"{len(said):08x}".encode() + said + work.input.encode(errors="replace")


def _reports(lines: bytes, nonce: str) -> dict[int, tuple[str, str] | None]:
    """The harness's reports: the lines that begin with the nonce, which only the harness has."""
    found: dict[int, tuple[str, str] | None] = {}
    for line in lines.split(b"\n"):
        begins, _, said = line.partition(b" ")
        if begins != nonce.encode() or said.count(b" ") < 2:
            continue
        place, kind, message = said.split(b" ", 2)
        with suppress(ValueError, RecursionError):
            # Half a surrogate pair is no character, and would break whoever encodes it.
            told = str(json.loads(message)).encode(errors="replace").decode()
            found[int(place)] = None if kind == b"passed" else (kind.decode(), told)
    return found


def _fed(stdin: int, left: memoryview) -> memoryview:
    """Writes what can be written; what is left."""
    try:
        return left[os.write(stdin, left[:_CHUNK]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:  # it ended without reading it all
        return left[len(left) :]


def _line(said: bytearray) -> dict[str, object]:
    """The lines of JSON as one mapping; empty where there is none."""
    found: dict[str, object] = {}
    for line in bytes(said).split(b"\n"):
        with suppress(ValueError, TypeError):
            found |= json.loads(line)
    return found


def _pipe(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise ValueError("the process was started without pipes")
    return pipe.fileno()


def _pipe_closed(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with suppress(BrokenPipeError):
            pipe.close()


def _killed(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group, and waits until the guard is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        _pipe_closed(pipe)
    process.wait()
