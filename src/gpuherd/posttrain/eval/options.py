"""What is asked of an evaluation: plain frozen data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpuherd.errors import UsageError
from gpuherd.posttrain.types import Split


class Tie(StrEnum):
    """What a majority vote earns where several answers have the most votes."""

    SHARE = "share"  # the share of them that is right: what a fair draw among them earns on average
    FIRST = "first"  # whether the one that was drawn first is right
    UNIQUE = "unique"  # nothing: the majority must be unique (PITA's public code)


class Divergence(StrEnum):
    """How the KL divergence from the reference is measured where decoding has not recorded it."""

    EXACT = "exact"  # over the vocabulary at each position that was visited; both models in memory at once
    K3 = "k3"  # of the log-probs of the sampled tokens, by the estimator k3
    K1 = "k1"  # the same by k1
    NONE = "none"


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What is drawn and measured.

    Attributes:
        split: of the task's problems.
        problems: so many of them; None: all.
        samples: completions a problem.
        greedy: one completion a problem of the most probable tokens; ``samples`` is 1 then.
        etas: at which a guided policy is evaluated besides its own.
        pass_at: the k of pass@k, each at most ``samples``; pass@1 is always there. Empty: ``samples``.
        majority_at: the k of maj@k; empty: ``samples``. Of fewer than 2 there is none.
        tie: what a tie of a majority vote earns.
        kl: how the divergence from the reference is measured; a guided decode records it exactly in any case.
        kl_samples: of how many completions a problem, the first ones; None: of all.
        resamples, confidence: of the bootstrap.
        problem_seed: the order of the problems, of which the first ``problems`` are taken.
    """

    split: Split = Split.TEST
    problems: int | None = None
    samples: int = 8
    greedy: bool = False
    etas: tuple[float, ...] = ()
    pass_at: tuple[int, ...] = ()
    majority_at: tuple[int, ...] = ()
    tie: Tie = Tie.SHARE
    kl: Divergence = Divergence.EXACT
    kl_samples: int | None = None
    resamples: int = 1000
    confidence: float = 0.95
    problem_seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.greedy and self.samples != 1):
            raise UsageError(f"evaluation.samples={self.samples}; the least is 1, and greedy there is 1 only")
        for name, ks in (("pass_at", self.pass_at), ("majority_at", self.majority_at)):
            if any(not 1 <= k <= self.samples for k in ks) or len(set(ks)) < len(ks):
                raise UsageError(
                    f"evaluation.{name}={list(ks)}; each is there once, from 1 to evaluation.samples={self.samples}"
                )
        if self.problems is not None and self.problems < 1:
            raise UsageError(f"evaluation.problems={self.problems}; the least is 1; leave it out for all")
        if self.kl_samples is not None and not 1 <= self.kl_samples <= self.samples:
            raise UsageError(f"evaluation.kl_samples={self.kl_samples}; it is from 1 to samples={self.samples}")
        if any(not eta > 0 for eta in self.etas) or len(set(self.etas)) < len(self.etas):
            raise UsageError(f"evaluation.etas={list(self.etas)}; each is above 0 and there once")
        if self.resamples < 100 or not 0.5 <= self.confidence < 1:
            raise UsageError("evaluation.resamples is 100 or more, evaluation.confidence at least 0.5 and below 1")
