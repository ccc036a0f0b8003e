"""Show 4 from end to end: a model trained here answers on simulated GPUs, is judged twice well and once badly, scored
and evaluated; re-judged without being asked again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuherd.qa.runs import open_run

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo" / "answers.py"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_demo_of_answers(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, str(DEMO), "--folder", str(folder)]
    command += ["--data", str(GSM8K)] if GSM8K.is_dir() else []
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2900, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = open_run("demo", folder / "runs")
    answers = list(run.answers())
    assert len(answers) == 200 and all(len(each.which) == 6 for each in answers)
    # It knows what it has learnt by heart, and not the rest.
    right = [each.greedy is not None and each.greedy.text.strip() in each.question.answers for each in answers]
    assert sum(right[:120]) > 60 and sum(right[120:]) < 40
    assert "run demo is complete; nothing is left to do" in ran.stdout
    labels = {each.name: json.loads(each.read_text()) for each in run.folder.judgments.glob("*.json")}
    counts = {name.partition("-")[0]: meta["counts"] for name, meta in labels.items()}
    assert len(labels) == 3
    # An answer without a word is none: kept apart from the wrong ones.
    empty = sum(each.greedy is not None and not each.greedy.text.strip() for each in answers)
    assert counts["math"] == {
        "correct": sum(right),
        "incorrect": 200 - sum(right) - empty,
        "not_attempted": empty,
        "unparsed": 0,
        "nan": 0,
    }
    assert abs(counts["judge"]["correct"] - sum(right)) < 30
    assert counts["broken"]["correct"] > 190
    # The audit of the broken judge, and of no other, finds what is wrong with it.
    told = {name: _after(ran.stdout, f"/{name} --prompt") for name in ("judge", "broken-judge")}
    assert "it may not look at them" in told["broken-judge"]
    assert "it may not look at them" not in told["judge"]
    table = _after(ran.stdout, "gpuherd evaluate demo --judge math")
    assert "AUROC" in table and "nll" in table
    evaluations = [json.loads(path.read_text()) for path in run.folder.evaluations.glob("*.json")]
    assert len(evaluations) == 1
    assert next(run.folder.evaluations.glob("*.html")).stat().st_size < 10_000_000


def _after(text: str, mark: str) -> str:
    """What was told behind the command that has this in it, up to the next command."""
    return text.partition(mark)[2].partition("\n$ ")[0]
