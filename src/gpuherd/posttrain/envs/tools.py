"""Questions that are answered with tools: the policy calls some, hears what they come to, and answers in the end.

A call is written ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A turn earns +0.3 for each tool that the
problem expects, when it is first used, and costs 0.1 for another tool, 0.2 for one that there is not and 0.1 for a turn
that is neither call nor answer. The answer earns 0.5 if it is right, 0.3 times the share of expected tools that were
used, and 0.2 times how few calls it took: expected calls over calls made.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.models.names import user_path
from gpuherd.posttrain.data.dataset import Checked, ParsedRow
from gpuherd.posttrain.envs.calculator import FUNCTIONS, BadExpression, calculate
from gpuherd.posttrain.envs.interface import NOTHING, EnvironmentOptions, Episode, Observation, Step, VectorEnv, user
from gpuherd.posttrain.envs.registry import environment, source_of
from gpuherd.posttrain.rewards.answers import MathRewards, rewards_of
from gpuherd.posttrain.rewards.sandbox import LIMITS, Limits, Outcome, Sandbox, Work
from gpuherd.posttrain.types import Problem, ProblemSource
from gpuherd.qa.data.files import rows_of_lines
from gpuherd.qa.data.questions import BadRow, MissingQuestions
from gpuherd.qa.span import answer_in

# ---- a library to look things up in ----------------------------------------------------------------------------------


_WORD = re.compile(r"\w+")
_SATURATION, _LENGTHS = 1.5, 0.75  # k1 and b


@dataclass(frozen=True, slots=True)
class Entry:
    """A text and what it is called."""

    title: str
    text: str


class Library:
    """Entries, found by BM25 (Robertson and Zaragoza 2009) with k1 = 1.5 and b = 0.75 over title and text."""

    def __init__(self, entries: Sequence[Entry]):
        """Raises UsageError without any."""
        if not entries:
            raise UsageError("a library to look things up in has no entries")
        self._entries = tuple(entries)
        self._words = [Counter(_words(f"{each.title} {each.text}")) for each in entries]
        self._lengths = [sum(words.values()) for words in self._words]
        self._mean = max(1.0, sum(self._lengths) / len(entries))
        self._holding = Counter(word for words in self._words for word in words)

    def find(self, query: str, count: int = 1) -> list[Entry]:
        """The entries that fit best, the best first; none that shares no word with the query."""
        wanted = set(_words(query))
        scores = [(self._score(wanted, place), -place) for place in range(len(self._entries))]
        best = sorted((each for each in scores if each[0] > 0), reverse=True)[:count]
        return [self._entries[-place] for _, place in best]

    def _score(self, wanted: set[str], place: int) -> float:
        words, share = self._words[place], self._lengths[place] / self._mean
        total = 0.0
        for word in sorted(wanted & words.keys()):
            rarity = math.log(1 + (len(self._entries) - self._holding[word] + 0.5) / (self._holding[word] + 0.5))
            often = words[word]
            total += rarity * often * (_SATURATION + 1) / (often + _SATURATION * (1 - _LENGTHS + _LENGTHS * share))
        return total


def read_library(path: Path) -> Library:
    """The entries of a JSONL file with ``title`` and ``text``. Raises UsageError, MissingQuestions."""
    entries = []
    try:
        for row in rows_of_lines(path):
            values = row.values or {}
            title, text = values.get("title", ""), values.get("text")
            if not isinstance(title, str) or not isinstance(text, str):
                raise UsageError(f"{path}, {row.place}: {row.problem or 'title and text should be texts'}")
            entries.append(Entry(title, text))
    except OSError as problem:
        raise MissingQuestions(f"{path} can't be read: {problem.strerror}") from None
    return Library(entries)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


# ---- the tools, and how they are called ------------------------------------------------------------------------------


ToolName = Literal["calculator", "python", "lookup"]
# What each is for, and its one argument.
TOOLS: Mapping[ToolName, tuple[str, str]] = {
    "calculator": ("expression", f"the value of an expression; functions: {', '.join(FUNCTIONS)}"),
    "python": ("code", "runs a Python program and returns what it prints"),
    "lookup": ("query", "the entry of a library that fits best to some words"),
}
MOST_CALLS = 4  # in one turn; what comes behind is not read
_LONGEST_RESULT = 2000  # characters of a result


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was written: ``argument`` None where it is not of the form, ``name`` None where that is missing."""

    name: str | None
    argument: str | None


@dataclass(frozen=True, slots=True)
class Turn:
    """The calls and the answer in a turn of the policy."""

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
    """The description of the tools in a prompt."""
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
        """The result of each call; programs run in parallel. That of a call that can't be run is the reason."""
        programs = [each.argument for each in calls if each.name == "python" and each.argument is not None]
        outcomes = iter(() if self._sandbox is None else self._sandbox.run_all([Work(code) for code in programs]))
        return [self._result(each, outcomes)[:_LONGEST_RESULT] for each in calls]

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
    """The texts between marks. In time linear in the text, however many marks are left open."""
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


# ---- the environment -------------------------------------------------------------------------------------------------


_MOST_TURNS = 5
_RIGHT_TOOL, _WRONG_TOOL, _UNKNOWN_TOOL, _BAD_FORM = 0.3, -0.1, -0.2, -0.1
_CORRECT, _COVERAGE, _EFFICIENCY = 0.5, 0.3, 0.2
_TOOLS = "tools"  # the hidden part of a problem that lists those it expects, as JSON


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """``tools`` that there are; ``library``: the JSONL file (title, text) that ``lookup`` looks into; ``memory_mb`` of
    a program that ``python`` runs."""

    tools: tuple[ToolName, ...] = ("calculator", "python")
    library: str | None = None
    memory_mb: int = 512

    def __post_init__(self) -> None:
        if not self.tools or len(set(self.tools)) < len(self.tools):
            raise UsageError("tools: one or more, each once")
        if ("lookup" in self.tools) != (self.library is not None):
            raise UsageError("tools: lookup and library=FILE belong together")


