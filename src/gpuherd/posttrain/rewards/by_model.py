"""Completions scored by a reward model, which is loaded when rewards are first asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.posttrain.types import Problem, Reward

if TYPE_CHECKING:
    from gpuherd.posttrain.rewards.reward_model import Form, RewardModel


class ModelRewards:
    """Scores completions by a sequence classifier. Its rewards have no bounds, and no right and wrong."""

    verifiable = False
    reward_range = (-math.inf, math.inf)

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str | None = None,
        *,
        label: str | None = None,
        form: Form | None = None,
        batch_size: int = 32,
    ):
        """Loads nothing yet; the arguments are those of ``RewardModel``."""
        self.model = model
        self._device, self._dtype, self._label, self._form, self._batch_size = device, dtype, label, form, batch_size
        self._loaded: RewardModel | None = None

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The model's score of each completion to its prompt. Raises what loading raises, and BadModel for a score that
        is not finite."""
        if self._loaded is None:
            from gpuherd.posttrain.rewards.reward_model import RewardModel

            self._loaded = RewardModel(
                self.model, self._device, self._dtype, label=self._label, form=self._form, batch_size=self._batch_size
            )
        scores = self._loaded.scores([each.prompt for each in problems], completions)
        return [Reward(score) for score in scores]

    def close(self) -> None:
        """Lets the model go."""
        self._loaded = None
