"""What jobs were seen to use corrects what the next ones ask for. Pure; MB is 2^20 bytes on one GPU.

What a job says that it needs is an estimate: its owner's, or a memory plan's. What is seen while jobs run is not:

- A job that ran out of memory asks next time for a quarter more than it asked for and was seen to use.
- Jobs of one ``family`` are alike. Once one was seen to use more than the others declare, those ask for as much; once
  one ran out of memory, for a quarter more than it had.
- Once two of a family have ended well and used much less than declared, the others ask for the most that was seen and
  a quarter more, so that smaller GPUs will do, and shared ones hold more jobs.

Never is more asked for than 97 % of what a GPU of the run could have free, so that nothing that is learned keeps a job
from running, nor to the one GPU that has a few MB more free than its neighbours.
Memory is looked at every few seconds, so that a short peak may be missed: hence the quarter, and two jobs, not one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# In whole numbers: five quarters of what was seen.
_MORE, _OF = 5, 4
# A CUDA context more or less, for jobs so small that a quarter of them is nothing.
_MARGIN_MB = 256
# Nothing that would save less than a tenth is worth a smaller promise.
_WORTH = 0.9
MEASURED_BEFORE_LESS = 2
# The driver keeps a little of each GPU, which is not known before it was seen empty, and on some more than on others.
_OF_A_GPU = 0.97


@dataclass(frozen=True, slots=True)
class FamilyMemory:
    """What was seen of the jobs of a family.

    Attributes:
        peak_mb: the most that one of them was seen to use; None if none was seen.
        measured: how many ended well and were seen.
        ran_out_mb: the most that one had, or had asked for, when it ran out of memory; None if none did.
    """

    peak_mb: int | None = None
    measured: int = 0
    ran_out_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a job asks to be free on each GPU; ``because``: why that is not what it declared, for people."""

    memory_mb: int | None
    because: str | None = None


def learned(
    before: FamilyMemory | None, *, peak_mb: int | None, well: bool = False, ran_out_mb: int | None = None
) -> FamilyMemory:
    """What is known of a family after one more of its jobs.

    Args:
        peak_mb: the most that it was seen to use, None where nobody looked.
        well: it ended well.
        ran_out_mb: what it had when it ran out of GPU memory, None if it didn't.
    """
    known = before or FamilyMemory()
    if ran_out_mb is not None and ran_out_mb > 0:
        known = replace(known, ran_out_mb=max(known.ran_out_mb or 0, ran_out_mb))
    if peak_mb is None or peak_mb < 1:
        return known
    return replace(known, peak_mb=max(known.peak_mb or 0, peak_mb), measured=known.measured + well)


def asks_for(
    declared_mb: int | None, family: FamilyMemory | None, most_mb: int | None = None, *, less: bool = True
) -> Ask:
    """What a job asks for, by what it declares and what was seen of its family.

    Args:
        declared_mb: None for a job that says nothing of memory; it asks for none.
        most_mb: the most that so many GPUs as it needs could have free, None if that is not known.
        less: it may ask for less than it declares.

    >>> asks_for(30_000, FamilyMemory(peak_mb=9_000, measured=2)).memory_mb
    11506
    >>> asks_for(30_000, FamilyMemory(peak_mb=34_000), 40_000)
    Ask(memory_mb=34000, because='others of its family used up to 34000 MB')
    """
    if declared_mb is None or family is None:
        return Ask(declared_mb)
    seen = _within(family.peak_mb or 0, most_mb)
    room = 0 if family.ran_out_mb is None else _within(_quarter_more(family.ran_out_mb), most_mb)
    if max(seen, room) > declared_mb:
        if room > seen:
            return Ask(room, f"one of its family ran out of memory with {family.ran_out_mb} MB")
        return Ask(seen, f"others of its family used up to {family.peak_mb} MB")
    enough = max(_quarter_more(family.peak_mb or 0) + _MARGIN_MB, room)
    if less and family.measured >= MEASURED_BEFORE_LESS and enough < _WORTH * declared_mb:
        return Ask(enough, f"{family.measured} of its family used at most {family.peak_mb} MB")
    return Ask(declared_mb)


def after_running_out(asked_mb: int | None, peak_mb: int | None, most_mb: int | None) -> int | None:
    """What a job asks for after it ran out of memory: a quarter more than it asked for and was seen to use, as far as a
    GPU could have that free. What it asked for before where that is not known (``most_mb`` None).

    >>> after_running_out(10_000, 12_000, 40_000), after_running_out(10_000, 39_900, 40_000)
    (15000, 38800)
    """
    had = max(asked_mb or 0, peak_mb or 0)
    if had == 0 or most_mb is None:
        return asked_mb
    return max(asked_mb or 0, _within(_quarter_more(had), most_mb))


def _quarter_more(mb: int) -> int:
    return -(-_MORE * mb // _OF)


def _within(mb: int, most_mb: int | None) -> int:
    return mb if most_mb is None else min(mb, int(_OF_A_GPU * most_mb))
