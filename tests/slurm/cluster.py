"""A real SLURM on this machine for as long as a test needs it: Debian's packages, its own folder, ports and keys.

Each node is a slurmd in namespaces of its own (processes, host name, mounts; and a network, where they are to stand
apart), so that a node can be killed as a whole, with all that runs on it, and nothing is left when a cluster ends.
GPUs are character devices that SLURM hands out; nothing looks into them. Needs root.

By hand: ``python -m tests.slurm.cluster up DIR [--nodes N] [--apart] [--no-accounting]``, then
``export SLURM_CONF=DIR/etc/slurm.conf``; and ``python -m tests.slurm.cluster down DIR``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.aftermath import Aftermath
from tests.ports import AddressInUse, free_ports
from tests.processes import LEASH, SPACES, born, children
from tests.slurm.configuration import Layout, Plan

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "setpriv", "mknod")
PACKAGES = "slurm-wlm slurmctld slurmd slurmdbd munge mariadb-server-core iproute2"
_ACCOUNTING = ("slurmdbd", "mariadbd", "sacctmgr")
_PATIENCE_S = 60.0

# Runs as the first process of a node, in its namespaces: $1 the cluster's folder, $2 the node, $3 "apart" or "".
_NODE = """
mount --bind "$1/etc/hosts" /etc/hosts
hostname "$2"
if [ -n "$3" ]; then
    touch "$1/run/$2.ready-for-a-network"
    until [ -e "$1/run/$2.has-a-network" ]; do sleep 0.02; done
fi
slurmd -D -f "$1/etc/slurm.conf" -N "$2" &
# The first process of a namespace takes the orphans in; a shell that waits also buries them.
while true; do wait; sleep 1; done
"""


class Unavailable(Exception):
    """This machine can't have a cluster; the message says why."""


