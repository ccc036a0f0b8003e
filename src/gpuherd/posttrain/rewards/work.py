"""What is run in the sandbox, within which limits, and how it ended. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpuherd.errors import GpuherdError, UsageError

# By what a run was ended, in words.
LIMITS = {"time": "out of time", "output": "too much output", "killed": "killed from outside"}


class NoProtection(GpuherdError):
    """Code of strangers was to be run, and the kernel gives no protection against it here."""


class Mode(StrEnum):
    """By what code is shut in."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use.

    Attributes:
        seconds: on the clock; CPU time has the same limit, rounded up.
        memory: bytes of address space, of all its processes together.
        disk: bytes in its folder, which lies in memory besides.
        open_files: at once in a process.
        output: bytes of both outputs together; more ends the run.
        children: processes that it may have besides the first one; threads are limited by memory, with namespaces
            also to 64.
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
        least = {"memory": 32 << 20, "disk": 4096, "open_files": 16, "output": 1, "children": 0}
        for name, lowest in least.items():
            if (value := getattr(self, name)) < lowest:
                raise UsageError(f"{name}={value}; the least is {lowest}")


@dataclass(frozen=True, slots=True)
class Work:
    """Something to be run.

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
    """How a run ended.

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
