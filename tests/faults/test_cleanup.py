"""What hides from the end of its job is ended, and the GPU's memory is back: the short form of benchmarks/cleanup."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.cleanup import WITHIN_S, clean_up


def test_what_jobs_leave_behind_is_gone_in_two_seconds(tmp_path: Path) -> None:
    """Of most: on a machine that does other work too one or the other may take longer. The benchmark says of all."""
    gone_s = clean_up(20, tmp_path)
    assert len(gone_s) == 20
    assert statistics.median(gone_s) <= WITHIN_S
