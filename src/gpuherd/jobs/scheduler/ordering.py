"""The order in which waiting jobs are considered, and how many of them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuherd.jobs.scheduler.types import Decision, Limits, WaitingJob


# In which order waiting jobs are looked at: by priority, then by age or the longest first. Pure.
#
# ``rank`` is what "the longest first" goes by: the binary logarithm of a job's cost, plus one for each hour that it
# has waited. So a cost counts double for every hour of waiting, whatever unit it is in, and no short job starves
# behind an endless stream of longer ones: one whose cost is a thousandth of theirs goes before those that come ten
# hours after it. Of two jobs the same one is ahead at all times, since both age alike. So it is enough to write the
# rank down once, when the job is submitted, and the queue's order is an index.

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


# How far into the queue a decision looks: a bounded number of jobs, and yet none stays hidden that could start. Pure.
#
# At first the foremost jobs: as many as there are places, and a few beyond. That is not enough in two cases, and then
# a decision looks further:
#
# * GPUs are left over that none of those can have (they ask for more GPUs or memory than may be had just now, in
#   quiet
#   hours or beside other people): then also the first jobs of every *kind*. Jobs that ask for the same are alike:
#   where
#   the first can't start, the next can't either. Those of the kinds that are too large just now are among them, so
#   that a
#   large one which waits for our own GPUs is seen, and GPUs are kept for it.
# * GPUs that are kept for a large job could be lent to a short one: then more of the foremost.

# How many more jobs than there are free places one decision looks at: those to go past a job that can't start yet.
BEYOND = 8
# And when kept GPUs could be lent.
SEARCHED = 64
# Of how many kinds the first jobs are looked at, for one number of GPUs: those that ask for the least memory.
MOST_KINDS = 16


@dataclass(frozen=True, slots=True)
class Reach:
    """How far. ``lends``: kept GPUs can be lent. ``by_kind``: also the first of every kind."""

    lends: bool = False
    by_kind: bool = False

    def foremost(self, places: int) -> int:
        """How many of the foremost jobs to look at, with so many free places."""
        return BEYOND + places + (SEARCHED if self.lends else 0)

    def after(self, decision: Decision, *, unseen: bool) -> Reach:
        """How far the next decision looks. ``unseen``: there may be jobs on GPUs behind the foremost.

        Further in one way is never less far in the other: else two decisions that start nobody could call for each
        other without end. (One sees a large job and keeps GPUs for it; the other does not see it and leaves them.)
        """
        left = decision.gpus_left > 0 or decision.room_left_mb > 0
        next_one = Reach(decision.lends_for_s is not None, unseen and left)
        if not next_one.is_beyond(self):
            return next_one
        return Reach(self.lends or next_one.lends, self.by_kind or next_one.by_kind)

    def is_beyond(self, other: Reach) -> bool:
        """Whether it sees more than the other."""
        return (self.lends and not other.lends) or (self.by_kind and not other.by_kind)
