"""Judgings on disk: whole or not there, never changed, found by their names, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.qa.grading.judgings import make_judging, some_judgments, some_meta

from gpuherd.errors import UsageError
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.grading.files import (
    JUDGINGS,
    BadJudging,
    JudgingMeta,
    judging_named,
    judgings_of,
    judgment_of,
    judgments,
    write_judging,
)
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.runs.records import line_of

NUMBERS = st.none() | st.floats(0, 1)
TEXTS = st.none() | st.text()


@pytest.fixture
def folder(tmp_path: Path) -> QADirectory:
    return QADirectory(tmp_path / "runs" / "a-run")


@given(
    st.builds(
        Judgment, st.text(), st.text(), st.sampled_from(Verdict), NUMBERS, NUMBERS, NUMBERS, reply=TEXTS, note=TEXTS
    )
)
def test_a_judgment_comes_back_from_its_line(judgment: Judgment) -> None:
    line = line_of(judgment)
    assert line.isascii() and "\n" not in line
    assert judgment_of(line) == judgment


def test_a_judging_comes_back_with_its_counts(folder: QADirectory) -> None:
    written = make_judging(folder, "++-?0+", model="a-model", threshold=0.5, settings={"mode": "tokens"})
    assert written.counts == {
        Verdict.CORRECT: 3,
        Verdict.INCORRECT: 1,
        Verdict.NOT_ATTEMPTED: 1,
        Verdict.UNPARSED: 1,
        Verdict.NAN: 0,
    }
    assert written.total == 6
    assert judgings_of(folder) == [written]
    assert judgments(folder, written) == some_judgments("++-?0+")
    assert JUDGINGS.parse(json.loads(json.dumps(JUDGINGS.values(written)))) == written


def test_what_is_finished_is_never_changed(folder: QADirectory) -> None:
    first = make_judging(folder, "++")
    before = folder.judging(first.name).read_bytes()
    assert make_judging(folder, "--") == first
    assert folder.judging(first.name).read_bytes() == before


def test_of_two_that_end_at_once_one_writes(folder: QADirectory) -> None:
    """Whatever each of them has found: the file and its description are of one."""
    metas: list[JudgingMeta] = []
    together = Barrier(8)

    def write(letters: str) -> None:
        together.wait()
        metas.append(make_judging(folder, letters))

    threads = [Thread(target=write, args=("+-" * place + "-" * 400,)) for place in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(metas) == 8 and all(meta == metas[0] for meta in metas)
    assert len(judgments(folder, metas[0])) == metas[0].total


def test_judgments_without_a_description_are_not_there(folder: QADirectory) -> None:
    made = make_judging(folder, "++")
    folder.judging(made.name, ".json").unlink()
    assert judgings_of(folder) == []
    assert make_judging(folder, "--").counts[Verdict.INCORRECT] == 2


def test_a_write_that_fails_leaves_nothing(folder: QADirectory) -> None:
    def failing() -> Iterator[Judgment]:
        yield Judgment("q0", "greedy", Verdict.CORRECT)
        raise RuntimeError("the judge is gone")

    with pytest.raises(RuntimeError):
        write_judging(folder, some_meta(), failing())
    assert not folder.judgments.exists()


def test_judgings_are_found_by_name_judge_or_beginning(folder: QADirectory) -> None:
    first = make_judging(folder, "++", name="llm_llama-3.1-70b-aaaaaaaa")
    second = make_judging(folder, "+-", name="llm_llama-3.1-70b-8bit-bbbbbbbb")
    exact = make_judging(folder, "+-", name="exact-cccccccc")
    assert judging_named(folder, "llm_llama-3.1-70b-aaaaaaaa") == first
    assert judging_named(folder, "llm_llama-3.1-70b") == first, "the judge of this very name, not all that begin so"
    assert judging_named(folder, "llm_llama-3.1-70b-8") == second
    assert judging_named(folder, "ex") == exact
    with pytest.raises(UsageError, match=r"can mean llm_llama-3.1-70b-8bit-bbbbbbbb .*llm_llama-3.1-70b-aaaaaaaa"):
        judging_named(folder, "llm")
    with pytest.raises(UsageError, match=r"no judging 'rouge'; there is .*exact-cccccccc"):
        judging_named(folder, "rouge")
    for word in ("", "../../etc/passwd", "a/b"):
        with pytest.raises(UsageError):
            judging_named(folder, word)


def test_two_judgings_by_one_judge_have_to_be_told_apart(folder: QADirectory) -> None:
    make_judging(folder, "++", name="exact-aaaaaaaa")
    make_judging(folder, "++", name="exact-bbbbbbbb", answers="samples")
    with pytest.raises(UsageError, match=r"--judge exact can mean exact-aaaaaaaa \(greedy.*exact-bbbbbbbb \(samples"):
        judging_named(folder, "exact")


def test_without_judgings_the_way_to_one_is_told(folder: QADirectory) -> None:
    with pytest.raises(UsageError, match="'gpuherd judge a-run squad' makes one"):
        judging_named(folder, "squad")


def test_damage_is_named(folder: QADirectory) -> None:
    made = make_judging(folder, "+-+")
    path = folder.judging(made.name)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"incorrect"', b'"wrong"'))
    with pytest.raises(BadJudging, match="line 2"):
        judgments(folder, made)
    path.write_bytes(whole.replace(b'"incorrect"', b'"correct"'))
    with pytest.raises(BadJudging, match="has been changed"):
        judgments(folder, made)
    path.unlink()
    with pytest.raises(BadJudging, match="can't read"):
        judgments(folder, made)


def test_a_damaged_or_newer_description_harms_no_other(folder: QADirectory, caplog: pytest.LogCaptureFixture) -> None:
    good = make_judging(folder, "+-", name="good-aaaaaaaa")
    folder.judging("half-bbbbbbbb", ".json").write_text('{"format": 1, "na')
    newer = JUDGINGS.values(good) | {"format": 2, "name": "newer-cccccccc"}
    folder.judging("newer-cccccccc", ".json").write_text(json.dumps(newer))
    folder.judging("renamed-dddddddd", ".json").write_text(json.dumps(JUDGINGS.values(good)))
    folder.judging("list-eeeeeeee", ".json").write_text("[]")
    folder.judging("deep-ffffffff", ".json").write_text("[" * 200_000)
    assert judgings_of(folder) == [good]
    assert len(caplog.records) == 5
    with pytest.raises(BadJudging, match="newer gpuherd"):
        judging_named(folder, "newer-cccccccc")
    with pytest.raises(BadJudging, match="no JSON"):
        judging_named(folder, "half-bbbbbbbb")
