"""Jobs of a real job server, on a cluster of two nodes with 4 GPUs each that are only counted."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.ray.cluster import TwoNodes
from tests.engines.ray.nodes import GPUS
from tests.engines.ray.parcels import Parcels, all_in

from gpuherd.engines.base import End, EngineAway, Phase, Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.ray.engine import RayEngine
from gpuherd.errors import UsageError
from gpuherd.jobs.remote.agent import lead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def _server() -> Iterator[TwoNodes]:
    with TwoNodes(dashboard=True) as cluster:
        yield cluster


@pytest.fixture
def server(_server: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> TwoNodes:
    for name, value in _server.variables.items():
        monkeypatch.setenv(name, value)
    return _server


@pytest.fixture
def engine(server: TwoNodes) -> Iterator[RayEngine]:
    found = RayEngine(EngineOptions(engine="ray", ray_address=server.url), lead)
    yield found
    found.close()


def test_a_job_runs_once_though_it_is_handed_over_twice(engine: RayEngine, tmp_path: Path) -> None:
    """As when the answer to the first was lost."""
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", 'echo "ran on [$CUDA_VISIBLE_DEVICES]"'], Placement(gpus=GPUS))
    handles = engine.submit(jobs.batch)
    assert engine.submit(jobs.batch) == handles
    assert jobs.to_the_end(engine)[0].end is End.OK
    assert engine.submit(jobs.batch) == handles
    assert jobs.log() == "ran on [0,1,2,3]\n"


def test_jobs_go_on_without_their_follower_and_are_found_by_name(
    engine: RayEngine, server: TwoNodes, tmp_path: Path
) -> None:
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", "echo began; sleep 600"], Placement(gpus=1), count=2)
    handles = engine.submit(jobs.batch)
    jobs.begin()
    engine.close()
    successor = RayEngine(EngineOptions(engine="ray", ray_address=server.url), lead)
    seen = jobs.until(successor, lambda seen: all_in(seen, Phase.RUNNING))  # by tickets without a handle
    assert [each.handle for each in seen.values()] == handles
    successor.cancel(handles)
    assert {each.end for each in jobs.to_the_end(successor).values()} == {End.CANCELLED}
    successor.close()
    for number in range(2):
        assert jobs.ended(number).interrupted and jobs.ended(number).signal == signal.SIGTERM


def test_a_leader_that_fails_is_told_with_its_last_words_and_its_log_is_fetched(
    engine: RayEngine, tmp_path: Path
) -> None:
    jobs = Parcels(tmp_path / "jobs", ["true"], Placement(gpus=0))
    (jobs.folder / "manifest.json").write_text("{")
    handle = engine.submit(jobs.batch)[0]
    seen = jobs.to_the_end(engine)[0]
    assert seen.end is End.FAILED
    assert "is no manifest of a batch" in (seen.reason or "")
    assert "is no manifest of a batch" in (jobs.folder / f"{handle}.ray.log").read_text()


def test_a_turn_ends_before_the_time_is_up(server: TwoNodes, tmp_path: Path) -> None:
    engine = RayEngine(EngineOptions(engine="ray", ray_address=server.url, notice=5.0), lead)
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", "echo began; sleep 600"], Placement(gpus=1, time_s=8.0))
    engine.submit(jobs.batch)
    assert jobs.to_the_end(engine)[0].end is End.TIME_UP
    engine.close()
    assert jobs.ended().interrupted


def test_what_no_node_has_is_refused_before_anything_starts(engine: RayEngine) -> None:
    reasons = engine.check([Placement(gpus=GPUS), Placement(gpus=GPUS + 1), Placement(gpus=1, nodes=2)])
    assert "the most that any of the Ray cluster's 2 nodes has is 4 GPUs" in reasons[Placement(gpus=GPUS + 1)]
    assert (
        "gives a job one node; one over several needs a cluster that is joined" in reasons[Placement(gpus=1, nodes=2)]
    )
    assert Placement(gpus=GPUS) not in reasons


def test_a_job_that_waits_is_cancelled(engine: RayEngine, tmp_path: Path) -> None:
    hold = Parcels(tmp_path / "hold", ["sh", "-c", "echo began; sleep 600"], Placement(gpus=GPUS), count=2)
    held = engine.submit(hold.batch)
    hold.begin()
    jobs = Parcels(tmp_path / "jobs", ["true"], Placement(gpus=GPUS))
    waiting = engine.submit(jobs.batch)
    seen = jobs.until(engine, lambda seen: all_in(seen, Phase.WAITING))
    assert "waits for its resources" in (seen[0].reason or "")
    engine.cancel(waiting)
    engine.cancel(held)
    assert jobs.to_the_end(engine)[0].end is End.CANCELLED
    hold.to_the_end(engine)
    assert jobs.claim() is None
    engine.cancel([*held, *waiting, "never-heard-of-0"])


def test_a_refused_token_is_told_with_what_to_do(server: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    engine = RayEngine(EngineOptions(engine="ray", ray_address=server.url), lead)
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN_PATH to the cluster's token"):
        engine.check([Placement(gpus=1)])
    engine.close()


def test_nobody_answers() -> None:
    engine = RayEngine(EngineOptions(engine="ray", ray_address="http://127.0.0.1:1"), lead)
    with pytest.raises(EngineAway, match=r"job server does not answer at http://127\.0\.0\.1:1"):
        engine.check([Placement(gpus=1)])
    engine.close()


def test_an_entrypoint_is_made_of_words_that_no_shell_takes_apart() -> None:
    pytest.importorskip("ray")
    from gpuherd.engines.ray.job_server import entrypoint

    words = ("python", "-m", "x", "/a folder/$(reboot); 'm'.json")
    assert shlex.split(entrypoint(words, 3, None)) == ["exec", *words, "3"]
    assert shlex.split(entrypoint(words, 3, 60.0))[:5] == ["exec", "timeout", "--foreground", "--signal=TERM", "60.000"]
