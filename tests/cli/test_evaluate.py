"""``gpuherd evaluate`` on runs on disk: its table, its files, and every way in which it can't be done."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import average_precision_score, roc_auc_score
from tests.qa.evaluation.evaluable import judge, make_run, right_ones, score, sha256_of
from tests.qa.grading.judgings import some_judgments, some_meta

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode, MissingExtra, UsageError
from gpuherd.options import option_fields, spellings
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.evaluation.result import BadEvaluation, read_evaluation
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.grading.files import BadJudging, JudgeKind, write_judging
from gpuherd.qa.runs import DamagedRun, NoSuchRun
from gpuherd.qa.scoring.files import BadScoring, scores

LABELS = right_ones(90, 30)
FAST = ("--bootstrap", "200", "--no-page")


@pytest.fixture
def made(tmp_path: Path) -> QADirectory:
    """A run of 90 answers, judged and scored."""
    folder = make_run(tmp_path, LABELS)
    judge(folder, LABELS)
    score(folder)
    return folder


def evaluate(folder: QADirectory, *words: str) -> int:
    return run(["evaluate", folder.root.name, "--runs-dir", str(folder.root.parent), *FAST, *words])


def as_json(folder: QADirectory, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert evaluate(folder, "--json", *words) == code
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_the_table_and_the_files(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(made) == ExitCode.OK
    told = capsys.readouterr().out
    assert (
        "judging exact-00000000, greedy answers: 60 right, 30 wrong, 33.3% wrong (24.5% to 43.6%); 0 left out" in told
    )
    for word in ("AUROC", "ln-nll", "perplexity", "AUROC of the NLL of the first tokens", "accuracy by nll: 50% kept"):
        assert word in told
    (path,) = made.evaluations.glob("*.json")
    evaluation = read_evaluation(path)
    assert str(path) in told
    assert evaluation.name == path.stem == evaluation.identity[:8]
    (by_judge,) = evaluation.judges
    found = {each.name: each for each in by_judge.measures}
    table = scores(made, score(made))
    wrong = [letter == "-" for letter in LABELS]
    for name, column in table.columns.items():
        assert found[name].auroc.value == pytest.approx(roc_auc_score(wrong, list(column)), abs=1e-9)
        assert found[name].auprc.value == pytest.approx(average_precision_score(wrong, list(column)), abs=1e-9)
        interval = found[name].auroc.interval
        assert interval is not None and interval.low < roc_auc_score(wrong, list(column)) < interval.high
    assert evaluation.measured["nll"]["source"]
    rows = list(csv.DictReader(path.with_suffix(".csv").read_text().splitlines()))
    assert [row["measure"] for row in rows] == list(table.columns)
    assert float(rows[0]["auroc"]) == found["nll"].auroc.value
    # Perplexity is a rising function of the mean NLL: no difference, and nothing to test.
    (beside,) = (row for row in rows if row["measure"] == "perplexity")
    (mean,) = (row for row in rows if row["measure"] == "ln-nll")
    assert beside["auroc_difference"] == mean["auroc_difference"] != ""


def test_the_same_evaluation_is_the_same_file(made: QADirectory) -> None:
    assert evaluate(made) == ExitCode.OK
    (path,) = made.evaluations.glob("*.json")
    first = path.read_bytes()
    assert evaluate(made) == ExitCode.OK
    assert path.read_bytes() == first
    assert evaluate(made, "--seed", "1") == ExitCode.OK
    assert len(list(made.evaluations.glob("*.json"))) == 2


def test_json_is_what_the_file_holds(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    values = as_json(made, capsys)
    (path,) = made.evaluations.glob("*.json")
    assert values == json.loads(path.read_text())
    assert [each["length"] for each in values["judges"][0]["prefixes"]] == [1, 3, 5, 10]
    assert values["judges"][0]["prefixes"][1]["shorter"] == 0


def test_options_reach_the_figures(made: QADirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    words = ["--measures", "ln-nll", "--against", "perplexity", "--interval", "percentile", "--confidence", "0.8"]
    words += [
        "--calibration",
        "platt",
        "--coverages",
        "0.25,1",
        "--prefixes",
        "2",
        "--name",
        "mine",
        "--csv",
        str(table),
    ]
    values = as_json(made, capsys, *words)
    assert values["name"] == "mine" and (made.evaluations / "mine.csv").read_bytes() == table.read_bytes()
    (found,) = values["judges"]
    assert [each["name"] for each in found["measures"]] == ["ln-nll", "perplexity"]
    assert [each["name"] for each in found["differences"]] == ["ln-nll"]
    assert found["differences"][0]["p"] is None  # their orders are the same
    assert [each["coverage"] for each in found["measures"][0]["at"]] == [0.25, 1.0]
    assert [each["length"] for each in found["prefixes"]] == [2]
    plain = as_json(made, capsys)["judges"][0]["measures"][1]
    assert plain["ece"] != found["measures"][0]["ece"]
    wide, narrow = (each["auroc"]["interval"] for each in (plain, found["measures"][0]))
    assert wide["low"] < narrow["low"] < narrow["high"] < wide["high"]


def test_several_judges_and_what_speaks_against_them(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    judge(made, "+" * 90, "llm_yes-11111111", kind=JudgeKind.MODEL)
    with pytest.raises(UsageError, match="several judgings: exact-00000000, llm_yes-11111111"):
        evaluate(made)
    assert evaluate(made, "--judge", "exact", "llm_yes") == ExitCode.OK
    told = capsys.readouterr().out
    assert "warning: llm_yes-11111111 calls all 90 answers correct" in told
    assert "no wrong answer among 90: there is no AUROC" in told and "nothing to tell apart" in told
    values = as_json(made, capsys, "--judge", "exact", "llm_yes")
    exact, yes = values["judges"]
    assert exact["measures"][0]["auroc"]["value"] > 0.5
    assert yes["measures"][0]["auroc"] == {
        "value": None,
        "interval": None,
        "note": "all 90 answers are right",
        "dropped": 0,
    }
    assert yes["measures"][0]["aurac"]["value"] == 1


def test_judgings_beside_each_other(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    judge(made, LABELS[1:] + "+", "squad-33333333", kind=JudgeKind.SQUAD)
    assert evaluate(made, "--judge", "squad", "exact") == ExitCode.OK
    told = capsys.readouterr().out
    head, first, *_ = told[told.rindex("AUROC ") :].splitlines()
    assert head.split() == ["AUROC", "squad-33333333", "exact-00000000"]
    values = as_json(made, capsys, "--judge", "squad", "exact")["judges"]
    found = [{each["name"]: each["auroc"]["value"] for each in judge["measures"]} for judge in values]
    name, *numbers = first.split()
    assert numbers == [f"{each[name]:.3f}" for each in found]
    assert found[0][name] == max(found[0].values())


def test_one_class_alone_is_said_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "+" * 20)
    judge(folder, "+" * 20)
    score(folder)
    assert evaluate(folder) == ExitCode.FAILED
    told = capsys.readouterr().out
    assert "no wrong answer among 20: there is no AUROC" in told
    assert (folder.evaluations).is_dir()


def test_few_of_a_class_are_shown_and_nothing_is_concluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = right_ones(200, 8)
    folder = make_run(tmp_path, labels)
    judge(folder, labels)
    score(folder)
    assert evaluate(folder) == ExitCode.OK
    told = capsys.readouterr().out
    assert "only 8 wrong among 200 answers" in told
    assert "Nothing can be concluded where a class has fewer than 10 answers; here it is 8" in told


def test_not_attempted_and_unparsed_have_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = "".join("0" if at % 9 == 1 else "?" if at % 9 == 2 else each for at, each in enumerate(LABELS))
    folder = make_run(tmp_path, labels)
    judge(folder, labels)
    score(folder)
    (left_out,) = as_json(folder, capsys)["judges"]
    assert left_out["left_out"] == 20
    assert left_out["right"] + left_out["wrong"] == 70
    (counted,) = as_json(folder, capsys, "--not-attempted", "incorrect")["judges"]
    assert (counted["left_out"], counted["wrong"]) == (10, left_out["wrong"] + 10)
    # An empty answer has no token but its end: by the rule that leaves that out it has no mean.
    score(folder, name="without", eos="exclude", made="2026-02-01")
    (without,) = as_json(folder, capsys, "--not-attempted", "incorrect", "--scores", "without")["judges"]
    (mean,) = (each for each in without["measures"] if each["name"] == "ln-nll")
    assert sum(mean["undefined"].values()) == 10
    assert mean["wrong"] == counted["wrong"] - 10
    assert evaluate(folder, "--not-attempted", "incorrect", "--scores", "without") == ExitCode.OK
    assert "3 measures (nll, …): 10 answers have no score and are left out" in capsys.readouterr().out


def test_labels_are_told_as_they_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that was attempted is right: one class, unless what was not attempted counts as wrong."""
    labels = "+" * 40 + "0" * 15 + "?"
    folder = make_run(tmp_path, labels)
    judge(folder, labels)
    score(folder)
    assert evaluate(folder) == ExitCode.FAILED
    told = capsys.readouterr().out
    assert "16 left out (15 not attempted, 1 unparsed)" in told
    assert "no wrong answer among 40: there is no AUROC" in told
    assert evaluate(folder, "--not-attempted", "incorrect") == ExitCode.OK
    told = capsys.readouterr().out
    assert "15 of the wrong ones not attempted, 1 left out (1 unparsed)" in told
    assert "no wrong answer" not in told and "15 of 56 answers (26.8%); figures depend on" in told
    assert "By chance AUROC is 0.5, PRR 0, AURAC 0.727 and AUPRC 0.273" in told


