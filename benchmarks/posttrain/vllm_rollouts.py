"""GRPO whose policy answers by vLLM against the same by transformers: rewards, mismatch, tokens a second.

    python -m benchmarks.posttrain vllm_rollouts     under 10 minutes on 2 quiet cores, after `make vllm`

The Llama of ``grpo`` with 45 tokens learns to say even words: 8 prompts of 8 answers of 24 tokens a step, one update,
temperature 1, once with each seed and backend. vLLM runs in a process of its own on the same CPU, one thread each, and
gets the weights before each step. Told are the mean reward of each step over the seeds, the difference of the mean
reward over all steps with its 95 % interval (Welch's t over seeds; draws of the two backends are other ones), the
largest KL(sampler || trainer) and weight of any step, and medians over steps, the first two left out.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._peers import Absent
from benchmarks.posttrain.grpo import GROUP, NEW, PROMPTS, _Words, prompts, write_model

VOCABULARY, SEEDS, STEPS = 45, 6, 10
LR = 3e-4  # by 5e-4 a training may write into the channel that makes the end token impossible, and answers end at once
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
PYTHON = Path(os.environ.get("GPUHERD_VLLM_PYTHON", _CACHE / "gpuherd-vllm" / "bin" / "python"))


def run(*, quick: bool) -> dict[str, Any]:
    """Figures of both backends and how far they are apart.

    :raises Absent: vLLM's environment is not there.
    """
    if not PYTHON.exists():
        raise Absent(f"no vLLM: make vllm, or GPUHERD_VLLM_PYTHON ({PYTHON})")
    import torch

    torch.set_num_threads(1)
    own = {"GPUHERD_VLLM_PYTHON": str(PYTHON), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.update(own | {"OMP_NUM_THREADS": "1"})
    seeds, steps = (2, 4) if quick else (SEEDS, STEPS)
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name, "model"), VOCABULARY, quick=False)
        runs = {
            backend: [trained(model, Path(name, f"{backend}-{seed}"), backend, seed, steps) for seed in range(seeds)]
            for backend in ("hf", "vllm")
        }
    means = {backend: [statistics.fmean(each["rewards"]) for each in found] for backend, found in runs.items()}
    return {
        "setting": {"seeds": seeds, "steps": steps, "prompts": PROMPTS, "group": GROUP, "new_tokens": NEW},
        **{backend: told(found) for backend, found in runs.items()},
        "vllm_less_hf": difference(means["vllm"], means["hf"]),
        "sampler_kl_most": max(each for found in runs["vllm"] for each in found["sampler_kl"]),
        "sampler_weight_most": max(each for found in runs["vllm"] for each in found["sampler_weight_max"]),
    }


def trained(model: Path, folder: Path, backend: str, seed: int, steps: int) -> dict[str, Any]:
    """One training: a number a step of each figure."""
    from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
    from gpuherd.posttrain.engine.options import StepOptions
    from gpuherd.posttrain.policy_gradient.algorithm import Hooks, plain_roll
    from gpuherd.posttrain.types import BackendName, Policy, Precision, Problem, Sampling, Training

    speeds: list[float] = []
    plain = plain_roll(_Words(), PROMPTS * GROUP)

    def roll(sampler: Any, problems: Any, samples: int, stream: str) -> Any:
        begun = time.perf_counter()
        found = plain(sampler, problems, samples, stream)
        assert all(len(each.ids) == NEW for each in found), "an end token was drawn"
        speeds.append(sum(len(each.ids) for each in found) / (time.perf_counter() - begun))
        return found

    policy = Policy(str(model))
    work = Training(
        _Words(), [Problem(str(number), text) for number, text in enumerate(prompts(VOCABULARY))], (), policy, policy,
        None, folder, 0, Sampling(max_new_tokens=NEW, batch_size=PROMPTS * GROUP, seed=seed), Precision("float32"),
        "cpu", seed=seed, steps=StepOptions(micro_batch_size=PROMPTS * GROUP), backend=BackendName(backend),
        extra={"hooks": Hooks(save_every=1 << 30, roll=roll)},
    )  # fmt: skip
    options = GRPOOptions(
        samples_per_prompt=GROUP, batch_size=PROMPTS, epochs=steps, kl_coef=0.0, lr=LR, weight_decay=0.0
    )
    begun = time.perf_counter()
    GRPO(options).train(work)
    whole = time.perf_counter() - begun
    lines = [json.loads(line) for line in (folder / "curves.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "rewards": [line["reward"] for line in lines],
        "seconds": [line["seconds"] for line in lines],
        "sampler_kl": [abs(line.get("sampler_kl", 0.0)) for line in lines],
        "sampler_weight_max": [line.get("sampler_weight_max", 1.0) for line in lines],
        "speeds": speeds,
        "whole": whole,
    }


def told(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all seeds."""
    warm = [slice(2, None)] * len(runs)
    return {
        "rewards": [round(statistics.fmean(each), 4) for each in zip(*(each["rewards"] for each in runs), strict=True)],
        "tokens_a_second": round(
            statistics.median(speed for each, part in zip(runs, warm, strict=True) for speed in each["speeds"][part])
        ),
        "seconds_a_step": round(
            statistics.median(took for each, part in zip(runs, warm, strict=True) for took in each["seconds"][part]), 3
        ),
        "seconds_of_all": round(statistics.fmean(each["whole"] for each in runs), 1),
    }


def difference(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Of two means, with its 95 % interval by Welch's t."""
    from scipy.stats import t

    parts = [statistics.variance(each) / len(each) for each in (one, other)]
    gap, width = statistics.fmean(one) - statistics.fmean(other), 0.0
    if sum(parts) > 0:
        freedom = sum(parts) ** 2 / sum(
            each**2 / (len(values) - 1) for each, values in zip(parts, (one, other), strict=True)
        )
        width = float(t.ppf(0.975, freedom)) * math.sqrt(sum(parts))
    return {"difference": round(gap, 4), "low": round(gap - width, 4), "high": round(gap + width, 4)}


if __name__ == "__main__":
    print(json.dumps(run(quick=False), indent=2))
