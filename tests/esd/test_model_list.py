"""Model lists: both forms, every spelling, and one sentence for each bad row while the rest is read on."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import BadModelList
from gpuherd.esd.model_list import RELATION_WORDS, ModelList, Relation, quoted_cell, read_model_list, relation_of

HEADER = "model_id,base_model_relation,source_model\n"


def read(tmp_path: Path, content: str | bytes, limit: int | None = None) -> ModelList:
    path = tmp_path / "models.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_model_list(path, limit=limit)


def ids(read_list: ModelList) -> list[str]:
    return [row.model_id for row in read_list.rows]


def test_the_form_of_the_pipeline_guide(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "full_name,source_model,base_model_relation\n"
        "openai-community/gpt2,,base\n"
        "peft-internal-testing/gpt2-lora-random,openai-community/gpt2,adapter\n"
        "meta-llama/Llama-2-7b-hf,,base\n",
    )
    assert found.problems == ()
    assert [(row.line, row.kind) for row in found.rows] == [(2, "base"), (3, "adapter"), (4, "base")]
    assert found.rows[1].source_model == "openai-community/gpt2"
    assert found.rows[0].source_model is None


def test_the_form_of_the_usage_guide(tmp_path: Path) -> None:
    found = read(tmp_path, HEADER + "sshleifer/tiny-gpt2,,\n")
    assert (found.rows[0].model_id, found.rows[0].kind) == ("sshleifer/tiny-gpt2", Relation.BASE)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfmodel_id,base_model_relation,source_model\norg/a,lora,org/b\n",
        b"model_id,base_model_relation,source_model\r\norg/a,lora,org/b\r\n",
        b"source_model,model_id,base_model_relation\norg/b,org/a,lora\n",
        b' model_id , base_model_relation,source_model\n"org/a","lora","org/b"\n\n',
        b"model_id,base_model_relation,source_model\norg/a , lora,org/b,\n",
    ],
    ids=["byte order mark", "CRLF", "other order", "quoted, blank line", "spaces, trailing comma"],
)
def test_writings_of_the_same_list(tmp_path: Path, content: bytes) -> None:
    found = read(tmp_path, content)
    assert found.problems == ()
    row = found.rows[0]
    assert (row.model_id, row.kind, row.source_model) == ("org/a", Relation.ADAPTER, "org/b")


def test_extra_columns_are_kept(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        'full_name,source_model,base_model_relation,num_modules,module_names\norg/a,,base,6.0,"[""q"", ""k""]"\n',
    )
    assert list(found.rows[0].extra) == ["num_modules", "module_names"]
    assert found.rows[0].extra == {"num_modules": "6.0", "module_names": '["q", "k"]'}


@pytest.mark.parametrize("word", sorted(RELATION_WORDS))
def test_every_relation_word_in_any_case(word: str) -> None:
    assert relation_of(word) is relation_of(word.upper()) is relation_of(word.replace("-", "_")) is RELATION_WORDS[word]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("org/a,cousin,", "unknown relation 'cousin'"),
        (",base,", "empty"),
        ("org/a;rm -rf ~,base,", "id"),
        ("$(reboot),base,", "id"),
        ("../../absent/folder,base,", "no such folder"),
        ("org/../a,base,", r"\.\."),
        ('"org/a\nb",base,', "line break"),
        ("x" * 300 + ",base,", "300 characters"),
        ("org/a,adapter,org/b;ls", "its base"),
        ('org/a,base,"org/b\n"', "line break"),
        ("org/a", "1 cells where the header has 3"),
        ("org/a,base,,x,y", "5 cells where the header has 3"),
        ("org/first,base,", "duplicate of row 2"),
        ("--help,base,", "dash"),
    ],
)
def test_a_bad_row_is_one_sentence_and_the_rest_is_read(tmp_path: Path, row: str, told: str) -> None:
    found = read(tmp_path, f"{HEADER}org/first,base,\n{row}\norg/last,base,\n")
    assert ids(found) == ["org/first", "org/last"]
    assert len(found.problems) == 1
    problem = found.problems[0]
    assert problem.line == 3

    assert re.search(told, problem.reason), problem.reason
    assert "\n" not in problem.reason
    assert len(problem.reason) < 400


def test_a_row_after_a_cell_with_a_line_break_has_its_own_line_number(tmp_path: Path) -> None:
    found = read(tmp_path, HEADER + '"org/a\nb",base,\norg/c,cousin,\n')
    assert [problem.line for problem in found.problems] == [2, 4]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"model_id,base_model_relation,source_model\n", "no models"),
        (b"model_id,source_model\norg/a,\n", "missing column base_model_relation"),
        (b"name,base_model_relation,source_model\norg/a,,\n", "missing column model_id or full_name"),
        (b"model_id;base_model_relation;source_model\norg/a;;\n", "separated by commas"),
        (b"model_id,full_name,base_model_relation,source_model\na,a,,\n", "both columns"),
        (b"model_id,x,x,base_model_relation,source_model\na,,,,\n", "two columns"),
        ("model_id,base_model_relation,source_model\norg/a,,\n".encode("utf-16"), "UTF-16"),
        (b"model_id,base_model_relation,source_model\norg/\xe4,,\n", "line 2 is not in UTF-8"),
        (b'model_id,base_model_relation,source_model\n"org/a,,\norg/b,,\n', "not a CSV file"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path: Path, content: bytes, told: str) -> None:
    with pytest.raises(BadModelList, match=told) as caught:
        read(tmp_path, content)
    assert "models.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_list_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadModelList, match="no such model list"):
        read_model_list(tmp_path / "absent.csv")
    with pytest.raises(BadModelList, match="can't be read"):
        read_model_list(tmp_path)


def test_limit_counts_rows_good_and_bad(tmp_path: Path) -> None:
    content = HEADER + "org/a,,\norg/b,cousin,\norg/c,,\n"
    found = read(tmp_path, content, limit=2)
    assert (ids(found), len(found.problems)) == (["org/a"], 1)


@given(st.text(max_size=400))
def test_shown_text_is_one_short_line_of_ascii(text: str) -> None:
    line = quoted_cell(text)
    assert line.isprintable()
    assert len(line) <= 75


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8))
def test_every_row_is_either_good_or_a_problem(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]]
) -> None:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(("model_id", "base_model_relation", "source_model"))
    writer.writerows(rows)
    path = tmp_path_factory.mktemp("list") / "models.csv"
    path.write_bytes(out.getvalue().encode())
    filled = [row for row in rows if any(cell.strip() for cell in row)]
    if not filled:
        with pytest.raises(BadModelList):
            read_model_list(path)
        return
    found = read_model_list(path)
    assert len(found.rows) + len(found.problems) == len(filled)


@pytest.mark.parametrize("name", ["atlas_metadata.csv", "atlas_models.csv", "curated-3164.csv"])
def test_the_public_lists(name: str) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / "model-lists" / name
    if not path.exists():
        pytest.skip("the public model lists are not on this machine")
    found = read_model_list(path)
    assert len(found.rows) > 100
    assert not [problem for problem in found.problems if "relation" in problem.reason]
