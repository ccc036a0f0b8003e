"""The process that a reward function of the user's runs in; ``function`` starts it. Standard library alone.

    python -P -m gpuherd.posttrain.rewards.function_process SOCKET PARENT

Requests and replies are lines of JSON through the socket. What the function prints goes to standard error. The process
ends when the socket is closed, and with the process PARENT.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RESERVED = ("completions", "prompts", "answers", "ids")  # arguments that no column takes the place of
RIGHT = "it must return a list with one finite number for each completion"
_ROUNDING = 1e-4  # of a model that computes in batches
_SHOWN = 200  # characters of a message


def main(descriptor: int, parent: int) -> None:
    """Loads a function and calls it, a request a line, until the socket is closed."""
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what is printed goes to the log
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=descriptor)
    served, own = _Served(), os.getpid()
    with channel.makefile("rb") as requests:
        for line in requests:
            reply = served.reply(json.loads(line))
            if os.getpid() != own:  # forked by the function, and come back from it: only one process replies
                os._exit(0)
            channel.sendall(json.dumps(reply).encode() + b"\n")


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is busy with, when the one that started it has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)  # the session is this process's own


class _Served:
    """A function that was loaded, and how it is called."""

    def __init__(self) -> None:
        self._function: Callable[..., Any]
        self._parameters: Mapping[str, inspect.Parameter] = {}

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; ``problem`` is a sentence, ``place`` the index of the completion that it is about."""
        if "load" in request:
            return self._load(*request["load"])
        if "columns" in request:
            return self._fitting(request["columns"])
        found = self._called(request["batch"], quiet=request["quiet"])
        if request["alone"] and "problem" not in found:
            first = {name: values[:1] for name, values in request["batch"].items()}
            alone = self._called(first, quiet=True)
            if "problem" in alone:
                return alone
            both = found["rewards"][0], alone["rewards"][0]
            if not math.isclose(*both, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
                found["alone"] = both
        return found

    def _load(self, place: str, name: str) -> dict[str, Any]:
        try:
            module = import_place(place)
        except BaseException as problem:
            print_traceback(problem)
            return {"problem": f"{place} can't be imported: {described(problem)}"}
        if not hasattr(module, name):
            names = [each for each, value in vars(module).items() if inspect.isfunction(value) and each[0] != "_"]
            known = f"; it has {', '.join(names)}" if names else ""
            return {"problem": f"{place} has no function {name}{known}"}
        self._function = getattr(module, name)
        if not callable(self._function) or inspect.iscoroutinefunction(self._function):
            kind = "async" if callable(self._function) else type(self._function).__name__
            return {"problem": f"{name} is no plain function but {kind}; {RIGHT}"}
        try:
            self._parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError):  # of a class written in C
            return {"problem": f"{name} doesn't say which arguments it takes; wrap it in a function with **columns"}
        files = {place} if place.endswith(".py") else {getattr(module, "__file__", None), _file_of(self._function)}
        return {"sha256": digest(files)}

    def _fitting(self, columns: Sequence[str]) -> dict[str, Any]:
        """Empty where the function can be called with these columns, else the problem."""
        given = [*RESERVED, *columns]
        if self._positional is None and "completions" not in self._parameters and not self._takes_all:
            name = getattr(self._function, "__name__", "score")
            return {"problem": f"it takes no completions; write def {name}(completions, **columns)"}
        for name, each in self._parameters.items():
            needed = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
            if (needed and name not in given and name != self._positional) or (
                each.kind is each.POSITIONAL_ONLY and each.default is each.empty and name != self._positional
            ):
                return {"problem": f"it needs an argument {name}, and the data set has {', '.join(given)}"}
        return {}

    @property
    def _takes_all(self) -> bool:
        return any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())

    @property
    def _positional(self) -> str | None:
        """The argument that completions are passed by in place, where that can't be done by name: the first one."""
        first = next(iter(self._parameters.values()), None)
        if first is None or (first.name != "completions" and "completions" in self._parameters):
            return None
        if first.name == "completions":
            return first.name if first.kind is first.POSITIONAL_ONLY else None
        takes = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.VAR_POSITIONAL)
        return first.name if first.kind in takes and first.name not in RESERVED else None

    def _called(self, batch: dict[str, list[Any]], *, quiet: bool) -> dict[str, Any]:
        """The rewards of a batch."""
        given = {name: each for name, each in batch.items() if self._takes_all or name in self._parameters}
        first = []
        if self._positional is not None:
            first = [batch["completions"]]
            given = {name: each for name, each in given.items() if name not in ("completions", self._positional)}
        try:
            return _read(self._function(*first, **given), len(batch["completions"]))
        except BaseException as problem:
            if not quiet:
                traceback.print_exc()
            return {"problem": f"it raised {described(problem)}", "place": None}


