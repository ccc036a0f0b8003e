"""From when a GPU counts as free in a simulation: the rule of ``gpus.idle`` and ``jobs.gpuwatch``, solved for time.

A real dispatcher looks again and again while a job waits. A simulation knows when the GPU was left, so that it can say
at once which look will be the one that finds it free. tests/simulate/test_quiet.py steps through the real rule, look by
look, and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# From a job's end to the next start on its GPU, as measured (benchmarks/dispatch.py): the look that finds it clean, the
# lease, the look under the lease, the start.
TURNAROUND_S = 0.005
# A row of checks with a longer hole in it is no row: as in jobs.gpuwatch.
HOLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Quiet:
    """How many clean looks make a GPU free, and the seconds between two."""

    max_checks: int
    interval_s: float

    @property
    def row_s(self) -> float:
        """Seconds from the first clean look of a row to the last."""
        return (self.max_checks - 1) * self.interval_s

    @property
    def quiet_s(self) -> float:
        """Seconds for which a GPU must be left alone before a paused job goes on there."""
        return self.max_checks * self.interval_s

    @property
    def hole_s(self) -> float:
        """Seconds without a look after which earlier ones count no more."""
        return max(HOLE_S, 5 * self.interval_s)

    def free_at(self, clean_since: float, ours_left: bool, looking_since: float) -> float:
        """The second at which the GPU is free for a job.

        Args:
            clean_since: nobody has used it since then.
            ours_left: who left it then was a job of ours.
            looking_since: looks have come every ``interval_s`` since then, without a hole.
        """
        late = looking_since - clean_since
        if ours_left and late <= self.hole_s:
            # One clean look is enough. Looks come at once after our own job's end, and at once when looking begins.
            return looking_since if late > 0 else clean_since + TURNAROUND_S
        if late >= 0:
            return looking_since + self.row_s
        looks = math.ceil(-late / self.interval_s)
        return looking_since + looks * self.interval_s + self.row_s
