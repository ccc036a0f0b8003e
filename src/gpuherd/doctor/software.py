"""Judges what is installed: Python, gpuherd, its libraries, and the build of torch. Pure but for ``installed``."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from gpuherd import __version__
from gpuherd.doctor.child import Answer
from gpuherd.doctor.result import CheckResult, Status
from gpuherd.gpus.state import Machine

CORE = ("nvidia-ml-py", "psutil", "rich", "shtab")
ESD = ("huggingface_hub", "numpy", "scipy")
_ADD_ESD = "pip install 'gpuherd[esd]'"


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """Version of each distribution, None for one that is not there."""
    versions: dict[str, str | None] = {}
    for name in names:
        versions[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def python() -> CheckResult:
    """Says what runs here."""
    detail = f"gpuherd {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return CheckResult("gpuherd", Status.OK, detail)


def libraries(versions: Mapping[str, str | None]) -> CheckResult:
    """Judges the libraries that gpuherd needs (``CORE``) and those of the spectral analysis (``ESD``)."""
    detail = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return CheckResult("libraries", Status.OK, detail)
    detail = f"not installed: {', '.join(missing)}" + (f" (there are {detail})" if detail else "")
    if any(name in CORE for name in missing):
        return CheckResult("libraries", Status.FAIL, detail, f"pip install {' '.join(missing)}")
    return CheckResult("libraries", Status.WARN, f"{detail}; gpuherd esd needs them", _ADD_ESD)


def torch_build(version: str | None, answer: Answer, machine: Machine, *, simulated: bool) -> CheckResult:
    """Judges torch: is it there, does it start, and is its build one for this machine?

    Args:
        version: of the installed distribution, None if there is none.
        answer: of ``gpuherd.doctor.torch_build``, run without CUDA_VISIBLE_DEVICES.
    """
    if version is None:
        return CheckResult("torch", Status.WARN, "torch is not installed; gpuherd esd needs it", _ADD_ESD)
    reinstall = f"pip install --force-reinstall torch=={version.partition('+')[0]}"
    if answer.error is not None:
        return CheckResult("torch", Status.FAIL, f"torch {version} does not start: {answer.error}", reinstall)
    build: Mapping[str, Any] = answer.values
    cuda: str | None = build["cuda"]
    kind = f"torch {build['version']}, " + (f"built for CUDA {cuda}" if cuda else "CPU-only build")
    if simulated:
        return CheckResult("torch", Status.OK, f"{kind}; on simulated GPUs it runs on the CPU")
    if not machine.gpus:
        return CheckResult("torch", Status.OK, f"{kind}; runs on the CPU here")
    if cuda is None:
        detail = f"{kind}, though this machine has an NVIDIA driver: models would run on the CPU"
        return CheckResult("torch", Status.FAIL, detail, reinstall)
    if build["available"]:
        return CheckResult("torch", Status.OK, f"{kind}, sees {build['devices']} GPUs")
    if machine.cuda_version is not None and _major(cuda) > _major(machine.cuda_version):
        detail = f"{kind}, but the driver supports CUDA only up to {machine.cuda_version}"
        return CheckResult("torch", Status.FAIL, detail, f"install an NVIDIA driver for CUDA {cuda} or later")
    detail = f"{kind}, but it finds no GPU though the driver lists {len(machine.gpus)}"
    remedy = "in a container start it with all GPU devices; else reboot, or reload the nvidia and nvidia_uvm modules"
    return CheckResult("torch", Status.FAIL, detail, remedy)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
