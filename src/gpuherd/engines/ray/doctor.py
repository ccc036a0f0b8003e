"""Checks of Ray: its version, and the cluster of ``--ray-address``. Run as a program with an address, it joins that
cluster and prints as JSON how many nodes, GPUs and cores it has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from gpuherd.checks import CheckResult, Status, ask, version_of
from gpuherd.engines.ray.messages import Address, Kind, answers, resolve
from gpuherd.errors import GpuherdError

_GET_RAY = "pip install 'gpuherd[ray]'"
_RAY_WITHIN_S = 60.0


def find_ray(word: str | None) -> list[CheckResult]:
    """Ray, and the cluster of this --ray-address."""
    version = version_of("ray")
    if version is None:
        return [CheckResult("Ray", Status.FAIL, "not installed", _GET_RAY)]
    here = CheckResult("Ray", Status.OK, f"Ray {version}")
    try:
        address = resolve(word, os.environ)
    except GpuherdError as problem:
        return [here, CheckResult("Ray cluster", Status.FAIL, str(problem), "give --ray-address as it says")]
    if address.kind is Kind.OWN:
        detail = "none runs here; gpuherd starts one on this machine for as long as it works"
        return [here, CheckResult("Ray cluster", Status.SKIP, detail, "ray start --head, or --ray-address of another")]
    place = address.text.partition("://")[2].partition("/")[0] if address.kind is Kind.SERVER else address.text
    if address.kind is Kind.SERVER and ":" not in place:
        place += ":443" if address.text.startswith("https") else ":80"
    if not answers(place):
        remedy = "ray start --head starts one; a remote one is reached by its job server, http://HOST:8265"
        return [here, CheckResult("Ray cluster", Status.FAIL, f"nobody answers at {address.text}", remedy)]
    if address.kind is Kind.SERVER:
        return [here, CheckResult("Ray cluster", Status.OK, f"a job server answers at {address.text}")]
    answer = ask(__name__, [address.text], environment={}, timeout_s=_RAY_WITHIN_S)
    return [here, ray_cluster(address.text, answer.values, answer.error)]


def ray_cluster(address: str, told: Mapping[str, Any], error: str | None) -> CheckResult:
    """Judges the totals of a cluster that a process has joined (``look``)."""
    problem = error or told.get("error")
    if problem is not None:
        remedy = "both need the same versions of Ray and Python; see ray status on the cluster"
        return CheckResult("Ray cluster", Status.FAIL, f"{address}: {problem}", remedy)
    nodes = f"{told['nodes']} node{'s' if told['nodes'] != 1 else ''}"
    detail = f"{address}: {nodes}, {told['gpus']:g} GPUs, {told['cpus']:g} cores"
    if not told["gpus"]:
        remedy = "ray start --num-gpus N on the nodes that have some, if jobs want GPUs"
        return CheckResult("Ray cluster", Status.WARN, detail, remedy)
    return CheckResult("Ray cluster", Status.OK, detail)


def look(address: str) -> dict[str, Any]:
    """The totals of a cluster that this process joins and leaves."""
    from gpuherd.engines.ray.driver import connect, rooms

    try:
        cluster = connect(Address(Kind.JOINED, address), None)
        try:
            there = rooms()
        finally:
            cluster.leave()
    except GpuherdError as problem:
        return {"error": str(problem)}
    totals = [room.total for room in there]
    gpus, cores = (sum(total.get(name, 0.0) for total in totals) for name in ("GPU", "CPU"))
    return {"nodes": len(there), "gpus": gpus, "cpus": cores}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(sys.argv[1])) + "\n")
