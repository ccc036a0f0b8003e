"""Completions scored by a function of the user's own: ``package.module:function`` or ``path/to/file.py:function``.

    def function(completions: list[str], *, prompts, answers, **columns) -> list[float]

One call scores a batch. As in TRL the other arguments are lists of the same length, passed by keyword, and only those
that the function takes: ``prompts``, ``answers`` (the right ones of each problem), ``ids``, and every column of the
data set's rows (None where a row lacks it).

The function runs in a process of its own, which sees no GPU, has its standard output redirected to standard error (the
job's log) and ends with the process that started it. It is started once and kept; after a death it is started again.
Whatever the function does wrong is raised here as one sentence that names the function, the problem and what is right.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.gpus.visible import environment, without
from gpuherd.models.names import user_path
from gpuherd.posttrain.rewards import function_process
from gpuherd.posttrain.rewards.answers import BadReward
from gpuherd.posttrain.rewards.function_process import RESERVED, RIGHT, digest
from gpuherd.posttrain.types import Problem, Reward, Split, Task

logger = logging.getLogger(__name__)

COLUMNS = "columns"  # hidden part of a problem: the columns of its row, as JSON
_STARTING_S = 300.0  # for importing the function's module
_LONGEST_S = 86_400
_ENDING_S = 1.0  # between the end of requests and SIGKILL


class RewardFailed(BadReward):
    """The function raised, or returned something that is no list of rewards: another try can't help."""

    exit_code = ExitCode.BAD_INPUT


# ---- which function --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionName:
    """Where a function is defined.

    Attributes:
        place: a file ending in ``.py``, or the dotted name of a module.
        function: its name there.
    """

    place: str
    function: str

    @classmethod
    def of(cls, text: str, key: str = "reward", kind: str = "function") -> Self:
        """Reads ``package.module:function`` or ``path/to/file.py:function``.

        Args:
            key, kind: of the option, and what it names, for messages.

        Raises UsageError for another form, and for a file that is not there.
        """
        place, colon, function = text.rpartition(":")
        is_name = all(part.isidentifier() for part in place.split("."))
        if not colon or not function.isidentifier() or not (place.endswith(".py") or is_name):
            raise UsageError(
                f"{key}={printable(text)!r} is no {kind}; write package.module:{kind} or path/to/file.py:{kind}"
            )
        found = cls(place, function)
        if found.is_file and not user_path(place).is_file():
            raise UsageError(f"{key}={printable(text)!r}: there is no file {user_path(place).absolute()}")
        return found

    @property
    def is_file(self) -> bool:
        """True where the place is a file, and not a module's name."""
        return self.place.endswith(".py")

    @property
    def absolute(self) -> Self:
        """The same with the file's absolute path, so that it means the same from every folder."""
        return replace(self, place=str(user_path(self.place).absolute())) if self.is_file else self

    def __str__(self) -> str:
        return f"{self.place}:{self.function}"


def digest_of(function: str) -> str:
    """SHA-256 of the files that define a function (``FunctionName.of`` reads its name); a module is imported for it, in
    a process of its own, once. Raises UsageError where there is none, or it can't be imported."""
    name = FunctionName.of(function)
    return digest([name.absolute.place]) if name.is_file else _digest_of_module(function)


@functools.cache
def _digest_of_module(function: str) -> str:
    with FunctionRewards(function, _STARTING_S) as scoring:
        return scoring.check()


# ---- tasks scored by a function --------------------------------------------------------------------------------------


class FunctionTask:
    """The problems of another task, scored by a function."""

    verifiable = False
    reward_range = (-math.inf, math.inf)

    def __init__(self, task: Task, scoring: FunctionRewards):
        self.name, self.scoring = task.name, scoring
        self._task = task

    @property
    def split_sizes(self) -> Mapping[Split, int]:
        """As of the task; empty for one that doesn't count."""
        sizes: Mapping[Split, int] = getattr(self._task, "split_sizes", {})
        return sizes

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The task's, each with all columns that any of them has. Raises what the task raises."""
        found = self._task.problems(split, count, seed)
        names = dict.fromkeys(name for each in found for name in _columns_of(each))
        return [_with_columns(each, names) if COLUMNS in each.hidden else each for each in found]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """By the function. Raises as ``FunctionRewards.rewards``."""
        return self.scoring.rewards(problems, completions)

    def close(self) -> None:
        """Ends the function's process, and what the task has started."""
        self.scoring.close()
        self._task.close()


