"""What an environment is: a problem is shown, the policy says something, the environment answers and pays, until it is
done. Plain data and protocols; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpuherd.posttrain.types import Problem, Split

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation. What an environment says after the policy has a user's role."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy gets to see: of ``reset`` all that comes before its first turn, of ``step`` what is new."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a turn of the policy.

    Attributes:
        observation: what is said to it; of the last step nothing.
        reward: what the turn earned; those of an episode add up.
        done: the episode is over.
        correct: whether the episode ends well if it ends here; None where there is no right and wrong.
        info: what it is made of, by name, for logs.
        if_cut: what the episode earns besides where it has to end here though it is not done, since the conversation
            has no room for another turn. So nobody gains or loses by talking until there is none.
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


class Environments(Protocol):
    """An environment of a kind, as often as it is needed, and the problems that its episodes begin with.

    Attributes:
        name: its id.
        verifiable, reward_range: as of ``problem.Task``, of whole episodes.
        most_turns: of the policy in one episode.
    """

    name: str
    verifiable: bool
    reward_range: tuple[float, float]
    most_turns: int

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """As of ``problem.Task``."""
        ...

    def make(self) -> Environment:
        """A new one; many may be at work at a time."""
        ...

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """A turn in each of some environments that this object made: scored together where that is quicker."""
        ...

    def close(self) -> None:
        """Ends what was started (processes, models)."""
        ...


def user(text: str) -> Observation:
    """One message of the user's role.

    >>> user("Hello").messages[0].role
    'user'
    """
    return Observation((Message("user", text),))


NOTHING = Observation(())
