"""Files of one's own."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.qa import small_models
from tests.qa.conftest import made_once

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.rlcr import RLCR
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.preference_rows import Conversation, conversation_of
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.episodes import Turns
from gpuherd.posttrain.envs.registry import SingleTurn
from gpuherd.posttrain.preference.data import Demonstration, read_demonstrations
from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer
from gpuherd.posttrain.rollout.sampler import Prompting
from gpuherd.posttrain.types import Problem, Split
from gpuherd.qa.data.questions import BadQuestions


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose tokenizer has a chat template. Read only."""
    return made_once(
        tmp_path_factory, "chatting", lambda folder: small_models.random_llama(folder, chat=small_models.CHAT_TEMPLATE)
    )


def file_of(tmp_path: Path, rows: Sequence[Mapping[str, Any]], name: str = "own.jsonl") -> str:
    path = tmp_path / name
    text = "".join(f"{json.dumps(row)}\n" for row in rows) if name.endswith("l") else json.dumps(rows)
    path.write_text(text)
    return str(path)


CAPITALS = [{"question": f"Capital {number}?", "answers": [f"City {number}", f"Town {number}"]} for number in range(50)]


@pytest.mark.parametrize("name", ["own.jsonl", "own.json"])
def test_a_file_is_divided_into_its_splits(tmp_path: Path, name: str) -> None:
    task = make_task(file_of(tmp_path, CAPITALS, name), TaskOptions({"template": "Q: {prompt}\nA:"}))
    assert [len(task.problems(split, None, 0)) for split in Split] == [40, 5, 5]
    assert task.name == "own"
    problem = next(each for each in task.problems(Split.TEST, None, 0) if "49" in each.prompt)
    assert problem.prompt == "Q: Capital 49?\nA:"
    said = ["City 49", "the town 49.", "City 4", ""]
    assert [each.value for each in task.rewards([problem] * 4, said)] == [1, 1, 0, 0]
    assert task.verifiable


def test_a_file_may_have_a_test_of_its_own(tmp_path: Path) -> None:
    test = file_of(tmp_path, [{"prompt": "Capital 3?", "answer": "City 3"}], "test.jsonl")
    task = make_task(file_of(tmp_path, CAPITALS), TaskOptions({"test_data": test}))
    assert [len(task.problems(split, None, 0)) for split in Split] == [44, 5, 1]


def test_rules_are_chosen(tmp_path: Path) -> None:
    path = file_of(tmp_path, [{"prompt": "Half?", "answer": "1/2"}, {"prompt": "Two thirds?", "answer": "2/3"}])
    problem = make_task(path).problems(Split.TRAIN, 1, 0)[0]
    values = {}
    for rule in ("exact", "contains", "squad", "rouge", "math"):
        task = make_task(path, TaskOptions({"reward": rule}))
        values[rule] = task.rewards([problem], ["it is 0.5"])[0].value
        assert task.verifiable == (rule in ("exact", "contains", "math"))
        task.close()
    # A reference that is a number is compared by its value.
    assert values == {"exact": 0, "contains": 1, "squad": 0.5, "rouge": 0.5, "math": 1}
    partly = make_task(path, TaskOptions({"reward": "squad"})).rewards([problem], ["0.5 maybe"])[0]
    assert math.isclose(partly.value, 2 / 3)
    with pytest.raises(UsageError, match=r"own.jsonl.reward=exakt: .* did you mean exact"):
        make_task(path, TaskOptions({"reward": "exakt"}))
    with pytest.raises(UsageError, match="template has no"):
        make_task(path, TaskOptions({"template": "hello"}))


