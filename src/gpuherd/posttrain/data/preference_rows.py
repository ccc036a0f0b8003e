"""Rows of what is imitated or compared: prompts and answers, as texts or as messages. Pure.

What a row holds is seen by its columns. A message is a mapping with ``role`` and ``content``; a turn of the assistant
may have ``tool_calls``, and a row ``tools``. Every complaint names the key (``messages[2].role``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from gpuherd.posttrain.types import Problem

Messages = tuple[tuple[str, str], ...]  # role and content of each
Turns = tuple[Mapping[str, Any], ...]  # messages as chat templates take them

# Hidden part of a problem: the conversation that it is the end of, whose turns SFT imitates, as JSON.
CONVERSATION = "conversation"
ROLES = ("system", "developer", "user", "assistant", "tool")
# Further parts of a message that chat templates write.
_TEXTS = ("name", "tool_call_id", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of which turns of the assistant are imitated.

    Attributes:
        messages: as chat templates take them.
        tools: JSON schemas of the functions that may be called.
        first: turns from this place on are imitated; those before it are the prompt.
    """

    messages: Turns
    tools: tuple[Mapping[str, Any], ...] = ()
    first: int = 0

    @property
    def imitated(self) -> tuple[int, ...]:
        """The places of the turns that are imitated: the assistant's behind any other turn, from ``first`` on."""
        turns = enumerate(self.messages)
        return tuple(place for place, each in turns if each["role"] == "assistant" and place >= max(1, self.first))

    @property
    def last_answer(self) -> int | None:
        """The place of the last of these turns that says something and calls no tool; None where none does."""
        said = {place: self.messages[place] for place in reversed(self.imitated)}
        return next((at for at, each in said.items() if each["content"].strip() and "tool_calls" not in each), None)

    def to_json(self) -> str:
        """As ``from_json`` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From ``to_json``."""
        values = json.loads(text)
        return cls(tuple(values["messages"]), tuple(values["tools"]), values["first"])

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """All that stands before each answer, and the answer; tools and calls as JSON: for counting tokens."""
        before = [json.dumps(self.tools)] if self.tools else []
        said = [
            each["content"] + (json.dumps(each["tool_calls"]) if "tool_calls" in each else "") for each in self.messages
        ]
        return tuple(("\n\n".join([*before, *said[:place]]), said[place]) for place in self.imitated)


def conversation_of(problem: Problem) -> Conversation | None:
    """The conversation that a problem is the end of; None where its prompt and its answer are all there is."""
    text = problem.hidden.get(CONVERSATION)
    return None if text is None else Conversation.from_json(text)


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
    prompt = None if said is None else _text_or_turns(said, "prompt")
    chosen, rejected = (_text_or_turns(values[name], name) for name in ("chosen", "rejected"))
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


def imitated(values: Mapping[str, Any]) -> tuple[str, str] | Conversation:
    """The prompt and the answer to imitate of a row, or a conversation, in this order of its columns:

    - ``messages``: a conversation; every turn of the assistant behind another turn is imitated
    - ``chosen``: the better completion of a preference, with or without ``rejected``
    - ``prompt`` (or ``question``) with ``completion``, ``answer`` or ``answers`` (the first one)
    - ``text``: all of it is imitated, behind an empty prompt

    Prompts and completions are texts or lists of messages; a conversation may have ``tools``. Raises ValueError with
    what is wrong.
    """
    there = {name for name, value in values.items() if value is not None}
    if "messages" in there:
        return _conversation(_turns(values["messages"], "messages"), values)
    if {"chosen", "rejected"} <= there:
        prompt, chosen, _ = compared(values)
        if isinstance(prompt, str):
            return prompt, chosen
        return _answered(tuple({"role": role, "content": said} for role, said in prompt), chosen, values)
    asked = next((name for name in ("prompt", "question") if name in there), None)
    said = next((name for name in ("completion", "chosen", "answer", "answers") if name in there), None)
    if said is None:
        if "text" in there and isinstance(values["text"], str) and values["text"].strip():
            return "", values["text"]
        raise ValueError("it has no messages, no text, and no completion, chosen or answer to imitate")
    before: str | Turns = ()
    if asked is not None:
        before = values[asked] if isinstance(values[asked], str) else _turns(values[asked], asked)
    answer = values[said]
    if said in ("completion", "chosen") and not isinstance(answer, str):
        turns = _turns(answer, said)
        prefix = ({"role": "user", "content": before},) if isinstance(before, str) else before
        whole = turns if turns[: len(prefix)] == prefix else (*prefix, *turns)
        return _conversation(whole, values, len(prefix))
    if isinstance(answer, list | tuple):
        answer = answer[0] if answer else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"its {said} is no text")
    if not before:
        raise ValueError("it has no prompt (or question)")
    return (before, str(answer)) if isinstance(before, str) else _answered(before, str(answer), values)


