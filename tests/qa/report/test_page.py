"""The page as text: whole, within its size, the same each time, and nothing that a stranger wrote can break out."""

from __future__ import annotations

import base64
import json
import random
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.qa.report.made_runs import answered, made_audits, made_evaluation, made_run

from gpuherd.qa.grading.label_quality import LabelWarning
from gpuherd.qa.grading.label_quality import WarningKind as Doubt
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.report.answers import LEVELS, VERDICTS, AnswerChunks
from gpuherd.qa.report.page import make_page, notes_of
from gpuherd.qa.report.reading import MeasureScores, ReportedRun
from gpuherd.report.page import MOST_BYTES

HOSTILE = "a</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}\u202e\x1b[31m"


@pytest.fixture(scope="module")
def run() -> ReportedRun:
    return made_run(150, samples=3, weightings=2)


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def blob(text: str, name: str) -> bytes:
    found = re.search(rf'id="{name}">([^<]*)<', text)
    assert found is not None
    return zlib.decompress(base64.b64decode(found[1]))


def widgets(node: Any, kind: str) -> list[dict[str, Any]]:
    """What each widget of a kind among some nodes is told."""
    if isinstance(node, dict):
        return [found for each in node.values() for found in widgets(each, kind)]
    if not isinstance(node, list):
        return []
    own = [node[1]] if len(node) == 2 and node[0] == kind and isinstance(node[1], dict) else []
    return own + [found for each in node for found in widgets(each, kind)]


def index_of(text: str) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(blob(text, "index"))
    return index


def test_the_page_has_everything_inside_it(run: ReportedRun) -> None:
    page = make_page(run)
    text = page.html.decode()
    index = index_of(text)
    assert (page.answers, page.cut, index["answers"], index["shown"]) == (150, False, 150, 150)
    assert index["measures"] == [each.name for each in run.scores]
    assert len(re.findall(r'id="chunk-\d+"', text)) == 2
    evaluation = run.evaluation
    assert evaluation is not None
    view = json.loads(blob(text, "view-measures"))
    words = json.dumps(view, ensure_ascii=False)
    for judge in evaluation.judges:
        assert f"{judge.right} right, {judge.wrong} wrong" in words
    tables = [each["rows"] for each in widgets(view, "table")]  # of each judge, without weightings and with them
    assert [len(rows) for rows in tables] == [6, 8, 6, 8]
    for rows, judge in zip(tables[1::2], evaluation.judges, strict=True):
        assert [row[2][0] for row in rows] == [each.auroc.value for each in judge.measures]
    roc = next(each for each in widgets(view, "chart") if each["label"] == "ROC curves")
    assert len(roc["data"]["lines"]) == sum(len(each.roc) for each in evaluation.judges[0].measures)
    labels = json.loads(blob(text, "view-labels"))
    assert [len(each["rows"]) > 3 for each in widgets(labels, "table") if each["label"] == "disagreements"] == [
        True
    ] * 2


def test_scores_and_verdicts_come_back(run: ReportedRun) -> None:
    text = make_page(run).html.decode()
    data = blob(text, "scores")
    count = len(data) // 4
    numbers = struct.unpack(
        f"<{count}f", bytes(data[weight * count + at] for at in range(count) for weight in range(4))
    )
    given = [value for measure in run.scores for value in measure.values]
    for found, value in zip(numbers, given, strict=True):
        assert (found != found) if value is None else found == pytest.approx(value, rel=1e-7)
    codes = blob(text, "verdicts")
    for place, judged in enumerate(run.judgings):
        for number, each in enumerate(run.answers):
            verdict = judged.judgments[(each.question.id, "greedy")].verdict
            assert VERDICTS[codes[place * 150 + number]] is verdict


def test_the_same_run_gives_the_same_page(run: ReportedRun) -> None:
    assert make_page(run).html == make_page(run).html


