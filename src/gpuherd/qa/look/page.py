"""The page of a run of answers: one HTML file with all that it shows inside it, which asks nothing of any network.

What strangers wrote (questions, answers, replies of judges, names) enters the page deflated and in base64, or through
Jinja's autoescape, and the script puts it on the screen as text only, with the signs that can't be seen written out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite
from gpuherd.qa.evaluation.result import Evaluation
from gpuherd.qa.look.chunks import LEVELS, VERDICTS, Chunks, chunks_of
from gpuherd.qa.look.contents import index_values
from gpuherd.qa.look.notes import notes_of
from gpuherd.qa.look.reading import shown_of
from gpuherd.qa.look.shown import Shown
from gpuherd.qa.look.views import first_state, views_of
from gpuherd.qa.runs import Run
from gpuherd.report.packing import as_text, by_weight
from gpuherd.report.page import MOST_BYTES, PageContents, frame_bytes, packed_views, render_page

if TYPE_CHECKING:
    from rich.console import Console

_UNJUDGED = len(VERDICTS)


@dataclass(frozen=True, slots=True)
class Page:
    """The finished page.

    Attributes:
        html: its bytes, UTF-8.
        answers: how many answers can be looked at in it; all are in its figures.
        cut: whether texts are shorter than they may be at most, for want of room.
    """

    html: bytes
    answers: int
    cut: bool


def write_page(run: Run, evaluation: Evaluation | None, path: Path, console: Console | None = None) -> Page:
    """Writes the page of a run and one of its evaluations, whole or not at all. Returns it.

    ``console`` shows how far it is, where it takes long.

    Raises:
        MissingExtra: Jinja2 is not installed.
        DamagedRun, BadJudging, BadScoring: a file that it shows is damaged.
        CannotWrite.
    """
    page = make_page(shown_of(run, evaluation, console))
    try:
        atomic_write(path.absolute(), page.html)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file") from None
    return page


def make_page(shown: Shown, *, most_bytes: int = MOST_BYTES) -> Page:
    """The page of a run.

    Args:
        shown: what was read of the run.
        most_bytes: what the page may grow to; long texts are cut first, then answers are left out.

    Raises:
        MissingExtra: Jinja2 is not installed.
    """
    assets = Path(__file__).parent
    contents = PageContents(
        title=shown.title,
        views=views_of(shown, len(shown.answers)),
        facts=[(name, value, "") for name, value in shown.facts],
        settings_title="How the answers were made",
        settings=shown.settings,
        without_script="The same is in the run folder: answers.jsonl, judgments/, scores/ and evaluations/.",
        state=first_state(shown),
        scripts=[assets / "answers.js"],
        styles=[assets / "answers.css"],
        first="measures" if shown.evaluation else "answers",
    )
    notes = notes_of(shown, Chunks((), 0, LEVELS[-1]))
    without = sum(map(len, packed_views(contents).values())) + frame_bytes(replace(contents, notes=notes))
    room = most_bytes - without
    held = _beginning(shown, room // 2)
    scores, verdicts = _packed_scores(held), _packed_verdicts(held)
    chunks = chunks_of(held, room - len(scores) - len(verdicts))
    html = render_page(
        replace(
            contents,
            views=views_of(shown, chunks.answers),
            notes=notes_of(shown, chunks),
            extra=index_values(shown, chunks, len(held.answers)),
            blobs={"scores": scores, "verdicts": verdicts}
            | {f"chunk-{number}": text for number, text in enumerate(chunks.texts)},
        )
    )
    return Page(html, chunks.answers, chunks.cut)


def _beginning(shown: Shown, room: int) -> Shown:
    """The run, or as many of its first answers as leave some room beside their scores: of 50,000 answers sixty scores
    each would fill the page alone."""
    size = len(_packed_scores(shown))
    if size <= room:
        return shown
    count = max(0, len(shown.answers) * room // size)
    scores = [replace(each, values=each.values[:count]) for each in shown.scores]
    return replace(shown, answers=shown.answers[:count], scores=scores)


def _packed_scores(shown: Shown) -> str:
    """float32 in full, a measure after the other; NaN where a score is not defined."""
    import numpy as np

    values = [[math.nan if value is None else value for value in each.values] for each in shown.scores]
    with np.errstate(over="ignore"):
        return as_text(by_weight(np.array(values, "<f4").reshape(-1)))


def _packed_verdicts(shown: Shown) -> str:
    """A byte an answer, a judge after the other: the verdict's place, or one more where there is none."""
    codes = bytearray()
    for judged in shown.judgings:
        for each in shown.answers:
            which = "sample-0" if each.greedy is None else "greedy"
            found = judged.judgments.get((each.question.id, which))
            codes.append(_UNJUDGED if found is None else VERDICTS.index(found.verdict))
    return as_text(bytes(codes))
