"""The process beside Ray, from the follower's side. Ray has a process of its own, apart from the follower, because it
ends its process when its head has gone, sets signal handlers and environment variables, and takes a second to import.
When the follower dies, that process sees it, ends what runs, and leaves Ray as it was.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

from gpuherd.engines.cluster import EngineAway
from gpuherd.engines.python_path import finding_us
from gpuherd.engines.ray.address import Kind
from gpuherd.engines.ray.messages import Answer, Question, Setup, error_of
from gpuherd.engines.ray.own_folder import OwnFolder
from gpuherd.errors import UsageError

# A cluster of our own starts in 5 s, on a busy machine in 20; Ray gives up joining one after 20 s.
_CONNECT_S = 120.0
_CLOSE_S = 60.0
_LOOK_S = 0.5
_TAIL_BYTES = 4096
# Ray's libraries try a refused token again and again for 20 s, and say so only here.
_REFUSED_TOKEN = (b"InvalidAuthToken", b"Unauthenticated")


class Channel:
    """A process beside Ray that is connected. Raises as ``ask``, and UsageError for a token that is refused.

    Args:
        connect_s: the most that this may take.
    """

    def __init__(self, setup: Setup, connect_s: float = _CONNECT_S):
        self._address = setup.address
        try:
            self._folder = OwnFolder() if setup.address.kind is Kind.OWN else None
        except OSError as problem:
            raise EngineAway(f"can't make a folder for Ray in /tmp: {problem.strerror}") from problem
        ours, theirs = Pipe()
        self._connection = ours
        # Closed by ``close``: what Ray prints is read here when the process has died.
        self._log = tempfile.TemporaryFile(prefix="gpuherd-ray-")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpuherd.engines.ray.driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), *([] if self._folder is None else [self._folder.hold])),
                env=_environment(own=self._folder is not None),
                start_new_session=True,
            )
        except OSError as problem:
            ours.close()
            self._log.close()
            self._sweep()
            raise EngineAway(f"can't start the process beside Ray: {problem}") from problem
        finally:
            theirs.close()
        try:
            self.ask(replace(setup, folder=None if self._folder is None else self._folder.path), connect_s)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process beside Ray."""
        return self._process.pid

    def ask(self, question: Question, within_s: float) -> Any:
        """The answer. Raises what was raised there, and EngineAway when none comes; then the channel is of no use."""
        try:
            self._connection.send(question)
            self._wait(isinstance(question, Setup) and self._address.kind is Kind.JOINED, within_s)
            reply = self._connection.recv()
        except (EOFError, OSError):
            self._process.wait()
            said = self._tail()
            self.end()
            raise EngineAway(f"Ray has ended our connection{f': {said}' if said else ''}") from None
        if isinstance(reply, Answer):
            return reply.value
        raise error_of(reply)

    def close(self) -> None:
        """Leaves Ray as it was found: what runs is ended with its grace, a cluster of our own is shut down."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self.end()

    def end(self) -> None:
        """As ``close``, without patience."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._sweep()

    @property
    def ended(self) -> bool:
        """Whether it is of no use any more."""
        return self._connection.closed

    def _wait(self, joining: bool, within_s: float) -> None:
        until = time.monotonic() + within_s
        while not self._connection.poll(min(_LOOK_S, max(0.0, until - time.monotonic()))):
            if joining and any(word in self._tail_bytes() for word in _REFUSED_TOKEN):
                raise UsageError(refused_token("the Ray cluster"))
            if time.monotonic() >= until:
                self.end()
                who = f"what listens at {self._address.text}, if it is a Ray cluster," if joining else "Ray"
                raise EngineAway(f"{who} has not answered within {within_s:g} s")

    def _sweep(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    def _tail_bytes(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))

    def _tail(self) -> str:
        lines = self._tail_bytes().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def refused_token(who: str) -> str:
    """What to do about it."""
    return (
        f"{who} wants an authentication token, and ours is not the one; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH to the cluster's token (on its head node: ray get-auth-token)"
    )


def _environment(*, own: bool) -> dict[str, str]:
    """Ray reads it when it is imported. A cluster of our own gets a token of its own: else Ray would make one in the
    user's home folder."""
    environment = {**finding_us(os.environ), "RAY_USAGE_STATS_ENABLED": "0"}
    if own:
        environment.pop("RAY_ADDRESS", None)
        if environment.setdefault("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in environment:
            environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return environment
