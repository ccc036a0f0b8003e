"""Our measures against LM-Polygraph's estimators, on 200 random cases: as recorded, and as it is where it is installed.

It lives in a folder of its own (``make peers``), no dependency. ``peers/lm_polygraph.json`` is what 0.7.0 gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks._peers import FOLDER
from tests.qa.measures.made import evidence

from gpuherd.qa.measures.registry import compute

PEER = FOLDER / "lm-polygraph"
PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[3]


def compare(theirs: dict[str, list[float]]) -> None:
    questions = [evidence(seed) for seed in range(200)]
    scores = compute(theirs, questions)
    for name, values in theirs.items():
        assert len(values) == 200
        for question, ours, their in zip(questions, scores.columns[name], values, strict=True):
            assert ours == pytest.approx(their, rel=1e-6, abs=1e-6), (name, question.id)


def test_measures_equal_what_lm_polygraph_gave() -> None:
    recorded = json.loads((PEERS / "lm_polygraph.json").read_text())
    assert len(recorded) == 15
    compare(recorded)


@pytest.mark.slow
def test_measures_equal_what_lm_polygraph_gives(tmp_path: Path) -> None:
    if not PEER.is_dir():
        pytest.skip(f"LM-Polygraph is not in {PEER}: make peers")
    subprocess.run(
        [sys.executable, str(PEERS / "lm_polygraph_run.py"), str(PEER), str(tmp_path / "theirs.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        check=True,
        capture_output=True,
        timeout=600,
    )
    compare(json.loads((tmp_path / "theirs.json").read_text()))
