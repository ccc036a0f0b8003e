"""Joins the Ray cluster of its one argument, and prints as JSON how many nodes, GPUs and cores it has."""

from __future__ import annotations

import json
import sys
from typing import Any

from gpuherd.engines.ray.driver import connect, rooms
from gpuherd.engines.ray.messages import Address, Kind
from gpuherd.errors import GpuherdError


def look(address: str) -> dict[str, Any]:
    """Joins, looks, leaves."""
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
