"""The order in which waiting jobs are considered, and how many of them. Pure.

Apart from ``types``, because ``gpuherd submit`` needs the rank and nothing of GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuherd.jobs.scheduler.types import Decision, Limits, WaitingJob


# The order of waiting jobs is by priority, then by age or by rank ("the longest first"). The rank is the binary
# logarithm of a job's cost, plus one for each hour that it has waited. So a cost counts double for every hour of
# waiting, in whatever unit it is, and no short job starves behind an endless stream of longer ones: one whose cost is a
# thousandth of theirs goes before those that arrive ten hours after it. Both of two jobs age alike, so their order
# never changes: the rank is stored once, when the job is submitted, and the queue's order is an index.

# A cost counts double for every so many seconds of waiting.
DOUBLES_EVERY_S = 3600.0
# The cost of a job of unknown cost, or of none: so little that it goes last, and still ages.
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
    """Key to sort waiting jobs by: the first job has the least."""
    return (-job.priority, -job.rank if limits.longest_first else 0.0, job.id)


# Lookahead: how far into the queue a decision looks. It looks at a bounded number of jobs, and yet no job that could
# start stays hidden. At first these are the foremost jobs: as many as there are free places, and a few beyond. In two
# cases that is not enough:
#
# * GPUs are left over that none of those jobs can have (they request more GPUs or memory than are available just now,
#   in quiet hours or next to external users): then also the first jobs of every *kind*. Jobs with the same request are
#   alike: where the first can't start, the next can't either. Kinds that are too large just now are among them, so that
#   a large job which waits for our own GPUs is seen, and GPUs are reserved for it.
# * A short job could backfill GPUs that are reserved for a large one: then more of the foremost.

# How many more jobs than there are free places one decision looks at, to go past jobs that can't start yet.
BEYOND = 8
# And when reserved GPUs could be backfilled.
SEARCHED = 64
# Number of kinds that are looked at, for one number of GPUs: those that request the least memory.
MOST_KINDS = 16


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How far a decision looks.

    Attributes:
        backfills: reserved GPUs can be backfilled.
        by_kind: also the first jobs of every kind.
    """

    backfills: bool = False
    by_kind: bool = False

    def foremost(self, places: int) -> int:
        """How many of the foremost jobs to look at, with this number of free places."""
        return BEYOND + places + (SEARCHED if self.backfills else 0)

    def after(self, decision: Decision, *, unseen: bool) -> Lookahead:
        """The lookahead of the next decision. ``unseen``: there may be jobs on GPUs behind the foremost.

        Further in one way is never less far in the other: else two decisions that start no job could follow each other
        without end. (One sees a large job and reserves GPUs for it; the other does not see it and leaves them.)
        """
        left = decision.gpus_left > 0 or decision.room_left_mb > 0
        next_one = Lookahead(decision.backfill_s is not None, unseen and left)
        if not next_one.is_beyond(self):
            return next_one
        return Lookahead(self.backfills or next_one.backfills, self.by_kind or next_one.by_kind)

    def is_beyond(self, other: Lookahead) -> bool:
        """Whether it sees jobs that the other does not."""
        return (self.backfills and not other.backfills) or (self.by_kind and not other.by_kind)