def _answered(before: Turns, answer: str, values: Mapping[str, Any]) -> Conversation:
    return _conversation((*before, {"role": "assistant", "content": answer}), values, len(before))


def _conversation(turns: Turns, values: Mapping[str, Any], first: int = 0) -> Conversation:
    """Raises ValueError where there is nothing to imitate, or its tools are none."""
    found = Conversation(turns, _tools(values.get("tools")), first)
    if not found.imitated:
        raise ValueError("it has no turn of the assistant behind another turn")
    return found


def _text_or_turns(value: Any, name: str) -> str | Messages:
    return value if isinstance(value, str) else text_turns(value, name)


def _answer(turns: Messages, name: str) -> str:
    if len(turns) != 1 or turns[0][0] != "assistant":
        raise ValueError(f"its {name} is not one answer of the assistant behind what both begin with")
    return turns[0][1]


# ---- messages, tools and calls of tools ------------------------------------------------------------------------------


def text_turns(value: Any, name: str) -> Messages:
    """Messages as role and content. Raises ValueError, also for calls of tools: they would be lost."""
    turns = _turns(value, name)
    for place, each in enumerate(turns):
        if other := sorted(each.keys() - {"role", "content"}):
            raise ValueError(f"{name}[{place}].{other[0]}: what is compared has role and content alone")
    return tuple((each["role"], each["content"]) for each in turns)


def _turns(value: Any, name: str) -> Turns:
    """Messages as chat templates take them: all that is None left out. Raises ValueError."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        empty = ": it is empty" if value in ([], ()) else ""
        raise ValueError(f"its {name} is neither a text nor a list of messages{empty}")
    return tuple(_turn(each, f"{name}[{place}]", name) for place, each in enumerate(value))


def _turn(value: Any, where: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"its {name} has a message without role and content as texts: {where} is no mapping")
    calls = value.get("tool_calls") or []
    content = "" if calls and value.get("content") is None else value.get("content")
    for key, found in (("role", value.get("role")), ("content", content)):
        if not isinstance(found, str):
            said = "missing" if found is None else f"a {type(found).__name__}"
            raise ValueError(f"its {name} has a message without role and content as texts: {where}.{key} is {said}")
    if value["role"] not in ROLES:
        raise ValueError(f"{where}.role is {value['role'][:40]!r}, none of {', '.join(ROLES)}")
    turn = {"role": value["role"], "content": content}
    for key in _TEXTS:
        if (found := value.get(key)) is not None:
            if not isinstance(found, str):
                raise ValueError(f"{where}.{key} is no text")
            turn[key] = found
    if calls:
        if value["role"] != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ValueError(f"{where}.tool_calls is no list of calls in a turn of the assistant")
        turn["tool_calls"] = [_call(each, f"{where}.tool_calls[{place}]") for place, each in enumerate(calls)]
    return turn


def _call(value: Any, where: str) -> Mapping[str, Any]:
    """A call as templates take it: its arguments a mapping, also where a row has them as JSON."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}.function.name is no text")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = arguments or {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.function.arguments is no mapping, and no JSON of one")
    others = {key: _without_none(each) for key, each in value.items() if key not in ("function", "type")}
    called = {"name": function["name"], "arguments": _without_none(arguments)}
    return {"type": "function", **_without_none(others), "function": called}


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("its tools is no JSON") from None
    if not value:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError("its tools is no list of JSON schemas of functions")
    return tuple(_without_none(each) for each in value)


def _without_none(value: Any) -> Any:
    """Without keys that are None: a table gives each row the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value
