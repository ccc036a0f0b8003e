"""Three hosts with Ray on one machine: a network namespace each, joined by a bridge, each with its name, address and
Ray node. A host dies as a real one does: all that runs there is gone at once, with nobody left to tell of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.aftermath import Aftermath
from tests.patience import wait_until
from tests.processes import LEASH, SPACES, born, children

NAMES = ("h1", "h2", "h3")
_PORT = 6379
_STORE_BYTES = 80 * 2**20


def possible() -> bool:
    """Whether this machine lets us make hosts."""
    if os.geteuid() != 0 or any(shutil.which(each) is None for each in ("ip", "unshare", "setpriv")):
        return False
    name = f"gt{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True)
    subprocess.run(["ip", "link", "del", name], capture_output=True)
    spaces = subprocess.run([*SPACES, "--net", "true"], capture_output=True)
    return made.returncode == 0 and spaces.returncode == 0


@dataclass
class Host:
    """A host. ``first`` is the first process there, with which all others end; ``keeper`` has started it."""

    name: str
    address: str
    keeper: subprocess.Popen[bytes]
    first: int

    def words(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` there."""
        return ["nsenter", f"--target={self.first}", "--net", "--uts", "--pid", "--mount", *argv]

    def die(self) -> None:
        """Ends all that runs there, all at once."""
        self.keeper.kill()
        self.keeper.wait()
        wait_until(lambda: born(self.first) is None)


class ThreeHosts:
    """A Ray cluster over three hosts with ``gpus`` GPUs each that are only counted; the first is its head."""

    def __init__(self, gpus: int):
        # Ray's sockets lie below it, and a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="gpuherd-test-", dir="/tmp"))
        self._bridge = f"gt{secrets.token_hex(3)}"
        cables = [f"{self._bridge}{number}" for number in range(1, len(NAMES) + 1)]
        self._aftermath = Aftermath(self._folder, self._bridge, *cables)
        self._net = f"10.{1 + secrets.randbelow(254)}.{secrets.randbelow(255)}"
        self._token = secrets.token_hex(32)
        self._starts: list[subprocess.Popen[bytes]] = []
        self.hosts: list[Host] = []
        self.address = f"{self._net}.1:{_PORT}"
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(NAMES, 1):
                self._host(name, number)
            for host in self.hosts:
                self._ray(host, gpus)
        except BaseException:
            self.end()
            raise

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment in which its hosts work."""
        return {
            **os.environ,
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """The command, at work on the first host; all that it says is in its standard output."""
        return subprocess.Popen(
            self.hosts[0].words(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.variables,
            start_new_session=True,
        )

    def _host(self, name: str, number: int) -> None:
        # The first process of a namespace takes the orphans in; a shell that waits also buries them.
        script = 'hostname "$1" && echo && while true; do wait; sleep 1; done'
        keeper = subprocess.Popen(
            [*LEASH, *SPACES, "--net", "sh", "-c", script, "host", name], stdout=subprocess.PIPE, start_new_session=True
        )
        assert keeper.stdout is not None
        with keeper.stdout as told:
            told.readline()
        host = Host(name, f"{self._net}.{number}", keeper, *children(keeper.pid))
        self.hosts.append(host)
        cable = f"{self._bridge}{number}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(host.first))
        _ip("link", "set", cable, "master", self._bridge, "up")
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{host.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run(host.words(["ip", *words]), check=True)

    def _ray(self, host: Host, gpus: int) -> None:
        first = host is self.hosts[0]
        role = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if first else [f"--address={self.address}"]
        words = [
            *(str(Path(sys.executable).with_name("ray")), "start", *role, "--block"),
            *(f"--node-ip-address={host.address}", f"--num-gpus={gpus}", f"--num-cpus={max(2, gpus)}"),
            f"--object-store-memory={_STORE_BYTES}",
        ]
        log = self._folder / f"{host.name}.log"
        with log.open("wb") as out:
            started = subprocess.Popen(
                host.words(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.variables,
                start_new_session=True,
            )
        self._starts.append(started)
        wait_until(
            lambda: b"--block" in log.read_bytes() or started.poll() is not None, 120, 0.1, lambda: log.read_text()
        )
        assert started.poll() is None, log.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Nothing of it is left."""
        for host in self.hosts:
            host.die()
        for started in self._starts:
            started.wait()
        self._aftermath.sweep()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
