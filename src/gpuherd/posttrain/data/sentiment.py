"""Words of a small language that like or dislike: a task without right and wrong whose rewards need no model.

A language of 20 positive, 20 negative and 60 neutral words is drawn by a bigram chain that a seed fixes. A prompt is
the beginning of a sentence, its answer the rest of it, and a completion earns the share of positive words in it. It
stands in for reviews and summaries where none can be fetched, and for people's preferences: the rewards of two
completions are compared by the algorithms that learn from preferences.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.generated import SHARES, GeneratedTask, generated, write_tokenizer
from gpuherd.posttrain.types import Problem, Reward, Split

_POSITIVE = (
    "good great lovely fine brilliant funny warm clever fresh moving bright charming superb tender witty bold graceful "
    "gripping honest delightful"
)
_NEGATIVE = (
    "bad awful dull poor stupid boring cold clumsy stale flat dim tedious weak harsh silly bland lazy messy fake "
    "dreadful"
)
_NEUTRAL = (
    "the a this that it film plot scene actor story and but or with about from into of on in was is seems looks sounds "
    "feels stays becomes very quite rather somewhat really still again then here there now end middle beginning moment "
    "music camera script cast role hero villain town house street river night day year friend voice dream"
)
POSITIVE, NEGATIVE, NEUTRAL = (tuple(words.split()) for words in (_POSITIVE, _NEGATIVE, _NEUTRAL))
_GIVEN = 4  # words of a sentence
_LIKELY = 12  # words that often follow a word


@dataclass(frozen=True, slots=True)
class Settings:
    """Which sentences.

    Attributes:
        train, heldout, test: prompts in each split; no two are alike, in one split or in two.
        shortest, longest: words of a sentence, the four that are given among them.
        seed: of the language and of the sentences.
    """

    train: int = 5_000
    heldout: int = 500
    test: int = 1_000
    shortest: int = 8
    longest: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not _GIVEN < self.shortest <= self.longest <= 1000:
            raise UsageError(
                f"shortest={self.shortest}, longest={self.longest}; sentences have more than {_GIVEN} words and at "
                "most 1000"
            )
        for split in Split:
            if not 0 <= (count := getattr(self, split.value)) <= 1_000_000:
                raise UsageError(f"{split}={count}; from 0 to a million")


@generated("sentiment", Settings)
class Sentiment(GeneratedTask[Settings]):
    """The task."""

    verifiable = False

    def generate(self, split: Split) -> Iterator[Problem]:
        """The split's sentences, divided into what is given and the rest."""
        settings, language = self.settings, _language(self.settings.seed)
        drawing = random.Random(f"sentences {settings.seed} {split}")  # noqa: S311 - not a secret
        known: set[str] = set()
        while len(known) < getattr(settings, split.value):
            words = [drawing.choice(NEUTRAL)]
            for _ in range(drawing.randint(settings.shortest, settings.longest) - 1):
                following, weights = language[words[-1]]
                words.append(drawing.choices(following, cum_weights=weights)[0])
            prompt = " ".join(words[:_GIVEN])
            digest = hashlib.sha256(prompt.encode()).hexdigest()
            if int(digest[:8], 16) % 10 in SHARES[split] and prompt not in known:
                known.add(prompt)
                yield Problem(digest[:16], prompt, (f" {' '.join(words[_GIVEN:])}",))

    def reward(self, problem: Problem, completion: str) -> Reward:  # noqa: ARG002 - whatever was asked
        """The share of positive words in the completion; of one without words 0."""
        words = completion.split()
        if not words:
            return Reward(0.0, None, {"positive": 0.0, "negative": 0.0}, "no words")
        liked, disliked = (sum(word in some for word in words) / len(words) for some in (POSITIVE, NEGATIVE))
        return Reward(liked, None, {"positive": liked, "negative": disliked})


def make_tokenizer(folder: Path) -> Any:
    """A tokenizer of one token a word, saved into the folder and returned. ``</s>`` is 0 and ``<pad>`` 1."""
    from tokenizers import pre_tokenizers

    return write_tokenizer(folder, [*POSITIVE, *NEGATIVE, *NEUTRAL], pre_tokenizers.WhitespaceSplit())


def _language(seed: int) -> dict[str, tuple[tuple[str, ...], tuple[float, ...]]]:
    """Of each word the words that may follow it with their cumulative weights: all may, a few are likely."""
    drawing = random.Random(f"language {seed}")  # noqa: S311 - not a secret
    words = (*POSITIVE, *NEGATIVE, *NEUTRAL)
    found = {}
    for word in words:
        likely = set(drawing.sample(words, _LIKELY))
        weights = [drawing.expovariate(1.0) * (1.0 if each in likely else 0.02) for each in words]
        found[word] = (words, tuple(itertools.accumulate(weights)))
    return found
