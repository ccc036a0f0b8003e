"""What computes answers: one small interface, so that another engine is one more module beside the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpuherd.lm.asked import Decoded, Decoding, PromptTokens


class Engine(Protocol):
    """A model that answers. Whatever computes it, the log-probs are those of the raw model in float32."""

    def answer(self, prompts: Sequence[PromptTokens], how: Decoding) -> Sequence[Decoded]:
        """The answers to a batch of prompts, in its order."""

    def record(self) -> Mapping[str, Any]:
        """How it computes, for the run's record: the engine, versions, the dtype, where the model lies."""
