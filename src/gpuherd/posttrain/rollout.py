"""What a policy did with a problem, as training reads it, and its lines of JSON. Token ids are kept, never made again
from text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion, or one episode of several turns.

    Attributes:
        problem: its problem's id.
        sample: its number among the rollouts of this problem: those with one problem and one prompt are a group.
        prompt_ids: tokens of the prompt, special tokens included.
        ids: all tokens behind the prompt, the one that ended it included; an environment's words too.
        by_policy: which of ``ids`` the policy chose; the others are not trained on.
        log_probs: of the tokens that the policy chose, under the policy that sampled, at the sampling temperature,
            without top-k and top-p; None for the others (and where not finite).
        text: the completion as text, without the end token; of an episode, the policy's last turn.
        reward: what it earned in all.
        correct: None where the task knows no right and wrong.
        finished: the policy ended it by itself, not the limit of tokens.
        rolled_in: so many tokens at the beginning of ``ids`` came from another policy (Q#, PITA).
        turn_rewards: what was earned at a place in ``ids`` (of the last token before it was earned): (place, reward);
            sums to ``reward``. Of a single answer one pair at its last token.
    """

    problem: str
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    by_policy: tuple[bool, ...]
    log_probs: tuple[float | None, ...]
    text: str
    reward: float
    correct: bool | None
    finished: bool
    rolled_in: int = 0
    turn_rewards: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``, or its JSON read back."""
        told: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
        told["turn_rewards"] = tuple((int(place), float(reward)) for place, reward in values.get("turn_rewards", ()))
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two completions that begin alike, and which of them is preferred.

    Attributes:
        problem: its problem's id.
        prompt_ids: tokens of the prompt.
        context_ids: what both completions begin with; empty where the whole completions are compared.
        chosen_ids, rejected_ids: what follows, end tokens included.
        chosen, rejected: both as text, with the context.
        chosen_reward, rejected_reward: what they earned; None where a person preferred.
    """

    problem: str
    prompt_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen: str
    rejected: str
    chosen_reward: float | None = None
    rejected_reward: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``, or its JSON read back."""
        told: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
        return cls(**told)
