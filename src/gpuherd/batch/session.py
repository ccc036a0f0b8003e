"""``gpuherd session``: takes GPUs for interactive work and becomes the command; a watcher gives them back when they are
not used any more (``session_watch``).
"""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn

from gpuherd.batch import sessions
from gpuherd.batch.options import SessionOptions
from gpuherd.batch.run import Taken, Waiter, become, find_program
from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, SESSION_VARIABLE, identify, path_of
from gpuherd.errors import GpuherdError, clean
from gpuherd.jobs.monitor.notify import Channels
from gpuherd.jobs.settings import Settings

_READY_WITHIN_S = 60.0
# The shell ends as soon as it has started the watcher, which so is no child of the command.
_DETACH = '"$@" &'


class CannotWatch(GpuherdError):
    """The process that is to end the session could not be started."""


def run(
    options: SessionOptions,
    argv: Sequence[str],
    inherited: Sequence[int],
    report: Callable[[str], None],
    settings: Settings,
) -> NoReturn:
    """Waits for the GPUs and becomes the command.

    Args:
        inherited: the descriptors that we inherited (``open_descriptors``).
        report: takes sentences for the user.

    Raises CannotBecome for a command that can't be run, CannotWatch, and what ``Waiter.take`` raises.
    """
    Channels.of(options.notify_command, options.webhook)  # raises for one that could never work
    program = find_program(argv[0])
    taken = Waiter(options.run_options, report, settings).take()
    if taken.gpus:
        _start_watcher(options, argv, taken)
        report(_promise(options))
    else:
        report("there are no GPUs to give back: the session is not watched")
    name, project = options.name, options.project
    become(program, argv, taken, inherited, options.cpus, name=name, project=project, is_session=True)
    raise AssertionError("unreachable")


def _promise(options: SessionOptions) -> str:
    from gpuherd.units import duration

    latest = "" if options.longest is None else f", and after {duration(options.longest)} in any case"
    return (
        f"session {os.getpid()}: gives the GPUs back after {duration(options.idle_after_s)} without use{latest};"
        " gpuherd session list shows when"
    )


def _start_watcher(options: SessionOptions, argv: Sequence[str], taken: Taken) -> None:
    """Starts the watcher and returns when it watches."""
    process = identify(os.getpid())
    if process is None:
        raise CannotWatch("/proc does not show this process")
    values = {
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "gpus": [(gpu.uuid, gpu.label) for gpu in taken.gpus],
        "locks": [path_of(lease.fd) for lease in taken.leases],
        "name": options.name or "session",
        "command": clean(shlex.join(argv)),
        "idle_after_s": options.idle_after_s,
        "warn_s": options.warn_s,
        "longest_s": options.longest,
        "grace_s": options.grace_s,
        "attempt": os.environ.get(ATTEMPT_VARIABLE),
        "notify_command": options.notify_command,
        "webhook": options.webhook,
    }
    os.environ.pop(SESSION_VARIABLE, None)  # of a session in which this one is started
    _spawn(json.dumps(values).encode())
    os.environ[SESSION_VARIABLE] = sessions.tag_of(process.pid, process.start_ticks)


def _spawn(orders: bytes) -> None:
    orders_in, orders_out = os.pipe()
    ready_in, ready_out = os.pipe()
    words = [sys.executable, "-m", "gpuherd.batch.session_watch", str(orders_in), str(ready_out)]
    try:
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, "gpuherd-session", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(orders_in, ready_out),
            start_new_session=True,
            check=True,
            # Modules of the user's in the current folder are none of ours.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        os.close(ready_out)
        ready_out = -1
        with os.fdopen(orders_out, "wb") as pipe:
            orders_out = -1
            pipe.write(orders)
        if not _is_ready(ready_in):
            raise CannotWatch("the process that gives the GPUs back could not be started; use gpuherd run instead")
    except (OSError, subprocess.SubprocessError) as problem:
        raise CannotWatch(f"the process that gives the GPUs back could not be started: {problem}") from None
    finally:
        for descriptor in (orders_in, orders_out, ready_in, ready_out):
            if descriptor >= 0:
                os.close(descriptor)


def _is_ready(pipe: int) -> bool:
    until = time.monotonic() + _READY_WITHIN_S
    received = b""
    while not received.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return False
        part = os.read(pipe, 100)
        if not part:
            return False
        received += part
    return True


def listed() -> list[dict[str, object]]:
    """The user's sessions on this machine as plain data, the oldest first. Raises CannotWrite."""
    return [
        asdict(record) | {"is_watched": record.is_watched, "ends_at": _ends_at(record)}
        for record in sessions.read(sessions.folder())
    ]


def _ends_at(record: sessions.SessionRecord) -> float | None:
    """The wall-clock second at which it ends if it is not used; None for one without a watcher."""
    return record.looked_at + record.ends_in_s if record.is_watched else None
