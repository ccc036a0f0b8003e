"""In which order waiting jobs are looked at: by priority, then by age or the longest first. Pure.

``rank`` is what "the longest first" goes by: the binary logarithm of a job's cost, plus one for each hour that it has
waited. So a cost counts double for every hour of waiting, whatever unit it is in, and no short job starves behind an
endless stream of longer ones: one whose cost is a thousandth of theirs goes before those that come ten hours after it.
Of two jobs the same one is ahead at all times, since both age alike. So it is enough to write the rank down once, when
the job is submitted, and the queue's order is an index.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuherd.jobs.decision import Limits, WaitingJob

# A cost counts double for every so many seconds of waiting.
DOUBLES_EVERY_S = 3600.0
# What a job of unknown cost, or of none, is taken to cost: so little that it goes last, and still ages.
_LEAST_COST = 2.0**-30


def rank(cost: float | None, submitted_at: float) -> float:
    """The rank of a job: the higher goes first. ``submitted_at``: second, by a clock that all jobs have in common.

    >>> rank(8.0, 0.0) > rank(4.0, 0.0) > rank(None, 0.0)
    True
    >>> rank(4.0, 0.0) > rank(7.0, 3600.0)
    True
    """
    return math.log2(max(cost or 0.0, _LEAST_COST)) - submitted_at / DOUBLES_EVERY_S


def order_key(job: WaitingJob, limits: Limits) -> tuple[int, float, int]:
    """Sorts waiting jobs: the one to be looked at first is the least."""
    return (-job.priority, -job.rank if limits.longest_first else 0.0, job.id)