def test_preferences_are_asked_for_their_prompts(tmp_path: Path) -> None:
    """Rows that are no preference for a training are none here either."""
    asked_c = {"role": "user", "content": "c"}
    rows: list[Mapping[str, Any]] = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {
            "prompt": [{"role": "user", "content": "b"}],
            "chosen": [{"role": "assistant", "content": "fine"}],
            "rejected": [{"role": "assistant", "content": "poor"}],
        },
        {
            "chosen": [asked_c, {"role": "assistant", "content": "well"}],
            "rejected": [asked_c, {"role": "assistant", "content": "ill"}],
        },
        {"chosen": [asked_c, {"role": "assistant", "content": "well"}], "rejected": "x"},
        {"prompt": "the same", "chosen": "g", "rejected": "g"},
        {"prompt": "none", "chosen": "g"},
        {"prompt": [{"role": "user", "content": "d"}] * 2, "chosen": "e", "rejected": "f"},
    ]
    path = file_of(tmp_path, rows)
    with pytest.raises(UsageError, match="reward_model=MODEL"):
        make_task(path)
    task = make_task(path, TaskOptions(reward_model="org/model"))
    problems = [each for split in Split for each in task.problems(split, None, 0)]
    assert {each.prompt: each.answers for each in problems} == {"a": ("good",), "b": ("fine",), "c": ("well",)}
    assert not task.verifiable


def test_prompts_without_answers_need_a_reward_model(tmp_path: Path) -> None:
    path = file_of(tmp_path, [{"prompt": "Write a poem."}])
    with pytest.raises(BadQuestions, match="no answer to compare with"):
        make_task(path).problems(Split.TRAIN, 1, 0)
    task = make_task(path, TaskOptions(reward_model="org/model"))
    assert task.problems(Split.TRAIN, 1, 0)[0].answers == ()
    for number in (math.inf, math.nan):
        with pytest.raises(BadQuestions, match=f"the answer is {number}, which is no number"):
            make_task(file_of(tmp_path, [{"prompt": "How many?", "answer": number}])).problems(Split.TRAIN, 1, 0)
    empty = file_of(tmp_path, [{"other": 1}], "other.jsonl")
    with pytest.raises(BadQuestions, match="no column prompt"):
        make_task(empty).problems(Split.TRAIN, 1, 0)


def test_programs_are_known_by_their_tests(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = [
        {"prompt": "Write f.", "tests": ["assert f(1) == 2"], "solution": "def f(x):\n    return x + 1\n"},
        {"prompt": "Bad", "tests": []},
        {"prompt": "Also bad", "tests": [3]},
        {"test_list": ["assert nothing is asked"]},
        {"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "code": "def add(a, b): return a + b", "task_id": 7},
        {
            "prompt": "def twice(x):\n    '''Doubles.'''\n",
            "entry_point": "twice",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
            "canonical_solution": "    return 2 * x\n",
            "task_id": "HumanEval/1",
        },
    ]
    task = make_task(file_of(tmp_path, rows), TaskOptions({"timeout": 20.0}))
    problems = {each.id: each for split in Split for each in task.problems(split, None, 0)}
    assert len(problems) == 3
    assert problems["7"].prompt == "Add.\nYour code should pass these tests:\nassert add(1, 2) == 3\n"
    known = [problems["7"], problems["7"], problems["HumanEval/1"]]
    said = [known[0].answers[0], "pass", known[2].answers[0]]
    assert [each.value for each in task.rewards(known, said)] == [1, 0, 1]


def test_messages_and_completions_are_asked(tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "b"}, {"role": "assistant", "content": "fine"}
    rows: list[Mapping[str, Any]] = [
        {"prompt": "a", "completion": "good"},
        {"messages": [user, assistant]},
        {"text": "no prompt"},
        {"messages": [user]},
    ]
    task = make_task(file_of(tmp_path, rows))
    problems = [each for split in Split for each in task.problems(split, None, 0)]
    assert {each.prompt: each.answers for each in problems} == {"a": ("good",), "b": ("fine",)}
    assert not any(conversation_of(each) for each in problems)  # one answer behind a prompt is all there is


def test_a_folder_laid_out_like_a_data_set_of_the_hub(tmp_path: Path) -> None:
    file_of(tmp_path, CAPITALS, "train.jsonl")
    task = make_task(str(tmp_path))
    assert [len(task.problems(split, None, 0)) for split in Split] == [40, 5, 5]


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_tables_are_files_of_rows_too(tmp_path: Path, delimiter: str) -> None:
    """A cell that is a JSON list is that list, whatever stands between cells."""
    path = tmp_path / "own.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(["prompt", "answers"])
        table.writerows([[f"Capital, of {number}?", json.dumps([f"City {number}", "x"])] for number in range(10)])
    task = make_task(str(path))
    assert [len(task.problems(split, None, 0)) for split in Split] == [8, 1, 1]
    problem = task.problems(Split.TEST, None, 0)[0]
    assert (problem.prompt, problem.answers) == ("Capital, of 9?", ("City 9", "x"))
    talk = tmp_path / "talk.csv"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with talk.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "messages"], ["one", json.dumps(turns)]])
    assert read_demonstrations(talk).shown == (Demonstration("one", Conversation(tuple(turns))),)


