"""A way to answer: a model, perhaps with an adapter, perhaps guided. Plain frozen data; what rounds hand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from gpuherd.lm.guidance.guide import Guide


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "adapter": self.adapter,
            "guide": None if self.guide is None else self.guide.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``."""
        guide = values["guide"]
        return cls(values["model"], values["adapter"], None if guide is None else Guide.from_dict(guide))