def test_a_run_that_nobody_judged_or_scored(run: ReportedRun) -> None:
    bare = replace(run, judgings=(), audits=(), scores=(), evaluation=None, relevance={}, clusters={})
    text = make_page(bare).html.decode()
    index = index_of(text)
    assert (index["judges"], index["measures"], index["first"]) == ([], [], "answers")
    assert b"gpuherd evaluate makes the figures" in blob(text, "view-measures")
    assert b"gpuherd judge labels the answers" in blob(text, "view-labels")


def test_an_empty_run() -> None:
    page = make_page(ReportedRun("run", (), (), ()))
    assert page.answers == 0
    assert index_of(page.html.decode())["answers"] == 0


def test_an_answer_that_was_not_judged_is_not_incorrect(run: ReportedRun) -> None:
    some = dict(list(run.judgings[0].judgments.items())[:3])
    text = make_page(replace(run, judgings=(replace(run.judgings[0], judgments=some),))).html.decode()
    assert blob(text, "verdicts")[3:] == bytes([len(VERDICTS)]) * 147


def test_one_class_and_no_figures(run: ReportedRun) -> None:
    verdicts = [Verdict.CORRECT] * 150
    evaluation = made_evaluation(run.scores, verdicts, run.judgings)
    view = json.loads(blob(make_page(replace(run, evaluation=evaluation)).html.decode(), "view-measures"))
    auroc = widgets(view, "table")[0]["rows"][0][2]
    assert auroc[0] is None and auroc[1][1] == {"title": "one class only"}


def test_numbers_that_are_none_do_not_become_json_that_is_none(run: ReportedRun) -> None:
    scores = MeasureScores("m", [float("inf"), 1e300, None] * 50)
    index = index_of(make_page(replace(run, scores=(scores,), evaluation=None)).html.decode())
    assert index["measures"] == ["m"]


