"""Weighs words behind prompts with a language model, in batches of like lengths; a prompt that is too long has none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuherd.lm.backend import PromptTokens
from gpuherd.lm.batching import plan_batches
from gpuherd.lm.model import LanguageModel

Word = tuple[tuple[int, ...], ...]  # the token ids of each way to write it, none the beginning of another


class Weigher:
    """A language model that says how probable words are.

    Args:
        model: in memory.
        rows: the most prompts in one pass.
    """

    def __init__(self, model: LanguageModel, rows: int) -> None:
        self.model = model
        self._rows = rows

    def weigh(self, prompts: Sequence[PromptTokens], words: Sequence[Word]) -> list[tuple[float | None, ...] | None]:
        """For each prompt the natural log of each word's probability, all ways to write it together.

        None in place of a word that has no finite one, and in place of a prompt that the model has no room for.
        """
        longest = max((len(ids) for word in words for ids in word), default=1)
        room = self.model.most_positions
        fitting = [
            number for number, each in enumerate(prompts) if room is None or len(each.token_ids) + longest <= room
        ]
        ways = [ids for word in words for ids in word]
        found: list[tuple[float | None, ...] | None] = [None] * len(prompts)
        for batch in plan_batches([len(prompts[number].token_ids) for number in fitting], rows=self._rows):
            some = [fitting[place] for place in batch]
            for number, weighed in zip(some, self.model.weigh([prompts[each] for each in some], ways), strict=True):
                found[number] = tuple(_of_words(weighed, words))
        return found


def _of_words(weighed: Sequence[float | None], words: Sequence[Word]) -> list[float | None]:
    """The log of the sum of the probabilities of each word's ways."""
    values = iter(weighed)
    return [log_sum([next(values) for _ in word]) for word in words]


def log_sum(logs: Sequence[float | None]) -> float | None:
    """The log of the sum of the probabilities with these logs; None stands for none that is finite.

    >>> log_sum([None, None]) is None, log_sum([-2.0, None])
    (True, -2.0)
    """
    finite = [each for each in logs if each is not None]
    if not finite:
        return None
    highest = max(finite)
    return highest + math.log(math.fsum(math.exp(each - highest) for each in finite))
