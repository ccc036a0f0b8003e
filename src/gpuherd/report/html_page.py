"""One self-contained HTML page out of a template, scripts and styles: what such pages have in common.

Jinja's autoescape is on for everything; our own script and style, the files of this package, enter as they are, and a
Content-Security-Policy with their hashes forbids any other script, and every request. ``page/`` holds what pages
share: elements, axes, tables, unpacking, and the look; curves, figures and strangers' text for those that show them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuherd import __version__
from gpuherd.errors import naming_extras

SHARED = Path(__file__).parent / "page"


def rendered(template: Path, scripts: Sequence[Path], styles: Sequence[Path], **values: Any) -> bytes:
    """The page, UTF-8.

    Args:
        template: a Jinja template; it is given ``values`` and ``version``, ``script``, ``style``, ``script_hash``,
            ``style_hash``.
        scripts: files that become one script, in one scope, in this order.
        styles: files that become one style.

    Raises:
        MissingExtra: Jinja2 is not installed.
        ValueError: a script or style would end its own element.
    """
    script = "".join(("(() => {\n'use strict';\n", *map(_text, scripts), "})();"))
    style = "".join(map(_text, styles))
    html = (
        _environment(template.parent)
        .get_template(template.name)
        .render(
            version=__version__,
            script=_markup(script),
            style=_markup(style),
            script_hash=_hash(script),
            style_hash=_hash(style),
            **values,
        )
    )
    return bytes(html.encode("utf-8", "backslashreplace"))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a Content-Security-Policy calls the text by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _environment(folder: Path) -> Any:
    """Jinja with autoescape on for everything. Raises MissingExtra."""
    with naming_extras({"jinja2": "page"}, "the page needs"):
        import jinja2
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    )


def _markup(text: str) -> Any:
    """Our own script or style, which must not be escaped; it has no way to end its element early."""
    import markupsafe

    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError("an asset of the page would end its own element")
    return markupsafe.Markup(text)  # noqa: S704 - the files of this package, no stranger's text
