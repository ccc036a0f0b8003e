"""The page of a run of post-training: one HTML file with all that it shows inside it, which asks nothing of a network.

What strangers wrote (problems, completions, names) enters the page deflated and in base64, or through Jinja's
autoescape, and the script puts it on the screen as text only, with the signs that can't be seen written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, printable
from gpuherd.posttrain.look.contents import LEVELS, chunks_of, index_values
from gpuherd.posttrain.look.shown import Shown
from gpuherd.report.html_page import SHARED, rendered
from gpuherd.report.packing import packed_json

MOST_BYTES = 9_600_000
_FRAME = 200_000  # template, scripts, styles, settings and notes
_LEAST_FOR_SAMPLES = 500_000
_ASSETS = Path(__file__).parent / "page"
_SHARED_SCRIPTS = ("unpack.js", "draw.js", "table.js", "marked.js", "figures.js", "lines.js")
_SCRIPTS = (
    "data.js",
    "verdict.js",
    "summary.js",
    "rounds.js",
    "divergence.js",
    "learning.js",
    "jobs.js",
    "samples.js",
    "main.js",
)


@dataclass(frozen=True, slots=True)
class Page:
    """The finished page.

    Attributes:
        html: its bytes, UTF-8.
        policies: how many rows its tables have.
        samples: of how many policies it holds completions.
        cut: whether there are fewer completions, or shorter texts, than there may be at most, for want of room.
    """

    html: bytes
    policies: int
    samples: int
    cut: bool


def write_page(shown: Shown, path: Path) -> Page:
    """Writes the page, whole or not at all. Returns it. Raises MissingExtra without Jinja2, CannotWrite."""
    page = make_page(shown)
    try:
        atomic_write(path.absolute(), page.html)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with --output") from None
    return page


def make_page(shown: Shown, *, most_bytes: int = MOST_BYTES) -> Page:
    """The page of a run; ``most_bytes``: what it may grow to, completions are cut first. Raises MissingExtra."""
    without = len(packed_json(index_values(shown, chunks_of((), 0))))
    room = max(most_bytes - without - _FRAME, _LEAST_FOR_SAMPLES)
    chunks = chunks_of(shown.samples, room)
    html = rendered(
        _ASSETS / "page.html.j2",
        [SHARED / name for name in _SHARED_SCRIPTS] + [_ASSETS / name for name in _SCRIPTS],
        [SHARED / "base.css", SHARED / "plots.css", _ASSETS / "style.css"],
        title=printable(shown.title),
        facts=[(printable(name), printable(value), view) for name, value, view in shown.facts],
        settings=_printable(shown.settings),
        notes=[printable(each) for each in shown.notes],
        index=packed_json(index_values(shown, chunks)),
        chunks=chunks.texts,
    )
    cut = chunks.limits is not LEVELS[0] or len(chunks.texts) < len(shown.samples)
    return Page(html, len(shown.gathered.rows), len(chunks.texts), cut)


def _printable(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(printable(name), printable(value)) for name, value in pairs]
