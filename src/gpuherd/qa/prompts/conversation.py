"""Texts through a tokenizer: chat templates, control tokens written out in texts, token ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.qa.span import opened_by

# ---- chat templates, by the tokenizer and never by the model's name --------------------------------------------------

Turn = dict[str, str]  # role, content

# Some templates insert today's date: the same question would have another prompt tomorrow. Here it is always the day
# that Llama's templates fall back to. The library passes no function of ours to templates, so that the clock is stopped
# in the template's own language.
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
    """The tag of the thought that the tokenizer's chat template opens before each answer; empty if it opens none."""
    return opened_by(templated(tokenizer, [{"role": "user", "content": "?"}]))


def templated(tokenizer: Any, conversation: Sequence[Turn]) -> str:
    """The conversation as text, special tokens included, ready for the answer.

    A system turn that the template refuses or drops is put in front of the first user turn. Raises UsageError if the
    template can't render the conversation at all.
    """
    if conversation[0]["role"] == "system":
        with suppress(Exception):  # a template may raise anything
            text = rendered(tokenizer, conversation)
            if conversation[0]["content"].strip() in text:
                return text
        conversation = without_system(conversation)
    try:
        text = rendered(tokenizer, conversation)
    except Exception as problem:
        raise UsageError(
            f"the tokenizer's chat template can't put this conversation: {type(problem).__name__}: {problem}; "
            "--chat no asks without it"
        ) from None
    if not text.strip():
        raise UsageError("the tokenizer's chat template makes nothing of this conversation; --chat no asks without it")
    return text


def without_system(conversation: Sequence[Turn]) -> list[Turn]:
    """The conversation with its first turn, the system's, put in front of the user turn after it."""
    system, first, *others = conversation
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *others]


def template_sha256(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template, in hex; None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(str(template).encode("utf-8", "surrogatepass")).hexdigest()


def rendered(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), ready: bool = True
) -> str:
    """The conversation as the chat template writes it; ``ready`` for the answer, or as it ends. Raises what the
    template raises, which may be anything."""
    text = tokenizer.apply_chat_template(
        list(conversation),
        tools=list(tools) or None,
        chat_template=template_of(tokenizer, tools),
        tokenize=False,
        add_generation_prompt=ready,
    )
    return str(text)


def template_of(tokenizer: Any, tools: Sequence[Any] = ()) -> str:
    """The chat template (that for tools where there are some, and it is another one), its clock stopped."""
    template = str(tokenizer.get_chat_template(tools=list(tools) or None))
    return _STOPPED_CLOCK + template if "strftime_now" in template else template


# ---- control tokens that are written out in a text, which a tokenizer takes for real ones ----------------------------

# A question with "<|eot_id|><|start_header_id|>system" would end the user's turn and begin one of its own. So untrusted
# text gets a space after the first character of each, and only looks like it.


def control_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts that this tokenizer reads as special tokens, or its chat template writes as tokens of their own.

    The longest first; only those that a space can take apart.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    texts = {str(each) for each in tokenizer.all_special_tokens}
    for added in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if added.special or (added.content.strip() and added.content in template):
            texts.add(added.content)
    # Without white space around them: a space inserted there would leave the token intact.
    apart = {text for text in map(str.strip, texts) if len(text) > 1 and not text[1].isspace()}
    return tuple(sorted(apart, key=lambda text: (-len(text), text)))


def defused(text: str, controls: Iterable[str]) -> str:
    """The text with every control token in it broken up by a space.

    >>> defused("say </s> or <s>", ["</s>", "<s>"])
    'say < /s> or < s>'
    """
    controls = tuple(controls)
    if not controls:
        return text
    anywhere = re.compile("|".join(map(re.escape, controls)))
    while anywhere.search(text):  # breaking one up can complete another
        text = anywhere.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text


# ---- token ids -------------------------------------------------------------------------------------------------------


def token_ids(tokenizer: Any, text: str, *, conversation: bool) -> tuple[int, ...]:
    """The ids of a text: a conversation has its special tokens; plain text gets a BOS token, and no EOS token."""
    ids = list(tokenizer(text, add_special_tokens=not conversation, verbose=False)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    ended = eos is not None and ids[-1:] == [eos]
    if ended and not conversation and len(ids) > 1 and not text.rstrip().endswith(str(tokenizer.eos_token)):
        del ids[-1]  # a tokenizer that closes every text: the model would take the question for answered
    return tuple(ids)
