"""The page of a run of post-training: one HTML file with all that it shows inside it, which asks nothing of a network.

What strangers wrote (problems, completions, names) enters the page deflated and in base64, or through Jinja's
autoescape, and the script puts it on the screen as text only, with the signs that can't be seen written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite
from gpuherd.posttrain.report.completions import LEVELS, chunks_of
from gpuherd.posttrain.report.figures import policy_words
from gpuherd.posttrain.report.reading import RunReport
from gpuherd.posttrain.report.views import first_state, views_of
from gpuherd.report.page import MOST_BYTES, PageContents, frame_bytes, packed_views, render_page

_LEAST_FOR_SAMPLES = 500_000


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


def write_page(run: RunReport, path: Path) -> Page:
    """Writes the page, whole or not at all. Returns it. Raises MissingExtra without Jinja2, CannotWrite."""
    page = make_page(run)
    try:
        atomic_write(path.absolute(), page.html)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with --output") from None
    return page


def make_page(run: RunReport, *, most_bytes: int = MOST_BYTES) -> Page:
    """The page of a run; ``most_bytes``: what it may grow to, completions are cut first. Raises MissingExtra."""
    contents = PageContents(
        title=run.title,
        views=views_of(run),
        facts=run.facts,
        notes=run.notes,
        settings_title="What was asked for",
        settings=run.settings,
        without_script=(
            "The same is in the run folder: result.json and answers.jsonl of each evaluation, curves.jsonl of each "
            "training."
        ),
        state=first_state(run),
        scripts=[Path(__file__).parent / "samples.js"],
    )
    without = sum(map(len, packed_views(contents).values())) + frame_bytes(contents)
    chunks = chunks_of(run.samples, max(most_bytes - without, _LEAST_FOR_SAMPLES))
    held = run.samples[: len(chunks.texts)]
    extra = {
        "samples": [policy_words(each.row) for each in held],
        "left_out": len(run.samples) - len(chunks.texts),
    }
    blobs = {f"chunk-{at}": text for at, text in enumerate(chunks.texts)}
    html = render_page(replace(contents, extra=extra, blobs=blobs))
    cut = chunks.limits is not LEVELS[0] or len(chunks.texts) < len(run.samples)
    return Page(html, len(run.gathered.rows), len(chunks.texts), cut)
