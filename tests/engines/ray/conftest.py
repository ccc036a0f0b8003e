"""A Ray cluster for all tests of a process that ask for one: it takes 10 s to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engines.ray.cluster import TwoNodes


@pytest.fixture(scope="session")
def _two_nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as cluster:
        yield cluster


@pytest.fixture
def two_nodes(_two_nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> TwoNodes:
    """Two nodes with 4 GPUs each; this test's environment has their token."""
    for name, value in _two_nodes.variables.items():
        monkeypatch.setenv(name, value)
    return _two_nodes
