"""The guardian: ends an attempt on its node, and reports its end, when its leader has died (SIGKILL, a Ray worker that
is ended).

A shell waits on a pipe whose other end only the leader has. It ends when the leader says that all is done. When the
pipe ends without that, it becomes ``python -m gpuherd.jobs.remote.guardian``, which ends the attempt's process tree
(SIGTERM, the grace, SIGKILL) and reports in the leader's place how it ended. So it costs a thousandth of a second and
next to no memory while all goes well.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuherd.engines.host import finding_us
from gpuherd.engines.local.process import LocalProcess, adopt, read_exit
from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, ProcessId, Traces, boot_id, end_rest
from gpuherd.jobs import clock
from gpuherd.jobs.remote import PATIENCE_S
from gpuherd.jobs.remote.protocol import EndReport, Order, has_result, order_of, read_ended, say, write_report

# It survives the signals that an engine sends to all of a job's processes, except SIGKILL; and it is no child of the
# agent, because a worker of Ray kills its children when it ends. A background process of a shell reads from /dev/null
# unless its input is redirected.
_SCRIPT = """\
trap '' HUP INT QUIT TERM USR1 USR2 ALRM
exec 3<&0
{ read -r word; [ "$word" = done ] || exec "$@"; } <&3 3<&- &
"""


class Guardian:
    """A guardian of this process. Leaving the block without ``dismiss`` leaves the attempt to it.

    Args:
        order: what runs here; ``manifest`` and ``index`` locate it, ``rank`` is this node's place.
        process: the attempt's main process here.
    """

    def __init__(self, manifest: str, index: int, rank: int, order: Order, process: ProcessId):
        words = [sys.executable, "-m", "gpuherd.jobs.remote.guardian", str(Path(manifest).absolute())]
        words += [str(index), str(rank), str(process.pid), str(process.start_ticks)]
        # To end the attempt no file is needed: by then the manifest may be gone, or its network file system.
        words += [order.tag, str(order.status), str(order.grace_s)]
        # It must find gpuherd's modules wherever it is started; and it is not a part of a job that we may be a part of.
        environment = finding_us(os.environ)
        environment.pop(ATTEMPT_VARIABLE, None)
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "gpuherd-guardian", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._child.wait()  # from here on init is its parent

    def dismiss(self) -> None:
        """The attempt has ended and was reported."""
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.write(b"done\n")
                self._child.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        if self._child.stdout is not None:
            self._child.stdout.read()  # until it has ended
            self._child.stdout.close()


def main(words: Sequence[str]) -> int:
    """The command: manifest, index, rank, the pid and start time of the attempt's main process; tag, status, grace."""
    manifest, index, rank, pid, ticks, tag, status, grace = words
    identity, grace_s = ProcessId(int(pid), int(ticks), boot_id()), float(grace)
    process = adopt(identity, Path(status), tag)
    if process is not None:
        _end(process, grace_s)
        process.release()
    left = end_rest(Traces(tag, identity), grace_s)
    try:
        _, order = order_of(Path(manifest), int(index))
    except OSError as problem:
        say(f"nobody waits for the end of attempt {tag} any more: {problem}")
        return 0
    if int(rank) > 0:
        order = order.on_node(int(rank))
    if read_ended(Path(order.ended)) is not None:
        return 0
    found = read_exit(order.status, order.tag)
    # Where its shell was killed with its agent, how the job would have ended is unknown: we have ended it.
    cut = left and found.code is None and found.signal is None
    ended = EndReport(
        at=clock.wall(),
        ran_s=found.ran_s or 0.0,
        started=found.started,
        problem="the process that led it was killed",
        code=found.code,
        signal=found.signal,
        has_result=has_result(order),
        interrupted=process is not None or not found.started or cut,
    )
    write_report(order, ended, PATIENCE_S)
    return 0


def _end(process: LocalProcess, grace_s: float) -> None:
    ended = select.poll()
    ended.register(process.pidfd, select.POLLIN)
    process.terminate()
    if not ended.poll(1000 * grace_s):
        process.kill()
        ended.poll()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
