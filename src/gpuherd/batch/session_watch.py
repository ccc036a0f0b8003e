"""The watcher of one session: ``python -m gpuherd.batch.session_watch``, a process of its own next to the command.

``gpuherd session`` becomes the command, as ``gpuherd run`` does, so that terminal, signals and exit status are the
command's own. The watcher has a session of its own, which nobody's Ctrl-C or Ctrl-Z reaches, and holds no lease, no
terminal and no pipe. It looks at the GPUs and at the terminal's input, warns, and ends the command and all that it has
started. When it is killed the command goes on with its GPUs, and nobody ends it.

The command's processes are found by the variable ``GPUHERD_SESSION``, which all inherit, and by the leases that they
hold. Jobs of queues that were started from the session are none of them. What was stopped by Ctrl-Z is ended too.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.batch import sessions
from gpuherd.batch.session_rule import Ending, EventKind, SessionEvent, SessionRule, SessionState, end_of, step
from gpuherd.engines.process_tree import (
    SESSION_VARIABLE,
    Lock,
    ProcessId,
    Seen,
    ask_to_end,
    everyone,
    identify,
    locks_held,
    send,
    variable_of,
)
from gpuherd.errors import CannotWrite, UsageError, clean
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock
from gpuherd.units import duration

# Between two looks at most and at least; of a short time without use, so many looks see it.
_LOOK_S, _SHORTEST_LOOK_S, _LOOKS = 2.0, 0.05, 20
# The record that ``session list`` reads is replaced so often while nothing happens.
_RECORD_S = 10.0
_END_LOOK_S = 0.1
# A process that forks and ends in a loop: so often it is looked for what is left.
_MOST_ROUNDS = 40
_NOTICE_WITHIN_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the watcher is to do.

    Attributes:
        pid, start_ticks: the process that becomes the command.
        gpus: UUID and label of each of its GPUs; ``locks``: the paths of their leases.
        name, command: for people. ``attempt``: the tag of the job in which the session was started, if it was in one.
        notify_command, webhook: where notices go.
    """

    pid: int
    start_ticks: int
    gpus: tuple[tuple[str, str], ...]
    locks: tuple[str, ...]
    name: str
    command: str
    idle_after_s: float
    warn_s: float
    longest_s: float | None
    grace_s: float
    attempt: str | None = None
    notify_command: str | None = None
    webhook: str | None = None

    @property
    def rule(self) -> SessionRule:
        """When it ends."""
        return SessionRule(self.idle_after_s, self.warn_s, self.longest_s)

    @property
    def labels(self) -> str:
        """Its GPUs for people: ``GPU 0, 1``."""
        return f"GPU {', '.join(label for _, label in self.gpus)}"

    @staticmethod
    def of(values: dict[str, Any]) -> Orders:
        """From plain JSON values."""
        gpus = tuple((str(uuid), str(label)) for uuid, label in values["gpus"])
        return Orders(**values | {"gpus": gpus, "locks": tuple(values["locks"])})


