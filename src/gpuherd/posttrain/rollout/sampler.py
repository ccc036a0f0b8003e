"""A policy answers: whole rollouts of problems, and continuations of what is begun.

A draw depends on the seed, the problem's id, the sample's number and its place in the answer alone: never on what is
decoded beside it, and so not on batches, shards, ranks or how many of them there are. (So it is by ``Sampler``;
``rollout.vllm`` says how far it goes there.)
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gpuherd.errors import UsageError, printable
from gpuherd.lm.backend import Decoded, Decoding, Generation, PromptTokens
from gpuherd.lm.forward import plan_batches
from gpuherd.posttrain.data.chat import ChatTokenizer
from gpuherd.posttrain.envs.episodes import Turns
from gpuherd.posttrain.rewards.answers import BadReward, rewards_of
from gpuherd.posttrain.rollout.loading import kept
from gpuherd.posttrain.types import (
    BackendName,
    Collecting,
    Policy,
    Precision,
    Problem,
    Reward,
    Rollout,
    Sampling,
    Task,
)
from gpuherd.qa.prompts.conversation import defused, templated, token_ids

if TYPE_CHECKING:
    from gpuherd.lm.guidance.guidance import Guidance
    from gpuherd.lm.model import LanguageModel

_SHOWN = 80  # characters of a completion in a message


class Prefix(NamedTuple):
    """What is to be gone on from.

    Attributes:
        id: the draws depend on it: the problem's id, with whatever tells this prefix from others of the problem.
        prompt_ids: the prompt.
        ids: of the answer so far.
        most: the most tokens that may follow; None: what is left of ``Sampling.max_new_tokens``, one at least.
    """

    id: str
    prompt_ids: Sequence[int]
    ids: Sequence[int] = ()
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed a prefix.

    Attributes:
        ids: the new tokens, the end token included.
        log_probs: of each, under the unguided model at the sampling temperature; None where not finite.
        text: the new tokens' text, without the end token.
        finished: it ended by an end token and not by a limit.
        kl: of a guided policy, KL(guided || reference) at each of ``ids`` at temperature 1, in nats, None
            where not finite; None of other policies.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    text: str
    finished: bool
    kl: tuple[float | None, ...] | None = None


class RolloutBackend(ABC):
    """A policy in memory that answers: what algorithms need of a sampler, whatever decodes.

    Attributes:
        tokenizer: the policy's.
        end_ids: tokens that end an answer.
        sampling: how completions are drawn.
    """

    def __init__(self, tokenizer: Any, end_ids: tuple[int, ...], sampling: Sampling):
        """Raises UsageError where a chat template is wanted and the tokenizer has none."""
        self.tokenizer, self.end_ids, self.sampling = tokenizer, end_ids, sampling
        self._prompting = Prompting(tokenizer, chat=sampling.use_chat_template)

    @abstractmethod
    def continuations(
        self,
        prefixes: Sequence[Prefix | tuple[str, Sequence[int], Sequence[int]]],
        samples: int = 1,
        *,
        first_sample: int = 0,
        greedy: bool = False,
    ) -> list[tuple[Continuation, ...]]:
        """What follows each prefix: so many drawn continuations, or the most probable one alone.

        Raises UsageError where the model has no room for a token behind a prefix.
        """

    @property
    @abstractmethod
    def places(self) -> int | None:
        """The most tokens of a prompt and its answer together that the model has places for; None: no end is known."""

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """The prompt of a problem as tokens, special tokens included."""
        return self._prompting.of(problem)

    def conversation_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The prompt of a conversation of several turns, by the chat template."""
        return self._prompting.of_messages(messages)

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer's tokens, without special ones but for tags of thoughts."""
        from gpuherd.lm.tokens import decode_tokens

        return decode_tokens(self.tokenizer, ids)

    def scored_text(self, text: str) -> str:
        """An answer's text as it is scored: behind the tag of a thought that the chat template has opened."""
        return self._prompting.opened + text

    def rollouts(
        self,
        task: Task,
        problems: Sequence[Problem],
        samples: int,
        *,
        first_sample: int = 0,
        greedy: bool = False,
        stream: str = "",
        reward_batch_size: int = 32,
    ) -> list[Rollout]:
        """Answers to each problem with what they earned: the samples of the first problem, then those of the second.

        Args:
            samples: so many drawn answers a problem, numbered from ``first_sample``; with ``greedy`` the one most
                probable answer instead, and ``samples`` is 1.
            stream: what tells these draws from others with the same seed and problem, such as the step of a training.

        Raises BadReward, and what the task raises.
        """
        prompts = [self.prompt_ids(each) for each in problems]
        prefixes = [
            Prefix(f"{each.id}\n{stream}" if stream else each.id, ids)
            for each, ids in zip(problems, prompts, strict=True)
        ]
        answers = self.continuations(prefixes, samples, first_sample=first_sample, greedy=greedy)
        asked = [each for each in problems for _ in range(samples)]
        texts = [self.scored_text(each.text) for group in answers for each in group]
        rewards = iter(scored(task, asked, texts, reward_batch_size))
        return [
            rollout_of(problem, number, prompt, answer, next(rewards))
            for problem, prompt, group in zip(problems, prompts, answers, strict=True)
            for number, answer in enumerate(group, 0 if greedy else first_sample)
        ]

    def _asked(self, prefix: Prefix) -> PromptTokens:
        most = prefix.most
        if most is None and prefix.ids:
            most = max(1, self.sampling.max_new_tokens - len(prefix.ids))
        return PromptTokens(prefix.id, (*prefix.prompt_ids, *prefix.ids), most)

    def _decoding(self, samples: int, first_sample: int, *, greedy: bool, tempered: bool = True) -> Decoding:
        how = self.sampling
        return Decoding(
            greedy=greedy,
            samples=0 if greedy else samples,
            first_sample=first_sample,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            max_new_tokens=how.max_new_tokens,
            end_ids=self.end_ids,
            seed=how.seed,
            tempered=tempered,
        )


