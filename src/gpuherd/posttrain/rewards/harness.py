"""The program that runs in the sandbox: reads what is to be run, runs it, and reports. It knows nothing of gpuherd.

It is handed to the interpreter as text (``python -c``), with the number of the pipe that it reports to. Each report
is a line of a number, the place, the kind and a message as JSON; the number is read with the code and told to
nobody, so that a test that ``os._exit(0)`` leaves early, or a line that the code writes itself, is no success. Code
that takes the interpreter apart to find it can still cheat where tests are statements, and so can a value that says it
is equal to everything; ``call`` and ``input`` tests are compared outside, from what came back.
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
    nonce, reports, as_main = told["nonce"], int(sys.argv[1]), told["as_main"]
    # By names of its own: the code may change what the built-in ones mean, and must not change what a test does.
    write, dumps, execute, translate, length = os.write, json.dumps, exec, compile, len
    leaving, wrong, anything, kind_of, text_of = SystemExit, AssertionError, BaseException, type, str
    tests = [(place, source) for place, source in enumerate(told["tests"])]
    calls = [(place, *call) for place, call in enumerate(told["calls"], len(tests))]

    def report(place: int, kind: str, message: str = "") -> None:
        write(reports, f"{nonce} {place} {kind} {dumps(message)}\n".encode())

    write(reports, nonce.encode() + b"\n")  # it runs now
    module = types.ModuleType("__main__" if as_main else "answer")
    names = module.__dict__
    sys.modules[module.__name__] = module
    sys.argv = ["answer.py"]

    def failed(place: int, problem: BaseException) -> None:
        report(place, "error", f"{kind_of(problem).__name__}: {problem}"[:_LONGEST])

    def run(place: int, source: str, name: str) -> bool:
        try:
            execute(translate(source, name, "exec", 0, True), names)  # without this file's own future features
        except wrong as problem:
            report(place, "assertion", text_of(problem)[:_LONGEST])
        except leaving as problem:
            if as_main and problem.code in (None, 0):
                return True
            failed(place, problem)
        except anything as problem:
            failed(place, problem)
        else:
            return True
        return False

    def call(place: int, name: str, arguments: list[object]) -> None:
        try:
            text = dumps(names[name](*arguments))
        except anything as problem:
            failed(place, problem)
        else:
            report(place, "value", text) if length(text) <= _LONGEST_VALUE else report(place, "error", "a huge value")

    if told["before"] and not run(-1, told["before"], "<before>"):
        return
    if not run(-1, told["code"], "<answer>"):
        sys.stderr.write("the code raised\n")
        sys.stdout.flush()
        os._exit(1)
    report(-1, "passed")
    for place, source in tests:
        if run(place, source, "<test>"):
            report(place, "passed")
    for place, name, arguments in calls:
        call(place, name, arguments)


_main()
