"""What the script of the answers is told besides the answers themselves. Pure."""

from __future__ import annotations

from typing import Any

from gpuherd.errors import printable
from gpuherd.qa.look.chunks import CHUNK, Chunks
from gpuherd.qa.look.shown import Shown


def index_values(shown: Shown, chunks: Chunks, scored: int) -> dict[str, Any]:
    """What the script of the answers is told.

    Args:
        chunks: the answers that the page holds.
        scored: of how many answers, from the first on, it holds scores and verdicts.
    """
    return {
        "answers": len(shown.answers),
        "shown": chunks.answers,
        "scored": scored,
        "chunk": CHUNK,
        "relevance": bool(shown.relevance),
        "judges": [printable(each.meta.name) for each in shown.judgings],
        "measures": [printable(each.name) for each in shown.scores],
    }
