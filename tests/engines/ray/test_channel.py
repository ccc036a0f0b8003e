"""The process beside Ray, where there is none to be reached."""

from __future__ import annotations

import socket

import psutil
import pytest

from gpuherd.engines.cluster import EngineAway
from gpuherd.engines.ray.address import Address, Kind
from gpuherd.engines.ray.channel import Channel
from gpuherd.engines.ray.messages import Setup
from gpuherd.jobs.handover.node import lead


def test_somebody_who_listens_and_never_answers_is_named_and_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        setup = Setup(address=Address(Kind.JOINED, place), lead=lead, join=None, resources={}, notice_s=1.0)
        with pytest.raises(EngineAway, match=f"what listens at {place}, .* not answered within 0.3 s"):
            Channel(setup, connect_s=0.3)
    assert psutil.Process().children() == []
