"""The program that runs code without tests in the sandbox, and reports how it ended. It knows nothing of gpuherd.

It is handed to the interpreter as text (``python -c``), with the number of the pipe that it reports to. A report is a
line of a number, the place (-1), the kind and a message as JSON; the number is read with the code. The code's
output is compared outside. (Tests that look into the code's module are run by ``exchange_tests``.)
"""

from __future__ import annotations

import json
import os
import sys
import types

_LONGEST = 500  # characters of a message


def _read(count: int) -> bytes:
    found = b""
    while len(found) < count and (chunk := os.read(0, count - len(found))):
        found += chunk
    return found


def _main() -> None:
    spec = json.loads(_read(int(_read(8), 16)))
    nonce, reports = spec["nonce"], int(sys.argv[1])
    # By names of its own: the code may change what the built-in ones mean.
    write, dumps, leaving, kind_of = os.write, json.dumps, SystemExit, type

    def report(kind: str, message: str = "") -> None:
        write(reports, f"{nonce} -1 {kind} {dumps(message)}\n".encode())

    write(reports, nonce.encode() + b"\n")  # it runs now
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["answer.py"]
    try:
        for source, name in ((spec["before"], "<before>"), (spec["code"], "<answer>")):
            # Without this file's own future features.
            exec(compile(source, name, "exec", 0, True), module.__dict__)  # noqa: S102 - what the sandbox is for
    except BaseException as problem:
        if not isinstance(problem, leaving) or problem.code not in (None, 0):
            report("error", f"{kind_of(problem).__name__}: {problem}"[:_LONGEST])
            sys.stderr.write("the code raised\n")
            sys.stdout.flush()
            os._exit(1)
    report("passed")


_main()
