"""How PITA and Q#-HF collect: an answer is cut, ended twice from there, and one of the two ends is preferred.

PITA (Bobbili et al. 2025, arXiv 2507.20067, and its code): the policy of the round before answers greedily; the answer
is cut at a place t, uniform on 1 (``first_cut``) to its length - 1; from there the reference goes on greedily (y_a, the
paper's y_ref) and by a draw (y_b); the preferred one is drawn with Bradley and Terry's probability, or is the one of
the higher score. (In the code it is the guided policy that goes on, from the second round on; the paper's expectation
is the reference's.)
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.posttrain.guidance.draws import uniform, whole_number
from gpuherd.posttrain.guidance.options import ValueOptions
from gpuherd.posttrain.guidance.samplers import Samplers, load_samplers, some_at_once
from gpuherd.posttrain.types import Collecting, Comparison, Problem, Reward

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Prefix

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preferring:
    """How one of two completions comes to be preferred.

    Attributes:
        samples: comparisons of each problem.
        drawn: with the probability sigmoid(beta (score_a - score_b)); else the higher score is preferred, and equal
            scores prefer none.
        beta: how sharply.
        correct_bonus: what a right completion scores beside its reward.
        first_cut: the least number of tokens before a cut, 0 or 1.
    """

    samples: int
    drawn: bool
    beta: float
    correct_bonus: float
    first_cut: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UsageError(f"bradley_terry_beta={self.beta}; it is above 0")
        if not math.isfinite(self.correct_bonus):
            raise UsageError(f"correct_bonus={self.correct_bonus}; it is a finite number")
        if self.first_cut not in (0, 1):
            raise UsageError(f"first_cut={self.first_cut}; it is 0, before the first token, or 1, behind it")

    def score(self, reward: Reward) -> float:
        """What a completion is compared by."""
        return reward.value + (self.correct_bonus if reward.correct else 0.0)

    def first(self, score_a: float, score_b: float, draw: float) -> bool | None:
        """Whether y_a is preferred to y_b; None where neither is.

        Args:
            draw: a number in [0, 1) of the comparison's own.
        """
        if self.drawn:
            return draw < _sigmoid(self.beta * (score_a - score_b))
        return None if score_a == score_b else score_a > score_b


@dataclass(frozen=True, kw_only=True)
class ComparingOptions(ValueOptions):
    """Of algorithms that learn from comparisons. Raises UsageError.

    Attributes:
        bradley_terry_sampling: preferences are drawn with the probability sigmoid(bradley_terry_beta (score_a -
            score_b)); else the higher score is preferred, and equal scores prefer none.
        bradley_terry_beta: how sharply.
        correct_bonus: what a right completion scores beside its reward.
        first_cut: 1: no answer is cut before its first token, so that nothing is learnt of that one (as PITA's code);
            0: answers are cut there too.
    """

    bradley_terry_sampling: bool = True
    bradley_terry_beta: float = 1.0
    correct_bonus: float = 5.0
    first_cut: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preferring()

    def preferring(self) -> Preferring:
        """How comparisons are made."""
        return Preferring(
            self.samples_per_example,
            self.bradley_terry_sampling,
            self.bradley_terry_beta,
            self.correct_bonus,
            self.first_cut,
        )


def _sigmoid(x: float) -> float:
    """1 / (1 + e^-x) for any x.

    >>> _sigmoid(0.0), _sigmoid(-1e4), _sigmoid(1e4)
    (0.5, 0.0, 1.0)
    """
    return (1 + math.tanh(x / 2)) / 2


def comparisons(work: Collecting, how: Preferring) -> Iterator[Comparison]:
    """At most ``how.samples`` comparisons of each of the job's problems, in their order.

    Left out, and counted in the log: answers that are too short to be cut (of less than two tokens, or with
    ``first_cut`` 0 of none), ends that are equal, and scores of which neither is preferred.
    """
    samplers = load_samplers(work)
    left_out: Counter[str] = Counter()
    for problems in some_at_once(work):
        yield from _of_some(samplers, work, problems, how, left_out)
    if left_out:
        told = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
        logger.info("comparisons left out in round %d: %s", work.round, told)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A greedy answer that is cut behind ``prefix``; ``rest`` are the tokens that followed there."""

    problem: Problem
    sample: int
    prefix: Prefix
    rest: tuple[int, ...]


def _of_some(
    samplers: Samplers, work: Collecting, problems: Sequence[Problem], how: Preferring, left_out: Counter[str]
) -> Iterator[Comparison]:
    from gpuherd.posttrain.rollout.scoring import scored

    cuts = _cuts(samplers, work, problems, how, left_out)
    drawn = [only.ids for (only,) in samplers.reference.continuations([each.prefix for each in cuts])] if cuts else []
    greedy = _greedy_ends(samplers, cuts)
    pairs = []
    for cut, y_a, y_b in zip(cuts, greedy, drawn, strict=True):
        if y_a == y_b:
            left_out["with equal ends"] += 1
        else:
            pairs.append((cut, y_a, y_b))
    text = samplers.reference.text
    texts = [text((*cut.prefix.ids, *end)) for cut, y_a, y_b in pairs for end in (y_a, y_b)]
    asked = [cut.problem for cut, _, _ in pairs for _ in range(2)]
    read = [samplers.reference.scored_text(each) for each in texts]
    rewards = scored(work.task, asked, read, work.reward_batch_size)
    for place, (cut, y_a, y_b) in enumerate(pairs):
        two = slice(2 * place, 2 * place + 2)
        made = _compared(cut, (y_a, y_b), texts[two], rewards[two], how, work)
        if made is None:
            left_out["with equal scores"] += 1
        else:
            yield made


def _cuts(
    samplers: Samplers, work: Collecting, problems: Sequence[Problem], how: Preferring, left_out: Counter[str]
) -> list[_Cut]:
    """The policy's greedy answers, each cut at ``how.samples`` places."""
    from gpuherd.posttrain.rollout.sampler import Prefix

    prompts = [samplers.policy.prompt_ids(each) for each in problems]
    named = [Prefix(each.id, prompt) for each, prompt in zip(problems, prompts, strict=True)]
    answers = [only for (only,) in samplers.policy.continuations(named, greedy=True)]
    cuts: list[_Cut] = []
    for problem, prompt, answer in zip(problems, prompts, answers, strict=True):
        length = len(answer.ids) - answer.finished
        if length <= how.first_cut:
            left_out["of answers too short to be cut"] += how.samples
            continue
        for sample in range(how.samples):
            place = whole_number(how.first_cut, length - 1, work.sampling.seed, f"cut {work.round}", problem.id, sample)
            prefix = Prefix(f"{problem.id}\nend {work.round} {sample}", prompt, answer.ids[:place])
            cuts.append(_Cut(problem, sample, prefix, answer.ids[place:]))
    return cuts


def _greedy_ends(samplers: Samplers, cuts: Sequence[_Cut]) -> list[tuple[int, ...]]:
    """How the reference goes on greedily: where it gave the answer itself, as it did go on."""
    if not samplers.guided:
        return [each.rest for each in cuts]
    if not cuts:
        return []
    return [only.ids for (only,) in samplers.reference.continuations([each.prefix for each in cuts], greedy=True)]


def _compared(
    cut: _Cut,
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    texts: Sequence[str],
    rewards: Sequence[Reward],
    how: Preferring,
    work: Collecting,
) -> Comparison | None:
    draw = uniform(work.sampling.seed, f"prefer {work.round}", cut.problem.id, cut.sample)
    first = how.first(how.score(rewards[0]), how.score(rewards[1]), draw)
    if first is None:
        return None
    better, worse = (0, 1) if first else (1, 0)
    return Comparison(
        problem=cut.problem.id,
        prompt_ids=tuple(cut.prefix.prompt_ids),
        context_ids=tuple(cut.prefix.ids),
        chosen_ids=ends[better],
        rejected_ids=ends[worse],
        chosen=texts[better],
        rejected=texts[worse],
        chosen_reward=rewards[better].value,
        rejected_reward=rewards[worse].value,
    )
