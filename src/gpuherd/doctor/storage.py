"""Looks at what gpuherd reads and writes: options as JSON and back, the settings files, disk space, the folder of
leases, the simulation's compiler.

Judging is pure; the ``find_`` functions look.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.doctor.result import CheckResult, Status
from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.gpus.lease import LeaseFolder
from gpuherd.jobs.settings import load

if TYPE_CHECKING:
    from gpuherd.esd.config import ExperimentConfig

LEAST_GB = 10.0


def config_round_trip(config: ExperimentConfig) -> CheckResult:
    """Whether a config comes back equal from JSON, the way it takes to a worker and into a run's record."""
    name = "config"
    remedy = "report this: options would reach workers changed; a fresh installation may mend it"
    try:
        back = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    except (TypeError, ValueError, GpuherdError) as problem:
        return CheckResult(name, Status.FAIL, f"options do not survive JSON: {problem}", remedy)
    if back != config:
        return CheckResult(name, Status.FAIL, f"options come back changed from JSON: {back} for {config}", remedy)
    return CheckResult(name, Status.OK, "options come back unchanged from JSON")


def find_settings() -> CheckResult:
    """Whether the user's settings and the machine's policy can be used."""
    name = "settings"
    try:
        settings = load()
    except UsageError as problem:
        return CheckResult(name, Status.FAIL, str(problem), "correct that file: until then no job can be started")
    if settings.warnings:
        return CheckResult(name, Status.WARN, "; ".join(settings.warnings), "ask who looks after this machine")
    files = [str(path) for path in (settings.path, settings.policy.path) if path is not None]
    return CheckResult(name, Status.OK, f"read from {' and '.join(files)}" if files else "no settings files; defaults")


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads."""
    home = os.environ.get("HF_HOME")
    base = home or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    # expanduser of a user without a home leaves the ~, where Path's would raise.
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{base}/hub"))  # noqa: PTH111


def find_free_gb(path: Path) -> tuple[Path, float]:
    """The nearest folder above ``path`` that exists, and the GB (2^30 bytes) that this user may still write there."""
    there = path.absolute()
    while not there.is_dir():
        there = there.parent
    return there, shutil.disk_usage(there).free / (1 << 30)


def disk(what: str, folder: Path, free_gb: float, *, writable: bool) -> CheckResult:
    """Judges the room for ``what`` (models, results)."""
    name = f"disk for {what}"
    if not writable:
        return CheckResult(name, Status.WARN, f"{folder} can't be written", _move(what))
    detail = f"{free_gb:.1f} GB free in {folder}"
    if free_gb < LEAST_GB:
        return CheckResult(name, Status.WARN, f"{detail}, less than {LEAST_GB:.0f} GB", f"make room, or {_move(what)}")
    return CheckResult(name, Status.OK, detail)


def _move(what: str) -> str:
    return "set HF_HOME to another disk" if what == "models" else "give another folder: --output-dir DIR"


def find_leases() -> CheckResult:
    """Whether GPUs can be leased in the machine's folder: takes and frees one of a GPU that does not exist."""
    name = "leases"
    try:
        folder = LeaseFolder.default()
        lease = folder.acquire(f"doctor-{os.getuid()}")
    except (CannotWrite, UsageError) as problem:
        return CheckResult(name, Status.FAIL, str(problem), "repair or remove that folder, or set GPUHERD_LEASE_DIR")
    if lease is not None:
        lease.close()
    return CheckResult(name, Status.OK, f"GPUs are leased in {folder.path}")


def compiler(words: list[str] | None) -> CheckResult:
    """Judges the C compiler that ``--simulate`` needs; nothing else does."""
    name = "simulation"
    if words is None:
        remedy = "pip install 'gpuherd[simulate]' brings a compiler, if you want to simulate GPUs"
        return CheckResult(name, Status.SKIP, "no C compiler: --simulate does not work", remedy)
    return CheckResult(name, Status.OK, f"--simulate can compile its driver with {' '.join(words)}")
