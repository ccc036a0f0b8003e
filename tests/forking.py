"""Python programs in processes of their own that import nothing anew: forks of one process that has imported it once.

For tests of what a process prints, writes and returns. An import of torch costs two seconds of CPU, of transformers
one more; a fork costs some milliseconds. Not for tests of what is imported, nor of the interpreter's start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_SERVER = """
import atexit, gc, importlib, json, os, runpy, sys, traceback
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
gc.freeze()
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
else:
    sys.exit()
for number, path in enumerate((asked["in"], asked["out"], asked["err"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["env"])
sys.argv = ["", *asked["argv"]]
sys.orig_argv = [sys.executable, *sys.argv]
code = 0
try:
    if asked["module"]:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    else:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    traceback.print_exc()
    code = 1
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(code)  # the end of an interpreter with torch takes a third of a second
"""


class Program:
    """A program that was started."""

    def __init__(self, server: Forking, folder: tempfile.TemporaryDirectory[str], pid: int):
        self._server, self._folder, self.pid = server, folder, pid

    def end(self) -> subprocess.CompletedProcess[str]:
        """Waits for its end."""
        code = self._server.ask({"wait": self.pid})
        out, err = (Path(self._folder.name, name).read_bytes().decode() for name in ("out", "err"))
        self._folder.cleanup()
        return subprocess.CompletedProcess([], code, out, err)


class Forking:
    """A process with these modules, and with the environment that libraries look at when they are loaded."""

    def __init__(self, *modules: str, **environment: str):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, json.dumps(modules)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> Forking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, message: Mapping[str, object]) -> int:
        """The server's answer to a message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(
        self,
        *,
        module: str | None = None,
        code: str = "",
        words: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        given: str | None = None,
    ) -> Program:
        """Starts a module as a program, or code, with this whole environment, in this folder (by default in ours), and
        with this text as its input (by default none).
        """
        folder = tempfile.TemporaryDirectory()
        out, err = (f"{folder.name}/{name}" for name in ("out", "err"))
        asked: dict[str, object] = {
            "module": module,
            "code": code,
            "argv": list(words),
            "env": dict(os.environ if env is None else env),
        }
        source = os.devnull
        if given is not None:
            source = f"{folder.name}/in"
            Path(source).write_text(given)
        asked |= {"cwd": str(cwd or os.getcwd()), "in": source, "out": out, "err": err}
        return Program(self, folder, self.ask(asked))
