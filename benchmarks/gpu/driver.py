"""The GPUs that we read from NVML beside what nvidia-smi and CUDA say of them, and what ``doctor`` finds."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from benchmarks._peers import Absent
from benchmarks.gpu import Measurement, gpu_names, gpuherd

# What nvidia-smi calls each figure of ours.
FIELDS = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "total_mb": "memory.total",
    "used_mb": "memory.used",
    "pci_bus_id": "pci.bus_id",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}
# These change from one moment to the next: how far the two may be apart.
ALLOWED = {"used_mb": 512.0, "temperature_c": 8.0, "power_w": 150.0}


def measure(_quick: bool) -> Iterator[Measurement]:
    """Both tables side by side, CUDA's names, and the doctor's checks."""
    yield Measurement("nvidia_smi", beside_nvidia_smi)
    yield Measurement("cuda", beside_cuda)
    yield Measurement("doctor", doctor)


def beside_nvidia_smi() -> dict[str, Any]:
    """How many GPUs both see, and the seconds that each takes. Raises ValueError where a figure differs."""
    if shutil.which("nvidia-smi") is None:
        raise Absent("nvidia-smi: not on the PATH")
    started = time.perf_counter()
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
    shown = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    theirs_s, started = time.perf_counter() - started, time.perf_counter()
    ours = json.loads(gpuherd("gpus", "--json").stdout)["gpus"]
    ours_s = time.perf_counter() - started
    rows = [dict(zip(FIELDS, map(str.strip, row), strict=True)) for row in csv.reader(shown.splitlines())]
    theirs = {row["uuid"]: row for row in rows}
    mine = {gpu["uuid"]: gpu for gpu in ours if gpu["mig_parent"] is None}
    if theirs.keys() != mine.keys():
        raise ValueError(f"nvidia-smi shows {sorted(theirs)}, gpuherd {sorted(mine)}")
    differences = [
        f"GPU {row['index']}: {field} is {row[field]} by nvidia-smi and {mine[uuid][field]} by gpuherd"
        for uuid, row in theirs.items()
        for field in FIELDS
        if not same(field, row[field], mine[uuid][field])
    ]
    if differences:
        raise ValueError("; ".join(differences))
    return {"gpus": len(mine), "nvidia_smi_s": theirs_s, "gpuherd_s": ours_s}


def same(field: str, theirs: str, ours: Any) -> bool:
    """Whether a figure of nvidia-smi is ours; ``[N/A]`` is None.

    >>> same("total_mb", "143771", 143771), same("power_w", "[N/A]", None), same("used_mb", "10", 9000)
    (True, True, False)
    """
    if theirs.startswith("[") or ours is None:
        return theirs.startswith("[") and ours is None
    if field in ALLOWED:
        return abs(float(theirs) - float(ours)) <= ALLOWED[field]
    return theirs.lower() == str(ours).lower()


def beside_cuda() -> dict[str, Any]:
    """The names that CUDA shows. Raises ValueError where they are not those of the table."""
    ours = [gpu["name"] for gpu in json.loads(gpuherd("gpus", "--json").stdout)["gpus"] if gpu["mig_parent"] is None]
    if gpu_names() != ours:
        raise ValueError(f"CUDA shows {gpu_names()}, gpuherd {ours}")
    return {"names": ours}


def doctor() -> dict[str, Any]:
    """How many checks passed. Raises ValueError with those that failed."""
    checks = json.loads(gpuherd("doctor", "--json", check=False).stdout)["checks"]
    failed = [f"{check['name']}: {check['detail']}" for check in checks if check["status"] == "fail"]
    if failed:
        raise ValueError("; ".join(failed))
    return {status: sum(check["status"] == status for check in checks) for status in ("ok", "warn", "skip")}