class SessionWatcher:
    """Watches one session until it is over. Raises ProcessLookupError when its command is gone already."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._pidfd = os.pidfd_open(orders.pid)
        leader = identify(orders.pid)
        if leader is None or leader.start_ticks != orders.start_ticks:
            raise ProcessLookupError(orders.pid)
        self._leader = leader
        self._own = identify(os.getpid()) or leader
        self._tag = sessions.tag_of(orders.pid, orders.start_ticks)
        self._locks = frozenset(Lock(path, orders.pid) for path in orders.locks)
        self._activity = Activity(orders)
        self._state = SessionState.begun(clock.mono())
        self._since = clock.wall()
        self._recorded_at = 0.0
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._notifier: threading.Thread | None = None
        self._place: Path | None = None
        with suppress(CannotWrite):
            self._place = sessions.folder()
            sessions.remove_dead(self._place)
        self._record(force=True)

    def watch(self) -> None:
        """Returns when the session is over."""
        rule = self._orders.rule
        look_s = min(_LOOK_S, max(_SHORTEST_LOOK_S, min(rule.idle_after_s, 4 * rule.warn_s) / _LOOKS))
        if self._activity.is_unknown():
            self._tell(
                f"the driver does not report how much {self._orders.labels} is used: only --for ends the session"
            )
        while True:
            self._wait(look_s)
            if self._has_ended() and not self._is_held():
                break
            event = self._look(rule)
            if event is not None:
                self._on(event)
                if event.kind is EventKind.END:
                    self._end()
                    break
        if self._place is not None:
            sessions.remove(self._place, self._orders.pid)
        if self._notifier is not None:
            self._outbox.put(None)
            self._notifier.join(_NOTICE_WITHIN_S)

    def _wait(self, seconds: float) -> None:
        if self._has_ended():
            time.sleep(seconds)
            return
        ends = select.poll()
        ends.register(self._pidfd, select.POLLIN)
        ends.poll(seconds * 1000)

    def _has_ended(self) -> bool:
        ends = select.poll()
        ends.register(self._pidfd, select.POLLIN)
        return bool(ends.poll(0))

    def _is_held(self) -> bool:
        """Whether processes that the command has left behind hold its GPUs."""
        try:
            folder = LeaseFolder.existing()
            holders = {} if folder is None else folder.holders(uuid for uuid, _ in self._orders.gpus)
        except (OSError, CannotWrite, UsageError):
            return False
        return any(holder.pid == self._orders.pid for holder in holders.values())

    def _look(self, rule: SessionRule) -> SessionEvent | None:
        is_used, now = self._activity.look(), clock.mono()
        if self._place is not None:
            self._state = self._state.kept(sessions.kept_until(self._place, self._orders.pid, now))
        event, self._state = step(rule, self._state, now, is_used=is_used)
        self._record(force=event is not None)
        return event

    # --- telling ------------------------------------------------------------------------------------------------

    def _on(self, event: SessionEvent) -> None:
        orders = self._orders
        unused = f"it has not used {orders.labels} for {duration(self._state.last - self._state.used_at)}"
        why = unused if event.ending is Ending.IDLE else f"its time of {duration(orders.longest_s or 0.0)} is up"
        who = f"session {orders.pid} ({orders.name})"
        if event.kind is EventKind.WARN:
            how = "use the GPU, or " if event.ending is Ending.IDLE else ""
            text = (
                f"{who} is ended in {duration(event.in_s)}: {why}; to keep it: {how}"
                f"gpuherd session extend {orders.pid} 1h"
            )
        elif event.kind is EventKind.GOES_ON:
            text = f"{who} goes on"
        else:
            text = f"{who} is ended, and gives {orders.labels} back: {why}"
        self._tell(text)
        if event.kind is not EventKind.GOES_ON and (orders.notify_command or orders.webhook):
            self._outbox.put(text)
            if self._notifier is None:
                self._notifier = threading.Thread(target=self._notify, name="gpuherd-notices", daemon=True)
                self._notifier.start()

    def _notify(self) -> None:
        """Sends notices one after the other, in a thread of its own: one that hangs must not hold the watch up."""
        from gpuherd.jobs.monitor.notify import Channels, Notice, deliver

        orders = self._orders
        try:
            channels = Channels.of(orders.notify_command, orders.webhook)
        except UsageError as problem:  # the program was removed meanwhile
            self._tell(str(problem))
            return
        while (text := self._outbox.get()) is not None:
            text = clean(f"gpuherd: {text}")
            notice = Notice(kind="session", text=text, run=orders.name, host=socket.gethostname(), at=clock.wall())
            for sentence in deliver(channels, notice):
                self._tell(sentence)

    def _tell(self, text: str) -> None:
        """Writes a line where the command writes its errors: on a terminal, or in a log that all append to."""
        for number in (2, 1, 0):
            path = f"/proc/{self._orders.pid}/fd/{number}"
            with suppress(OSError):
                kind = os.stat(path).st_mode  # noqa: PTH116 - for a link of /proc
                is_log = number == 2 and stat.S_ISREG(kind) and _appends(self._orders.pid, number)
                if not (stat.S_ISCHR(kind) or is_log):
                    continue
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if is_log or os.isatty(fd):
                        # A program may have the terminal in raw mode.
                        line = f"gpuherd: {clean(text)}\n" if is_log else f"\r\ngpuherd: {clean(text)}\r\n"
                        os.write(fd, line.encode("utf-8", "replace"))
                        return
                finally:
                    os.close(fd)

    def _record(self, *, force: bool) -> None:
        now, state, orders = clock.mono(), self._state, self._orders
        if self._place is None or not (force or now - self._recorded_at >= _RECORD_S):
            return
        self._recorded_at = now
        ending, at = end_of(orders.rule, state)
        record = sessions.SessionRecord(
            pid=orders.pid,
            start_ticks=orders.start_ticks,
            boot=self._leader.boot,
            watcher=self._own.pid,
            watcher_ticks=self._own.start_ticks,
            name=orders.name,
            command=orders.command,
            gpus=tuple(label for _, label in orders.gpus),
            since=self._since,
            idle_after_s=orders.idle_after_s,
            idle_s=state.last - state.used_at,
            ends_in_s=max(0.0, at - now),
            ending=ending.value,
            looked_at=clock.wall(),
            warned=state.warned is not None,
        )
        sessions.write(self._place, record)

    # --- the end ------------------------------------------------------------------------------------------------

    def members(self) -> list[Seen]:
        """The live processes of the session."""
        paths = {lock.path for lock in self._locks}
        found = []
        for seen in everyone(self._leader.start_ticks):
            pid = seen.process.pid
            if pid == self._own.pid or seen.process.start_ticks < self._leader.start_ticks:
                continue
            if seen.attempt is not None and seen.attempt != self._orders.attempt:
                continue  # a job of a queue
            ours = pid == self._leader.pid or variable_of(pid, SESSION_VARIABLE) == self._tag
            if ours or not locks_held(pid, paths).isdisjoint(self._locks):
                found.append(seen)
        return found

    def _end(self) -> None:
        """SIGTERM to all, and SIGKILL after the grace, one by one: the process group may be that of a script of the
        user's."""
        until, asked = clock.mono() + self._orders.grace_s, set[ProcessId]()
        while found := self.members():
            for seen in found:
                if seen.process not in asked:
                    asked.add(seen.process)
                    if _ignores_sigterm(seen.process.pid):
                        send(seen.process, signal.SIGHUP)  # an interactive shell ends by this one
                    ask_to_end(seen.process)
            if clock.mono() >= until:
                break
            self._wait(_END_LOOK_S)
        killed: set[ProcessId] = set()
        for _ in range(_MOST_ROUNDS):
            found = [seen for seen in self.members() if seen.process not in killed]
            if not found:
                return
            for seen in found:
                send(seen.process, signal.SIGKILL)
                killed.add(seen.process)


