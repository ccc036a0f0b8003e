"""The engines for the common tests, each started once for all tests of a process that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.engines import sites
from tests.engines.sites import Site

from gpuherd.standin.machine import SimulatedMachine


@pytest.fixture(scope="session")
def _slurm_site() -> Iterator[Site]:
    with sites.on_slurm() as site:
        yield site


@pytest.fixture(scope="session")
def _gridengine_site() -> Iterator[Site]:
    with sites.on_grid_engine() as site:
        yield site


@pytest.fixture(scope="session")
def _ray_site() -> Iterator[Site]:
    with sites.on_ray() as site:
        yield site


@pytest.fixture
def site(
    request: pytest.FixtureRequest, standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """The engine that the test names by ``@pytest.mark.parametrize("site", [...], indirect=True)``."""
    with ExitStack() as held:
        if request.param == "local":
            found: Site = held.enter_context(sites.local(standin))
        else:
            found = request.getfixturevalue(f"_{request.param}_site")
        for name, value in found.variables.items():
            monkeypatch.setenv(name, value)
        yield found
