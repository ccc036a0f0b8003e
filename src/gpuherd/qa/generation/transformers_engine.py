"""Answers by transformers: the model as it was planned and loaded, and our own decoding over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.lm.asked import Decoded, Decoding, PromptTokens
from gpuherd.lm.model import LanguageModel
from gpuherd.models.load.loading import Loaded

if TYPE_CHECKING:
    from gpuherd.lm.guidance.guidance import Guidance


class TransformersEngine:
    """A loaded model that answers; ``exact``: one question at a time; ``guidance``: what guides its answers."""

    def __init__(self, loaded: Loaded, *, exact: bool, guidance: Guidance | None = None):
        self._loaded = loaded
        self._model = LanguageModel.of(loaded, exact=exact, guidance=guidance)

    def answer(self, prompts: Sequence[PromptTokens], how: Decoding) -> Sequence[Decoded]:
        """See ``Engine``."""
        return self._model.decode(prompts, how)

    def record(self) -> Mapping[str, Any]:
        """See ``Engine``."""
        import torch
        import transformers

        return {
            "engine": "transformers",
            "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
            "dtype": str(self._loaded.report.precision),
            "attention": self._loaded.report.attention,
            "most_rows": self._model.most_rows,
        }
