"""Runs code that a model wrote, in a process of its own that can do no harm: ``confine`` shuts it in.

It has no network, no access to files but the interpreter's and the system's libraries, an empty folder in memory, and
limits of time, memory, disk, output and processes. Whatever it leaves behind is killed with it. Which protection the
kernel gives here is found out once, by trying; where it gives none, nothing is run unless that is asked for.

What it does not protect from: bugs of the kernel, and side channels between processes of one machine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpuherd.errors import GpuherdError
from gpuherd.posttrain.rewards.running import filter_for, run_once
from gpuherd.posttrain.rewards.work import Limits, Mode, NoProtection, Outcome, Work

_MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Protection:
    """What keeps code in on this machine.

    Attributes:
        mode: by what.
        filtered: system calls that only do harm are refused.
        why: what each stronger mode failed of.
    """

    mode: Mode
    filtered: bool
    why: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """In one line, for logs."""
        filtered = "a filter of system calls" if self.filtered else "no filter of system calls"
        what = {
            Mode.NAMESPACES: "namespaces of users, mounts, processes and network",
            Mode.LANDLOCK: "Landlock (no file can be written)",
            Mode.NOTHING: "no protection but limits of time and memory",
        }[self.mode]
        reasons = f" ({'; '.join(self.why)})" if self.why else ""
        return f"code runs with {what} and {filtered}{reasons}"


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
                "kernel with user namespaces or Landlock protects from it; allow_unconfined=true runs it without"
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
    for mode in (Mode.NAMESPACES, Mode.LANDLOCK):
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