def _columns_of(problem: Problem) -> dict[str, Any]:
    """The columns of a problem's row; of a task that makes its problems itself, their hidden parts."""
    if COLUMNS not in problem.hidden:
        return dict(problem.hidden)
    columns: dict[str, Any] = json.loads(problem.hidden[COLUMNS])
    return columns


def _with_columns(problem: Problem, names: Mapping[str, None]) -> Problem:
    columns = _columns_of(problem)
    all_columns = json.dumps({name: columns.get(name) for name in names}, default=str)
    return replace(problem, hidden={**problem.hidden, COLUMNS: all_columns})


# ---- the process, from outside ----------------------------------------------------------------------------


class FunctionRewards(AbstractContextManager["FunctionRewards"]):
    """Scores completions by a function of the user's. A context manager that ends its process.

    Attributes:
        name: the function.
        sha256: of the files that define it, once it has been loaded. Before: what it must be, None for anything.
    """

    verifiable = False
    reward_range = (-math.inf, math.inf)

    def __init__(self, function: str, timeout: float):
        """Starts nothing yet.

        Args:
            function: as ``FunctionName.of`` reads it.
            timeout: seconds for a batch.

        Raises UsageError.
        """
        if not 0 < timeout <= _LONGEST_S:
            raise UsageError(f"reward_timeout={timeout:g}; seconds above 0, and {_LONGEST_S} at most")
        self.name = FunctionName.of(function)
        self.sha256: str | None = None
        self._timeout = timeout
        self._process: _Process | None = None
        self._steady = False

    def __exit__(self, *problem: object) -> None:
        self.close()

    def check(self, problems: Sequence[Problem] = ()) -> str:
        """Loads the function in its process, and sees whether it can be called with what these problems have.

        Returns the SHA-256 of the files that define it. Raises UsageError: its module can't be imported, it is not
        there, no function, or needs an argument that the problems don't have.
        """
        process = self._loaded()
        if problems:
            columns = list(dict.fromkeys(name for each in problems for name in _columns_of(each)))
            found = process.ask({"columns": columns}, _STARTING_S)
            if "problem" in found:
                raise UsageError(f"reward {self.name}: {found['problem']}")
        return str(self.sha256)

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The function's reward of each completion, in order.

        Raises RewardFailed where the function raises or returns something else than finite numbers, one a completion;
        BadReward where it runs out of time, or ends its process; UsageError where it can't be loaded.
        """
        if not completions:
            return []
        found = self._scored(problems, completions)
        if "problem" in found:
            place = found["place"]
            if place is None and len(completions) > 1:
                place, found = self._culprit(problems, completions, found)
            raise RewardFailed(f"{self._where(problems, place)}: {found['problem']}; {RIGHT}")
        if (pair := found.get("alone")) is not None:
            logger.warning(
                "reward %s scores a completion %r in a batch and %r alone: it depends on the batch or on chance, so "
                "that results depend on how batches are made; a reward should depend on its own completion alone",
                *(self.name, *pair),
            )
        return [Reward(value) for value in found["rewards"]]

    def close(self) -> None:
        """Ends the process and all that it started; it starts again where it is needed again."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _scored(
        self, problems: Sequence[Problem], completions: Sequence[str], *, quiet: bool = False
    ) -> dict[str, Any]:
        """The reply of the process to a batch. Raises BadReward."""
        columns = [_columns_of(each) for each in problems]
        names = [name for name in dict.fromkeys(name for each in columns for name in each) if name not in RESERVED]
        request: dict[str, Any] = {name: [each.get(name) for each in columns] for name in names}
        request |= {
            "completions": list(completions),
            "prompts": [each.prompt for each in problems],
            "answers": [list(each.answers) for each in problems],
            "ids": [each.id for each in problems],
        }
        compares = not self._steady and len(completions) > 1
        self._steady = self._steady or compares
        try:
            return self._reply_to({"batch": request, "alone": compares, "quiet": quiet}, self._timeout)
        except TimeoutError:
            count = "1 completion" if len(completions) == 1 else f"{len(completions)} completions"
            raise BadReward(
                f"{self._where(problems, None)}: it took longer than reward_timeout={self._timeout:g} s for {count}; "
                f"{RIGHT} in that time"
            ) from None
        except EOFError as death:
            raise BadReward(f"{self._where(problems, None)}: its process {death}; {RIGHT}") from None

    def _culprit(
        self, problems: Sequence[Problem], completions: Sequence[str], found: dict[str, Any]
    ) -> tuple[int | None, dict[str, Any]]:
        """The first completion that the function fails for when it is scored alone, and how; as long as it takes to
        score a batch at most."""
        until = time.monotonic() + self._timeout
        with suppress(BadReward):
            for place, completion in enumerate(completions):
                if time.monotonic() > until:
                    break
                alone = self._scored([problems[place]], [completion], quiet=True)
                if "problem" in alone:
                    return place, alone
        return None, found

    def _reply_to(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """A reply of the process, which is started where there is none. Raises TimeoutError, EOFError (how it ended),
        UsageError where the function can't be loaded. After whatever is raised the process has ended."""
        process = self._loaded()
        try:
            return process.ask(request, seconds)
        except BaseException:
            self.close()
            raise

    def _loaded(self) -> _Process:
        """The process that has loaded the function; started where there is none. Raises UsageError."""
        if self._process is not None and self._process.has_ended:
            logger.warning("reward %s: its process %s between two batches; started again", self.name, self._process.end)
            self.close()
        if self._process is not None:
            return self._process
        process = self._process = _Process()
        try:
            found = process.ask({"load": [str(self.name.absolute.place), self.name.function]}, _STARTING_S)
        except TimeoutError:
            found = {"problem": f"importing it took longer than {_STARTING_S:g} s"}
        except EOFError as death:
            found = {"problem": f"importing it ended the process: it {death}"}
        except BaseException:
            self.close()
            raise
        if "problem" in found:
            self.close()
            raise UsageError(f"reward {self.name}: {found['problem']}")
        if self.sha256 not in (None, found["sha256"]):
            self.close()
            raise UsageError(
                f"reward {self.name} has changed since this run began; put the old one back, or begin another run"
            )
        self.sha256 = found["sha256"]
        return process

    def _where(self, problems: Sequence[Problem], place: int | None) -> str:
        which = printable(problems[place or 0].id)
        others = len(problems) - 1 if place is None else 0
        batch = f" (or one of {others} more in its batch)" if others else ""
        return f"reward {self.name}, problem {which}{batch}"


class _Process:
    """A started process and the socket that it is asked through."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: no file of the folder that somebody works in is taken for a library while gpuherd is imported
            command = [sys.executable, "-P", "-m", function_process.__name__, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**without(os.environ), **environment(())},
            )
        self._socket, self._buffer = ours, bytearray()
        self._exited = os.pidfd_open(self._process.pid)

    @property
    def has_ended(self) -> bool:
        """True once the process has ended."""
        return bool(_readable([self._exited], 0))

    @property
    def end(self) -> str:
        """How the process has ended, as the end of a sentence. What it forked ends too."""
        self._kill_group()
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a request and returns the reply. Raises TimeoutError, and EOFError, with how the process ended."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except ConnectionError:
            raise EOFError(self._ended(deadline)) from None
        while (length := self._buffer.find(b"\n")) < 0:
            socket_at = self._socket.fileno()
            ready = _readable([socket_at, self._exited], deadline - time.monotonic())
            if not ready:
                raise TimeoutError
            # A process that the function forked may hold the socket open behind an end.
            chunk = b""
            if socket_at in ready:
                with suppress(ConnectionError):  # it has ended without reading the request
                    chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise EOFError(self._ended(deadline))
            self._buffer += chunk
        line = bytes(self._buffer[:length])
        del self._buffer[: length + 1]
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """Lets the process end, then kills it with all that it started."""
        self._socket.close()
        _readable([self._exited], _ENDING_S)
        self._kill_group()
        self._process.wait()
        os.close(self._exited)

    def _kill_group(self) -> None:
        """Kills what it started; of one that has ended, the exit code stays."""
        with suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:  # not waited for: its number is no other group's yet
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self, deadline: float) -> str:
        if not _readable([self._exited], min(5.0, deadline - time.monotonic())):
            return "closed its connection"
        return self.end


def _readable(descriptors: Sequence[int], seconds: float) -> list[int]:
    """Those of the descriptors that can be read, or have ended; waits for one of them, at most so long."""
    waiting = select.poll()  # select() knows descriptors below 1024 alone
    for each in descriptors:
        waiting.register(each, select.POLLIN)
    return [each for each, _ in waiting.poll(max(0.0, seconds) * 1000)]
