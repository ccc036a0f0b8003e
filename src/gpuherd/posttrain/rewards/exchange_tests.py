"""The program that runs the tests of an answer in the sandbox, and reports each (``exchange``).

python -c SOURCE REPORTS SOCKET      reads what is to be tested from standard input
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from gpuherd.posttrain.rewards.exchange import ARITHMETIC, COMPARISONS, Codec, SocketPeer

_LONGEST = 500  # characters of a message
_LONGEST_VALUE = 1 << 16
_ANSWER_ENDED = 3  # exit code where the answer's process ended


class Remote:
    """An object of the answer, in the process of the tests."""

    __slots__ = ("__weakref__", "_exchange", "_mixed", "_named", "_number")

    def __init__(self, exchange: Tests, number: int, named: bool) -> None:
        for name, value in (("_exchange", exchange), ("_number", number), ("_named", named), ("_mixed", False)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name == "__deepcopy__":  # which is looked for here, and not in the class
            return lambda _: _do(self, "deepcopy")
        return _do(self, "getattr", name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _do(self, "call", arguments, named)

    def __contains__(self, value: Any) -> bool:
        if _is_remote(value) or _slot(self, "_named"):
            return bool(_do(self, "contains", value))
        own: Any = self
        return any(each is value or each == value for each in own)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(_do(self, "isinstance_of", value))

    def __subclasscheck__(self, value: Any) -> bool:
        return bool(_do(self, "issubclass_of", value))

    def __enter__(self) -> Any:
        return self.__enter__()

    def __exit__(self, *problem: Any) -> Any:
        return self.__exit__(None, None, None) if problem[0] is None else self.__exit__(*problem[:2], None)

    def __format__(self, spec: str) -> str:
        return str(_do(self, "format", spec))


def _slot(remote: Any, name: str) -> Any:
    return object.__getattribute__(remote, name)


def _is_remote(value: Any) -> bool:
    return issubclass(type(value), Remote)


def _do(remote: Any, what: str, *values: Any) -> Any:
    exchange: Tests = _slot(remote, "_exchange")
    if what in ("isinstance_of", "issubclass_of"):
        return exchange.ask(what.removesuffix("_of"), values[0], remote)
    return exchange.ask(what, remote, *values)


def _passed_on(what: str) -> Callable[..., Any]:
    """What is done with the object is done there."""

    def pass_on(self: Any, *values: Any) -> Any:
        return _do(self, what, *values)

    return pass_on


def _converted(what: str) -> Callable[..., Any]:
    """An operator of one operand: what comes of mixing with the tests' data can't become plain data again."""

    def convert(self: Any, *values: Any) -> Any:
        found = _do(self, what, *values)
        if _slot(self, "_mixed"):
            if not _is_remote(found):
                raise TypeError(f"{what}() of a value that an answer's operator made of the tests' data")
            object.__setattr__(found, "_mixed", True)
        return found

    return convert


def _combined(what: str, *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    """An operator of two operands."""

    def combine(self: Any, other: Any) -> Any:
        pair = (other, self) if reflected else (self, other)
        exchange: Tests = _slot(self, "_exchange")
        if _is_remote(other):
            found = exchange.ask(what, *pair)
            mixed = _slot(self, "_mixed") or _slot(other, "_mixed")
        elif not _slot(self, "_named"):
            return NotImplemented
        else:
            found, mixed = exchange.ask(what, *pair), True
            if not _is_remote(found):
                raise TypeError(f"an answer's {what} with the tests' data gives plain data, which it decides by itself")
        if mixed and _is_remote(found):
            object.__setattr__(found, "_mixed", True)
        return found

    return combine


def _compared(what: str) -> Callable[[Any, Any], Any]:
    """A comparison: the answer's among its own objects, else that of plain values."""

    def compare(self: Any, other: Any) -> Any:
        exchange: Tests = _slot(self, "_exchange")
        if _is_remote(other):
            return exchange.ask(what, self, other)
        plain = NotImplemented if _slot(self, "_mixed") else exchange.ask("plain", self, plain=True)
        return NotImplemented if plain is NotImplemented or _is_remote(plain) else getattr(operator, what)(plain, other)

    return compare


