"""What the page shows is what lies in the run's folder: of this run, whole, and the evaluation's own."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.jobs.attempts import SIMULATED_GPU, queue_that_ran_on
from tests.qa.evaluation.evaluable import judge, make_run, right_ones, score, sha256_of
from tests.qa.report.made_runs import made_run, put_run

from gpuherd.cli.main import run as command
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.jobs.queue.reader import SIMULATED_GPUS
from gpuherd.qa.evaluation.result import BadEvaluation, read_evaluation
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.grading.files import BadJudging, JudgeKind
from gpuherd.qa.grading.rules import normalised
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.report.page import make_page, write_page
from gpuherd.qa.report.reading import ReportedRun, evaluation_of, reported_run
from gpuherd.qa.runs import run_of_path
from gpuherd.qa.statistics.files import STATISTICS, StatisticMeta, StatisticSpec

LABELS = right_ones(40, 15)


@pytest.fixture
def folder(tmp_path: Path) -> QADirectory:
    """A run of 40 answers that nothing was made of yet."""
    return make_run(tmp_path, LABELS)


def put_relevance(folder: QADirectory, value: float, *, model: str = "m", answers: str = "greedy") -> str:
    """Measured relevance: this number for each token. Returns the statistic's name."""
    spec = StatisticSpec("relevance", model, hashlib.sha256(model.encode()).hexdigest(), {"answers": answers})
    lines = []
    for each in run_of_path(folder.root).answers():
        row = {"number": each.number, "id": each.question.id, "relevance": [[value] * len(each.main.token_ids)]}
        lines.append(json.dumps(row).encode() + b"\n")
    data = b"".join(lines)
    sha256 = hashlib.sha256(data).hexdigest()
    meta = StatisticMeta(spec, sha256_of(folder), sha256, len(lines), {}, (), {}, f"2026-01-0{1 + round(value * 8)}")
    folder.statistics.mkdir(exist_ok=True)
    folder.statistic(spec.name).write_bytes(data)
    folder.statistic(spec.name, ".json").write_text(json.dumps(STATISTICS.values(meta)))
    return spec.name


def evaluate(folder: QADirectory, *words: str) -> None:
    assert command(["evaluate", str(folder.root), "--bootstrap", "100", *words]) == 0


def shown(folder: QADirectory, name: str | None = None) -> ReportedRun:
    opened = run_of_path(folder.root)
    return reported_run(opened, evaluation_of(opened, name))


def test_a_bare_run(folder: QADirectory) -> None:
    found = shown(folder)
    assert (found.title, len(found.answers), found.evaluation) == ("made", 40, None)
    assert (found.judgings, found.scores, found.audits) == ([], [], [])
    assert dict(found.facts) == {"answers": "40", "model": "made/model", "data set": "made.jsonl"}
    assert make_page(found).answers == 40


def test_simulated_gpus_are_told(folder: QADirectory) -> None:
    queue_that_ran_on(folder.queue, "GPU-1f0a92c3-77aa-4b1c-9d2e-6f0c2b1a9d3e")
    assert SIMULATED_GPUS not in shown(folder).notes
    queue_that_ran_on(folder.root / "judgments" / "x" / folder.queue.name, SIMULATED_GPU)
    assert shown(folder).notes[0] == SIMULATED_GPUS


def test_all_that_was_made_of_it(folder: QADirectory) -> None:
    other = judge(folder, LABELS.replace("-", "+", 3), name="llm_x-00000001", kind=JudgeKind.MODEL, model="x")
    first = judge(folder, LABELS)
    score(folder, extra={"mine": [None, *(float(number) for number in range(39))]})
    evaluate(folder, "--judge", first.name, "--measures", "ln-nll", "nll")
    found = shown(folder)
    assert [each.meta.name for each in found.judgings] == [first.name, other.name]
    assert found.judgings[0].judgments[("q0", "greedy")].verdict is Verdict.INCORRECT
    # Those that were evaluated stand first.
    assert [each.name for each in found.scores] == ["nll", "ln-nll", "perplexity", "mine"]
    assert found.scores[3].values[:2] == (None, 0.0)
    assert found.scores[3].undefined == {"made so": 1}
    assert [audit.name for audit in found.audits] == [first.name, other.name]
    assert {each.other for each in found.audits[1].agreements} >= {"exact", "contains", "squad", "rouge"}
    assert found.evaluation is not None
    assert found.evaluation.judges[0].judging == first.name
    assert dict(found.settings)["evaluation: bootstrap"] == "100"


