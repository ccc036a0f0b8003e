"""A real Ray cluster of two nodes on this machine, each with 4 GPUs that are only counted (``nodes.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.aftermath import Aftermath

TOKEN = "0123456789abcdef" * 4
_PROGRAM = Path(__file__).with_name("nodes.py")


class TwoNodes:
    """The cluster, from the side of a test. Nothing of it is left after the block, in /tmp/ray or elsewhere.

    Attributes:
        address, url: HOST:PORT of the cluster, and its job server.
    """

    def __init__(self, *, dashboard: bool = False):
        # Ray's sockets lie below it, and a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="gpuherd-test-", dir="/tmp"))
        self._aftermath = Aftermath(self._folder)
        # Ray gives a node 30 s to start, which a machine with much else to do may not keep.
        for last in (False, False, True):
            self._process = self._start(dashboard)
            try:
                told = json.loads(self._hear())
                break
            except AssertionError:
                self._end()
                if last:
                    self._aftermath.sweep()
                    raise
        self.address: str = told["address"]
        self.url: str = told["url"]

    def _start(self, dashboard: bool) -> subprocess.Popen[str]:
        with (self._folder / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), *(["dashboard"] if dashboard else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                pass_fds=(self._aftermath.hold,),
                env={**os.environ, "RAY_TMPDIR": str(self._folder), **self.variables},
                start_new_session=True,
            )

    def _end(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()

    @property
    def variables(self) -> dict[str, str]:
        """By which it is reached."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}

    def tell(self, word: str) -> None:
        """``kill``: the second node dies with all that it runs. ``add``: there is a second node again. ``other`` and
        ``same``: the cluster says that it is of another version of Ray, or of its own."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._hear() == "done"

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError((self._folder / "log").read_text()[-4000:])
        return line.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self._aftermath.sweep()
