"""Three hosts with Ray on one machine: a network namespace each, joined by a bridge, each with its name, address and
Ray node. A host dies as a real one does: all that runs there is gone at once, with nobody left to tell of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.patience import wait_until

NAMES = ("h1", "h2", "h3")
_PORT = 6379
_STORE_BYTES = 80 * 2**20


def possible() -> bool:
    """Whether this machine lets us make hosts."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    name = f"gt{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True)
    subprocess.run(["ip", "link", "del", name], capture_output=True)
    spaces = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True)
    return made.returncode == 0 and spaces.returncode == 0


@dataclass
class Host:
    """A host, kept by one process that does nothing."""

    name: str
    address: str
    keeper: subprocess.Popen[bytes]

    def words(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` there."""
        place = f"/proc/{self.keeper.pid}/ns"
        return ["nsenter", f"--net={place}/net", f"--uts={place}/uts", *argv]

    def die(self) -> None:
        """Ends all that runs there, all at once."""
        with suppress(FileNotFoundError):
            space = os.stat(f"/proc/{self.keeper.pid}/ns/net").st_ino
            while found := [pid for pid in _pids() if pid != self.keeper.pid and _space(pid) == space]:
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.keeper.kill()
        self.keeper.wait()


class ThreeHosts:
    """A Ray cluster over three hosts with ``gpus`` GPUs each that are only counted; the first is its head."""

    def __init__(self, gpus: int):
        # Ray's sockets lie below it, and a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="gpuherd-test-", dir="/tmp"))
        self._bridge = f"gt{secrets.token_hex(3)}"
        self._net = f"10.{1 + secrets.randbelow(254)}.{secrets.randbelow(255)}"
        self._token = secrets.token_hex(32)
        self._starts: list[subprocess.Popen[bytes]] = []
        self.hosts: list[Host] = []
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for number, name in enumerate(NAMES, 1):
            self.hosts.append(self._host(name, number))
        self.address = f"{self.hosts[0].address}:{_PORT}"
        for host in self.hosts:
            self._ray(host, gpus)

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

    def _host(self, name: str, number: int) -> Host:
        ready = f"hostname {name} && exec sleep infinity"
        keeper = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", ready], start_new_session=True)
        host = Host(name, f"{self._net}.{number}", keeper)
        wait_until(lambda: _space(keeper.pid) not in (None, _space(os.getpid())))
        wait_until(
            lambda: subprocess.run(host.words(["hostname"]), capture_output=True).stdout.strip() == name.encode()
        )
        cable = f"{self._bridge}{number}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
        _ip("link", "set", cable, "master", self._bridge, "up")
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{host.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run(host.words(["ip", *words]), check=True)
        return host

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
        for host in self.hosts:
            host.die()
        for started in self._starts:
            started.wait()
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _space(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None
