"""Problems of one's own in a file or a data set of the Hub: prompts with answers, prompts of preferences, or programs
with tests.

What a file holds is seen by its first row: ``tests`` makes it programs (``benchmarks``); ``chosen`` and ``rejected``
make it preferences, whose prompts are asked and whose chosen completions are imitated, scored by a reward model; else a
row has ``prompt`` (or ``question``) and perhaps ``answers`` (``answer``, ``completion``) and ``id``, or ``messages``: a
conversation. A prompt is a text or a conversation, system's turn first, that ends with the user's.

Of a conversation the last answer is asked for that is a text, behind all that stands before it. Where the assistant has
several turns, or there are tools, the problem knows the whole conversation (``preference_rows.conversation_of``): SFT
imitates all of the assistant's turns. One whose assistant calls tools alone is there to be imitated, not to be asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.benchmarks import programs_of
from gpuherd.posttrain.data.dataset import Checked, DataTask, ParsedRow, Part, Reading, Source, by_model, read_rows
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.preference_rows import (
    CONVERSATION,
    Conversation,
    Messages,
    compared,
    imitated,
    text_turns,
)
from gpuherd.posttrain.rewards.answers import MathRewards, WordRewards
from gpuherd.posttrain.rewards.function import COLUMNS
from gpuherd.posttrain.rewards.reward_model import ModelRewards
from gpuherd.posttrain.types import Problem, Scoring
from gpuherd.qa.data.questions import BadRow

Rule = Literal["exact", "contains", "squad", "rouge", "math", "model"]
_PLAIN = "{prompt}"
_COLUMNS = frozenset(
    {"id", "prompt", "question", "answers", "answer", "completion", "messages", "tools", "chosen", "rejected"}
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a file is asked and scored.

    Attributes:
        reward: a rule of words (exact, contains, squad, rouge), math, or model; None: model where ``reward_model`` is
            said or the file holds preferences, else exact.
        template: the prompt, with ``{prompt}`` where the row's goes.
        label: whose logit is the reward, of a reward model with several outputs.
        test_data: a file of test problems; without one the file's last tenth is the test.
    """

    reward: Rule | None = None
    template: str = _PLAIN
    label: str | None = None
    test_data: str | None = None

    def __post_init__(self) -> None:
        if _PLAIN not in self.template:
            raise UsageError("template has no {prompt} in it, and would ask the same of every row")


def make_of_file(path: Path, options: TaskOptions) -> DataTask:
    """The task of a file, which is looked into. Raises UsageError, MissingQuestions, BadQuestions."""
    first = _first_row(path)
    if _is_program(first):
        return programs_of(path.stem, str(path), options)
    settings = read(Settings, options.settings, path.name)
    preferences = {"chosen", "rejected"} <= first.keys()
    scoring = _scoring(settings, options, preferences, path)
    by_function = options.reward is not None  # which may take any column
    columns: frozenset[str] = frozenset() if by_function else _COLUMNS
    source = Reading(str(path), settings.test_data).of(Source(None, None, columns, divided=True))

    def parse(row: Mapping[str, Any]) -> ParsedRow:
        found = parse_preference(row) if preferences else parse_row(row)
        columns = {COLUMNS: json.dumps(row, default=str)} if by_function else {}
        return replace(found, hidden={**found.hidden, **columns})

    def problem(found: Checked) -> Problem:
        whole = CONVERSATION in found.hidden
        if not found.answers and not by_function and not isinstance(scoring, ModelRewards) and not whole:
            raise BadRow("there is no answer to compare with")
        if whole and settings.template != _PLAIN:
            raise BadRow("template is of one prompt, and its conversation has several turns of the assistant or tools")
        if found.chat:
            return Problem(found.id, found.question, found.answers, found.hidden, chat=found.chat)
        if not found.messages:
            prompt = settings.template.replace("{prompt}", found.question)
            return Problem(found.id, prompt, found.answers, found.hidden)
        *before, (role, last) = found.messages
        messages = (*before, (role, settings.template.replace("{prompt}", last)))
        return Problem(found.id, _joined(messages), found.answers, found.hidden, messages)

    return DataTask(path.stem, source, parse, problem, scoring)


