"""How a judging is told: what failed, what was stopped, what others say otherwise; in a narrow window too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.qa.grading.conftest import capitals_run
from tests.qa.grading.judgings import make_judging, some_meta

from gpuherd.errors import ExitCode
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.records import Failure, Outcome
from gpuherd.qa.grading.audit import audit_lines, audits
from gpuherd.qa.grading.files import BadJudging, JudgeKind, write_judging
from gpuherd.qa.grading.judge import outcome_lines
from gpuherd.qa.grading.stage import JudgingOutcome
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.runs import Run


def test_a_judging_that_is_not_whole_says_why_and_how_to_go_on(capitals: Run) -> None:
    failure = Failure("shard-0", "judge 1/2", FailureClass.CRASH, "no room\x1b[2J", 1, "x.log", 1)
    failed = JudgingOutcome(Outcome(0, 1, 0, 0, (failure,)))
    assert outcome_lines(capitals, failed) == ["failed  judge 1/2: crash, exit code 1: no room\\x1b[2J (log: x.log)"]
    stopped = JudgingOutcome(Outcome(0, 0, 1, 0, stopped_by=ExitCode.INTERRUPTED))
    assert outcome_lines(capitals, stopped) == ["stopped: the same command goes on from here"]


def test_an_audit_fits_its_window(tmp_path: Path) -> None:
    run = capitals_run(tmp_path / "capitals", samples=False)
    ids = [row.question.id for row in run.answers()]
    values: dict[str, Any] = {"answers_sha256": run.answers_sha256, "kind": JudgeKind.MODEL}
    values |= {"model": "a-model", "threshold": 0.5}
    first = make_judging(run.folder, "+" * 24, ids=ids, name="first-00000000", **values)
    make_judging(run.folder, "+-" * 12, ids=ids, name="second-00000000", **values)
    (audited,) = audits(run, [first])
    for width in (80, 120, None):
        lines = audit_lines(audited, width)
        assert lines[0] == "first-00000000 on 24 answers (greedy), by a-model, correct from 0.5"
        assert lines[1].startswith("WARNING first-00000000 calls all 24 answers correct")
        assert "24 correct, 0 incorrect, 0 not attempted, 0 unparsed" in lines
        table = [line for line in lines if line.startswith(("exact", "contains", "squad", "rouge", "second-"))]
        assert len(table) == 5
        tables = lines[lines.index("") :]
        assert width is None or max(map(len, tables)) <= width
    named = [line for line in audit_lines(audited, None) if line.startswith("capital-")]
    assert len(named) == 8 and "against exact, contains, squad, rouge, second-00000000" in "".join(named)


def test_a_judging_of_other_answers_is_refused_and_never_compared(tmp_path: Path) -> None:
    run = capitals_run(tmp_path / "capitals")
    ids = [row.question.id for row in run.answers()]
    here = make_judging(run.folder, "+" * 24, ids=ids, name="here-00000000", answers_sha256=run.answers_sha256)
    other = make_judging(run.folder, "-" * 24, ids=ids, name="other-00000000", kind=JudgeKind.MODEL)
    with pytest.raises(BadJudging, match="other-00000000 is of other answers"):
        audits(run, [other])
    (audited,) = audits(run, [here])
    assert "other-00000000" not in {each.other for each in audited.audit.agreements}


def test_a_damaged_judging_harms_the_audit_of_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = capitals_run(tmp_path / "capitals")
    ids = [row.question.id for row in run.answers()]
    values: dict[str, Any] = {"ids": ids, "kind": JudgeKind.MODEL, "answers_sha256": run.answers_sha256}
    here = make_judging(run.folder, "+" * 24, name="here-00000000", **values)
    bad = make_judging(run.folder, "-" * 24, name="bad-00000000", **values)
    run.folder.judging(bad.name).write_bytes(b"")
    (audited,) = audits(run, [here])
    assert "bad-00000000" not in {each.other for each in audited.audit.agreements}
    assert [each.meta for each in audits(run)] == [here]
    assert "left out" in caplog.text and "bad-00000000" in caplog.text
    with pytest.raises(BadJudging, match="bad-00000000"):
        audits(run, [bad])


def test_why_verdicts_are_unparsed_is_told(tmp_path: Path) -> None:
    run = capitals_run(tmp_path / "capitals")
    ids = [row.question.id for row in run.answers()]
    notes = [f"no room: {200 + place} tokens" if place < 9 else "no line is a \x1b[31mverdict" for place in range(14)]
    verdicts = [Judgment(name, "greedy", Verdict.UNPARSED, note=note) for name, note in zip(ids, notes, strict=False)]
    meta = some_meta("here-00000000", kind=JudgeKind.MODEL, answers_sha256=run.answers_sha256)
    (audited,) = audits(run, [write_judging(run.folder, meta, verdicts)])
    assert audited.reasons == ((9, "no room: 200 tokens"), (5, "no line is a \x1b[31mverdict"))
    told = [line for line in audit_lines(audited, 80) if line.startswith("unparsed: ")]
    assert told == ["unparsed: 9 like 'no room: 200 tokens'", "unparsed: 5 like 'no line is a \\x1b[31mverdict'"]


def test_both_sides_of_a_disagreement_are_shown_in_a_narrow_window(tmp_path: Path) -> None:
    run = capitals_run(tmp_path / "capitals")
    ids = [row.question.id for row in run.answers()]
    (audited,) = audits(run, [make_judging(run.folder, "+" * 24, ids=ids, answers_sha256=run.answers_sha256)])
    (row,) = [line for line in audit_lines(audited, 80) if line.startswith("contains")]
    assert row.endswith(" 8/0")


def test_that_two_judges_part_is_told_once(tmp_path: Path) -> None:
    run = capitals_run(tmp_path / "capitals", samples=False)
    ids = [row.question.id for row in run.answers()]
    values: dict[str, Any] = {"answers_sha256": run.answers_sha256, "kind": JudgeKind.MODEL}
    first = make_judging(run.folder, "+" * 24, ids=ids, name="first-00000000", **values)
    second = make_judging(run.folder, "+-" * 12, ids=ids, name="second-00000000", **values)
    together = [each.text for audited in audits(run) for each in audited.audit.warnings if "two standards" in each.text]
    assert len(together) == 1
    for meta in (first, second):
        (alone,) = audits(run, [meta])
        assert together[0] in [each.text for each in alone.audit.warnings]
