"""The answers in a real browser: filtered, sorted, scrolled, by mouse and by keys, token by token."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.browsing import IN_A_BROWSER, Window
from tests.qa.report.made_runs import answered, made_run
from tests.qa.report.opened import OpenedRun

from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.report.answers import VERDICT_WORDS, VERDICTS
from gpuherd.qa.report.reading import ReportedRun

pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def run() -> ReportedRun:
    return made_run(400, samples=3, weightings=5)


def test_the_list_filters_by_verdict_words_and_score(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    opened.go("answers")
    judged = run.judgings[0].judgments
    wrong = [n for n, one in enumerate(run.answers) if judged[(one.question.id, "greedy")].verdict is Verdict.INCORRECT]
    opened.page.get_by_role("button", name=f"incorrect {len(wrong)}").click()
    assert opened.begins_with(wrong)
    assert opened.page.get_by_text(f"{len(wrong)} of 400 answers").is_visible()
    search = opened.page.get_by_role("searchbox")
    search.fill("question 12")
    some = [number for number in wrong if "12" in run.answers[number].question.question]
    assert opened.soon(lambda: opened.begins_with(some))
    search.fill("no such word anywhere")
    assert opened.soon(lambda: opened.lines() == [])
    opened.page.get_by_role("button", name="show all").click()
    opened.page.get_by_label("sort by").select_option(label="nll")
    opened.page.get_by_label("score from").fill("20")
    values = run.scores[0].values
    above = sorted(
        (n for n, value in enumerate(values) if value is not None and value >= 20), key=lambda n: values[n] or 0
    )
    assert opened.soon(lambda: opened.begins_with(above))
    assert opened.page.get_by_text(f"{len(above)} of 400 answers").is_visible()
    assert opened.fine()


def test_the_list_sorts_and_what_has_no_score_comes_last(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    opened.go("answers")
    values = run.scores[3].values
    holes = {number for number, value in enumerate(values) if value is None}
    opened.page.get_by_label("sort by").select_option(label="semantic-entropy:rao")
    for way in (1, -1):
        known = sorted((n for n in range(400) if n not in holes), key=lambda n: way * (values[n] or 0.0))
        opened.soon(partial(opened.begins_with, known))
        opened.page.get_by_role("listbox").press("End")
        opened.soon(lambda: holes.issuperset(opened.lines()[-10:]))
        opened.page.get_by_label("descending").click()
    assert opened.fine()


def test_verdicts_of_another_judge(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    opened.go("answers")
    opened.page.get_by_label("verdicts of").select_option(label="exact-89abcdef")
    judged = run.judgings[1].judgments
    right = sum(each.verdict is Verdict.CORRECT for each in judged.values())
    assert opened.page.get_by_role("button", name=f"correct {right}", exact=True).is_visible()
    assert opened.fine()


def test_an_answer_shows_all_that_is_known_of_it(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    number = next(n for n, one in enumerate(run.answers) if n % 12 == 0 and len(one.main.token_ids) > 4)
    one = run.answers[number]
    opened.go(f"answers/{number}")
    text = opened.page.locator("article").inner_text()
    judgment = run.judgings[0].judgments[(one.question.id, "greedy")]
    assert one.question.question in text
    for words in (*one.question.answers, judgment.reply, *(sample.text for sample in one.samples)):
        assert words is not None and words in text
    assert opened.page.locator(".tokens").inner_text() == one.main.text
    assert "ended by an end token" in text
    value = run.scores[0].values[number]
    shown = opened.page.locator(".scores div", has_text="nll").first.locator("dd").inner_text().split()[0]
    assert value is not None and float(shown) == pytest.approx(value, rel=2e-3)
    assert opened.fine()


def test_each_judgment_of_an_answer_has_its_own_verdict(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    keys = [(one.question.id, "greedy") for one in run.answers]
    verdicts = [[judged.judgments[key].verdict for judged in run.judgings] for key in keys]
    number = next(n for n, some in enumerate(verdicts) if len(set(some)) > 1)
    opened.go(f"answers/{number}")
    pills = opened.page.locator("article .part .part .pill").all_inner_texts()
    assert pills == [VERDICT_WORDS[VERDICTS.index(each)] for each in verdicts[number]]
    assert opened.fine()


def test_tokens_are_coloured_and_walked_through(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    number = max(range(400), key=lambda n: len(run.answers[n].main.token_ids))
    one = run.answers[number]
    opened.go(f"answers/{number}")
    tokens = opened.page.locator(".tokens .t")
    classes = [(each.get_attribute("class") or "").split() for each in tokens.all()]
    edges = (0.9, 0.5, 0.1, 0.01)
    for name, log_prob in zip(classes, one.main.log_probs, strict=True):
        assert log_prob is not None
        place = sum(2.718281828459045**log_prob < edge for edge in edges)
        assert name[1:] == ["warm", f"c{place}"]
    box = opened.page.locator(".tokens")
    box.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
        opened.page.keyboard.press(key)
    said = opened.page.locator("#said").inner_text()
    assert said.startswith("token 2 of")
    told = float(said.partition("NLL ")[2].split()[0])
    assert told == pytest.approx(-(one.main.log_probs[1] or 0.0), rel=2e-3)
    assert "relevance" in said and "of token-SAR" in said
    assert opened.page.locator(".tokens .front").count() == 1
    opened.page.get_by_role("button", name="relevance", exact=True).click()
    assert all("cool" in (each.get_attribute("class") or "") for each in tokens.all())
    assert opened.page.get_by_role("img", name="relevance: below").is_visible()
    tokens.nth(3).hover()
    assert "token 4 of" in opened.page.locator(".tip").inner_text()
    assert opened.fine()


def test_by_keys_alone(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    opened.go("answers/0")
    opened.page.get_by_role("listbox").focus()
    heading = opened.page.locator(".question")
    for key, number in (("ArrowDown", 1), ("ArrowDown", 2), ("End", 399), ("ArrowUp", 398), ("Home", 0)):
        opened.page.keyboard.press(key)
        assert heading.inner_text() == run.answers[number].question.question
        chosen = opened.page.locator('.line[aria-selected="true"]')
        assert chosen.count() == 1
        assert opened.page.get_by_role("listbox").get_attribute("aria-activedescendant") == chosen.get_attribute("id")
    opened.page.get_by_role("button", name="Next").press("Enter")
    assert heading.inner_text() == run.answers[1].question.question
    assert opened.fine()


@pytest.mark.slow
def test_a_held_key_does_not_write_the_address_each_time(browser: Window, run: ReportedRun, tmp_path: Path) -> None:
    opened = OpenedRun(browser, run, tmp_path)
    opened.go("answers/0")
    opened.page.evaluate(
        """() => {
            window.written = 0;
            const own = history.replaceState.bind(history);
            history.replaceState = (...all) => { window.written++; own(...all); };
            const list = document.querySelector(".list");
            for (let at = 0; at < 150; at++) list.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
        }"""
    )
    opened.page.wait_for_function("() => location.hash === '#/answers/150'")
    assert opened.page.evaluate("window.written") == 1
    assert opened.page.locator(".question").inner_text() == run.answers[150].question.question
    assert opened.fine()


def test_on_a_narrow_screen_an_answer_is_a_place_to_come_back_from(
    browser: Window, run: ReportedRun, tmp_path: Path
) -> None:
    opened = OpenedRun(browser, run, tmp_path, width=390)
    opened.go("answers")
    assert not opened.page.locator("article").is_visible()
    opened.page.get_by_role("listbox").evaluate("each => { each.scrollTop = 6800; }")
    opened.soon(lambda: opened.lines()[0] > 50)
    opened.page.locator(".line").nth(10).click()
    opened.page.locator("article").wait_for()
    assert not opened.page.get_by_role("listbox").is_visible()
    opened.page.go_back()
    opened.page.get_by_role("listbox").wait_for()
    assert opened.page.get_by_role("listbox").evaluate("each => each.scrollTop") > 6000
    assert opened.fine()


@pytest.mark.slow
def test_a_filter_stays_in_sight_under_a_judge_that_has_no_such_verdict(
    browser: Window, run: ReportedRun, tmp_path: Path
) -> None:
    name = run.judgings[1].meta.name
    right = {key: replace(each, verdict=Verdict.CORRECT) for key, each in run.judgings[1].judgments.items()}
    opened = OpenedRun(
        browser, replace(run, judgings=(run.judgings[0], replace(run.judgings[1], judgments=right))), tmp_path
    )
    opened.go("answers")
    show_all = opened.page.get_by_role("button", name="show all")
    assert not show_all.is_visible()
    opened.page.locator("button.pill.v1").click()
    opened.page.get_by_label("verdicts of").select_option(label=name)
    assert opened.lines() == []
    pressed = opened.page.get_by_role("button", name="incorrect 0", pressed=True)
    assert pressed.is_visible()
    show_all.click()
    assert len(opened.lines()) > 5
    assert not show_all.is_visible()
    assert opened.fine()


@pytest.mark.slow
def test_two_thousand_answers_scroll_smoothly(browser: Window, tmp_path: Path) -> None:
    """A step of scrolling draws the lines that come into view and no others: its cost is that of a screen of lines, on
    any machine and for any number of answers."""
    draw = random.Random(5)
    many = made_run(2_000, samples=10)
    many = replace(
        many, answers=[answered(n, draw, samples=10, words=40) for n in range(2_000)], relevance={}, clusters={}
    )
    opened = OpenedRun(browser, many, tmp_path)
    assert opened.path.stat().st_size < 10_000_000
    opened.go("answers")
    found: dict[str, Any] = opened.page.evaluate(
        """async () => {
            const list = document.querySelector(".list");
            const frame = () => new Promise(requestAnimationFrame);
            const end = list.scrollHeight - list.clientHeight;
            const line = list.querySelector(".line").offsetHeight;
            const height = list.clientHeight / line;
            let made = 0;
            const watch = new MutationObserver((all) => all.forEach((each) => { made += each.addedNodes.length; }));
            watch.observe(list.querySelector(".space"), { childList: true });
            const step = async (to) => {
                made = 0;
                list.scrollTop = to;
                for (let at = 0; at < 3; at++) await frame();
                return made;
            };
            let most = 0, empty = 0, jump = 0, slow = 0;
            for (let at = 1; at <= 40; at++) {
                jump = Math.max(jump, await step(end * at / 40));
                most = Math.max(most, list.querySelectorAll(".line").length);
                const box = list.getBoundingClientRect();
                if (!document.elementFromPoint(box.left + 40, box.top + box.height / 2).closest(".line")) empty++;
            }
            const bottom = list.scrollTop >= end - 1;
            for (let at = 1; at <= 20; at++) slow = Math.max(slow, await step(end - 3 * line * at));
            return { most, empty, jump, slow, bottom, height };
        }"""
    )
    assert found["bottom"]
    assert found["empty"] == 0  # no white gap after any step
    screen = found["height"] + 2 * 8 + 2  # what is in view, what is ready on both sides, halves of lines
    assert found["most"] <= screen  # of 2,000 lines
    assert found["jump"] <= screen
    assert found["slow"] <= 4  # by three lines: the others stay as they are
    opened.page.get_by_role("listbox").press("End")
    assert opened.soon(lambda: opened.lines()[-1] == 1_999)
    assert opened.fine()
