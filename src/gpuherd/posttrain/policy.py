"""A way to answer: a model, perhaps with an adapter, perhaps guided. Plain frozen data; what rounds hand on.

Places inside a run's folder can be written relative to it, so that a run that was moved goes on with its own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from gpuherd.lm.guidance.guide import Guide

_INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class Policy:
    """What is sampled and evaluated.

    Attributes:
        model: an id of the Hub or a folder.
        adapter: a LoRA adapter on top, or None.
        guide: what guides it while it decodes, or None.
    """

    model: str
    adapter: str | None = None
    guide: Guide | None = None

    def at(self, eta: float) -> Policy:
        """The same, guided at another eta; itself where it is not guided."""
        return self if self.guide is None else replace(self, guide=replace(self.guide, eta=eta))

    @property
    def sha256(self) -> str:
        """The same for the same files of model, adapter and classifier, wherever they lie. Reads all of them whose hash
        is not kept. Raises MissingModel, BadModel, MissingExtra."""
        from gpuherd.models.load.identity import files_digest, model_files

        guide = () if self.guide is None else (Path(self.guide.classifier),)
        return files_digest(*model_files(self.model, self.adapter).folders, *guide)

    def to_dict(self, root: Path | None = None) -> dict[str, Any]:
        """Plain values, for JSON.

        Args:
            root: a run's folder; places below it are written relative to it, as ``{"inside": "models/x"}``.
        """
        values = {
            "model": self.model,
            "adapter": self.adapter,
            "guide": None if self.guide is None else self.guide.to_dict(),
        }
        return values if root is None else _mapped(values, partial(_relative, root=root))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], root: Path | None = None) -> Self:
        """From ``to_dict`` with the run's folder as it is now. Raises ValueError for a place out of that folder."""
        told = values if root is None else _mapped(values, partial(_absolute, root=root))
        guide = told["guide"]
        return cls(told["model"], told["adapter"], None if guide is None else Guide.from_dict(guide))


def _mapped(values: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A policy's dictionary with the places of its models changed."""
    guide = values["guide"]
    return {
        **values,
        "model": change(values["model"]),
        "adapter": None if values["adapter"] is None else change(values["adapter"]),
        "guide": None if guide is None else {**guide, "classifier": change(guide["classifier"])},
    }


def _relative(word: str, root: Path) -> Any:
    path = Path(word)
    return {_INSIDE: str(path.relative_to(root))} if path.is_absolute() and path.is_relative_to(root) else word


def _absolute(word: Any, root: Path) -> str:
    if not isinstance(word, dict):
        return str(word)
    path = (root / word[_INSIDE]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError("a path out of the run's folder")
    return str(root / word[_INSIDE])
