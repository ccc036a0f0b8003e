"""The page in a real browser: every view, no error, no request, and names that stay text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.browsing import IN_A_BROWSER, Opened, Window
from tests.esd.report.runs import AddModel, heavy

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.report.page import make_page
from gpuherd.esd.report.reading import RunResults, read_results
from gpuherd.esd.results import stored_spectra
from gpuherd.esd.selection import TensorCoverage, coverage_text
from gpuherd.esd.views import read_table, table_text

pytestmark = IN_A_BROWSER
HOSTILE = "a</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"


@pytest.fixture(scope="module")
def shown(small_folder: Path) -> RunResults:
    """The small run, for tests that only look."""
    return read_results(small_folder)


@pytest.fixture(scope="module")
def page_file(shown: RunResults, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown") / "page.html"
    path.write_bytes(make_page(shown).html)
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_view_fits_and_complains_of_nothing(browser: Window, page_file: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, page_file, width=width, scheme=scheme)
    for view in ("models", "lineage", "outliers", "failures", "model/0", "model/3/1", "model/3/vs/0", "model/99", "?"):
        opened.go(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert opened.page.locator("main section").count() >= 1
    assert opened.fine()


def test_the_table_sorts_and_filters(browser: Window, page_file: Path) -> None:
    opened = Opened(browser, page_file)
    names = opened.page.locator("td.name a")
    assert names.all_inner_texts() == ["org/base", "org/other", "org/spoilt", "org/tuned"]
    opened.page.get_by_role("button", name="median", exact=True).click()
    medians = [float(text) for text in opened.page.locator("tbody tr td:nth-child(7)").all_inner_texts()]
    assert medians == sorted(medians, reverse=True)
    opened.page.get_by_role("searchbox").fill("finetune")
    assert names.all_inner_texts() == ["org/tuned"]
    opened.page.get_by_role("searchbox").fill("nobody")
    assert opened.page.get_by_text("nothing matches").is_visible()
    assert opened.fine()


def test_models_are_laid_over_each_other(browser: Window, page_file: Path) -> None:
    opened = Opened(browser, page_file)
    curves = opened.page.locator("main section").first.locator(".mark-line path")
    curves.nth(4).wait_for()  # the run, and at first all four models
    opened.page.get_by_role("checkbox").first.click()
    curves.nth(4).wait_for(state="detached")
    curves.nth(3).wait_for()
    assert curves.count() == 4
    assert opened.fine()


def test_a_layer_is_chosen_by_mouse_and_by_keys(browser: Window, page_file: Path, shown: RunResults) -> None:
    opened = Opened(browser, page_file)
    opened.go("model/3")
    names = shown.models[3].names
    heading = opened.page.locator("h2").nth(1)
    assert heading.inner_text() == names[0]
    opened.page.locator(".heat").focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        opened.page.keyboard.press(key)
    assert heading.inner_text() == names[3]
    assert names[3] in opened.page.locator("#said").inner_text()
    cell = opened.page.locator(".heat .row").first.locator("[data-at]").last
    cell.click()
    assert heading.inner_text() == names[2]
    assert "front" in (cell.get_attribute("class") or "")
    opened.page.locator("h1").hover()
    cell.hover()
    assert names[2] in opened.page.locator(".tip").inner_text()
    opened.page.get_by_role("button", name="Previous").click()
    assert heading.inner_text() == names[1]
    assert opened.page.evaluate("location.hash") == "#/model/3/1"
    assert opened.fine()


def test_the_spectrum_shows_the_fit(browser: Window, page_file: Path, shown: RunResults) -> None:
    opened = Opened(browser, page_file)
    opened.go("model/0/1")
    model = shown.models[0]
    text = opened.page.locator("main").inner_text()
    assert f"alpha {model.alpha[1]:.3f}" in text
    assert opened.page.get_by_role("img", name="share of eigenvalues").is_visible()
    assert opened.page.get_by_role("img", name="density of eigenvalues").is_visible()
    opened.go("model/2/3")
    assert "1 of 1152 weights are NaN or infinite" in opened.page.locator("main").inner_text()
    assert opened.fine()


def test_the_change_against_the_base(browser: Window, page_file: Path, shown: RunResults) -> None:
    opened = Opened(browser, page_file)
    opened.go("lineage")
    opened.page.locator("svg.strip rect").nth(3).wait_for(state="attached")
    assert opened.page.locator("svg.strip rect").count() == 4
    opened.page.get_by_role("link", name="median |Δalpha|").click()
    opened.page.get_by_role("heading", name="alpha minus that of org/base").wait_for()
    assert opened.page.get_by_role("combobox").input_value() == "0"
    base, tuned = shown.models[0].alpha[:4], shown.models[3].alpha
    told = opened.page.locator(".heat ~ .bar .note").inner_text()
    assert float(told.split()[2].rstrip(".")) == pytest.approx(float(np.median(np.abs(tuned - base))), abs=6e-5)
    assert opened.fine()


def test_light_and_dark(browser: Window, page_file: Path) -> None:
    opened = Opened(browser, page_file, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(background)
    opened.page.get_by_role("button", name="Light").click()
    assert opened.page.evaluate(background) != dark
    assert opened.fine()


def test_the_link_to_the_content_goes_there(browser: Window, page_file: Path) -> None:
    opened = Opened(browser, page_file)
    opened.go("failures")
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"
    assert opened.page.get_by_text("no config.json").is_visible()


def test_without_models_and_without_fits(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    (run_folder / "failures.jsonl").write_text('{"title": "org/x", "class": "crash", "reason": "gone"}\n')
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    for view in ("models", "lineage", "outliers", "failures"):
        opened.go(view)
    assert opened.page.get_by_text("gone").is_visible()
    assert opened.fine()
    add_model("org/nothing", {name: 0 * W for name, W in heavy(1).items()})
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    for view in ("models", "lineage", "outliers", "failures", "model/0", "model/0/3"):
        opened.go(view)
    assert "all weights are zero" in opened.page.locator("main").inner_text()
    assert opened.fine()


def test_hostile_names_are_shown_as_they_are(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    add_model(f"org/{HOSTILE}", {f"{HOSTILE}.{name}": W for name, W in heavy(1).items()}, source=HOSTILE)
    (run_folder / "failures.jsonl").write_text('{"title": "<img src=x onerror=\\"window.hit=1\\">", "reason": "<b>"}\n')
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    for view in ("models", "lineage", "outliers", "failures", "model/0", "model/0/2"):
        opened.go(view)
        assert opened.page.locator("img, main b b").count() == 0
    assert HOSTILE in opened.page.locator("main").inner_text()
    assert opened.page.evaluate("window.hit") is None
    assert opened.fine()


@pytest.mark.slow
def test_long_names_do_not_widen_the_page(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    base, absent = "org/" + "L" * 90, "org/" + "Q" * 90
    add_model(base, heavy(1), source=absent, relation="finetune")
    add_model("org/" + "M" * 90, heavy(1, change=0.001), source=base, relation="finetune")
    (run_folder / "failures.jsonl").write_text(json.dumps({"title": "T" * 90, "reason": "R" * 400}))
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path, width=390)
    for view in ("models", "lineage", "outliers", "failures", "model/0", "model/1", "model/1/vs/0"):
        opened.go(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390, view
    assert opened.fine()


def test_a_tall_map_keeps_its_headings_and_scrolls_to_the_chosen_cell(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    W = heavy(1)["model.layers.0.self_attn.q_proj"]
    add_model("org/moe", {f"h.{layer}.experts.{at}.w": W for layer in range(2) for at in range(400)})
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    opened.go("model/0/799")
    heat = opened.page.locator(".heat")
    assert heat.evaluate("each => each.scrollTop") > 4000
    assert heat.locator(".row .front").is_visible()
    tops = [each.bounding_box() for each in (heat, heat.locator(".head"))]
    assert tops[0] is not None and tops[1] is not None
    assert tops[0]["y"] == tops[1]["y"]  # the headings stay
    heat.locator(".row:nth-last-child(20) .cell").first.wait_for()
    assert heat.locator(".row:has(.cell)").count() < 100  # of 400, those that were in sight
    opened.page.mouse.click(tops[1]["x"] + tops[1]["width"] - 20, tops[0]["y"] + 45)
    chosen = opened.page.locator("h2").nth(1).inner_text()
    assert chosen.startswith("h.1.experts.") and int(chosen.split(".")[3]) > 300
    assert opened.fine()


def test_the_law_begins_at_xmin_with_the_share_of_the_tail(browser: Window, page_file: Path, shown: RunResults) -> None:
    opened = Opened(browser, page_file)
    opened.go("model/0/1")
    figures = {name: values[1] for name, values in shown.models[0].figures.items()}
    lines = opened.page.get_by_role("img", name="share of eigenvalues").locator(".mark-line path")
    curve, law = lines.nth(0).get_attribute("d"), lines.nth(1).get_attribute("d")
    assert law is not None and curve is not None
    (x0, y0), (x1, y1) = _ends(law)
    (left, high), (right, low) = _ends(curve)  # the least eigenvalue, and the largest: shares 1 and 1 / n
    sketch = stored_spectra(shown.directory, "org--base").layers[1].sketch
    a_decade = (right - left) / float(sketch.log10_lambda[-1] - sketch.log10_lambda[0])
    a_tenth = (low - high) / np.log10(figures["num_evals"])
    assert x0 == pytest.approx(left + a_decade * (np.log10(figures["xmin"]) - sketch.log10_lambda[0]), abs=0.3)
    share = figures["num_pl_spikes"] / figures["num_evals"]
    assert y0 == pytest.approx(high - a_tenth * np.log10(share), abs=0.3)
    assert (y1 - y0) / a_tenth == pytest.approx((figures["alpha"] - 1) * (x1 - x0) / a_decade, rel=0.02)


def test_every_shown_digit_is_right(browser: Window, run_folder: Path, add_model: AddModel) -> None:
    add_model("org/a", heavy(1, width=40), options=AnalysisOptions(mp_fit=True, randomize=True))
    file = run_folder / "stats" / "org--a.csv"
    rows = read_table(file)
    rows[0] |= {"norm": "34718.9609375", "num_evals": "50257", "alpha_lo": "5.1552460491", "xmin": "0.004491234"}
    file.write_text(table_text(rows))
    path = run_folder / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    for at, row in enumerate(rows):
        opened.go(f"model/0/{at}")
        names = opened.page.locator(".figures dt").all_inner_texts()
        shown = dict(zip(names, opened.page.locator(".figures dd").all_inner_texts(), strict=True))
        for name in row.keys() & shown.keys():
            assert abs(float(shown[name]) - float(row[name])) <= 0.51 * _last_digit(shown[name]), (name, row[name])
    assert len(shown.keys() & rows[0].keys()) > 25
    opened.go("model/0/0")
    assert ", xmin 0.00449" in opened.page.locator("main").inner_text()
    assert opened.fine()


@pytest.mark.slow
def test_a_view_that_is_ready_late_does_not_replace_a_later_one(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    for seed in range(5):
        add_model(f"org/{seed}", heavy(seed))
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    boxes = "document.querySelectorAll('td input')"
    opened.page.evaluate(f"() => {{ for (const box of {boxes}) {{ box.click(); box.click(); }} }}")
    opened.page.wait_for_timeout(300)
    assert opened.page.locator("main section").first.locator(".mark-line path").count() == 1  # the run, and no model
    opened.page.evaluate("() => { location.hash = '#/model/3/1'; location.hash = '#/failures'; }")
    opened.page.wait_for_timeout(500)
    assert opened.page.get_by_role("heading", name="Models without a result").is_visible()
    assert opened.page.locator("a[aria-current]").inner_text().startswith("Failures")
    assert opened.fine()


@pytest.mark.slow
def test_an_address_of_no_matrix_shows_the_model(browser: Window, page_file: Path, shown: RunResults) -> None:
    opened = Opened(browser, page_file)
    for where in ("model/0/0.5", "model/0/99", "model/0/x", "model/0/-1"):
        opened.go(where)
        assert opened.page.locator("h2").nth(1).inner_text() == shown.models[0].names[0]
    assert opened.fine()


@pytest.mark.slow
def test_every_relative_can_be_compared_with(browser: Window, small_run: RunResults, tmp_path: Path) -> None:
    base = small_run.models[1]
    many = tuple(replace(base, model_id=f"org/{number:03}") for number in range(410))
    child = replace(base, model_id="org/child", source_text="org/409", relation="finetune")
    path = tmp_path / "page.html"
    path.write_bytes(make_page(replace(small_run, models=(*many, child))).html)
    opened = Opened(browser, path)
    opened.go("model/410/vs/409")
    assert opened.page.get_by_role("combobox").input_value() == "409"
    assert opened.page.get_by_role("option", name="org/409 (stated base)").count() == 1
    assert opened.fine()


@pytest.mark.slow
def test_every_reason_for_leaving_out_is_told(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    add_model("org/a", heavy(1), skipped=[f"left{at}" for at in range(60)])
    file = run_folder / "stats" / "org--a.csv"
    rows = read_table(file)
    for at, row in enumerate(rows[4:]):
        row["fit_status"] = f"not analysed: same as tensor {at}"
    file.write_text(table_text([row | {"constructor": "1.5"} for row in rows]))
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    opened.go("failures")
    assert opened.page.get_by_text("not analysed: same as tensor 59").is_visible()
    opened.go("model/0/0")
    opened.page.get_by_text("What these figures mean").click()
    assert "function" not in opened.page.locator(".meanings").inner_text()
    assert opened.fine()


@pytest.mark.slow
def test_layers_are_numbered_also_where_all_numbers_are_odd(
    browser: Window, run_folder: Path, add_model: AddModel, tmp_path: Path
) -> None:
    W = heavy(1)["model.layers.0.self_attn.q_proj"]
    add_model("org/a", {f"h.{layer}.w": W for layer in range(1, 81, 2)})
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path, width=390)
    opened.go("model/0")
    headings = opened.page.locator(".heat .head .cell").all_inner_texts()
    assert {"1", "5", "9"} <= set(headings)  # every other one, for want of room
    assert opened.fine()


def _last_digit(number: str) -> float:
    """What one more in the last digit is: 0.01 of "1.25", 0.1 of "1.2e+0"."""
    digits, _, exponent = number.partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


@pytest.mark.slow
def test_shares_are_whole_only_where_all_or_nothing_is(
    browser: Window, run_folder: Path, small_run: RunResults, tmp_path: Path
) -> None:
    for model, analysed in zip(small_run.models, (0, 1, 9_996, 10_000), strict=True):
        line = TensorCoverage("a", "100x100", "F32", 10_000, 1, analysed, "analysed", None)
        (run_folder / "coverage" / f"{model.stem}.csv").write_text(coverage_text([line]))
    path = tmp_path / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    opened = Opened(browser, path)
    shown = opened.page.locator("tbody tr td:nth-child(6)").all_inner_texts()
    assert shown == ["0 %", "< 0.1 %", "> 99.9 %", "100 %"]
    assert opened.fine()


def _ends(path: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """The first and the last point of an SVG path of lines."""
    points = [tuple(map(float, point.split(","))) for point in path.replace("M", "L").split("L")[1:]]
    return (points[0][0], points[0][1]), (points[-1][0], points[-1][1])


def test_the_verdict_on_a_base_is_told_at_any_width(browser: Window, run_folder: Path, add_model: AddModel) -> None:
    add_model("org/a", heavy(1))
    add_model("org/b", heavy(2))
    add_model("org/t", heavy(1, change=0.001), source="org/b", relation="finetune")
    path = run_folder / "page.html"
    path.write_bytes(make_page(read_results(run_folder)).html)
    for width in (1280, 390):
        opened = Opened(browser, path, width=width)
        opened.go("lineage")
        row = opened.page.locator("tbody tr").first  # what is doubtful stands first
        assert "org/t" in row.inner_text()
        assert "the stated base is probably wrong" in row.inner_text()
        assert "1: the stated base is probably wrong" in opened.page.locator("main").inner_text()
        assert opened.fine()


def test_every_figure_is_explained_without_a_mouse(browser: Window, page_file: Path) -> None:
    opened = Opened(browser, page_file, width=390)
    opened.go("model/0/1")
    shown = set(opened.page.locator(".figures dt").all_inner_texts()) - {"M × N", "weights"}
    opened.page.get_by_text("What these figures mean").click()
    assert shown <= set(opened.page.locator(".meanings dt").all_inner_texts())
    assert opened.fine()
