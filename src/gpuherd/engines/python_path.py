"""``PYTHONPATH`` for processes that start elsewhere than this one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import gpuherd

NAME = "PYTHONPATH"


def absolute(places: str) -> str:
    """The same places, whatever folder they are looked up from.

    >>> absolute("/opt/a:/opt/b/../c:")
    '/opt/a:/opt/c'
    """
    return os.pathsep.join(os.path.abspath(place) for place in places.split(os.pathsep) if place)  # noqa: PTH100


def finding_us(own: Mapping[str, str]) -> dict[str, str]:
    """This environment, in which Python finds this very gpuherd first."""
    places = [str(Path(gpuherd.__file__).parents[1]), *filter(None, [own.get(NAME)])]
    return {**own, NAME: os.pathsep.join(places)}
