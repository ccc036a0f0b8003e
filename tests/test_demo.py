"""The demo runs from start to end, and a second time without doing anything twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuherd.esd.views import read_table

DEMO = Path(__file__).parents[1] / "demo" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--folder", str(tmp_path / "demo")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    summary = read_table(tmp_path / "demo" / "results" / "esd_results_summary.csv")
    names = [Path(row["model_id"]).name for row in summary]
    assert names == ["all-minilm-l6-v2", "llama-small", "llama-small-lora"]
    assert [int(row["layers_without_fit"]) for row in summary] == [0, 0, 0]
    assert "3 done\n" in first.stdout
    # The exponents that were planted in the first and the last layer of the small model come out again.
    stats = next((tmp_path / "demo" / "results" / "stats").glob("llama-small+*.csv"))
    alphas = {row["longname"]: row["alpha"] for row in read_table(stats)}
    for layer, planted in ((0, 2.5), (3, 4.0)):
        assert abs(float(alphas[f"model.layers.{layer}.mlp.up_proj"]) - planted) < 0.1
    changed = [line.split() for line in first.stdout.splitlines() if line.startswith("model.layers.")]
    assert len(changed) == 28
    assert all((delta != "+0.0000") == name.endswith(("q_proj", "v_proj")) for name, _, _, delta in changed)
    page = tmp_path / "demo" / "results" / "report.html"
    assert f"\n{page}  (3 models, " in first.stdout
    assert page.read_bytes().startswith(b"<!")
    (scores,) = (tmp_path / "demo" / "runs" / "demo" / "evaluations").glob("*.html")
    assert scores.read_bytes().startswith(b"<!")
    # Post-training raises the share of right sums by a third at least.
    rows = {line.split()[0]: line.split() for line in first.stdout.splitlines() if " arithmetic  tiny " in line}
    before, after = (float(rows[name][4]) for name in ("reference", "GRPO"))
    assert 0.4 < before < 0.6 and after > before + 0.3
    (trained,) = (tmp_path / "demo" / "outputs" / "demo").iterdir()
    assert first.stdout.splitlines()[-1].startswith(f"{trained / 'report.html'}  (2 policies, 1 training, ")
    second = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode == 0
    assert "3 done (3 before this run)" in second.stdout
    assert f"run {trained} is complete; nothing is left to do" in second.stdout
    assert list((tmp_path / "demo" / "outputs" / "demo").iterdir()) == [trained]
