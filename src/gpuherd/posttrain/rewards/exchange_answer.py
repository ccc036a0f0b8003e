"""The program that runs an answer in the sandbox, and does with its objects what the tests request (``exchange``).

python -c SOURCE SOCKET
"""

from __future__ import annotations

import copy
import importlib
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from gpuherd.posttrain.rewards.exchange import ARITHMETIC, COMPARISONS, CONTAINERS, Codec, SocketPeer

_PLAIN = (int, float, str, complex, bytes, tuple, frozenset, *CONTAINERS.values())
_ON_OBJECTS: Mapping[str, Callable[..., Any]] = {
    **{each: getattr(operator, each) for each in (*ARITHMETIC, *COMPARISONS, "neg", "pos", "invert", "index")},
    **{each.__name__: each for each in (abs, bool, dir, float, complex, hash, int, iter, len, next, repr, reversed)},
    **{each.__name__: each for each in (round, str, format, getattr, setattr, delattr, isinstance, issubclass)},
    "divmod": divmod,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "call": lambda function, arguments, named: function(*arguments, **named),
    "send": lambda generator, value: generator.send(value),
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
    "plain": lambda value: value if isinstance(value, _PLAIN) else NotImplemented,
}


class _Passed:
    """A function or an iterator of the tests, in the answer's process."""

    def __init__(self, channel: SocketPeer, number: int) -> None:
        self._channel, self.number = channel, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", self, arguments, named)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._channel.ask("next", self)


def run_answer(socket: int) -> NoReturn:
    """Runs the code of an answer, and serves the requests of the tests."""
    module = types.ModuleType("answer")
    names = module.__dict__
    sys.modules["answer"], sys.argv = module, ["answer.py"]
    subjects: tuple[type, ...] = ()

    def load(before: str, code: str, shared: Sequence[str], named: Sequence[str]) -> None:
        nonlocal subjects
        codec.names = names
        for source, name in ((before, "<before>"), (code, "<answer>")):
            exec(compile(source, name, "exec", 0, True), names)  # noqa: S102 - what the sandbox is for
        codec.shared = frozenset(shared)
        subjects = tuple(each for name in named if isinstance(each := names.get(name), type))

    def perform(what: str, *values: Any) -> Any:
        if what == "load":
            load(*values)
            return None
        if what == "name":
            return (True, names[values[0]]) if values[0] in names else (False, None)
        return _ON_OBJECTS[what](*values)

    codec = Codec(
        lambda node: _Passed(channel, node["mine"]),
        lambda value: value.number if type(value) is _Passed else None,
        lambda value: isinstance(value, subjects),
    )
    channel = SocketPeer(socket, codec, perform)
    channel.send({"hello": True})
    try:
        channel.serve()
    finally:
        os._exit(0)


def main(words: Sequence[str]) -> NoReturn:
    """The program."""
    run_answer(int(words[0]))
