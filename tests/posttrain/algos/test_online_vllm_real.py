"""A policy in training that a real vLLM answers for: its CPU build, in an environment of its own (``make vllm``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lm.test_vllm_real import PYTHON
from tests.lm.vllm_stand_in import processes
from tests.posttrain import tiny
from tests.posttrain.algos.training_work import curves, work

from gpuherd.lm import vllm
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.types import BackendName, Precision, Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: make vllm, or GPUHERD_VLLM_PYTHON ({PYTHON})"),
]
STEPS = 4


def train(model: Path, folder: Path) -> None:
    """Four steps, each kept."""
    how = GRPOOptions(
        lr=3e-3, batch_size=4, samples_per_prompt=4, epochs=2, max_steps=STEPS, save_every=1, kl_coef=0.01
    )
    sampling = Sampling(max_new_tokens=12, temperature=0.8, batch_size=16, seed=1)
    given: dict[str, Any] = {"sampling": sampling, "backend": BackendName.VLLM, "precision": Precision("float32")}
    GRPO(how).train(work(model, folder, **given))


def test_a_killed_training_goes_on_with_the_same_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.PYTHON, str(PYTHON))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = tiny.tiny_llama(tmp_path / "policy", width=128, spread=0.1)
    train(model, tmp_path / "straight")
    straight = curves(tmp_path / "straight")
    for line in straight:  # of weights that differ by a step there would be more than rounding
        assert abs(line["sampler_kl"]) < 1e-4 and line["sampler_weight_max"] == pytest.approx(1, abs=1e-3)
    assert len({line["loss"] for line in straight}) == STEPS

    program = (
        "import sys; from pathlib import Path; from tests.posttrain.algos.test_online_vllm_real import train; "
        "train(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    killed = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", program, str(model), str(killed)])
    log = killed / "curves.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    deadline = time.monotonic() + 30
    while processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes(process.pid)  # vLLM ended with it
    train(model, killed)
    assert not processes(os.getpid())
    resumed = curves(killed)
    assert [line["step"] for line in resumed] == [line["step"] for line in straight]
    for one, other in zip(resumed, straight, strict=True):
        for name in ("reward", "length", "loss", "entropy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (one["step"], name)
