"""A debate: the policy argues for or against something in several turns, and is answered with what speaks against it.

Who judges is said in each step's ``info``. A reward model scores each turn, and the episode earns the mean. Without one
stated rules of words do: how long a turn is, whether it names evidence, whether it reasons. They are a stand-in for a
judge and are called that (``keyword rules``): they measure how an argument is made, not whether it is true. The episode
then earns 0.6 times the mean of its turns + 0.2 times how much they keep to the matter (the mean Jaccard index of the
words of one turn and the next) + 0.2 times the share of the problem's points that were named.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.data.dataset import Checked, ParsedRow, by_model
from gpuherd.posttrain.envs.interface import NOTHING, EnvironmentOptions, Episode, Observation, Step, VectorEnv, user
from gpuherd.posttrain.envs.registry import environment, source_of
from gpuherd.posttrain.rewards.reward_model import ModelRewards
from gpuherd.posttrain.types import Problem, ProblemSource
from gpuherd.qa.data.questions import BadRow
from gpuherd.qa.span import answer_in

_MOST_TURNS = 3
_MEAN, _CONSISTENCY, _COVERAGE = 0.6, 0.2, 0.2
_EVIDENCE = frozenset(
    {"evidence", "study", "studies", "data", "research", "example", "percent", "survey", "report", "statistics"}
)
_REASONING = frozenset(
    {"because", "therefore", "thus", "since", "hence", "however", "although", "consequently", "if", "then"}
)
_WORD = re.compile(r"[^\W\d_]+")
_POINTS, _AGAINST = "points", "against"  # hidden parts of a problem, as JSON
_SIDES = ("for", "against")
_CHALLENGE = "The other side is not convinced. Answer their strongest objection and strengthen your case."


@dataclass(frozen=True, slots=True)
class Settings:
    """``words``: how many a turn should have at least for the keyword rules; ``label``: whose logit is the reward, of a
    reward model with several outputs."""

    words: int = 50
    label: str | None = None

    def __post_init__(self) -> None:
        at_least(self, words=1)


@environment("debate", Settings)
def make(settings: Settings, options: EnvironmentOptions) -> Debates:
    """The environments; the judge is ``options.task.reward_model`` where there is one. Raises UsageError, and what
    reading problems raises."""
    named = options.task.reward_model
    model = None if named is None else by_model(options.task, named, settings.label)
    source = source_of(options, parse_topic, problem_of, "debate")
    return Debates(source, settings, model, options.max_attempts or _MOST_TURNS)


def parse_topic(row: Mapping[str, Any]) -> ParsedRow:
    """A ``topic``, and perhaps ``points`` that a good case names and arguments ``against`` it. Raises BadRow."""
    hidden = {}
    for name in (_POINTS, _AGAINST):
        values = row.get(name) or []
        if not isinstance(values, list | tuple) or not all(isinstance(each, str) for each in values):
            raise BadRow(f"its {name} are no list of texts")
        hidden[name] = json.dumps(list(values))
    return ParsedRow(row.get("topic", row.get("question")), (), row.get("id"), hidden=hidden)


def problem_of(found: Checked) -> Problem:
    """The topic is the prompt; which side is argued is drawn when an episode begins."""
    return Problem(found.id, found.question, (), found.hidden)


class _Debate(Episode):
    """``prompt``: the environment's last message."""

    environments: Debates

    def reset(self, problem: Problem, seed: int) -> Observation:
        """The topic and the side, which the seed draws."""
        self.problem = problem
        self.said: list[str] = []
        self.scores: list[float] = []
        side = random.Random(seed).choice(_SIDES)  # noqa: S311 - not a secret
        self.prompt = f"Debate: {problem.prompt}\nArgue {side} it. Give your opening argument."
        return user(self.prompt)

    def judged(self, text: str, score: float) -> Step:
        """The step of an argument with this score."""
        self.said.append(text)
        self.scores.append(score)
        info: dict[str, float | str] = {"judge": self.environments.judge, "score": score}
        parts, turn = self._earned(), len(self.said)
        earned = math.fsum(parts.values())
        if turn >= self.environments.most_turns:
            return Step(NOTHING, earned, True, info={**info, **parts})
        against = json.loads(self.problem.hidden.get(_AGAINST, "[]"))
        self.prompt = f"The other side says: {against[turn - 1]}\nAnswer." if turn <= len(against) else _CHALLENGE
        return Step(user(self.prompt), 0.0, False, info=info, if_cut=earned)

    def _earned(self) -> dict[str, float]:
        """The parts of the reward up to now, by name."""
        mean = math.fsum(self.scores) / len(self.scores)
        if self.environments.model is not None:
            return {"mean": mean}
        points = json.loads(self.problem.hidden.get(_POINTS, "[]"))
        return {
            "mean": _MEAN * mean,
            "consistency": _CONSISTENCY * consistency(self.said),
            "coverage": _COVERAGE * coverage(" ".join(self.said), points),
        }


class Debates(VectorEnv[_Debate]):
    """Environments with one judge: ``model``, or keyword rules where that is None."""

    episode = _Debate

    def __init__(self, source: ProblemSource, settings: Settings, model: ModelRewards | None, most_turns: int):
        bounds = (0.0, 1.0) if model is None else (-math.inf, math.inf)
        super().__init__("debate", source, most_turns, bounds, *([] if model is None else [model.close]))
        self.settings, self.model = settings, model
        self.judge = "keyword rules" if model is None else model.model

    def judged(self, episodes: Sequence[_Debate], texts: Sequence[str]) -> list[Step]:
        """All turns, judged together. Thoughts are not said."""
        texts = [answer_in(text) for text in texts]
        if self.model is None:
            scores = [keyword_score(text, self.settings.words) for text in texts]
        else:
            shown = [Problem(each.problem.id, each.prompt) for each in episodes]
            scores = [each.value for each in self.model.rewards(shown, texts)]
        return [each.judged(text, score) for each, text, score in zip(episodes, texts, scores, strict=True)]


def keyword_score(text: str, words: int) -> float:
    """How an argument is made, in [0, 1]: a third each for its length (up to ``words``), for a word of evidence (a
    number is one), and for a word of reasoning."""
    said = _words(text)
    length = min(1.0, len(said) / words)
    evidence = bool(_EVIDENCE.intersection(said)) or any(sign.isdigit() for sign in text)
    return (length + evidence + bool(_REASONING.intersection(said))) / 3


def consistency(turns: Sequence[str]) -> float:
    """The mean Jaccard index of the words of neighbouring turns, in [0, 1]; of one turn 1."""
    pairs = [(set(_words(one)), set(_words(other))) for one, other in pairwise(turns)]
    if not pairs:
        return 1.0
    return math.fsum(len(one & other) / len(one | other) if one | other else 0.0 for one, other in pairs) / len(pairs)


def coverage(text: str, points: Sequence[str]) -> float:
    """The share of points all of whose words were said; 1 where there are none."""
    said = set(_words(text))
    return sum(set(_words(point)) <= said for point in points) / len(points) if points else 1.0


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
