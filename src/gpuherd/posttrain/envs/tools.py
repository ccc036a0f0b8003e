"""The tools that a policy may call, and how: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Knows nothing of episodes and rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from gpuherd.posttrain.envs.calculator import FUNCTIONS, BadExpression, calculate
from gpuherd.posttrain.envs.lookup import Library
from gpuherd.posttrain.rewards.sandbox import LIMITS, Outcome, Sandbox, Work

ToolName = Literal["calculator", "python", "lookup"]
# What each is for, and its one argument.
TOOLS: Mapping[ToolName, tuple[str, str]] = {
    "calculator": ("expression", f"the value of an expression; functions: {', '.join(FUNCTIONS)}"),
    "python": ("code", "runs a Python program and returns what it prints"),
    "lookup": ("query", "the entry of a library that fits best to some words"),
}
MOST_CALLS = 4  # in one turn; what comes behind is not read
_LONGEST = 2000  # characters of a result


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was written: ``argument`` None where it is not of the form, ``name`` None where that is missing."""

    name: str | None
    argument: str | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What a policy's words ask for."""

    calls: tuple[Call, ...]
    answer: str | None


def read_turn(text: str) -> Turn:
    """The calls in a text, and its last answer.

    >>> read_turn('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>').calls
    (Call(name='calculator', argument='1+1'),)
    """
    answers = list(_between(text, "<answer>", "</answer>"))
    calls = map(_call, islice(_between(text, "<tool_call>", "</tool_call>"), MOST_CALLS))
    return Turn(tuple(calls), answers[-1].strip() if answers else None)


def explained(names: Sequence[ToolName]) -> str:
    """What a policy is told of its tools."""
    lines = [f"- {name}: {TOOLS[name][1]}; argument: {TOOLS[name][0]}" for name in names]
    argument = TOOLS[names[0]][0]
    return (
        "You can use these tools:\n"
        + "\n".join(lines)
        + f'\nA call is written <tool_call>{{"name": "{names[0]}", "arguments": {{"{argument}": "..."}}}}</tool_call>. '
        "The final answer is written <answer>...</answer>."
    )


class Toolbox:
    """Runs calls. The sandbox is needed for ``python`` alone, the library for ``lookup``."""

    def __init__(self, names: Sequence[ToolName], sandbox: Sandbox | None, library: Library | None):
        self.names = tuple(names)
        self._sandbox, self._library = sandbox, library

    def results(self, calls: Sequence[Call]) -> list[str]:
        """What each call comes to; programs run side by side. A call that can't be run comes to the reason."""
        programs = [each.argument for each in calls if each.name == "python" and each.argument is not None]
        outcomes = iter(() if self._sandbox is None else self._sandbox.run_all([Work(code) for code in programs]))
        return [self._result(each, outcomes)[:_LONGEST] for each in calls]

    def _result(self, call: Call, outcomes: Iterator[Outcome]) -> str:
        if call.name not in self.names:
            return f"error: there is no tool {str(call.name)[:50]!r}"
        if call.argument is None:
            return "error: a call is a JSON object with a name and the tool's argument as a text"
        if call.name == "calculator":
            try:
                return calculate(call.argument)
            except BadExpression as problem:
                return f"error: {problem}"
        if call.name == "lookup" and self._library is not None:
            found = self._library.find(call.argument)
            return f"{found[0].title}: {found[0].text}" if found else "nothing fits"
        return _printed(next(outcomes))


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """What stands between marks. In time linear in the text, however many marks are left open."""
    place = 0
    while (start := text.find(begin, place)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        yield text[start + len(begin) : stop]
        place = stop + len(end)


def _call(text: str) -> Call:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return Call(None, None)
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return Call(None, None)
    name, given = said["name"], said.get("arguments")
    wanted = TOOLS[name][0] if name in TOOLS else None
    argument = given.get(wanted) if isinstance(given, dict) else given if isinstance(given, str) else None
    return Call(name, argument if isinstance(argument, str) else None)


def _printed(outcome: Outcome) -> str:
    if outcome.limit is not None:
        return f"error: {LIMITS[outcome.limit]}"
    loading = outcome.reports.get(-1)
    return f"{outcome.stdout}error: {loading[1]}" if loading is not None else outcome.stdout or "(nothing was printed)"