def test_the_page_names_no_other_place(run: ReportedRun) -> None:
    text = make_page(run).html.decode()
    for tag, attributes in Elements(text).found:
        assert tag not in ("iframe", "object", "embed", "base", "form", "img")
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert set(re.findall(r"https?://[^\"')\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|@import|url\(|innerHTML|\beval\(", text)
    policy = next(a["content"] for _, a in Elements(text).found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert policy.count("'sha256-") == 3  # our script, the charts' library, our style
    assert "unsafe" not in policy


def test_hostile_words_stay_text(run: ReportedRun) -> None:
    hostile = replace(
        run,
        title=HOSTILE,
        facts=((HOSTILE, HOSTILE),),
        settings=((HOSTILE, HOSTILE),),
        notes=(HOSTILE,) * 2 + (HOSTILE + "2",) * 3,
    )
    text = make_page(hostile).html.decode()
    assert "alert(1)</script>" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert ">49<" not in text
    tags = [tag for tag, _ in Elements(text).found]
    assert tags.count("script") == 11  # index, four views, scores, verdicts, two chunks, the charts' library, our own
    assert "img" not in tags


def test_doubts_stand_first_and_once(run: ReportedRun) -> None:
    text = make_page(replace(run, notes=("Some rows were refused.",))).html.decode()
    notes = re.findall(r'class="note warn">([^<]*)<', text)
    one_class = [Verdict.CORRECT] * 150
    judgments = dict(run.judgings[1].judgments)
    judgments = {key: replace(each, verdict=one_class[0]) for key, each in judgments.items()}
    judged = (run.judgings[0], replace(run.judgings[1], judgments=judgments))
    doubted = make_page(replace(run, judgings=judged, audits=made_audits(judged), evaluation=None)).html.decode()
    for note in re.findall(r'class="note warn">([^<]*)<', doubted):
        assert "exact-89abcdef" in note or "llm_some-judge-01234567" in note  # of two judgings: whose labels?
    assert "no AUROC" in doubted
    assert notes[0] == "llm_some-judge-01234567 is doubtful &lt;b&gt;indeed&lt;/b&gt;."
    assert len(notes) == len(set(notes))
    assert notes[-1] == "Some rows were refused."


def test_a_large_run_keeps_within_its_size_and_says_what_it_leaves_out() -> None:
    draw = random.Random(3)
    many = [answered(number, draw, samples=4, words=120) for number in range(200)]
    run = ReportedRun("run", (), (), many)
    whole = make_page(run)
    assert not whole.cut
    assert len(whole.html) < MOST_BYTES
    tight = make_page(run, most_bytes=215_000)
    assert tight.cut
    assert len(tight.html) <= 215_000
    assert "To limit the size of this page, long texts and samples are cut" in tight.html.decode()
    least = make_page(run, most_bytes=105_000)
    assert least.answers < 200
    assert f"The first {least.answers} of 200 answers" in least.html.decode()


def test_the_gravest_doubt_stands_first_and_a_pair_of_judgings_once(run: ReportedRun) -> None:
    one, other = (each.meta.name for each in run.judgings)
    parting = "are two standards: 5% and 98% correct."
    evaluation = run.evaluation
    assert evaluation is not None
    few = LabelWarning(Doubt.FEW_OF_A_CLASS, "only 8 wrong among 400 answers.")
    blind = LabelWarning(Doubt.SAYS_ONE_THING, f"{other} calls all answers correct.")
    doubts = (
        (
            LabelWarning(Doubt.NOT_ATTEMPTED, f"{one} left out 90."),
            LabelWarning(Doubt.FLIPPED, f"{one} and {other} {parting}"),
        ),
        (LabelWarning(Doubt.FLIPPED, f"{other} and {one} {parting}"), few, blind),
    )
    judges = tuple(replace(each, warnings=told) for each, told in zip(evaluation.judges, doubts, strict=True))
    doubted = replace(run, evaluation=replace(evaluation, judges=judges), audits=())
    notes = re.findall(r'class="note warn">([^<]*)<', make_page(doubted).html.decode())
    assert notes == [
        blind.text,
        f"{other}: {few.text}",  # of two judgings: whose labels?
        f"{one} and {other} {parting}",
        f"{one} left out 90.",
    ]


def test_every_kind_of_doubt_has_its_place(run: ReportedRun) -> None:
    evaluation = run.evaluation
    assert evaluation is not None
    warnings = tuple(LabelWarning(kind, f"about {kind}") for kind in reversed(Doubt))
    judges = (replace(evaluation.judges[0], warnings=warnings),)
    told = notes_of(
        replace(run, evaluation=replace(evaluation, judges=judges), audits=()), AnswerChunks((), 150, LEVELS[0])
    )
    assert len(told) == len(Doubt)
    assert "about always the same" in told[1] and "about not attempted" in told[-1]


def test_names_and_sentences_of_the_index_are_printable(run: ReportedRun) -> None:
    hostile = "m\u202egnp\u0000"
    meta = replace(run.judgings[0].meta, name=hostile, judge=hostile)
    scores = (MeasureScores(hostile, [1.0] * 150, hostile, hostile, {hostile: 1}),)
    made = replace(run, judgings=(replace(run.judgings[0], meta=meta),), scores=scores, evaluation=None)
    index = json.dumps(index_of(make_page(made).html.decode()), ensure_ascii=False)
    assert "m\\\\u202egnp\\\\x00" in index
    assert not set(index) & set("\u202e\x00")


def test_scores_of_very_many_answers_leave_room_for_texts() -> None:
    draw = random.Random(4)
    answers = [answered(number, draw, samples=0, words=2) for number in range(300)]
    scores = [MeasureScores(f"m{each}", [draw.random() for _ in answers]) for each in range(60)]
    page = make_page(ReportedRun("run", (), (), answers, scores=scores), most_bytes=155_000)
    text = page.html.decode()
    index = index_of(text)
    assert len(page.html) <= 155_000
    assert 0 < page.answers <= index["scored"] < index["answers"] == 300
    assert len(blob(text, "scores")) == 4 * 60 * index["scored"]
    assert f"The first {page.answers} of 300 answers" in text
