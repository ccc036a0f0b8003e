"""Other machines, as ``gpuherd gpus --json`` describes them over ssh: asked in the background, read-only.

No port is opened there, and nothing is kept there. ``check_host`` refuses a name that ssh would take for an option.
Each machine has a thread of its own, so that one that does not answer holds up neither the page nor the others. What
comes back is limited in time and size, and believed in form only: it goes to a page as text.
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gpuherd.errors import UsageError, clean

COMMAND = ("gpuherd", "gpus", "--json")
# No questions, no forwarding; an existing connection is used, and none is left behind.
_SSH = (
    "ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ControlMaster=no",
    "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no", "-o", "LogLevel=ERROR",
)  # fmt: skip
LIMIT_S = 20.0
# So long after an answer the machine is asked again; and after a failure.
EVERY_S, AGAIN_S = 10.0, 30.0
# So long after the page was last looked at no machine is asked.
_UNWATCHED_S = 60.0
# So soon a program is ended when the server ends; and so long that is waited for.
_TICK_S, _CLOSE_S = 0.2, 3.0
MOST_HOSTS = 32
_MOST_BYTES, _MOST_ERROR_BYTES = 4 << 20, 8192
_MOST_GPUS, _MOST_USERS = 256, 20
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,252}", re.ASCII)
_NOT_FOUND = 127
_SSH_FAILED = 255


def check_host(name: str) -> str:
    """The name, as ``~/.ssh/config`` or DNS knows it, or ``user@name``. Raises UsageError for what is no such name: ssh
    would take one that begins with ``-`` for an option.

    >>> check_host("alice@gpu-2.lab")
    'alice@gpu-2.lab'
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"--host {clean(name)!r} is no name of a machine: letters, digits and ._:- after a letter or digit,"
            " or user@name; set other options in ~/.ssh/config"
        )
    return name


@dataclass(frozen=True, slots=True)
class GpuLine:
    """A GPU of a machine, in a line.

    Attributes:
        label: ``3``, or ``3:1`` for a MIG instance.
        used_mb, total_mb: memory, in MB (2^20 bytes).
        utilisation: 0 to 100, None where the driver does not tell.
        free: whether a job can have it.
        reason: why not, as a sentence; "" for a free one.
        users: whose processes are on it, and whose gpuherd holds it.
        idle_s: for so many seconds its memory has been held without being used; None where it is used.
    """

    label: str
    name: str
    used_mb: int
    total_mb: int
    utilisation: int | None
    free: bool
    reason: str = ""
    users: tuple[str, ...] = ()
    idle_s: int | None = None


@dataclass(frozen=True, slots=True)
class HostLook:
    """What is known of a machine.

    Attributes:
        name: as it was given.
        gpus: as it said last.
        at: wall-clock seconds of that answer; None while there is none.
        problem: why the latest try got no answer, or why it has no GPUs; None if neither.
        answers: the latest try got an answer.
        tried: a try has ended.
    """

    name: str
    gpus: tuple[GpuLine, ...] = ()
    at: float | None = None
    problem: str | None = None
    answers: bool = False
    tried: bool = False

    @property
    def free(self) -> int:
        """How many GPUs are free."""
        return sum(gpu.free for gpu in self.gpus)


class Hosts:
    """The machines of ``--host``, in this order. Raises UsageError for names that are none, or too many.

    Nothing is asked until ``looks`` is called.
    """

    def __init__(self, names: Iterable[str] = (), *, every_s: float = EVERY_S, again_s: float = AGAIN_S) -> None:
        self.names = tuple(dict.fromkeys(check_host(name) for name in names))
        if len(self.names) > MOST_HOSTS:
            raise UsageError(f"--host was given {len(self.names)} times; at most {MOST_HOSTS} machines are shown")
        self._every_s, self._again_s = every_s, again_s
        self._lock = threading.Lock()
        self._looks = {name: HostLook(name) for name in self.names}
        self._asking: dict[str, threading.Thread] = {}
        self._looked_at = 0.0
        self._ended = threading.Event()

    def looks(self) -> tuple[HostLook, ...]:
        """What is known now, without waiting. Sees to it that the machines are asked, for as long as this is called."""
        with self._lock:
            self._looked_at = time.monotonic()
            begun = [name for name in self.names if name not in self._asking] if not self._ended.is_set() else []
            for name in begun:
                # A daemon: a server that is killed does not wait for ssh.
                self._asking[name] = threading.Thread(
                    target=self._ask_on, args=(name,), name=f"gpuherd-web-{name}", daemon=True
                )
                self._asking[name].start()
            return tuple(self._looks.values())

    def close(self) -> None:
        """Asks no more, and ends what is being asked: within a moment, so that no ssh is left behind."""
        self._ended.set()
        with self._lock:
            threads = tuple(self._asking.values())
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _ask_on(self, name: str) -> None:
        while True:
            answer = ask(name, ended=self._ended)
            with self._lock:
                before = self._looks[name]
                if not answer.answers:  # what it said last stays, with its age
                    answer = replace(answer, gpus=before.gpus, at=before.at)
                self._looks[name] = answer
            self._ended.wait(self._every_s if answer.answers else self._again_s)
            with self._lock:
                if self._ended.is_set() or time.monotonic() - self._looked_at > _UNWATCHED_S:
                    self._asking.pop(name, None)
                    return


