"""From a problem or a conversation to the token ids that a policy goes on from. Needs a tokenizer, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.types import Problem
from gpuherd.qa.prompts.conversation import control_texts, defused, opened_thought, templated, token_ids


class Prompting:
    """Makes prompts, all in one way.

    Attributes:
        chat: by the tokenizer's chat template: a problem is the user's message, or a conversation.
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
        """The tag of the thought that the chat template opens before each answer; empty where it opens none."""
        return opened_thought(self._tokenizer) if self.chat else ""

    def of(self, problem: Problem) -> tuple[int, ...]:
        """The prompt of a problem. Raises UsageError where it has no token."""
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
