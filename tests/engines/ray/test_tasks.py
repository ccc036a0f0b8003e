"""Tasks where Ray itself does not do what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Never

import pytest

from gpuherd.engines.base import Batch, EngineAway, Parcel, Placement
from gpuherd.engines.ray.cluster import Address, ClusterKind
from gpuherd.engines.ray.engine import Setup
from gpuherd.jobs.remote.agent import join, lead

exceptions = pytest.importorskip("ray.exceptions")


def test_a_head_that_reserves_no_nodes_is_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuherd.engines.ray import driver, tasks

    def away(*_: object, **__: object) -> Never:
        raise exceptions.RaySystemError("the head has gone")

    monkeypatch.setattr(driver, "connect", lambda *_: driver.Cluster("head:6379", None))
    monkeypatch.setattr(tasks, "placement_group", away)
    setup = Setup(address=Address(ClusterKind.JOINED, "head:6379"), lead=lead, join=join, resources={}, notice_s=60.0)
    batch = Batch(
        name="gpuherd-1-1",
        placement=Placement(gpus=1, nodes=2),
        parcels=(Parcel(attempt=1, title="train"),),
        command=("lead", "batch.json"),
        folder=tmp_path,
    )
    office = tasks.Tasks(setup)
    with pytest.raises(EngineAway, match=r"Ray does not answer: .*the head has gone"):
        office.submit(batch)
    assert office.look(("gpuherd-1-1-0",)) == {}
