"""Two processes learn what one learns, by DDP and by FSDP, and go on where they were stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.lm.vllm_stand_in import python_with_vllm
from tests.posttrain.algos.training_work import curves, same, weights

from gpuherd.lm.vllm import PYTHON

REPOSITORY = Path(__file__).parents[3]
SHARED = {
    "lr": 5e-3,
    "kl_coef": 0.05,
    "epochs": 2,
    "batch_size": 3,
    "samples_per_prompt": 3,
    "minibatch_size": 5,
    "eps": 1e-3,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {**SHARED, "num_iterations": 2, "reward_normalization": "batch"},
    "PPO": {**SHARED, "num_ppo_epochs": 2, "kl_target": 1.0},
    "RLOO": {**SHARED, "num_iterations": 2},
    "Distill": {name: value for name, value in SHARED.items() if name != "kl_coef"},
}


def run(processes: int, trainings: list[dict[str, Any]]) -> None:
    """All of these one after the other, in so many processes."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    if processes == 1:
        words = [sys.executable]
    words += ["-m", "tests.posttrain.policy_gradient.several", json.dumps(trainings)]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    done = subprocess.run(words, env=here, cwd=REPOSITORY, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def alike(one: list[dict[str, float]], other: list[dict[str, float]], which: str) -> None:
    """Two curves are the same but for rounding."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for figure, value in mine.items():
            if figure != "micro_batch":
                assert theirs[figure] == pytest.approx(value, rel=1e-3, abs=1e-4), (which, mine["step"], figure)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_what_one_learns(policy_model: Path, value_model: Path, tmp_path: Path) -> None:
    def told(name: str, strategy: str, *, label: str | None = None, stop_after: int = 0) -> dict[str, Any]:
        folder = tmp_path / name / (label or strategy)
        options = ALGORITHMS[name] | ({"teacher": str(value_model)} if name == "Distill" else {})
        return {"algorithm": name, "options": options, "model": str(policy_model), "folder": str(folder),
                "strategy": strategy, "stop_after": stop_after, "backend": "hf"}  # fmt: skip

    run(1, [told(name, "single") for name in ALGORITHMS])
    two = [told(name, strategy) for name in ALGORITHMS for strategy in ("ddp", "fsdp")]
    two += [told(name, "fsdp", label="broken", stop_after=2) for name in ALGORITHMS]
    run(2, two)
    run(2, [told(name, "fsdp", label="broken") for name in ALGORITHMS])
    for name in ALGORITHMS:
        one = curves(tmp_path / name / "single")
        assert len(one) == 6
        for strategy in ("ddp", "fsdp"):
            alike(one, curves(tmp_path / name / strategy), f"{name} by {strategy}")
            expected, found = weights(tmp_path / name / "single/model"), weights(tmp_path / name / strategy / "model")
            assert expected.keys() == found.keys()
            assert max(float((expected[each] - found[each]).abs().max()) for each in expected) < 1e-3
        assert same(tmp_path / name / "fsdp/model", tmp_path / name / "broken/model")
        assert curves(tmp_path / name / "fsdp") == curves(tmp_path / name / "broken")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_vllm_for_each_process_answers_as_one_for_one_process(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for vLLM in processes of its own."""
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))

    def told(strategy: str) -> dict[str, Any]:
        folder, options = tmp_path / strategy, {**ALGORITHMS["GRPO"], "kl_coef": 0.0}
        return {"algorithm": "GRPO", "options": options, "model": str(policy_model), "folder": str(folder),
                "strategy": strategy, "stop_after": 0, "backend": "vllm"}  # fmt: skip

    run(1, [told("single")])
    run(2, [told("ddp"), told("fsdp")])
    one = curves(tmp_path / "single")
    assert len(one) == 6 and all(line["sampler_weight_max"] == pytest.approx(1, abs=1e-3) for line in one)
    for strategy in ("ddp", "fsdp"):
        alike(one, curves(tmp_path / strategy), strategy)
