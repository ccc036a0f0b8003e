"""The questions of a run with their prompts, read from its folder by those who answer them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from gpuherd.lm.backend import PromptTokens
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.prompts.maker import MadePrompt
from gpuherd.qa.record import Prompted, Question
from gpuherd.qa.record_json import question_of
from gpuherd.qa.runs import DamagedRun
from gpuherd.qa.span import opens_thought


@dataclass(frozen=True, slots=True)
class Item:
    """A question of a run with its prompt; ``in_thought``: the prompt ends with an open thought."""

    number: int
    question: Question
    prompt: PromptTokens
    prompted: Prompted
    in_thought: bool = False


def read_items(folder: QADirectory, wanted: Iterable[int]) -> dict[int, Item]:
    """The questions with these numbers and their prompts. Raises DamagedRun."""
    numbers = set(wanted)
    found: dict[int, Item] = {}
    try:
        with folder.questions.open("rb") as questions, folder.prompts.open("rb") as prompts:
            for number, (line, other) in enumerate(zip(questions, prompts, strict=True)):
                if number in numbers:
                    found[number] = _item(number, line, other)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DamagedRun(f"{folder.root}: its questions or prompts can't be read: {problem}") from None
    if len(found) != len(numbers):
        raise DamagedRun(f"{folder.root} has no question {min(numbers - found.keys())}, from 0")
    return found


def _item(number: int, question_line: bytes, prompt_line: bytes) -> Item:
    question, prompt = question_of(json.loads(question_line)), json.loads(prompt_line)
    if prompt["id"] != question.id:
        raise ValueError(f"the prompt in line {number + 1} is of another question")
    made = MadePrompt(prompt["text"], tuple(int(each) for each in prompt["token_ids"]), int(prompt["cut"]))
    return Item(number, question, PromptTokens(question.id, made.token_ids), made.prompted, opens_thought(made.text))