def ask(name: str, *, limit_s: float = LIMIT_S, ended: threading.Event | None = None) -> HostLook:
    """Asks a machine once. A failure is the look's ``problem``; nothing is raised."""
    try:
        code, printed, complaint = _run((*_SSH, "--", check_host(name), *COMMAND), limit_s, ended)
    except OSError as problem:
        return HostLook(name, problem=f"ssh can't be started: {problem.strerror or problem}", tried=True)
    if code is None:
        return HostLook(name, problem=complaint, tried=True)
    if code != 0:
        return HostLook(name, problem=_why(code, complaint), tried=True)
    try:
        gpus, reason = parse(printed)
    except ValueError as mistake:
        reason = f"what its gpuherd prints is not understood ({clean(str(mistake))}); is it of another version?"
        return HostLook(name, problem=reason, tried=True)
    return HostLook(name, gpus, time.time(), reason, answers=True, tried=True)


def _why(code: int, complaint: str) -> str:
    words = clean(complaint.strip().rpartition("\n")[2])
    if code == _NOT_FOUND:
        return "gpuherd is not found there: it must be in the PATH of a command that ssh runs"
    if code == _SSH_FAILED:
        return f"ssh gets no connection: {words or 'it says nothing'}"
    return f"gpuherd ended with exit code {code} there: {words or 'it says nothing'}"


def _run(argv: Sequence[str], limit_s: float, ended: threading.Event | None) -> tuple[int | None, bytes, str]:
    """Runs a program: exit code, output and errors. The code is None where it was ended, for the reason that stands in
    place of the errors."""
    program = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    outputs = {program.stdout: bytearray(), program.stderr: bytearray()}
    reason = None
    until = time.monotonic() + limit_s
    with program, selectors.DefaultSelector() as ready:
        for pipe in outputs:
            ready.register(pipe, selectors.EVENT_READ)  # type: ignore[arg-type]
        # A process that ssh has left behind may keep the pipes open.
        while ready.get_map() and reason is None and (program.poll() is None or ready.select(0)):
            for key, _ in ready.select(min(_TICK_S, max(0.0, until - time.monotonic()))):
                data = os.read(key.fd, 1 << 16)
                outputs[key.fileobj] += data  # type: ignore[index]
                if not data:
                    ready.unregister(key.fileobj)
            if len(outputs[program.stdout]) > _MOST_BYTES:
                reason = f"it prints more than {_MOST_BYTES >> 20} MB; what it prints is not shown"
            del outputs[program.stderr][:-_MOST_ERROR_BYTES]
            if time.monotonic() >= until:
                reason = f"no answer in {limit_s:g} s"
            elif ended is not None and ended.is_set():
                reason = "gpuherd web ends"
        if reason is None:
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, until - time.monotonic()))
            reason = None if program.returncode is not None else f"no answer in {limit_s:g} s"
        if program.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    complaint = outputs[program.stderr].decode("utf-8", "replace")
    return (
        (None, b"", reason) if reason is not None else (program.returncode, bytes(outputs[program.stdout]), complaint)
    )


# ---- what a machine has printed --------------------------------------------------------------------------------------


def parse(printed: bytes) -> tuple[tuple[GpuLine, ...], str | None]:
    """The GPUs of the output of ``gpuherd gpus --json``, and why there are none, if so. Raises ValueError for anything
    else."""
    # A login script may print before it.
    start = printed.find(b"{")
    try:
        values = json.loads(printed[max(0, start) :])
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(values, dict) or not isinstance(values.get("gpus"), list):
        raise ValueError("no list of GPUs")
    problem = values.get("problem")
    gpus = tuple(_line(each) for each in values["gpus"][:_MOST_GPUS] if isinstance(each, dict))
    return gpus, clean(problem) if isinstance(problem, str) and problem else None


def _line(values: Mapping[str, Any]) -> GpuLine:
    lease = values.get("lease")
    processes = values.get("processes")
    users = [_text(lease, "user")] if isinstance(lease, dict) else []
    users += (
        [_text(each, "user") for each in processes if isinstance(each, dict)] if isinstance(processes, list) else []
    )
    problem = _text(values, "problem")
    free = values.get("free") is True and not problem
    utilisation = _whole(values, "utilisation_percent")
    idle = values.get("idle")
    return GpuLine(
        label=_text(values, "label") or "?",
        name=_text(values, "name"),
        used_mb=_whole(values, "used_mb") or 0,
        total_mb=_whole(values, "total_mb") or 0,
        utilisation=None if utilisation is None else min(100, utilisation),
        free=free,
        reason="" if free else problem or _text(values, "reason") or "not free",
        users=tuple(dict.fromkeys(user for user in users if user))[:_MOST_USERS],
        idle_s=_whole(idle, "idle_s") if isinstance(idle, dict) else None,
    )


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return clean(value[:1000]) if isinstance(value, str) else ""


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if 0 <= value <= 1e9 else None
