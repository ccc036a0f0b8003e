"""Questions that are answered with tools: the policy calls some, hears what they come to, and answers in the end.

A turn earns +0.3 for each tool that the problem expects, when it is first used, and costs 0.1 for another tool, 0.2 for
one that there is not and 0.1 for a turn that is neither call nor answer. The answer earns 0.5 if it is right, 0.3 times
the share of expected tools that were used, and 0.2 times how few calls it took: expected calls over calls made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.reading import Checked, Draft
from gpuherd.posttrain.data.scoring import ProblemSource
from gpuherd.posttrain.envs.interface import NOTHING, Environment, Observation, Step, user
from gpuherd.posttrain.envs.lookup import read_library
from gpuherd.posttrain.envs.options import EnvironmentOptions
from gpuherd.posttrain.envs.sources import source_of
from gpuherd.posttrain.envs.tools import MOST_CALLS, Call, Toolbox, ToolName, Turn, explained, read_turn
from gpuherd.posttrain.rewards.answers import MathRewards
from gpuherd.posttrain.rewards.guarded import rewards_of
from gpuherd.posttrain.rewards.sandbox import Limits, Sandbox
from gpuherd.posttrain.types import Problem, Split
from gpuherd.qa.data.questions import BadRow
from gpuherd.qa.span import answer_in

_MOST_TURNS = 5
_RIGHT_TOOL, _WRONG_TOOL, _UNKNOWN_TOOL, _BAD_FORM = 0.3, -0.1, -0.2, -0.1
_CORRECT, _COVERAGE, _EFFICIENCY = 0.5, 0.3, 0.2
_TOOLS = "tools"  # the hidden part of a problem that lists those it expects, as JSON


@dataclass(frozen=True, slots=True)
class Settings:
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


def make(options: EnvironmentOptions) -> ToolUse:
    """The environments. Raises UsageError, NoProtection, and what reading raises."""
    settings = read(Settings, options.settings, "tool")
    limits = Limits(seconds=options.timeout, memory=settings.memory_mb << 20)
    sandbox = None
    if "python" in settings.tools:
        sandbox = Sandbox(limits, processes=options.task.processes, allow_unconfined=options.task.allow_unconfined)
    library = None if settings.library is None else read_library(Path(settings.library).expanduser())

    def asked(problem: Problem) -> Problem:
        return replace(problem, prompt=f"{explained(settings.tools)}\n\nQuestion: {problem.prompt}\n")

    def problem(found: Checked) -> Problem:
        return asked(Problem(found.id, found.question, found.answers, found.hidden))

    source = source_of(options, draft, problem, "tool", of_task=asked)
    box = Toolbox(settings.tools, sandbox, library)
    return ToolUse(source, box, MathRewards(options.task.processes), options.max_attempts or _MOST_TURNS)


def draft(row: Mapping[str, Any]) -> Draft:
    """A question with its answer, and perhaps the ``tools`` that it expects. Raises BadRow."""
    answer = row.get("answer", row.get("answers"))
    if answer is None:
        raise BadRow("there is no answer")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(each, str) for each in tools)):
        raise BadRow("its tools are no list of names")
    hidden = {} if tools is None else {_TOOLS: json.dumps(sorted(set(tools)))}
    return Draft(row.get("question", row.get("prompt")), answer, row.get("id"), hidden=hidden)


class ToolUse:
    """Environments with one box of tools."""

    name = "tool"
    verifiable = False

    def __init__(self, source: ProblemSource, box: Toolbox, judge: MathRewards, most_turns: int):
        self.most_turns = most_turns
        worst = min(_UNKNOWN_TOOL, _WRONG_TOOL) * MOST_CALLS * most_turns
        self.reward_range = (worst, _RIGHT_TOOL * len(box.names) + 1.0)
        self._source, self._box, self._judge = source, box, judge

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Those of the source."""
        return self._source.problems(split, count, seed)

    def make(self) -> Environment:
        """A new one."""
        return _UsingTools(self)

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """All turns; their programs run side by side, their answers are judged together."""
        using = [each for each in environments if isinstance(each, _UsingTools)]
        turns = [read_turn(answer_in(text)) for text in texts]
        calls = [call for turn in turns if turn.answer is None for call in turn.calls]
        results = iter(self._box.results(calls))
        answered = [(each, turn.answer) for each, turn in zip(using, turns, strict=True) if turn.answer is not None]
        asked, said = [each.problem for each, _ in answered], [text for _, text in answered]
        judged = iter(rewards_of(self._judge, self.name, asked, said))
        steps = []
        for each, turn in zip(using, turns, strict=True):
            if turn.answer is not None:
                steps.append(each.answered(bool(next(judged).correct)))
            else:
                steps.append(each.called(turn, [next(results) for _ in turn.calls], self._box.names, self.most_turns))
        return steps

    def close(self) -> None:
        """Ends what was started."""
        self._judge.close()
        self._source.close()


@dataclass(slots=True)
class _UsingTools:
    """An episode. ``expected`` None: the problem does not say which tools it expects."""

    family: ToolUse
    problem: Problem = field(init=False)
    expected: frozenset[str] | None = None
    used: set[str] = field(default_factory=set)
    calls: int = 0
    turns: int = 0

    def reset(self, problem: Problem, seed: int) -> Observation:  # noqa: ARG002 - nothing is drawn
        """Shows the tools and the question."""
        self.problem = problem
        hidden = problem.hidden.get(_TOOLS)
        self.expected = None if hidden is None else frozenset(json.loads(hidden))
        self.used, self.calls, self.turns = set(), 0, 0
        return user(problem.prompt)

    def step(self, text: str) -> Step:
        """A turn."""
        return self.family.step_all([self], [text])[0]

    def called(self, turn: Turn, results: Sequence[str], tools: Sequence[str], most_turns: int) -> Step:
        """What comes of a turn without an answer."""
        self.turns += 1
        earned = [self._worth(each, tools) for each in turn.calls] or [_BAD_FORM]
        reward = math.fsum(earned)
        done = self.turns >= most_turns
        said = "\n".join(f"<tool_result>{each}</tool_result>" for each in results)
        told = said or "Neither a call of a tool nor an answer was found. An answer is written <answer>...</answer>."
        info = {"calls": float(self.calls)}
        return Step(NOTHING if done else user(told), reward, done, False, info)

    def answered(self, right: bool) -> Step:
        """What an answer earns, and the end."""
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

    def _worth(self, call: Call, tools: Sequence[str]) -> float:
        """What a call earns, which is written down as made."""
        self.calls += 1
        if call.name is None:
            return _BAD_FORM
        if call.name not in tools:
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