def why_not(*, accounting: bool = True) -> str | None:
    """Why there can be no cluster here, None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a test cluster needs Linux and root"
    missing = [each for each in (*PROGRAMS, *(_ACCOUNTING if accounting else ())) if shutil.which(each) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install --no-install-recommends {PACKAGES}"
    return None


@dataclass
class _Daemon:
    """A process that the cluster started."""

    name: str
    process: subprocess.Popen[bytes]


@dataclass
class Cluster:
    """A cluster that is up. ``environment`` is what its commands need; everything of it lies in ``folder``. ``tied``:
    its processes end with this one, however that ends.
    """

    layout: Layout
    tied: bool = True
    daemons: dict[str, _Daemon] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """All of its files."""
        return self.layout.folder

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes."""
        return self.layout.names

    def command(self, *words: str, check: bool = True) -> str:
        """What a command of SLURM's prints."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}\n{self.logs()}")
        return done.stdout

    def logs(self) -> str:
        """The last lines of every log, for a test that has failed."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def start_controller(self) -> None:
        """Starts slurmctld and waits until it answers."""
        self._start("slurmctld", ["slurmctld", "-D", "-f", self.environment["SLURM_CONF"]])
        self._wait(lambda: self.command("scontrol", "ping", check=False).find("is UP") >= 0, "slurmctld")
        # SLURM 22.05 never gets back the GPUs of jobs that it starts after a restart and before their node has
        # registered anew, seconds later; so the nodes are asked at once.
        self.command("scontrol", "reconfigure", check=False)

    def wait_until_saved(self, *names: str) -> None:
        """Waits until the controller would remember jobs of these names after a crash; it saves every few seconds."""
        path = self.folder / "state" / "job_state"
        self._wait(lambda: path.exists() and all(name.encode() in path.read_bytes() for name in names), str(path))

    def stop_controller(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Ends slurmctld, as for a restart; SIGKILL for a crash."""
        self._stop("slurmctld", sign)

    def start_node(self, node: str) -> None:
        """Starts a node's slurmd in namespaces of its own."""
        for mark in ("ready-for-a-network", "has-a-network"):
            (self.folder / "run" / f"{node}.{mark}").unlink(missing_ok=True)
        apart = self.layout.network is not None
        spaces = [*SPACES, *(["--net"] if apart else [])]
        self._start(node, [*spaces, "bash", "-c", _NODE, "node", str(self.folder), node, "apart" if apart else ""])
        if apart:
            ready = self.folder / "run" / f"{node}.ready-for-a-network"
            self._wait(ready.exists, f"{node}'s namespaces")
            self._join(node)
            (self.folder / "run" / f"{node}.has-a-network").touch()

    def kill_node(self, node: str) -> None:
        """As if its power had gone: no process of the node lives on, nothing tells the controller."""
        self._stop(node, signal.SIGKILL)

    def wait_for_nodes(self, *states: str) -> None:
        """Waits until every node is in one of the states (default: ready for jobs)."""
        wanted = states or ("idle", "mixed", "allocated")

        def there() -> bool:
            found = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
            return len(found) == self.layout.plan.nodes and all(state in wanted for state in found)

        self._wait(there, f"nodes in state {' or '.join(wanted)}")

    def stop(self, *names: str) -> None:
        """Kills these nodes and daemons, or all there is. Safe to call twice."""
        for name in names or [*self.names, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            self._stop(name, signal.SIGKILL)
        if not names and self.layout.network is not None:
            for device in self.devices:
                subprocess.run(["ip", "link", "del", device], capture_output=True)

    @property
    def bridge(self) -> str:
        """The bridge's name on this machine."""
        return f"ghs{self.layout.ports['slurmctld']}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Its network devices on this machine: the bridge, and a cable to each node."""
        if self.layout.network is None:
            return ()
        return (self.bridge, *(f"{self.bridge}{node}" for node in self.names))

    # --- up

    def start(self) -> None:
        """Writes the configuration and starts everything."""
        for name in ("etc", "spool", "state", "log", "run", "dev", "db"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        for number in range(self.layout.plan.gpus):
            device = self.folder / "dev" / f"nvidia{number}"
            done = subprocess.run(["mknod", "-m", "666", str(device), "c", "1", "3"], capture_output=True, text=True)
            if done.returncode != 0:
                raise Unavailable(f"no device files can be made here: {done.stderr.strip()}")
        self.layout.write()
        if self.layout.network is not None:
            self._ip("link", "add", self.bridge, "type", "bridge")
            self._ip("addr", "add", f"{self.layout.address('')}/24", "dev", self.bridge)
            self._ip("link", "set", self.bridge, "up")
        run, etc = self.folder / "run", self.folder / "etc"
        key = etc / "munge.key"
        key.write_bytes(random.randbytes(128))
        key.chmod(0o400)
        if self.layout.plan.accounting:
            database = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={self.folder / 'db'}"]
            database += [f"--socket={run / 'my.sock'}", "--bind-address=127.0.0.1", "--skip-grant-tables"]
            database += [f"--port={self.layout.ports['database']}", "--innodb-flush-log-at-trx-commit=0"]
            database += [f"--init-file={etc / 'tables.sql'}"]
            self._start("mariadbd", [*database, "--innodb-buffer-pool-size=64M", f"--pid-file={run / 'my.pid'}"])
        secrets = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={run / 'munge.sock'}"]
        self._start("munged", [*secrets, f"--pid-file={run / 'munged.pid'}", f"--seed-file={run / 'munge.seed'}"])
        self._wait((run / "munge.sock").is_socket, "munged")
        if self.layout.plan.accounting:
            self._wait((run / "my.sock").is_socket, "mariadbd")
            self._start("slurmdbd", ["slurmdbd", "-D"])
            self._wait(lambda: _answers(self.layout.ports["slurmdbd"]), "slurmdbd")
            self.command("sacctmgr", "-i", "load", str(etc / "accounts"))
            self.command("sacctmgr", "-i", "add", "qos", "short")
        for node in self.names:
            self.start_node(node)
        self.start_controller()
        self.wait_for_nodes()
        (self.folder / "cluster.json").write_text(
            json.dumps(
                {
                    "processes": {each.name: [each.process.pid, born(each.process.pid)] for each in self._alive()},
                    "devices": self.devices,
                }
            )
        )

    def _join(self, node: str) -> None:
        pid = self.daemons[node].process.pid
        cable = f"{self.bridge}{node}"
        self._ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._ip("link", "set", cable, "master", self.bridge, "up")
        inside = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{self.layout.address(node)}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run([*inside, *words], check=True, capture_output=True)

    def _ip(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise Unavailable(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def _start(self, name: str, words: Sequence[str]) -> None:
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **self.environment}
        leash = LEASH if self.tied else ()
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                [*leash, *words],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.daemons[name] = _Daemon(name, process)

    def _stop(self, name: str, sign: signal.Signals) -> None:
        daemon = self.daemons.pop(name, None)
        if daemon is None:
            return
        # The first process of a node's namespaces, with which all others of the node end.
        first = children(daemon.process.pid) if name in self.names else {}
        with suppress(ProcessLookupError):
            daemon.process.send_signal(sign)
        daemon.process.wait(_PATIENCE_S)
        while any(born(pid) == began for pid, began in first.items()):
            time.sleep(0.01)

    def _alive(self) -> Iterator[_Daemon]:
        return (each for each in self.daemons.values() if each.process.poll() is None)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            dead = [name for name, each in self.daemons.items() if each.process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = self.logs()
                kind = AddressInUse if dead and "already in use" in logs.lower() else RuntimeError
                raise kind(f"waited for {what}; ended: {dead}\n{logs}")
            time.sleep(0.05)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def prepare(folder: Path, plan: Plan, *, tied: bool = True) -> Cluster:
    """A cluster with ports of its own, not yet started."""
    reason = why_not(accounting=plan.accounting)
    if reason is not None:
        raise Unavailable(reason)
    names = ["slurmctld", "slurmdbd", "database", *(f"n{number}" for number in range(1, plan.nodes + 1))]
    network = f"10.{random.randint(100, 250)}.{random.randint(0, 250)}" if plan.apart else None
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    return Cluster(Layout(folder, plan, ports, network), tied)


@contextmanager
def cluster(plan: Plan) -> Iterator[Cluster]:
    """A cluster in a folder of its own that every user of this machine can read; gone without a trace afterwards."""
    made = None
    while made is None:
        with suppress(AddressInUse), ExitStack() as cleanup:
            folder = Path(tempfile.mkdtemp(prefix="gpuherd-slurm-", dir="/tmp"))
            try:
                prepared = prepare(folder, plan)
            except Unavailable:
                folder.rmdir()
                raise
            cleanup.callback(Aftermath(folder, *prepared.devices).sweep)
            cleanup.enter_context(prepared).start()
            made, remains = prepared, cleanup.pop_all()
    with remains:
        yield made


def take_down(folder: Path) -> None:
    """Ends a cluster that another process started, and removes its folder."""
    known = json.loads((folder / "cluster.json").read_text())
    for pid, began in known["processes"].values():
        if born(pid) == began:
            os.kill(pid, signal.SIGKILL)
    for pid, began in known["processes"].values():
        deadline = time.monotonic() + _PATIENCE_S
        while born(pid) == began and time.monotonic() < deadline:
            time.sleep(0.02)
    for device in known["devices"]:
        subprocess.run(["ip", "link", "del", device], capture_output=True)
    shutil.rmtree(folder)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> int:
    """``up`` and ``down`` by hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description=__doc__)
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--apart", action="store_true", help="each node in a network of its own")
    parser.add_argument("--no-accounting", action="store_true", help="without slurmdbd: sacct is switched off")
    args = parser.parse_args()
    folder = args.folder.absolute()
    if args.action == "down":
        take_down(folder)
        return 0
    plan = Plan(nodes=args.nodes, gpus=args.gpus, apart=args.apart, accounting=not args.no_accounting)
    try:
        prepared = prepare(folder, plan, tied=False)
        prepared.start()
    except Unavailable as problem:
        print(problem, file=sys.stderr)
        return 1
    except BaseException:
        prepared.stop()
        raise
    print(f"export SLURM_CONF={prepared.environment['SLURM_CONF']}")
    sys.stdout.flush()
    os._exit(0)  # The daemons stay; they are not ours any more.


if __name__ == "__main__":
    sys.exit(main())
