"""``gpuherd judge`` from its words to its files and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.qa.conftest import made_once
from tests.qa.grading import small_judge
from tests.qa.grading.conftest import answered, capitals_run, write_run
from tests.qa.grading.serving import answer_in, chat, serving

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.grading.files import judging_named, judgings_of, judgments
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.record import Question
from gpuherd.qa.runs import NoSuchRun

Gpuherd = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QADirectory:
    """A run of capitals in ./runs."""
    monkeypatch.chdir(tmp_path)
    return capitals_run(tmp_path / "runs" / "capitals").folder


@pytest.fixture
def gpuherd(capsys: pytest.CaptureFixture[str]) -> Gpuherd:
    """Runs a command that succeeds; gives what it printed."""

    def call(*words: str, code: int = ExitCode.OK) -> str:
        assert run(words) == code
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("rule", ["exact", "contains", "squad", "rouge", "math"])
def test_rules_judge_at_once(folder: QADirectory, gpuherd: Gpuherd, rule: str) -> None:
    shown = gpuherd("judge", "capitals", rule)
    meta = judging_named(folder, rule)
    assert f"{meta.name}: {folder.judging(meta.name)}" in shown
    # capital-4 and capital-5 are no attempts, one in three of the others is a number.
    assert "14 correct, 8 incorrect, 2 not attempted, 0 unparsed" in shown
    assert "correct: 63.6% (95%: 43.0% to 80.3%) of 22 with a label" in shown
    assert [each.verdict for each in judgments(folder, meta)][3:6] == [
        Verdict.INCORRECT,
        Verdict.NOT_ATTEMPTED,
        Verdict.NOT_ATTEMPTED,
    ]
    again = gpuherd("judge", "capitals", rule)
    assert "as it was there already" in again and len(judgings_of(folder)) == 1


def test_another_threshold_is_another_judging(folder: QADirectory, gpuherd: Gpuherd) -> None:
    gpuherd("judge", "capitals", "squad")
    gpuherd("judge", str(folder.root), "squad", "--threshold", "0.9", "--answers", "samples")
    assert [(meta.threshold, meta.answers) for meta in judgings_of(folder)] in (
        [(0.5, "greedy"), (0.9, "samples")],
        [(0.9, "samples"), (0.5, "greedy")],
    )


def test_json_has_the_judging_and_its_audit(folder: QADirectory, gpuherd: Gpuherd) -> None:
    value = json.loads(gpuherd("judge", "capitals", "exact", "--json"))
    assert value["exit_code"] == 0 and value["judging"]["counts"]["correct"] == 14
    assert value["audit"]["yes_rate"]["value"] == pytest.approx(14 / 22)
    assert {each["other"] for each in value["audit"]["agreements"]} == {"contains", "squad", "rouge"}
    listed = json.loads(gpuherd("judge", "capitals", "--audit", "--json"))
    assert [each["judging"]["name"] for each in listed] == [value["judging"]["name"]]


def test_a_server_judges_and_is_audited(folder: QADirectory, gpuherd: Gpuherd) -> None:
    with serving(lambda number, asked: chat("yes", 0.99)) as server:
        shown = gpuherd("judge", "capitals", server.url, "--judge-model", "always-yes")
    assert "WARNING always-yes-at-127.0.0.1-" in shown and "calls all 22 answers correct" in shown
    assert "judged otherwise by others" in shown
    with serving(lambda number, asked: chat("no") if answer_in(asked).isdigit() else chat("yes")) as server:
        gpuherd("judge", "capitals", server.url, "--judge-model", "good", "--mode", "text")
    audit = gpuherd("judge", "capitals", "--audit", "good")
    assert "always-yes" in audit and "two standards" not in audit.partition("judged otherwise")[0]
    both = gpuherd("judge", "capitals", "--audit")
    assert both.count(" on 24 answers (greedy)") == 2


def test_disagreements_show_the_answer_and_nothing_of_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpuherd: Gpuherd
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [Question(f"q\x1b[2J{number}", "Who\u202e?", ("Ann\x1b[31m",)) for number in range(3)]
    write_run(
        tmp_path / "runs" / "evil", [answered(place, each, "Bob\x07 \u202e[bold]") for place, each in enumerate(asked)]
    )
    with serving(lambda number, asked: chat("yes")) as server:
        shown = gpuherd("judge", "evil", server.url, "--judge-model", "m[bold]\x1b]0;x", "--mode", "text")
    assert "\\x1b[31m" in shown and "\\u202e[bold]" in shown
    assert not set(shown) & set("\x1b\x07\u202e")


def test_a_dry_run_writes_nothing(folder: QADirectory, gpuherd: Gpuherd, good_judge: Path) -> None:
    before = sorted(folder.root.rglob("*"))
    assert "24 answers (greedy) by squad" in gpuherd("judge", "capitals", "squad", "--dry-run")
    shown = gpuherd("--simulate", "4x40GB", "judge", "capitals", str(good_judge), "--dry-run")
    assert "22 different cases" in shown and "2 jobs; each: " in shown and "nothing was started" in shown
    value = json.loads(gpuherd("judge", "capitals", "http://h/v1", "--judge-model", "m", "--dry-run", "--json"))
    assert value["cases"] == 22 and value["jobs"] == 0
    assert sorted(folder.root.rglob("*")) == before


def test_the_guides_judge_fits_on_four_gpus_of_40_gb(folder: QADirectory, gpuherd: Gpuherd) -> None:
    """70B in 16 bit has no room for 32 cases at once there; it judges fewer. A batch that was asked for is kept."""
    words = ["--simulate", "4x40GB", "judge", "capitals", "llm_llama-3.1-70b", "--dry-run"]
    shown = gpuherd(*words)
    assert "llm_llama-3.1-70b is meta-llama/Llama-3.1-70B-Instruct" in shown
    assert "16 sequences of" in shown and "asks for 4 GPUs" in shown
    with pytest.raises(GpuherdError, match="What would fit: --batch"):
        run([*words, "--batch-size", "32"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["capitals"], "give a judge"),
        (["capitals", "squad", "--audit"], "one of them"),
        (["capitals", "--audit"], "was not judged yet"),
        (["capitals", "--audit", "--threshold", "0.5"], "--threshold has no effect with --audit"),
        (["capitals", "--dry-run", "--audit"], "--dry-run has no effect with --audit"),
        (["capitals", "--audit", "squad"], "no judging"),
        (["capitals", "squadd"], "did you mean squad"),
        (["capitals", "exact", "--threshold", "0.5"], "--threshold means nothing to the judge 'exact'"),
        (["capitals", "squad", "--three-way"], "--three-way means nothing"),
        (["capitals", "squad", "--batch-size", "4"], "--batch-size means nothing"),
        (["capitals", "rouge", "--max-gpus", "4"], "--max-gpus means nothing"),
        (["capitals", "some/model", "--api-key-env", "K"], "--api-key-env means nothing"),
        (["capitals", "some/model", "--two-way", "--three-way"], "not both"),
        (["capitals", "some/model", "--mode", "text", "--threshold", "0.5"], "are for probabilities"),
        (["capitals", "some/model", "--reply-tokens", "5"], "--reply-tokens means nothing"),
        (["capitals", "http://h/v1", "--judge-model", "m", "--dtype", "bf16"], "--dtype means nothing"),
        (["capitals", "http://h/v1"], "--judge-model"),
        (["capitals", "some/model", "--prompt", "/no/such/file"], "No such file"),
    ],
)
def test_wrong_usage_says_what_to_do(folder: QADirectory, words: list[str], problem: str) -> None:
    before = sorted(folder.root.rglob("*"))
    with pytest.raises(UsageError) as refused:
        run(["judge", *words])
    assert problem in str(refused.value)
    assert sorted(folder.root.rglob("*")) == before


def test_a_run_that_is_not_there_is_told_with_the_nearest(folder: QADirectory) -> None:
    with pytest.raises(NoSuchRun, match="did you mean capitals"):
        run(["judge", "capitols", "squad"])


@pytest.mark.parametrize("word", ["2", "-0.1", "nan", "x"])
def test_a_threshold_is_a_share(folder: QADirectory, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["judge", "capitals", "squad", f"--threshold={word}"])
    assert ended.value.code == ExitCode.USAGE


def test_rules_need_no_torch(folder: QADirectory) -> None:
    code = (
        "import sys; from gpuherd.cli.main import run; run(['judge', 'capitals', 'squad']); "
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=100)


@pytest.fixture(scope="session")
def good_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that tells cities from numbers. Read only."""
    return made_once(tmp_path_factory, "good-judge", small_judge.trained_judge)


