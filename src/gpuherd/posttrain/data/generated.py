"""The common part of tasks that generate their problems: splits by a hash, orders that are never listed, tokenizers of
a fixed list of words for small models that learn from scratch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpuherd.posttrain.data.dataset import first_problems
from gpuherd.posttrain.data.options import task
from gpuherd.posttrain.types import Problem, Reward, Split

SettingsT = TypeVar("SettingsT")

MOST_PROBLEMS = 10_000_000  # of a split that is made: they are all held in memory
# A problem belongs to a split by its hash, whatever the seed: two training sets share no problem with any test. Of ten
# problems one is of the test, one held out.
SHARES: Mapping[Split, range] = {Split.TEST: range(1), Split.HELDOUT: range(1, 2), Split.TRAIN: range(2, 10)}
EOS, PAD, UNKNOWN = "</s>", "<pad>", "<unk>"


class GeneratedTask(ABC, Generic[SettingsT]):
    """Problems that are made when a split is first asked for, and kept."""

    name: str
    verifiable = True
    reward_range = (0.0, 1.0)

    def __init__(self, settings: SettingsT):
        self.settings = settings
        self._of_split: dict[Split, list[Problem]] = {}

    @abstractmethod
    def generate(self, split: Split) -> Iterable[Problem]:
        """All problems of a split."""

    @abstractmethod
    def reward(self, problem: Problem, completion: str) -> Reward:
        """What an answer earns."""

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first problems of a split. Raises UsageError where there are not so many."""
        if split not in self._of_split:
            self._of_split[split] = list(self.generate(split))
        return first_problems(self._of_split[split], count, seed, f"{self.name}, {split}")

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """What each answer earns, in order."""
        return [self.reward(*each) for each in zip(problems, completions, strict=True)]

    def close(self) -> None:
        """Nothing was started."""


TaskT = TypeVar("TaskT", bound=type[GeneratedTask[Any]])


def generated(name: str, settings: type[Any]) -> Callable[[TaskT], TaskT]:
    """Registers the class that follows as the task of this name, made with its settings alone."""

    def register(made: TaskT) -> TaskT:
        made.name = name
        task(name, settings)(lambda own, _: made(own))
        return made

    return register


class Shuffled:
    """The numbers from 0 to ``size`` - 1 in an order that a key fixes, each found alone: nothing is listed.

    A Feistel network of four rounds over the next larger power of four, walked on until it stays within ``size`` (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2).

    >>> sorted(Shuffled(10, "key")) == list(range(10))
    True
    """

    def __init__(self, size: int, key: str):
        """``size``: up to 2**1000."""
        self._size = size
        self._key = key.encode()
        self._half = max(1, ((max(size - 1, 1)).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return (self[place] for place in range(self._size))

    def __getitem__(self, place: int) -> int:
        """The number at a place from 0 on. Raises IndexError."""
        number = self._mixed(range(self._size)[place])
        while number >= self._size:
            number = self._mixed(number)
        return number

    def _mixed(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for turn in range(4):
            said = right.to_bytes(max(32, -(-self._half // 8)), "little")
            digest = hashlib.blake2b(said, key=self._key[:64], salt=bytes([turn])).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << self._half | right


def write_tokenizer(
    folder: Path, words: Iterable[str], split: Any, *, spaced: bool = True, unknown: bool = True
) -> Any:
    """A tokenizer of one token a word, saved into the folder and returned; it adds none by itself. ``</s>`` is 0,
    ``<pad>`` 1, ``<unk>``, where there is one, 2.

    Args:
        split: the pre-tokenizer (of ``tokenizers``) that parts a text into words.
        spaced: a text is decoded with spaces between its tokens.
        unknown: other words are ``<unk>``; else ``<pad>``.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": EOS, "pad_token": PAD, **({"unk_token": UNKNOWN} if unknown else {})}
    numbered = {word: number for number, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token=UNKNOWN if unknown else PAD))
    tokenizer.pre_tokenizer = split
    if not spaced:
        tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.save_pretrained(folder)
    return fast


def characters(folder: Path, words: Iterable[str], *, unknown: bool = True) -> Any:
    """One whose words are single characters, decoded without spaces."""
    from tokenizers import Regex, pre_tokenizers

    return write_tokenizer(
        folder, words, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), spaced=False, unknown=unknown
    )
