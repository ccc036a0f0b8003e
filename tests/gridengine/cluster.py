"""A real Grid Engine on this machine for as long as a test needs it: Debian's packages, its own folder and ports.

Each node is an ``sge_execd`` in namespaces of its own (processes, mounts, host name; and a network, where there are
several), so that a node can be killed as a whole, with all that runs on it, and nothing is left when a cluster ends.
GPUs are a consumable that Grid Engine counts; a prolog tells jobs which they have, as sites do. Needs root.

By hand: ``python -m tests.gridengine.cluster up DIR [--nodes N]``, then the line that it prints; and
``python -m tests.gridengine.cluster down DIR``.
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
from tests.gridengine.configuration import PROGRAMS, Layout, Plan
from tests.ports import AddressInUse, free_ports
from tests.processes import LEASH, SPACES, born, children

DAEMONS = ("sge_qmaster", "sge_execd", "sge_shepherd")
COMMANDS = ("qsub", "qstat", "unshare", "setpriv")
PACKAGES = "gridengine-master gridengine-exec gridengine-client"
_PATIENCE_S = 10.0

# Runs in a mount namespace, where the machine has the names that the cluster gives its hosts: $1 its folder.
_MASTER = """
mount --bind "$1/hosts.master" /etc/hosts
exec "$2/sge_qmaster"
"""
# Runs as the first process of a node, in its namespaces: $1 the cluster's folder, $2 the programs, $3 the node, $4
# "apart" or "".
_NODE = """
mount --bind "$1/hosts.node" /etc/hosts
if [ -n "$4" ]; then
    hostname "$3"
    touch "$1/$3.ready-for-a-network"
    until [ -e "$1/$3.has-a-network" ]; do sleep 0.02; done
fi
"$2/sge_execd" &
# The first process of a namespace takes the orphans in; a shell that waits also buries them.
while true; do wait; sleep 1; done
"""


class Unavailable(Exception):
    """This machine can't have a cluster; the message says why."""


