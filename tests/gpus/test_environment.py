"""CUDA_VISIBLE_DEVICES set in time, and the device after renumbering. torch here is a CPU build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.forking import Forking

from gpuherd.errors import CudaAlreadyStarted, NoSuchGpu
from gpuherd.gpus import get_available_gpus, get_optimal_device, select_gpus, set_visible_gpus, setup_gpu_environment
from gpuherd.standin import driver
from gpuherd.standin.driver import compiler
from gpuherd.standin.machine import SimulatedMachine as Simulated

Standin = Callable[..., Simulated]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_variables() -> Iterator[None]:
    """The functions under test set the process's own variables for good; a test must not."""
    before = dict(os.environ)
    yield
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    get_available_gpus()  # lets the module see that its choice is no more


def visible() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


def test_setting_sets_both_variables_and_the_order_of_ids_is_kept(standin: Standin) -> None:
    standin("4x40GB")
    set_visible_gpus([3, 1])
    assert visible() == ("3,1", "PCI_BUS_ID")
    assert get_available_gpus() == [3, 1]
    set_visible_gpus([])
    assert visible() == ("", "PCI_BUS_ID")
    assert get_available_gpus() == []


def test_one_may_choose_again_until_cuda_starts_but_never_beyond_what_was_given(standin: Standin) -> None:
    standin("4x40GB")
    os.environ["CUDA_VISIBLE_DEVICES"] = "1,2,3"
    set_visible_gpus([2])
    assert get_available_gpus() == [2]
    set_visible_gpus([2])
    assert select_gpus(gpu_ids=[3, 1]) == [3, 1]
    set_visible_gpus([3, 1])
    assert get_available_gpus() == [3, 1]
    with pytest.raises(NoSuchGpu, match=r"\[0\] are not available. Available GPUs: \[1, 2, 3\]"):
        set_visible_gpus([0, 1])
    assert visible()[0] == "3,1"


def test_a_value_that_somebody_else_sets_later_is_the_new_limit(standin: Standin) -> None:
    standin("4x40GB")
    set_visible_gpus([2, 3])
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert get_available_gpus() == [1]
    with pytest.raises(NoSuchGpu):
        set_visible_gpus([2])
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    with pytest.raises(NoSuchGpu):
        set_visible_gpus([0])


def test_mig_instances_are_set_by_uuid(standin: Standin) -> None:
    uuids = standin("2x40GB").split_mig(1, [20_000, 10_000])
    set_visible_gpus(["1:1"])
    assert visible()[0] == uuids[1]


def test_without_a_driver_ids_are_set_as_they_are() -> None:
    set_visible_gpus([0, 2])
    assert visible() == ("0,2", "PCI_BUS_ID")
    assert get_optimal_device([0, 2]) == CPU


def test_setup_chooses_sets_and_can_be_called_again(standin: Standin, caplog: pytest.LogCaptureFixture) -> None:
    standin("4x40GB")
    assert setup_gpu_environment(gpu_ids=[2, 3]) == CPU  # a CPU build of torch must not be given cuda:0
    assert visible()[0] == "2,3"
    assert "built without CUDA" in caplog.text
    assert setup_gpu_environment(gpu_ids=[2, 3]) == CPU
    assert setup_gpu_environment(num_gpus=1) == CPU
    assert visible()[0] == "2"
    with pytest.raises(ValueError, match="not available"):
        setup_gpu_environment(gpu_ids=[7])
    assert visible()[0] == "2"


def test_setup_without_gpus_is_the_cpu() -> None:
    assert setup_gpu_environment() == CPU
    assert setup_gpu_environment(gpu_ids=[0]) == CPU
    assert setup_gpu_environment(num_gpus=2) == CPU


def test_no_gpus_asked_for_is_the_cpu_without_a_warning(standin: Standin, caplog: pytest.LogCaptureFixture) -> None:
    standin("2x40GB")
    assert get_optimal_device([]) == CPU
    assert caplog.records == []


def test_a_gpu_that_is_hidden_from_cuda_is_refused(standin: Standin) -> None:
    standin("4x40GB")
    set_visible_gpus([2, 3])
    with pytest.raises(NoSuchGpu, match="GPU 1 is not visible to CUDA"):
        get_optimal_device([1])


# ---- a CUDA that works, as far as its first three functions go ----

FAKE_CUDA = """
#include <stdlib.h>
#include <string.h>
static int running = 0, count = 0;
int cuInit(unsigned flags) {
    const char *shown = getenv("CUDA_VISIBLE_DEVICES");
    count = shown && !*shown ? 0 : 1;
    for (; shown && (shown = strchr(shown, ',')); shown++) count++;
    running = 1;
    return flags;
}
int cuDeviceGetCount(int *n) { *n = count; return running ? 0 : 3; }
"""

