"""The connection to Ray as the dispatcher uses it, and the channel to the process next to Ray."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from gpuherd.engines.base import Batch, EngineAway, EngineMissing, Placement, Sighting, Ticket
from gpuherd.engines.host import finding_us
from gpuherd.engines.ray.cluster import Address, ClusterKind, custom, resolve
from gpuherd.engines.ray.options import RayOptions
from gpuherd.engines.world import Join, Lead
from gpuherd.errors import UsageError

# --- the messages -----------------------------------------------------------------------------------------------------

# A question is the name of a method of ``tasks.Tasks`` or ``job_server.JobServer`` and its argument (``SETUP``: that
# makes one), an answer whether that went well, and its result or error. Both processes are ours and of one version, so
# all is pickled.

SETUP = "setup"
Question = tuple[str, Any]
Answer = tuple[bool, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to the process.

    Attributes:
        lead: leads an attempt in a worker of Ray: ``lead(manifest, index, stop, handle=…, others=…)``; a function that
            is importable from its module.
        join: runs another node's part of an attempt over several: ``join(manifest, index, world, stop)``; None
            without one.
        resources: custom resources of each parcel.
        notice_s: seconds before its time is up at which a parcel is asked to make room.
        folder: for the files of a cluster of our own; None for one that runs already.
    """

    address: Address
    lead: Lead
    join: Join | None
    resources: Mapping[str, float]
    notice_s: float
    folder: Path | None = None


def handle_of(batch: str, index: int) -> str:
    """A parcel's handle: known before Ray has it, so that a lost answer loses nothing."""
    return f"{batch}-{index}"


# --- the folder of a cluster of our own -------------------------------------------------------------------------------

# Its owner and the process next to Ray hold a lock on it: a folder
# without a lock was left by processes that were all killed at once, and is removed when the next one is made.

# Ray's sockets lie below it, and a socket's path must be short.
_PLACE = Path("/tmp")  # noqa: S108 - made by mkdtemp
_PREFIX = "gpuherd-ray."


class OwnFolder:
    """A new folder. Raises OSError where none can be made.

    Attributes:
        path: the folder.
        hold: the descriptor with the lock; a process that inherits it holds the lock too.
    """

    def __init__(self, place: Path = _PLACE):
        for left in place.glob(f"{_PREFIX}*"):
            _remove_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            try:
                self.hold = _locked(self.path, fcntl.LOCK_EX)
            except FileNotFoundError:
                continue
            if self.path.exists():
                return
            os.close(self.hold)  # another process took it for a leftover before we had the lock

    def remove(self) -> None:
        """Removes the folder and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.hold)


def _locked(path: Path, kind: int) -> int:
    """A descriptor of the folder with the lock. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_left(path: Path) -> None:
    try:
        if path.lstat().st_uid != os.geteuid():
            return
        descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or gone
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


# --- the channel to the process next to Ray ---------------------------------------------------------------------------

# Ray has a process of its own, apart from the dispatcher, because
# it ends its process when its head has gone, sets signal handlers and environment variables, and takes a second to
# import. When the dispatcher dies, that process notices it, ends what runs, and leaves Ray as it was.

# A cluster of our own starts in 5 s, on a busy machine in 20; Ray gives up joining one after 20 s.
_CONNECT_S = 120.0
_CLOSE_S = 60.0
_POLL_S = 0.5
_TAIL_BYTES = 4096
# Ray's libraries retry a refused token for 20 s, and report it only in their log.
_REFUSED_TOKEN = (b"InvalidAuthToken", b"Unauthenticated")


class Channel:
    """A process next to Ray that is connected. Raises as ``ask``, and UsageError for a token that is refused.

    Args:
        connect_s: time limit for connecting, in seconds.
    """

    def __init__(self, setup: Setup, connect_s: float = _CONNECT_S):
        self._address = setup.address
        try:
            self._folder = OwnFolder() if setup.address.kind is ClusterKind.OWN else None
        except OSError as problem:
            raise EngineAway(f"can't make a folder for Ray in /tmp: {problem.strerror}") from problem
        ours, theirs = Pipe()
        self._connection = ours
        # Closed by ``close``: holds Ray's output, for when the process has died.
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
            raise EngineAway(f"can't start the process next to Ray: {problem}") from problem
        finally:
            theirs.close()
        try:
            self.ask(SETUP, replace(setup, folder=None if self._folder is None else self._folder.path), connect_s)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process next to Ray."""
        return self._process.pid

    def ask(self, method: str, argument: object, within_s: float) -> Any:
        """The result of a method there. Raises what it raises, and EngineAway when no answer comes;
        then the channel can't be used any more."""
        try:
            self._connection.send((method, argument))
            self._wait(method == SETUP and self._address.kind is ClusterKind.JOINED, within_s)
            answer: Answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.wait()
            said = self._tail()
            self.end()
            raise EngineAway(f"Ray has ended our connection{f': {said}' if said else ''}") from None
        well, result = answer
        if not well:
            raise result
        return result

    def close(self) -> None:
        """Leaves Ray as it was found: what runs is ended with its grace, a cluster of our own is shut down."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self.end()

    def end(self) -> None:
        """As ``close``, at once."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._sweep()

    @property
    def ended(self) -> bool:
        """Whether it can't be used any more."""
        return self._connection.closed

    def _wait(self, joining: bool, within_s: float) -> None:
        until = time.monotonic() + within_s
        while not self._connection.poll(min(_POLL_S, max(0.0, until - time.monotonic()))):
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
    """The message for a refused authentication token."""
    return (
        f"{who} wants an authentication token, and ours is not the one; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH to the cluster's token (on its head node: ray get-auth-token)"
    )


