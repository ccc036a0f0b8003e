"""From texts to the token ids that are learnt from. Needs a tokenizer, no model.

Prompt and completion are tokenised apart, as they are when a policy answers: the prompt's tokens stand there before it
chooses the first of its own. Tokenised together, the two may melt into other tokens at the border.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.lm.tokens import turn_end
from gpuherd.posttrain.data.chat import ChatTokenizer
from gpuherd.posttrain.data.preference_rows import Conversation, Messages
from gpuherd.posttrain.preference.data import Demonstration, Preference
from gpuherd.posttrain.rollout.sampler import Prompting
from gpuherd.posttrain.types import Comparison, Problem, Reward, Rollout
from gpuherd.qa.prompts.conversation import control_texts, defused

_UNSCORED = Reward(0.0)


class Writing:
    """Makes the tokens of completions that are imitated or compared, in one way."""

    def __init__(self, tokenizer: Any, *, chat: bool):
        """Raises UsageError where a template is asked for and there is none, or there is no end token."""
        self._end = turn_end(tokenizer) if chat else tokenizer.eos_token_id
        if self._end is None:
            raise UsageError("the policy's tokenizer has no end token (eos_token): no completion would end")
        self._tokenizer = tokenizer
        self._controls = control_texts(tokenizer)
        self._prompting = Prompting(tokenizer, chat=chat)

    def completion(self, text: str) -> tuple[int, ...]:
        """The tokens of a whole completion with its end token: what ends a turn by the template, else the tokenizer's.

        Control tokens written out in it are taken apart: none of them ends the completion before its end.
        """
        ids = self._tokenizer(defused(text, self._controls), add_special_tokens=False)["input_ids"]
        return (*ids, self._end)

    def demonstration(self, problem: Problem, reward: Reward) -> Rollout:
        """A problem's first right answer as if the policy had given it. Raises UsageError where there is none."""
        if not problem.answers:
            raise UsageError(f"problem {problem.id} has no answer that could be imitated; learn from samples instead")
        return self._imitated(problem.id, self._prompting.of(problem), problem.answers[0], reward)

    def imitation(self, shown: Demonstration) -> Rollout:
        """A demonstration as a rollout of the policy, with the reward 0: nothing scored it. Raises UsageError as
        ``conversation``."""
        if isinstance(shown.example, Conversation):
            return self.conversation(shown.id, shown.example)
        prompt, answer = shown.example
        begin = self._tokenizer.bos_token_id
        before = self._before(shown.id, prompt) if prompt else () if begin is None else (begin,)
        return self._imitated(shown.id, before, answer, _UNSCORED)

    def conversation(self, name: str, conversation: Conversation, reward: Reward = _UNSCORED) -> Rollout:
        """A conversation as one rollout: the policy's are the turns that are imitated. Raises UsageError where the chat
        template can't write it, or not as the policy would see it."""
        try:
            chat = self._chat.tokens(conversation)
        except UsageError as problem:
            raise UsageError(f"{name}: {problem}") from None
        first, text = chat.learnt.index(True), conversation.texts[-1][1]
        return _as_rollout(name, chat.ids[:first], chat.ids[first:], chat.learnt[first:], text, reward)

    @cached_property
    def _chat(self) -> ChatTokenizer:
        return ChatTokenizer(self._tokenizer)

    def _imitated(self, problem: str, prompt_ids: tuple[int, ...], text: str, reward: Reward) -> Rollout:
        ids = self.completion(text)
        return _as_rollout(problem, prompt_ids, ids, (True,) * len(ids), text, reward)

    def _before(self, name: str, prompt: str | Messages) -> tuple[int, ...]:
        """The tokens of a prompt, or of the conversation before an answer."""
        if isinstance(prompt, str):
            return self._prompting.of(Problem(name, prompt))
        return self._prompting.of_messages([{"role": role, "content": content} for role, content in prompt])

    def comparison(self, preference: Preference) -> Comparison:
        """A preference as tokens. Raises UsageError where its conversation can't be put."""
        return Comparison(
            problem=preference.id,
            prompt_ids=self._before(preference.id, preference.prompt),
            context_ids=(),
            chosen_ids=self.completion(preference.chosen),
            rejected_ids=self.completion(preference.rejected),
            chosen=preference.chosen,
            rejected=preference.rejected,
        )

    def comparisons(self, preferences: Iterable[Preference]) -> list[Comparison]:
        """The same of many, in their order."""
        return [self.comparison(each) for each in preferences]


def _as_rollout(
    problem: str, prompt_ids: tuple[int, ...], ids: tuple[int, ...], learnt: tuple[bool, ...], text: str, reward: Reward
) -> Rollout:
    """What somebody wrote as if the policy had drawn it."""
    return Rollout(
        problem=problem,
        sample=0,
        prompt_ids=prompt_ids,
        ids=ids,
        by_policy=learnt,
        log_probs=(None,) * len(ids),
        text=text,
        reward=reward.value,
        correct=reward.correct,
        finished=True,
        turn_rewards=((len(ids) - 1, reward.value),),
    )


def load_tokenizer(model: str, adapter: str | None = None) -> Any:
    """The tokenizer of a model (an id of the Hub or a folder), or its adapter's where that brings one."""
    from transformers import AutoTokenizer

    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.load.prepare import tokenizer_folder
    from gpuherd.models.names import parse_model

    folder = locate(parse_model(model), for_loading=True)
    of_adapter = None if adapter is None else locate(parse_model(adapter), for_loading=True)
    return AutoTokenizer.from_pretrained(tokenizer_folder(folder, of_adapter), local_files_only=True)
