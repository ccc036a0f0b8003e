"""What is said of jobs in an engine's hands to those who look on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpuherd.jobs.failures import clean
from gpuherd.jobs.handover.followed import Followed


def in_line_sentence(followed: Iterable[Followed], title: str) -> str | None:
    """How many wait in the engine, and what it says most often why; None when none does."""
    waiting = [each for each in followed if not each.has_begun]
    if not waiting:
        return None
    reasons = Counter(each.in_line for each in waiting if each.in_line)
    why = f" ({clean(reasons.most_common(1)[0][0])})" if reasons else ""
    return f"{len(waiting)} wait{'s' if len(waiting) == 1 else ''} in {title}{why}"
