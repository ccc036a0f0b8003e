"""Programs scored by tests."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.rewards.code import (
    Call,
    CodeRewards,
    CodeScoring,
    Statement,
    Stream,
    program_of,
    read_tests,
    same,
)
from gpuherd.posttrain.rewards.sandbox import Limits
from gpuherd.posttrain.types import Problem

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def problem(*tests: object, **hidden: str) -> Problem:
    return Problem("p", "Write it.", (), {"tests": json.dumps(tests), **hidden})


def test_each_kind_of_test_is_run() -> None:
    asked = problem(
        "assert double(2) == 4",
        "assert double('a') == 'aa'",
        {"call": "double", "args": [[1, 2]], "result": [1, 2, 1, 2]},
        {"call": "double", "args": [0.1], "result": 0.2},
    )
    rewards = CodeRewards(limits=Limits(seconds=20))
    good = "Here it is:\n```python\ndef double(x):\n    return x * 2\n```\nDone."
    half = "def double(x):\n    return 4 if x == 2 else 'aa' if x == 'a' else None"
    empty = ""
    tested = rewards.tested([asked] * 3, [good, half, empty])
    found = [rewards.scoring.reward(each) for each in tested]
    assert [each.value for each in found] == [1.0, 0.5, 0.0]
    assert [each.correct for each in found] == [True, False, False]
    assert found[1].note is not None
    assert "double([1, 2]) == [1, 2, 1, 2]: double returned 'null', which is wrong" in found[1].note
    assert [each.error for each in tested] == [False, False, True]
    assert tested[1].problems == ("double returned 'null', which is wrong",)
    assert tested[2].problems[0] == "NameError: name 'double' is not defined"


def test_programs_are_run_on_inputs() -> None:
    asked = problem({"input": "10 -1", "output": "9  \n\n"})
    rewards = CodeRewards(CodeScoring(partial=False), Limits(seconds=20))
    said = [
        "if __name__ == '__main__':\n    a, b = map(int, open(0).read().split())\n    print(a + b)",
        "print(8)",
        "print(9); raise SystemExit(1)",
    ]
    assert [each.value for each in rewards.rewards([asked] * 3, said)] == [1, 0, 0]
    assert rewards.verifiable
    assert not CodeRewards().verifiable


@pytest.mark.slow
def test_bonus_and_penalty_are_added() -> None:
    scoring = CodeScoring(all_bonus=1.0, error_penalty=0.5)
    assert scoring.reward_range == (-0.5, 2.0)
    asked = problem("assert f() == 1", "assert f() > 0", "assert f() < 9", "assert f() != 7")
    rewards = CodeRewards(scoring, Limits(seconds=20))
    found = rewards.rewards([asked] * 3, ["def f(): return 1", "def f(): return 2", "def f(): return 1 / 0"])
    assert [each.value for each in found] == [2.0, 0.75, -0.5]
    assert found[0].parts == {"tests": 1.0, "all": 1.0}
    assert found[2].parts == {"tests": 0.0, "error": -0.5}
    for wrong in ({"all_bonus": -1.0}, {"error_penalty": math.nan}):
        with pytest.raises(UsageError):
            CodeScoring(**wrong)  # type: ignore[arg-type]


def test_values_and_messages_that_mean_harm_harm_nobody() -> None:
    asked = problem({"call": "f", "args": [], "result": [1]})
    said = [
        "import sys\nsys.set_int_max_str_digits(0)\ndef f(): return 10**5000",
        "def f(): raise ValueError('\\ud800')",
        "def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    ]
    rewards = CodeRewards(limits=Limits(seconds=20))
    tested = rewards.tested([asked] * len(said), said)
    assert [each.passed for each in tested] == [0] * len(said)
    assert tested[0].problems[0].startswith("ValueError: Exceeds the limit (4300 digits)")
    assert tested[2].problems[0].startswith("RecursionError")
    for each in tested:
        " ".join(each.notes).encode()


def test_a_whole_number_larger_than_any_with_a_point_is_a_wrong_answer() -> None:
    asked = problem({"call": "half", "args": [3], "result": 1.5})
    tested = CodeRewards(limits=Limits(seconds=20)).tested([asked], ["def half(n): return 10**400"])[0]
    assert (tested.passed, tested.total, tested.error) == (0, 1, False)
    assert same(10**400, 10**400)
    for other in (1.5, float("inf")):
        assert not same(10**400, other)
        assert not same([other], [-(10**400)])


CHEATS = (
    "import builtins\nbuiltins.exec = lambda *a, **k: None",
    "import builtins\nown = compile\nbuiltins.compile = lambda s, *a, **k: own('pass', *a, **k)",
    "import builtins\nbuiltins.enumerate = lambda some, first=0: [(n, 'pass') for n in range(len(some))]",
    "import json\njson._default_encoder.encode = lambda said: '[0, null, \"\"]'",
    "import builtins\nbuiltins.isinstance = lambda *a: True\nimport sys\ndef f(): sys.exit(0)",
    "import builtins, sys\nbuiltins.BaseException = builtins.AssertionError = KeyError\ndef f(): sys.exit(0)",
    "import json, os\njson.dumps = lambda said: '\"\"\\n'\ndef f(): return 1",
)


@pytest.mark.parametrize("cheats", [CHEATS[2:4], pytest.param(CHEATS, marks=pytest.mark.slow)])
def test_what_a_program_makes_of_built_in_names_passes_no_test(cheats: tuple[str, ...]) -> None:
    rewards = CodeRewards(limits=Limits(seconds=20))
    asked = problem("assert f() == 2", {"call": "f", "args": [], "result": 2})
    assert [each.passed for each in rewards.tested([asked] * len(cheats), cheats)] == [0] * len(cheats)


def test_an_endless_program_keeps_nobody() -> None:
    rewards = CodeRewards(limits=Limits(seconds=0.4))
    tested = rewards.tested([problem("assert f() == 1", "assert True")], ["def f():\n    while True: pass"])[0]
    assert (tested.passed, tested.total, tested.error) == (0, 2, True)
    assert tested.problems == ("out of time",)


def test_setup_comes_first_and_what_it_breaks_is_told() -> None:
    rewards = CodeRewards(limits=Limits(seconds=20))
    # Annotations are what Python makes them, not what the future features of the program that runs them do.
    asked = problem("assert f(0) == 3", "assert f.__annotations__ == {'x': int}", setup="THREE = 3")
    assert rewards.rewards([asked], ["def f(x: int): return THREE"])[0].correct


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\ntext\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nrm -rf /\n```", "a\n"),
        ("```python\nunclosed = 1\n", "unclosed = 1\n"),
        ("  ```Python\n  x\n  ```", "  x\n"),
        ("", ""),
    ],
)
def test_the_program_is_found_in_a_completion(completion: str, program: str) -> None:
    assert program_of(completion, {}) == program


def test_a_long_line_that_begins_a_block_takes_no_time() -> None:
    started = time.process_time()
    assert program_of("```" + "a" * 100_000, {}).startswith("```")
    assert program_of("```" + " " * 100_000, {}).startswith("```")
    assert time.process_time() - started < 0.5


def test_a_prompt_that_is_the_beginning_is_put_in_front() -> None:
    hidden = {"prefix": "import math\ndef f(x):\n    '''Doc.'''\n", "entry_point": "f"}
    assert program_of("    return x", hidden) == hidden["prefix"] + "    return x"
    whole = program_of("```python\ndef f(x):\n    return math.sqrt(x)\n```", hidden)
    assert whole.endswith("def f(x):\n    return math.sqrt(x)\n")
    space: dict[str, object] = {}
    exec(whole, space)
    assert space["f"](4) == 2  # type: ignore[operator]


@settings(max_examples=40)
@given(JSON)
def test_json_is_the_same_as_itself(value: object) -> None:
    assert same(value, json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0, None), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("1", 1), (1, 2), (1.0, 1.1), ([], {})],
)
def test_json_is_not_the_same_as_something_else(one: object, other: object) -> None:
    assert not same(one, other)
    assert not same(other, one)


def test_tests_are_read_or_refused() -> None:
    tests = read_tests(["assert x", {"call": "f", "args": [1], "result": None}, {"input": "", "output": "1"}])
    assert tests == (Statement("assert x"), Call("f", (1,), None), Stream("", "1"))
    for wrong in ([], "assert x", [""], [{"call": "f"}], [{"input": 1, "output": ""}], None):
        with pytest.raises(ValueError, match="test"):
            read_tests(wrong)
    with pytest.raises(UsageError, match="problem p has no tests"):
        CodeRewards().rewards([Problem("p", "")], [""])
