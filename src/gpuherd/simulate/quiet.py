"""From when a GPU counts as free in a simulation: the rule of ``gpus.idle`` and ``jobs.gpuwatch``, solved for time.

A real dispatcher looks again and again while a job waits. A simulation knows when the GPU was left, so that it can say
at once which look will be the one that finds it free. tests/simulate/test_quiet.py steps through the real rule, look by
look, and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuherd.gpus.idle import IdleRule

# From a job's end to the next start on its GPU, as measured (benchmarks/dispatch.py): the look that finds it clean, the
# lease, the look under the lease, the start.
TURNAROUND_S = 0.005


@dataclass(frozen=True, slots=True)
class Quiet:
    """When a GPU is free by this rule."""

    rule: IdleRule

    def free_at(self, clean_since: float, ours_left: bool, looking_since: float) -> float:
        """The second at which the GPU is free for a job.

        Args:
            clean_since: nobody has used it since then.
            ours_left: who left it then was a job of ours.
            looking_since: looks have come every ``rule.look_s`` since then, without a hole.
        """
        late = looking_since - clean_since
        if ours_left and late <= max(self.rule.quiet_s, self.rule.hole_s):
            # One clean look is enough. Looks come at once after our own job's end, and at once when looking begins.
            return looking_since if late > 0 else clean_since + TURNAROUND_S
        looks = math.ceil(max(0.0, -late) / self.rule.look_s)
        return looking_since + looks * self.rule.look_s + self.rule.quiet_s