class Activity:
    """Whether the GPUs or the terminal of a session have been used, look by look.

    A GPU is used when the driver reports so, or when the memory in use on it has changed: a model was loaded.
    """

    def __init__(self, orders: Orders) -> None:
        self._pid = orders.pid
        self._uuids = frozenset(uuid for uuid, _ in orders.gpus)
        self._driver = GpuReader()
        self._used_mb: dict[str, int] = {}
        self._typed_at = self._terminal_read_at()

    def look(self) -> bool:
        """Whether they have been used since the last look, or can't be read."""
        gpus = self._gpus()
        used_mb = {gpu.uuid: gpu.used_mb for gpu in gpus}
        has_changed = any(mb != self._used_mb.get(uuid, mb) for uuid, mb in used_mb.items())
        typed_at = self._terminal_read_at()
        has_typed = typed_at is not None and typed_at != self._typed_at
        self._used_mb, self._typed_at = used_mb, typed_at
        return has_typed or has_changed or len(gpus) < len(self._uuids) or any(_is_used(gpu) for gpu in gpus)

    def is_unknown(self) -> bool:
        """Whether the driver reports no utilisation of one of the GPUs, as for MIG instances."""
        return any(gpu.problem is None and gpu.utilisation_percent is None for gpu in self._gpus())

    def _gpus(self) -> list[Gpu]:
        machine = self._driver.snapshot(processes=False, only=self._uuids)
        return [gpu for gpu in machine.gpus if gpu.uuid in self._uuids]

    def _terminal_read_at(self) -> int | None:
        """When the command's terminal was last read from, in ns; the kernel notes it every few seconds. None where the
        command's input is no terminal."""
        with suppress(OSError):
            found = os.stat(f"/proc/{self._pid}/fd/0")  # noqa: PTH116 - for a link of /proc
            # The character device 1:3 is /dev/null, whose time every reader on the machine changes.
            if stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) != 1:
                return found.st_atime_ns
        return None


def _is_used(gpu: Gpu) -> bool:
    return gpu.problem is not None or gpu.utilisation_percent != 0


def _appends(pid: int, number: int) -> bool:
    """Whether a process has opened this descriptor for appending: otherwise it would write over lines of ours."""
    text = Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii", errors="replace")
    flags = next((line.split()[1] for line in text.splitlines() if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & os.O_APPEND)


def _ignores_sigterm(pid: int) -> bool:
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        ignored = next(line.split()[1] for line in text.splitlines() if line.startswith("SigIgn:"))
        return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)
    return False


def main() -> int:
    """The process. Its arguments: the numbers of the pipe with the orders, and of the one for the answer."""
    orders_in, ready_out = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(orders_in, "rb") as pipe:
        orders = Orders.of(json.loads(pipe.read()))
    try:
        watcher = SessionWatcher(orders)
    except ProcessLookupError:
        return 0
    os.write(ready_out, b"ready\n")
    os.close(ready_out)
    watcher.watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
