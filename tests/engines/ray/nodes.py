"""The program of ``cluster.TwoNodes``: prints the addresses of its two nodes of Ray and does what it is told, a word a
line, until its standard input ends.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

GPUS = 4
_STORE_BYTES = 80 * 2**20


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