def _environment(*, own: bool) -> dict[str, str]:
    """The environment that Ray reads when it is imported. A cluster of our own gets a new token: else Ray would make
    one in the user's home folder."""
    environment = {**finding_us(os.environ), "RAY_USAGE_STATS_ENABLED": "0"}
    if own:
        environment.pop("RAY_ADDRESS", None)
        if environment.setdefault("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in environment:
            environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return environment


# --- the connection ---------------------------------------------------------------------------------------------------

_ASK_S = 60.0
# The job server takes a request for each parcel.
_PARCEL_S = 1.0
_LOOK_S = 0.25
# The job server reads all jobs that it ever had for each query, each from the head's store.
_SERVER_LOOK_S = 2.0


class RayEngine:
    """Tasks of a Ray cluster, or jobs of its job server. It connects at the first query.

    ``chains`` is False: a task of Ray lives no longer than its driver, and its job server knows no order, so no job
    would follow another while no dispatcher runs.

    Args:
        options: the cluster's address and the resources of each job. Raises UsageError for wrong ones.
        lead: leads an attempt in a worker of Ray (``jobs.remote.agent.lead``); a function that is
            importable from its module, since the worker imports it.
        join: the same for the other nodes of an attempt over several (``jobs.remote.agent.join``); without it no job
            spans nodes.
    """

    name = "ray"
    chains = False
    remembers_s = 0.0

    def __init__(self, options: RayOptions, lead: Lead, join: Join | None = None):
        self._setup = Setup(
            address=resolve(options.ray_address, os.environ),
            lead=lead,
            join=join,
            resources=custom(options.ray_resources),
            notice_s=options.notice,
        )
        self.look_s = _SERVER_LOOK_S if self._setup.address.kind is ClusterKind.SERVER else _LOOK_S
        self._channel: Channel | None = None
        # One process answers, one query after the other, from whichever thread.
        self._asks = threading.Lock()

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """As ``Engine.check``. Raises EngineMissing without Ray, UsageError for a cluster of another version, one that
        refuses our token, and one whose nodes lack gpuherd."""
        refused: Mapping[Placement, str] = self._ask("check", tuple(dict.fromkeys(wanted)))
        return refused

    def submit(self, batch: Batch) -> Sequence[str]:
        """As ``Engine.submit``."""
        handles: Sequence[str] = self._ask("submit", batch, _ASK_S + _PARCEL_S * len(batch.parcels))
        return handles

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """As ``Engine.look``."""
        attempts = {each.handle or handle_of(each.batch, each.index): each.attempt for each in tickets}
        seen: Mapping[str, Sighting] = self._ask("look", tuple(attempts))
        return {attempts[handle]: sighting for handle, sighting in seen.items()}

    def cancel(self, handles: Collection[str]) -> None:
        """As ``Engine.cancel``. A job gets its grace; on a second call Ray ends its worker, and the guardian the
        rest."""
        if handles:
            self._ask("cancel", tuple(handles), _ASK_S + _PARCEL_S * len(handles))

    def close(self) -> None:
        """Leaves the cluster. Tasks are ended, as Ray would do anyway; jobs of the job server go on."""
        with self._asks:
            channel, self._channel = self._channel, None
            if channel is not None and not channel.ended:
                channel.close()

    def _ask(self, method: str, argument: object, within_s: float = _ASK_S) -> Any:
        with self._asks:
            if self._channel is None or self._channel.ended:
                if find_spec("ray") is None:
                    raise EngineMissing("Ray is not installed here; pip install 'gpuherd[ray]' brings it")
                self._channel = Channel(self._setup)
            return self._channel.ask(method, argument, within_s)
