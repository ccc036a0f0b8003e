"""RLCR against GRPO on sums: does a policy that is paid for calibration know what it knows, and what does that cost?

    python -m benchmarks.posttrain calibration     some minutes; writes results/posttrain.json and the documents' table

A Llama of 0.1 million parameters with a token a character is taught sums of two numbers of up to two digits by
next-token training, but only those below 100, until its likeliest answer is right to two in five of 200 held-out sums
of any size: those below 100 it mostly knows, the others not. Each answer that it imitates ends with a
confidence that is drawn at random from 0, 0.1, ..., 1: so it states one, and that says nothing. From there GRPO (paid
for right answers alone) and RLCR go on, on sums of any size, with the same problems, seeds, steps and settings.

Asked are 1,000 sums of the test split that no training has seen, one answer each, drawn at temperature 1, by
``posttrain.eval``; accuracy, Brier score, ECE (as stated, ten bins, not calibrated afterwards) and AUROC with 95 %
intervals over sums. A Brier score is to be compared with ``knows_the_mean``: accuracy times (1 - accuracy), which is
what whoever states the mean accuracy of each policy at every answer has.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import learning_curves

LEVELS = tuple(f"{tenth / 10:.1f}" for tenth in range(11))
KNOWN = 0.4  # of 200 held-out sums of any size the base's likeliest answer is right
STEPS, SEEDS, TEST = 60, (2, 3, 4), 1000


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of the base, and of what GRPO and RLCR made of it under each seed."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.process_time()
        steps = taught(folder / "base", 0.05 if quick else KNOWN)
        base = {"steps": steps, "cpu_seconds": seconds_since(started)} | measured(folder / "base", folder / "of-base")
        found: dict[str, Any] = {"base": base, "GRPO": [], "RLCR": []}
        for seed in SEEDS[:1] if quick else SEEDS:
            for name in ("GRPO", "RLCR"):
                found[name].append(learnt(name, folder, seed, 2 if quick else STEPS))
        return found


# ---- the base


@dataclass(frozen=True)
class Stating:
    """Of a task the sums below 100, whose labels end with a confidence that says nothing."""

    task: Any

    def problems(self, split: Any, count: int | None, seed: int) -> list[Any]:
        """The task's, their labels with a confidence."""
        draw = random.Random(seed)
        return [
            replace(each, answers=(f"{each.answers[0]}<confidence>{draw.choice(LEVELS)}</confidence>",))
            for each in self.task.problems(split, count, seed)
            if int(each.answers[0]) < 100
        ]


