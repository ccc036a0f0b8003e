"""Tasks of data sets, from local files with the columns that the Hub's have."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task, tasks
from gpuherd.posttrain.types import Split, Task
from gpuherd.qa.data.questions import BadQuestions, MissingQuestions


def written(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> str:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def made(name: str, tmp_path: Path, train: Sequence[Any], test: Sequence[Any], **settings: Any) -> Task:
    files = {"data": written(tmp_path / "train.jsonl", train), "test_data": written(tmp_path / "test.jsonl", test)}
    return make_task(name, TaskOptions({**files, **settings}))


def gsm8k(number: int) -> dict[str, str]:
    return {"question": f"What is {number} and one?", "answer": f"It is {number}+1 = <<x>>.\n#### {number + 1}"}


@pytest.mark.parametrize(
    ("style", "prompt", "answer"),
    [
        (
            "boxed",
            "Problem:\n\nWhat is 7 and one? Write your answer inside \\boxed{}.\n\nSolution:",
            " It is 7+1 = .\nThe answer is \\boxed{8}.",
        ),
        (
            "hashes",
            "Question: What is 7 and one?\nWrite the final answer behind ####.\nAnswer:",
            " It is 7+1 = .\n#### 8",
        ),
        ("plain", "What is 7 and one?", " It is 7+1 = .\n#### 8"),
    ],
)
def test_gsm8k_asks_in_three_ways_and_pays_for_the_number(tmp_path: Path, style: str, prompt: str, answer: str) -> None:
    task = made("gsm8k", tmp_path, [gsm8k(number) for number in range(20)], [gsm8k(100)], prompt=style)
    problems = task.problems(Split.TRAIN, None, 0)
    problem = next(each for each in problems if " 7 " in each.prompt)
    assert (problem.prompt, problem.answers) == (prompt, (answer,))
    said = [problem.answers[0], "8", "\\boxed{8.0}", "#### 8", "The answer is 9", "", "7+1 = 8. Or 9."]
    assert [each.value for each in task.rewards([problem] * 7, said)] == [1, 1, 1, 1, 0, 0, 0]
    task.close()


def test_splits_are_disjoint_and_the_last_tenth_is_held_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [gsm8k(number) for number in range(30)]
    with caplog.at_level(logging.WARNING):
        task = made("gsm8k", tmp_path, rows, [gsm8k(3), gsm8k(100), gsm8k(101)])
        train, heldout, test = (task.problems(split, None, 0) for split in Split)
    assert (len(train), len(heldout), len(test)) == (26, 3, 3)
    ids = [each.id for part in (train, heldout, test) for each in part]
    assert len(set(ids)) == len(ids)
    assert {each.hidden["value"] for each in heldout} == {"28", "29", "30"}
    assert "1 training problems are in the test" in caplog.text
    with pytest.raises(UsageError, match="gsm8k, train: 27 problems were asked for and there are 26"):
        task.problems(Split.TRAIN, 27, 0)


def test_ids_that_count_from_one_in_both_files_are_told_apart(tmp_path: Path) -> None:
    train = [{**gsm8k(number), "id": number} for number in range(4)]
    test = [{**gsm8k(number + 50), "id": number} for number in range(2)]
    task = made("gsm8k", tmp_path, train, test)
    ids = {split: {each.id for each in task.problems(split, None, 0)} for split in Split}
    assert ids[Split.TEST] == {"0", "1"}
    assert ids[Split.TRAIN] == {"train-0", "train-1", "2"}
    assert ids[Split.HELDOUT] == {"3"}


def test_bad_rows_are_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        gsm8k(1),
        "no json",
        {"question": "x?", "answer": "no hashes"},
        {"question": None, "answer": "#### 3"},
        {"question": "y?"},
        gsm8k(1),
        {"question": "\ud800", "answer": "#### 3"},
        gsm8k(2),
    ]
    with caplog.at_level(logging.WARNING):
        task = made("gsm8k", tmp_path, [gsm8k(9)], rows)
        assert len(task.problems(Split.TEST, None, 0)) == 2
    assert "6 of 8 rows are left out; line 2: no JSON" in caplog.text
    empty = made("gsm8k", tmp_path, [gsm8k(9)], rows[1:5])
    with pytest.raises(BadQuestions, match="none of its 4 rows is a problem; line 1"):
        empty.problems(Split.TEST, None, 0)
    with pytest.raises(MissingQuestions, match="there is no file"):
        make_task("gsm8k", TaskOptions({"test_data": str(tmp_path / "none.jsonl")})).problems(Split.TEST, 1, 0)


def test_math_takes_results_from_solutions(tmp_path: Path) -> None:
    train = [
        {"problem": "Halve $x$.", "solution": "So \\boxed{\\frac{x}{2}}.", "level": "Level 1"},
        {"problem": "Nothing", "solution": "boxless"},
        {"problem": "Twice.", "solution": "\\boxed{2}"},
    ]
    test = [{"problem": "Third.", "answer": "\\frac{1}{3}", "solution": "s", "unique_id": "test/1.json"}]
    task = made("math", tmp_path, train, test)
    problem = task.problems(Split.TEST, 1, 0)[0]
    assert (problem.id, problem.hidden["value"]) == ("test/1.json", "\\frac{1}{3}")
    half = next(each for each in task.problems(Split.TRAIN, None, 0))
    assert half.hidden["value"] in ("\\frac{x}{2}", "2")
    assert [each.value for each in task.rewards([problem] * 3, ["\\boxed{1/3}", "\\boxed{3}", "2/6"])] == [1, 0, 1]
    task.close()


def test_aime_says_where_its_test_is(tmp_path: Path) -> None:
    rows = [{"problem": f"p{number}", "answer": f"0{number}", "solution": "s", "id": number} for number in range(3)]
    file = written(tmp_path / "aime.jsonl", rows)
    train = make_task("aime22to24", TaskOptions({"data": file}))
    assert len(train.problems(Split.TRAIN, None, 0)) == 2
    with pytest.raises(UsageError, match="aime22to24 has no test problems; test_data=FILE"):
        train.problems(Split.TEST, None, 0)
    test = make_task("AIME2025", TaskOptions({"test_data": file}))
    problem = test.problems(Split.TEST, 1, 0)[0]
    assert test.rewards([problem], [f"\\boxed{{{int(problem.hidden['value'])}}}"])[0].correct
    with pytest.raises(UsageError, match="no train problems; data=FILE"):
        test.problems(Split.TRAIN, 1, 0)


def test_beginnings_of_reviews_and_posts(tmp_path: Path) -> None:
    review = " ".join(f"w{number}" for number in range(70)) + "<br /><br />end"
    imdb = made("imdb", tmp_path, [{"text": review, "label": 1}], [{"text": f"x {review}"}, {"text": "short"}])
    problem = imdb.problems(Split.TEST, None, 0)[0]
    assert len(problem.prompt.split()) == 60
    assert problem.answers[0].endswith(" w69 end")
    assert not imdb.verifiable
    tldr = made(
        "tldr", tmp_path, [{"prompt": "POST: a\n\nTL;DR: ", "completion": " b"}], [{"prompt": "c", "completion": "d"}]
    )
    problem = tldr.problems(Split.TRAIN, None, 0)[0]
    assert (problem.prompt, problem.answers) == ("POST: a\n\nTL;DR:", (" b",))


def test_every_name_makes_a_task_without_reading_anything() -> None:
    for name in tasks():
        if name == "code":
            with pytest.raises(UsageError, match="data=FILE"):
                make_task(name)
        else:
            task = make_task(name)
            low, high = task.reward_range
            assert low < high
            task.close()


def test_names_that_there_are_not_are_told_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean gsm8k"):
        make_task("gsm8")
    with pytest.raises(UsageError, match="no such file of problems"):
        make_task("here/problems.jsonl")
    with pytest.raises(UsageError, match="reward_batch_size=0"):
        TaskOptions(reward_batch_size=0)
    with pytest.raises(UsageError, match=r"gsm8k\.promt; did you mean gsm8k\.prompt"):
        make_task("gsm8k", TaskOptions({"promt": "boxed"}))
