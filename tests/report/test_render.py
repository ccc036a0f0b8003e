"""A page is put together of its own files alone, and what strangers wrote can't get out of its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import MissingExtra
from gpuherd.report.charts import Axis, Line, Span, line_chart, stroke, timeline_chart
from gpuherd.report.nodes import card, element
from gpuherd.report.page import PageContents, View, frame_bytes, packed_views, render_page, vega_bundle

HOSTILE = "</p></script><script>{{ 7 * 7 }}\ud800"


def page_of(*nodes: Any, **more: Any) -> str:
    return render_page(PageContents(HOSTILE, [View("one", "One", nodes)], **more)).decode()


def chart() -> Any:
    lines = [Line(HOSTILE, [(0.0, 0.0), (1.0, 1.0)], stroke(0))]
    return line_chart(lines, Axis("x", (0, 1)), Axis("y", (0, 1)), HOSTILE)


def sha(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_only_our_own_scripts_and_style_may_run() -> None:
    text = page_of(chart())
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert found is not None
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    style = text.partition("<style>")[2].partition("</style>")[0]
    packed = text.partition('id="vega">')[2].partition("<")[0]
    vega = zlib.decompress(base64.b64decode(packed)).decode()
    assert found[1].split("; ") == [
        "default-src 'none'",
        "img-src data:",
        f"script-src {sha(script)} {sha(vega)}",
        f"style-src {sha(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert script.startswith("(() => {\n'use strict';\n") and "vegaEmbed" in vega
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|innerHTML|\beval\(", script)


def test_without_a_chart_there_is_no_library_for_it() -> None:
    text = page_of(card("x"))
    assert 'id="vega"' not in text and len(text) < 100_000


def test_a_strangers_word_is_text() -> None:
    text = page_of(element("p", HOSTILE), chart(), notes=[HOSTILE], facts=[(HOSTILE, HOSTILE, "")])
    assert text.count("<script>") == 1
    assert "<h1>&lt;/p&gt;&lt;/script&gt;&lt;script&gt;{{ 7 * 7 }}\\ud800</h1>" in text
    packed = text.partition('id="view-one">')[2].partition("<")[0]
    assert json.loads(zlib.decompress(base64.b64decode(packed)))[0] == ["p", {}, HOSTILE]


@pytest.mark.parametrize("end", ["'</ScRipt>'", "/* </style> */", "// <!-- x"])
def test_a_script_that_would_end_its_own_element_is_refused(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.js").write_text(end)
    with pytest.raises(ValueError, match="end its own element"):
        page_of(scripts=[tmp_path / "a.js"])


def test_the_frame_is_not_larger_than_it_is_told_to_be() -> None:
    contents = PageContents("x", [View("one", "One", [chart()])], notes=["<" * 1000], settings=[("a", "&" * 1000)])
    views = sum(map(len, packed_views(contents).values()))
    assert views < len(render_page(contents)) <= views + frame_bytes(contents)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"gpuherd\[page\]"):
        page_of(card("x"))


@pytest.mark.slow
def test_the_bundle_is_what_vl_convert_makes() -> None:
    vl_convert = pytest.importorskip("vl_convert")
    if vl_convert.__version__ != "1.9.0":
        pytest.skip("the bundle was made by another version")
    assert sha(vl_convert.javascript_bundle()) == vega_bundle().policy


def test_lanes_may_be_called_anything() -> None:
    spans = [Span(lane, 0, 0.0, 1.0, "red", ()) for lane in ("gpu 10", "gpu 9", "²", "٣")]
    assert timeline_chart(spans, Axis("s", (0, 1)), "jobs")