def test_warnings_are_of_the_answers_that_are_evaluated(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Five wrong greedy answers are few, however many wrong samples the same judging has."""
    labels = right_ones(90, 5)
    names = [f"q{number}" for number in range(90)]
    said = [*some_judgments(labels), *some_judgments("-" * 90, names, which="sample-0")]
    about = some_meta("squad-44444444", kind=JudgeKind.SQUAD, answers="all", answers_sha256=sha256_of(made))
    write_judging(made, about, said)
    assert evaluate(made, "--judge", "squad", "--confidence", "0.9") == ExitCode.OK
    told = capsys.readouterr().out
    assert "85 right, 5 wrong" in told
    assert "only 5 wrong among 90 answers: the 90% interval" in told


def test_one_measure_with_few_scores_is_named(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    few = [float(at) if at < 12 else None for at in range(90)]
    score(made, name="later", made="2026-03-01", extra={"few": few})
    assert evaluate(made) == ExitCode.OK
    told = " ".join(capsys.readouterr().out.split())
    assert "fewer than 10 answers; so few have a score by few: 8 right and 4 wrong ones." in told
    assert "here it is" not in told


def test_pairs_are_compared_on_common_answers(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    column = [None if number < 20 else float(number % 7) for number in range(90)]
    score(made, name="later", made="2026-03-01", extra={"weighted-nll:made": column, "weighted-nll:flat": [1.0] * 90})
    (found,) = as_json(made, capsys)["judges"]
    (beside,) = (each for each in found["differences"] if each["name"] == "weighted-nll:made")
    (own,) = (each for each in found["measures"] if each["name"] == "weighted-nll:made")
    assert beside["answers"] == own["right"] + own["wrong"] == 70
    (flat,) = (each for each in found["measures"] if each["name"] == "weighted-nll:flat")
    assert flat["auroc"]["value"] == 0.5
    assert "counts alone" in flat["auroc"]["note"] and flat["auroc"]["interval"]["low"] < 0.4
    assert evaluate(made) == ExitCode.OK
    told = capsys.readouterr().out
    assert "weighting of NLL" in told and "The best of 2 weightings is chosen after looking" in told


def test_measures_by_alias_and_by_the_beginning_of_their_names(
    made: QADirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {f"weighted-nll:{name}": [float(at % (3 + number)) for at in range(90)] for number, name in enumerate("ab")}
    score(made, name="later", made="2026-03-01", extra=more)
    for words, names in (
        (["weighted-nll"], ["nll", "weighted-nll:a", "weighted-nll:b"]),
        (["weighted-nll:b", "perplexity"], ["nll", "perplexity", "weighted-nll:b"]),
        (["msp"], ["nll"]),
    ):
        (found,) = as_json(made, capsys, "--measures", *words)["judges"]
        assert [each["name"] for each in found["measures"]] == names


def test_runs_of_samples_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, LABELS, greedy=False)
    judge(folder, LABELS, which="sample-0", answers="samples")
    score(folder, (), extra={"lexical-similarity": [float(number) for number in range(90)]})
    (found,) = as_json(folder, capsys)["judges"]
    assert found["which"] == "sample-0" and found["right"] == 60
    assert found["differences"] == [] and found["prefixes"][0]["answers"] == 90


def test_a_judging_of_other_answers_is_refused(made: QADirectory) -> None:
    judge(made, LABELS, "squad-22222222", kind=JudgeKind.SQUAD, which="sample-0", answers="samples")
    with pytest.raises(UsageError, match="squad-22222222 is of samples"):
        evaluate(made, "--judge", "squad")


def test_what_is_not_there_is_named(tmp_path: Path, made: QADirectory) -> None:
    with pytest.raises(NoSuchRun, match="made"):
        run(["evaluate", "mad", "--runs-dir", str(tmp_path)])
    with pytest.raises(UsageError, match="exact-00000000"):
        evaluate(made, "--judge", "nobody")
    with pytest.raises(UsageError, match="did you mean perplexity"):
        evaluate(made, "--measures", "perplexty")
    with pytest.raises(UsageError, match="--against names one of its measures; did you mean perplexity"):
        evaluate(made, "--against", "perplexty")
    with pytest.raises(UsageError, match="5c04e5aa"):
        evaluate(made, "--scores", "other")
    bare = make_run(tmp_path, LABELS, run_id="bare")
    with pytest.raises(UsageError, match="gpuherd score bare"):
        evaluate(bare)
    score(bare)
    with pytest.raises(UsageError, match="gpuherd judge bare"):
        evaluate(bare)


def test_damage_and_other_answers_are_told(made: QADirectory) -> None:
    score(made, name="foreign", answers_sha256="f" * 64)
    with pytest.raises(BadScoring, match="other answers"):
        evaluate(made, "--scores", "foreign")
    judge(make_run(made.root.parent, LABELS, run_id="twin", seed=1), LABELS)
    for suffix in (".json", ".jsonl"):
        twin = made.root.parent / "twin" / "judgments" / f"exact-00000000{suffix}"
        (made.judgments / f"exact-00000000{suffix}").write_bytes(twin.read_bytes())
    with pytest.raises(BadJudging, match="other answers"):
        evaluate(made, "--scores", "5c04e5aa")


def test_changed_answers_are_told(made: QADirectory) -> None:
    made.answers.write_bytes(made.answers.read_bytes().replace(b"something", b"somethink", 1))
    with pytest.raises(DamagedRun, match="changed after"):
        evaluate(made)


def test_a_name_is_not_taken_twice(made: QADirectory) -> None:
    assert evaluate(made, "--name", "mine") == ExitCode.OK
    assert evaluate(made, "--name", "mine", "--against", "msp") == ExitCode.OK  # nll by another of its names
    before = (made.evaluations / "mine.json").read_bytes()
    with pytest.raises(UsageError, match="another evaluation mine"):
        evaluate(made, "--name", "mine", "--seed", "9")
    assert (made.evaluations / "mine.json").read_bytes() == before
    (made.evaluations / "mine.json").write_text("{")
    with pytest.raises(BadEvaluation, match="no JSON"):
        evaluate(made, "--name", "mine")
    assert evaluate(made, "--name", "../../away") == ExitCode.OK
    assert not list(made.root.parent.parent.glob("away*"))
    (away,) = made.evaluations.glob("*away*.json")
    assert read_evaluation(away).name == away.stem


@pytest.mark.parametrize(
    "words",
    [
        ["--bootstrap", "99"],
        ["--bootstrap", "99999999999999"],
        ["--confidence", "1"],
        ["--coverages", "0.5,1.5"],
        ["--coverages", ""],
        ["--prefixes", "0"],
        ["--interval", "basic"],
        ["--not-attempted", "maybe"],
        ["--judges", "exact"],
    ],
)
def test_wrong_words_are_refused(made: QADirectory, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        evaluate(made, *words)
    assert end.value.code == ExitCode.USAGE
    assert words[0] in capsys.readouterr().err


def with_page(folder: QADirectory, *words: str) -> int:
    return run(["evaluate", folder.root.name, "--runs-dir", str(folder.root.parent), "--bootstrap", "100", *words])


def test_the_page_is_written_beside_the_files(made: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_page(made) == ExitCode.OK
    (page,) = made.evaluations.glob("*.html")
    assert page.with_suffix(".json").is_file() and str(page) in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert evaluate(made, "--name", "bare") == ExitCode.OK
    assert not (made.evaluations / "bare.html").exists()


def test_without_jinja_there_are_the_files_and_a_sentence(
    made: QADirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] in ("jinja2", "markupsafe")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("jinja2", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)  # the import machinery then says that it is not installed
    assert with_page(made) == ExitCode.OK
    assert "no page: jinja2 is not installed; pip install 'gpuherd[page]'" in capsys.readouterr().err
    assert list(made.evaluations.glob("*.json")) and not list(made.evaluations.glob("*.html"))
    with pytest.raises(MissingExtra, match="jinja2"):
        with_page(made, "--page")


def test_contradictions_are_refused(made: QADirectory) -> None:
    with pytest.raises(UsageError, match="contradict"):
        with_page(made, "--page", "--no-page")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["evaluate", "--help"])
    told = capsys.readouterr().out
    assert "gpuherd evaluate my-run --judge exact" in told and "Exit codes" in told


def test_the_document_names_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    flags = [spellings(field.name, spec)[0][0] for field, spec in option_fields(EvaluateOptions)]
    assert [flag for flag in flags if flag not in text and flag != "--runs-dir"] == []


def test_neither_torch_nor_scikit_learn_is_imported(made: QADirectory) -> None:
    words = ["evaluate", "made", "--runs-dir", str(made.root.parent), "--bootstrap", "100"]
    program = (
        "import sys\nfrom gpuherd.cli.main import run\n"
        f"assert run({words!r}) == 0\n"
        "print(sorted({'torch', 'transformers', 'sklearn', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['numpy']"