@pytest.fixture
def form(tmp_path: Path) -> str:
    """The form that it has learnt, as a file."""
    path = tmp_path / "form.txt"
    path.write_text(small_judge.FORM)
    return str(path)


@pytest.mark.slow  # a job's imports alone take seconds; the fast form of a whole judging is in test_by_model
def test_a_model_judges_in_jobs_on_simulated_gpus(
    folder: QADirectory, gpuherd: Gpuherd, good_judge: Path, form: str
) -> None:
    """A job is a program of its own that loads the model; another threshold takes none, and no GPU either."""
    words = ["judge", "capitals", str(good_judge), "--prompt", form, "--shards", "1"]
    shown = gpuherd("--simulate", "4x40GB", *words)
    assert "14 correct, 8 incorrect, 2 not attempted, 0 unparsed" in shown
    (meta,) = judgings_of(folder)
    assert meta.settings["shards"] == 1 and meta.model == str(good_judge)
    assert "as it was there already" in gpuherd("--simulate", "4x40GB", *words)
    assert "0 correct, 22 incorrect" in gpuherd("judge", "capitals", str(good_judge), "--prompt", form, "--threshold=1")


def test_a_judge_that_fits_nowhere_is_refused_before_anything_is_written(
    folder: QADirectory, good_judge: Path, form: str
) -> None:
    before = sorted(folder.root.rglob("*"))
    words = ["judge", "capitals", str(good_judge), "--batch-size", "100000000", "--prompt", form]
    with pytest.raises(GpuherdError, match=r"needs [\d.]+ GiB on 1 GPU .* What would fit"):
        run(["--simulate", "1x1GB", *words])
    assert sorted(folder.root.rglob("*")) == before
