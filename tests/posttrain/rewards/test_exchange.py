"""Statement tests: what an answer does to pass without being right, and what right answers may do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpuherd.posttrain.rewards.code import ENTRY, PREFIX, SETUP, CodeRewards
from gpuherd.posttrain.rewards.code import Tested as Found
from gpuherd.posttrain.rewards.sandbox import Limits
from gpuherd.posttrain.types import Problem

HERE = Path(__file__).parent


def cases_of(name: str) -> dict[str, tuple[str, str]]:
    """Tests and an answer by the name of the case, as a file beside this one has them."""
    parts = re.split(r"^#### (.*)\n", (HERE / name).read_text(), flags=re.MULTILINE)[1:]
    return {parts[place]: (parts[place + 1], parts[place + 3]) for place in range(0, len(parts), 4)}


CHEATS = cases_of("statement_cheats.txt")
RIGHT = cases_of("statement_right.txt")
SETUP_SOURCE = """
def fine(x): return x == 2
class Node:
    def __init__(self, v): self.v = v
    def __eq__(self, o): return self.v == o.v
"""


def ran(tests: list[str], code: str, **hidden: str) -> Found:
    asked = Problem("p", "?", (), {"tests": json.dumps(tests), **hidden})
    return CodeRewards(limits=Limits(seconds=20)).tested([asked], [code])[0]


def outcomes(cases: dict[str, tuple[str, str]], setup: str = "") -> dict[str, Found]:
    asked = [Problem(name, "?", (), {"tests": json.dumps([test]), SETUP: setup}) for name, (test, _) in cases.items()]
    found = CodeRewards(limits=Limits(seconds=20)).tested(asked, [code for _, code in cases.values()])
    return dict(zip(cases, found, strict=True))


def in_parts(cases: dict[str, tuple[str, str]], fast: int) -> list[object]:
    """The first cases, and those that take longer all together, as parameters of tests."""
    some = list(cases.items())
    return [pytest.param(dict(some[:fast])), pytest.param(dict(some[fast:]), marks=pytest.mark.slow)]


@pytest.mark.parametrize("cases", in_parts(CHEATS, 18))
def test_nothing_that_an_answer_does_to_the_tests_passes_them(cases: dict[str, tuple[str, str]]) -> None:
    passed = [name for name, each in outcomes(cases, SETUP_SOURCE).items() if each.passed]
    assert not passed


@pytest.mark.parametrize("cases", in_parts(RIGHT, 12))
def test_right_answers_of_every_kind_pass(cases: dict[str, tuple[str, str]]) -> None:
    failed = {name: each.notes for name, each in outcomes(cases, SETUP_SOURCE).items() if not each.passed}
    assert not failed


def test_what_a_prompt_defines_is_not_the_answers_to_change() -> None:
    prefix = (
        "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\n\ndef zero(xs):\n    '''A root.'''\n"
    )
    tests = ["def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\n\ncheck(zero)\n"]
    hidden = {PREFIX: prefix, ENTRY: "zero"}
    assert ran(tests, "    return -xs[0] / xs[1]\n", **hidden).passed == 1
    cheat = "    return 0\n\ndef poly(*_):\n    return 0\n"
    assert ran(tests, cheat, **hidden).passed == 0


def test_a_crash_is_told_as_that_and_takes_the_other_tests_along() -> None:
    found = ran(
        ["assert f(1) == 1", "f(0)", "assert True"], "import os\ndef f(x): return x or os.kill(os.getpid(), 11)"
    )
    assert [each.passed for each in found.verdicts] == [True, False, False]
    assert found.problems == ("ended early (exit code -11)",)
    assert found.error


@pytest.mark.slow
def test_tests_of_many_calls_are_quick_enough() -> None:
    many = ["for n in range(5000):\n    assert f(n) == n * n", "assert f_all(list(range(100000)))[-1] == 99999"]
    assert ran(many, "def f(n): return n * n\ndef f_all(x): return sorted(x)").passed == 2