class Sampler(RolloutBackend):
    """A policy in this process, decoded by ``lm.model``: also guided, with an adapter, or in training.

    Attributes:
        model: the language model under it.
    """

    def __init__(self, policy: Policy, precision: Precision, device: str, sampling: Sampling):
        """Loads the policy, its adapter and its classifier. Raises what loading raises."""
        from gpuherd.lm.model import LanguageModel
        from gpuherd.posttrain.rollout.loading import load_causal

        loaded = load_causal(policy.model, precision, device, adapter=policy.adapter)
        guidance = _guidance(policy, loaded.device, precision)
        model = LanguageModel(loaded.module, loaded.tokenizer, device=loaded.device, guidance=guidance)
        self._begin(model, loaded.module, loaded.tokenizer, loaded.end_ids, sampling, None)

    @classmethod
    def over(
        cls, module: Any, tokenizer: Any, sampling: Sampling, *, device: str | None = None, amp_dtype: str | None = None
    ) -> Self:
        """A model that is in memory already, perhaps in training: put into evaluation mode while it answers.

        Args:
            module: transformers' or PEFT's, not wrapped by DDP; sharded weights are gathered by the caller.
            device: where token ids go, that of the embedding by default.
            amp_dtype: of autocast while it answers.
        """
        from gpuherd.lm.model import LanguageModel
        from gpuherd.posttrain.rollout.loading import end_ids_of

        made = cls.__new__(cls)
        model = LanguageModel(module, tokenizer, device=device)
        made._begin(model, module, tokenizer, end_ids_of(model.module, tokenizer), sampling, amp_dtype)
        return made

    def _begin(
        self,
        model: LanguageModel,
        module: Any,
        tokenizer: Any,
        end_ids: tuple[int, ...],
        sampling: Sampling,
        amp_dtype: str | None,
    ) -> None:
        super().__init__(tokenizer, end_ids, sampling)
        self.model, self._module, self._amp_dtype = model, module, amp_dtype

    def at(self, eta: float) -> Self:
        """The same policy guided at another eta, on the same weights. Raises UsageError where it is not guided."""
        from gpuherd.lm.model import LanguageModel

        guidance = self.model.guidance
        if guidance is None:
            raise UsageError(f"eta={eta}: the policy is not guided")
        made = type(self).__new__(type(self))
        model = LanguageModel(self.model.module, self.tokenizer, guidance=guidance.at(eta))
        made._begin(model, self._module, self.tokenizer, self.end_ids, self.sampling, self._amp_dtype)
        return made

    def continuations(
        self,
        prefixes: Sequence[Prefix | tuple[str, Sequence[int], Sequence[int]]],
        samples: int = 1,
        *,
        first_sample: int = 0,
        greedy: bool = False,
    ) -> list[tuple[Continuation, ...]]:
        """See ``RolloutBackend``. Decoded in batches of ``Sampling.batch_size`` rows, prefixes of like lengths
        together."""
        check_samples(samples, greedy=greedy)
        prompts = [self._asked(Prefix(*each)) for each in prefixes]
        at_once = min(samples, self.sampling.batch_size)
        found: list[list[Continuation]] = [[] for _ in prompts]
        batches = plan_batches([len(each.token_ids) for each in prompts], rows=self.sampling.batch_size // at_once)
        with self._answering():
            for batch in batches:
                for start in range(0, samples, at_once):
                    how = self._decoding(min(at_once, samples - start), first_sample + start, greedy=greedy)
                    answers = self.model.decode([prompts[place] for place in batch], how)
                    for place, answer in zip(batch, answers, strict=True):
                        found[place] += [continuation_of(each) for each in generations_of(answer)]
        return [tuple(each) for each in found]

    @property
    def places(self) -> int | None:
        """See ``RolloutBackend``."""
        return getattr(self.model.module.config.get_text_config(), "max_position_embeddings", None)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """The model in evaluation mode (no dropout), under autocast where wanted; in its mode again afterwards."""
        import torch

        training = self._module.training
        self._module.eval()
        dtype = None if self._amp_dtype is None else getattr(torch, self._amp_dtype)
        kind = str(self.model.module.device).partition(":")[0]
        try:
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                yield
        finally:
            self._module.train(training)


def sampler_of(work: Collecting) -> RolloutBackend:
    """The policy of a collection in memory, by the backend that the work names; kept where models are kept.

    Raises what loading raises, UsageError for a policy or draws that the backend has no counterpart of.
    """
    if work.backend is BackendName.VLLM:
        from gpuherd.posttrain.rollout.vllm import VllmSampler

        key = (work.backend, work.policy, work.precision, work.device, work.sampling)
        return kept(key, lambda: VllmSampler(work.policy, work.precision, work.device, work.sampling))
    return Sampler(work.policy, work.precision, work.device, work.sampling)


def check_samples(samples: int, *, greedy: bool) -> None:
    """Raises UsageError for numbers of continuations that make no sense."""
    if samples < 1 or (greedy and samples != 1):
        raise UsageError(f"samples={samples}; the least is 1, and there is one greedy answer")


def generations_of(answer: Decoded) -> Sequence[Generation]:
    """The greedy answer alone, or the drawn ones."""
    return answer.samples if answer.greedy is None else [answer.greedy]


def continuation_of(answer: Generation) -> Continuation:
    """A decoded answer, its end token among its answer."""
    guided = answer.guided
    if answer.end_id is None:
        kl = None if guided is None else guided.kl
        return Continuation(answer.token_ids, answer.log_probs, answer.text, False, kl)
    return Continuation(
        ids=(*answer.token_ids, answer.end_id),
        log_probs=(*answer.log_probs, answer.end_log_prob),
        text=answer.text,
        finished=True,
        kl=None if guided is None else (*guided.kl, guided.end_kl),
    )


def rollout_of(
    problem: Problem, sample: int, prompt_ids: Sequence[int], answer: Continuation, reward: Reward
) -> Rollout:
    """An answer of one turn with what it earned, at its last token."""
    return Rollout(
        problem=problem.id,
        sample=sample,
        prompt_ids=tuple(prompt_ids),
        ids=answer.ids,
        by_policy=(True,) * len(answer.ids),
        log_probs=answer.log_probs,
        text=answer.text,
        reward=reward.value,
        correct=reward.correct,
        finished=answer.finished,
        turn_rewards=((len(answer.ids) - 1, reward.value),),
    )


def _guidance(policy: Policy, device: str, precision: Precision) -> Guidance | None:
    """What guides a policy, loaded onto its device; None where nothing does."""
    if policy.guide is None:
        return None
    from gpuherd.lm.guidance.classifier import load_classifier
    from gpuherd.lm.guidance.guidance import Guidance

    folder, dtype = policy.guide.classifier, precision.dtype
    return Guidance(kept((folder, device, dtype), lambda: load_classifier(folder, device, dtype)), policy.guide)


# --- prompts ----------------------------------------------------------------------------------------------------------


class Prompting(Turns):
    """Makes prompts of problems, all in one way. By the chat template a problem is the user's message, or a
    conversation."""

    @cached_property
    def _conversations(self) -> ChatTokenizer:
        return ChatTokenizer(self._tokenizer)

    def of(self, problem: Problem) -> tuple[int, ...]:
        """The prompt of a problem. Raises UsageError where it has no token, and for a conversation with tools that no
        chat template writes."""
        if problem.chat:
            if not self.chat:
                raise UsageError(f"problem {problem.id} is a conversation: set generation.use_chat_template=true")
            told = json.loads(problem.chat)
            return self._conversations.prompt(told["messages"], told["tools"])
        if self.chat:
            turns = problem.messages or (("user", problem.prompt),)
            return self.of_messages([{"role": role, "content": content} for role, content in turns])
        ids = token_ids(self._tokenizer, defused(problem.prompt, self._controls), conversation=False)
        if not ids:
            raise UsageError(f"problem {problem.id}: its prompt is empty; a model goes on from one token at least")
        return ids

    def of_messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The prompt of a conversation, by the chat template: ready for the policy's turn.

        What messages say can't end a turn or begin another one: control tokens written out in them are taken apart.
        """
        said = [{**each, "content": defused(each["content"], self._controls)} for each in messages]
        return token_ids(self._tokenizer, templated(self._tokenizer, said), conversation=True)


# --- rewards ----------------------------------------------------------------------------------------------------------


def scored(task: Task, problems: Sequence[Problem], completions: Sequence[str], batch_size: int = 32) -> list[Reward]:
    """The reward of each completion, in order, ``batch_size`` scored at once; the least where scoring one fails.

    Raises BadReward for a reward that is not finite, with the task, the problem and the completion.
    """
    rewards: list[Reward] = []
    for start in range(0, len(completions), batch_size):
        some = problems[start : start + batch_size]
        found = rewards_of(task, task.name, some, completions[start : start + batch_size])
        if len(found) != len(some):
            raise BadReward(f"task {task.name}: {len(found)} rewards of {len(some)} completions")
        rewards += found
    for problem, completion, reward in zip(problems, completions, rewards, strict=True):
        if not math.isfinite(reward.value):
            shown = printable(completion if len(completion) <= _SHOWN else f"{completion[:_SHOWN]}…")
            raise BadReward(
                f"task {task.name}, problem {printable(problem.id)}: the reward of {shown!r} is {reward.value}; "
                "rewards are finite numbers"
            )
    return rewards
