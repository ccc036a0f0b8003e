"""What the tokens of a completion are labelled with, so that a classifier learns what the rest of it will earn. Pure.

Q* of KL-regularised post-training is a functional of the law of the reward-to-go **under the reference** (Zhou et al.
2025, arXiv 2502.20548). So each token behind the place from which the reference wrote on is an example of its
prefix, and the reward of the whole completion is a draw from the law that is to be learnt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuherd.posttrain.types import Comparison, Rollout


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of which some are labelled, all with the same number.

    Attributes:
        problem: its problem's id.
        ids: prompt and completion.
        labelled: of each token, whether its prefix with it is an example.
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


Lesson = tuple[Example, ...]  # what goes into one batch together: one completion, or the two of a comparison


def of_rollout(rollout: Rollout, target: float) -> Lesson:
    """The tokens behind the switch (t >= h of Q#'s Algorithm 1), of those that a policy chose. Empty where none is."""
    chosen = tuple(place >= rollout.rolled_in and mine for place, mine in enumerate(rollout.by_policy))
    return _lesson(rollout.problem, rollout.prompt_ids, rollout.ids, chosen, target)


def of_comparison(comparison: Comparison, chosen: float = 1.0, rejected: float = 0.0) -> Lesson:
    """Two examples, the preferred completion and the other; what both begin with is not labelled.

    By default with PITA's labels (arXiv 2507.20067 and its code: 1 for all tokens of the preferred completion, 0 for
    those of the other). Empty where one of the two has no token.
    """
    before = comparison.prompt_ids + comparison.context_ids
    two = (
        _lesson(comparison.problem, before, comparison.chosen_ids, (True,) * len(comparison.chosen_ids), chosen),
        _lesson(comparison.problem, before, comparison.rejected_ids, (True,) * len(comparison.rejected_ids), rejected),
    )
    return two[0] + two[1] if two[0] and two[1] else ()


def _lesson(
    problem: str, before: tuple[int, ...], ids: tuple[int, ...], labelled: tuple[bool, ...], target: float
) -> Lesson:
    if not any(labelled):
        return ()
    return (Example(problem, before + ids, (False,) * len(before) + labelled, target),)


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
    """Leaves out the problems whose completions are all right or all wrong (as in the experiments of the Q# paper).

    To be asked of one round at a time, and of rollouts that are ``verifiable``: a round's completions of a problem are
    its group.
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
