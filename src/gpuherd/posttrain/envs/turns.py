"""Conversations as token ids, made so that what the policy said is never tokenised again.

By the tokenizer's chat template, or plainly: texts one after the other with a blank line between them. What stands
between two turns of the policy is found by putting a marker for its words into the template and taking what comes
behind: templates may cut or change earlier turns, and no id that was sampled may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.envs.interface import Message
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
        """All before the policy's first turn. Of one message the same as ``sampling.prompting`` makes of a problem.

        Raises UsageError where it has no token.
        """
        if self.chat:
            return token_ids(self._tokenizer, templated(self._tokenizer, self._said(messages)), conversation=True)
        text = _BETWEEN.join(each["content"] for each in self._said(messages))
        if not (ids := token_ids(self._tokenizer, text, conversation=False)):
            raise UsageError("an environment's first words are empty; a model goes on from one token at least")
        return ids

    def between(self, before: Sequence[Message], new: Sequence[Message], last: int | None) -> tuple[int, ...]:
        """What stands between a turn of the policy and its next one.

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
        """What is said can't end a turn: control tokens written out in it are taken apart."""
        return [{"role": each.role, "content": defused(each.content, self._controls)} for each in messages]
