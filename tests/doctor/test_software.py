"""What the doctor says of the libraries and of torch's build."""

from __future__ import annotations

from typing import Any

import pytest

from gpuherd.checks import Answer, CheckResult, Status, version_of
from gpuherd.doctor.checks import CORE, ESD, libraries, torch_build
from gpuherd.gpus.state import Gpu, Machine

ONE = Machine((Gpu(0, "GPU-0", "A100", total_mb=40_000, used_mb=0, free_mb=40_000),), "550.1", "12.4")
NONE = Machine(problem="no driver")
CPU = {"version": "2.13.0+cpu", "cuda": None, "available": False, "devices": 0}
CUDA = {"version": "2.13.0", "cuda": "12.4", "available": True, "devices": 1}


def judge(build: dict[str, Any], machine: Machine, *, simulated: bool = False) -> CheckResult:
    return torch_build(build["version"], Answer(build), machine, simulated=simulated)


@pytest.mark.parametrize(
    ("build", "machine", "simulated"), [(CPU, NONE, False), (CPU, ONE, True), (CUDA, ONE, False), (CUDA, NONE, False)]
)
def test_a_build_that_fits_the_machine_is_well(build: dict[str, Any], machine: Machine, simulated: bool) -> None:
    assert judge(build, machine, simulated=simulated).status is Status.OK


def test_a_cpu_build_beside_a_driver_is_wrong_and_says_what_to_install() -> None:
    result = judge(CPU, ONE)
    assert result.status is Status.FAIL
    assert result.remedy == "pip install --force-reinstall torch==2.13.0"


def test_a_build_newer_than_the_driver_is_wrong() -> None:
    result = judge({**CUDA, "cuda": "13.0", "available": False}, ONE)
    assert result.status is Status.FAIL
    assert "only up to 12.4" in result.detail
    assert result.remedy == "install an NVIDIA driver for CUDA 13.0 or later"


def test_a_right_build_that_finds_no_gpu_is_wrong() -> None:
    assert "finds no GPU" in judge({**CUDA, "available": False}, ONE).detail


def test_torch_that_does_not_start_is_wrong() -> None:
    result = torch_build("2.13.0+cu124", Answer(error="libcudart.so: cannot open"), ONE, simulated=False)
    assert (result.status, result.remedy) == (Status.FAIL, "pip install --force-reinstall torch==2.13.0")
    assert "libcudart.so" in result.detail


def test_no_torch_is_a_warning_with_the_extra_that_brings_it() -> None:
    result = torch_build(None, Answer(), NONE, simulated=False)
    assert (result.status, result.remedy) == (Status.WARN, "pip install 'gpuherd[esd]'")


def test_missing_libraries_are_named() -> None:
    all_there = dict.fromkeys((*CORE, *ESD), "1.0")
    assert libraries(all_there).status is Status.OK
    without_esd = libraries({**all_there, "scipy": None})
    assert (without_esd.status, "not installed: scipy" in without_esd.detail) == (Status.WARN, True)
    assert libraries({**all_there, "psutil": None}).status is Status.FAIL


def test_reads_installed_versions() -> None:
    assert version_of("psutil")
    assert version_of("gpuherd-no-such-thing") is None