@environment("tool", ToolSettings)
def make_tool(settings: ToolSettings, options: EnvironmentOptions) -> ToolUse:
    """The environments. Raises UsageError, NoProtection, and what reading raises."""
    limits = Limits(seconds=options.timeout, memory=settings.memory_mb << 20)
    sandbox = None
    if "python" in settings.tools:
        sandbox = Sandbox(limits, processes=options.task.processes, allow_unconfined=options.task.allow_unconfined)
    library = None if settings.library is None else read_library(user_path(settings.library))

    def with_tools(problem: Problem) -> Problem:
        return replace(problem, prompt=f"{explained(settings.tools)}\n\nQuestion: {problem.prompt}\n")

    def problem(found: Checked) -> Problem:
        return with_tools(Problem(found.id, found.question, found.answers, found.hidden))

    source = source_of(options, parse_tool_question, problem, "tool", of_task=with_tools)
    box = Toolbox(settings.tools, sandbox, library)
    return ToolUse(source, box, MathRewards(options.task.processes), options.max_attempts or _MOST_TURNS)


def parse_tool_question(row: Mapping[str, Any]) -> ParsedRow:
    """A question with its answer, and perhaps the ``tools`` that it expects. Raises BadRow."""
    answer = row.get("answer", row.get("answers"))
    if answer is None:
        raise BadRow("there is no answer")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(each, str) for each in tools)):
        raise BadRow("its tools are no list of names")
    hidden = {} if tools is None else {_TOOLS: json.dumps(sorted(set(tools)))}
    return ParsedRow(row.get("question", row.get("prompt")), answer, row.get("id"), hidden=hidden)


class _UsingTools(Episode):
    """``expected`` None: the problem does not say which tools it expects."""

    environments: ToolUse

    def reset(self, problem: Problem, seed: int) -> Observation:  # noqa: ARG002 - nothing is drawn
        """Shows the tools and the question."""
        self.problem = problem
        hidden = problem.hidden.get(_TOOLS)
        self.expected = None if hidden is None else frozenset(json.loads(hidden))
        self.used: set[str] = set()
        self.calls = self.turns = 0
        return user(problem.prompt)

    def called(self, turn: Turn, results: Sequence[str]) -> Step:
        """The step of a turn without an answer."""
        self.turns += 1
        reward = math.fsum([self._worth(each) for each in turn.calls] or [_BAD_FORM])
        done = self.turns >= self.environments.most_turns
        said = "\n".join(f"<tool_result>{each}</tool_result>" for each in results)
        feedback = (
            said or "Neither a call of a tool nor an answer was found. An answer is written <answer>...</answer>."
        )
        info = {"calls": float(self.calls)}
        return Step(NOTHING if done else user(feedback), reward, done, False, info)

    def answered(self, right: bool) -> Step:
        """The last step: what an answer earns."""
        self.turns += 1
        if self.expected is None:
            coverage = efficiency = 1.0
        else:
            wanted = len(self.expected)
            coverage = len(self.used & self.expected) / wanted if wanted else 1.0
            efficiency = min(1.0, wanted / self.calls) if self.calls else float(not wanted)
        parts = {
            "correct": _CORRECT * right,
            "coverage": _COVERAGE * coverage,
            "efficiency": _EFFICIENCY * efficiency,
        }
        return Step(NOTHING, math.fsum(parts.values()), True, right, {**parts, "calls": float(self.calls)})

    def _worth(self, call: Call) -> float:
        """What a call earns, which is written down as made."""
        self.calls += 1
        if call.name is None:
            return _BAD_FORM
        if call.name not in self.environments.box.names:
            return _UNKNOWN_TOOL
        if call.argument is None:
            return _BAD_FORM
        new = call.name not in self.used
        self.used.add(call.name)
        if self.expected is None:
            return 0.0
        if call.name not in self.expected:
            return _WRONG_TOOL
        return _RIGHT_TOOL if new else 0.0


class ToolUse(VectorEnv[_UsingTools]):
    """Environments with one box of tools."""

    episode = _UsingTools

    def __init__(self, source: ProblemSource, box: Toolbox, judge: MathRewards, most_turns: int):
        worst = min(_UNKNOWN_TOOL, _WRONG_TOOL) * MOST_CALLS * most_turns
        super().__init__("tool", source, most_turns, (worst, _RIGHT_TOOL * len(box.names) + 1.0), judge.close)
        self.box, self._judge = box, judge

    def judged(self, episodes: Sequence[_UsingTools], texts: Sequence[str]) -> list[Step]:
        """All turns; their programs run side by side, their answers are judged together."""
        turns = [read_turn(answer_in(text)) for text in texts]
        results = iter(self.box.results([call for turn in turns if turn.answer is None for call in turn.calls]))
        answered = [(each, turn.answer) for each, turn in zip(episodes, turns, strict=True) if turn.answer is not None]
        asked, said = [each.problem for each, _ in answered], [text for _, text in answered]
        judged = iter(rewards_of(self._judge, self.name, asked, said))
        return [
            each.called(turn, [next(results) for _ in turn.calls])
            if turn.answer is None
            else each.answered(bool(next(judged).correct))
            for each, turn in zip(episodes, turns, strict=True)
        ]