def import_place(place: str, *, first: bool = True) -> Any:
    """The module of a file that ends in ``.py``, or of a dotted name.

    Args:
        first: what it imports is looked for in its folder (of a name in the current one) before anywhere else, as of a
            script; False: behind all else, so that nothing there takes the place of a library.
    """
    folder = str(Path(place).parent if place.endswith(".py") else Path.cwd())
    sys.path.insert(0 if first else len(sys.path), folder)
    return _module_of(Path(place)) if place.endswith(".py") else importlib.import_module(place)


def _module_of(file: Path) -> types.ModuleType:
    """A file as a module, never from compiled files."""
    module = types.ModuleType(file.stem if file.stem not in sys.modules else f"own_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    return module


def _file_of(function: Any) -> str | None:
    """The file that a function is written in, which may be another than that of the module that it was found in."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else str(code.co_filename)


def digest(files: Iterable[str | None]) -> str:
    """SHA-256 of the contents of these files, wherever they lie; None and what can't be read left out."""
    digest = hashlib.sha256()
    for path in sorted((Path(each) for each in files if each is not None), key=lambda each: (each.name, str(each))):
        with suppress(OSError):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _read(returned: Any, count: int) -> dict[str, Any]:
    """The returned value as rewards, or the problem with it."""
    if inspect.iscoroutine(returned):
        returned.close()
    if not isinstance(returned, list | tuple) and callable(getattr(returned, "tolist", None)):  # an array, a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return {"problem": f"it returned {_short(returned)}", "place": None}
    if len(returned) != count:
        wanted = "1 completion" if count == 1 else f"{count} completions"
        return {"problem": f"it returned {len(returned)} rewards of {wanted}", "place": None}
    rewards: list[float] = []
    for place, each in enumerate(returned):
        try:
            value = math.nan if isinstance(each, str | bytes) or each is None else float(each)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            return {"problem": f"it returned {_short(each)} as a reward", "place": place}
        rewards.append(value)
    return {"rewards": rewards}


def _short(value: Any) -> str:
    """A value of the function's for a message: itself where it is plain, else its type."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"a {type(value).__name__}"


def described(problem: BaseException, caller: str = __file__) -> str:
    """An exception and the line of the user's file that it came from, for a message.

    Args:
        caller: the file that has called the user's code.
    """
    name = f"SystemExit ({problem.code})" if isinstance(problem, SystemExit) else type(problem).__name__
    text = "" if isinstance(problem, SystemExit) else _one_line(str(problem))
    own = _own_frames(problem, caller)
    in_file = [each for each in own if each.filename == own[0].filename]
    line = f" ({Path(in_file[-1].filename).name}, line {in_file[-1].lineno})" if own else ""
    return f"{name}{f': {text[:_SHOWN]}' if text else ''}{line}"


def _one_line(text: str) -> str:
    """A text of the user's in one line, without signs that can't be seen: of a log the last line is told."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(text.split()))


def print_traceback(problem: BaseException, caller: str = __file__) -> None:
    """An exception's traceback to standard error, where it came out of the user's code and not of finding it; arguments
    as of ``described``."""
    if _own_frames(problem, caller):
        traceback.print_exception(problem)


def _own_frames(problem: BaseException, caller: str) -> list[traceback.FrameSummary]:
    ours = (__file__, caller, importlib.__file__)
    frames = traceback.extract_tb(problem.__traceback__)
    return [each for each in frames if each.filename not in ours and not each.filename.startswith("<frozen")]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
