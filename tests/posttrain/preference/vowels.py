"""A task for tests: the more vowels an answer has, the more it earns; and what is collected and trained of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuherd.posttrain.engine.options import Lora
from gpuherd.posttrain.types import (
    Collecting,
    Comparison,
    Policy,
    Precision,
    Problem,
    Reward,
    Rollout,
    Row,
    Sampling,
    Split,
    Training,
)

ADAPTER = Lora(
    r=16, alpha=32.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj")
)
SAMPLING = Sampling(max_new_tokens=8)


class Vowels:
    """The share of vowels among 8 letters; ``right`` says whether it calls more than half right."""

    name = "vowels"
    verifiable = False
    reward_range = (0.0, 1.0)

    def __init__(self, *, right: bool = False):
        self._right = right

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """``p0`` and so on."""
        del split, seed
        return [Problem(f"p{number}", f"say {number}:", (f"aeiou{number}",)) for number in range(count or 8)]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """Of each completion."""
        shares = [sum(letter in "aeiou" for letter in text) / 8 for text in completions]
        return [Reward(share, share > 0.5 if self._right else None) for share in shares]

    def close(self) -> None:
        """Nothing to end."""


def collecting(model: Path, count: int = 8, *, task: Any = None, **other: Any) -> Collecting:
    """Collecting of so many problems with a model that is policy and reference."""
    task = task or Vowels()
    policy = Policy(str(model))
    problems = task.problems(Split.TRAIN, count, 0)
    words: dict[str, Any] = {"round": 0, "sampling": SAMPLING, "precision": Precision(), "device": "cpu", **other}
    return Collecting(task=task, problems=problems, policy=policy, reference=policy, **words)


def training(model: Path, rows: Sequence[Row], folder: Path, **other: Any) -> Training:
    """Training of a model on these rows."""
    task = Vowels()
    words: dict[str, Any] = {
        "problems": task.problems(Split.TRAIN, 8, 0),
        "policy": Policy(str(model)),
        "reference": Policy(str(model)),
        "value_model": None,
        "round": 0,
        "sampling": SAMPLING,
        "precision": Precision(),
        "device": "cpu",
        **other,
    }
    return Training(task=task, rows=[rows], folder=folder, **words)


def comparisons(count: int = 8) -> list[Comparison]:
    """Comparisons in character tokens, of different lengths; some share a beginning."""
    made = []
    for number in range(count):
        prompt = tuple(10 + (number + place) % 40 for place in range(3 + number % 4))
        context = (5, 6) if number % 3 == 0 else ()
        chosen = (*(20 + (number * 7 + place) % 50 for place in range(1 + number % 5)), 0)
        rejected = (*(30 + (number * 5 + place) % 50 for place in range(1 + (number + 2) % 4)), 0)
        made.append(Comparison(f"p{number}", prompt, context, chosen, rejected, "chosen", "rejected"))
    return made


def episodes(count: int = 6) -> list[Rollout]:
    """Episodes of two turns with an environment's words between them; one in three has a single turn."""
    made = []
    for number in range(count):
        first = tuple(20 + (number + place) % 50 for place in range(2 + number % 3))
        words = () if number % 3 == 2 else (40, 41, 42 + number)
        last = (25 + number, 0)
        own = (True,) * len(first) + (False,) * len(words) + (True,) * len(last)
        ids = (*first, *words, *last)
        made.append(
            Rollout(
                problem=f"p{number}",
                sample=0,
                prompt_ids=(10, 11, 12 + number),
                ids=ids,
                by_policy=own,
                log_probs=tuple(-1.0 if each else None for each in own),
                text="",
                reward=number / 4,
                correct=None,
                finished=True,
                turn_rewards=((len(ids) - 1, number / 4),),
            )
        )
    return made
