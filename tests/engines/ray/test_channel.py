"""The process next to Ray, where there is none to be reached."""

from __future__ import annotations

import errno
import os
import socket
from typing import Never

import psutil
import pytest

from gpuherd.engines.base import EngineAway
from gpuherd.engines.ray import engine
from gpuherd.engines.ray.cluster import Address, ClusterKind
from gpuherd.engines.ray.engine import Channel, Setup
from gpuherd.jobs.remote.agent import lead


def test_somebody_who_listens_and_never_answers_is_named_and_nothing_is_left() -> None:
    before = psutil.Process().children()  # other tests keep processes of their own
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        setup = Setup(address=Address(ClusterKind.JOINED, place), lead=lead, join=None, resources={}, notice_s=1.0)
        with pytest.raises(EngineAway, match=f"what listens at {place}, .* not answered within 0.3 s"):
            Channel(setup, connect_s=0.3)
    assert psutil.Process().children() == before


def test_no_room_for_a_cluster_of_our_own_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(engine, "OwnFolder", full)
    setup = Setup(address=Address(ClusterKind.OWN), lead=lead, join=None, resources={}, notice_s=1.0)
    with pytest.raises(EngineAway, match="can't make a folder for Ray in /tmp: No space left on device"):
        Channel(setup)
