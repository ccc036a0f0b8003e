"""RLCR: GRPO whose answers say how sure they are, and are paid for being right and for knowing it.

Damani et al. 2025, "Beyond Binary Rewards" (arXiv 2507.16806). The policy is asked for its confidence q in a tag,
``<confidence>0.7</confidence>``, and earns

    R = 1[right] - (q - 1[right])^2

the second part being the Brier score, a proper scoring rule: whatever the probability p that the answer is right, the
expected reward is largest at q = p, and is then p^2, so that being right more often pays more. An answer that states no
confidence, several, or none that is a number from 0 to 1, is of wrong form and earns -1, the least there is. The task
judges what is left without the tag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.policy_gradient.plan import mean
from gpuherd.posttrain.rewards.answers import CONFIDENCE
from gpuherd.posttrain.types import Collecting, Policy, Problem, Reward, Rollout, Row, Split, Task, Training

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*")
_WRONG_FORM = -1.0  # as of an answer that is sure and wrong

ASKED = (
    "\n\nAfter your answer, state the probability that it is right, from 0 to 1, in a tag, such as "
    "<confidence>0.7</confidence>."
)


@dataclass(frozen=True, kw_only=True)
class RLCROptions(GRPOOptions):
    """``GRPOOptions`` and:

    Attributes:
        instruction: follows each prompt; "" for a policy that states its confidence anyway.
    """

    instruction: str = ASKED


@register
class RLCR(GRPO):
    """See the module."""

    name: ClassVar[str] = "RLCR"
    Options: ClassVar[type[RLCROptions]] = RLCROptions
    options: RLCROptions

    def collect(self, work: Collecting) -> Iterator[Row]:
        """As GRPO's, of problems that ask for a confidence."""
        task = Calibrated(work.task, self.options.instruction)
        return super().collect(replace(work, task=task, problems=[task.asked(each) for each in work.problems]))

    def train(self, work: Training) -> Policy:
        """As GRPO's, of a task that pays for calibration."""
        if work.task is None:
            if self.options.online:
                raise UsageError("RLCR pays for right answers and was given no task that judges them")
            return super().train(work)  # from rows that were paid when they were collected
        task = Calibrated(work.task, self.options.instruction)
        return super().train(replace(work, task=task, problems=[task.asked(each) for each in work.problems]))

    def evaluated(self, task: Task) -> Task:
        """Asked for a confidence, with the rewards of the task."""
        return Calibrated(task, self.options.instruction, paid=False)

    def figures(self, rollouts: Sequence[Rollout]) -> Mapping[str, float | None]:
        """Of the answers that state a confidence: their share (``stated``), mean ``confidence``, Brier score and
        expected calibration error, in ten bins; None where none does."""
        stated = [(confidence_in(each.text), each.correct) for each in rollouts]
        known = [(q, bool(right)) for q, right in stated if q is not None and right is not None]
        return {
            "stated": mean([q is not None for q, _ in stated]),
            "confidence": mean([q for q, _ in known]),
            "brier": mean([(q - right) ** 2 for q, right in known]),
            "ece": calibration_error(known) if known else None,
        }


class Calibrated:
    """A task whose completions state their confidence; a ``types.Task`` itself.

    Args:
        instruction: follows each prompt.
        paid: rewards are RLCR's; False: those of the task, of what is left without the tags.
    """

    def __init__(self, task: Task, instruction: str, *, paid: bool = True):
        """Raises UsageError for a task that knows no right and wrong."""
        if not task.verifiable:
            raise UsageError(f"RLCR pays for answers that are right, and the task {task.name} knows no right and wrong")
        self._task, self._instruction, self._paid = task, instruction, paid
        self.name, self.verifiable = task.name, not paid
        self.reward_range = (_WRONG_FORM, 1.0) if paid else task.reward_range

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The task's, each followed by the instruction."""
        return [self.asked(each) for each in self._task.problems(split, count, seed)]

    def asked(self, problem: Problem) -> Problem:
        """A problem of the task, followed by the instruction; in a conversation its last message is. Raises UsageError
        for a conversation with tools."""
        if problem.chat:
            raise UsageError(
                f"problem {problem.id} is a conversation with tools, which RLCR's instruction can't follow"
            )
        *before, last = problem.messages or [("", "")]
        messages = (*before, (last[0], last[1] + self._instruction)) if problem.messages else ()
        return replace(problem, prompt=problem.prompt + self._instruction, messages=messages)

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """What each completion earns. Raises what the task raises."""
        plain = [replace(each, prompt=each.prompt.removesuffix(self._instruction)) for each in problems]
        judged = self._task.rewards(plain, [CONFIDENCE.sub("", each) for each in completions])
        if not self._paid:
            return judged
        return [payment(each, confidence_in(text)) for each, text in zip(judged, completions, strict=True)]

    def close(self) -> None:
        """Ends what the task has started."""
        self._task.close()


def payment(judged: Reward, confidence: float | None) -> Reward:
    """What a completion earns that was judged so and states this confidence (None: it doesn't).

    >>> [payment(Reward(1.0, True), q).value for q in (1.0, 0.5, 0.0, None)]
    [1.0, 0.75, 0.0, -1.0]
    >>> [payment(Reward(0.0, False), q).value for q in (1.0, 0.5, 0.0, None)]
    [-1.0, -0.25, 0.0, -1.0]
    """
    right = float(bool(judged.correct))
    if confidence is None:
        return replace(judged, value=_WRONG_FORM, note="no single confidence from 0 to 1 is stated")
    brier = (confidence - right) ** 2
    return replace(judged, value=right - brier, parts={"right": right, "confidence": confidence, "brier": brier})


def confidence_in(text: str) -> float | None:
    """The probability that an answer states, thoughts left out; None where there is no tag, more than one, or something
    else in it.

    >>> [confidence_in(f"42 <confidence>{q}</confidence>") for q in ("0.7", " 70 % ", "1.5", "high", "nan")]
    [0.7, 0.7, None, None, None]
    >>> confidence_in("42"), confidence_in("<confidence>1</confidence><confidence>0</confidence>")
    (None, None)
    """
    from gpuherd.qa.span import answer_in

    found = CONFIDENCE.findall(answer_in(text))
    number = _NUMBER.fullmatch(found[0]) if len(found) == 1 else None
    if number is None:
        return None
    value = float(number[1]) / (100 if number[2] else 1)
    return value if value <= 1 else None


def calibration_error(known: Sequence[tuple[float, bool]]) -> float:
    """Expected calibration error (Naeini et al. 2015) of stated confidences: the mean over answers of how far, in each
    of ten equally wide bins with their upper edge within, the mean confidence is from the share of right answers.

    >>> round(calibration_error([(0.9, True), (0.9, False), (0.2, False)]), 6)
    0.333333
    """
    gaps = [0.0] * 10
    for q, right in known:
        gaps[max(0, math.ceil(q * 10) - 1)] += q - right
    return math.fsum(map(abs, gaps)) / len(known)
