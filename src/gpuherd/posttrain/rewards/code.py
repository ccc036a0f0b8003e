"""Scores programs by the share of their tests that pass, each program run in the sandbox.

A test is one of three: a statement that raises where something is wrong (``assert f(2) == 4``), a call whose result is
compared with the right one, and an input whose output is. None is compared in the process that the program runs in, so
that no program can say of itself that it is right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.rewards.sandbox import LIMITS, Limits, Outcome, Sandbox, Work
from gpuherd.posttrain.types import Problem, Reward
from gpuherd.qa.span import answer_in

TESTS, SETUP, PREFIX, ENTRY = "tests", "setup", "prefix", "entry_point"  # hidden parts of a problem
_FENCED = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3")
_NEAR = 1e-6  # relative, of numbers with a point
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Statement:
    """A test that is run in the program's module and raises where something is wrong."""

    source: str

    @property
    def wording(self) -> str:
        """For people."""
        return _quoted(self.source)


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the program is called; what it returns is the result, as JSON."""

    name: str
    arguments: tuple[Any, ...]
    result: Any

    @property
    def wording(self) -> str:
        """For people."""
        return f"{self.name}({', '.join(map(json.dumps, self.arguments))}) == {json.dumps(self.result)}"


@dataclass(frozen=True, slots=True)
class Stream:
    """The program is run with an input; what it prints is the output, white space at the ends of lines aside."""

    input: str
    output: str

    @property
    def wording(self) -> str:
        """For people."""
        return f"of the input {_quoted(self.input)} the output {_quoted(self.output)}"


Test = Statement | Call | Stream


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one test.

    Attributes:
        passed: whether it did.
        error: something else than a wrong result went wrong: an exception, a limit, a crash.
        problem: what went wrong, without a word of what the test asks or expects.
        shown: what the test asked, for people.
    """

    passed: bool
    error: bool = False
    problem: str = ""
    shown: str = ""


@dataclass(frozen=True, slots=True)
class Tested:
    """The results of all tests of a program."""

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> int:
        """The number of tests that passed."""
        return sum(each.passed for each in self.verdicts)

    @property
    def total(self) -> int:
        """The number of tests."""
        return len(self.verdicts)

    @property
    def error(self) -> bool:
        """True where a test failed by something else than a wrong result."""
        return any(each.error for each in self.verdicts)

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons of failures, each once, without what the tests check: safe to show to the policy."""
        return tuple(dict.fromkeys(each.problem for each in self.verdicts if not each.passed))

    @property
    def notes(self) -> tuple[str, ...]:
        """The reasons of failures with their tests, for people."""
        failed = [each for each in self.verdicts if not each.passed]
        return tuple(dict.fromkeys(f"{each.shown}: {each.problem}" for each in failed))


@dataclass(frozen=True, slots=True)
class CodeScoring:
    """Turns test results into rewards.

    Attributes:
        partial: the share of tests that pass; else 1 where all pass and 0 otherwise.
        all_bonus: added where all tests pass.
        error_penalty: taken off where something else than a wrong result went wrong.
    """

    partial: bool = True
    all_bonus: float = 0.0
    error_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("all_bonus", "error_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)}; 0 or more")

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the largest reward."""
        return -self.error_penalty, 1.0 + self.all_bonus

    def reward(self, tested: Tested) -> Reward:
        """The reward of a program with these test results."""
        right = tested.passed == tested.total
        share = tested.passed / tested.total if self.partial else float(right)
        parts = {"tests": share}
        if self.all_bonus and right:
            parts["all"] = self.all_bonus
        if self.error_penalty and tested.error:
            parts["error"] = -self.error_penalty
        return Reward(math.fsum(parts.values()), right, parts, "; ".join(tested.notes) or None)


class CodeRewards:
    """Scores programs by the tests in the hidden part of their problems."""

    def __init__(
        self,
        scoring: CodeScoring | None = None,
        limits: Limits | None = None,
        *,
        processes: int | None = None,
        allow_unconfined: bool = False,
    ):
        """Finds out what protection there is. Raises NoProtection, and so before any GPU is taken."""
        self.scoring = scoring or CodeScoring()
        self.verifiable = self.scoring == CodeScoring(partial=False)
        self.reward_range = self.scoring.reward_range
        self._sandbox = Sandbox(limits, processes=processes, allow_unconfined=allow_unconfined)

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The reward of each completion, in order; several programs run at once. Raises UsageError for broken tests."""
        return [self.scoring.reward(each) for each in self.tested(problems, completions)]

    def tested(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Tested]:
        """The test results of each completion, in order."""
        return tested(self._sandbox, problems, completions)

    def close(self) -> None:
        """Nothing stays behind a run."""


def tested(sandbox: Sandbox, problems: Sequence[Problem], completions: Sequence[str]) -> list[Tested]:
    """The test results of each completion's program, in order; as many run at once as the sandbox allows."""
    planned = [
        _works(program_of(completion, problem.hidden), tests_of(problem), problem.hidden)
        for problem, completion in zip(problems, completions, strict=True)
    ]
    outcomes = iter(sandbox.run_all([work for works in planned for work, _ in works]))
    return [
        Tested(
            tuple(
                _verdict(outcome, place, test)
                for (_, some), outcome in zip(works, outcomes, strict=False)
                for place, test in enumerate(some)
            )
        )
        for works in planned
    ]


