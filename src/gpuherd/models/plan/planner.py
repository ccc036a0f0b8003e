"""Will it fit, where, and what else would: the planner's one question. Pure, no torch, a few milliseconds.

``placing`` decides, ``advice`` tries what else would fit when it doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuherd.models.plan.advice import alternatives
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.placing import Task, Wish, place
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.workload import Reserve, Workload


def make_plan(
    architecture: Architecture,
    cards: Sequence[Card],
    precision: Precision,
    workload: Workload,
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    parallel: Wish = "auto",
    gpus: int | None = None,
    advise: bool = True,
) -> MemoryPlan | Refusal:
    """Where the model goes on these cards, or why it doesn't fit and what would.

    The split is the contiguous one that leaves the fullest GPU as empty as can be; ``largest_batch`` is exact. Of
    several sets of cards the roomiest is taken, or neighbours in the order given where these are about as roomy.

    Args:
        cards: those that may be used, linked neighbours side by side (``cards_now``).
        parallel: ``auto``: fewest GPUs that hold it, replicas over the rest; ``replica``: one GPU each; ``layers``: one
            after the other over all (or ``gpus``); ``tensor``: each layer over all (or ``gpus``) that divide its heads.
        gpus: exactly so many GPUs a replica.
        advise: look for alternatives when it doesn't fit, each of which is planned itself.

    Raises:
        UsageError: no cards, or ``gpus`` that there are not.
    """
    what = Task(architecture, precision, workload, reserve)
    told = place(what, cards, parallel, gpus)
    if isinstance(told, Refusal) and advise:
        return replace(told, alternatives=alternatives(what, cards, parallel, gpus))
    return told
