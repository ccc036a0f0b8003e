"""The GPUs of a simulation: who uses each, since when one is clean, and the pool that the policy decides on.

It stands where a real dispatcher has its ``GpuWatch``. It knows no events: the simulation tells it what happens when.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.jobs.policy import GpuView, Pool
from gpuherd.jobs.sharing import Tenant, shareable_mb
from gpuherd.simulate.attempt import Attempt, Slot
from gpuherd.simulate.cluster import Machine
from gpuherd.simulate.quiet import Quiet

_STRANGER = "someone uses it"
_SETTLING = "not yet free for long enough"
_OURS = "our own job runs on it"
_LEFT_OUT = "left out for a while, because jobs failed on it"


class Floor:
    """All GPUs. ``pool``: what the policy is told of them; ``slots``: by number; ``news``: how often one has become
    free, or was left out."""

    def __init__(self, machines: Sequence[Machine], quiet: Quiet):
        self.slots = [
            Slot(0, gpu, "" if len(machines) == 1 else f"machine {number}")
            for number, gpus in enumerate(machines)
            for gpu in gpus
        ]
        self._quiet = quiet
        self._by_uuid: dict[str, Slot] = {}
        for number, slot in enumerate(self.slots):
            slot.number = number
            self._by_uuid[slot.gpu.uuid] = slot
        self.pool = Pool(GpuView(slot.gpu, _SETTLING, machine=slot.machine) for slot in self.slots)
        # Clean, but not yet for long enough; and since when looks are made, on which all verdicts rest.
        self._settling = set(range(len(self.slots)))
        self.news = 0
        self._looking_since: float | None = None

    def slot(self, uuid: str) -> Slot:
        """The GPU with this UUID."""
        return self._by_uuid[uuid]

    def take(self, slot: Slot, attempt: Attempt) -> None:
        """An attempt of ours begins to run here."""
        slot.attempts.append(attempt)
        self._settling.discard(slot.number)
        self._show(slot)

    def leave(self, slot: Slot, attempt: Attempt, now: float) -> float | None:
        """An attempt of ours has ended here. Returns when the GPU is free again if looks are made, else None."""
        slot.attempts.remove(attempt)
        return self._left(slot, now, by_us=True)

    def come(self, slot: Slot) -> None:
        """A stranger begins to use it."""
        slot.stranger = True
        self._settling.discard(slot.number)
        self._show(slot)

    def go(self, slot: Slot, now: float) -> float | None:
        """The stranger has left it. Returns as ``leave``."""
        slot.stranger = False
        return self._left(slot, now, by_us=False)

    def look(self, now: float, since: float) -> None:
        """Brings the pool up to date. ``since``: looks are made since then; those of an earlier row count no more."""
        if since != self._looking_since:
            self._looking_since = since
            for slot in self.slots:
                if slot.clean and slot.number not in self._settling:
                    self._settling.add(slot.number)
                    self._show(slot)
        ready = [number for number in self._settling if self._free_at(self.slots[number]) <= now]
        for number in sorted(ready):
            self._settling.remove(number)
            self._show(self.slots[number])
        self.news += len(ready)
        if len(ready) > len(self._settling):
            # A set stays as large as it ever was, and to go through it takes as long.
            self._settling = set(self._settling)

    def show(self, slots: Sequence[Slot]) -> None:
        """Tells the pool what has changed for the attempts on these GPUs."""
        for slot in slots:
            self._show(slot)

    def leave_out(self, slot: Slot, left_out: bool) -> None:
        """Nothing of ours is started on it from now on, or may be again."""
        slot.left_out = left_out
        self.news += 1
        self._show(slot)

    def _left(self, slot: Slot, now: float, *, by_us: bool) -> float | None:
        if slot.clean:
            slot.clean_since, slot.left = now, by_us
            self._settling.add(slot.number)
        self._show(slot)
        return self._free_at(slot) if slot.clean and self._looking_since is not None else None

    def _free_at(self, slot: Slot) -> float:
        return self._quiet.free_at(slot.clean_since, slot.left, self._looking_since or 0.0)

    def _show(self, slot: Slot) -> None:
        """Tells the pool of it."""
        settling = slot.number in self._settling
        busy = None
        if slot.attempts:
            busy = _OURS
        elif slot.left_out:
            busy = _LEFT_OUT
        elif slot.stranger or settling:
            busy = _STRANGER if slot.stranger else _SETTLING
        self.pool.update(
            GpuView(
                slot.gpu,
                busy,
                ours=bool(slot.attempts),
                shareable_mb=_shareable_mb(slot) if slot.attempts else None,
                returning=settling and slot.left and not slot.left_out,
                machine=slot.machine,
                over_at=_over_at(slot),
            )
        )


def _over_at(slot: Slot) -> float | None:
    """When the attempt that has the GPU for itself is over at the latest, by its time limit."""
    alone = [attempt for attempt in slot.attempts if not attempt.shared]
    return alone[0].over_at if alone else None


def _shareable_mb(slot: Slot) -> int | None:
    """MB that may still be promised on a GPU where only sharing jobs of ours run; None when nothing may be added."""
    if slot.stranger or slot.left_out or not all(attempt.shared for attempt in slot.attempts):
        return None
    tenants = [Tenant(a.standing.job.name, a.standing.memory_mb or 0) for a in slot.attempts]
    return shareable_mb(slot.gpu, tenants)
