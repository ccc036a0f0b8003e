"""The page in a real browser: every view, no error, no request, and text that stays text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.browsing import IN_A_BROWSER, Opened, Window
from tests.posttrain.report.made_runs import made_run, made_training, made_wide_run

from gpuherd.posttrain.report.page import write_page
from gpuherd.posttrain.report.reading import read_run

pytestmark = IN_A_BROWSER
VIEWS = ("summary", "rounds", "kl", "learning", "jobs", "samples", "?")
HOSTILE = "a</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"
ODD = "safe \u202egnp.exe\u202c \x1b[31mred\x00 \ufeff \U000e0041 line\nbreak {{7*7}} <b>bold</b> &lt;i&gt;"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = made_run(tmp_path_factory.mktemp("browser") / "run", seeds=(0, 1))
    path = root / "report.html"
    write_page(read_run(root), path)
    return path


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), pytest.param(1280, "dark", marks=pytest.mark.slow), (390, "dark")]
)
def test_every_view_fits_and_complains_of_nothing(browser: Window, page: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, page, width, scheme)
    for view in VIEWS:
        opened.go(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert opened.page.locator("main > *").count() >= 1
    assert opened.fine()


def test_the_table_says_what_the_results_say(browser: Window, page: Path) -> None:
    opened = Opened(browser, page)
    shown = read_run(page.parent)
    assert opened.page.get_by_role("table", name="policies").locator("tbody tr").count() == 7
    opened.page.get_by_label("with 4 at other etas").check()
    rows = opened.page.get_by_role("table", name="policies").locator("tbody tr").all()
    assert len(rows) == len(shown.gathered.rows) == 11
    heads = opened.page.get_by_role("table", name="policies").locator("th").all_inner_texts()
    for row, told in zip(rows, shown.gathered.rows, strict=True):
        cells = row.locator("td").all_inner_texts()
        assert cells[0] == told.about.algorithm
        for name in ("pass@1", "maj@4", "kl"):
            figure = told.figures[name]
            assert figure.value is not None
            digits = 2 if name == "kl" else 3
            ends = () if figure.interval is None else (figure.interval.low, figure.interval.high)
            cell = cells[heads.index("KL, nats" if name == "kl" else name)]
            assert ("no interval" in cell) is (not ends)
            told_here = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
            # Half a digit is rounded to another side by a browser.
            assert told_here == pytest.approx([figure.value, *ends], abs=0.51 * 10**-digits)
    opened.page.get_by_label("all figures").check()
    assert "KL a token, nats" in opened.page.get_by_role("table", name="policies").locator("th").all_inner_texts()
    opened.page.get_by_role("table", name="policies").get_by_role("button", name="pass@1").click()
    found = opened.page.get_by_role("table", name="policies").locator("tbody td.num:nth-child(6)").all_inner_texts()
    values = [float(text.split()[0]) for text in found]
    assert values == sorted(values, reverse=True)
    opened.page.get_by_text("What the figures mean").click()
    assert opened.page.get_by_text("share of right completions").is_visible()
    assert opened.fine()


def test_in_short_it_says_what_is_better_at_what_cost_and_what_failed(browser: Window, page: Path) -> None:
    opened = Opened(browser, page)
    (comparison,) = read_run(page.parent).gathered.comparisons
    (clear,) = [each for each in comparison.differences if each.p_holm is not None and each.p_holm < 0.05]
    assert {clear.one, clear.other} == {"QSharp", "DPO"} and clear.difference.value is not None
    better, cost, failed = opened.page.locator(".short p").all_inner_texts()
    by = f"It is above DPO by {abs(clear.difference.value):.3f}, beyond chance (p corrected {clear.p_holm:.3f}, by "
    first = r"tiny, star: QSharp is highest: pass@1 0\.\d{3} \[.*\] at KL \d\.\d\d \[.*\] nats\. "
    then = "seeds). Between it and the reference and CD nothing is beyond chance. At equal KL, QSharp is above DPO."
    assert re.fullmatch(first + re.escape(by + then), better), better
    assert cost == "GPU-hours: QSharp 0.112 and DPO 0.0283; by phase: see Jobs."
    assert (
        failed
        == "1 job has no result: DPO_star_tiny_r0_train (out of memory: exit code 71: CUDA out of memory); see Jobs."
    )
    differences = opened.page.get_by_role("table", name="differences in tiny, star").locator("tbody tr")
    signs = [row.locator("td").nth(1).inner_text()[0] for row in differences.all()]
    assert len(signs) == 6 and "−" not in signs  # the larger is named first
    opened.page.get_by_role("link", name="1 job failed").click()
    opened.page.get_by_role("heading", name="Failures").wait_for()
    assert opened.fine()


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_one_round_of_many_methods_with_long_names(browser: Window, tmp_path: Path, width: int) -> None:
    root = made_wide_run(tmp_path / "run")
    shown = read_run(root)
    write_page(shown, root / "report.html")
    opened = Opened(browser, root / "report.html", width)
    assert opened.page.locator("nav a").all_inner_texts() == ["Summary", "KL", "Learning", "Samples"]
    table = opened.page.get_by_role("table", name="policies")
    lines = table.locator("tbody tr td .key-line line").evaluate_all(
        "all => all.map(each => each.getAttribute('stroke') + each.getAttribute('stroke-dasharray'))"
    )
    assert len(set(lines)) == len(lines) == 11
    kl = shown.gathered.rows[1].figures["kl"].value
    assert kl is not None and f"{kl:.1e}".replace("e-06", "e-6").replace(".0e", "e") in table.inner_text()
    assert "No difference is beyond chance." in opened.page.locator(".short").inner_text()
    for view in VIEWS:
        opened.go(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
    opened.go("kl")
    heights = opened.page.get_by_role("img", name=re.compile("pass@1 against KL")).locator("text[text-anchor=end]")
    assert max(map(float, heights.all_text_contents())) < 0.4  # the axis ends where they do
    opened.go("learning")
    dots = opened.page.get_by_role("img", name="loss by step").locator("path[stroke-width='0']")
    assert dots.count() == 1  # of the one step
    assert opened.fine()


def test_curves_are_read_off_by_keys_and_mouse(browser: Window, page: Path) -> None:
    opened = Opened(browser, page)
    opened.go("kl")
    scatter = opened.page.get_by_role("img", name=re.compile("pass@1 against KL"))
    scatter.focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator("#said").inner_text().startswith("reference, pass@1")
    for _ in range(2):
        opened.page.keyboard.press("ArrowRight")
    said = opened.page.locator("#said").inner_text()
    assert re.search(r"CD, eta 0\.1, round 1, pass@1 0\.\d+ \[.*KL \d", said), said
    table = opened.page.get_by_role("table", name="at equal KL")
    assert table.locator("tbody tr").count() == 3 and table.locator("thead th").count() == 5
    opened.go("rounds")
    rounds = opened.page.get_by_role("img", name=re.compile("pass@1 by round"))
    rounds.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    assert re.search(r"round: 1, .*QSharp: 0\.\d", opened.page.locator("#said").inner_text())
    opened.page.get_by_label("figure").select_option("kl")
    assert opened.page.get_by_role("img", name=re.compile("KL, nats by round")).count() == 1
    opened.go("learning")
    assert opened.page.locator("main svg[role=img]").count() == 5
    opened.page.get_by_label("all figures").check()
    assert opened.page.get_by_role("img", name="learning_rate by step").is_visible()
    assert not opened.page.get_by_label("DPO/star_tiny_r0 (120 steps)").is_checked()
    opened.page.get_by_label("DPO/star_tiny_r1 (120 steps)").uncheck()
    assert opened.page.get_by_role("img", name="reward by step").count() == 0
    loss = opened.page.get_by_role("img", name="loss by step", exact=True)
    loss.scroll_into_view_if_needed()
    place = loss.bounding_box()
    assert place is not None
    opened.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    assert "QSharp/star_tiny_r1" in opened.page.locator(".tip").inner_text()
    assert opened.fine()


@pytest.mark.parametrize("view", ["kl", "jobs"])
def test_the_marks_of_a_figure_are_walked_through(browser: Window, page: Path, view: str) -> None:
    opened = Opened(browser, page)
    opened.go(view)
    figure = opened.page.locator("main svg[role=img][tabindex]").first
    ways = figure.locator(".stop")
    front, said, tip = figure.locator(".front"), opened.page.locator("#said"), opened.page.locator(".tip")
    figure.focus()
    for key, place in (("ArrowLeft", 0), ("ArrowRight", 1), ("End", ways.count() - 1), ("ArrowRight", ways.count() - 1),
                       ("ArrowLeft", ways.count() - 2), ("Home", 0)):  # fmt: skip
        opened.page.keyboard.press(key)
        assert front.count() == 1 and ways.nth(place).get_attribute("class") == "stop front", (key, place)
        assert said.inner_text().split(", ")[0] == tip.locator("div").first.inner_text().split(", ")[0]
    assert tip.is_visible()
    figure.blur()
    assert front.count() == 0 and tip.is_hidden()
    ways.last.hover()
    assert tip.is_visible() and front.count() == 0
    opened.page.mouse.move(2, 2)
    assert tip.is_hidden() and opened.fine()


def test_jobs_and_failures(browser: Window, page: Path) -> None:
    opened = Opened(browser, page)
    opened.go("jobs")
    bars = opened.page.get_by_role("img", name=re.compile("9 attempts of jobs on 2 devices"))
    assert bars.locator(".stop").count() == 9
    bars.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    said = opened.page.locator("#said").inner_text()
    assert "QSharp_star_tiny_r0_collect_1" in said and "failed" in said and "40 s" in said
    rows = opened.page.get_by_role("table", name="failures").locator("tbody tr")
    assert rows.count() == 2 and "no result" in rows.first.inner_text()
    ends = bars.evaluate("all => all.viewBox.baseVal.width")
    running = bars.locator("path[stroke-dasharray='4,3']").bounding_box()
    assert (
        running is not None and running["width"] > 0.03 * ends and opened.page.get_by_text("dashed: not").is_visible()
    )
    assert opened.page.get_by_text("GPU-hours: collect").is_visible()
    took = opened.page.get_by_role("table", name="what each took").locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in took] == ["QSharp", "DPO"]
    assert opened.fine()


def test_completions_are_walked_through_beside_each_other(browser: Window, page: Path) -> None:
    opened = Opened(browser, page)
    opened.go("samples")
    assert opened.page.locator("main h2").inner_text() == "Problem p0"
    opened.page.get_by_role("button", name="Later").focus()
    opened.page.keyboard.press("Enter")
    opened.page.get_by_text("Problem p1").wait_for()
    opened.page.keyboard.press("Enter")  # the button that was pressed is still in front
    opened.page.get_by_text("Problem p2").wait_for()
    opened.page.get_by_label("beside").select_option(index=4)
    opened.page.locator("main .pair").wait_for()
    assert opened.page.locator(".completions").count() == 2
    assert opened.page.locator("article").count() == 8
    opened.page.get_by_label("with", exact=True).select_option("wrong")
    opened.page.wait_for_function("document.querySelector('.pill.wrong') !== null")
    assert opened.page.locator(".completions").first.locator(".pill.wrong").count() >= 1
    assert opened.fine()


def test_what_strangers_wrote_stays_text(browser: Window, tmp_path: Path) -> None:
    texts = (HOSTILE, ODD, "", "x" * 9000)
    root = made_run(tmp_path / "run", name=HOSTILE, texts=lambda _, sample: texts[sample])
    write_page(read_run(root), root / "report.html")
    opened = Opened(browser, root / "report.html")
    for view in VIEWS:
        opened.go(view)
    opened.go("samples")
    boxes = opened.page.locator("article .text").all_inner_texts()
    assert boxes[0] == HOSTILE
    assert "\\u202e" in boxes[1] and "<b>bold</b> &lt;i&gt;" in boxes[1] and "{{7*7}}" in boxes[1]
    assert boxes[2] == "(empty)" and "5,000 more characters" in boxes[3]
    assert opened.page.evaluate("window.hit") is None
    assert opened.page.locator("h1").inner_text() == HOSTILE
    assert opened.fine()


def test_a_training_alone(browser: Window, tmp_path: Path) -> None:
    root = made_training(tmp_path / "out")
    write_page(read_run(root), root / "report.html")
    opened = Opened(browser, root / "report.html")
    assert opened.page.locator("nav a").all_inner_texts() == ["Learning"]
    assert opened.page.get_by_role("img", name="value_loss by step").is_visible()
    for view in VIEWS:
        opened.go(view)
    assert opened.fine()


@pytest.mark.slow
def test_light_and_dark(browser: Window, page: Path) -> None:
    opened = Opened(browser, page, 1280, "dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(background)
    opened.page.get_by_role("button", name="Light").click()
    assert opened.page.evaluate(background) != dark
    assert opened.fine()
