"""Everything about ``letters`` by enumeration: each answer's probability, and what each prefix is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

from tests.posttrain.guidance.letters import SAMPLING, Letters

from gpuherd.lm.backend import PromptTokens
from gpuherd.lm.guidance.guide import Guide, offsets
from gpuherd.posttrain.rollout.sampler import Sampler
from gpuherd.posttrain.types import Policy, Precision, Problem, Split

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """All answers to one problem.

    Attributes:
        prompt: its tokens.
        chances: of each answer under the reference.
        rewards: of each answer.
    """

    prompt: Ids
    chances: Mapping[Ids, float]
    rewards: Mapping[Ids, float]

    def prefixes(self) -> list[Ids]:
        """Of all lengths from 1 on, whole answers included."""
        return sorted({answer[:length] for answer in self.chances for length in range(1, len(answer) + 1)})

    @cached_property
    def _sums(self) -> Mapping[Ids, tuple[float, float]]:
        """Of each prefix the chance, and the chance times the reward, of what begins with it."""
        sums: dict[Ids, tuple[float, float]] = {}
        for answer, p in self.chances.items():
            for length in range(len(answer) + 1):
                mass, earned = sums.get(answer[:length], (0.0, 0.0))
                sums[answer[:length]] = (mass + p, earned + p * self.rewards[answer])
        return sums

    def mass(self, prefix: Ids) -> float:
        """The chance that an answer begins so."""
        return self._sums[prefix][0]

    def worth(self, prefix: Ids) -> float:
        """The expected reward behind a prefix, under the reference."""
        mass, earned = self._sums[prefix]
        return earned / mass

    def optimum(self, eta: float) -> float:
        """The expected reward of the optimum, which is proportional to the reference times e^(r/eta)."""
        weights = {each: p * math.exp(self.rewards[each] / eta) for each, p in self.chances.items()}
        return math.fsum(w * self.rewards[each] for each, w in weights.items()) / math.fsum(weights.values())

    def guided(self, added: Mapping[Ids, float]) -> float:
        """The expected reward of the policy to whose log-prob of each token is added what stands for its prefix."""
        chances: dict[Ids, float] = {(): 1.0}
        for prefix in sorted(self.prefixes(), key=len):
            before = prefix[:-1]
            siblings = [each for each in added if each[:-1] == before and len(each) == len(prefix)]
            total = math.fsum(self.mass(each) * math.exp(added[each]) for each in siblings)
            chances[prefix] = chances[before] * self.mass(prefix) * math.exp(added[prefix]) / total
        return math.fsum(chances[answer] * reward for answer, reward in self.rewards.items())


def trees(reference: Path, task: Letters) -> dict[str, Tree]:
    """The tree of every problem, by its id."""
    sampler = Sampler(Policy(str(reference)), Precision("float32"), "cpu", SAMPLING)
    return {each.id: _tree(sampler, task, each) for each in task.problems(Split.TRAIN, None, 0)}


def _tree(sampler: Sampler, task: Letters, problem: Problem) -> Tree:
    prompt = sampler.prompt_ids(problem)
    most, (end,) = SAMPLING.max_new_tokens, sampler.end_ids
    words = [each for each in range(len(sampler.tokenizer)) if each != end]
    answers = [(*some, end) for length in range(most) for some in product(words, repeat=length)]
    answers += list(product(words, repeat=most))
    log_probs = sampler.model.log_probs([PromptTokens(problem.id, prompt)] * len(answers), answers)
    chances = {
        answer: math.exp(math.fsum(each or 0.0 for each in told))
        for answer, told in zip(answers, log_probs, strict=True)
    }
    rewards = {answer: task.reward(sampler.text(answer)).value for answer in answers}
    return Tree(prompt, chances, rewards)


def values(classifier: Path | str, tree: Tree, prefixes: Sequence[Ids]) -> list[list[float]]:
    """The classifier's logits at each prefix's last token, one each or as many as atoms."""
    import torch

    from gpuherd.lm.guidance.classifier import load_classifier

    loaded = load_classifier(classifier)
    found: dict[Ids, list[float]] = {}
    with torch.inference_mode():
        for length in sorted({len(each) for each in prefixes}):
            some = [each for each in prefixes if len(each) == length]
            told = loaded.values(torch.tensor([(*tree.prompt, *each) for each in some]))[:, -1]
            found |= dict(zip(some, told.reshape(len(some), -1).tolist(), strict=True))
    return [found[each] for each in prefixes]


def guided_reward(guide: Guide, tree: Tree, atoms: tuple[float, ...] = ()) -> float:
    """The exact expected reward of the reference with this guide (whose candidates are the whole vocabulary)."""
    import torch

    prefixes = tree.prefixes()
    told = torch.tensor(values(guide.classifier, tree, prefixes))
    added = offsets(told if atoms else told[:, 0], guide.mode, guide.eta, atoms)
    return tree.guided(dict(zip(prefixes, added.tolist(), strict=True)))


def error(classifier: Path | str, tree: Tree) -> float:
    """The mean difference of what a classifier of one logit expects and what is to be expected, over the tokens that
    the reference comes to."""
    prefixes = tree.prefixes()
    told = [1 / (1 + math.exp(-z)) for (z,) in values(classifier, tree, prefixes)]
    masses = [tree.mass(each) for each in prefixes]
    gaps = [abs(p - tree.worth(each)) for p, each in zip(told, prefixes, strict=True)]
    return math.fsum(m * gap for m, gap in zip(masses, gaps, strict=True)) / math.fsum(masses)
