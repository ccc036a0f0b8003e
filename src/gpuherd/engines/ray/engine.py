"""Ray as an engine, as the follower sees it."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from gpuherd.engines.cluster import Batch, EngineMissing, Placement, Sighting, Ticket
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.ray.address import Kind, resolve
from gpuherd.engines.ray.channel import Channel
from gpuherd.engines.ray.messages import Cancel, Check, Join, Lead, Look, Question, Setup, Submit, handle_of
from gpuherd.engines.ray.resources import custom

_ASK_S = 60.0
# By the job server each parcel is a request of its own.
_PARCEL_S = 1.0
_LOOK_S = 0.25
# The job server reads all jobs that it ever had to say how ours stand, each from the head's store.
_SERVER_LOOK_S = 2.0


class RayEngine:
    """Tasks of a Ray cluster, or jobs of its job server. Nothing of Ray is touched before the first question.

    ``chains`` is False: a task of Ray lives no longer than its driver, and its job server knows no order, so nothing
    would follow anything while nobody of ours is there.

    Args:
        options: how the cluster is reached and what each job takes of it. Raises UsageError for words that are none.
        lead: leads an attempt in a worker of Ray (``jobs.handover.node.lead``); a function that its module has by
            name, since the worker imports it there.
        join: the same for the further nodes of an attempt over several (``jobs.handover.node.join``); without it none
            spans nodes.
    """

    name = "ray"
    chains = False
    remembers_s = 0.0

    def __init__(self, options: EngineOptions, lead: Lead, join: Join | None = None):
        self._setup = Setup(
            address=resolve(options.ray_address, os.environ),
            lead=lead,
            join=join,
            resources=custom(options.ray_resources),
            notice_s=options.notice,
        )
        self.look_s = _SERVER_LOOK_S if self._setup.address.kind is Kind.SERVER else _LOOK_S
        self._channel: Channel | None = None
        # One process answers, one question after the other, whichever thread asks.
        self._asks = threading.Lock()

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """As ``Engine.check``. Raises EngineMissing without Ray, UsageError for a cluster of another version, one that
        refuses our token, and one whose nodes have no gpuherd."""
        refused: Mapping[Placement, str] = self._ask(Check(tuple(dict.fromkeys(wanted))))
        return refused

    def submit(self, batch: Batch) -> Sequence[str]:
        """As ``Engine.submit``."""
        handles: Sequence[str] = self._ask(Submit(batch), _ASK_S + _PARCEL_S * len(batch.parcels))
        return handles

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """As ``Engine.look``."""
        attempts = {each.handle or handle_of(each.batch, each.index): each.attempt for each in tickets}
        seen: Mapping[str, Sighting] = self._ask(Look(tuple(attempts)))
        return {attempts[handle]: sighting for handle, sighting in seen.items()}

    def cancel(self, handles: Collection[str]) -> None:
        """As ``Engine.cancel``. A job gets its grace; asked again, Ray ends its worker, and the guardian the rest."""
        if handles:
            self._ask(Cancel(tuple(handles)), _ASK_S + _PARCEL_S * len(handles))

    def close(self) -> None:
        """Leaves the cluster. Tasks are ended, as Ray would do anyhow; jobs of the job server go on."""
        with self._asks:
            channel, self._channel = self._channel, None
            if channel is not None and not channel.ended:
                channel.close()

    def _ask(self, question: Question, within_s: float = _ASK_S) -> Any:
        with self._asks:
            if self._channel is None or self._channel.ended:
                if find_spec("ray") is None:
                    raise EngineMissing("Ray is not installed here; pip install 'gpuherd[ray]' brings it")
                self._channel = Channel(self._setup)
            return self._channel.ask(question, within_s)
