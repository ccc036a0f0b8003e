"""One Grid Engine for all tests of a session that ask for it, and engines that talk to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.engines.hand import Hand
from tests.gridengine.cluster import Cluster, Unavailable, cluster, why_not
from tests.gridengine.configuration import Plan

from gpuherd.engines.base import EngineAway
from gpuherd.engines.gridengine.engine import GridEngine
from gpuherd.engines.gridengine.options import GridEngineOptions

HandTo = Callable[..., Hand]


@pytest.fixture(scope="session")
def _session_gridengine() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    try:
        with cluster(Plan()) as made:
            yield made
    except Unavailable as problem:
        pytest.skip(str(problem))


@pytest.fixture
def gridengine(_session_gridengine: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The session's cluster: one node with 8 GPUs and 64 slots. What a test leaves there is ended."""
    for name, value in _session_gridengine.environment.items():
        monkeypatch.setenv(name, value)
    yield _session_gridengine
    _session_gridengine.command("qdel", "-f", "-u", "root", check=False)


@pytest.fixture
def own_gridengine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Plan], Cluster]]:
    """``own_gridengine(Plan(...))`` starts another one, for this test alone."""
    made = []

    def start(plan: Plan) -> Cluster:
        reason = why_not()
        if reason is not None:
            pytest.skip(reason)
        context = cluster(plan)
        try:
            found = context.__enter__()
        except Unavailable as problem:
            pytest.skip(str(problem))
        made.append(context)
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        return found

    yield start
    for context in made:
        context.__exit__(None, None, None)


@pytest.fixture
def hand() -> Iterator[HandTo]:
    """``hand(sge_queue="main")`` makes an engine, and what hands jobs to it. All of them are cancelled at the end."""
    hands: list[Hand] = []

    def make(**options: object) -> Hand:
        # Where every node and user can read; its name makes those of the batches unlike any other's.
        folder = Path(tempfile.mkdtemp(prefix="hand-", dir="/tmp"))
        hands.append(Hand(GridEngine(GridEngineOptions(engine="gridengine", **options)), folder))  # type: ignore[arg-type]
        return hands[-1]

    yield make
    for each in hands:
        with suppress(EngineAway):
            each.engine.cancel([ticket.handle for ticket in each.tickets.values() if ticket.handle is not None])
        shutil.rmtree(each.folder, ignore_errors=True)
