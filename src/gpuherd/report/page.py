"""One self-contained HTML page that asks nothing of any network: the skeleton of the three kinds of report.

A page declares its views as trees of nodes (``report.nodes``) with tables and charts (``report.charts``); one template,
one style and one small script (``assets/``) show them. The script makes elements and text nodes of them and nothing
else, Jinja's autoescape is on for all that the template shows, and a Content-Security-Policy with the hashes of our own
scripts and style forbids any other script, and every request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuherd import __version__
from gpuherd.errors import naming_extras, printable
from gpuherd.report.bundle import policy_hash, vega_bundle
from gpuherd.report.nodes import Node
from gpuherd.report.packing import packed_json

# Of the 10 MB that a page may have, with room for what surrounds the packed texts.
MOST_BYTES = 9_600_000
ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows at one address.

    Attributes:
        name: the address: ``#/name``.
        title: the words of its link; "" for a view that others lead to.
        nodes: what it shows; None for a view that the page's own script draws.
        count: a number beside its link.
        under: the view whose link is marked while this one is shown.
    """

    name: str
    title: str
    nodes: Sequence[Node] | None = None
    count: int | None = None
    under: str | None = None


@dataclass(frozen=True, slots=True)
class PageContents:
    """What a page shows.

    Attributes:
        title: its heading.
        views: the views that have a link, in order, and those without.
        facts: stand at the head: (what, value, the address that tells more or nothing).
        notes: what a reader must know first.
        settings: (name, value), under ``settings_title``.
        without_script: where the same is to be found without the page.
        failures: (model, kind, reason), listed for readers without a script.
        first: the view that is shown where the address names none; "" is the first of them.
        state: what is chosen at first, by key.
        extra: what the page's own scripts are told.
        blobs: further packed texts by the id that its scripts read them by.
        scripts: files of its own scripts, in one scope with the skeleton's.
        styles: files of its own styles.
    """

    title: str
    views: Sequence[View]
    facts: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = ()
    settings_title: str = ""
    settings: Sequence[tuple[str, str]] = ()
    without_script: str = ""
    failures: Sequence[Sequence[str]] = ()
    first: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, str] = field(default_factory=dict)
    scripts: Sequence[Path] = ()
    styles: Sequence[Path] = ()


def render_page(contents: PageContents) -> bytes:
    """The page, UTF-8. Charts' library is in it only where a view draws a chart.

    Raises:
        MissingExtra: Jinja2 or the charts' library is not installed.
        ValueError: a script or style would end its own element.
    """
    script = "".join(
        ("(() => {\n'use strict';\n", _text(ASSETS / "page.js"), *map(_text, contents.scripts), "start();\n})();")
    )
    style = "".join(map(_text, (ASSETS / "page.css", *contents.styles)))
    hashes = [policy_hash(script.encode())]
    blobs = {**packed_views(contents), **contents.blobs}
    if needs_charts(contents):
        bundle = vega_bundle()
        blobs["vega"] = bundle.packed
        hashes.append(bundle.policy)
    template = _environment().get_template("page.html.j2")
    html = template.render(
        page=_printable_head(contents),
        version=__version__,
        blobs=blobs,
        script=_markup(script),
        style=_markup(style),
        script_hashes=_markup(" ".join(hashes)),
        style_hash=_markup(policy_hash(style.encode())),
    )
    return bytes(html.encode("utf-8", "backslashreplace"))


def packed_views(contents: PageContents) -> dict[str, str]:
    """The index, and each declared view, packed."""
    views = [
        {"name": each.name, "title": each.title, "count": each.count, "under": each.under} for each in contents.views
    ]
    index = {
        **contents.extra,
        "views": views,
        "first": contents.first or contents.views[0].name,
        "state": dict(contents.state),
    }
    declared = {f"view-{each.name}": packed_json(each.nodes) for each in contents.views if each.nodes is not None}
    return {"index": packed_json(index), **declared}


def frame_bytes(contents: PageContents) -> int:
    """An upper bound of all but the declared views and further blobs: charts' library, scripts, style, template."""
    bundle = len(vega_bundle().packed) if needs_charts(contents) else 0
    files = (*ASSETS.glob("page.*"), *contents.scripts, *contents.styles)
    own = sum(each.stat().st_size for each in files)
    told = sum(len(str(each)) for each in (contents.notes, contents.settings, contents.facts, contents.failures))
    return bundle + own + 2 * told + 20_000


def needs_charts(contents: PageContents) -> bool:
    """Whether a view draws a chart, or a script of its own may."""
    return bool(contents.extra.get("charts")) or any(
        _has_chart(node) for view in contents.views for node in view.nodes or ()
    )


def _has_chart(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(map(_has_chart, node.values()))
    if not isinstance(node, list | tuple):
        return False
    return bool(node and node[0] == "chart" and len(node) > 1 and isinstance(node[1], Mapping)) or any(
        map(_has_chart, node)
    )


@dataclass(frozen=True, slots=True)
class _Head:
    """What the template shows, printable."""

    title: str
    facts: list[list[str]]
    notes: list[str]
    settings_title: str
    settings: list[list[str]]
    without_script: str
    failures: list[list[str]]


def _printable_head(contents: PageContents) -> _Head:
    def lines(rows: Sequence[Sequence[str]]) -> list[list[str]]:
        return [[printable(each) for each in row] for row in rows]

    return _Head(
        title=printable(contents.title),
        facts=lines(contents.facts),
        notes=[printable(each) for each in contents.notes],
        settings_title=printable(contents.settings_title),
        settings=lines(contents.settings),
        without_script=contents.without_script,
        failures=lines(contents.failures),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _environment() -> Any:
    """Jinja with autoescape on for everything. Raises MissingExtra."""
    with naming_extras({"jinja2": "page"}, "the page needs"):
        import jinja2
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    )


def _markup(text: str) -> Any:
    """Our own script or style, which must not be escaped; it has no way to end its element early."""
    import markupsafe

    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError("an asset of the page would end its own element")
    return markupsafe.Markup(text)  # noqa: S704 - the files of this package, no stranger's text
