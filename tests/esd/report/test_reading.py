"""A run folder read back: what workers wrote, and what went wrong."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.esd.report.runs import AddModel, heavy

from gpuherd.errors import UsageError
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.report.contents import Contents
from gpuherd.esd.report.page import make_page
from gpuherd.esd.report.reading import RunResults, read_results
from gpuherd.esd.selection import TensorCoverage, coverage_text
from gpuherd.esd.views import read_table
from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.store import Queue


def test_every_model_comes_back_with_its_figures(small_run: RunResults, run_folder: Path) -> None:
    assert [model.model_id for model in small_run.models] == ["org/base", "org/other", "org/spoilt", "org/tuned"]
    base = small_run.models[0]
    rows = read_table(run_folder / "stats" / "org--base.csv")
    assert base.names == tuple(row["longname"] for row in rows)
    assert [float(row["alpha"]) for row in rows if row["alpha"]] == base.alpha[:4].tolist()
    assert (base.fitted, base.skipped) == (4, 1)
    assert base.params[0] == base.rows[0] * base.columns[0]
    assert {"xmin", "stable_rank", "log_norm"} <= base.figures.keys()
    assert not {"longname", "fit_status", "fix_fingers", "M"} & base.figures.keys()
    tuned = small_run.models[3]
    assert (tuned.source_model, tuned.relation) == ("org/base", "finetune")
    assert tuned.convention["fix_fingers"] == "DKS"


def test_a_matrix_without_a_fit_has_no_alpha_but_a_reason(small_run: RunResults) -> None:
    spoilt = small_run.models[2]
    at = spoilt.names.index("model.layers.1.mlp.up_proj")
    assert np.isnan(spoilt.alpha[at])
    assert "NaN" in spoilt.status[at]
    assert spoilt.fitted == 3


def test_failures_are_told_once_and_a_line_that_was_cut_short_is_passed_over(small_run: RunResults) -> None:
    assert [(each.model, each.kind) for each in small_run.failures] == [
        ("org/broken", "bad input"),
        ("org/odd", "refused"),
    ]


def test_a_failure_of_a_model_that_is_done_since_is_no_failure(small_run: RunResults, run_folder: Path) -> None:
    with (run_folder / "failures.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"job": "c.1", "title": "org/base", "class": "crash", "reason": "gone"}) + "\n")
    assert "org/base" not in {each.model for each in read_results(run_folder).failures}


def test_a_damaged_file_is_a_failure_and_harms_no_other(small_run: RunResults, run_folder: Path) -> None:
    (run_folder / "stats" / "org--torn.csv").write_bytes(b"model_id,longname\nx\n")
    (run_folder / "stats" / "org--empty.csv").write_bytes(b"")
    (run_folder / "stats" / "org--bytes.csv").write_bytes(b"\xff\xfe\x00")
    (run_folder / "stats" / "org--strange.csv").write_text("a,b\n1,2\n")
    read = read_results(run_folder)
    assert len(read.models) == len(small_run.models)
    told = {each.model: each.reason for each in read.failures}
    assert {"org--torn", "org--empty", "org--bytes", "org--strange"} <= told.keys()
    assert "no column 'model_id'" in told["org--strange"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no results"):
        read_results(tmp_path)


def test_a_damaged_queue_or_record_does_not_matter(small_run: RunResults, run_folder: Path) -> None:
    (run_folder / "queue.sqlite").write_bytes(b"no database" * 100)
    (run_folder / "run.json").write_text("{")
    read = read_results(run_folder)
    assert len(read.models) == 4
    assert read.record == {}


def put_queue(run_folder: Path, states: dict[str, tuple[str, str, str | None]]) -> None:
    """A queue of these jobs: of each its title, its state and the reason."""
    with closing(Queue(run_folder / "queue.sqlite")) as queue:
        queue.submit([Job(name=name, argv=("true",), title=title) for name, (title, _, _) in states.items()])
    with closing(sqlite3.connect(run_folder / "queue.sqlite")) as db, db:
        for name, (_, state, reason) in states.items():
            db.execute("UPDATE jobs SET state = ?, reason = ? WHERE name = ?", (state, reason, name))


def test_the_queue_has_the_last_word(run_folder: Path, small_run: RunResults) -> None:
    jobs: dict[str, tuple[str, str, str | None]] = {
        "a.1": ("org/broken", "done", None),
        "org--lost.2": ("org/lost", "failed", "no disk"),
        "org--gone.3": ("org/gone", "waiting", None),
        "org--base.4": ("org/base", "cancelled", "cancelled by a user"),
    }
    put_queue(run_folder, jobs)
    told = {each.model: (each.kind, each.reason) for each in read_results(run_folder).failures}
    # org/broken was job a.1, which has ended well since; of org/lost failures.jsonl says nothing; org/base is done.
    assert told == {"org/odd": ("refused", "unknown relation 'cousin'"), "org/lost": ("failed", "no disk")}


def test_an_attempt_that_failed_and_is_tried_again_is_no_failure(run_folder: Path, small_run: RunResults) -> None:
    records = [
        {"job": f"org--{name}.7", "title": f"org/{name}", "class": "crash", "reason": "gone", "retried": retried}
        for name, retried in (("late", True), ("again", True), ("again", False))
    ]
    (run_folder / "failures.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    put_queue(
        run_folder, {"org--late.7": ("org/late", "waiting", None), "org--again.7": ("org/again", "failed", "gone")}
    )
    results = read_results(run_folder)
    assert [(each.model, each.kind) for each in results.failures] == [("org/again", "crash")]
    assert results.unfinished == {"waiting": 1}


def test_what_share_of_the_weights_is_covered(small_run: RunResults, run_folder: Path) -> None:
    assert small_run.models[0].covered is None
    lines = [
        TensorCoverage("a", "30x10", "F32", 300, 1, 300, "analysed", None),
        TensorCoverage("b", "100", "F32", 100, 0, 0, "skipped", "one axis: no matrix"),
    ]
    (run_folder / "coverage" / "org--base.csv").write_text(coverage_text(lines))
    (run_folder / "coverage" / "org--other.csv").write_text("a,b\n1,2\n")
    assert [model.covered for model in read_results(run_folder).models] == [0.75, None, None, None]


def test_progress_is_told(small_run: RunResults, run_folder: Path) -> None:
    told: list[tuple[int, int]] = []
    read_results(run_folder, lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_run_that_is_not_finished_says_so(run_folder: Path) -> None:
    states = {"a.1": "waiting", "b.2": "running", "c.3": "waiting"}
    put_queue(run_folder, {name: (name, state, None) for name, state in states.items()})
    results = read_results(run_folder)  # no model is done yet: a page all the same
    assert (results.models, results.failures) == ((), ())
    assert results.unfinished == {"running": 1, "waiting": 2}
    assert Contents(results).warnings == ["This run was not finished when this page was made: 1 running, 2 waiting."]
    assert make_page(results).models == 0


def test_columns_of_words_are_read(run_folder: Path, add_model: AddModel) -> None:
    add_model("org/a", heavy(1), options=AnalysisOptions(mp_fit=True))
    assert read_results(run_folder).models[0].notes == {"mp_status": ("ok",) * 4}
