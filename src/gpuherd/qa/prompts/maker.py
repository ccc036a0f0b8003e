"""From a question to the token ids that a model is given. Needs a tokenizer, no model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.qa.data.question_set import Example
from gpuherd.qa.prompts.conversation import template_sha256, templated, turns
from gpuherd.qa.prompts.long_context import largest, part_of
from gpuherd.qa.prompts.options import PromptOptions
from gpuherd.qa.prompts.special_tokens import control_texts, defused
from gpuherd.qa.prompts.style import style_named
from gpuherd.qa.prompts.token_ids import token_ids
from gpuherd.qa.record import Prompted, Question
from gpuherd.qa.span import knows_thoughts


class PromptTooLong(GpuherdError):
    """A question for which the model has no room: without a context that could be cut, or none is to be cut."""


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """A prompt, ready for a model.

    Attributes:
        text: as it was given to the tokenizer.
        token_ids: special tokens included.
        cut: how many tokens of the context were left out.
    """

    text: str
    token_ids: tuple[int, ...]
    cut: int = 0

    @property
    def prompted(self) -> Prompted:
        """What a record of an answer keeps of it."""
        ids = struct.pack(f"<{len(self.token_ids)}i", *self.token_ids)
        return Prompted(hashlib.sha256(ids).hexdigest(), len(self.token_ids), self.cut)


class PromptMaker:
    """Makes the prompts of a run, all in one way.

    Attributes:
        style: the wording.
        chat: whether prompts are conversations by the tokenizer's template.
        stop: strings that end an answer of this style where nobody names others; none in a conversation.
    """

    def __init__(
        self, options: PromptOptions, examples: Sequence[Example], tokenizer: Any, most_tokens: int | None = None
    ):
        """Raises UsageError where the style, the examples and the tokenizer don't go together.

        Args:
            most_tokens: the most that a prompt may have: the model's positions less the new tokens. None: any number.
        """
        if most_tokens is not None and most_tokens < 1:
            raise UsageError(f"no room for a prompt: {most_tokens} tokens are left of the model's positions")
        self.style = style_named(options.prompt)
        self.chat = _is_chat(options, tokenizer)
        self.stop = () if self.chat else self.style.stop
        self._options = options
        self._tokenizer = tokenizer
        self._most_tokens = most_tokens
        self._controls = control_texts(tokenizer)
        self._examples = tuple(self._defused_example(each) for each in examples)
        if examples and not self.chat and not self.style.places_examples:
            raise UsageError(f"--prompt {self.style.name} has no place for examples: write {{examples}} where they go")

    @property
    def thinks(self) -> bool:
        """Whether these prompts are conversations by a template that has thoughts."""
        return self.chat and knows_thoughts(str(self._tokenizer.chat_template))

    @property
    def identity(self) -> dict[str, Any]:
        """All that prompts depend on but the questions and the tokenizer's vocabulary, as JSON values."""
        return {
            "style": self.style.name,
            "style_sha256": self.style.sha256,
            "chat": self.chat,
            "chat_template_sha256": template_sha256(self._tokenizer) if self.chat else None,
            "examples": [each.question.id for each in self._examples],
            "long_context": self._options.long_context,
            "most_tokens": self._most_tokens,
        }

    def prompt(self, question: Question) -> MadePrompt:
        """The prompt of a question, its context cut as the options say. Raises PromptTooLong."""
        question = self._defused(question)
        whole = self._made(question)
        most = self._most_tokens
        if most is None or len(whole.token_ids) <= most:
            return whole
        if question.context is None or self._options.long_context == "refuse":
            raise PromptTooLong(f"its prompt has {len(whole.token_ids)} tokens, and there is room for {most}")
        bare = self._made(replace(question, context=None))
        if len(bare.token_ids) > most:
            raise PromptTooLong(
                f"even without its context its prompt has {len(bare.token_ids)} tokens, and there is room for {most}"
            )
        room = (most - len(bare.token_ids)) / (len(whole.token_ids) - len(bare.token_ids))
        return self._cut(question, question.context, whole, most, round(room * len(question.context)))

    def _cut(self, question: Question, context: str, whole: MadePrompt, most: int, guess: int) -> MadePrompt:
        """The prompt with as much of the context as there is room for: about ``guess`` characters."""

        def with_part(characters: int) -> MadePrompt:
            part = part_of(context, characters, self._options.long_context)
            return self._made(replace(question, context=part or None))

        kept = largest(lambda characters: len(with_part(characters).token_ids) <= most, len(context), guess)
        fitting = with_part(kept)
        return replace(fitting, cut=len(whole.token_ids) - len(fitting.token_ids))

    def _made(self, question: Question) -> MadePrompt:
        if self.chat:
            text = templated(self._tokenizer, turns(self.style, question, self._examples))
        else:
            text = self.style.plain(question, self._examples)
        return MadePrompt(text, token_ids(self._tokenizer, text, conversation=self.chat))

    def _defused(self, question: Question) -> Question:
        context = None if question.context is None else defused(question.context, self._controls)
        return replace(question, question=defused(question.question, self._controls), context=context)

    def _defused_example(self, example: Example) -> Example:
        question = self._defused(example.question)
        answers = tuple(defused(answer, self._controls) for answer in question.answers)
        worked = None if example.worked is None else defused(example.worked, self._controls)
        return Example(replace(question, answers=answers), worked)


def _is_chat(options: PromptOptions, tokenizer: Any) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if options.chat == "yes" and not has_template:
        raise UsageError("--chat yes: this model's tokenizer has no chat template; --chat no asks in plain text")
    return has_template and options.chat != "no"
