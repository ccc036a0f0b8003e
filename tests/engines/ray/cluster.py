"""A real Ray cluster of two nodes on this machine, each with 4 GPUs that are only counted: run as a program, it prints
its addresses and does what it is told, a word a line, until its standard input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TOKEN = "0123456789abcdef" * 4
GPUS = 4
_STORE_BYTES = 80 * 2**20


class TwoNodes:
    """The cluster, from the side of a test. Nothing of it is left after the block, in /tmp/ray or elsewhere.

    Attributes:
        address, url: HOST:PORT of the cluster, and its job server.
    """

    def __init__(self, *, dashboard: bool = False):
        # Ray's sockets lie below it, and a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="gpuherd-test-", dir="/tmp"))
        # Ray gives a node 30 s to start, which a machine with much else to do may not keep.
        for last in (False, False, True):
            self._process = self._start(dashboard)
            try:
                told = json.loads(self._hear())
                break
            except AssertionError:
                self._end()
                if last:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    raise
        self.address: str = told["address"]
        self.url: str = told["url"]

    def _start(self, dashboard: bool) -> subprocess.Popen[str]:
        with (self._folder / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-P", __file__, *(["dashboard"] if dashboard else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
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
        shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    """The program."""
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": GPUS, "num_gpus": GPUS, "object_store_memory": _STORE_BYTES}
    head: dict[str, Any] = {**node, "include_dashboard": False}
    port = _free_port()
    if sys.argv[1:] == ["dashboard"]:
        head |= {"include_dashboard": True, "dashboard_port": port}
    # By default all clusters of a machine want one port here, and the job server needs it.
    cluster = Cluster(initialize_head=True, head_node_args={**head, "dashboard_agent_listen_port": _free_port()})
    second = cluster.add_node(**node, resources={"licence": 2})
    print(json.dumps({"address": cluster.address, "url": f"http://127.0.0.1:{port}"}), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "kill":
                cluster.remove_node(second, allow_graceful=False)
            case "add":
                second = cluster.add_node(**node, resources={"licence": 2})
            case word:
                _say_version(cluster.address, "1.2.3" if word == "other" else None)
        print("done", flush=True)
    cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _say_version(address: str, version: str | None) -> None:
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    said = {"ray_version": version or ray.__version__, "python_version": ".".join(map(str, sys.version_info[:3]))}
    GcsClient(address=address).internal_kv_put(b"CLUSTER_METADATA", json.dumps(said).encode(), True, b"cluster")


if __name__ == "__main__":
    main()
