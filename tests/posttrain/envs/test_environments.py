"""Environments, one episode after another."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.envs.debate import consistency, coverage, keyword_score
from gpuherd.posttrain.envs.interface import Environment, EnvironmentOptions, Environments, Step
from gpuherd.posttrain.envs.registry import make_environments
from gpuherd.posttrain.envs.tools import Entry, Library, read_turn
from gpuherd.posttrain.types import Split


def of(kind: str, *problems: Mapping[str, Any], **options: Any) -> Environments:
    return make_environments(EnvironmentOptions(kind, problems=problems, only=Split.TRAIN, **options))


def begun(environments: Environments, seed: int = 0) -> tuple[Environment, str]:
    """An episode of the first problem, and its first words."""
    environment = environments.make()
    observation = environment.reset(environments.problems(Split.TRAIN, None, 0)[0], seed)
    return environment, observation.messages[0].content


def heard(step: Step) -> str:
    return "".join(each.content for each in step.observation.messages)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_code_has_three_attempts_and_hears_what_was_wrong_but_not_what_is_asked() -> None:
    tests = ["assert f(3) == 1234567", "assert f(0) == 0"]
    code = of("code", {"prompt": "Write f.", "tests": tests}, timeout=20.0)
    assert code.most_turns == 3
    assert code.reward_range == (-0.5, 2.0)
    environment, prompt = begun(code)
    assert prompt == "Write f."
    first = environment.step("def f(x): return y")
    assert (first.reward, first.done) == (0.0, False)
    assert heard(first).startswith("0 of 2 tests pass.\n- NameError: name 'y' is not defined\n")
    second = environment.step("```python\ndef f(x): return 0\n```")
    assert heard(second).startswith("1 of 2 tests pass.\n- a wrong result")
    assert "1234567" not in heard(first) + heard(second)
    third = environment.step("def f(x): return 0 if x == 0 else 1 / 0")
    assert (third.reward, third.done, third.correct, heard(third)) == (0.0, True, False, "")
    environment, _ = begun(code)
    right = environment.step("def f(x): return 1234567 if x else 0")
    assert (right.reward, right.done, right.correct) == (2.0, True, True)
    code.close()


def test_math_has_two_attempts() -> None:
    maths = of("math", {"question": "A half and a half?", "answer": "1"})
    environment, prompt = begun(maths)
    assert prompt.startswith("Problem:\n\nA half and a half? Write")
    first = environment.step("I can't")
    assert (first.reward, first.done) == (0.0, False)
    assert heard(first).startswith("No result can be found")
    second = environment.step("1/2 = .5\n.5 + .5 = 1\nso \\boxed{1}")
    assert (second.reward, second.done, second.correct) == (1.2, True, True)
    environment, _ = begun(maths)
    assert heard(environment.step("It is 2")).startswith("That is not the right result")
    assert environment.step("It is 3").reward == 0.0
    environment, _ = begun(maths)
    cut = environment.step("none")
    assert (cut.reward, cut.if_cut, cut.correct) == (0.0, -0.3, False)
    assert environment.step("none").reward == -0.3
    maths.close()


def test_tools_are_called_and_paid_for_once() -> None:
    tools = of("tool", {"question": "Root of 16?", "answer": "4", "tools": ["calculator"]}, timeout=20.0)
    environment, prompt = begun(tools)
    assert prompt.endswith("Question: Root of 16?\n")
    assert "- python: runs a Python program" in prompt
    used = environment.step(call("calculator", expression="sqrt(16)"))
    assert (used.reward, heard(used)) == (0.3, "<tool_result>4.0</tool_result>")
    again = environment.step(call("calculator", expression="sqrt(16") + call("python", code="print(2 + 2)"))
    assert math.isclose(again.reward, -0.1)
    assert heard(again) == "<tool_result>error: ')' is missing</tool_result>\n<tool_result>4\n</tool_result>"
    end = environment.step("<answer>4.0</answer>")
    assert (end.correct, end.done) == (True, True)
    assert math.isclose(end.reward, 0.5 + 0.3 + 0.2 / 3)
    tools.close()


def test_calls_that_are_none_cost_and_do_nothing() -> None:
    tools = of("tool", {"question": "?", "answer": "x", "tools": []}, max_attempts=2)
    environment, _ = begun(tools)
    wrong = [call("shell", cmd="id"), "<tool_call>{}</tool_call>", "<tool_call>nothing</tool_call>"]
    step = environment.step("".join([*wrong, call("calculator", expr="1")]))
    assert math.isclose(step.reward, -0.2 - 0.1 - 0.1 - 0.1)
    assert heard(step).count("error:") == 4
    last = environment.step("I give up")
    assert (last.reward, last.done, last.correct) == (-0.1, True, False)
    environment, _ = begun(tools)
    at_once = environment.step("<answer>x</answer>")
    assert math.isclose(at_once.reward, 1.0)
    lowest, highest = tools.reward_range
    assert lowest <= -0.6
    assert highest >= 1.0


def test_what_a_turn_says_is_read() -> None:
    turn = read_turn("a <answer>1</answer> b <answer> 2 </answer>" + "<tool_call>[]</tool_call>" * 9)
    assert turn.answer == "2"
    assert len(turn.calls) == 4
    assert read_turn("<tool_call>" + "[" * 5000 + "</tool_call>").calls[0].name is None


def test_marks_that_are_left_open_take_no_time() -> None:
    started = time.process_time()
    assert read_turn("<tool_call>" * 30_000 + "<answer>" * 30_000).calls == ()
    assert time.process_time() - started < 0.5


def test_questions_of_a_task_are_asked_with_the_tools() -> None:
    tools = make_environments(EnvironmentOptions("tool", dataset="arithmetic", settings={"tools": ["calculator"]}))
    problem = tools.problems(Split.HELDOUT, 1, 0)[0]
    assert problem.prompt.startswith("You can use these tools:\n- calculator: ")
    assert problem.prompt.endswith(f"Question: {problem.id}=\n")
    environment = tools.make()
    environment.reset(problem, 0)
    assert environment.step(f"<answer>{problem.hidden['value']}</answer>").correct


def test_a_library_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "library.jsonl"
    entries = [
        {"title": "Paris", "text": "The capital of France."},
        {"title": "Bern", "text": "The capital of Switzerland."},
        {"title": "Cheese", "text": "It is eaten in France and Switzerland."},
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in entries))
    settings = {"tools": ["lookup"], "library": str(path)}
    tools = of("tool", {"question": "Capital?", "answer": "Bern", "tools": ["lookup"]}, settings=settings)
    environment, _ = begun(tools)
    step = environment.step(call("lookup", query="capital of Switzerland?"))
    assert heard(step) == "<tool_result>Bern: The capital of Switzerland.</tool_result>"
    assert heard(environment.step(call("lookup", query="xyz"))) == "<tool_result>nothing fits</tool_result>"
    assert (
        heard(environment.step(call("python", code="1")))
        == "<tool_result>error: there is no tool 'python'</tool_result>"
    )
    library = Library([Entry(str(number), "word " * number) for number in range(1, 4)])
    assert [each.title for each in library.find("word", 2)] == [each.title for each in library.find("WORD", 2)]
    path.write_text('{"title": 1}\n')
    with pytest.raises(UsageError, match="line 1: title and text"):
        of("tool", {"question": "?", "answer": "1"}, settings=settings)
    with pytest.raises(UsageError, match="belong together"):
        of("tool", {"question": "?", "answer": "1"}, settings={"tools": ["lookup"]})


def test_a_debate_is_judged_by_rules_that_are_named() -> None:
    debates = of(
        "debate",
        {"topic": "Tests first.", "points": ["speed", "fewer faults"], "against": ["They cost time."]},
        settings={"words": 4},
    )
    environment, prompt = begun(debates, seed=1)
    assert prompt.startswith("Debate: Tests first.\nArgue ")
    sides = {begun(debates, seed)[1].split()[4] for seed in range(20)}
    assert sides == {"for", "against"}
    first = environment.step("Because data shows speed")
    assert (first.reward, first.info["judge"], first.info["score"]) == (0.0, "keyword rules", 1.0)
    assert heard(first) == "The other side says: They cost time.\nAnswer."
    assert math.isclose(first.if_cut, 0.6 + 0.2 + 0.2 * 0.5)
    second = environment.step("Because data shows speed")
    assert heard(second).startswith("The other side is not convinced")
    end = environment.step("speed")
    assert end.done
    mean = (1 + 1 + 0.25 / 3) / 3
    assert math.isclose(end.reward, 0.6 * mean + 0.2 * (1 + 0.25) / 2 + 0.2 * 0.5)
    assert end.correct is None


def test_rules_of_words() -> None:
    assert keyword_score("", 10) == 0
    assert math.isclose(keyword_score("one two three 4 therefore", 8), (0.5 + 1 + 1) / 3)
    assert consistency(["a b", "b c", "b c"]) == (1 / 3 + 1) / 2
    assert consistency(["a"]) == 1.0
    assert coverage("we have speed", ["speed", "few faults"]) == 0.5
    assert coverage("", []) == 1.0


def test_rewards_are_shaped_turn_by_turn() -> None:
    plain, shaped = (
        of("math", {"question": "1+1?", "answer": "2"}, **options)
        for options in ({}, {"reward_scale": 2.0, "reward_bias": -0.1, "reward_clip": 1.5})
    )
    environment, _ = begun(shaped)
    assert math.isclose(environment.step("3").reward, -0.1)
    assert environment.step("2").reward == 1.5
    fresh, _ = begun(shaped)
    step = shaped.step_all([fresh], ["no idea"])[0]
    assert step.reward == -0.1
    assert math.isclose(step.reward + step.if_cut, 2 * -0.3 - 0.1)
    assert plain.reward_range == (-0.3, 1.2)
    low, high = shaped.reward_range
    assert math.isclose(low, 2 * -0.3 - 2 * 0.1)
    assert math.isclose(high, 2 * 1.2 - 0.1)


def test_a_task_is_an_environment_of_one_turn() -> None:
    options = EnvironmentOptions("task", dataset="arithmetic", settings={"digits": 1})
    environments = make_environments(options)
    problem = environments.problems(Split.TEST, 1, 0)[0]
    environment = environments.make()
    assert environment.reset(problem, 0).messages[0].content == problem.prompt
    step = environment.step(problem.answers[0])
    assert (step.reward, step.done, step.correct) == (1.0, True, True)


def test_files_and_tasks_are_where_problems_are_from(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f"{json.dumps({'question': f'{n}+0?', 'answer': str(n)})}\n" for n in range(20)))
    maths = make_environments(EnvironmentOptions("math", dataset=str(path)))
    assert [len(maths.problems(split, None, 0)) for split in Split] == [16, 2, 2]
    sums = make_environments(EnvironmentOptions("math", dataset="arithmetic"))
    environment = sums.make()
    problem = sums.problems(Split.HELDOUT, 1, 0)[0]
    environment.reset(problem, 0)
    assert environment.step(f"= {problem.answers[0]}").reward == 1.0


class Own:
    """What somebody writes himself."""

    def __init__(self, greeting: str):
        self.name, self.verifiable, self.reward_range, self.most_turns = greeting, False, (0.0, 1.0), 1

    def problems(self, *_: object) -> list[object]:
        return []

    make = step_all = close = problems


def test_ones_own_class_is_made_by_its_dotted_name() -> None:
    own = make_environments(
        EnvironmentOptions("custom", custom_class=f"{__name__}.Own", custom_kwargs={"greeting": "hello"})
    )
    assert own.name == "hello"
    for name, told in (
        ("no.such.Class", "No module"),
        ("json.Nothing", "Nothing"),
        ("json.JSONDecoder", "has no name"),
    ):
        with pytest.raises(UsageError, match=told):
            make_environments(EnvironmentOptions("custom", custom_class=name))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"env_type": "maths"}, "did you mean math"),
        ({"env_type": "custom"}, "custom_class"),
        ({"env_type": "math", "max_attempts": 0}, "max_attempts=0"),
        ({"env_type": "math", "timeout": 0.0}, "timeout=0"),
        ({"env_type": "math", "reward_clip": -1.0}, "reward_clip"),
        ({"env_type": "math", "reward_scale": 0.0}, "reward_scale"),
        ({"env_type": "math"}, "dataset=TASK or FILE"),
        ({"env_type": "task"}, "dataset=TASK or FILE"),
        ({"env_type": "task", "dataset": "arithmetic", "max_attempts": 2}, "one turn"),
        ({"env_type": "math", "dataset": "a", "problems": ()}, "leave one out"),
        ({"env_type": "math", "dataset": "gsm9k"}, "did you mean gsm8k"),
        ({"env_type": "debate", "problems": ({"topic": "x"},), "settings": {"word": 3}}, "did you mean debate.words"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_environments(EnvironmentOptions(**options))


def test_problems_of_one_split_are_of_no_other() -> None:
    maths = of("math", {"question": "1?", "answer": "1"}, task=TaskOptions(processes=1))
    with pytest.raises(UsageError, match="environment math has no test problems"):
        maths.problems(Split.TEST, None, 0)
    with pytest.raises(UsageError, match="2 problems were asked for and there are 1"):
        maths.problems(Split.TRAIN, 2, 0)