def test_a_prompt_may_be_a_conversation(tmp_path: Path, chatting: Path) -> None:
    """Written by the chat template turn by turn, also as an environment; without one as texts."""
    said = ({"system": "Be brief."}, {"user": "a"}, {"assistant": "b"}, {"user": "c"})
    turns = [{"role": role, "content": text} for each in said for role, text in each.items()]
    answered = [*turns, {"role": "assistant", "content": "d"}]
    rows: list[Mapping[str, Any]] = [
        {"prompt": turns, "answer": "d", "id": "p"},
        {"prompt": turns[1:2], "answer": "e", "id": "q"},
        {"prompt": turns[:3], "answer": "f"},
        {"prompt": [turns[1], turns[3]], "answer": "f"},
        {"prompt": turns[:1], "answer": "f"},
        {"prompt": [{"role": "bot", "content": "x"}], "answer": "f"},
        {"prompt": answered[:3], "completion": answered[4:]},
        {"messages": answered[3:], "id": "r"},
    ]
    task = make_task(file_of(tmp_path, rows), TaskOptions({"template": "Q: {prompt}"}))
    problems = {each.id: each for split in Split for each in task.problems(split, None, 0)}
    assert problems.keys() == {"p", "q", "r"}
    whole = (("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "Q: c"))
    assert problems["p"] == Problem("p", "Be brief.\n\na\n\nb\n\nQ: c", ("d",), {}, whole)
    assert problems["q"] == Problem("q", "Q: a", ("e",))
    assert problems["r"] == Problem("r", "Q: c", ("d",))
    tokenizer = load_tokenizer(str(chatting))
    by_template, plainly = (Prompting(tokenizer, chat=chat) for chat in (True, False))
    asked = [{"role": role, "content": content} for role, content in whole]
    assert by_template.of(problems["p"]) == by_template.of_messages(asked)
    assert tokenizer.decode(plainly.of(problems["p"])) == f"<s>{problems['p'].prompt}"
    for chat, prompts in ((True, by_template), (False, plainly)):
        shown = SingleTurn(task).make().reset(problems["p"], 0).messages
        assert Turns(tokenizer, chat=chat).prompt(shown) == prompts.of(problems["p"])


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_the_last_answer_of_a_conversation_is_asked_for_behind_the_others(tmp_path: Path, chatting: Path) -> None:
    talk = [says("system", "Be brief."), says("user", "a"), says("assistant", "b"), says("user", "c")]
    rows: list[dict[str, Any]] = [
        {"id": "silent", "messages": [says("user", "k"), CALL]},
        {"id": "plain", "messages": [*talk, says("assistant", "d")]},
        {"id": "open", "messages": [*talk, says("assistant", "d"), says("user", "never answered")]},
        {"id": "twice", "messages": [says("user", "e"), says("user", "f"), says("assistant", "g")]},
        {"id": "calls", "messages": [says("user", "h"), CALL, says("tool", "7"), says("assistant", "It is 7.")]},
        {"id": "tools", "messages": [says("user", "i"), says("assistant", "j")], "tools": TOOLS},
        {"id": "first", "messages": [says("user", "l"), says("assistant", "m"), says("user", "n"), CALL]},
    ]
    task = make_task(file_of(tmp_path, rows))
    problems = {each.id: each for split in Split for each in task.problems(split, None, 0)}
    assert problems.keys() == {row["id"] for row in rows} - {"open", "twice"}  # one asks as another; one is out of turn
    plain = problems["plain"]
    assert (plain.prompt, plain.answers, plain.chat) == ("Be brief.\n\na\n\nb\n\nc", ("d",), "")
    assert plain.messages == tuple((each["role"], each["content"]) for each in talk)
    told = {name: conversation_of(each) for name, each in problems.items()}
    assert {name: each and each.imitated for name, each in told.items()} == {
        "silent": (1,), "plain": (2, 4), "calls": (1, 3), "tools": (1,), "first": (1, 3),
    }  # fmt: skip
    assert {name: each.answers for name, each in problems.items() if each.chat} == {
        "silent": (), "calls": ("It is 7.",), "tools": ("j",),
    }  # fmt: skip
    assert problems["first"].answers == ("m",) and problems["first"].prompt == "l"  # a call is no text to ask for
    assert task.rewards([problems["calls"]] * 2, ["It is 7.", "8"])[0].value == 1

    # What is asked is how the conversation begins that is imitated, token by token.
    tokenizer = load_tokenizer(str(chatting))
    prompting, writing = Prompting(tokenizer, chat=True), Writing(tokenizer, chat=True)
    for name in ("plain", "tools"):
        conversation = told[name]
        assert conversation is not None
        shown = writing.conversation(name, conversation)
        whole, asked = (*shown.prompt_ids, *shown.ids), prompting.of(problems[name])
        assert whole[: len(asked)] == asked
    assert Conversation.from_json(told["calls"].to_json()) == told["calls"]  # type: ignore[union-attr]
    for refused in (
        lambda: Prompting(tokenizer, chat=False).of(problems["tools"]),
        lambda: SingleTurn(task).make().reset(problems["tools"], 0),
        lambda: RLCR().evaluated(task).problems(Split.TRAIN, None, 0),
    ):
        with pytest.raises(UsageError, match=r"problem \w+ is a conversation"):
            refused()
    with pytest.raises(BadQuestions, match="template is of one prompt, and its conversation has several turns"):
        make_task(file_of(tmp_path, rows[4:5]), TaskOptions({"template": "Q: {prompt}"})).problems(Split.TRAIN, None, 0)


def test_what_says_nothing_is_imitated_and_not_asked_for(tmp_path: Path) -> None:
    rows = [{"messages": [says("user", f"call {number}"), CALL]} for number in range(20)]
    task = make_task(file_of(tmp_path, rows))
    assert [len(task.problems(split, None, 0)) for split in Split] == [16, 0, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "line 1: its messages is neither a text nor a list of messages: it is empty"),
        ({"messages": [says("user", "a"), says("bot", "b")]}, r"line 1: messages\[1\].role is 'bot', none of system,"),
        ({"messages": [says("user", "a")]}, "line 1: it has no turn of the assistant behind another turn"),
        ({"talk": [says("user", "a"), says("assistant", "b")]}, r"line 1: no column prompt \(or question\)"),
        ({"messages": [says("user", "a"), {"role": "assistant"}]}, r"line 1: .* messages\[1\].content is missing"),
    ],
)
def test_a_row_that_is_no_conversation_is_told_with_its_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(BadQuestions, match=message):
        make_task(file_of(tmp_path, [row])).problems(Split.TRAIN, None, 0)
