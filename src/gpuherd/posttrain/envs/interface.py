"""What an environment is: a problem is shown, the policy says something, the environment answers and pays, until it is
done; what environments whose turns are judged together have in common; and how one is configured (the keys of
``policy_env`` and ``eval_envs``). No torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.types import Problem, ProblemSource, Split

Role = Literal["system", "developer", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation. What an environment says after the policy has a user's role."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees: of ``reset`` all messages before its first turn, of ``step`` the new ones."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a turn of the policy.

    Attributes:
        observation: the reply; empty in the last step.
        reward: what the turn earned; those of an episode add up.
        done: the episode is over.
        correct: whether the episode ends well if it ends here; None where there is no right and wrong.
        info: what it is made of, by name, for logs.
        if_cut: what the episode earns in addition where it has to end here though it is not done, since the
            conversation has no room for another turn. So a policy gains or loses nothing by talking until there is
            none.
    """

    observation: Observation
    reward: float
    done: bool
    correct: bool | None = None
    info: Mapping[str, float | str] = field(default_factory=dict)
    if_cut: float = 0.0


class Environment(Protocol):
    """One episode at a time."""

    def reset(self, problem: Problem, seed: int) -> Observation:
        """Begins an episode. What is drawn in it depends on the seed and the problem alone."""
        ...

    def step(self, text: str) -> Step:
        """The policy's turn. An empty text is one."""
        ...


class Environments(ProblemSource, Protocol):
    """An environment of a kind, as often as it is needed, and the problems that its episodes begin with.

    Attributes:
        name: its id.
        verifiable, reward_range: as of ``types.Task``, of whole episodes.
        most_turns: of the policy in one episode.
    """

    name: str
    verifiable: bool
    reward_range: tuple[float, float]
    most_turns: int

    def make(self) -> Environment:
        """A new one; many may be at work at a time."""
        ...

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """A turn in each of some environments that this object made: scored together where that is quicker."""
        ...


class Episode(ABC):
    """An environment whose turns are judged together with those of others, by the environments that made it."""

    problem: Problem

    def __init__(self, environments: Any):
        self.environments = environments

    @abstractmethod
    def reset(self, problem: Problem, seed: int) -> Observation:
        """As of ``Environment``."""

    def step(self, text: str) -> Step:
        """The policy's turn."""
        steps: list[Step] = self.environments.step_all([self], [text])
        return steps[0]


EpisodeT = TypeVar("EpisodeT", bound=Episode)


class VectorEnv(ABC, Generic[EpisodeT]):
    """Environments whose turns are judged together (Gymnasium's word for it); ``episode``: the class of one."""

    episode: ClassVar[type[Episode]]
    verifiable = False

    def __init__(
        self,
        name: str,
        source: ProblemSource,
        most_turns: int,
        reward_range: tuple[float, float],
        *close: Callable[[], None],
    ):
        """``close``: called when all is done, before the source is closed."""
        self.name, self.most_turns, self.reward_range = name, most_turns, reward_range
        self._source, self._close = source, close

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Those of the source."""
        return self._source.problems(split, count, seed)

    def make(self) -> Environment:
        """A new one."""
        return self.episode(self)

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """A turn in each of some environments that this object made."""
        return self.judged([each for each in environments if isinstance(each, self.episode)], texts)  # type: ignore[misc]

    @abstractmethod
    def judged(self, episodes: Sequence[EpisodeT], texts: Sequence[str]) -> list[Step]:
        """The steps of turns, judged together."""

    def close(self) -> None:
        """Ends what judging has started, and what the source has."""
        for end in self._close:
            end()
        self._source.close()


def user(text: str) -> Observation:
    """One message of the user's role.

    >>> user("Hello").messages[0].role
    'user'
    """
    return Observation((Message("user", text),))


NOTHING = Observation(())


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """How an environment is made.

    Attributes:
        env_type: code, math, tool, debate, custom, or task (a task's problems, one turn each).
        dataset: a task's name or a file of problems.
        problems: the problems themselves, a mapping each, instead of ``dataset``.
        only: the split that all ``problems`` belong to; None: they are divided as those of a file are.
        timeout: seconds for a run of code.
        max_attempts: turns of the policy; None: code 3, math 2, tool 5, debate 3, task 1.
        custom_class: the dotted name of a class whose objects are ``Environments``; made with
            ``custom_kwargs``.
        reward_scale, reward_bias, reward_clip: a turn's reward r becomes r * scale + bias, not beyond ± clip.
        settings: of the environment itself (the dataclass in its module), or of the task.
        task: reward model or function, device and processes, as for tasks.
    """

    env_type: str = "task"
    dataset: str | None = None
    problems: tuple[Mapping[str, Any], ...] | None = None
    only: Split | None = None
    timeout: float = 5.0
    max_attempts: int | None = None
    custom_class: str | None = None
    custom_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_scale: float = 1.0
    reward_clip: float | None = None
    reward_bias: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    task: TaskOptions = field(default_factory=TaskOptions)

    def __post_init__(self) -> None:
        at_least(self, max_attempts=1)
        if not 0 < self.timeout <= 3600:
            raise UsageError(f"timeout={self.timeout}; seconds above 0, and 3600 at most")
        if self.reward_clip is not None and not 0 < self.reward_clip < math.inf:
            raise UsageError(f"reward_clip={self.reward_clip}; above 0")
        if not (math.isfinite(self.reward_scale) and math.isfinite(self.reward_bias)) or self.reward_scale == 0:
            raise UsageError(
                f"reward_scale={self.reward_scale}, reward_bias={self.reward_bias}; finite, the scale not 0"
            )
        if self.task.reward is not None and self.env_type != "task":
            raise UsageError(f"reward is of env_type task; {self.env_type} says itself what answers earn")
        if self.dataset is not None and self.problems is not None:
            raise UsageError("dataset and problems both give the problems; leave one out")
        if (self.env_type == "custom") != (self.custom_class is not None):
            raise UsageError("env_type custom and custom_class=package.module.Class belong together")
