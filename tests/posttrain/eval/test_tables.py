"""Results of a run become tables: the right rows, seeds together, fair comparisons, and damage told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.posttrain.eval.made import made_experiment, made_result

from gpuherd.posttrain.eval.answers import Scores
from gpuherd.posttrain.eval.results import REFERENCE, About, BadResult, read_result, read_values, write_result
from gpuherd.posttrain.eval.summary import (
    clear_differences,
    headline,
    json_values,
    summary_table,
    unmoved_lines,
)
from gpuherd.posttrain.eval.tables import Gathered, gather
from gpuherd.posttrain.report.reading import RunReport
from gpuherd.posttrain.report.views import views_of
from gpuherd.qa.intervals import Figure, Interval


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_experiment(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def tables(run: Path) -> Gathered:
    return gather(run)


def test_a_row_a_policy_and_eta_the_reference_first(tables: Gathered) -> None:
    told = [(row.about.algorithm, row.about.round, row.eta, row.own) for row in tables.rows]
    assert told == [
        (REFERENCE, None, None, True),
        ("CD", 0, 1.0, False),
        ("CD", 0, 0.1, True),
        ("CD", 1, 1.0, False),
        ("CD", 1, 0.1, True),
        ("DPO", 0, None, True),
        ("DPO", 1, None, True),
        ("QSharp", 0, 1.0, False),
        ("QSharp", 0, 0.1, True),
        ("QSharp", 1, 1.0, False),
        ("QSharp", 1, 0.1, True),
    ]
    assert tables.damaged == ()


def test_one_runs_figures_are_as_they_were_written(run: Path, tables: Gathered) -> None:
    evaluation = read_result(run / "CD" / "tiny" / "star" / "r1")
    row = next(row for row in tables.summary if (row.about.algorithm, row.about.round) == ("CD", 1))
    assert row.figures["pass@1"] == evaluation.own.metrics.pass_at_1
    assert row.figures["maj@4"] == evaluation.own.metrics.majority[0].figure
    assert row.gpu_hours == pytest.approx(0.5 * 40 / 3600) and row.tokens_per_second == pytest.approx(24)
    assert row.by_seed == {} and row.estimator == "exact" and row.tie == "share"


def test_methods_are_compared_by_their_last_round_at_their_own_eta(run: Path, tables: Gathered) -> None:
    (comparison,) = tables.comparisons
    assert comparison.metric == "pass@1"
    found = {(each.one, each.other): each for each in comparison.differences}
    assert set(found) == {
        ("reference", "CD"), ("reference", "DPO"), ("reference", "QSharp"),
        ("CD", "DPO"), ("CD", "QSharp"), ("DPO", "QSharp"),
    }  # fmt: skip
    tops = {
        name: np.mean(read_values(run / name / "tiny" / "star" / "r1" / file, Scores).correct)  # type: ignore[arg-type]
        for name, file in (("CD", "scores-eta0.1.json"), ("QSharp", "scores-eta0.1.json"))
    }
    assert found["CD", "QSharp"].difference.value == pytest.approx(tops["CD"] - tops["QSharp"])
    assert found["CD", "QSharp"].p_holm is not None and found["CD", "QSharp"].p_holm < 0.05
    sentences = clear_differences(tables)
    assert any("QSharp is above CD" in each and "by problems" in each for each in sentences)


def test_at_equal_kl_the_reference_begins_every_curve(tables: Gathered) -> None:
    (comparison,) = tables.comparisons
    kls = sorted({each.kl for each in comparison.at_equal_kl})
    assert len(kls) == 4 and kls[0] > 0 and kls[-1] <= 2.1  # the shortest sweep ends near 2
    read = {(each.method, each.kl): each.metric.value for each in comparison.at_equal_kl}
    assert all(value is not None for value in read.values())
    assert {method for method, _ in read} == {"QSharp", "CD", "DPO"}
    assert read["QSharp", kls[-1]] > read["CD", kls[-1]] > read["DPO", kls[-1]]  # type: ignore[operator]


def test_seeds_go_together(tmp_path: Path) -> None:
    made_experiment(tmp_path, seeds=(0, 1))
    tables = gather(tmp_path)
    row = next(row for row in tables.summary if (row.about.algorithm, row.about.round) == ("QSharp", 1))
    assert row.seeds == (0, 1) and len(row.by_seed["pass@1"]) == 2
    figure = row.figures["pass@1"]
    assert figure.value == pytest.approx(np.mean(row.by_seed["pass@1"])) and figure.interval is not None
    assert min(row.by_seed["pass@1"]) >= figure.interval.low - 0.1
    assert len(tables.rows) == 11 and len(tables.comparisons) == 1
    assert {each.unit for each in tables.comparisons[0].differences} == {"seeds"}
    finished = row.figures["finished"]  # all are, in every run: nothing to resample
    assert (
        finished.value == 1
        and finished.interval is not None
        and finished.interval.low == pytest.approx(0.912, abs=1e-3)
    )


def changed(folder: Path, **values: object) -> None:
    """A result with other values of some fields."""
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_was_drawn_otherwise_is_neither_pooled_nor_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        made_result(tmp_path / f"a{seed}", About("CD", "star", "star", "tiny", 0, seed), {None: (0.3, 1.0)})
    made_result(tmp_path / "b", About("PITA", "star", "star", "tiny", 0), {None: (0.7, 1.0)})
    changed(tmp_path / "a1", sampling={"temperature": 0.7, "seed": 1})
    changed(tmp_path / "b", confidence=0.9)
    tables = gather(tmp_path)
    assert sorted((row.about.algorithm, row.seeds) for row in tables.rows) == [
        ("CD", (0,)),
        ("CD", (1,)),
        ("PITA", (0,)),
    ]
    assert [(each.one, each.other) for one in tables.comparisons for each in one.differences] == [("CD", "PITA")]
    assert any("different settings" in each for each in tables.damaged)
    assert any("(90 %, 95 %)" in each for each in tables.damaged)
    changed(tmp_path / "a1", sampling={"temperature": 1.0, "seed": 1, "batch_size": 3})  # neither matters
    assert [row.seeds for row in gather(tmp_path).rows if row.about.algorithm == "CD"] == [(0, 1)]


def test_seeds_that_have_other_etas_have_rows_of_their_own(tmp_path: Path) -> None:
    for seed, etas in ((1, (2.0, 0.1)), (0, (1.0, 0.1))):
        rates: dict[float | None, tuple[float, float]] = dict.fromkeys(etas, (0.5, 1.0))
        made_result(tmp_path / f"{9 - seed}", About("CD", "star", "star", "tiny", 0, seed), rates, own=0.1)
    rows = {row.eta: row for row in gather(tmp_path).rows}
    assert {eta: row.seeds for eta, row in rows.items()} == {2.0: (1,), 1.0: (0,), 0.1: (0, 1)}
    assert [eta for eta, row in rows.items() if row.own] == [0.1]


def test_divergences_of_unlike_laws_are_not_compared(tmp_path: Path) -> None:
    made_result(tmp_path / "a", About("CD", "star", "star", "tiny", 0), {0.1: (0.3, 1.0)}, own=0.1)
    made_result(tmp_path / "r", About(REFERENCE, "star", "star", "tiny", None), {None: (0.3, 0.0)})
    made_result(tmp_path / "b", About("DPO", "star", "star", "tiny", 0), {None: (0.7, 2.0)})
    for name in ("result.json", "scores.json"):
        path = tmp_path / "b" / name
        path.write_text(path.read_text().replace('"exact"', '"k3"'))
    (comparison,) = gather(tmp_path).comparisons
    assert comparison.note is None and len(comparison.at_equal_kl) > 0  # at temperature 1 all mean the same
    for name in "abr":
        changed(tmp_path / name, sampling={"temperature": 0.7})
    (comparison,) = gather(tmp_path).comparisons
    assert comparison.note is not None and "temperature 1" in comparison.note
    assert comparison.at_equal_kl == () and len(comparison.differences) == 3


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "greedy": False}, "; KL is exact"),
        (
            {"temperature": 0.8, "top_p": 0.9},
            "along completions drawn at temperature 0.8, top-p 0.9: not the divergence",
        ),
        ({"temperature": 1.0, "top_k": 5}, "along completions drawn at top-k 5: not the divergence"),
        ({"greedy": True}, "along completions of the most probable tokens: not the divergence"),
    ],
)
def test_the_divergence_is_called_exact_only_where_it_is(tmp_path: Path, sampling: dict[str, Any], told: str) -> None:
    made_result(tmp_path / "b", About("DPO", "star", "star", "tiny", 0), {None: (0.7, 2.0)}, own=None)
    changed(tmp_path / "b", sampling=sampling)
    tables = gather(tmp_path)
    line = headline(replace(tables, rows=tuple(replace(each, own=True) for each in tables.rows)))
    assert told in line and ("KL is exact" in line) == (told == "; KL is exact")


def test_a_method_that_has_not_moved_is_named(tmp_path: Path) -> None:
    made_result(tmp_path / "r", About(REFERENCE, "star", "star", "tiny", None), {None: (0.3, 0.0)})
    for name, rate, kl in (("DPO", 0.3, 1e-7), ("GRPO", 0.8, 2.0), ("PPO", 0.5, 3.0)):
        made_result(tmp_path / name, About(name, "star", "star", "tiny", 0), {None: (rate, kl)})
    tables = gather(tmp_path)
    (line,) = unmoved_lines(tables)
    assert line.startswith("tiny, star: DPO has hardly moved from the reference (KL at most ")
    (comparison,) = tables.comparisons
    assert {(each.one, each.other) for each in comparison.differences_at_kl} == {("GRPO", "PPO")}
    pages = json.dumps([view.nodes for view in views_of(RunReport("", (), (), tables))])
    assert "DPO has hardly moved from the reference" in pages


def test_one_seed_twice_is_no_two_seeds(tmp_path: Path) -> None:
    about = About("CD", "star", "star", "tiny", 0)
    made_result(tmp_path / "2026-01-01", about, {None: (0.3, 1.0)})
    later = made_result(tmp_path / "2026-01-02", about, {None: (0.7, 1.0)})
    tables = gather(tmp_path)
    (row,) = tables.rows
    assert row.seeds == (0,) and row.figures["pass@1"] == later.own.metrics.pass_at_1
    assert len(tables.damaged) == 1 and "left out" in tables.damaged[0]


def test_a_damaged_result_is_told_and_spoils_nothing(tmp_path: Path) -> None:
    made_experiment(tmp_path)
    star = tmp_path / "DPO" / "tiny" / "star"
    (star / "r0" / "result.json").write_text("{")
    (star / "r1" / "scores.json").write_text('{"format": 1, "problems": ["a"]}')
    newer = json.loads((tmp_path / "CD" / "tiny" / "star" / "r0" / "result.json").read_text()) | {"format": 99}
    (tmp_path / "CD" / "tiny" / "star" / "r0" / "result.json").write_text(json.dumps(newer))
    tables = gather(tmp_path)
    assert len(tables.damaged) == 3 and any("newer gpuherd" in each for each in tables.damaged)
    assert {row.about.algorithm for row in tables.rows} == {REFERENCE, "CD", "QSharp"}
    with pytest.raises(BadResult, match="not whole"):
        read_result(star / "r0")


def test_files_that_lie_elsewhere_or_are_of_other_figures_are_refused(tmp_path: Path) -> None:
    made_result(tmp_path / "a", About("PITA", "a", "a", "c", 0), {None: (0.4, 1.0)})
    text = (tmp_path / "a" / "result.json").read_text()
    (tmp_path / "a" / "result.json").write_text(text.replace('"answers.jsonl"', '"../../secret.jsonl"'))
    assert len(gather(tmp_path).damaged) == 1 and "elsewhere" in gather(tmp_path).damaged[0]
    (tmp_path / "a" / "result.json").write_text(text.replace('"round": 0', '"round": 999999999999'))
    assert "can't be" in gather(tmp_path).damaged[0]
    for old, new in (('"samples": 4', '"samples": 3'), ('"problems": 40', '"problems": 39'), ('"k": 4', '"k": 5')):
        (tmp_path / "a" / "result.json").write_text(text.replace(old, new))
        tables = gather(tmp_path)
        assert tables.rows == () and "not of the figures" in tables.damaged[0], old


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    made = made_result(tmp_path, About("PITA", "a", "b", "c", 3, 7), {0.2: (0.4, 1.0), None: (0.5, 0.0)}, own=0.2)
    assert read_result(tmp_path / "result.json") == made
    assert made.own.eta == 0.2
    again = write_result(tmp_path / "again", made).read_bytes()
    assert again == (tmp_path / "result.json").read_bytes()


def test_different_problems_are_not_compared_at_equal_kl(tmp_path: Path) -> None:
    made_result(tmp_path / "a", About("QSharp", "star", "star", "tiny", 0), {0.1: (0.6, 1.0)}, own=0.1, problems=30)
    made_result(tmp_path / "b", About("CD", "star", "star", "tiny", 0), {0.1: (0.6, 1.0)}, own=0.1)
    (comparison,) = gather(tmp_path).comparisons
    assert comparison.differences[0].problems == 30  # those that both were asked
    for path in tmp_path.glob("b/scores*.json"):
        path.write_text(re.sub(r'"p(\d)', r'"q\1', path.read_text()))
    (comparison,) = gather(tmp_path).comparisons
    assert comparison.differences == () and comparison.at_equal_kl == ()


def test_no_more_sentences_than_are_read(tables: Gathered) -> None:
    found = clear_differences(tables, most=2)
    assert len(found) == 3 and re.fullmatch(r"… and [3-9] more clear differences: .*", found[2])


def test_the_table_and_the_json(tables: Gathered) -> None:
    wide = summary_table(tables, None)
    assert wide.left_out == () and len(wide.lines) == 8
    assert "reward" not in wide.lines[0]  # it is pass@1 again
    assert "QSharp" in wide.lines[-1] and "[" in wide.lines[-1] and "0.1" in wide.lines[-1]
    narrow = summary_table(tables, 80)
    assert all(len(line) <= 80 for line in narrow.lines) and "GPU-h" in narrow.left_out
    assert all(word in narrow.lines[0] for word in ("algorithm", "round", "eta", "pass@1", "KL"))
    assert "95 %" in headline(tables) and "share" in headline(tables)
    values = json.loads(json.dumps(json_values(tables), allow_nan=False))
    assert len(values["rows"]) == 11 and values["comparisons"][0]["metric"] == "pass@1"


def test_a_divergence_that_is_zero_by_rounding_is_shown_as_zero(tables: Gathered) -> None:
    def with_kl(value: float, low: float, high: float) -> str:
        row = tables.summary[-1]
        figures = {**row.figures, "kl": Figure(value, Interval(low, high))}
        rows = tuple(replace(each, figures=figures) if each is row else each for each in tables.rows)
        return summary_table(replace(tables, rows=rows), None).lines[-1]

    assert "0.00 [0.00, 0.00]" in with_kl(-4e-8, -6e-8, 2e-8) and "-0.00" not in with_kl(-4e-8, -6e-8, 2e-8)
    assert "0.02 [0.00, 0.04]" in with_kl(0.02, -0.001, 0.04)
    assert "-0.02 [-0.05, 0.01]" in with_kl(-0.02, -0.05, 0.01)  # an estimate by k1 may be below 0


def test_what_tells_lines_apart_is_not_left_out(tmp_path: Path) -> None:
    for data in ("sums", "more"):
        made_result(tmp_path / data, About("QSharp", data, data, "tiny", 0), {0.1: (0.6, 1.0)}, own=0.1)
    narrow = summary_table(gather(tmp_path), 40)
    assert "data set" in narrow.lines[0] and "eta" in narrow.left_out and len(set(narrow.lines)) == 3


def test_nothing_is_no_error(tmp_path: Path) -> None:
    tables = gather(tmp_path)
    assert tables.rows == () and clear_differences(tables) == [] and headline(tables).startswith("[low, high]")
    assert len(summary_table(tables, 80).lines) == 1
