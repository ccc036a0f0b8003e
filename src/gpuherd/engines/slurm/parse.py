"""The output of squeue and sacct as data, and the meaning of SLURM's states. Pure.

Both print one line a job with bars between the fields. The field that could contain a bar comes last: SLURM's reasons
in squeue, names in sacct. Lines of another form are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpuherd.engines.base import End, Phase, Sighting
from gpuherd.engines.slurm.node import hosts
from gpuherd.errors import UsageError, printable

# Job or array, place in it, state, first node, name; then what it waits for or how it ended.
SQUEUE_FORMAT = "%F|%K|%T|%B|%j|%r"
SACCT_FORMAT = "JobID,State,NodeList,Reason,JobName"

_WAITING, _RUNNING, _ENDED = Phase.WAITING, Phase.RUNNING, Phase.ENDED
_STATES: dict[str, tuple[Phase, End | None]] = {
    "PENDING": (_WAITING, None),
    "CONFIGURING": (_WAITING, None),
    "REQUEUED": (_WAITING, None),
    "REQUEUE_FED": (_WAITING, None),
    "REQUEUE_HOLD": (_WAITING, None),
    "RESV_DEL_HOLD": (_WAITING, None),
    "SPECIAL_EXIT": (_WAITING, None),
    # Another cluster of a federation has it; its node reports through files as always.
    "REVOKED": (_WAITING, None),
    "RUNNING": (_RUNNING, None),
    "SUSPENDED": (_RUNNING, None),
    "STOPPED": (_RUNNING, None),
    "RESIZING": (_RUNNING, None),
    "SIGNALING": (_RUNNING, None),
    "STAGE_OUT": (_RUNNING, None),
    "COMPLETING": (_RUNNING, None),
    "COMPLETED": (_ENDED, End.OK),
    "FAILED": (_ENDED, End.FAILED),
    # Its own deadline, which another try would miss too.
    "DEADLINE": (_ENDED, End.FAILED),
    "CANCELLED": (_ENDED, End.CANCELLED),
    "PREEMPTED": (_ENDED, End.PREEMPTED),
    "TIMEOUT": (_ENDED, End.TIME_UP),
    "OUT_OF_MEMORY": (_ENDED, End.OUT_OF_MEMORY),
    "NODE_FAIL": (_ENDED, End.NODE_LOST),
    "BOOT_FAIL": (_ENDED, End.NODE_LOST),
}
_UNKNOWN = (_RUNNING, None)
# States that say more than the reason in the same row.
_TOLD_AS_REASON = frozenset(
    {"SUSPENDED", "CONFIGURING", "COMPLETING", "SPECIAL_EXIT", "REVOKED", "REQUEUE_HOLD", "STOPPED", "DEADLINE"}
)
_NO_REASON = frozenset({"", "None", "(null)", "N/A"})
_NO_NODE = frozenset({"", "n/a", "N/A", "(null)", "None assigned", "None"})
_JOB = re.compile(r"(\d{1,20})(?:_(?:(\d{1,20})|\[([^\]]*)\]))?(?:\+\d+)?")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?")
_BY = re.compile(r"CANCELLED by (\d{1,20})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of squeue or sacct.

    Attributes:
        job: the number of the job or array, in digits.
        places: the parcels of an array that it is about; None for a plain job, or an array that names none.
        state: SLURM's word, like RUNNING; ``by``: the user id that sacct gives with CANCELLED.
        name: the job's.
    """

    job: str
    places: tuple[range, ...] | None
    state: str
    name: str
    node: str | None = None
    reason: str | None = None
    by: int | None = None

    def speaks_of(self, place: int) -> bool:
        """Whether the parcel at this place of its piece is named."""
        return self.places is not None and any(place in each for each in self.places)

    @property
    def is_whole(self) -> bool:
        """Whether it is about the job as a whole, which may be a single parcel."""
        return self.places is None

    @property
    def ended(self) -> bool:
        return _STATES.get(self.state, _UNKNOWN)[0] is Phase.ENDED

    @property
    def end(self) -> End | None:
        """How it ended; NEVER for a job that waited for another one that failed."""
        end = _STATES.get(self.state, _UNKNOWN)[1]
        never = end is End.CANCELLED and self.by is None and (self.reason or "").startswith("Dependency")
        return End.NEVER if never else end

    def handle(self, place: int) -> str:
        """SLURM's id of the parcel at this place."""
        return self.job if self.is_whole and place == 0 else f"{self.job}_{place}"

    def sighting(self, place: int, by: str | None = None) -> Sighting:
        """The state of the parcel at this place. ``by``: who cancelled it."""
        phase, end, reason = _STATES.get(self.state, _UNKNOWN)[0], self.end, self.reason
        if self.state in _TOLD_AS_REASON or self.state not in _STATES:
            word = self.state.lower().replace("_", " ")
            reason = word if reason is None else f"{word}: {reason}"
        return Sighting(
            handle=self.handle(place),
            phase=phase,
            reason=reason,
            end=end,
            by=by if end is End.CANCELLED else None,
            node=self.node,
        )


