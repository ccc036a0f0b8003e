"""How many threads the numeric libraries are told to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuherd.engines.host import cores
from gpuherd.esd.resources import VARIABLES, before_mkl, blas_threads, settle

SOURCE = str(Path(__file__).parents[3] / "src")


@pytest.mark.parametrize(
    ("environment", "available", "at_once", "expected"),
    [
        ({}, 16, 1, 16),
        ({}, 16, 4, 4),
        ({}, 2, 8, 1),
        ({"OMP_NUM_THREADS": "3"}, 16, 1, 3),
        ({"OMP_NUM_THREADS": "8,2"}, 16, 2, 4),
        ({"OMP_NUM_THREADS": "many"}, 16, 1, 16),
        ({"OMP_NUM_THREADS": "0"}, 16, 1, 16),
        ({"OPENBLAS_NUM_THREADS": "5"}, 16, 1, 5),
        ({"MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "5"}, 16, 1, 2),
    ],
)
def test_number(environment: dict[str, str], available: int, at_once: int, expected: int) -> None:
    assert blas_threads(environment, available, at_once=at_once) == expected


def test_what_the_user_says_stays() -> None:
    said = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "7"}
    environment = dict(said)
    assert settle(environment) == 3
    assert environment == said | {"MKL_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3"}


def test_nothing_said_means_the_cores_there_are() -> None:
    environment: dict[str, str] = {}
    assert settle(environment) == cores()
    assert {environment[name] for name in VARIABLES} == {str(cores())}


def test_one_core_needs_no_openmp() -> None:
    alone, several = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}
    before_mkl(alone)
    before_mkl(several)
    assert alone["MKL_THREADING_LAYER"] == "SEQUENTIAL"
    assert "MKL_THREADING_LAYER" not in several
    assert alone["MKL_DYNAMIC"] == several["MKL_DYNAMIC"] == "FALSE"


COUNT = """
import os
from gpuherd.esd.resources import settle
settle()
import numpy as np
from gpuherd.esd.spectra.eigenvalues import eigenvalues
eigenvalues(np.random.default_rng(0).standard_normal((600, 700)))
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_has_so_many_threads_for_each_library(threads: int) -> None:
    """Two copies of OpenBLAS (numpy's and scipy's) start what they were told, less the calling thread, and no more."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": SOURCE}
    shown = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, env=env).stdout
    assert int(shown) <= 1 + 2 * (threads - 1)
