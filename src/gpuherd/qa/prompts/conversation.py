"""A prompt as a conversation, by the chat template that comes with the tokenizer. Never by the model's name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.qa.data.question_set import Example
from gpuherd.qa.prompts.style import Style
from gpuherd.qa.record import Question
from gpuherd.qa.span import opened_by

Turn = dict[str, str]  # role, content

# Some templates put today's date in: the same question would have another prompt tomorrow. Here it is always the same
# day, the one that Llama's templates fall back to. The library hands templates no function of ours, so that the clock
# is stopped in the template's own language.
_DAY = {
    "%-d": "26", "%d": "26", "%e": "26", "%b": "Jul", "%h": "Jul", "%B": "July", "%-m": "7", "%m": "07", "%Y": "2024",
    "%y": "24", "%a": "Fri", "%A": "Friday", "%j": "208", "%H": "00", "%M": "00", "%S": "00", "%I": "12", "%p": "AM",
}  # fmt: skip
_STOPPED_CLOCK = (
    "{% macro strftime_now(form) %}{{ form"
    + "".join(f"|replace('{directive}', '{word}')" for directive, word in _DAY.items())
    + " }}{% endmacro %}"
)


def opened_thought(tokenizer: Any) -> str:
    """The tag of the thought that the tokenizer's chat template opens before each answer; empty where it opens none."""
    return opened_by(templated(tokenizer, [{"role": "user", "content": "?"}]))


def turns(style: Style, question: Question, examples: Sequence[Example]) -> list[Turn]:
    """The conversation up to the answer: instruction, examples as turns, question.

    A user's template with ``{examples}`` in it is one turn.
    """
    if style.template is not None and style.places_examples:
        return [{"role": "user", "content": style.plain(question, tuple(examples))}]
    made: list[Turn] = [] if style.instruction is None else [{"role": "system", "content": style.instruction}]
    for example in examples:
        made.append({"role": "user", "content": style.turn_of(example.question)})
        made.append({"role": "assistant", "content": style.answered(example)})
    return [*made, {"role": "user", "content": style.turn_of(question)}]


def templated(tokenizer: Any, conversation: Sequence[Turn]) -> str:
    """The conversation as text, special tokens included, ready for the answer.

    A system turn that the template refuses, or leaves out, goes to the front of the first user turn. Raises UsageError
    where the template can't render the conversation at all.
    """
    if conversation[0]["role"] == "system":
        with suppress(Exception):  # a template raises what it likes
            text = _rendered(tokenizer, conversation)
            if conversation[0]["content"].strip() in text:
                return text
        conversation = without_system(conversation)
    try:
        text = _rendered(tokenizer, conversation)
    except Exception as problem:
        raise UsageError(
            f"the tokenizer's chat template can't put this conversation: {type(problem).__name__}: {problem}; "
            "--chat no asks without it"
        ) from None
    if not text.strip():
        raise UsageError("the tokenizer's chat template makes nothing of this conversation; --chat no asks without it")
    return text


def without_system(conversation: Sequence[Turn]) -> list[Turn]:
    """The conversation with its system turn, which is the first, put in front of the user turn behind it."""
    system, first, *others = conversation
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *others]


def template_sha256(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template, in hex; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(str(template).encode("utf-8", "surrogatepass")).hexdigest()


def _rendered(tokenizer: Any, conversation: Sequence[Turn]) -> str:
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = _STOPPED_CLOCK + template
    text = tokenizer.apply_chat_template(
        list(conversation), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return str(text)