def taught(folder: Path, known: float) -> int:
    """Writes a base whose likeliest answers are right as often as that; the steps that it took."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gpuherd.posttrain.data.arithmetic import make_tokenizer

    tokenizer = make_tokenizer(folder)
    tokenizer.add_tokens(["<confidence>", "</confidence>", *LEVELS])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip

    def enough() -> bool:
        return share_right(folder) >= known

    shown = Stating(learning_curves.task())
    return learning_curves.imitated(LlamaForCausalLM(config), tokenizer, folder, shown, 3e-3, 50, enough)


def share_right(model: Path) -> float:
    """The share of held-out sums whose likeliest answer is right."""
    from gpuherd.posttrain.rollout.sampler import Sampler
    from gpuherd.posttrain.types import Policy, Precision, Split

    task = judged()
    sampler = Sampler(Policy(str(model)), Precision(), "cpu", sampling(99))
    rollouts = sampler.rollouts(task, task.problems(Split.HELDOUT, 200, 0), 1, greedy=True, reward_batch_size=512)
    return sum(each.reward for each in rollouts) / len(rollouts)


def judged() -> Any:
    """Sums whose answers are judged by what is left without the confidence."""
    from gpuherd.posttrain.algos.rlcr import Calibrated

    return Calibrated(learning_curves.task(), "", paid=False)


def sampling(seed: int) -> Any:
    """How answers are drawn: as the policy is; the longest is three digits, three tokens of confidence and an end."""
    from gpuherd.posttrain.types import Sampling

    return Sampling(max_new_tokens=8, temperature=1.0, batch_size=512, seed=seed)


# ---- learning


def learnt(name: str, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """What an algorithm makes of the base."""
    from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
    from gpuherd.posttrain.algos.rlcr import RLCR, RLCROptions
    from gpuherd.posttrain.engine.options import Scheduler, StepOptions
    from gpuherd.posttrain.policy_gradient.algorithm import Hooks
    from gpuherd.posttrain.types import Policy, Precision, Split, Training

    settings: dict[str, Any] = {
        "samples_per_prompt": 8, "batch_size": 32, "epochs": 100, "max_steps": steps, "minibatch_size": 128,
        "num_iterations": 2, "lr": 6e-4, "scheduler": Scheduler.LINEAR, "warmup_steps": 10, "kl_coef": 0.0,
    }  # fmt: skip
    algorithm = GRPO(GRPOOptions(**settings)) if name == "GRPO" else RLCR(RLCROptions(instruction="", **settings))
    task = judged() if name == "GRPO" else learning_curves.task()
    base, made = Policy(str(folder / "base")), folder / f"{name}-{seed}"
    started = time.process_time()
    work = Training(
        task, task.problems(Split.TRAIN, learning_curves.SUMS, 0), (), base, base, None, made, 0, sampling(seed),
        Precision(), "cpu", seed=seed, steps=StepOptions(micro_batch_size=512), reward_batch_size=512,
        extra={"hooks": Hooks(save_every=1000)},
    )  # fmt: skip
    policy = algorithm.train(work)
    spent = seconds_since(started)
    return {"seed": seed, "steps": steps, "cpu_seconds": spent} | measured(Path(policy.model), made / "evaluation")


def seconds_since(started: float) -> float:
    """CPU seconds of this process."""
    return round(time.process_time() - started, 1)


# ---- what it knows


def measured(model: Path, folder: Path) -> dict[str, Any]:
    """Accuracy, and how good the stated confidences are, each as [value, low, high]."""
    from gpuherd.posttrain.algos.rlcr import confidence_in
    from gpuherd.posttrain.eval.answers import read_answers
    from gpuherd.posttrain.eval.evaluation import Evaluating, evaluate
    from gpuherd.posttrain.eval.results import About, Divergence, EvaluationOptions
    from gpuherd.posttrain.types import Policy

    policy, about = Policy(str(model)), About("calibration", "arithmetic", "arithmetic", "llama", None)
    options = EvaluationOptions(problems=TEST, samples=1, kl=Divergence.NONE)
    work = Evaluating(about, policy, policy, judged(), folder, options=options, sampling=sampling(7))
    (point,) = evaluate(work).points
    given = [each for row in read_answers(folder / point.answers) for each in row.completions]
    stated = [(confidence_in(each.text), bool(each.correct)) for each in given]
    known = [(q, right) for q, right in stated if q is not None]
    return {
        "accuracy": figure(point.metrics.pass_at_1),
        "stated": round(len(known) / len(stated), 4),
        **calibration(*zip(*known, strict=True)),
    }


def calibration(confidence: Sequence[float], right: Sequence[bool]) -> dict[str, Any]:
    """Brier score, ECE and AUROC of stated confidences."""
    import numpy as np

    from gpuherd.qa.bootstrap import BootstrapPlan, Floats, Weights, figures
    from gpuherd.qa.evaluation import metrics

    q, labels, plan = np.array(confidence), np.array(right), BootstrapPlan()
    order, gap = metrics.ranked(-q, ~labels), (q - labels) ** 2

    def statistics(weights: Weights) -> dict[str, Floats]:
        return {
            "brier": weights @ gap / weights.sum(axis=1),
            "auroc": metrics.auroc(metrics.grouped(order, weights)),
        }

    found = figures(statistics, len(q), plan) | {"ece": metrics.ece_figure(q, labels, plan)}
    mean = float(labels.mean())
    return {
        "confidence": round(float(q.mean()), 4),
        "knows_the_mean": round(mean * (1 - mean), 4),
        **{name: figure(each) for name, each in found.items()},
    }


def figure(found: Any) -> list[float | None]:
    """A figure's value and the ends of its interval."""
    ends = found.interval
    values = (found.value, *((None, None) if ends is None else (ends.low, ends.high)))
    return [None if each is None else round(each, 4) for each in values]