def test_the_latest_evaluation_or_the_named_one(folder: QADirectory) -> None:
    judge(folder, LABELS)
    score(folder)
    evaluate(folder, "--name", "one")
    evaluate(folder, "--name", "two", "--seed", "2")
    os.utime(folder.evaluation("one", ".json"), (1, 1))
    opened = run_of_path(folder.root)
    found = evaluation_of(opened, None)
    assert found is not None and found.name == "two"
    named = evaluation_of(opened, "one")
    assert named is not None and named == read_evaluation(folder.evaluation("one", ".json"))
    with pytest.raises(UsageError, match="no evaluation 'three'; there is one, two"):
        evaluation_of(opened, "three")
    values = json.loads(folder.evaluation("two", ".json").read_text()) | {"answers_sha256": "1" * 64}
    folder.evaluation("two", ".json").write_text(json.dumps(values))
    with pytest.raises(BadEvaluation, match="other answers"):
        evaluation_of(opened, "two")


def test_descriptions_that_somebody_has_shortened_are_shown_as_far_as_they_go(folder: QADirectory) -> None:
    made = score(folder)
    judge(folder, LABELS)
    path = folder.scoring(made.name, ".json")
    values = json.loads(path.read_text())
    equivalence = {"equivalence": {"by": "exact"}}
    path.write_text(json.dumps(values | {"measures": values["measures"][1:], "settings": equivalence}))
    done = json.loads(folder.done.read_text())
    folder.done.write_text(json.dumps(done | {"versions": ["x"], "counts": {"finish": {"nan": 2}}}))
    evaluate(folder)
    found = shown(folder)
    assert (found.scores[0].name, found.scores[0].source) == ("nll", "")
    assert found.clusters == {}
    assert any("2 of all answers are NaN" in note for note in found.notes)


def test_relevance_is_that_of_the_scoring_else_the_latest(folder: QADirectory) -> None:
    first = put_relevance(folder, 0.25, model="a")
    put_relevance(folder, 0.5, model="b")
    put_relevance(folder, 1.0, model="b", answers="samples")
    assert set(shown(folder).relevance["q0"]) == {0.5}
    path = folder.scoring(score(folder).name, ".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"statistics": {"relevance": f"{first}, as it is"}}))
    assert set(shown(folder).relevance["q0"]) == {0.25}


def test_clusters_are_those_of_the_scoring(tmp_path: Path) -> None:
    folder = put_run(tmp_path / "sampled", made_run(12, samples=4, words=1).answers)
    assert shown(folder).clusters == {}
    assert command(["score", str(folder.root), "--measures", "discrete-semantic-entropy"]) == 0
    found = shown(folder)
    assert found.clusters.keys() == {each.question.id for each in found.answers}
    several = 0
    for each in found.answers:
        texts = [normalised(sample.text) for sample in each.samples]
        clusters = found.clusters[each.question.id]
        several += len(set(clusters)) < len(clusters)
        for one in range(4):
            assert [clusters[one] == clusters[other] for other in range(4)] == [texts[one] == text for text in texts]
    assert several


def test_what_is_of_other_answers_or_damaged_is_left_out(folder: QADirectory, caplog: pytest.LogCaptureFixture) -> None:
    make = judge(folder, LABELS)
    path = folder.judging(make.name, ".json")
    path.write_text(path.read_text().replace(sha256_of(folder), "2" * 64))
    name = put_relevance(folder, 0.5)
    with folder.statistic(name).open("ab") as file:
        file.write(b"{}\n")
    with caplog.at_level(logging.WARNING):
        found = shown(folder)
    assert (found.judgings, found.relevance) == ([], {})
    assert "has been changed" in caplog.text


def test_a_damaged_judging_is_an_error(folder: QADirectory) -> None:
    made = judge(folder, LABELS)
    with folder.judging(made.name).open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(BadJudging, match="line 41"):
        shown(folder)


def test_refused_rows_and_cut_contexts_are_told(folder: QADirectory) -> None:
    done = json.loads(folder.done.read_text()) | {"counts": {"refused": 3, "prompts_cut": 2}}
    folder.done.write_text(json.dumps(done))
    notes: Sequence[str] = shown(folder).notes
    assert notes == [
        "3 rows of the data set were not asked; refused.jsonl says why.",
        "2 contexts were cut to fit the model.",
    ]


def test_a_long_setting_is_cut_and_says_so(folder: QADirectory) -> None:
    record = json.loads(folder.run_json.read_text()) | {"identity": {"prompt": "x" * 50_000}}
    folder.run_json.write_text(json.dumps(record))
    told = dict(shown(folder).settings)["prompt"]
    assert told == "x" * 2_000 + " … 48000 more characters are in run.json"


def test_the_page_is_written_whole_or_not_at_all(folder: QADirectory, tmp_path: Path) -> None:
    opened = run_of_path(folder.root)
    page = write_page(opened, None, tmp_path / "p.html")
    assert (tmp_path / "p.html").read_bytes() == page.html
    with pytest.raises(CannotWrite, match="another file"):
        write_page(opened, None, tmp_path / "no" / "p.html")
