"""The skeleton that all pages share: what a page shows, how it is packed, and its HTML.

A page is one file that asks nothing of any network: the style, the scripts and the charts' library are in it, and a
Content-Security-Policy with their hashes forbids everything else. What strangers wrote enters it through Jinja's
autoescape, or packed, and the scripts put it on the screen as text only. Views are trees of nodes (``report.nodes``)
with tables and charts (``report.charts``); one template, one style and one small script (``assets/``) show them.

What it holds is JSON and arrays. A blob is the arrays' bytes, those of one weight together (the first bytes of all
numbers, then the second, ...), which lets zlib halve them; then deflated, in base64, which no HTML parser can take for
a tag. ``assets/page.js`` undoes it.

``assets/vega.js.zlib`` is what vl-convert 1.9.0 makes of the sources of Vega 6, Vega-Lite 6 and Vega-Embed 7
(``javascript_bundle()``), deflated. It is kept here because bundling takes ten seconds of a CPU and a package of 30 MB,
which no page should need; ``python -m gpuherd.report.page`` makes it again. Vega-Embed brings the interpreter of
Vega's expressions, so that nothing in it needs ``eval``. Licences: ``assets/vega.LICENSE``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.errors import naming_extras, printable
from gpuherd.report.charts import CONFIG
from gpuherd.report.nodes import Node

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Of the 10 MB that a page may have, with room for what surrounds the packed texts.
MOST_BYTES = 9_600_000
ASSETS = Path(__file__).parent / "assets"
_LEVEL = 6  # of zlib
# Of the 23 bits of a float32's fraction: an error of 5e-7 relative, and counts to two million exactly. A page shows
# five digits of a figure, differences of alpha, and counts to a million in full.
_BITS = 20


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows at one address.

    Attributes:
        name: the address: ``#/name``.
        title: the words of its link; "" for a view that others lead to.
        nodes: what it shows.
        count: a number next to its link.
        under: the view whose link is marked while this one is shown.
    """

    name: str
    title: str
    nodes: Sequence[Node]
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
        extra: further values of the index, for the page's own scripts.
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
        page=contents,
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
        "charts": CONFIG,
    }
    declared = {f"view-{each.name}": packed_json(each.nodes) for each in contents.views}
    return {"index": packed_json(index), **declared}


def frame_bytes(contents: PageContents) -> int:
    """An upper bound of all but the declared views and further blobs: charts' library, scripts, style, template."""
    bundle = len(vega_bundle().packed) if needs_charts(contents) else 0
    files = (*ASSETS.glob("page.*"), *contents.scripts, *contents.styles)
    own = sum(each.stat().st_size for each in files)
    head = sum(len(str(each)) for each in (contents.notes, contents.settings, contents.facts, contents.failures))
    return bundle + own + 2 * head + 20_000


def needs_charts(contents: PageContents) -> bool:
    """Whether a view draws a chart. (A text with these signs has backslashes before its quotes.)"""
    return any('["chart", {' in json.dumps(view.nodes) for view in contents.views)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _environment() -> Any:
    """Jinja with autoescape on for everything. Raises MissingExtra."""
    with naming_extras({"jinja2": "page"}, "the page needs"):
        import jinja2
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    )
    made.filters["printable"] = printable
    return made


def _markup(text: str) -> Any:
    """Our own script or style, which must not be escaped; it has no way to end its element early."""
    import markupsafe

    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError("an asset of the page would end its own element")
    return markupsafe.Markup(text)  # noqa: S704 - the files of this package, no stranger's text


# --- packing ----------------------------------------------------------------------------------------------------------


def packed_json(value: Any) -> str:
    """A JSON value as text for a page: deflated, base64. Half a pair of surrogates comes back as just that."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Written as \ud800, which is how JSON escapes it: a browser's UTF-8 has no such thing.
    return as_text(text.encode("utf-8", "backslashreplace"))


def packed_floats(values: Floats) -> str:
    """Numbers as float32, to 5e-7 relative; NaN stays NaN, and so becomes what no float32 holds (above 3.4e38)."""
    import numpy as np

    with np.errstate(over="ignore"):
        words = np.asarray(values, np.float32).view(np.uint32)
    drop = 23 - _BITS
    # A carry out of the fraction rounds the exponent up, as it should; NaN must not become infinite.
    rounded = (words + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF ^ ((1 << drop) - 1))
    known = np.isfinite(words.view(np.float32)) & np.isfinite(rounded.view(np.float32))
    return as_text(by_weight(np.where(known, rounded, np.uint32(0x7FC00000)).astype("<u4")))


def by_weight(values: NDArray[Any]) -> bytes:
    """The bytes of an array, all first bytes first."""
    import numpy as np

    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def as_text(data: bytes) -> str:
    """Bytes, deflated, in base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")


_FILE = Path(__file__).parent / "assets" / "vega.js.zlib"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The script as a page holds it.

    Attributes:
        packed: deflated, in base64 (as ``packed_json``); it sets ``vegaEmbed``.
        policy: what a Content-Security-Policy calls it by.
    """

    packed: str
    policy: str


@cache
def vega_bundle() -> Bundle:
    """The bundle of this version of gpuherd."""
    deflated = _FILE.read_bytes()
    return Bundle(base64.b64encode(deflated).decode("ascii"), policy_hash(zlib.decompress(deflated)))


def policy_hash(script: bytes) -> str:
    """What a Content-Security-Policy calls a script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}'"


def bundled() -> bytes:
    """The bundle, deflated, made anew by vl-convert, which only developers have."""
    import vl_convert

    make: Any = vl_convert.javascript_bundle  # its types ask for a snippet, which it takes as None too
    return zlib.compress(make().encode(), 9)


if __name__ == "__main__":
    _FILE.write_bytes(bundled())
