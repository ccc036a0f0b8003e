"""Workers of rounds that import torch and transformers once for all: four seconds of a job's five on a CPU.

``Prefork`` starts a server that has imported them, and writes a program that stands in for ``sys.executable``. Asked to
run the worker for a collection or an evaluation it has the server fork a process that does the job, and stands for it:
signals go on to that process, its exit code comes back, and it is killed in the instant that the program is. All else,
trainings among it, the program leaves to Python itself. (For processes that a test starts itself: ``tests.forking``.)
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from gpuherd.posttrain.runs.worker import MODULE

_CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
if words[:3] != ["-P", "-m", {module!r}] or words[words.index("--job") + 1].endswith("_train"):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
asked = json.dumps([words[3:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [asked], [0, 1, 2])
pid = int(server.recv(100))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(int(server.recv(100) or 70))
"""
_MOST = 1 << 17  # bytes of words and environment


class Prefork:
    """The server, while the context lasts.

    Attributes:
        python: the program that stands in for ``sys.executable``.
    """

    def __init__(self, folder: Path):
        self.python = folder / "python"
        self._address = str(folder / "server")

    def __enter__(self) -> Self:
        text = _CLIENT.format(python=sys.executable, module=MODULE, address=self._address)
        self.python.write_text(text)
        self.python.chmod(0o700)
        words = [sys.executable, "-m", __name__, self._address]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def serve(address: str) -> NoReturn:
    """Forks a worker for each program that asks."""
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    import gpuherd.lm.guidance.classifier
    import gpuherd.lm.model
    import gpuherd.models.load.loading
    import gpuherd.posttrain.eval.divergence
    import gpuherd.posttrain.eval.evaluation
    import gpuherd.posttrain.eval.metrics
    import gpuherd.posttrain.rollout.sampler  # noqa: F401

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    print("ready", flush=True)
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _do(client)
        client.close()


def _do(client: socket.socket) -> NoReturn:
    """Does the job that a program stands for, in this process."""
    from gpuherd.posttrain.runs.worker import main
    from gpuherd.runs.worker import unbuffered

    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        asked, given, _, _ = socket.recv_fds(client, _MOST, 3)
        words, environment, folder = json.loads(asked)
        for number, descriptor in enumerate(given):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = [MODULE, *words]
        client.send(str(os.getpid()).encode())
        threading.Thread(target=_die_with, args=(client,), daemon=True).start()
        unbuffered()
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        client.send(str(code).encode())
    finally:
        os._exit(code)


def _die_with(client: socket.socket) -> None:
    """Kills this process when the program that stands for it has ended."""
    client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
