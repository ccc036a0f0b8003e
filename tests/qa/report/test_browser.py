"""The page in a real browser: every view, no error, no request, and text that stays text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.browsing import IN_A_BROWSER, Opened, Window
from tests.qa.evaluation.evaluable import judge, make_run, score
from tests.qa.report.made_runs import generation, made_audits, made_evaluation, made_run
from tests.qa.report.opened import OpenedRun

from gpuherd.cli.main import run as command
from gpuherd.qa.evaluation.result import Histogram, HolmCorrected
from gpuherd.qa.grading.files import JudgeKind
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.record import Answered, Prompted, Question
from gpuherd.qa.report.reading import Judged, ReportedRun

pytestmark = IN_A_BROWSER
HOSTILE = "a</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"
VIEWS = ("measures", "tokens", "labels", "answers", "answers/3", "answers/99999", "?")


@pytest.fixture(scope="module")
def run() -> ReportedRun:
    return made_run(400, samples=3, weightings=5)


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), pytest.param(800, "dark", marks=pytest.mark.slow), (390, "dark")]
)
def test_every_view_fits_and_complains_of_nothing(
    browser: Window, run: ReportedRun, tmp_path: Path, width: int, scheme: str
) -> None:
    opened = OpenedRun(browser, run, tmp_path, width, scheme)
    for view in VIEWS:
        opened.go(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert opened.page.locator("main > *").count() >= 1
    assert opened.fine()


def test_the_table_says_what_the_evaluation_says(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    evaluation = run.evaluation
    assert evaluation is not None
    measures = [each for each in evaluation.judges[0].measures if each.weighting is None]
    rows = {row.locator("td.name").inner_text(): row for row in opened.page.locator("main tbody tr").all()}
    assert rows.keys() == {each.name for each in measures}
    for each in measures:
        assert each.auroc.value is not None and each.auroc.interval is not None
        words = rows[each.name].locator("td").nth(2).inner_text().split()
        assert words == [
            f"{each.auroc.value:.3f}",
            *f"{each.auroc.interval.low:.3f} to {each.auroc.interval.high:.3f}".split(),
        ]
    order = [float(text.split()[0]) for text in opened.page.locator("tbody td:nth-child(3)").all_inner_texts()]
    assert order == sorted(order, reverse=True)
    opened.page.get_by_text("What the figures mean").click()  # not by a pointer's hints alone
    assert opened.page.get_by_text("average precision at finding wrong answers").is_visible()
    opened.page.get_by_label("with 5 token weightings").check()
    assert opened.page.locator("main tbody tr").count() == len(measures) + 5
    assert opened.fine()


def test_p_and_interval_of_a_difference_are_corrected_alike_for_the_measures_shown(
    browser: Window, tmp_path: Path
) -> None:
    run = made_run(100, weightings=8)
    evaluation = run.evaluation
    assert evaluation is not None
    differences = {each.name: each for each in evaluation.judges[0].differences}
    opened = OpenedRun(browser, run, tmp_path)

    def told() -> dict[str, list[str]]:
        """For each measure in the table the p and the interval of its difference."""
        rows = opened.page.locator("main table").first.locator("tbody tr").all()
        named = {row.locator("td.name").inner_text(): row.locator("td:has(.p)") for row in rows}
        return {
            name: [cell.locator(each).inner_text() for each in (".p", ".ends")]
            for name, cell in named.items()
            if cell.count()
        }

    def words(found: HolmCorrected | None) -> list[str]:
        assert found is not None and found.interval is not None
        return [
            f"p {found.p:.3f}",
            f"{found.interval.low:.3f} to {found.interval.high:.3f}".replace("-", "\N{MINUS SIGN}"),
        ]

    among_measures = {name: words(each.among_measures) for name, each in differences.items() if each.among_measures}
    among_all = {name: words(each.among_all) for name, each in differences.items()}
    assert told() == among_measures != {}
    weightings = opened.page.get_by_label("with 8 token weightings")
    weightings.check()
    assert told() == among_all and among_all.keys() > among_measures.keys()
    # A filter hides lines, and is no other family: what looked best would else be corrected for too few.
    opened.page.get_by_placeholder("filter by name").fill("eigv")
    assert opened.soon(lambda: 0 < len(told()) < len(among_all)) and told().items() <= among_all.items()
    opened.page.get_by_placeholder("filter by name").fill("")
    weightings.uncheck()
    assert opened.soon(lambda: told() == among_measures)
    # The table of the weightings alone is corrected for all measures, whatever the other one shows.
    opened.go("tokens")
    names = {each.weighting: each.name for each in evaluation.judges[0].measures if each.weighting is not None}
    assert {names[name]: each for name, each in told().items()} == {name: among_all[name] for name in names.values()}
    assert opened.fine()


def test_curves_are_chosen_and_read_off_by_mouse_and_keys(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    roc = opened.page.get_by_role("img", name="ROC curves")
    before = roc.locator(".mark-line path").count()
    opened.page.get_by_label("draw u-eigv").check()
    roc.locator(".mark-line path").nth(before).wait_for()
    assert roc.locator(".mark-line path").count() == before + 1
    roc.scroll_into_view_if_needed()
    box = roc.bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = opened.page.locator(".tip").inner_text()
    assert "right answers flagged" in tip and "u-eigv: " in tip
    roc.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    assert "nll: " in opened.page.locator("#said").inner_text()
    opened.page.get_by_role("button", name="semantic-entropy:rao").click()
    bins = opened.page.get_by_role("img", name="semantic-entropy:rao: scores")
    bins.focus()
    opened.page.keyboard.press("ArrowRight")
    evaluation = run.evaluation
    histogram = None if evaluation is None else evaluation.judges[0].measures[3].histogram
    assert histogram is not None
    said = opened.page.locator("#said").inner_text()
    assert f"{histogram.right[0]} right" in said and f"{histogram.wrong[0]} wrong" in said
    assert opened.page.get_by_role(
        "img", name="semantic-entropy:rao: scores of right and of wrong answers"
    ).is_visible()
    assert opened.fine()


@pytest.mark.slow
def test_light_and_dark(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(background)
    opened.page.get_by_role("button", name="Light").click()
    assert opened.page.evaluate(background) != dark
    assert opened.fine()


def test_labels_show_where_judges_part_and_lead_there(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    opened.go("labels")
    card = opened.page.locator("main section").first
    assert "llm_some-judge-01234567 is doubtful" in opened.page.locator("header").inner_text()
    link = card.get_by_role("table", name="disagreements").locator("a").first
    number = int(link.inner_text()) - 1
    link.click()
    opened.page.locator("article").wait_for()
    assert opened.page.locator(".question").inner_text() == run.answers[number].question.question
    assert opened.fine()


def test_without_evaluation_judge_or_scores(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    bare = replace(run, judgings=(), audits=(), scores=(), evaluation=None, relevance={}, clusters={})
    opened = OpenedRun(browser, bare, tmp_path)
    assert opened.page.locator(".line").count() > 5
    for view in VIEWS:
        opened.go(view)
    opened.go("measures")
    assert opened.page.get_by_text("gpuherd evaluate makes the figures").is_visible()
    assert opened.fine()
    opened = OpenedRun(browser, ReportedRun("run", (), (), ()), tmp_path)
    for view in VIEWS:
        opened.go(view)
    assert opened.fine()


def hostile_run() -> ReportedRun:
    """Answers that a stranger made to do harm or to confuse."""
    texts = [
        HOSTILE,
        "{{7*7}} ${7*7} <b>bold</b> &lt;i&gt;",
        "safe \u202egnp.exe\u202c \u2067x\u2069 \x1b[31mred\x00 \ufeff \ud800 \U000e0041 \U000e0101 \u3164 \u2800",
        "line one\nline two\r\n\tthree\u2028four",
        "עברית العربية \u0301\u0302" + "\u0301" * 40 + "🧑\u200d🚀",
        "x" * 100_000,
        "",
        "word " * 20_000,
    ]
    answers = [
        Answered(
            number,
            Question(f"{text[:50]}{number}", text or "empty?", (text or "x", HOSTILE), text),
            Prompted("0", 3),
            generation(
                [text[at : at + 3] for at in range(0, len(text), 3)] or ["", ""], [-0.1] * max(2, -(-len(text) // 3))
            )
            if text
            else generation(["", ""], [None, -3.0]),
            (generation([text], [-1.0]),),
        )
        for number, text in enumerate(texts)
    ]
    judged = made_run(1).judgings[0]
    judgments = {
        (each.question.id, "greedy"): Judgment(each.question.id, "greedy", Verdict.CORRECT, reply=HOSTILE, note=HOSTILE)
        for each in answers
    }
    meta = replace(judged.meta, name=HOSTILE, judge=HOSTILE, settings={HOSTILE: HOSTILE})
    judgings = (Judged(meta, judgments),)
    pairs = ((HOSTILE, HOSTILE),)
    return ReportedRun(HOSTILE, pairs, pairs, answers, judgings, audits=made_audits(judgings), notes=(HOSTILE,))


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_hostile_text_is_shown_as_text(browser: Window, tmp_path: Path, width: int) -> None:
    shown = hostile_run()
    opened = OpenedRun(browser, shown, tmp_path, width)
    for view in ("labels", "answers", *(f"answers/{number}" for number in range(len(shown.answers)))):
        opened.go(view)
        assert opened.page.locator("img, main b b, main i").count() == 0
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
    assert opened.page.evaluate("window.hit") is None
    opened.go("answers/0")
    assert opened.page.locator(".tokens").inner_text() == HOSTILE
    opened.go("answers/2")
    tokens = opened.page.locator(".tokens").inner_text()
    for sign in (
        "\\u202e",
        "\\u202c",
        "\\u2067",
        "\\u001b",
        "\\u0000",
        "\\ufeff",
        "\\ud800",
        "\\u{e0041}",
        "\\u{e0101}",
        "\\u3164",
        "\\u2800",
    ):
        assert sign in tokens
    assert not set(tokens) & set("\u202e\u202c\u2067\u2069\x1b\x00\ufeff")
    opened.go("answers/3")
    assert opened.page.locator(".tokens").inner_text().count("↵") == 2
    assert "\\u2028" in opened.page.locator(".tokens").inner_text()
    opened.go("answers/5")
    assert "80,002 more characters are in answers.jsonl" in opened.page.locator("article").inner_text()
    opened.go("answers")
    if width > 1000:
        assert opened.page.get_by_text("(empty)", exact=True).is_visible()
    opened.go("answers/6")
    assert opened.page.locator(".tokens .unknown").count() == 1
    assert opened.fine()


def test_what_the_command_writes_is_what_the_browser_shows(browser: Window, tmp_path: Path) -> None:
    letters = "0" * 30 + "+" * 40 + "-" * 30
    folder = make_run(tmp_path, letters)
    judge(folder, letters)
    judge(folder, "+" * 95 + "-" * 5, name="llm_bad-00000001", kind=JudgeKind.MODEL, model="x")
    judge(folder, "+" * 100, name="llm_yes-00000002", kind=JudgeKind.MODEL, model="x")
    score(folder)
    words = ["evaluate", str(folder.root), "--bootstrap", "100", "--not-attempted", "incorrect", "--name", "e"]
    assert command([*words, "--judge", "exact", "llm_bad"]) == 0
    opened = Opened(browser, folder.evaluation("e", ".html"))
    head = opened.page.locator("header")
    assert "llm_bad-00000001" in head.locator(".warn").first.inner_text()  # the gravest of those evaluated
    main = opened.page.locator("main")
    assert "40 right, 60 wrong (30 of them not attempted)." in main.inner_text()
    assert "left out" not in main.locator(".card > div .note").first.inner_text()
    aurocs = json.loads(folder.evaluation("e", ".json").read_text())["judges"][0]["measures"]
    row = main.locator("tbody tr", has_text="ln-nll")
    assert row.locator("td").nth(2).inner_text().startswith(f"{aurocs[1]['auroc']['value']:.3f}")
    # Under the judge of few errors: its doubts, and a word at the curves.
    opened.page.get_by_label("judged by").select_option(label="llm_bad-00000001")
    assert main.locator(".warn", has_text="only 5 wrong among 100 answers").is_visible()
    assert main.get_by_text("nothing can be concluded from these lines").count() == 2
    opened.go("tokens")
    assert main.get_by_text("nothing can be concluded from these lines").count() == 1
    # A judge that was not evaluated is no dead end.
    opened.go("answers")
    opened.page.get_by_label("verdicts of").select_option(label="llm_yes-00000002")
    opened.go("measures")
    assert main.get_by_text("This judging is not part of the evaluation.").is_visible()
    opened.page.get_by_label("judged by").select_option(label="exact-00000000")
    assert main.locator("tbody tr").count() == 3
    assert opened.fine()


@pytest.mark.slow
def test_one_class_says_that_there_are_no_curves_and_why(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    evaluation = made_evaluation(run.scores, [Verdict.CORRECT] * 400, run.judgings)
    opened = OpenedRun(browser, replace(run, evaluation=evaluation), tmp_path)
    main = opened.page.locator("main")
    assert main.get_by_text("There are no curves: no measure has both right and wrong answers.").is_visible()
    assert main.locator(".scores").get_by_text("one class only").count() > 3
    assert opened.fine()


@pytest.mark.slow
def test_one_huge_score_leaves_room_for_the_others(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    evaluation = run.evaluation
    assert evaluation is not None
    edges = (0.0, *(float(at) for at in range(1, 20)), 1e9)
    huge = Histogram(edges, (5,) * 20, (2,) * 20)
    measures = tuple(replace(each, histogram=huge) for each in evaluation.judges[0].measures)
    judges = (replace(evaluation.judges[0], measures=measures),)
    opened = OpenedRun(browser, replace(run, evaluation=replace(evaluation, judges=judges)), tmp_path)
    bins = opened.page.locator('svg[aria-label*="scores of right"]')
    opened.page.get_by_text("The last bin reaches up to 1000000000.").or_(
        opened.page.get_by_text("The last bin reaches up to 1.00e+9.")
    ).wait_for()
    places = {
        round(float(x))
        for x in re.findall(r"[MLH]([^,MLHVZ]+)", bins.locator(".mark-line path").first.get_attribute("d") or "")
    }
    assert len(places) == 21  # every edge has a place of its own
    bins.focus()
    opened.page.keyboard.press("ArrowRight")
    assert "5 right" in opened.page.locator("#said").inner_text()
    assert opened.fine()