def why_not() -> str | None:
    """Why there can be no cluster here, None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a test cluster needs Linux and root"
    missing = [each for each in COMMANDS if shutil.which(each) is None]
    missing += [each for each in DAEMONS if not (PROGRAMS / each).exists()]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install --no-install-recommends {PACKAGES}"
    try:
        socket.gethostbyname(os.uname().nodename)
    except OSError:
        return f"this machine does not resolve its own name {os.uname().nodename}"
    return None


@dataclass
class Cluster:
    """A cluster that is up. Everything of it lies in ``folder``. ``tied``: its processes end with this one, however
    that ends.
    """

    layout: Layout
    tied: bool = True
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """All of its files."""
        return self.layout.folder

    @property
    def environment(self) -> dict[str, str]:
        """What Grid Engine's programs need."""
        return self.layout.environment

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes."""
        return self.layout.names

    def command(self, *words: str, check: bool = True, text: str = "") -> str:
        """What a command of Grid Engine's prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            words, env=environment, input=text, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout

    def logs(self) -> str:
        """The last lines of every log, for a test that has failed."""
        parts = []
        for path in sorted([*self.folder.glob("*.out"), *self.folder.glob("spool/**/messages")]):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.relative_to(self.folder)}", *lines]))
        return "\n".join(parts)

    def start_master(self) -> None:
        """Starts sge_qmaster and waits until it answers."""
        words = ["unshare", "--mount", "sh", "-c", _MASTER, "qmaster", str(self.folder), str(PROGRAMS)]
        self._start("qmaster", words)
        self._wait(lambda: _answers(self.layout.ports["qmaster"]), "sge_qmaster's port")
        self._wait(lambda: self.command("qconf", "-sh", check=False).strip() != "", "sge_qmaster")

    def stop_master(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Ends sge_qmaster, as for a restart; SIGKILL for a crash."""
        self._stop("qmaster", sign)

    def start_node(self, node: str) -> None:
        """Starts a node's sge_execd in namespaces of its own."""
        for mark in ("ready-for-a-network", "has-a-network"):
            (self.folder / f"{node}.{mark}").unlink(missing_ok=True)
        apart = self.layout.network is not None
        spaces = [*SPACES, *(["--net"] if apart else [])]
        words = ["bash", "-c", _NODE, "node", str(self.folder), str(PROGRAMS), node, "apart" if apart else ""]
        self._start(node, [*spaces, *words])
        if apart:
            self._wait((self.folder / f"{node}.ready-for-a-network").exists, f"{node}'s namespaces")
            self._join(node)
            (self.folder / f"{node}.has-a-network").touch()

    def kill_node(self, node: str) -> None:
        """As if its power had gone: no process of the node lives on, nothing tells sge_qmaster."""
        self._stop(node, signal.SIGKILL)

    def wait_for_nodes(self) -> None:
        """Waits until every node has told its load, and so takes jobs."""

        def there() -> bool:
            rows = [line.split() for line in self.command("qhost", check=False).splitlines()[2:]]
            known = {row[0]: row[3] for row in rows if len(row) > 3}
            return all(known.get(node, "-") != "-" for node in self.names)

        self._wait(there, "all nodes' loads")

    def stop(self, *names: str) -> None:
        """Kills these nodes and daemons, or all there is. Safe to call twice."""
        for name in names or [*self.names, "qmaster"]:
            self._stop(name, signal.SIGKILL)
        if not names:
            for device in self.devices:
                subprocess.run(["ip", "link", "del", device], capture_output=True)

    @property
    def bridge(self) -> str:
        """The bridge's name on this machine."""
        return f"ghg{self.layout.ports['qmaster']}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Its network devices on this machine: the bridge, and a cable to each node."""
        if self.layout.network is None:
            return ()
        return (self.bridge, *(f"{self.bridge}{node}" for node in self.names))

    def start(self) -> None:
        """Writes the configuration and starts everything."""
        self.folder.chmod(0o755)
        self.layout.write()
        if self.layout.network is not None:
            self._ip("link", "add", self.bridge, "type", "bridge")
            self._ip("addr", "add", f"{self.layout.address(self.layout.master)}/24", "dev", self.bridge)
            self._ip("link", "set", self.bridge, "up")
        self.start_master()
        for queue in sorted((self.folder / "templates" / "cqueues").iterdir()):
            self.command("qconf", "-Aq", str(queue))
        for node in self.names:
            self.start_node(node)
        self.wait_for_nodes()
        self.command("qmod", "-d", "closed")
        processes = {name: [each.pid, born(each.pid)] for name, each in self.daemons.items()}
        (self.folder / "cluster.json").write_text(json.dumps({"processes": processes, "devices": self.devices}))

    def _join(self, node: str) -> None:
        pid = self.daemons[node].pid
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
        # SGE_ND: the daemons stay in the foreground.
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": path, "SGE_ND": "1", **self.environment}
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [*(LEASH if self.tied else ()), *words],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _stop(self, name: str, sign: signal.Signals) -> None:
        process = self.daemons.pop(name, None)
        if process is None:
            return
        # The first process of a node's namespaces, with which all others of the node end.
        first = children(process.pid) if name in self.names else {}
        with suppress(ProcessLookupError):
            process.send_signal(sign)
        process.wait(_PATIENCE_S)
        while any(born(pid) == began for pid, began in first.items()):
            time.sleep(0.01)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            dead = [name for name, each in self.daemons.items() if each.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = self.logs()
                kind = AddressInUse if dead and "can't bind" in logs.lower() else RuntimeError
                raise kind(f"waited for {what}; ended: {dead}\n{logs}")
            time.sleep(0.05)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def prepare(folder: Path, plan: Plan, *, tied: bool = True) -> Cluster:
    """A cluster with ports of its own, not yet started."""
    reason = why_not()
    if reason is not None:
        raise Unavailable(reason)
    # All nodes listen at one port: several need networks of their own.
    network = f"10.{random.randint(100, 250)}.{random.randint(0, 250)}" if plan.nodes > 1 else None
    ports = dict(zip(("qmaster", "execd"), free_ports(2), strict=True))
    return Cluster(Layout(folder, plan, ports, network), tied)


@contextmanager
def cluster(plan: Plan) -> Iterator[Cluster]:
    """A cluster in a folder of its own that every user of this machine can read; gone without a trace afterwards."""
    made = None
    while made is None:
        with suppress(AddressInUse), ExitStack() as cleanup:
            folder = Path(tempfile.mkdtemp(prefix="gpuherd-gridengine-", dir="/tmp"))
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
    parser = argparse.ArgumentParser(prog="python -m tests.gridengine.cluster", description=__doc__)
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8)
    args = parser.parse_args()
    folder = args.folder.absolute()
    if args.action == "down":
        take_down(folder)
        return 0
    try:
        prepared = prepare(folder, Plan(nodes=args.nodes, gpus=args.gpus), tied=False)
        folder.mkdir(parents=True, exist_ok=True)
        prepared.start()
    except Unavailable as problem:
        print(problem, file=sys.stderr)
        return 1
    except BaseException:
        prepared.stop()
        raise
    print(f"export {' '.join(f'{name}={value}' for name, value in prepared.environment.items())}")
    sys.stdout.flush()
    os._exit(0)  # The daemons stay; they are not ours any more.


if __name__ == "__main__":
    sys.exit(main())
