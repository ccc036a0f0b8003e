"""``gpuherd up`` and ``gpuherd down``: a dispatcher of the user's own queue that outlives its terminal.

It is a process and a session of its own, without a terminal: ``python -m gpuherd.batch.daemon``. It reads its options
from a pipe and not from its command line, which every user can read; through a second pipe it reports that it runs, or
why it can't. The queue's lock, which holds its pid, allows one for each queue.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.batch.user_queue import open_folder
from gpuherd.engines import host
from gpuherd.engines.process_tree import SESSION_VARIABLE
from gpuherd.engines.registry import LOCAL, specs
from gpuherd.errors import ExitCode, GpuherdError, QueueBusy
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.jobs.control.messages import Response

START_WITHIN_S = 60.0
# Variables that a process needs anywhere, and those that describe GPUs, real and simulated ones. Also kept: proxies,
# for notices to a webhook, and the variables of the engines.
_KEPT = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "TERM"})
_KEPT_BEGINNINGS = ("LC_", "XDG_", "LD_", "CUDA_", "GPUHERD_", "PYTORCH_NVML_", "LOG_LEVEL")
_LOG_BYTES, _LOGS_KEPT = 10 * 2**20, 3
_LOOK_S = 0.05
# The shell exits as soon as it has started the dispatcher, which so is no child of ours and leaves no zombie.
_DETACH = '"$@" &'

# Not __name__, which is "__main__" in the process itself and would miss the log.
logger = logging.getLogger("gpuherd.batch.daemon")


class CannotStartUp(GpuherdError):
    """The dispatcher in the background ended before it was ready. Its exit code is this error's."""

    def __init__(self, message: str, code: int = ExitCode.FAILED):
        super().__init__(message)
        self.exit_code = ExitCode(code)


def log_file(run: RunDirectory) -> Path:
    """The log of the dispatcher in the background."""
    return run.logs / "up.log"


def up(options: DispatchOptions, run: RunDirectory | None = None) -> int:
    """Starts a dispatcher for the queue in the background and returns its pid once it is ready.

    Raises:
        QueueBusy: the queue has one already.
        CannotStartUp: it could not start; the message says why.
        CannotWrite: the queue's folder can't be used.
    """
    directory = open_folder(engine=options.engine) if run is None else run
    pid = DispatcherLock.holder(directory.lock)
    if pid is not None:
        raise QueueBusy(f"pid {pid} works off {directory.root} already; gpuherd set changes its options")
    options_in, options_out = os.pipe()
    ready_in, ready_out = os.pipe()
    # Output before its own log is open, and of a crash of the interpreter.
    raw = directory.logs / "up.err"
    words = [sys.executable, "-m", "gpuherd.batch.daemon", str(directory.root), str(options_in), str(ready_out)]
    try:
        with raw.open("wb") as output:
            # It changes its folder itself and is not started in another: PYTHONPATH may be relative to ours.
            subprocess.run(
                ["/bin/sh", "-c", _DETACH, "gpuherd-up", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(options_in, ready_out),
                start_new_session=True,
                check=True,
                # It outlives the session in which it is started (``gpuherd session``).
                env={name: value for name, value in os.environ.items() if name != SESSION_VARIABLE},
            )
        os.close(ready_out)
        ready_out = -1
        with os.fdopen(options_out, "wb") as pipe:
            options_out = -1
            pipe.write(json.dumps(asdict(options)).encode())
        return _pid_when_ready(ready_in, raw)
    finally:
        for descriptor in (options_in, options_out, ready_in, ready_out):
            if descriptor >= 0:
                os.close(descriptor)


def _pid_when_ready(pipe: int, raw: Path) -> int:
    """The pid that the new dispatcher reports. Raises CannotStartUp with the reason when it reports an error."""
    reported = b""
    deadline = time.monotonic() + START_WITHIN_S
    while not reported.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise CannotStartUp(f"the dispatcher is not at work after {START_WITHIN_S:g} s; see {raw.parent}")
        part = os.read(pipe, 65536)
        if not part:
            last = raw.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise CannotStartUp(f"the dispatcher ended at once: {last[0] if last else 'without a word'} (see {raw})")
        reported += part
    answer = json.loads(reported)
    if "error" in answer:
        raise CannotStartUp(answer["error"], answer["exit_code"])
    return int(answer["pid"])


def down(
    *, now: bool = False, engine: str = LOCAL, run: RunDirectory | None = None, wait_s: float = 30.0
) -> Response | None:
    """Ends the dispatcher of the queue; None when there is none.

    Args:
        now: running jobs are stopped and put back into the queue, and this waits for that (``wait_s`` at most); else
            they run to their end, no job starts, and this returns at once.
        engine: the engine of the user's own queue.
        run: the queue's folder; the user's own for the engine if not given.
    """
    from gpuherd.jobs.control.client import send
    from gpuherd.jobs.control.messages import ControlKind, Request

    directory = open_folder(engine=engine) if run is None else run
    if DispatcherLock.holder(directory.lock) is None:
        return None
    answer = send(directory, Request(ControlKind.STOP if now else ControlKind.DRAIN))
    deadline = time.monotonic() + wait_s
    while now and DispatcherLock.holder(directory.lock) is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return answer


def forget_environment(engine: str = LOCAL) -> None:
    """Drops the variables of the terminal in which this process was started: jobs bring their own environment.

    For a cluster's engine the variable that finds gpuherd itself stays: our processes on its nodes need it.
    """
    if engine != LOCAL and os.environ.get(host.NAME):
        os.environ[host.NAME] = host.absolute(os.environ[host.NAME])
    kept = (*_KEPT_BEGINNINGS, *(beginning for spec in specs() for beginning in spec.kept_variables))
    from gpuherd.gpus.visible import VARIABLES

    for name in list(os.environ):
        proxy = name.lower().endswith("_proxy")
        ours = engine != LOCAL and name == host.NAME
        if name not in _KEPT and name not in VARIABLES and not proxy and not ours and not name.startswith(kept):
            del os.environ[name]


def main() -> int:
    """The process in the background. Its arguments: the queue's folder, and the numbers of its two pipes."""
    from gpuherd.jobs.run import work_off

    folder, options_in, ready_out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(options_in, "rb") as pipe:
        values: dict[str, Any] = json.loads(pipe.read())
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    options = DispatchOptions(**values)
    run = RunDirectory(folder)
    forget_environment(options.engine)
    os.chdir(run.root)  # else our working folder could not be unmounted
    _log_to(log_file(run))

    def report(**values: Any) -> None:
        os.write(ready_out, json.dumps(values).encode() + b"\n")
        os.close(ready_out)

    try:
        return work_off(run, options, serve=True, on_ready=lambda: report(pid=os.getpid())).exit_code
    except GpuherdError as problem:
        logger.error("%s", problem)
        with suppress(OSError):  # it was ready before, or no process waits for the report any more
            report(error=str(problem), exit_code=int(problem.exit_code))
        return problem.exit_code
    except Exception:
        logger.exception("the dispatcher has failed")
        raise


def _log_to(path: Path) -> None:
    from logging.handlers import RotatingFileHandler  # not for a dispatcher in the foreground

    handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=_LOGS_KEPT, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("gpuherd")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
