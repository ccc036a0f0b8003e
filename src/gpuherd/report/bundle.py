"""The library that draws the charts of pages: Vega, Vega-Lite and Vega-Embed as one script, for offline use.

``assets/vega.js.zlib`` is what vl-convert 1.9.0 makes of their sources (``javascript_bundle()``: Vega 6, Vega-Lite 6,
Vega-Embed 7), deflated. It is kept here because bundling takes ten seconds of a CPU and a package of 30 MB, which no
page should need. ``python -m gpuherd.report.bundle`` makes it again. Vega-Embed brings the interpreter of Vega's
expressions, so that nothing in it needs ``eval``. Licences: ``assets/vega.LICENSE``.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "assets" / "vega.js.zlib"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The script as a page holds it.

    Attributes:
        packed: deflated, in base64 (as ``report.packing``); it sets ``vegaEmbed``.
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
