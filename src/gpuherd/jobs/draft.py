"""The pool as it would be if the decision so far were carried out, with what is kept for somebody taken out.

Changes are made in the pool itself, which saves a copy of it, and are taken back when the decision is made. It knows
how much is left to give, and no rule by which to give it.
"""

from __future__ import annotations

from dataclasses import replace

from gpuherd.jobs.decision import GpuView, Limits
from gpuherd.jobs.pool import Machine, Pool

# Why a GPU is not free, by the decision that is being made.
GIVEN = "goes to a job before this one"
KEPT = "kept for a job before this one"

# How good a machine is for a job: GPUs free, lacking (negative), and MB of room on those that lack.
Rank = tuple[int, int, int]


class Draft:
    """One decision's view of a pool.

    Attributes:
        budget: GPUs that may still be taken into use; below 0 when a large job's part of the limit is kept for it.
        shared: there are GPUs on which sharing jobs run.
        ranks: how good machines are, by what jobs ask for and the machine's place; forgotten when something changes
            there.
    """

    def __init__(self, pool: Pool, limits: Limits):
        self.pool = pool
        self.limits = limits
        self.budget = limits.most_gpus - pool.in_use
        self.shared = pool.open_count > 0
        self.ranks: dict[tuple[int, int | None, frozenset[str]], dict[int, Rank]] = {}
        self._changed: set[str] = set()
        self._originals: list[GpuView] = []

    @property
    def gpus_left(self) -> int:
        """How many GPUs one more job could have for itself, as far as their number goes."""
        return max(0, min(self.budget, self.pool.free))

    def change(self, view: GpuView) -> None:
        """Takes in what a GPU is to be."""
        uuid = view.gpu.uuid
        if uuid not in self._changed:
            self._changed.add(uuid)
            self._originals.append(self.pool.view(uuid))
        self.pool.update(view)
        if self.ranks:
            self.forget_rank(self.pool.machine_of(uuid))

    def close(self, view: GpuView) -> None:
        """Nothing more is added to a shared GPU."""
        self.change(replace(view, shareable_mb=None, busy=KEPT))

    def forget_rank(self, machine: Machine) -> None:
        """Something has changed on this machine."""
        for known in self.ranks.values():
            known.pop(machine.place, None)

    def put_back(self) -> None:
        """Leaves the pool as it was."""
        for view in reversed(self._originals):
            self.pool.update(view)
