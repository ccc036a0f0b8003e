"""A package's public names load when they are first used (PEP 562), so that importing the package costs nothing.

A package lists the modules of its names, and imports them once more for type checkers under ``TYPE_CHECKING``:

    __getattr__, __dir__ = on_first_use(__name__, {"Queue": "queue"})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from gpuherd.errors import naming_extras


def on_first_use(
    room: str, homes: Mapping[str, str], *, extra: str | None = None, brings: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        room: the package's ``__name__``.
        homes: public name -> the module of the package that defines it.
        extra, brings: the extra of gpuherd that the package needs, and its libraries; when one of them is missing,
            using a name raises MissingExtra.
    """
    extras = {} if extra is None else dict.fromkeys(brings, extra)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        with naming_extras(extras, f"{room.rpartition('.')[2]} needs"):
            value = getattr(import_module(f"{room}.{homes[name]}"), name)
        setattr(sys.modules[room], name, value)  # the next use finds it without a call
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[room]), *homes})

    return load, names
