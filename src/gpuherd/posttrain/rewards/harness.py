"""The program that runs in the sandbox: reads what is to be run, runs it, and reports. It knows nothing of gpuherd.

It is handed to the interpreter as text (``python -c``), with the number of the pipe that it reports to. Each report
begins with a number that it reads with the code and tells nobody, so that a test that ``os._exit(0)`` leaves early, or
a line that the code writes itself, is no success. Code that takes the interpreter apart to find that number can still
cheat where tests are statements; ``call`` and ``input`` tests are compared outside, from what came back.
"""

from __future__ import annotations

import json
import os
import sys
import types

_LONGEST = 500  # characters of a message
_LONGEST_VALUE = 1 << 16


def _read(count: int) -> bytes:
    found = b""
    while len(found) < count and (chunk := os.read(0, count - len(found))):
        found += chunk
    return found


def _main() -> None:
    told = json.loads(_read(int(_read(8), 16)))
    nonce, reports, write, dumps = told["nonce"], int(sys.argv[1]), os.write, json.dumps

    def report(place: int, kind: str | None, message: str = "") -> None:
        write(reports, f"{nonce} {dumps([place, kind, message])}\n".encode())

    write(reports, nonce.encode() + b"\n")  # it runs now
    module = types.ModuleType("__main__" if told["as_main"] else "answer")
    sys.modules[module.__name__] = module
    sys.argv = ["answer.py"]

    def run(place: int, source: str, name: str) -> bool:
        try:
            exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102 - what this process is for
        except AssertionError as problem:
            report(place, "assertion", str(problem)[:_LONGEST])
        except BaseException as problem:
            if isinstance(problem, SystemExit) and problem.code in (None, 0) and told["as_main"]:
                return True
            report(place, "error", f"{type(problem).__name__}: {problem}"[:_LONGEST])
        else:
            return True
        return False

    def call(place: int, name: str, arguments: list[object]) -> None:
        try:
            text = dumps(module.__dict__[name](*arguments))
        except BaseException as problem:
            report(place, "error", f"{type(problem).__name__}: {problem}"[:_LONGEST])
        else:
            report(place, "value", text) if len(text) <= _LONGEST_VALUE else report(place, "error", "a huge value")

    if told["before"] and not run(-1, told["before"], "<before>"):
        return
    if not run(-1, told["code"], "<answer>"):
        sys.stderr.write("the code raised\n")
        sys.stdout.flush()
        os._exit(1)
    report(-1, None)
    for place, source in enumerate(told["tests"]):
        if run(place, source, "<test>"):
            report(place, None)
    for place, (name, arguments) in enumerate(told["calls"], len(told["tests"])):
        call(place, name, arguments)


_main()
