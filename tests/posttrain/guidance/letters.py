"""A task so small that everything about it can be enumerated: answers of at most three of the letters a, b, c.

An answer is right if it has one "a", and no more. With a random model as the reference, right answers are some of
all, and what is to be learnt of a prefix can be computed: the probability that the reference ends it right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tests.posttrain import tiny

from gpuherd.posttrain.engine.options import StepOptions
from gpuherd.posttrain.types import Collecting, Policy, Precision, Problem, Reward, Row, Sampling, Split, Training

LETTERS = "abc"
SAMPLING = Sampling(max_new_tokens=3, batch_size=32, seed=5)


class Letters:
    """Problems are short texts of the letters; see above. ``graded``: the reward is the number of "a", and nothing is
    right or wrong."""

    def __init__(self, *, graded: bool = False) -> None:
        self.name = "letters"
        self.verifiable = not graded
        self.reward_range = (0.0, 3.0) if graded else (0.0, 1.0)
        self.asked: list[int] = []  # completions of each call

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        return [Problem("".join(each), "".join(each)) for each in product(LETTERS, repeat=2)][:count]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        self.asked.append(len(completions))
        return [self.reward(each) for each in completions]

    def reward(self, text: str) -> Reward:
        many = text.count("a")
        return Reward(float(many == 1), many == 1) if self.verifiable else Reward(float(many))

    def close(self) -> None:
        pass


def reference_model(folder: Path) -> Path:
    """A random llama of the letters, unsure enough that no answer is much more probable than the others."""
    return tiny.tiny_llama(folder, seed=3, characters=LETTERS, spread=0.12)


def value_model(folder: Path) -> Path:
    """What a classifier starts from."""
    return tiny.tiny_llama(folder, seed=4, characters=LETTERS)


def collecting(
    model: Path | str,
    task: Letters,
    *,
    policy: Policy | None = None,
    number: int = 0,
    problems: Sequence[Problem] | None = None,
    sampling: Sampling = SAMPLING,
) -> Collecting:
    """The collection of a round over the task's problems."""
    reference = Policy(str(model))
    return Collecting(
        task=task,
        problems=task.problems(Split.TRAIN, None, 0) if problems is None else problems,
        policy=reference if policy is None else policy,
        reference=reference,
        round=number,
        sampling=sampling,
        precision=Precision(dtype="float32"),
        device="cpu",
    )


def training(
    model: Path | str,
    value_model: Path | str | None,
    folder: Path,
    rows: Sequence[Sequence[Row]],
    *,
    task: Letters | None = None,
    policy: Policy | None = None,
    number: int = 0,
    micro: int = 64,
    sampling: Sampling = SAMPLING,
) -> Training:
    """The training of a round, of everything that was collected."""
    reference = Policy(str(model))
    return Training(
        task=task,
        problems=Letters().problems(Split.TRAIN, None, 0),
        rows=rows,
        policy=reference if policy is None else policy,
        reference=reference,
        value_model=None if value_model is None else str(value_model),
        folder=folder,
        round=number,
        sampling=sampling,
        precision=Precision(dtype="float32"),
        device="cpu",
        steps=StepOptions(micro_batch_size=micro),
    )
