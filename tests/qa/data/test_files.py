"""Questions from files: what is asked, and that whatever is wrong with a row is told and harms no other."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.qa.data.hub_data_sets import no_utf_8, write_all

from gpuherd.errors import UsageError
from gpuherd.qa.data import load
from gpuherd.qa.data.load import QuestionOptions
from gpuherd.qa.data.questions import BadQuestions, MissingQuestions, QuestionSet
from gpuherd.qa.data.readers.benchmarks import columns_to_read

ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "question": "Capital of France?",
        "answers": ["Paris", "City of Light"],
        "context": "France, and Paris.",
    },
    {"id": "b", "question": '2, or\n"two"; what?', "answers": ["2"], "context": None},
    {"id": "c", "question": "Größe? 東京 \u2028 \x1b[31m \x00", "answers": ["ß"], "context": "a\tb"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the form that the file's name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["id", "question", "answers", "context"])
        for row in rows:
            writer.writerow([row["id"], row["question"], json.dumps(row["answers"]), row["context"] or ""])
        path.write_text(text.getvalue(), newline="")
    return path


def load_questions(dataset: str | Path, *, seed: int = 0, **options: Any) -> QuestionSet:
    if "few_shot_file" in options:
        options["few_shot_file"] = str(options["few_shot_file"])
    return load.load_questions(QuestionOptions(dataset=str(dataset), **options), seed=seed)


def lines(path: Path, *texts: str | bytes) -> QuestionSet:
    path.write_bytes(b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts))
    return load_questions(path)


def asked(found: QuestionSet) -> list[str]:
    return [each.question for each in found.questions]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_all_forms_of_files_give_the_same_questions(tmp_path: Path, suffix: str) -> None:
    found = load_questions(write(tmp_path / f"questions{suffix}", ROWS))
    assert not found.refused
    assert [(each.id, each.answers) for each in found.questions] == [
        ("a", ("Paris", "City of Light")),
        ("b", ("2",)),
        ("c", ("ß",)),
    ]
    assert asked(found) == [row["question"].strip() for row in ROWS]
    assert [each.context for each in found.questions] == ["France, and Paris.", None, "a\tb"]
    assert found.source.rows == 3


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(rows=st.lists(st.tuples(TEXT, st.lists(TEXT, max_size=3), TEXT), min_size=1, max_size=6))
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_row_is_asked_or_refused(tmp_path: Path, suffix: str, rows: list[tuple[str, list[str], str]]) -> None:
    values: list[dict[str, Any]] = [
        {"id": f"row-{number}", "question": f"Q{question}", "answers": ["x", *answers], "context": context}
        for number, (question, answers, context) in enumerate(rows)
    ]
    found = load_questions(write(tmp_path / f"any{suffix}", values))
    assert len(found.questions) + len(found.refused) == found.source.rows == len(rows)
    assert all("the same question" in each.reason for each in found.refused)
    wanted = {row["id"]: row["question"].strip() for row in values}
    assert all(wanted[each.id] == each.question for each in found.questions)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "", "answers": ["x"]}', "the question is empty"),
        ('{"question": "  ", "answers": ["x"]}', "the question is empty"),
        ('{"question": null, "answers": ["x"]}', "there is no question"),
        ('{"question": ["?"], "answers": ["x"]}', "the question is no text but"),
        ('{"question": "?", "answers": []}', "there is no reference answer"),
        ('{"question": "?", "answers": ["", " "]}', "there is no reference answer"),
        ('{"question": "?", "answers": null}', "there is no reference answer"),
        ('{"question": "?", "answers": [true]}', "the answer is no text but true"),
        ('{"question": "?", "answers": [{"a": 1}]}', "the answer is no text but"),
        ('{"question": "?", "answers": "x", "context": {"a": 1}}', "the context is no text but"),
        ('{"question": "?"}', "no column 'answers'"),
        ('{"Question": "?", "answers": "x"}', "did you mean 'Question'?"),
        ('{"question": "\\ud800", "answers": "x"}', "half of a surrogate pair"),
        ('{"question": "one?", "answers": "1"}', "the same question as line 1"),
        ('{"question": "other?", "answers": "1", "id": "first"}', "the same id as line 1"),
        ('{"question": "?"', "no JSON"),
        ('["?", "x"]', "no object with columns but a list"),
        ("[" * 100_000, "nested too deep"),
        (b'{"question": "\xff", "answers": "x"}', "bytes that are no UTF-8 (byte 15: 0xff)"),
        ('{"question": "?", "answers": NaN}', "there is no reference answer"),
        ('{"question": "?", "answer": "\\ud800 is 3.\\n#### 3"}', "the worked answer holds half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_told_and_the_others_are_asked(tmp_path: Path, line: str | bytes, reason: str) -> None:
    first = '{"id": "first", "question": "one?", "answers": "1"}'
    found = lines(tmp_path / "q.jsonl", first, "", line, '{"question": "last?", "answers": "3"}')
    assert asked(found) == ["one?", "last?"]
    (refused,) = found.refused
    assert refused.row == "line 3"
    assert reason in refused.reason


def test_reasons_stay_short_whatever_columns_are_called(tmp_path: Path) -> None:
    bad = json.dumps({"q" * 100_000: "x"})
    found = lines(tmp_path / "q.jsonl", bad, '{"question": "?", "answers": "3"}')
    assert len(found.refused[0].reason) < 100


def test_a_bom_is_no_part_of_the_text(tmp_path: Path) -> None:
    assert asked(lines(tmp_path / "q.jsonl", b'\xef\xbb\xbf{"question": "one?", "answers": "1"}')) == ["one?"]
    assert asked(lines(tmp_path / "q.csv", b"\xef\xbb\xbfquestion,answers", b"one?,1")) == ["one?"]
    (tmp_path / "q.json").write_bytes(b'\xef\xbb\xbf[{"question": "one?", "answer": 1}]')
    assert asked(load_questions(tmp_path / "q.json")) == ["one?"]


def test_bad_rows_of_a_table(tmp_path: Path) -> None:
    found = lines(
        tmp_path / "q.csv",
        "question,answers",
        "one?,1",
        "two?,2,too many",
        '"quoted" not closed well,2',
        b"caf\xe9?,3",
        "five?,",
        'six?,"[""a"", ""b""]"',
        "",
        'seven?,"[not a list"',
    )
    assert asked(found) == ["one?", "six?", "seven?"]
    assert found.questions[1].answers == ("a", "b")
    assert found.questions[2].answers == ("[not a list",)
    assert [(each.row, each.reason) for each in found.refused] == [
        ("line 3", "3 cells under a heading of 2"),
        ("line 4", "no CSV: ',' expected after '\"'"),
        ("line 5", "bytes that are no UTF-8"),
        ("line 6", "there is no reference answer"),
    ]


def test_lists_as_python_writes_them_are_no_references(tmp_path: Path) -> None:
    cells = ["['Paris', 'City of Light']", "['a' 'b']", """['it''s', "b"]""", "[sic]", "['tis]", '["a", "b"]']
    found = lines(tmp_path / "q.csv", "question\tanswers", *(f"{n}?\t{cell!s}" for n, cell in enumerate(cells)))
    assert [each.row for each in found.refused] == ["line 2", "line 3", "line 4"]
    assert {each.reason for each in found.refused} == {
        "a list as Python writes it in 'answers'; write a JSON list, with double quotes"
    }
    assert [each.answers for each in found.questions] == [("[sic]",), ("['tis]",), ("a", "b")]


def test_a_question_that_is_a_list_to_json_is_a_text_in_a_table(tmp_path: Path) -> None:
    found = lines(tmp_path / "q.csv", "question;answers;id", "[1, 2];3;[4]")
    assert [(each.question, each.id) for each in found.questions] == [("[1, 2]", "[4]")]


def test_empty_lines_before_the_heading_of_a_table(tmp_path: Path) -> None:
    assert asked(lines(tmp_path / "q.csv", "", "  ", "question;answers", "", "one, or two?;1")) == ["one, or two?"]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_the_delimiter_is_that_of_the_heading(tmp_path: Path, delimiter: str) -> None:
    found = lines(tmp_path / "q.csv", f"question{delimiter}answers", f"one, or two?{delimiter}1")
    assert asked(found) == ["one, or two?"]


def test_a_quote_that_never_ends_swallows_no_row_in_silence(tmp_path: Path) -> None:
    found = lines(tmp_path / "q.csv", "question,answers", "one?,1", '"two?,2', "three?,3")
    assert asked(found) == ["one?"]
    assert found.refused[0].row == "line 3"
    assert "unexpected end of data" in found.refused[0].reason


def test_contexts_longer_than_the_csv_module_reads_by_itself(tmp_path: Path) -> None:
    long = "word " * 200_000
    before = csv.field_size_limit()
    found = lines(tmp_path / "q.csv", "question,answers,context", f'one?,1,"{long}"')
    assert len(found.questions[0].context or "") == len(long.strip())
    assert csv.field_size_limit() == before


def test_a_parquet_row_that_is_no_utf_8_is_refused_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": no_utf_8(), "answer": ["1", "2", "3"]}), tmp_path / "q.parquet")
    found = load_questions(tmp_path / "q.parquet")
    assert asked(found) == ["one?", "three?"]
    assert [(each.row, each.reason) for each in found.refused] == [("row 2", "bytes that are no UTF-8")]


def test_columns_that_hold_no_question_are_not_read(tmp_path: Path) -> None:
    table = pa.table({"question": ["?"], "answer": ["a"], "embedding": [[0.0] * 10]})
    assert columns_to_read(table.column_names) == ["question", "answer"]
    pq.write_table(table, tmp_path / "q.parquet")
    assert load_questions(tmp_path / "q.parquet").questions[0].answers == ("a",)
    pq.write_table(table.rename_columns(["prompt", "answer", "embedding"]), tmp_path / "q.parquet")
    with pytest.raises(BadQuestions, match="no column 'question' among 'prompt', 'answer', 'embedding'"):
        load_questions(tmp_path / "q.parquet")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("q.jsonl", b"", "empty"),
        ("q.csv", b"", "empty"),
        ("q.csv", b"question,answers\n", "empty"),
        ("q.csv", b"question,question,answers\n?,?,1\n", "two columns are called 'question'"),
        ("q.csv", "question,answers\n?,1\n".encode("utf-16"), "its heading has bytes that are no UTF-8"),
        ("q.csv", b"prompt,reply\n?,1\n", "no column 'question' among 'prompt', 'reply'"),
        ("q.json", b"[", "no JSON"),
        ("q.json", b"[1, 2]", "none of its 2 rows can be asked; entry 1: no object"),
        ("q.json", b'{"a": [{"b": 1}], "c": [{"d": 1}]}', "neither a list"),
        ("q.json", b"\xff[]", "no UTF-8"),
        ("q.parquet", b"PAR1 it is not", "no Parquet"),
        ("q.jsonl", b'{"question": "?"}\n', "none of its 1 rows can be asked; line 1: no column 'answers'"),
    ],
)
def test_files_that_hold_no_question(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadQuestions) as problem:
        load_questions(tmp_path / name)
    assert said in str(problem.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_damaged_file_gives_what_can_be_read_or_one_error(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"whole{suffix}", ROWS).read_bytes()
    damaged = tmp_path / f"damaged{suffix}"
    draw = random.Random(suffix)
    for _ in range(80):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(content))
            content[place : place + draw.choice([0, 1, 5])] = draw.randbytes(draw.choice([0, 1, 4]))
        damaged.write_bytes(content)
        try:
            found = load_questions(damaged)
        except BadQuestions as problem:
            assert str(damaged) in str(problem)
        else:
            assert len(found.questions) + len(found.refused) == found.source.rows


def test_what_is_not_there_is_told_with_what_is_near(tmp_path: Path) -> None:
    with pytest.raises(MissingQuestions, match="did you mean trivia_qa"):
        load_questions("triviaqa")
    with pytest.raises(MissingQuestions, match=r"no data set or file .*nothing\.jsonl"):
        load_questions(tmp_path / "nothing.jsonl")
    for impossible in ("~no-such-user/questions.csv", "a" * 5000, ":config"):
        with pytest.raises(MissingQuestions, match="no data set or file"):
            load_questions(impossible)
    (tmp_path / "questions.txt").write_text("?")
    with pytest.raises(UsageError, match=r"ends in \.jsonl"):
        load_questions(tmp_path / "questions.txt")
    with pytest.raises(UsageError, match="no split"):
        load_questions(write(tmp_path / "q.jsonl", ROWS), split="test")


def test_a_folder_that_would_be_taken_for_a_data_set_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"gsm8k: there is a folder openai/gsm8k where you are; say \./openai/gsm8k"):
        load_questions("gsm8k")


def test_a_json_object_with_one_list_and_json_lines_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    assert len(load_questions(tmp_path / "q.json").questions) == 3
    (tmp_path / "l.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert len(load_questions(tmp_path / "l.json").questions) == 3
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0]))
    assert len(load_questions(tmp_path / "one.json").questions) == 1


def test_forms_of_files_that_are_known_by_their_rows(tmp_path: Path) -> None:
    solution = "She sells 1,200 + 34 = <<1200+34=1234>>1,234 eggs.\n#### 1,234"
    found = lines(tmp_path / "gsm8k.jsonl", json.dumps({"question": "How many eggs?", "answer": solution}))
    assert found.questions[0].answers == ("1234",)
    challenge = {
        "questions": [
            {
                "id": "1",
                "type": "factoid",
                "body": "Which gene?",
                "exact_answer": [["RET", "ret gene"]],
                "snippets": [],
            },
            {"id": "2", "type": "yesno", "body": "Is it?", "exact_answer": "yes", "snippets": [{"text": "It is."}]},
            {"id": "3", "type": "list", "body": "Which genes?", "exact_answer": [["A"], ["B"]]},
            {"id": "4", "type": "summary", "body": "What is it?", "ideal_answer": ["A disease."]},
        ]
    }
    (tmp_path / "training.json").write_text(json.dumps(challenge))
    found = load_questions(tmp_path / "training.json")
    assert [each.answers for each in found.questions] == [("RET", "ret gene"), ("yes",), ("A disease.",)]
    assert found.questions[1].context == "It is."
    assert [each.reason for each in found.refused] == ["asks for a list of answers"]


def test_a_file_of_the_hub_is_known_by_its_columns(tmp_path: Path) -> None:
    write_all(tmp_path)
    (trivia,) = tmp_path.rglob("rc.nocontext/validation*.parquet")
    assert load_questions(trivia).questions[0].answers == ("Jane Austen", "Austen")
    (coqa,) = tmp_path.rglob("coqa/*/*.parquet")
    assert [each.context is not None for each in load_questions(coqa).questions] == [True, True]
    (squad,) = tmp_path.rglob("squad_v2/*/*.parquet")
    assert [each.reason for each in load_questions(squad).refused] == ["unanswerable, as the data set says"]
    for name, answers in {
        "SVAMP": ("3",),
        "sciq": ("a lens",),
        "truthful_qa": ("Cats have one life", "No, one"),
    }.items():
        (path,) = tmp_path.rglob(f"{name}/*/[vt]*.parquet")
        assert load_questions(path).questions[0].answers == answers


def test_columns_of_a_known_data_set_with_something_else_in_them(tmp_path: Path) -> None:
    row = {"id": "1", "title": "t", "context": "c", "question": "?", "answers": ["a"]}
    trivia = {"question": "Who?", "question_id": "2", "question_source": "x", "answer": "she"}
    found = lines(tmp_path / "q.jsonl", json.dumps(row), json.dumps(trivia))
    assert [each.answers for each in found.questions] == [("a",), ("she",)]


def numbered(path: Path, count: int, order: Callable[[list[int]], list[int]] = list) -> Path:
    rows = [{"question": f"{number}?", "answers": [str(number)], "context": None, "id": ""} for number in range(count)]
    return write(path, [rows[number] for number in order(list(range(count)))])


def test_ids_and_draws_do_not_depend_on_the_order_of_the_file(tmp_path: Path) -> None:
    first = load_questions(numbered(tmp_path / "a.jsonl", 50), shuffle=True, seed=3, few_shot=4)
    second = load_questions(
        numbered(tmp_path / "b.jsonl", 50, lambda order: order[::-1]), shuffle=True, seed=3, few_shot=4
    )
    assert first.questions == second.questions
    assert first.examples == second.examples
    assert asked(load_questions(tmp_path / "a.jsonl", shuffle=True, seed=4)) != asked(first)
    assert asked(load_questions(tmp_path / "a.jsonl", limit=3)) == ["0?", "1?", "2?"]


def test_more_questions_of_a_shuffled_file_hold_the_fewer(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 50)
    few, many = (asked(load_questions(path, shuffle=True, limit=limit)) for limit in (5, 20))
    assert many[:5] == few
    assert len(set(many)) == 20


def test_examples_of_a_file_are_not_asked(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 10)
    found = load_questions(path, few_shot=3)
    assert len(found.questions) == 7
    assert not {each.question for each in found.examples} & set(found.questions)
    assert found.examples_source == found.source
    with pytest.raises(BadQuestions, match="none is left"):
        load_questions(path, few_shot=10)
    with pytest.raises(UsageError, match="has 10 questions"):
        load_questions(path, few_shot=11)


def test_examples_of_another_file_are_no_questions_that_are_asked(tmp_path: Path) -> None:
    path, other = numbered(tmp_path / "a.jsonl", 5), numbered(tmp_path / "b.jsonl", 7)
    found = load_questions(path, few_shot=2, few_shot_file=other)
    assert len(found.questions) == 5
    assert {each.question.question for each in found.examples} == {"5?", "6?"}
    assert found.examples_source is not None
    assert found.examples_source.name == str(other)


def test_contexts_are_left_out_where_nobody_wants_them(tmp_path: Path) -> None:
    found = load_questions(write(tmp_path / "q.jsonl", ROWS), context="no")
    assert [each.context for each in found.questions] == [None] * 3


def test_without_contexts_the_same_words_are_the_same_question(tmp_path: Path) -> None:
    rows = [{"question": "Who?", "answers": [who], "context": f"{who} did."} for who in ("Ann", "Bo")]
    path = write(tmp_path / "q.jsonl", [{"id": str(n), **row} for n, row in enumerate(rows)])
    assert len(load_questions(path).questions) == 2
    closed = load_questions(path, context="no")
    assert [each.id for each in closed.questions] == ["0"]
    assert [each.reason for each in closed.refused] == ["the same question as line 1"]


def test_contexts_that_are_wanted_and_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--context yes: .*a\.jsonl has no contexts"):
        load_questions(numbered(tmp_path / "a.jsonl", 5), context="yes")


def test_a_solution_with_a_gap_is_searched_at_once(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": f"#### {n}{' ' * 200_000}eggs\n#### {n}"} for n in range(3)]
    assert [each.answers for each in lines(tmp_path / "g.jsonl", *map(json.dumps, rows)).questions] == [
        ("0",),
        ("1",),
        ("2",),
    ]


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    first = load_questions(numbered(tmp_path / "a.jsonl", 5)).source.sha256
    assert load_questions(numbered(tmp_path / "b.jsonl", 5)).source.sha256 == first
    assert load_questions(numbered(tmp_path / "a.jsonl", 6)).source.sha256 != first
