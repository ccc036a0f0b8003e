"""The page of a run of answers: one HTML file with all that it shows inside it, which asks nothing of any network.

What strangers wrote (questions, answers, replies of judges, names) enters the page deflated and in base64, or through
Jinja's autoescape, and the script puts it on the screen as text only, with the signs that can't be seen written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite
from gpuherd.qa.evaluation.result import RunEvaluation
from gpuherd.qa.grading.label_quality import LabelWarning, WarningKind
from gpuherd.qa.report.answers import FILTERS, LEVELS, SCALES, VERDICTS, AnswerChunks, chunks_of, index_values
from gpuherd.qa.report.reading import ReportedRun, reported_run
from gpuherd.qa.report.views import first_state, views_of
from gpuherd.qa.runs import Run
from gpuherd.report.page import MOST_BYTES, PageContents, as_text, by_weight, frame_bytes, packed_views, render_page

if TYPE_CHECKING:
    from rich.console import Console


def notes_of(run: ReportedRun, chunks: AnswerChunks) -> list[str]:
    """Doubts about the labels that figures are made of, then about other judgings', then what the page leaves out."""
    names = [each.meta.name for each in run.judgings]
    evaluated = [(each.judging, each.warnings) for each in (run.evaluation.judges if run.evaluation else ())]
    audited = [(each.name, each.warnings) for each in run.audits]
    doubts: dict[object, str] = {}
    for what, text in (*_label_warnings(evaluated, names), *_label_warnings(audited, names)):
        doubts.setdefault(what, text)
    notes = [*doubts.values(), *run.notes]
    if chunks.cut:
        notes.append("To limit the size of this page, long texts and samples are cut; answers.jsonl has all.")
    if chunks.answers < len(run.answers):
        notes.append(
            f"The first {chunks.answers} of {len(run.answers)} answers can be looked at; all are in every figure."
        )
    return list(dict.fromkeys(notes))


def _label_warnings(
    judgings: Sequence[tuple[str, Sequence[LabelWarning]]], names: Sequence[str]
) -> Iterator[tuple[object, str]]:
    """What each is about, and its sentence."""
    doubts = [(name, each) for name, warnings in judgings for each in warnings]
    gravest_first = list(WarningKind)
    for name, each in sorted(doubts, key=lambda doubt: gravest_first.index(doubt[1].kind)):
        # Of several judgings: whose labels?
        text = f"{name}: {each.text}" if len(names) > 1 and name not in each.text else each.text
        # That two judgings part is the same, whichever of them says so.
        yield frozenset(each for each in names if each in text) if each.kind is WarningKind.FLIPPED else text, text


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


def write_page(run: Run, evaluation: RunEvaluation | None, path: Path, console: Console | None = None) -> Page:
    """Writes the page of a run and one of its evaluations, whole or not at all. Returns it.

    ``console`` shows how far it is, where it takes long.

    Raises:
        MissingExtra: Jinja2 is not installed.
        DamagedRun, BadJudging, BadScoring: a file that it shows is damaged.
        CannotWrite.
    """
    page = make_page(reported_run(run, evaluation, console))
    try:
        atomic_write(path.absolute(), page.html)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file") from None
    return page


def make_page(run: ReportedRun, *, most_bytes: int = MOST_BYTES) -> Page:
    """The page of a run.

    Args:
        run: what was read of the run.
        most_bytes: what the page may grow to; long texts are cut first, then answers are left out.

    Raises:
        MissingExtra: Jinja2 is not installed.
    """
    assets = Path(__file__).parent
    contents = PageContents(
        title=run.title,
        views=views_of(run, len(run.answers)),
        facts=[(name, value, "") for name, value in run.facts],
        settings_title="How the answers were made",
        settings=run.settings,
        without_script="The same is in the run folder: answers.jsonl, judgments/, scores/ and evaluations/.",
        state=first_state(run),
        scripts=[assets / "answers.js"],
        styles=[assets / "answers.css"],
        first="measures" if run.evaluation else "answers",
    )
    notes = notes_of(run, AnswerChunks((), 0, LEVELS[-1]))
    without = sum(map(len, packed_views(contents).values())) + frame_bytes(replace(contents, notes=notes))
    room = most_bytes - without
    held = _beginning(run, room // 2)
    scores, verdicts = _packed_scores(held), _packed_verdicts(held)
    chunks = chunks_of(held, room - len(scores) - len(verdicts))
    html = render_page(
        replace(
            contents,
            views=views_of(run, chunks.answers),
            notes=notes_of(run, chunks),
            extra=index_values(run, chunks, len(held.answers)) | {"filters": FILTERS, "scales": SCALES},
            blobs={"scores": scores, "verdicts": verdicts}
            | {f"chunk-{number}": text for number, text in enumerate(chunks.texts)},
        )
    )
    return Page(html, chunks.answers, chunks.cut)


def _beginning(run: ReportedRun, room: int) -> ReportedRun:
    """The run, or as many of its first answers as leave some room next to their scores: of 50,000 answers sixty scores
    each would fill the page alone."""
    size = len(_packed_scores(run))
    if size <= room:
        return run
    count = max(0, len(run.answers) * room // size)
    scores = [replace(each, values=each.values[:count]) for each in run.scores]
    return replace(run, answers=run.answers[:count], scores=scores)


def _packed_scores(run: ReportedRun) -> str:
    """float32 in full, a measure after the other; NaN where a score is not defined."""
    import numpy as np

    values = [[math.nan if value is None else value for value in each.values] for each in run.scores]
    with np.errstate(over="ignore"):
        return as_text(by_weight(np.array(values, "<f4").reshape(-1)))


def _packed_verdicts(run: ReportedRun) -> str:
    """A byte an answer, a judge after the other: the verdict's place, or one more where there is none."""
    codes = bytearray()
    for judged in run.judgings:
        for each in run.answers:
            found = judged.judgments.get((each.question.id, each.main_name))
            codes.append(_UNJUDGED if found is None else VERDICTS.index(found.verdict))
    return as_text(bytes(codes))
