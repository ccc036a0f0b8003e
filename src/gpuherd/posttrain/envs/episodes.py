"""Episodes of many problems at a time: all that are open take their next turn together, and end as rollouts.

A conversation becomes token ids by the tokenizer's chat template, or plainly: texts one after the other with a blank
line between them. No id that the policy sampled may change, and templates may cut or change earlier turns: so what
stands between two turns is found by putting a marker for the policy's words into the template and taking what comes
behind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.posttrain.envs.interface import Environment, Environments, Message
from gpuherd.posttrain.types import Problem, Rollout
from gpuherd.qa.prompts.conversation import control_texts, defused, opened_thought, templated, token_ids

_MARKER = "gpuherdmarkerofwords"  # one word that no template changes
_BETWEEN = "\n\n"


class Turns:
    """Makes prompts and what is said between turns, all in one way.

    Attributes:
        chat: by the chat template.
    """

    def __init__(self, tokenizer: Any, *, chat: bool):
        """Raises UsageError where a template is asked for and the tokenizer has none."""
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UsageError("generation.use_chat_template: the policy's tokenizer has no chat template; set it false")
        self.chat = chat
        self._tokenizer = tokenizer
        self._controls = control_texts(tokenizer)

    @cached_property
    def opened(self) -> str:
        """The tag of the thought that the chat template opens before each turn; empty where it opens none."""
        return opened_thought(self._tokenizer) if self.chat else ""

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """All before the policy's first turn. Of one message the same as ``rollout.sampler`` makes of a problem.

        Raises UsageError where it has no token.
        """
        if self.chat:
            return token_ids(self._tokenizer, templated(self._tokenizer, self._said(messages)), conversation=True)
        text = _BETWEEN.join(each["content"] for each in self._said(messages))
        if not (ids := token_ids(self._tokenizer, text, conversation=False)):
            raise UsageError("an environment's first words are empty; a model goes on from one token at least")
        return ids

    def between(self, before: Sequence[Message], new: Sequence[Message], last: int | None) -> tuple[int, ...]:
        """The tokens between a turn of the policy and its next one.

        Args:
            before: the messages before the turn, of both sides.
            new: what the environment says after it.
            last: the last token of the turn: where it ended the turn, it is not said again.
        """
        if not self.chat:
            text = f"{_BETWEEN}{_BETWEEN.join(each['content'] for each in self._said(new))}{_BETWEEN}"
            return self._ids(text)
        said, marker = self._said(new), _MARKER
        while any(marker in each["content"] for each in said):  # a program that was run may print it
            marker += "s"
        marked = [*self._said(before), {"role": "assistant", "content": marker}, *said]
        _, found, behind = templated(self._tokenizer, marked).rpartition(marker)
        if not found:
            raise UsageError("the tokenizer's chat template does not show what the policy said; it can't take turns")
        ids = self._ids(behind)
        return ids[1:] if ids and ids[0] == last else ids

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _said(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Messages for the template, which can't end a turn: control tokens written out in it are taken apart."""
        return [{"role": each.role, "content": defused(each.content, self._controls)} for each in messages]


