"""Scorings on disk: every number comes back to the bit, and nothing that is finished changes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.measures.registry import ScoreTable
from gpuherd.qa.scoring.files import (
    BadScoring,
    ScoredMeasure,
    ScoringMeta,
    csv_text,
    scores,
    scoring_named,
    scorings_of,
    write_scoring,
)

TABLE = ScoreTable(("a", "=1+1", "'quoted", 'ü,"\n'), {"nll": (0.1 + 0.2, None, 1e-300, 12.0), "pe": (None,) * 4})


def meta(name: str, made: str = "2026-01-01T00:00:00+00:00") -> ScoringMeta:
    column = ScoredMeasure("nll", "a paper", ("greedy",), 3, {"the answer has no tokens": 1})
    return ScoringMeta(
        name=name, eos="include", statistics={}, measures=(column,), questions=4, answers_sha256="0", made=made
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = QADirectory(tmp_path)
    written = write_scoring(folder, meta("one"), TABLE)
    assert scoring_named(folder, "one") == written
    assert scores(folder, written) == TABLE

    import pyarrow.parquet

    table = pyarrow.parquet.read_table(folder.scoring("one", ".parquet")).to_pydict()
    assert tuple(table["id"]) == TABLE.ids and tuple(table["nll"]) == TABLE.columns["nll"]


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(
            st.text(),
            st.none() | st.floats(allow_nan=False, allow_infinity=False),
        ),
        max_size=5,
    )
)
def test_any_id_and_any_number_come_back(rows: list[tuple[str, float | None]]) -> None:
    import tempfile

    table = ScoreTable(tuple(row[0] for row in rows), {"m": tuple(row[1] for row in rows)})
    with tempfile.TemporaryDirectory() as place:
        folder = QADirectory(place)
        assert scores(folder, write_scoring(folder, meta("x"), table)) == table


def test_an_id_may_be_long(tmp_path: Path) -> None:
    folder, table = QADirectory(tmp_path), ScoreTable(("x" * 200_000, "é\n" * 50_000), {"m": (1.0, None)})
    assert scores(folder, write_scoring(folder, meta("x"), table)) == table
    assert csv.field_size_limit() == 131072, "as others may rely on"


def test_of_writers_that_begin_together_the_first_one_s_scoring_stays(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    folder, together = QADirectory(tmp_path), Barrier(4)
    (folder.scores).mkdir()
    (folder.scores / ".x.csv.abc.tmp").write_text("a writer that was killed")
    os.utime(folder.scores / ".x.csv.abc.tmp", (0, 0))

    def write(number: int) -> ScoringMeta:
        together.wait()
        return write_scoring(folder, meta("x"), ScoreTable(("a",), {"m": (float(number),)}))

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(write, range(4)))
    assert written == [scoring_named(folder, "x")] * 4
    assert scores(folder, written[0]).columns["m"][0] in range(4)
    assert sorted(path.name for path in folder.scores.iterdir()) == [".lock", "x.csv", "x.json", "x.parquet"]


def test_no_cell_is_a_formula() -> None:
    lines = list(csv.reader(io.StringIO(csv_text(TABLE), newline="")))
    assert lines[0] == ["number", "id", "nll", "pe"]
    assert [line[1] for line in lines[1:]] == ["a", "'=1+1", "''quoted", "'" + r'\\xfc,"\n']
    assert lines[1][2] == "0.30000000000000004" and lines[2][2] == ""


def test_the_latest_scoring_is_meant_where_none_is_named(tmp_path: Path) -> None:
    folder = QADirectory(tmp_path)
    with pytest.raises(UsageError, match="gpuherd score"):
        scoring_named(folder, None)
    write_scoring(folder, meta("newer", "2026-02-01T00:00:00+00:00"), TABLE)
    write_scoring(folder, meta("newest", "2026-03-01T00:00:00+00:00"), TABLE)
    write_scoring(folder, meta("old"), TABLE)
    assert scoring_named(folder, None).name == "newest"
    assert scoring_named(folder, "o").name == "old"
    with pytest.raises(UsageError, match=r"newer .*newest"):
        scoring_named(folder, "new")
    with pytest.raises(UsageError, match="no scoring 'x'"):
        scoring_named(folder, "x")


def test_a_finished_scoring_is_never_changed(tmp_path: Path) -> None:
    folder = QADirectory(tmp_path)
    first = write_scoring(folder, meta("one"), TABLE)
    before = {path.name: path.read_bytes() for path in folder.scores.iterdir()}
    other = ScoreTable(("z",), {"nll": (5.0,)})
    assert write_scoring(folder, meta("one"), other) == first
    assert {path.name: path.read_bytes() for path in folder.scores.iterdir()} == before


def test_what_is_damaged_newer_or_half_there_is_told(tmp_path: Path) -> None:
    folder = QADirectory(tmp_path)
    written = write_scoring(folder, meta("one"), TABLE)
    path, described = folder.scoring("one", ".csv"), folder.scoring("one", ".json")
    path.write_text(path.read_text() + "\n")
    with pytest.raises(BadScoring, match="changed"):
        scores(folder, written)
    path.unlink()
    with pytest.raises(BadScoring, match="can't read"):
        scores(folder, written)
    value = json.loads(described.read_text())
    described.write_text(json.dumps(value | {"format": 99}))
    with pytest.raises(BadScoring, match="newer gpuherd"):
        scoring_named(folder, "one")
    described.write_text(json.dumps(value | {"name": "two"}))
    with pytest.raises(BadScoring, match="renamed"):
        scoring_named(folder, "one")
    described.write_text("{")
    with pytest.raises(BadScoring, match="no JSON"):
        scoring_named(folder, "one")
    assert scorings_of(folder) == []


@pytest.mark.parametrize("text", ["number,id,nll\n0\n", "number,id,nll\n0,a,x\n", "number,id,nll\n0,a\n"])
def test_a_table_that_somebody_wrote_by_hand_is_refused(tmp_path: Path, text: str) -> None:
    folder = QADirectory(tmp_path)
    made = write_scoring(folder, meta("a"), TABLE)
    folder.scoring("a", ".csv").write_text(text)
    with pytest.raises(BadScoring, match="no table of scores"):
        scores(folder, replace(made, sha256=hashlib.sha256(text.encode()).hexdigest()))
