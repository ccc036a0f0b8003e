"""Rows of what is imitated or compared: prompts and answers, as texts or as messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = tuple[tuple[str, str], ...]  # role and content of each


def compared(values: Mapping[str, Any]) -> tuple[str | Messages, str, str]:
    """Prompt, chosen and rejected of a row; the prompt a text or the conversation before the answer.

    Each is given as a text or as a list of messages. Where the completions are messages they hold the prompt's turns
    and the answer, or the answer alone; without a prompt it is what both begin with. Raises ValueError, which says what
    is wrong.
    """
    missing = [name for name in ("chosen", "rejected") if values.get(name) is None]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    said = values.get("prompt")
    prompt = None if said is None else said if isinstance(said, str) else _messages(said, "prompt")
    chosen, rejected = (_completion(values[name], name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    if isinstance(chosen, str) or isinstance(rejected, str):
        if not isinstance(chosen, str) or not isinstance(rejected, str):
            raise ValueError("one of chosen and rejected is a text, the other messages")
        if prompt is None:
            raise ValueError("it has no prompt")
        return prompt, chosen, rejected
    shared = next(
        (place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    before = chosen[:shared]
    if prompt is None:
        if not before:
            raise ValueError("it has no prompt, and its conversations begin differently")
        prompt = before
    elif before and before not in (prompt, (("user", prompt),)):
        raise ValueError("its conversations begin with other turns than its prompt")
    return prompt, _answer(chosen[shared:], "chosen"), _answer(rejected[shared:], "rejected")


def imitated(values: Mapping[str, Any]) -> list[tuple[str | Messages, str]]:
    """Prompts and the answers to imitate of a row, in this order of its columns:

    - ``messages``: a conversation, of which every turn of the assistant is an answer to the turns before it
    - ``chosen``: the better completion of a preference, with or without ``rejected``
    - ``prompt`` (or ``question``) with ``completion``, ``answer`` or ``answers`` (the first one)
    - ``text``: all of it is imitated, behind an empty prompt

    Prompts and completions are texts or lists of messages. Raises ValueError with what is wrong.
    """
    there = {name for name, value in values.items() if value is not None}
    if "messages" in there:
        return _assistant_turns(_messages(values["messages"], "messages"))
    if {"chosen", "rejected"} <= there:
        prompt, chosen, _ = compared(values)
        return [(prompt, chosen)]
    asked = next((name for name in ("prompt", "question") if name in there), None)
    said = next((name for name in ("completion", "chosen", "answer", "answers") if name in there), None)
    if said is None:
        if "text" in there and isinstance(values["text"], str) and values["text"].strip():
            return [("", values["text"])]
        raise ValueError("it has no messages, no text, and no completion, chosen or answer to imitate")
    before: str | Messages = ()
    if asked is not None:
        before = values[asked] if isinstance(values[asked], str) else _messages(values[asked], asked)
    answer = values[said]
    if said in ("completion", "chosen") and not isinstance(answer, str):
        turns = _messages(answer, said)
        prefix = (("user", before),) if isinstance(before, str) else before
        return _assistant_turns(turns if turns[: len(prefix)] == prefix else (*prefix, *turns), len(prefix))
    if isinstance(answer, list | tuple):
        answer = answer[0] if answer else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"its {said} is no text")
    if not before:
        raise ValueError("it has no prompt (or question)")
    return [(before, str(answer))]


def _assistant_turns(turns: Messages, first: int = 0) -> list[tuple[str | Messages, str]]:
    """Each turn of the assistant from place ``first`` on, with the turns before it. Raises ValueError."""
    found: list[tuple[str | Messages, str]] = [
        (turns[:place], said)
        for place, (role, said) in enumerate(turns)
        if role == "assistant" and place >= first and place > 0
    ]
    if not found:
        raise ValueError("it has no turn of the assistant behind another turn")
    return found


def _completion(value: Any, name: str) -> str | Messages:
    return value if isinstance(value, str) else _messages(value, name)


def _messages(value: Any, name: str) -> Messages:
    """Turns as role and content. Raises ValueError."""
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"its {name} is neither a text nor a list of messages")
    turns: list[tuple[str, str]] = []
    for each in value:
        if not isinstance(each, Mapping) or not all(isinstance(each.get(key), str) for key in ("role", "content")):
            raise ValueError(f"its {name} has a message without role and content as texts")
        turns.append((each["role"], each["content"]))
    return tuple(turns)


def _answer(turns: Messages, name: str) -> str:
    if len(turns) != 1 or turns[0][0] != "assistant":
        raise ValueError(f"its {name} is not one answer of the assistant behind what both begin with")
    return turns[0][1]