CUDA_BUILD = """
import logging, os, sys
import torch
torch.version.cuda = "13.0"  # what a CUDA build of torch says of itself; nothing of ours is changed
from gpuherd.gpus import get_optimal_device, set_visible_gpus, setup_gpu_environment
from gpuherd.gpus.visible import count_in_child, started
from gpuherd.errors import CudaAlreadyStarted
"""


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that counts the GPUs which CUDA_VISIBLE_DEVICES names when it is started."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(FAKE_CUDA)
    command = [
        *(compiler() or pytest.skip("there is no C compiler")),
        "-shared",
        "-fPIC",
        "-o",
        str(folder / "libcuda.so.1"),
        str(folder / "cuda.c"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def forking(cuda_library: Path) -> Iterator[Forking]:
    """A process that has imported torch, and finds this libcuda.so.1."""
    with Forking("torch", LD_LIBRARY_PATH=f"{cuda_library}:{driver.library_folder()}") as made:
        yield made


def in_new_process(code: str, machine: Simulated, forking: Forking, cuda_library: Path, **variables: str) -> str:
    """What a new process with a CUDA build of torch prints, standard error after standard output."""
    environment = {**os.environ, **machine.environment(), **variables}
    environment["LD_LIBRARY_PATH"] = f"{cuda_library}:{environment['LD_LIBRARY_PATH']}"
    done = forking.start(code=CUDA_BUILD + code, env=environment).end()
    return done.stdout + done.stderr


def test_the_device_has_its_number_among_the_visible_gpus(
    standin: Standin, forking: Forking, cuda_library: Path
) -> None:
    code = """
print(setup_gpu_environment([2, 3]), os.environ["CUDA_VISIBLE_DEVICES"], started())
print(setup_gpu_environment([2, 3]), get_optimal_device([3]), get_optimal_device([2, 3]), get_optimal_device())
print(setup_gpu_environment(num_gpus=1), setup_gpu_environment(gpu_ids=[1]), os.environ["CUDA_VISIBLE_DEVICES"])
"""
    printed = in_new_process(code, standin("4x40GB"), forking, cuda_library)
    assert printed.splitlines() == ["cuda:0 2,3 False", "cuda:0 cuda:1 cuda:0 cuda:0", "cuda:0 cuda:0 1"]


def test_an_inherited_variable_is_mapped_by_uuid_and_index(
    standin: Standin, forking: Forking, cuda_library: Path
) -> None:
    machine = standin("4x40GB")
    code = "print(get_optimal_device([1]), get_optimal_device([3]), setup_gpu_environment([1]))"
    shown = f"{machine.uuids[3]},{machine.uuids[1]}"
    printed = in_new_process(code, machine, forking, cuda_library, CUDA_VISIBLE_DEVICES=shown)
    assert printed.splitlines() == ["cuda:1 cuda:0 cuda:0"]


def test_after_cuda_has_started_only_the_same_gpus_can_be_set(
    standin: Standin, forking: Forking, cuda_library: Path
) -> None:
    code = """
import ctypes
set_visible_gpus([2, 3])
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0  # as torch.cuda.is_available() does, or any other library
print(started(), torch.cuda.is_initialized())
set_visible_gpus([2, 3])
try:
    set_visible_gpus([0])
except CudaAlreadyStarted as error:
    print(error)
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""
    lines = in_new_process(code, standin("4x40GB"), forking, cuda_library).splitlines()
    assert lines[0] == "True False"
    assert "has started CUDA with '2,3'" in lines[1]
    assert lines[2] == "2,3"


def test_a_torch_for_a_newer_cuda_than_the_drivers_is_told(
    standin: Standin, forking: Forking, cuda_library: Path
) -> None:
    code = 'torch.version.cuda = "99.1"\nlogging.basicConfig()\nprint(get_optimal_device())'
    printed = in_new_process(code, standin("1x40GB"), forking, cuda_library)
    assert printed.startswith("cpu\n")
    assert "update the driver" in printed


def test_simulated_gpus_never_give_a_cuda_device(standin: Standin, forking: Forking) -> None:
    code = "logging.basicConfig()\nprint(get_optimal_device())"
    printed = in_new_process(code, standin("1x40GB"), forking, driver.library_folder())
    assert printed.startswith("cpu\n")
    assert "the CUDA driver finds no usable GPU" in printed


def test_asking_a_child_does_not_start_cuda_here(standin: Standin, forking: Forking, cuda_library: Path) -> None:
    code = "print(started(), *count_in_child(), started())"
    printed = in_new_process(code, standin("4x40GB"), forking, cuda_library, CUDA_VISIBLE_DEVICES="2,3")
    assert printed.split() == ["False", "2", "False"]


def test_choosing_gpus_imports_no_torch(standin: Standin) -> None:
    standin("2x40GB")
    code = """
import sys
import gpuherd.gpus as g
g.get_available_gpus(), g.select_gpus(num_gpus=1), g.auto_select_gpus_for_model(1), g.set_visible_gpus([1])
print([name for name in ("torch", "numpy", "rich") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_missing_torch_is_told_before_anything_is_changed(standin: Standin) -> None:
    standin("2x40GB")
    code = """
import os, sys
sys.modules["torch"] = None  # Python's own way to say: not installed
from gpuherd.gpus import setup_gpu_environment
try:
    setup_gpu_environment([1])
except Exception as error:
    print(type(error).__name__, error, os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed.startswith("UsageError torch is needed")
    assert printed.endswith(" None\n")


def test_the_error_of_a_late_choice_is_a_runtime_error_too() -> None:
    assert issubclass(CudaAlreadyStarted, RuntimeError)
