"""Scorings from answers to tables, and the command that makes them."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.jobs.remote.conftest import Cluster
from tests.jobs.remote.conftest import cluster as cluster
from tests.qa.encoders.small_encoders import random_bert
from tests.qa.grading.judgings import make_judging
from tests.qa.scoring.small_runs import QUESTIONS, SAMPLES, measured, specs_of

from gpuherd.cli.main import run as gpuherd
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.qa.runs import DamagedRun, NoSuchRun, Run
from gpuherd.qa.scoring.files import scores, scoring_named
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.scoring.score import ScoringStage

Capture = pytest.CaptureFixture[str]


def words(run: Run, *more: str) -> list[str]:
    return ["score", run.run_id, "--runs-dir", str(run.folder.root.parent), *more]


def score(run: Run, **options: Any) -> ScoringStage:
    return ScoringStage(str(run.folder.root), ScoreOptions(**options), console=Console(quiet=True))


def test_log_probs_become_columns(run: Run, capsys: Capture, tmp_path: Path) -> None:
    target = tmp_path / "mine.csv"
    assert gpuherd(words(run, "--measures", "log-probs", "--csv", str(target))) == ExitCode.OK
    told = capsys.readouterr().out
    assert f"gpuherd evaluate {run.run_id}" in told and "end token: counted" in told
    meta = scoring_named(run.folder, None)
    table = scores(run.folder, meta)
    for answered, value, mean in zip(run.answers(), table.columns["nll"], table.columns["ln-nll"], strict=True):
        assert answered.greedy is not None and value is not None and mean is not None
        logs = [*answered.greedy.log_probs, *([answered.greedy.end_log_prob] if answered.greedy.end_id else [])]
        total = -math.fsum(each for each in logs if each is not None)
        assert value == pytest.approx(total, rel=1e-12) and mean == pytest.approx(total / len(logs), rel=1e-12)
    assert {each.name: each.defined for each in meta.measures}["nll"] == QUESTIONS
    assert target.read_bytes() == run.folder.scoring(meta.name, ".csv").read_bytes()
    assert meta.answers_sha256 == run.answers_sha256 and meta.versions["gpuherd"]


def test_the_end_token_is_left_out_where_that_is_asked(run: Run) -> None:
    both = {eos: score(run, measures=("nll",), eos=eos).run() for eos in ("include", "exclude")}
    names = {outcome.meta.name for outcome in both.values() if outcome.meta}
    assert len(names) == 2, "another convention is another scoring"
    for answered, number in zip(run.answers(), range(QUESTIONS), strict=True):
        with_end, without = (both[eos].scores.columns["nll"][number] for eos in both)  # type: ignore[union-attr]
        assert answered.greedy is not None and with_end is not None and without is not None
        assert with_end - without == pytest.approx(-(answered.greedy.end_log_prob or 0.0), rel=1e-9)


def test_the_same_scoring_is_made_once_and_a_name_means_one_scoring(run: Run) -> None:
    first = score(run, measures=("nll", "pe"), name="mine").run()
    before = {path: path.stat().st_mtime_ns for path in run.folder.scores.iterdir()}
    assert score(run, measures=("nll", "pe"), name="mine").run().meta == first.meta
    assert {path: path.stat().st_mtime_ns for path in run.folder.scores.iterdir()} == before
    with pytest.raises(UsageError, match="another --name"):
        score(run, measures=("nll",), name="mine").run()
    # Before anything is measured for it.
    with pytest.raises(UsageError, match="another --name"):
        score(run, measures=("p-true",), name="mine").run()
    assert not run.folder.work.exists()


def test_a_model_measures_by_a_job_and_only_once(run: Run, tmp_path: Path, capsys: Capture, cluster: Cluster) -> None:
    model = str(random_bert(tmp_path / "cross", {0: "LABEL_0"}))
    asked = words(run, "--measures", "token-sar", "weighted-nll:sar-relevance", "--relevance-model", model, "--json")
    assert gpuherd([*asked, "--dry-run"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    assert [each["jobs"] for each in plan["to_measure"]] == [1] and not run.folder.statistics.exists()
    assert plan["engine"] == "local" and plan["to_measure"][0]["engine_asks"] is None
    cluster.settings = {"gpus": 0}
    assert gpuherd([*asked, "--dry-run", "--engine=slurm", "--node-gpus=1x40GB"]) == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out)["never"] == ["asks for 1 GPUs on a node; the largest has 0"]
    assert gpuherd(asked) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["scoring"]["statistics"]["relevance"] == plan["sources"]["relevance"]
    assert any("similar to itself" in remark for remark in told["remarks"])
    assert all(each["defined"] == QUESTIONS for each in told["scoring"]["measures"])
    # What is measured is there for every later scoring, and needs the model no more.
    assert gpuherd(words(run, "--json")) == ExitCode.OK
    later = json.loads(capsys.readouterr().out)
    assert "token-sar" in later["measures"] and "sar" not in later["measures"]
    assert {each["measure"] for each in later["left_out"]} >= {"sar", "p-true", "p-ik"}


def test_p_ik_by_labels_of_a_judging(run: Run) -> None:
    ids = [each.question.id for each in run.answers()]
    for name, letters in (("exact-00000001", "+-" * 6), ("bad-00000002", "+" * 12), ("few-00000003", "+-0?" * 3)):
        make_judging(run.folder, letters, ids=ids, name=name, answers_sha256=run.answers_sha256)
    options = {"measures": ("p-ik",), "judge": "exact"}
    measured(run, specs_of(ScoreOptions(**options), run)["hidden"])  # type: ignore[arg-type]
    found = score(run, **options).run()
    assert found.meta is not None and found.meta.settings["judging"] == "exact-00000001"
    assert found.scores is not None and all(
        value is not None and 0 <= value <= 1 for value in found.scores.columns["p-ik"]
    )
    assert found.meta.statistics["p-ik"].endswith("labels of exact-00000001")
    assert score(run, measures=("p-ik",), judge="exact-00").run().meta == found.meta, "the same labels, named otherwise"
    one_class = score(run, measures=("p-ik",), judge="bad").run()
    assert one_class.scores is not None and set(one_class.scores.columns["p-ik"]) == {None}
    assert any("12 right and 0 wrong" in remark for remark in one_class.remarks)
    # Not attempted and unparsed are no labels, and get a value nevertheless.
    few = score(run, measures=("p-ik",), judge="few").run()
    assert few.scores is not None and None not in few.scores.columns["p-ik"]
    with pytest.raises(UsageError, match="--judge"):
        score(run, measures=("p-ik",)).run()
    with pytest.raises(UsageError, match="no judging"):
        score(run, measures=("p-ik",), judge="rouge").run()


def test_labels_of_other_answers_are_refused(run: Run) -> None:
    make_judging(run.folder, "+", ids=["fact-0"], name="exact-00000001")
    with pytest.raises(UsageError, match="other answers"):
        score(run, measures=("p-ik",), judge="exact").run()
    make_judging(
        run.folder, "+", ids=["fact-0"], which="sample-1", name="drawn-00000001", answers_sha256=run.answers_sha256
    )
    with pytest.raises(UsageError, match="has not judged the greedy answers"):
        score(run, measures=("p-ik",), judge="drawn").run()


def test_the_list_of_measures(capsys: Capture) -> None:
    assert gpuherd(["score", "--list", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["token-sar"]["needs"] == ["greedy", "relevance"] and all(each["source"] for each in listed.values())
    assert gpuherd(["score", "--list"]) == 0
    assert "semantic-entropy:rao" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--measures", "nlll"], ExitCode.USAGE, "did you mean"),
        (["--measures", "sar"], ExitCode.USAGE, "--relevance-model"),
        (["--relevance-model", "./nowhere"], ExitCode.MISSING, "nowhere"),
        (["--name", "a/b"], ExitCode.USAGE, "letters, digits"),
        (["--equivalence", "nli"], ExitCode.USAGE, "--equivalence-model"),
        (["--measures", "p-true", "--p-true-examples", "3"], ExitCode.USAGE, "--judge"),
    ],
)
def test_what_can_t_be_is_said(run: Run, more: list[str], code: ExitCode, said: str) -> None:
    with pytest.raises(GpuherdError, match=said) as problem:
        gpuherd(words(run, *more))
    assert problem.value.exit_code == code
    assert not run.folder.scores.exists()


def test_a_run_must_be_named_and_there(run: Run) -> None:
    with pytest.raises(UsageError, match="which run"):
        gpuherd(["score"])
    with pytest.raises(NoSuchRun, match="facts"):
        gpuherd(["score", "fact", "--runs-dir", str(run.folder.root.parent)])


def test_what_the_answers_alone_allow_needs_no_torch(run: Run) -> None:
    program = (
        "import sys\nfrom gpuherd.cli.main import run\n"
        f"code = run({words(run, '--json')!r})\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0


def test_ids_are_no_formulas_in_the_table(run: Run) -> None:
    outcome = score(run, measures=("nll",)).run()
    assert outcome.meta is not None
    with run.folder.scoring(outcome.meta.name, ".csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["number", "id", "nll"] and len(lines) == QUESTIONS + 1
    assert [line[1] for line in lines[1:]] == [each.question.id for each in run.answers()]


def test_a_changed_answers_file_is_refused(run: Run) -> None:
    path = run.folder.answers
    data = path.read_bytes()
    path.write_bytes(data.replace(b"fact-1", b"fact-9", 1))
    with pytest.raises(DamagedRun, match="damaged"):
        gpuherd(words(run))


def test_every_pairwise_need_of_samples_can_come_from_one_model(run: Run, tmp_path: Path) -> None:
    model = str(random_bert(tmp_path / "bi", None))
    options: dict[str, Any] = {
        "relevance_model": model, "equivalence": "embedding", "equivalence_threshold": 0.5, "affinity": "similarity",
    }  # fmt: skip
    # As the scoring asks for them: without a thought in any answer the three spans are one.
    for spec in specs_of(ScoreOptions(**options, span="both"), run).values():
        measured(run, spec)
    outcome = score(run, **options).run()
    assert outcome.meta is not None and outcome.scores is not None
    defined = {each.name: each.defined for each in outcome.meta.measures}
    assert {name: defined[name] for name in ("sar", "semantic-sets", "u-deg", "sentence-sar")} == dict.fromkeys(
        ("sar", "semantic-sets", "u-deg", "sentence-sar"), QUESTIONS
    )
    sets = outcome.scores.columns["semantic-sets"]
    assert all(value is not None and 1 <= value <= SAMPLES for value in sets)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_that_is_killed_goes_on_to_the_same_figures(run: Run, tmp_path: Path) -> None:
    import shutil
    import signal
    import time

    model = str(random_bert(tmp_path / "cross", {0: "LABEL_0"}))
    other = Path(shutil.copytree(run.folder.root, tmp_path / "other" / run.run_id))
    command = [sys.executable, "-m", "gpuherd", *words(run, "--measures", "sar", "--relevance-model", model)]
    for delay in (1.0, 3.0, 5.0, 7.0):
        started = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(delay)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    undisturbed = [*command]
    undisturbed[undisturbed.index("--runs-dir") + 1] = str(other.parent)
    assert subprocess.run(undisturbed, check=False, capture_output=True).returncode == 0
    for path in sorted(other.glob("statistics/*.jsonl")) + sorted(other.glob("scores/*.csv")):
        assert (run.folder.root / path.relative_to(other)).read_bytes() == path.read_bytes()
