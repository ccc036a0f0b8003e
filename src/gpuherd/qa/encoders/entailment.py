"""Does one text follow from another? A model that says so, and when two answers mean the same by it.

Relations are probabilities, kept as they are; the rules that make clusters of them can be changed without the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpuherd.qa.encoders.config import longest_input, nli_labels
from gpuherd.qa.encoders.network import Network, inputs_of

if TYPE_CHECKING:
    import torch

    from gpuherd.qa.encoders.model_files import EncoderFiles


class Asked(NamedTuple):
    """Does the hypothesis follow from the premise, as answers to this question?"""

    question: str
    premise: str
    hypothesis: str


@dataclass(frozen=True, slots=True)
class Relation:
    """Of a premise and a hypothesis: probabilities that add up to 1."""

    entailment: float
    neutral: float
    contradiction: float

    @property
    def label(self) -> str:
        """The most probable one; of equal ones the most careful: contradiction, then neutral."""
        best = max(self.entailment, self.neutral, self.contradiction)
        if self.contradiction == best:
            return "contradiction"
        return "neutral" if self.neutral == best else "entailment"


class Entailment(Protocol):
    """What relates texts."""

    def relations(self, asked: Sequence[Asked]) -> list[Relation | None]:
        """The relation of each; None where the texts are too long for the model."""


class Rule(StrEnum):
    """When two answers mean the same."""

    STRICT = "strict"  # each follows from the other (Kuhn et al. 2023)
    NOT_CONTRADICTING = (
        "not-contradicting"  # neither contradicts, and not both are neutral (Farquhar et al. 2024, code)
    )


def mean_the_same(there: Relation, back: Relation, rule: Rule) -> bool:
    """Whether two answers are one meaning by the relations in both directions."""
    labels = (there.label, back.label)
    if rule is Rule.STRICT:
        return labels == ("entailment", "entailment")
    return "contradiction" not in labels and labels != ("neutral", "neutral")


def clusters(number: int, same: Callable[[int, int], bool]) -> tuple[int, ...]:
    """For each of so many answers the number of its cluster, from 0 in order of first appearance.

    Greedy, as in Kuhn et al. 2023 (arXiv 2302.09664), algorithm 1: an answer joins the first cluster whose first member
    means the same, else it opens one. Each answer is so in exactly one cluster, also where "the same" is not
    transitive.

    >>> clusters(3, lambda a, b: {a, b} != {0, 1})
    (0, 1, 0)
    """
    firsts: list[int] = []
    found: list[int] = []
    for answer in range(number):
        cluster = next((cluster for cluster, first in enumerate(firsts) if same(first, answer)), len(firsts))
        if cluster == len(firsts):
            firsts.append(answer)
        found.append(cluster)
    return tuple(found)


# --- by a model of natural language inference -------------------------------------------------------------------------


class NliModel:
    """An encoder of a premise and a hypothesis in one input, with three labels, found by their names.

    Args:
        files: the model.
        condition_on_question: put the question before both texts, as Kuhn et al. 2023 do.
        cut: see ``inputs_of``.
        rows: the most pairs in one pass.
    """

    def __init__(
        self, files: EncoderFiles, *, condition_on_question: bool = False, cut: bool = False, rows: int = 64
    ) -> None:
        self._labels = nli_labels(files.name, files.config)
        self._network = Network(files, head=True, rows=rows)
        self._with_question = condition_on_question
        self._cut = cut
        self._longest = longest_input(files.config, self._network.tokenizer_limit)

    def relations(self, asked: Sequence[Asked]) -> list[Relation | None]:
        """The relation of each (premise, hypothesis). Equal inputs are computed once."""
        pairs = [self._texts(each) for each in asked]
        unique = list(dict.fromkeys(pairs))
        firsts, seconds = [pair[0] for pair in unique], [pair[1] for pair in unique]
        inputs = inputs_of(self._network.tokenizer, firsts, seconds, longest=self._longest, cut=self._cut)
        fitting = [(pair, given) for pair, given in zip(unique, inputs, strict=True) if given is not None]
        if not fitting:
            return [None] * len(pairs)
        rows = self._network.run([given for _, given in fitting], _probabilities)
        labels = self._labels
        found = {
            pair: Relation(float(row[labels.entailment]), float(row[labels.neutral]), float(row[labels.contradiction]))
            for (pair, _), row in zip(fitting, rows, strict=True)
        }
        return [found.get(pair) for pair in pairs]

    def _texts(self, asked: Asked) -> tuple[str, str]:
        before = f"{asked.question.strip()} " if self._with_question else ""
        return before + asked.premise, before + asked.hypothesis


def _probabilities(output: Any, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - what ``Network.run`` calls
    probabilities: torch.Tensor = output.logits.float().softmax(-1)
    return probabilities
