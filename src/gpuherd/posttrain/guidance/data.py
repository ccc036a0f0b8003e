"""Training data of a value classifier: from the rows of all rounds to labelled sequences. Pure.

Q* of KL-regularised post-training is a functional of the law of the reward-to-go **under the reference** (Zhou et al.
2025, arXiv 2502.20548). So each token behind the place from which the reference wrote on gives an example of its
prefix, and the reward of the whole completion is a draw from the law that is to be learnt.

Rounds are put together (DAgger: Ross et al. 2011, as in Q#'s Algorithm 1). Some problems are held out by their ids:
the same in every round, so that no classifier is validated on what an earlier one has learnt.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.types import Comparison, Rollout, Row

T = TypeVar("T")

Range = tuple[float, float]


# --- labels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabelledSequence:
    """Tokens of which some are labelled, all with the same number.

    Attributes:
        problem: its problem's id.
        ids: prompt and completion.
        labelled: of each token, whether its prefix with it is learnt from.
        target: a reward, 0 or 1 where it says wrong or right.
    """

    problem: str
    ids: tuple[int, ...]
    labelled: tuple[bool, ...]
    target: float

    @property
    def tokens(self) -> int:
        """How many are labelled."""
        return sum(self.labelled)


Example = tuple[LabelledSequence, ...]  # what goes into one batch together: one completion, or the two of a comparison


def of_rollout(rollout: Rollout, target: float) -> Example:
    """The tokens behind the switch (t >= h of Q#'s Algorithm 1), of those that a policy chose. Empty where none is."""
    chosen = tuple(place >= rollout.rolled_in and mine for place, mine in enumerate(rollout.by_policy))
    return _example(rollout.problem, rollout.prompt_ids, rollout.ids, chosen, target)


def of_comparison(comparison: Comparison, chosen: float = 1.0, rejected: float = 0.0) -> Example:
    """Two sequences, the preferred completion and the other; what both begin with is not labelled.

    By default with PITA's labels (arXiv 2507.20067 and its code: 1 for all tokens of the preferred completion, 0 for
    those of the other). Empty where one of the two has no token.
    """
    before = comparison.prompt_ids + comparison.context_ids
    two = (
        _example(comparison.problem, before, comparison.chosen_ids, (True,) * len(comparison.chosen_ids), chosen),
        _example(comparison.problem, before, comparison.rejected_ids, (True,) * len(comparison.rejected_ids), rejected),
    )
    return two[0] + two[1] if two[0] and two[1] else ()


def _example(
    problem: str, before: tuple[int, ...], ids: tuple[int, ...], labelled: tuple[bool, ...], target: float
) -> Example:
    if not any(labelled):
        return ()
    return (LabelledSequence(problem, before + ids, (False,) * len(before) + labelled, target),)


@dataclass(frozen=True, slots=True)
class Informative:
    """Rollouts of the problems that teach something, and how many problems were left out.

    Attributes:
        rollouts: those of problems with a right and a wrong completion, in their order.
        all_right, all_wrong: problems that were left out.
    """

    rollouts: tuple[Rollout, ...]
    all_right: int
    all_wrong: int


def informative(rollouts: Sequence[Rollout]) -> Informative:
    """Leaves out problems whose completions are all right or all wrong (as in the experiments of the Q# paper).

    For the rollouts of one round, which are ``verifiable``: a round's completions of a problem are its group.
    """
    verdicts: dict[str, set[bool]] = {}
    for each in rollouts:
        verdicts.setdefault(each.problem, set()).add(bool(each.correct))
    all_right = {problem for problem, found in verdicts.items() if found == {True}}
    all_wrong = {problem for problem, found in verdicts.items() if found == {False}}
    kept = tuple(each for each in rollouts if each.problem not in all_right | all_wrong)
    return Informative(kept, len(all_right), len(all_wrong))


def verifiable(rollouts: Iterable[Rollout]) -> bool:
    """Whether each reward says that the completion is right (1) or wrong (0), so that these are what there is to
    predict. A reward that says more, such as the share of tests that passed, is not."""
    return all(each.correct is not None and each.reward == each.correct for each in rollouts)


# --- rewards on the range of a histogram ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Rewards of [low, high] are written on [v_min, v_max].

    eta then weighs rewards of this scale: an eta of rewards as they were is ``eta * (v_max - v_min) / (high - low)``.

    Attributes:
        low, high: the least and the largest reward.
        v_min, v_max: what they become.
        known_from: where ``low`` and ``high`` come from: "task" or "data".
    """

    low: float
    high: float
    v_min: float
    v_max: float
    known_from: str

    def __call__(self, reward: float) -> float:
        """A reward on this scale; one outside of [low, high] is put at its end.

        >>> Scale(-1, 3, 0, 1, "task")(0.0)
        0.25
        """
        share = (min(max(reward, self.low), self.high) - self.low) / (self.high - self.low)
        return self.v_min + share * (self.v_max - self.v_min)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def scale_of(rewards: Iterable[float], v_min: float, v_max: float, reward_range: Range | None = None) -> Scale:
    """The scale of a task's range of rewards; where that is None or has no end, of the given rewards.

    Raises UsageError where all rewards are the same: a classifier would learn nothing.
    """
    if reward_range is not None and all(map(math.isfinite, reward_range)) and reward_range[0] < reward_range[1]:
        return Scale(reward_range[0], reward_range[1], v_min, v_max, "task")
    seen = list(rewards)
    if not seen or min(seen) == max(seen):
        found = f"all {len(seen)} rewards are {seen[0]}" if seen else "there is no reward"
        raise UsageError(
            f"{found}: a classifier learns nothing from them; collect more completions, or harder problems"
        )
    return Scale(min(seen), max(seen), v_min, v_max, "data")


def atoms(count: int, v_min: float, v_max: float) -> tuple[float, ...]:
    """So many numbers from ``v_min`` to ``v_max``, equally far from each other.

    >>> atoms(3, 0, 1)
    (0.0, 0.5, 1.0)
    """
    if count < 2 or not v_min < v_max:
        raise UsageError(f"{count} atoms from {v_min} to {v_max}: two at least, the least of them below the largest")
    return tuple(v_min + (v_max - v_min) * number / (count - 1) for number in range(count))


# --- rows of all rounds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Data:
    """The data of one training.

    Attributes:
        examples: to learn from.
        held_out: of other problems, for checking.
        loss: by which it is learnt.
        atoms: of the histogram, empty for a head of one logit.
        summary: counts and the scale, for ``classifier.json``, the log and people.
    """

    examples: tuple[Example, ...]
    held_out: tuple[Example, ...]
    loss: Loss
    atoms: tuple[float, ...]
    summary: dict[str, Any]


def of_rollouts(rounds: Sequence[Sequence[Row]], options: ValueOptions, reward_range: Range | None = None) -> Data:
    """Tokens labelled with what their completion earned: 1 and 0 where rewards say right or wrong and no more, else the
    reward on the histogram's scale.

    Args:
        rounds: rollouts, a sequence a round.
        reward_range: of the task; where it is None or endless, the range of the rows' rewards.

    Raises UsageError where nothing is left to learn from, and for a loss of comparisons.
    """
    rollouts_of = [rows_of(Rollout, rows) for rows in rounds]
    known = verifiable(each for rows in rollouts_of for each in rows)
    loss = options.loss_type or (Loss.BCE if known else Loss.MLE)
    if loss is Loss.BRADLEY_TERRY:
        raise UsageError("loss_type=bradley_terry learns from comparisons; these rows are single completions")
    rollouts, counts = _informative(rollouts_of) if known else ([each for rows in rollouts_of for each in rows], {})
    scale = _scale(rollouts, options, loss, reward_range, known=known)
    examples = [of_rollout(each, scale(each.reward)) for each in rollouts]
    return _divided(
        examples, loss, options, {"rollouts": sum(map(len, rollouts_of)), **counts, "scale": scale.to_dict()}
    )


def _informative(rounds: Sequence[Sequence[Rollout]]) -> tuple[list[Rollout], dict[str, int]]:
    """The rollouts of each round's problems that are neither all right nor all wrong, and how many are."""
    kept = [informative(rows) for rows in rounds]
    rollouts = [each for one in kept for each in one.rollouts]
    right, wrong = sum(one.all_right for one in kept), sum(one.all_wrong for one in kept)
    if not rollouts:
        raise UsageError(
            f"nothing to learn from: of {sum(map(len, rounds))} rollouts all problems' are all right or all wrong "
            f"({right} and {wrong} problems); collect more samples of each, or other problems"
        )
    return rollouts, {"problems_all_right": right, "problems_all_wrong": wrong}


def of_comparisons(
    rounds: Sequence[Sequence[Row]], options: ValueOptions, scores: Sequence[tuple[float, float]] | None = None
) -> Data:
    """Tokens labelled with what their side of a comparison is worth: 1 for the preferred and 0 for the other (PITA), or
    their scores on the histogram's scale (Q#-HF).

    Args:
        rounds: comparisons, a sequence a round.
        scores: of the chosen and the rejected completion of each, in the same order; None: 1 and 0.
    """
    comparisons = [each for rows in rounds for each in rows_of(Comparison, rows)]
    if not comparisons:
        raise UsageError("nothing to learn from: no comparison was collected; collect more samples or other problems")
    loss = options.loss_type or (Loss.BCE if scores is None else Loss.MLE)
    if scores is None:
        pairs = [(1.0, 0.0)] * len(comparisons)
        scale = Scale(0.0, 1.0, *_ends(options, loss), "preferences")
    else:
        pairs = list(scores)
        scale = scale_of((each for pair in pairs for each in pair), *_ends(options, loss))
    examples = [
        of_comparison(each, scale(chosen), scale(rejected))
        for each, (chosen, rejected) in zip(comparisons, pairs, strict=True)
    ]
    return _divided(examples, loss, options, {"comparisons": len(comparisons), "scale": scale.to_dict()})


def digest(examples: Iterable[Example]) -> str:
    """Identifies examples: 16 hex digits of the BLAKE2b digest of all ids, labels and targets, in their order."""
    state = hashlib.blake2b(digest_size=8)
    for example in examples:
        for each in example:
            state.update(struct.pack("<qd", len(each.ids), each.target))
            state.update(array("q", each.ids).tobytes() + bytes(each.labelled))
    return state.hexdigest()


def is_held_out(problem: str, share: float) -> bool:
    """Whether a problem is for validation: by its id alone, the same for every seed and round."""
    return uniform(0, "validation", problem, 0) < share


def rows_of(kind: type[T], rows: Iterable[Row]) -> list[T]:
    """The rows, which are all of this kind. Raises UsageError where one is not."""
    found: list[T] = []
    for each in rows:
        if not isinstance(each, kind):
            raise UsageError(
                f"rows of a {type(each).__name__.lower()} among those of a {kind.__name__.lower()}: they "
                "were collected by another algorithm; give this one a folder of its own"
            )
        found.append(each)
    return found


def _ends(options: ValueOptions, loss: Loss) -> Range:
    """What targets lie between: a probability's ends, or the histogram's."""
    return (options.V_min, options.V_max) if loss is Loss.MLE else (0.0, 1.0)


def _scale(
    rollouts: Sequence[Rollout], options: ValueOptions, loss: Loss, reward_range: Range | None, *, known: bool
) -> Scale:
    ends = _ends(options, loss)
    if known:
        return Scale(0.0, 1.0, *ends, "right or wrong")
    return scale_of((each.reward for each in rollouts), *ends, reward_range)


def _divided(examples: Sequence[Example], loss: Loss, options: ValueOptions, summary: dict[str, Any]) -> Data:
    labelled = [each for each in examples if each]
    learnt = tuple(each for each in labelled if not is_held_out(each[0].problem, options.validation_share))
    held_out = tuple(each for each in labelled if is_held_out(each[0].problem, options.validation_share))
    if not learnt:
        raise UsageError(
            f"nothing to learn from: {len(examples)} rows, {len(examples) - len(labelled)} of them with no token to "
            f"label, {len(held_out)} held out for validation; collect more, or lower validation_share"
        )
    if loss is not Loss.MLE and options.guidance.mode is Mode.DISTRIBUTIONAL:
        raise UsageError(f"guidance.mode=distributional is for loss_type=mle, and it is {loss}")
    if loss is Loss.MLE and options.guidance.mode is Mode.BERNOULLI:
        raise UsageError("guidance.mode=bernoulli is for a loss of one logit, and loss_type is mle")
    if loss is not Loss.MLE and (options.V_min, options.V_max) != (0, 1):
        raise UsageError(
            f"V_min={options.V_min}, V_max={options.V_max}: the loss is {loss} here, which predicts 0 to 1; set "
            "loss_type=mle, or leave both out"
        )
    summary = {
        **summary,
        "learnt_from": len(learnt),
        "held_out": len(held_out),
        "without_a_token": len(examples) - len(labelled),
        "tokens": sum(sequence.tokens for each in learnt for sequence in each),
    }
    histogram = atoms(options.num_atoms, options.V_min, options.V_max) if loss is Loss.MLE else ()
    return Data(learnt, held_out, loss, histogram, summary)


# --- draws: random decisions that a problem and a sample fix, whatever is collected with them -------------------------


def uniform(seed: int, purpose: str, problem: str, sample: int) -> float:
    """A number in [0, 1) that these four fix: 53 bits of a BLAKE2b digest of them.

    >>> 0 <= uniform(0, "switch", "a problem", 1) < 1
    True
    >>> uniform(0, "switch", "p", 1) == uniform(0, "switch", "p", 1) != uniform(0, "switch", "p", 2)
    True
    """
    counter = f"{seed} {purpose} {sample} {problem}".encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "big") >> 11) / 2.0**53


def whole_number(low: int, high: int, seed: int, purpose: str, problem: str, sample: int) -> int:
    """One of ``low`` to ``high``, both included, each as probable as the other.

    >>> {whole_number(1, 3, 0, "cut", "p", sample) for sample in range(50)}
    {1, 2, 3}
    """
    return low + int(uniform(seed, purpose, problem, sample) * (high - low + 1))
