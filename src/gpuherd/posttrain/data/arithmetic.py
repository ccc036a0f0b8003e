"""Sums such as ``12+7=``, as many as are wanted: a task that a tiny model learns, and a control of algorithms.

Wrong labels make the control (``posttraining.md``, 6.4): a base that imitates them answers right about as often as its
labels were right, and every algorithm that works at all raises that.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.generated import MOST_PROBLEMS, GeneratedTask, Shuffled, characters, generated
from gpuherd.posttrain.types import Problem, Reward, Split
from gpuherd.qa.span import answer_in

_CHARACTERS = "0123456789+-*="
_MOST_TRAINING = 20_000  # problems, where no number is said
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which sums.

    Attributes:
        digits: of each number, at most.
        operands: numbers in a sum.
        operations: any of ``+-*``; products come first, as usual.
        train, heldout, test: problems in each split; None: a tenth of all for the test, at most 1,000, half as many
            held out, and of the others at most 20,000 for training.
        wrong_labels: share of training and held-out problems whose answer to imitate is wrong. Rewards are not touched.
        seed: of which sums are in which split, and of the wrong labels.
    """

    digits: int = 2
    operands: int = 2
    operations: str = "+"
    train: int | None = None
    heldout: int | None = None
    test: int | None = None
    wrong_labels: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 18:
            raise UsageError(f"digits={self.digits}; from 1 to 18")
        if not 2 <= self.operands <= 10:
            raise UsageError(f"operands={self.operands}; from 2 to 10")
        if not self.operations or set(self.operations) - set("+-*") or len(set(self.operations)) < len(self.operations):
            raise UsageError(f"operations={self.operations!r}; some of +-*, each once")
        if not 0 <= self.wrong_labels <= 1:
            raise UsageError(f"wrong_labels={self.wrong_labels}; a share from 0 to 1")
        for name in ("train", "heldout", "test"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= MOST_PROBLEMS:
                raise UsageError(f"{name}={value}; from 0 to {MOST_PROBLEMS}")

    @property
    def size(self) -> int:
        """How many different sums there are."""
        return int(10 ** (self.digits * self.operands) * len(self.operations) ** (self.operands - 1))


@generated("arithmetic", Settings)
class Arithmetic(GeneratedTask[Settings]):
    """The task. Its ids are the sums themselves."""

    def __init__(self, settings: Settings):
        """Raises UsageError where there are too few sums."""
        super().__init__(settings)
        self._places = _places(settings)
        self._order = Shuffled(settings.size, f"arithmetic {settings.seed}")

    def generate(self, split: Split) -> Iterator[Problem]:
        """The sums of a split; no sum is in two."""
        for place in self._places[split]:
            text = _sum_at(self._order[place], self.settings)
            value = str(value_of(text))
            label = value if split is Split.TEST else _labelled(text, value, self.settings)
            yield Problem(text, f"{text}=", (label,), {"value": value})

    def reward(self, problem: Problem, completion: str) -> Reward:
        """1 where the completion is the number and nothing else but white space."""
        said = answer_in(completion).strip()
        right = said == problem.hidden["value"]
        note = None if right or _NUMBER.fullmatch(said) else "not a number and nothing else"
        return Reward(float(right), right, note=note)


def make_tokenizer(folder: Path) -> Any:
    """A tokenizer of one token a character of sums, saved into the folder and returned. ``</s>`` is 0, ``<pad>`` 1."""
    return characters(folder, _CHARACTERS)


def value_of(text: str) -> int:
    """What a sum of whole numbers comes to.

    >>> value_of("12+7"), value_of("2-3*4")
    (19, -10)
    """
    terms = re.findall(r"([+-]?)(\d+(?:\*\d+)*)", text)
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, product.split("*"))) for sign, product in terms)


def _places(settings: Settings) -> dict[Split, range]:
    """Where in the shuffled order of all sums the splits are. Raises UsageError where there are too few sums."""
    test = min(1000, settings.size // 10) if settings.test is None else settings.test
    heldout = test // 2 if settings.heldout is None else settings.heldout
    left = settings.size - test - heldout
    train = min(_MOST_TRAINING, left) if settings.train is None else settings.train
    if train > left:
        raise UsageError(
            f"arithmetic: train={train}, heldout={heldout} and test={test} are {train + heldout + test} problems, and "
            f"there are {settings.size} such sums; ask for fewer, or for more digits"
        )
    return {
        Split.TEST: range(test),
        Split.HELDOUT: range(test, test + heldout),
        Split.TRAIN: range(test + heldout, test + heldout + train),
    }


def _sum_at(number: int, settings: Settings) -> str:
    """The sum of a number from 0 to ``settings.size`` - 1."""
    text = ""
    for turn in range(settings.operands):
        if turn:
            number, operation = divmod(number, len(settings.operations))
            text += settings.operations[operation]
        number, operand = divmod(number, 10**settings.digits)
        text += str(operand)
    return text


def _labelled(text: str, value: str, settings: Settings) -> str:
    """The answer to imitate: right, or with the probability of ``wrong_labels`` another number, each of the 99 nearest
    ones as probable as any other, so that the right one stays the likeliest of all up to a share of .99."""
    digest = hashlib.sha256(f"label\0{settings.seed}\0{text}".encode()).digest()
    if int.from_bytes(digest[:8], "big") >= settings.wrong_labels * 2**64:
        return value
    number, others = int(value), 99
    lowest = number - others // 2 if "-" in settings.operations else max(0, number - others // 2)
    wrong = lowest + int.from_bytes(digest[8:16], "big") % others
    return str(wrong + (wrong >= number))