def squeue(text: str) -> Iterator[Row]:
    """The rows of ``squeue --noheader -o SQUEUE_FORMAT``."""
    for line in text.splitlines():
        fields = line.split("|", 5)
        if len(fields) != 6:
            continue
        job, place, state, node, name, reason = fields
        places = _places(place)
        if not _is_number(job) or places == ():
            continue
        yield Row(job=job, places=places, state=state, name=name, node=_node(node), reason=_reason(reason))


def sacct(text: str) -> Iterator[Row]:
    """The rows of ``sacct --noheader --parsable2 --allocations --format=SACCT_FORMAT``."""
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) != 5:
            continue
        job, state, nodes, reason, name = fields
        found = _JOB.fullmatch(job)
        if found is None:
            continue
        one, several = found[2], found[3]
        places = None if one is None and several is None else _places(one if one is not None else several)
        if places == ():
            continue
        by = _BY.match(state)
        yield Row(
            job=found[1],
            places=places,
            state=state.partition(" ")[0].rstrip("+"),
            name=name,
            node=_node(first_node(nodes)),
            reason=_reason(reason),
            by=int(by[1]) if by else None,
        )


def first_node(nodes: str) -> str:
    """The first of a list of nodes; the text itself where that is none.

    >>> first_node("n[08-11,20],gpu3"), first_node("a,b"), first_node("rack[1-2]-n7")
    ('n08', 'a', 'rack1-n7')
    """
    try:
        return next(hosts(nodes))
    except UsageError:
        return nodes


def job_number(printed: str) -> str | None:
    """The job number in the output of ``sbatch --parsable`` (``123`` or ``123;cluster``); None where there is none."""
    for line in reversed(printed.splitlines()):
        word = line.strip().partition(";")[0]
        if _is_number(word):
            return word
    return None


def place_of(handle: str) -> tuple[str, int]:
    """The job's number of a handle, and the place in the job."""
    job, _, place = handle.partition("_")
    return job, int(place) if place.isdigit() else 0


def short_lists(handles: Iterator[str] | list[str], most: int) -> Iterator[list[str]]:
    """Handles in SLURM's short form (``7_[0-41,43]``, ``8``), at most so many parcels in each list.

    >>> list(short_lists(["8", "7_2", "7_0", "7_1", "7_5"], 3))
    [['7_[0-2]'], ['7_5', '8']]
    """
    arrays: dict[str, list[int]] = {}
    for handle in handles:
        job, mark, place = handle.partition("_")
        known = arrays.setdefault(job, [])
        if mark:
            known.append(int(place))
    words: list[str] = []
    left = most
    for job in sorted(arrays, key=int):
        places = sorted(set(arrays[job]))
        if not places:
            if left == 0:
                yield words
                words, left = [], most
            words.append(job)
            left -= 1
        while places:
            if left == 0:
                yield words
                words, left = [], most
            now, places = places[:left], places[left:]
            words.append(f"{job}_{_ranges(now)}")
            left -= len(now)
    if words:
        yield words


def _ranges(places: list[int]) -> str:
    if len(places) == 1:
        return str(places[0])
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    return "[" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts) + "]"


def _places(text: str) -> tuple[range, ...] | None:
    """The places of ``4-9%2``, ``1,3,8-20:4`` or ``7``; None for a plain job, () for a text of another form."""
    if text in ("N/A", ""):
        return None
    found = []
    for part in text.partition("%")[0].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            return ()
        low = int(match[1])
        found.append(range(low, int(match[2] or low) + 1, int(match[3] or 1) or 1))
    return tuple(found)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 20


def _node(word: str) -> str | None:
    return None if word in _NO_NODE else printable(word)


def _reason(word: str) -> str | None:
    return None if word in _NO_REASON else printable(word)
