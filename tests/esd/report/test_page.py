"""The page as text: whole, within its size, and nothing that a stranger named can break out."""

from __future__ import annotations

import base64
import doctest
import hashlib
import json
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.esd.report.runs import AddModel, heavy

from gpuherd.errors import MissingExtra
from gpuherd.esd.report import page as page_module
from gpuherd.esd.report.page import Page, make_page, points_a_layer
from gpuherd.esd.report.reading import RunResults, read_results
from gpuherd.report.page import MOST_BYTES

HOSTILE = "a</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in self.texts:
            self.texts[self._in][-1] += data


def index_of(text: str) -> dict[str, Any]:
    found = re.search(r'id="index">([^<]*)<', text)
    assert found is not None
    index: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return index


@pytest.fixture(scope="module")
def small_page(small_folder: Path) -> Page:
    """The page of the small run."""
    return make_page(read_results(small_folder))


def test_the_page_has_all_models_inside_it(small_page: Page, small_run: RunResults) -> None:
    page, text = small_page, small_page.html.decode()
    assert (page.models, page.with_figures, page.with_spectra) == (4, 4, 4)
    assert [model["id"] for model in index_of(text)["models"]] == [model.model_id for model in small_run.models]
    assert len(re.findall(r'id="model-\d+"', text)) == 4


def test_a_model_says_itself_that_it_has_spectra(small_run: RunResults, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fragment that a model was read from is not opened once more to find out."""
    monkeypatch.setattr(page_module, "has_spectra", lambda *_: False)
    assert [model.has_spectrum for model in small_run.models] == [True] * 4
    assert make_page(small_run).with_spectra == 4


def test_the_page_names_no_other_place(small_page: Page) -> None:
    elements = Elements(small_page.html.decode())
    for tag, attributes in elements.found:
        assert tag not in ("iframe", "object", "embed", "base", "form", "img")
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    for text in (*elements.texts["script"], *elements.texts["style"]):
        assert set(re.findall(r"https?://[^\"')\s]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|@import|url\(|innerHTML|\beval\(", text)


def test_only_our_own_script_and_style_may_run(small_page: Page) -> None:
    elements = Elements(small_page.html.decode())
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for text in (elements.texts["script"][-1], elements.texts["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_hostile_names_stay_text(run_folder: Path, add_model: AddModel) -> None:
    weights = {f"{HOSTILE}.{name}": W for name, W in heavy(1).items()}
    add_model(f"org/{HOSTILE}", weights, source=HOSTILE, relation=HOSTILE)
    (run_folder / "failures.jsonl").write_text(json.dumps({"title": HOSTILE, "class": HOSTILE, "reason": HOSTILE}))
    (run_folder / "run.json").write_text(json.dumps({"started": HOSTILE}))
    text = make_page(read_results(run_folder)).html.decode()
    assert "alert(1)</script>" not in text
    assert "49" not in re.findall(r"onerror=alert\(2\)&gt;([^<\s]*)", text)
    tags = [tag for tag, _ in Elements(text).found]
    assert tags.count("script") == 9  # the index, five views, the model, the charts' library, our own
    assert "img" not in tags
    assert index_of(text)["models"][0]["id"].startswith("org/a</script>")


def test_a_folder_of_a_hostile_name(tmp_path: Path, run_folder: Path, small_run: RunResults) -> None:
    other = run_folder.rename(tmp_path / "<b>&'\"run")
    text = make_page(read_results(other)).html.decode()
    assert "<title>ESD of &lt;b&gt;&amp;&#39;&#34;run</title>" in text


def test_with_little_room_the_page_says_what_it_leaves_out(small_page: Page, small_run: RunResults) -> None:
    whole = small_page
    tight = make_page(small_run, most_bytes=1)
    assert (tight.with_figures, tight.with_spectra) == (0, 0)
    assert len(tight.html) < len(whole.html)
    text = tight.html.decode()
    assert "To limit the size of this page, 4 of 4 models show alpha and D only" in text
    assert "10 MB" not in text.partition("<script")[0], "what such a page may be larger than"
    assert "Spectra of 4 models were left out" in text
    assert all(model["left_out"] for model in index_of(text)["models"])
    assert "left out" not in whole.html.decode().partition("<nav")[0]


def test_matrices_that_do_not_fit_are_left_out_and_the_page_says_so(
    small_run: RunResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_BYTES", 1)
    page = make_page(small_run)
    text = page.html.decode()
    assert (page.models, page.with_alphas, page.with_figures, page.with_spectra) == (4, 0, 0, 0)
    assert "the matrices of 4 of 4 models are not in it" in text
    assert "alpha and D only" not in text.partition("<script")[0]
    assert [model["alphas"] for model in index_of(text)["models"]] == [False] * 4
    assert all(model["median"] is not None for model in index_of(text)["models"])


def test_more_room_is_used_and_never_more_than_there_is(run_folder: Path, add_model: AddModel) -> None:
    for seed in range(6):
        add_model(f"org/m{seed}", heavy(seed, layers=4))
    results = read_results(run_folder)
    least = len(make_page(results, most_bytes=1).html)
    sizes = {most: make_page(results, most_bytes=most) for most in (least + 20_000, least + 30_000, MOST_BYTES)}
    kept = [page.with_figures + page.with_spectra for page in sizes.values()]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1] == 12
    for most, page in sizes.items():
        assert len(page.html) <= max(most, least)


def test_the_docstrings_examples() -> None:
    assert doctest.testmod(page_module).failed == 0


def test_fewer_points_for_more_layers() -> None:
    found = [points_a_layer(9_000_000, layers) for layers in (1, 1_000, 10_000, 20_000, 40_000, 10**6)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (100, 20)


def test_a_run_with_failures_alone_has_a_page_too(run_folder: Path) -> None:
    (run_folder / "failures.jsonl").write_text('{"title": "org/x", "class": "crash", "reason": "gone"}\n')
    page = make_page(read_results(run_folder))
    assert page.models == 0
    assert b"org/x (crash): gone" in page.html


def test_a_damaged_file_of_spectra_leaves_the_rest(small_run: RunResults, run_folder: Path) -> None:
    (run_folder / "stats" / "org--base.parquet").write_bytes(b"PAR1 no table")
    page = make_page(read_results(run_folder))
    assert (page.models, page.with_figures, page.with_spectra) == (4, 4, 3)
    assert b"were left out" not in page.html.partition(b"<nav")[0]


def test_progress_is_told(small_run: RunResults) -> None:
    told: list[tuple[int, int]] = []
    make_page(small_run, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_without_jinja_the_extra_is_named(small_run: RunResults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"gpuherd\[page\]"):
        make_page(small_run)