for _name in ("setattr", "delattr", "iter", "next", "getitem", "setitem", "delitem", "copy", "dir"):
    setattr(Remote, f"__{_name}__", _passed_on(_name))
for _name in COMPARISONS:
    setattr(Remote, f"__{_name}__", _compared(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__{_name.rstrip('_')}__", _combined(_name))
    setattr(Remote, f"__r{_name.rstrip('_')}__", _combined(_name, reflected=True))
for _name in (
    *("neg", "pos", "invert", "index", "abs", "bool", "float", "complex", "int", "len", "round", "reversed"),
    *("str", "repr", "hash"),
):
    setattr(Remote, f"__{_name}__", _converted(_name))


class Tests:
    """The process of the tests: its names, and how objects of the answer look here."""

    def __init__(self, socket: int) -> None:
        self.name_classes = False  # the tests do, so that an object may be of a class that they name
        self._remotes: dict[int, Any] = {}
        self.codec = Codec(self._remote, lambda value: _slot(value, "_number") if _is_remote(value) else None)
        self.channel = SocketPeer(socket, self.codec, self._perform)

    def ask(self, what: str, *values: Any, plain: bool = False) -> Any:
        """Sends a request to the answer and returns the result. Ends this process where the answer's has ended."""
        try:
            return self.channel.ask(what, *values, plain=plain)
        except EOFError:
            os._exit(_ANSWER_ENDED)
        except (StopIteration, StopAsyncIteration, GeneratorExit) as problem:
            if what in ("next", "send"):
                raise
            # Raised by a call it would end the loop of a test, as if there were no more to be tested.
            raise RuntimeError(f"the answer raised {type(problem).__name__}") from None

    def _perform(self, what: str, *values: Any) -> Any:
        """Serves the answer: calls of functions that the tests passed to it, and the next items of their iterators."""
        if (
            what in ("call", "next") and id(values[0]) in self.codec.kept.numbers
        ):  # no class that it knows by name alone
            return next(values[0]) if what == "next" else values[0](*values[1], **values[2])
        raise PermissionError(f"{what} of something of the tests")

    def _remote(self, node: dict[str, Any]) -> Any:
        number = int(node["mine"])
        if number not in self._remotes:
            remote: Any = Remote(self, number, self.name_classes and bool(node["named"]))
            if node["what"] == "generator":
                remote = _generator(self, remote)
            elif node["what"] == "coroutine":
                remote = _coroutine(self, remote)
            self._remotes[number] = remote
        return self._remotes[number]


def _generator(exchange: Tests, remote: Any) -> Generator[Any, Any, Any]:
    sent = None
    while True:
        try:
            item = exchange.ask("send", remote, sent)
        except StopIteration as end:
            return end.value
        sent = yield item


async def _coroutine(exchange: Tests, remote: Any) -> Any:
    return exchange.ask("await", remote)


class Names(dict[str, Any]):
    """The names of the tests: their own, then the answer's, then what is built in.

    What is built in comes first, unless it is one function and the tests name nothing else that an answer could have
    made (a task whose function is to be called ``sum``). Modules of the standard library are the real ones.
    """

    def __init__(self, exchange: Tests, sources: Sequence[str]) -> None:
        super().__init__(__name__="answer")
        self._exchange = exchange
        self.used, self._modules = _names_in(sources)

    def open_names(self) -> frozenset[str]:
        """Names that the tests use and neither they nor the language have."""
        return frozenset(each for each in self.used if each not in self and not hasattr(builtins, each))

    def __missing__(self, name: str) -> Any:
        found = [(each, getattr(builtins, each, None)) for each in self.used]
        functions = [each for each, value in found if callable(value) and not isinstance(value, type)]
        if hasattr(builtins, name) and (self.open_names() or functions != [name]):
            raise KeyError(name)
        if name in self._modules and name in sys.stdlib_module_names:
            return importlib.import_module(name)
        there, value = self._exchange.ask("name", name)
        if not there:
            raise KeyError(name)
        return value


def _names_in(sources: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that sources use and do not make, and those whose attributes they use."""
    import ast  # slow, and the answer does without

    used: set[str] = set()
    made: set[str] = set()
    modules: set[str] = set()
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name):
                    (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    made.add(node.name)
                elif isinstance(node, ast.arg):
                    made.add(node.arg)
                elif isinstance(node, ast.alias):
                    made.add((node.asname or node.name).partition(".")[0])
                elif isinstance(node, ast.ExceptHandler) and node.name:
                    made.add(node.name)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    modules.add(node.value.id)
    return frozenset(used - made), frozenset(modules)


class _Module(types.ModuleType):
    """The answer as a module that the tests may import."""

    def __init__(self, names: Names) -> None:
        super().__init__("answer")
        self._names = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(f"the answer has no {name}") from None


def run_tests(reports: int, socket: int) -> None:
    """Runs tests and reports each: a line of a number that was read with them, the place, the kind, a message."""
    told = json.loads(_read(int(_read(8), 16)))
    exchange = Tests(socket)
    names = Names(exchange, told["tests"])
    sys.modules["answer"], sys.argv = _Module(names), ["answer.py"]

    def report(place: int, kind: str, message: str = "") -> None:
        os.write(reports, f"{told['nonce']} {place} {kind} {json.dumps(message)}\n".encode())

    def failed(place: int, problem: BaseException) -> None:
        kind = "assertion" if isinstance(problem, AssertionError) else "error"
        text = str(problem) if kind == "assertion" else f"{type(problem).__name__}: {problem}"
        report(place, kind, text[:_LONGEST])

    try:
        exchange.channel.receive()  # it has started
        os.write(reports, told["nonce"].encode() + b"\n")
    except EOFError:
        os._exit(_ANSWER_ENDED)
    try:
        _run(told["before"], "<before>", names)
        with contextlib.suppress(Exception):  # the beginning of a program, which may be none by itself
            _run(told["given"], "<given>", names)
        names.pop(told["entry"], None)
        shared = [name for name, each in names.items() if isinstance(each, type) and each.__module__ == "answer"]
        exchange.codec.names, exchange.codec.shared = names, frozenset(shared)
        named = sorted(names.open_names())
        # As classes are written: of tests that name functions alone an answer can't say that they name its class.
        exchange.name_classes = any(each[:1].isupper() for each in named)
        exchange.ask("load", told["before"], told["code"], shared, named)
    except BaseException as problem:
        failed(-1, problem)
        os._exit(1)
    report(-1, "passed")
    for place, source in enumerate(told["tests"]):
        try:
            _run(source, "<test>", names)
        except BaseException as problem:
            failed(place, problem)
        else:
            report(place, "passed")
    for place, (name, arguments) in enumerate(told["calls"], len(told["tests"])):
        try:
            found, function = exchange.ask("name", name)
            if not found:
                raise KeyError(name)
            text = json.dumps(function(*arguments))
        except BaseException as problem:
            report(place, "error", f"{type(problem).__name__}: {problem}"[:_LONGEST])
        else:
            report(place, "value", text) if len(text) <= _LONGEST_VALUE else report(place, "error", "a huge value")
    sys.stdout.flush()
    os._exit(0)


def _run(source: str, name: str, names: dict[str, Any]) -> None:
    exec(compile(source, name, "exec", 0, True), names)  # noqa: S102 - without this file's own future features


def _read(count: int) -> bytes:
    found = b""
    while len(found) < count and (chunk := os.read(0, count - len(found))):
        found += chunk
    return found
