"""Preferences are read from files; bad rows are refused with their lines and harm no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.preference.data import Preference, Refused, preference_of, read_preferences
from gpuherd.qa.data.questions import BadQuestions, DataRow, MissingQuestions


def says(*turns: str) -> list[dict[str, str]]:
    """Turns of user and assistant by turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


GOOD = {"prompt": "p", "chosen": "yes", "rejected": "no"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def test_a_file_of_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "id": "seven"}, {**GOOD, "id": 8, "rejected": ""})
    found = read_preferences(path)
    assert [each.id for each in found.pairs] == ["line 1", "seven", "8"]
    assert found.pairs[0] == Preference("line 1", "p", "yes", "no")
    assert found.refused == ()
    assert found.refusals() is None
    assert read_preferences(path, limit=1).pairs == found.pairs[:1]


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([GOOD, GOOD]))
    assert len(read_preferences(tmp_path / "a.json").pairs) == 2
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({name: [value] for name, value in GOOD.items()}), tmp_path / "a.parquet")
    assert read_preferences(tmp_path / "a.parquet").pairs == (Preference("row 1", "p", "yes", "no"),)
    pyarrow.parquet.write_table(pyarrow.table({"chosen": ["a"], "question": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(BadQuestions, match="no columns chosen and rejected, but chosen, question"):
        read_preferences(tmp_path / "b.parquet")


@pytest.mark.slow
def test_a_folder_laid_out_like_a_data_set(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GOOD)
    assert read_preferences(tmp_path).pairs == (Preference("row 1", "p", "yes", "no"),)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt": "p", "chosen": "a"}, "it has no rejected"),
        ({"prompt": "p"}, "it has no chosen and no rejected"),
        ({"chosen": "a", "rejected": "b"}, "it has no prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": "p", "chosen": 3, "rejected": "a"}, "its chosen is neither a text nor a list of messages"),
        ({"prompt": [], "chosen": "b", "rejected": "a"}, "its prompt is neither a text nor a list of messages"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "a"}, "its prompt has a message without role and"),
        ({"prompt": "p", "chosen": "a", "rejected": says("x")}, "one of chosen and rejected is a text, the other"),
        ({"chosen": says("q", "a"), "rejected": says("r", "a")}, "it has no prompt, and its conversations begin"),
        ({"chosen": says("q", "a"), "rejected": says("q", "a")}, "chosen and rejected are the same"),
        ({"chosen": says("q", "a", "b", "c"), "rejected": says("q", "b")}, "its chosen is not one answer"),
        ({"prompt": "other", "chosen": says("q", "a"), "rejected": says("q", "b")}, "begin with other turns"),
    ],
)
def test_bad_rows(values: dict[str, Any], reason: str) -> None:
    found = preference_of(DataRow("line 3", values))
    assert isinstance(found, Refused)
    assert found.place == "line 3"
    assert reason in found.reason


@pytest.mark.parametrize("prompt", [None, "q", says("q")])
def test_conversations(prompt: Any) -> None:
    """With the prompt's turns in front of the answers, and the prompt said besides or not."""
    row = {"prompt": prompt, "chosen": says("q", "a"), "rejected": says("q", "b")}
    found = preference_of(DataRow("line 1", row))
    assert isinstance(found, Preference)
    assert found.prompt in ("q", (("user", "q"),))
    assert (found.chosen, found.rejected) == ("a", "b")


def test_answers_alone_as_messages() -> None:
    row = {"prompt": says("q"), "chosen": says("", "a")[1:], "rejected": says("", "b")[1:]}
    assert preference_of(DataRow("line 1", row)) == Preference("line 1", (("user", "q"),), "a", "b")


def test_bad_rows_harm_no_other(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        GOOD,
        "{broken",
        [1],
        {**GOOD, "id": "x"},
        {**GOOD, "id": "x"},
        b"\xff".decode("latin-1") + "x",
    )
    found = read_preferences(path)
    assert len(found.pairs) == 2
    assert [each.place for each in found.refused] == ["line 2", "line 3", "line 5", "line 6"]
    assert "its id 'x' is that of line 4 too" in found.refused[2].reason
    told = found.refusals()
    assert told is not None
    assert "4 rows are no preferences" in told
    assert "line 2: no JSON" in told


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    found = read_preferences(write(tmp_path / "a.jsonl", GOOD, *["{"] * 9))
    assert str(found.refusals()).endswith("; and 4 more")
    with pytest.raises(BadQuestions, match="3 rows are no preferences: line 1"):
        read_preferences(write(tmp_path / "b.jsonl", *["{"] * 3))
    with pytest.raises(BadQuestions, match="it has no rows"):
        read_preferences(write(tmp_path / "c.jsonl"))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingQuestions, match="no such file"):
        read_preferences(tmp_path / "none.jsonl")
    with pytest.raises(MissingQuestions, match="no such file"):
        read_preferences("no such thing")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UsageError, match="a file of rows ends in"):
        read_preferences(tmp_path / "a.txt")
