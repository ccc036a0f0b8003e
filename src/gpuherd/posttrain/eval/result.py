"""What an evaluation of a policy found: figures with their intervals. Plain frozen data; light, no numpy.

Made by ``evaluating``, written by ``files``, gathered by ``gathering``, shown by the tables and the page. A figure that
can't be had is None and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpuherd.posttrain.eval.options import Tie
from gpuherd.qa.intervals import Figure

FORMAT = 1
RESULT = "result.json"
REFERENCE = "reference"  # the algorithm's name of a model as it was before any training


class Estimator(StrEnum):
    """How a KL divergence was had."""

    EXACT = "exact"  # sum over the vocabulary at each visited position
    K1 = "k1"  # log p - log q of the sampled token
    K3 = "k3"  # q/p - 1 - log(q/p) of the sampled token


@dataclass(frozen=True, slots=True)
class About:
    """Of what an evaluation is.

    Attributes:
        algorithm: a name of ``algos.registry``, or REFERENCE.
        dataset: what was trained on (of the reference: evaluated on).
        evaluated_on: the task whose problems were asked.
        family: the model's short name.
        round: from 0; None for the reference.
        seed: of the training and of the draws: runs that differ in it alone are gathered into one row.
    """

    algorithm: str
    dataset: str
    evaluated_on: str
    family: str
    round: int | None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AtK:
    """A figure of ``k`` completions a problem."""

    k: int
    figure: Figure


@dataclass(frozen=True, slots=True)
class TokenKL:
    """KL(policy || reference) along the completions that the policy drew, in nats.

    Attributes:
        estimator: how.
        sequence: summed over a completion's tokens, mean over completions.
        token: the mean over all their tokens.
        completions: at how many it was measured.
    """

    estimator: Estimator
    sequence: Figure
    token: Figure
    completions: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one policy on one set of problems. Those of right and wrong are None where the task knows neither.

    Attributes:
        problems, samples: how many problems, and completions of each.
        reward: mean over completions.
        pass_at_1: share of right completions, all samples counted: the mean over samples.
        first: share of problems whose first sample is right.
        pass_at: P(at least one of k is right), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
        majority: is the answer with the most votes right? Of k < samples the mean over disjoint groups of k.
        tie: what a tie of it earned.
        kl: None where it was not measured.
        tokens: mean length of a completion, its end token counted.
        finished: share of completions that the policy ended itself.
    """

    problems: int
    samples: int
    reward: Figure
    pass_at_1: Figure | None
    first: Figure | None
    pass_at: tuple[AtK, ...]
    majority: tuple[AtK, ...]
    tie: Tie
    kl: TokenKL | None
    tokens: Figure
    finished: Figure


@dataclass(frozen=True, slots=True)
class Cost:
    """What decoding took.

    Attributes:
        seconds: of wall clock, decoding and rewards; of all processes that ever worked on it.
        tokens: how many were decoded.
        gpus: how many GPUs; 0 on a CPU.
    """

    seconds: float
    tokens: int
    gpus: int

    @property
    def tokens_per_second(self) -> float | None:
        """None where it took no time."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def gpu_hours(self) -> float | None:
        """None on a CPU."""
        return self.seconds * self.gpus / 3600 if self.gpus else None


@dataclass(frozen=True, slots=True)
class Point:
    """A policy at one eta.

    Attributes:
        eta: None of a policy that is not guided, and of one whose eta is infinite (the reference's top k).
        own: whether it is the eta that the policy was made with, the one that summaries show: none is chosen by its
            result.
        answers, scores: names of files beside ``result.json``: the completions, and what each earned.
    """

    eta: float | None
    own: bool
    metrics: Metrics
    cost: Cost
    answers: str
    scores: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy, evaluated.

    Attributes:
        policy, reference: ``Policy.to_dict``.
        split: of the problems.
        sampling: the draws' settings by name.
        confidence: of all intervals.
        points: one for each eta, the largest eta first; of an unguided policy one.
        notes: what a reader must know first.
        versions: of the libraries that made it.
    """

    about: About
    policy: Mapping[str, Any]
    reference: Mapping[str, Any]
    split: str
    sampling: Mapping[str, Any]
    confidence: float
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> Point:
        """The point that summaries show."""
        return next((each for each in self.points if each.own), self.points[0])

    @property
    def drawn(self) -> str | None:
        """How completions were sampled, where not from the model's own distribution: temperature 1, uncut."""
        how = self.sampling
        if how.get("greedy"):
            return "of the most probable tokens"
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        words = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k"}
        other = [f"{words[key]} {how[key]:g}" for key, value in usual.items() if how.get(key, value) != value]
        return f"drawn at {', '.join(other)}" if other else None
