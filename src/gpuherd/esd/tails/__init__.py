"""Tail distributions that can be fitted besides the power law, each with its option, its columns and its words.

A module of this folder holds one ``TailDistribution``, ``TAIL``. Options, columns, the schema of results, the glossary
and the labels of the page are made from it; nothing else names it. Light: no numpy.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class TailDistribution:
    """A distribution of the eigenvalues from some xmin on.

    Attributes:
        name: of its option (``--tpl``), and the beginning of its columns.
        title: for people, in the middle of a sentence.
        help: of the option.
        figures: its columns without the name before them, each a float, with what it means in a line; the column
            ``status`` ("ok", or why there is no fit) comes behind them.
        module: has ``fit(x, settings)``, whose result is a dataclass of the columns, and ``require()``, which raises
            MissingExtra where something is not installed. Loaded when it is asked for.
    """

    name: str
    title: str
    help: str
    figures: Mapping[str, str]
    module: str

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of figures, each with what it means."""
        return {f"{self.name}_{figure}": meaning for figure, meaning in self.figures.items()}

    @property
    def status(self) -> str:
        """The column that says why there is no fit."""
        return f"{self.name}_status"

    def fit(self, x: npt.NDArray[np.float64], settings: Any) -> Any:
        """The fit to ascending, positive, finite values, at least two; ``settings``: of ``settings.FitSettings``."""
        return import_module(self.module).fit(x, settings)

    def require(self) -> None:
        """Raises MissingExtra where something that the fit needs is not installed."""
        import_module(self.module).require()


@functools.cache
def tails() -> tuple[TailDistribution, ...]:
    """All that are found, by name."""
    found = (each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(import_module(f"{__name__}.{name}").TAIL for name in sorted(found))