def holds_programs(path: Path) -> bool:
    """Whether a file's first row is a program with its tests. Raises UsageError, MissingQuestions, BadQuestions."""
    return _is_program(_first_row(path))


def _first_row(path: Path) -> Mapping[str, Any]:
    rows = read_rows(Part(str(path), "train"), None, frozenset())
    return next((row.values for row in rows if row.values), {})


def _is_program(row: Mapping[str, Any]) -> bool:
    return bool({"tests", "test_list", "entry_point"} & row.keys())


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """A prompt with its answers; of messages and completions the answer to imitate. Raises ValueError."""
    if row.get("messages") is not None or row.get("completion") is not None:
        found = imitated(row)
        if isinstance(found, Conversation):
            return _parse_conversation(found, row.get("id"))
        return ParsedRow(*found, id=row.get("id"))
    asked = row.get("prompt", row.get("question"))
    if asked is None:
        raise BadRow("no column prompt (or question)")
    answers = row.get("answers", row.get("answer"))
    prompt = asked if not isinstance(asked, list) else text_turns(asked, "prompt")
    return _prompting(prompt, () if answers is None else answers, row.get("id"))


def _parse_conversation(found: Conversation, name: Any) -> ParsedRow:
    """Its last answer, behind what stands before it. Raises ValueError."""
    place = found.imitated[-1] if found.last_answer is None else found.last_answer
    before, last = found.messages[:place], found.messages[place]
    answers = () if found.last_answer is None else last["content"]
    plain = not found.tools and not any(each.keys() - {"role", "content"} for each in (*before, last))
    hidden = {} if plain and found.imitated == (place,) else {CONVERSATION: found.to_json()}
    if plain and (not hidden or _by_turns([each["role"] for each in before])):
        return replace(_prompting(text_turns(before, "messages"), answers, name), hidden=hidden)
    chat = json.dumps({"messages": before, "tools": found.tools})
    asked = Conversation((*before, last), found.tools, place)
    return ParsedRow(asked.texts[0][0], answers, name, hidden=hidden, chat=chat)


def parse_preference(row: Mapping[str, Any]) -> ParsedRow:
    """The prompt of a preference with its chosen completion. Raises ValueError."""
    prompt, chosen, _ = compared(row)
    return _prompting(prompt, chosen, row.get("id"))


def _prompting(prompt: Any, answers: Any, name: Any) -> ParsedRow:
    """A row that asks a text, one message of the user's, or a conversation that ends with one. Raises BadRow."""
    if not isinstance(prompt, tuple):
        return ParsedRow(prompt, answers, name)
    roles = [role for role, _ in prompt]
    if not _by_turns(roles):
        raise BadRow(
            "its prompt is no conversation that user and assistant have by turns and that ends with the user's: "
            f"{', '.join(roles[:6])}"
        )
    return ParsedRow(_joined(prompt), answers, name, messages=() if roles == ["user"] else prompt)


def _by_turns(roles: Sequence[str]) -> bool:
    """Whether user and assistant speak by turns, behind perhaps the system, and the user last."""
    turns = roles[1:] if roles[0] in ("system", "developer") else roles
    return turns[-1:] == ["user"] and turns == [("user", "assistant")[place % 2] for place in range(len(turns))]


def _joined(messages: Messages) -> str:
    return "\n\n".join(content for _, content in messages)


def _scoring(settings: Settings, options: TaskOptions, preferences: bool, path: Path) -> Scoring:
    if options.reward is not None:
        if settings.reward is not None or settings.label is not None:
            raise UsageError(f"{path.name}: reward={options.reward} scores; leave settings.reward and label out")
        return WordRewards("exact")  # a function takes its place
    rule = settings.reward or ("model" if preferences or options.reward_model else "exact")
    if rule == "math":
        return MathRewards(options.processes)
    if rule != "model":
        return WordRewards(rule)
    if options.reward_model is None:
        raise UsageError(f"{path.name}: its completions are scored by a reward model; reward_model=MODEL says which")
    return by_model(options, options.reward_model, settings.label)
