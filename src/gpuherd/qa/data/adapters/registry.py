"""The one list of data sets that are known by name: a new one is one file here that names where it is.

adapter(Adapter("sciq", "allenai/sciq", drafts, split="validation", few_shot_split="train"))
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.qa.data.rows import Draft, Unusable

Drafts = Callable[[Mapping[str, Any]], Iterable[Draft | Unusable]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A data set of the Hub.

    Attributes:
        name: as the user says it.
        hub_id: as the Hub has it.
        drafts: what a row holds: mostly one question, or the reason why none. Raises KeyError, TypeError where a row is
            not of the shape that is known here.
        config: of the data set, where it has several.
        split: the one that is asked where no other is said.
        few_shot_split: the one that examples are drawn from; None: from the split that is asked, and these are then
            not asked.
        context_is_part: whether its questions are asked of their context, so that it is given unless said otherwise.
        columns: by these a row of a local file is known to be of this data set; none: its rows have the plain form.
    """

    name: str
    hub_id: str
    drafts: Drafts
    config: str | None = None
    split: str = "validation"
    few_shot_split: str | None = "train"
    context_is_part: bool = False
    columns: frozenset[str] = frozenset()


_ADAPTERS: dict[str, Adapter] = {}


def adapter(new: Adapter) -> Adapter:
    """Registers a data set."""
    if new.name in _ADAPTERS:
        raise ValueError(f"there is a data set {new.name!r} already")
    _ADAPTERS[new.name] = new
    return new


def adapters() -> Mapping[str, Adapter]:
    """All data sets that are known by name."""
    import gpuherd.qa.data.adapters as package

    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")  # they register themselves
    return _ADAPTERS
