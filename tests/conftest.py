"""Fixtures for all tests: no environment of the user's, and simulated GPUs on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuherd.standin.machine import Machine, load_driver


@pytest.fixture(scope="session", autouse=True)
def _driver_library() -> None:
    """The stand-in comes first, so that a test process never loads a real driver: there are no GPUs until a test
    asks for some, on any machine.
    """
    load_driver()


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("GPUHERD_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(tmp_path / "leases"))


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """``standin("4x40GB")`` makes a simulated machine that this process and its children see until the test ends."""
    machines: list[Machine] = []

    def make(spec: str = "4x40GB", *, attribute: bool = False) -> Machine:
        machine = Machine.create(tmp_path / f"machine{len(machines)}", spec, attribute=attribute)
        machines.append(machine)
        machine.activate()
        return machine

    yield make
    for machine in machines:
        machine.deactivate()
