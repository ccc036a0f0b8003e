"""A reason as a page tells it, which people send around: printable, not endless, and without folders of this machine.

Pure. Knows text only.
"""

from __future__ import annotations

import re

from gpuherd.errors import printable

MOST = 300  # characters
# Absolute paths, and those below a home folder. Within quotes a path may have spaces. What follows a letter, a digit, a
# dot or another slash is part of something else: org/model, 3/4, https://host/page.
_QUOTED = re.compile(r"(?P<quote>['\"])(?:file://|~)?/[^'\"\n]*?(?P<name>[^/'\"\n]+)/?(?P=quote)")
_BARE = re.compile(r"(?<![\w./~-])(?:file://|~)?/(?:[^\s/'\"<>:;,()]+/)*(?P<name>[^\s/'\"<>:;,()]+)/?")


def shown(reason: str) -> str:
    """The reason with each path as the name of its file or folder, and cut where it is too long for a page.

    >>> shown("/home/me/models/tuned/model.safetensors is truncated: [Errno 2] '/data/my disk/x.bin'")
    "model.safetensors is truncated: [Errno 2] 'x.bin'"
    >>> shown("no org/model at https://host.org/org/model; 3/4 of ~/cache/x: gone")
    'no org/model at https://host.org/org/model; 3/4 of x: gone'
    """
    told = _BARE.sub(lambda path: path["name"], _QUOTED.sub(lambda path: repr(path["name"]), reason))
    return printable(told if len(told) <= MOST else f"{told[: MOST - 1]}…")
