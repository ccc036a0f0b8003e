"""What a row of preferences says: a prompt, the completion that was preferred and the one that was not. Pure.

The one reading of such rows, for tasks that ask their prompts and for trainings that learn from the pairs.
"""

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
