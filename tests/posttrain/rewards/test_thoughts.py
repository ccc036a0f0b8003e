"""Rewards read the answer and not the thought before it; a thought that never closes is no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.tiny import character_tokenizer

from gpuherd.posttrain.data.arithmetic import make as make_arithmetic
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.star_graph import make as make_star_graph
from gpuherd.posttrain.envs.math import Settings, attempt
from gpuherd.posttrain.envs.tools import Turn, read_turn
from gpuherd.posttrain.envs.turns import Turns
from gpuherd.posttrain.eval.answers import answer_of
from gpuherd.posttrain.rewards.code import program_of
from gpuherd.posttrain.rewards.math import MathRewards
from gpuherd.posttrain.rewards.words import WordRewards
from gpuherd.posttrain.rollout.prompting import Prompting
from gpuherd.posttrain.types import Problem
from gpuherd.qa.span import answer_in

SUM = Problem("2+3", "2+3=", ("5",), {"value": "5"})
PATH = Problem("g", "5,2|3,8|5,3|2,7/5,8=", ("5,3,8",))
SCORERS: dict[str, tuple[Callable[[], Any], Problem, str, str]] = {
    "math": (lambda: MathRewards(1), SUM, "5", "7"),
    "exact": (lambda: WordRewards("exact"), SUM, "5", "7"),
    "contains": (lambda: WordRewards("contains"), SUM, "5", "7"),
    "squad": (lambda: WordRewards("squad"), SUM, "5", "7"),
    "arithmetic": (lambda: make_arithmetic(TaskOptions()), SUM, "5", "7"),
    "star graph": (lambda: make_star_graph(TaskOptions()), PATH, "5,3,8", "5,2,7"),
}


@pytest.mark.parametrize("name", SCORERS)
def test_the_answer_earns_and_no_thought_does(name: str) -> None:
    make, problem, right, wrong = SCORERS[name]
    texts = {
        right: True,
        f"<think>{wrong}?</think>\n{right}": True,
        f"{wrong}?</think>{right}": True,  # the template opened it
        f"<think>{right}</think>{wrong}": False,
        f"<think>perhaps {right}": False,
        f"<think>{right}</think>": False,
        f"<think>{right}": False,
    }
    scorer = make()
    try:
        found = scorer.rewards([problem] * len(texts), list(texts))
    finally:
        scorer.close()
    assert [each.correct for each in found] == list(texts.values())
    assert [each.value > 0 for each in found] == list(texts.values())


def test_programs_votes_and_attempts_read_the_answer() -> None:
    block = "```python\nx = {}\n```"
    assert program_of(f"<think>{block.format(1)}</think>\n{block.format(2)}\n{block.format(3)}", {}) == "x = 3\n"
    assert program_of(f"{block.format(2)}", {}) == "x = 2\n"
    assert program_of(f"<think>{block.format(1)}", {}) == ""
    assert answer_of("<think>6 or 7?</think> #### 7") == "7"
    assert answer_of("<think>so 6", number=True) is None
    # The steps of a derivation are a matter of form, wherever they stand.
    derived = attempt("<think>2+3=5\n5=5</think>5", True, Settings())
    assert derived.reward.parts["steps"] > 0
    assert attempt("<think>\\boxed{5}", False, Settings()).reward.parts["unparsable"] < 0


def test_a_template_that_opens_a_thought_is_known(tmp_path: Path) -> None:
    """The text of an answer then begins inside it: without the tag, a thought that never closes would be an answer."""

    tokenizer = character_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}<think>\n"
    assert Prompting(tokenizer, chat=True).opened == Turns(tokenizer, chat=True).opened == "<think>"
    assert Prompting(tokenizer, chat=False).opened == ""
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    assert Prompting(tokenizer, chat=True).opened == ""


def test_calls_of_a_thought_are_none() -> None:
    thinking = "<think>maybe <answer>4</answer></think><answer>5</answer>"
    assert read_turn(answer_in(thinking)) == Turn((), "5")
