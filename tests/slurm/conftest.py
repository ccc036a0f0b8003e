"""One SLURM for all tests of a session that ask for it, and engines that talk to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.engines.hand import Hand
from tests.slurm.cluster import Cluster, Unavailable, cluster, why_not
from tests.slurm.configuration import Plan

from gpuherd.engines.base import EngineAway
from gpuherd.engines.slurm.engine import SlurmEngine
from gpuherd.engines.slurm.options import SlurmOptions

HandTo = Callable[..., Hand]


@pytest.fixture(scope="session")
def _session_cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    try:
        with cluster(Plan()) as made:
            yield made
    except Unavailable as problem:
        pytest.skip(str(problem))


@pytest.fixture
def slurm(_session_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The session's cluster: one node of 8 GPUs, with accounting. What a test leaves there is ended."""
    monkeypatch.setenv("SLURM_CONF", _session_cluster.environment["SLURM_CONF"])
    yield _session_cluster
    _session_cluster.command("scancel", "--user=root", check=False)


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Plan], Cluster]]:
    """``own_cluster(Plan(...))`` starts another one, for this test alone."""
    made = []

    def start(plan: Plan) -> Cluster:
        reason = why_not(accounting=plan.accounting)
        if reason is not None:
            pytest.skip(reason)
        context = cluster(plan)
        try:
            found = context.__enter__()
        except Unavailable as problem:
            pytest.skip(str(problem))
        made.append(context)
        monkeypatch.setenv("SLURM_CONF", found.environment["SLURM_CONF"])
        return found

    yield start
    for context in made:
        context.__exit__(None, None, None)


@pytest.fixture
def hand() -> Iterator[HandTo]:
    """``hand(partition="main")`` makes an engine, and what hands jobs to it. All of them are cancelled at the end."""
    hands: list[Hand] = []

    def make(**options: object) -> Hand:
        # Where every node and user can read; its name makes those of the batches unlike any other's.
        folder = Path(tempfile.mkdtemp(prefix="hand-", dir="/tmp"))
        hands.append(Hand(SlurmEngine(SlurmOptions(engine="slurm", **options)), folder))  # type: ignore[arg-type]
        return hands[-1]

    yield make
    for each in hands:
        with suppress(EngineAway):
            each.engine.cancel([ticket.handle for ticket in each.tickets.values() if ticket.handle is not None])
        shutil.rmtree(each.folder, ignore_errors=True)