def tests_of(problem: Problem) -> tuple[Test, ...]:
    """The tests in a problem's hidden part. Raises UsageError."""
    try:
        return read_tests(json.loads(problem.hidden[TESTS]))
    except (KeyError, ValueError) as trouble:
        raise UsageError(f"problem {problem.id} has no tests: {trouble}") from None


def read_tests(values: Any) -> tuple[Test, ...]:
    """Tests as they stand in JSON: a text, ``{"call", "args", "result"}`` or ``{"input", "output"}`` each.

    Raises ValueError, which says which is none.
    """
    if not isinstance(values, list) or not values:
        raise ValueError("the tests are no list of one or more")
    return tuple(_test(value, number) for number, value in enumerate(values, start=1))


def program_of(completion: str, hidden: Mapping[str, str]) -> str:
    """The program in a completion's answer: its last fenced block (of Python, where one says so), else all of it.

    Where the prompt is the beginning of a program (``prefix``), that is put in front, unless the completion defines the
    asked function itself.

    >>> program_of("Here:\\n```python\\nx = 1\\n```\\nDone.", {})
    'x = 1\\n'
    """
    answer = answer_in(completion)
    blocks = _FENCED.findall(answer)
    marked = [body for language, body in blocks if language.lower() in _PYTHON]
    program = (marked or [body for _, body in blocks] or [answer])[-1]
    prefix, entry = hidden.get(PREFIX, ""), hidden.get(ENTRY, "")
    if not prefix:
        return str(program)
    defines = entry and re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry)}\b", program, re.MULTILINE)
    # What a prompt's program imports and defines besides may be used by the answer too.
    return f"{prefix.rstrip()}\n    pass\n\n{program}" if defines else prefix + program


def _works(program: str, tests: Sequence[Test], hidden: Mapping[str, str]) -> list[tuple[Work, tuple[Test, ...]]]:
    """The runs that the tests need: one for all that look into the program's module, one for each input."""
    inside = tuple(each for each in tests if isinstance(each, Statement))
    calls = tuple(each for each in tests if isinstance(each, Call))
    works: list[tuple[Work, tuple[Test, ...]]] = []
    setup, entry = hidden.get(SETUP, ""), hidden.get(ENTRY, "")
    if inside or calls:
        sources = tuple(each.source for each in inside)
        called = tuple((each.name, each.arguments) for each in calls)
        # What a prompt's program defines besides the function is not the answer's to change for the tests.
        given = f"{hidden.get(PREFIX, '').rstrip()}\n    pass\n" if entry else ""
        work = Work(program, tests=sources, calls=called, before=setup, given=given, entry=entry)
        works.append((work, (*inside, *calls)))
    streams = [each for each in tests if isinstance(each, Stream)]
    return [*works, *((Work(program, input=each.input, before=setup), (each,)) for each in streams)]


def _verdict(outcome: Outcome, place: int, test: Test) -> Verdict:
    """Of the test at a place of a run."""

    def failed(problem: str, *, error: bool = False) -> Verdict:
        return Verdict(False, error, problem, test.wording)

    if isinstance(test, Stream):
        if outcome.limit or outcome.exit_code:
            return failed(_ended(outcome), error=True)
        if _lines(outcome.stdout) == _lines(test.output):
            return Verdict(True)
        return failed(f"printed {_quoted(outcome.stdout)}, which is wrong")
    if place not in outcome.reports:
        return failed(_ended(outcome), error=True)
    kind, message = outcome.reports[place] or (None, "")
    if isinstance(test, Statement):
        if kind is None:
            return Verdict(True)
        return failed("a wrong result") if kind == "assertion" else failed(message, error=True)
    if kind != "value":
        return failed(message or "nothing came back", error=True)
    try:
        right = same(json.loads(message), test.result)
    except (ValueError, RecursionError):  # numbers without end, brackets without end
        return failed(f"{test.name} returned a value that can't be read", error=True)
    return Verdict(True) if right else failed(f"{test.name} returned {_quoted(message)}, which is wrong")


def same(one: Any, other: Any) -> bool:
    """True for equal JSON values, numbers with a point up to a relative 1e-6.

    >>> same([0.1 + 0.2, "a"], [0.3, "a"]), same(1, True)
    (True, False)
    """
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        if isinstance(one, int) and isinstance(other, int):
            return one == other
        try:
            return math.isclose(one, other, rel_tol=_NEAR, abs_tol=_NEAR**2)
        except OverflowError:  # a whole number that is larger than any with a point
            return False
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def _ended(outcome: Outcome) -> str:
    """Why a run came to no result."""
    if outcome.limit is not None:
        return LIMITS[outcome.limit]
    loading = outcome.reports.get(-1)
    if loading is not None:
        return loading[1]
    return f"ended early (exit code {outcome.exit_code})"


def _test(value: Any, number: int) -> Test:
    if isinstance(value, str) and value.strip():
        return Statement(value)
    if isinstance(value, Mapping):
        if isinstance(value.get("call"), str) and isinstance(value.get("args"), list) and "result" in value:
            return Call(value["call"], tuple(value["args"]), value["result"])
        if isinstance(value.get("input"), str) and isinstance(value.get("output"), str):
            return Stream(value["input"], value["output"])
    raise ValueError(f"test {number} is no text, no call with args and result, and no input with output")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