class Answer(Protocol):
    """A turn of the policy; ``rollout.sampler.Continuation`` is one."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def log_probs(self) -> tuple[float | None, ...]: ...

    @property
    def text(self) -> str: ...

    @property
    def finished(self) -> bool: ...


class Answering(Protocol):
    """A sampler that continues prompts; ``rollout.sampler.Sampler`` is one."""

    def continuations(
        self,
        prefixes: Sequence[tuple[str, Sequence[int], Sequence[int]]],
        samples: int = 1,
        *,
        first_sample: int = 0,
        greedy: bool = False,
    ) -> Sequence[Sequence[Answer]]: ...


@dataclass(slots=True)
class _Episode:
    """One that is under way. ``messages``: all that both sides said."""

    problem: Problem
    sample: int
    environment: Environment
    prompt_ids: tuple[int, ...]
    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    by_policy: list[bool] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    text: str = ""
    turns: int = 0
    correct: bool | None = None
    finished: bool = False
    done: bool = False


def roll(
    environments: Environments,
    answering: Answering,
    turns: Turns,
    problems: Sequence[Problem],
    samples: int,
    *,
    first_sample: int = 0,
    greedy: bool = False,
    stream: str = "",
    seed: int = 0,
    most_tokens: int | None = None,
) -> list[Rollout]:
    """Episodes of each problem: the samples of the first problem, then those of the second.

    The draws of an episode depend on the problem, its sample and the turn alone. Where an episode has one turn the
    rollouts are those of ``Sampler.rollouts``.

    Args:
        samples: so many episodes a problem, numbered from ``first_sample``; one where ``greedy``.
        stream: what tells these draws from others of the same seed, such as the step of a training.
        seed: of what environments draw; all samples of a problem see the same.
        most_tokens: an episode ends, unfinished, where the conversation has no room for another turn in so many tokens
            (the model's places); None: there is no limit.

    Raises GpuherdError for a reward that is not finite, with the problem and the turn.
    """
    if greedy and samples != 1:
        raise UsageError(f"samples={samples}; there is one greedy answer")
    groups = [_begun(environments, turns, each, samples, 0 if greedy else first_sample, seed) for each in problems]
    prefixes = [
        (_named(each.id, stream), group[0].prompt_ids, ()) for each, group in zip(problems, groups, strict=True)
    ]
    answers = answering.continuations(prefixes, samples, first_sample=first_sample, greedy=greedy)
    said = [
        (episode, answer)
        for group, some in zip(groups, answers, strict=True)
        for episode, answer in zip(group, some, strict=True)
    ]
    while said:
        _stepped(environments, turns, said, most_tokens)
        going = [episode for episode, _ in said if not episode.done]
        if not going:
            break
        more = answering.continuations([_next(each, stream) for each in going], 1, greedy=greedy)
        said = [(episode, some[0]) for episode, some in zip(going, more, strict=True)]
    return [_rollout(episode) for group in groups for episode in group]


def _begun(
    environments: Environments, turns: Turns, problem: Problem, samples: int, first: int, seed: int
) -> list[_Episode]:
    """The episodes of a problem, which all begin with the same words."""
    drawn = int.from_bytes(hashlib.sha256(f"episode\0{seed}\0{problem.id}".encode()).digest()[:8], "big")
    begun = []
    prompt: tuple[int, ...] | None = None
    for sample in range(first, first + samples):
        environment = environments.make()
        messages = environment.reset(problem, drawn).messages
        prompt = turns.prompt(messages) if prompt is None else prompt
        begun.append(_Episode(problem, sample, environment, prompt, list(messages)))
    return begun


def _stepped(
    environments: Environments, turns: Turns, said: Sequence[tuple[_Episode, Answer]], most_tokens: int | None
) -> None:
    """Adds the policy's turn and the environment's step to each episode."""
    texts = [turns.opened + answer.text for _, answer in said]
    steps = environments.step_all([each.environment for each, _ in said], texts)
    for (episode, answer), step in zip(said, steps, strict=True):
        episode.ids += answer.ids
        episode.by_policy += [True] * len(answer.ids)
        episode.log_probs += answer.log_probs
        episode.text, episode.finished, episode.turns = answer.text, answer.finished, episode.turns + 1
        episode.rewards.append((max(0, len(episode.ids) - 1), _finite(environments, episode, step.reward)))
        episode.done, episode.correct = step.done, step.correct
        if episode.done:
            continue
        between = turns.between(episode.messages, step.observation.messages, answer.ids[-1] if answer.ids else None)
        room = math.inf if most_tokens is None else most_tokens
        if episode.turns >= environments.most_turns:
            raise GpuherdError(f"environment {environments.name} goes on behind its {environments.most_turns} turns")
        if len(episode.prompt_ids) + len(episode.ids) + len(between) >= room:
            episode.done, episode.finished = True, False
            place, reward = episode.rewards[-1]
            episode.rewards[-1] = place, _finite(environments, episode, reward + step.if_cut)
            continue
        episode.messages += [Message("assistant", answer.text), *step.observation.messages]
        episode.ids += between
        episode.by_policy += [False] * len(between)
        episode.log_probs += [None] * len(between)


def _finite(environments: Environments, episode: _Episode, reward: float) -> float:
    if math.isfinite(reward):
        return reward
    raise GpuherdError(
        f"environment {environments.name}, problem {printable(episode.problem.id)}, turn {episode.turns}: the "
        f"reward is {reward}; rewards are finite numbers"
    )


def _next(episode: _Episode, stream: str) -> tuple[str, Sequence[int], Sequence[int]]:
    """The prefix of an episode's next turn, under a name of its own."""
    name = f"{_named(episode.problem.id, stream)}\nturn {episode.turns} of {episode.sample}"
    return name, (*episode.prompt_ids, *episode.ids), ()


def _named(problem: str, stream: str) -> str:
    return f"{problem}\n{stream}" if stream else problem


def _rollout(episode: _Episode) -> Rollout:
    """The rollout of an episode. Turns that earned nothing are left out, but for the last one."""
    paid = [each for each in episode.rewards[:-1] if each[1]] + episode.rewards[-1:]
    return Rollout(
        problem=episode.problem.id,
        sample=episode.sample,
        prompt_ids=episode.prompt_ids,
        ids=tuple(episode.ids),
        by_policy=tuple(episode.by_policy),
        log_probs=tuple(episode.log_probs),
        text=episode.text,
        reward=math.fsum(reward for _, reward in paid),
        correct=episode.correct,
        finished=episode.finished,
        turn_rewards=tuple(paid),
    )
