"""A small model is really loaded and run in a child; what the child tells is judged without mercy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuherd.checks import Answer, Status, ask
from gpuherd.doctor.models import judge_cpu, judge_gpu, judge_simulated, on_cpu, on_gpus
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu
from gpuherd.standin.machine import SimulatedMachine

GPU = Gpu(2, "GPU-abc", "A100", total_mb=40_000, used_mb=0, free_mb=40_000)
MIG = Gpu(2, "MIG-def", "A100 MIG", total_mb=9, used_mb=0, free_mb=9, mig_parent="GPU-abc", mig_position=0)
TOLD = {"device": "cuda:0", "name": "A100", "uuid": "abc", "devices": 1, "relative_error": 1e-6}
ON_CPU = {"device": "cpu", "visible": "2", "cuda_available": False, "relative_error": 0.0}


def test_a_gpu_that_computes_and_is_the_right_one_is_well() -> None:
    assert judge_gpu(GPU, Answer(TOLD)).status is Status.OK
    assert judge_gpu(MIG, Answer({**TOLD, "uuid": "DEF"})).status is Status.OK
    assert judge_gpu(MIG, Answer(TOLD)).status is Status.OK
    unknown = judge_gpu(GPU, Answer({**TOLD, "uuid": None}))
    assert (unknown.status, "does not tell the UUID" in unknown.detail) == (Status.OK, True)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"uuid": "abd"}, "another GPU (abd, not GPU-abc)"),
        ({"devices": 4}, "sees 4 GPUs"),
        ({"relative_error": 0.5}, "wrong numbers"),
        ({"relative_error": float("nan")}, "wrong numbers"),
    ],
)
def test_anything_else_is_wrong(told: dict[str, Any], words: str) -> None:
    result = judge_gpu(GPU, Answer({**TOLD, **told}))
    assert result.status is Status.FAIL
    assert words in result.detail


def test_errors_of_the_child_are_quoted() -> None:
    answer = Answer(error="CUDA error: no kernel image is available")
    for result in (judge_gpu(GPU, answer), judge_cpu(answer), judge_simulated(GPU, answer)):
        assert (result.status, "no kernel image" in result.detail) == (Status.FAIL, True)


def test_a_simulated_gpu_must_not_be_a_real_one() -> None:
    assert judge_simulated(GPU, Answer(ON_CPU)).status is Status.OK
    assert judge_simulated(GPU, Answer({**ON_CPU, "cuda_available": True})).status is Status.FAIL


def test_a_model_that_loads_differently_is_wrong() -> None:
    assert judge_cpu(Answer({**ON_CPU, "relative_error": 0.1})).status is Status.FAIL


def test_runs_on_the_cpu() -> None:
    result = on_cpu()
    assert (result.status, result.detail) == (Status.OK, "loaded and run on the CPU in a process of its own")


def test_tries_free_gpus_only_and_under_a_lease(standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("3x40GB")
    machine.occupy(0, 3000)
    with LeaseFolder.default().acquire(machine.uuids[1]) or pytest.fail("not taken"):
        results = on_gpus(GpuReader().snapshot().gpus, simulated=True)
    assert [result.status for result in results] == [Status.SKIP, Status.SKIP, Status.OK]
    assert "3000 MB used" in results[0].detail
    assert "another gpuherd holds it" in results[1].detail
    assert results[2].detail == "loaded and run on the CPU with CUDA_VISIBLE_DEVICES=2 in a process of its own"
    assert LeaseFolder.default().holder(machine.uuids[2]) is None


def run_python(statement: str, timeout_s: float = 30.0) -> Answer:
    """A child that executes one statement, by way of a module that does so."""
    return ask("timeit", ["-n1", "-r1", statement], environment={}, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "it was ended by SIGKILL"),
        ("raise OSError('no room')", "OSError: no room"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import os, sys; sys.stdout.write('[1]\\n'); sys.stdout.flush(); os._exit(0)", "it answered '[1]\\n'"),
        ("import os; os._exit(0)", "it answered ''"),
    ],
)
def test_a_child_that_gives_no_answer_is_explained(statement: str, error: str) -> None:
    assert run_python(statement).error == error


def test_a_child_that_hangs_is_ended() -> None:
    assert run_python("import time; time.sleep(60)", timeout_s=0.3).error == "no answer within 0.3 s"
