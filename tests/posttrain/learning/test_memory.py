"""What a training asks of its GPUs, by plans."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import JobCannotFit
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.training_job import Method, TrainingPrecision
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.foresight import check_data
from gpuherd.posttrain.learning.memory import foretell, job_of, need_of
from gpuherd.posttrain.sampling.lengths import Texts, lengths_of
from gpuherd.standin.machine import Machine

GIB = 1 << 30


def config(name: str = "gpt2", **blocks: Any) -> TrainConfig:
    """A configuration of the model of this name."""
    model = {"model_name_or_path": name, **blocks.pop("model", {})}
    found: TrainConfig = read(TrainConfig, {**blocks, "model": model})
    return found


def cards(count: int, size: int) -> list[Card]:
    """GPUs of so many bytes."""
    return [Card(str(number), "", total=size, free=size) for number in range(count)]


def test_a_small_model_fits(policy_model: Path) -> None:
    told = config(str(policy_model), training={"batch_size": 8})
    need = need_of(told, cards(1, 40 * GIB), 1)
    assert 0 < need.memory_mb < 20_000 and "PPO" in need.sentence and "8 at once" in need.sentence
    shared = config(str(policy_model), training={"batch_size": 8}, distributed={"num_gpus": 2, "strategy": "fsdp"})
    assert "by fsdp" in need_of(shared, cards(2, 40 * GIB), 2).sentence


def test_the_data_says_how_long_prompts_are(policy_model: Path, tmp_path: Path) -> None:
    """Characters are this model's tokens."""
    model = str(policy_model)
    problems = [{"question": f"{number:01200d}", "answer": "2"} for number in range(12)]
    env = {"env_type": "math", "max_attempts": 3, "problems": problems}
    training = {"num_rollouts_per_iteration": 2, "batch_size": 2, "num_iterations": 1, "eval_every": 0}
    told = config(model, training=training, policy_env=env)
    found = lengths_of(check_data(told), model, chat=False)
    assert 1202 < found.prompt < 1300 and (found.answer, found.turns) == (None, 3)  # the environment says more
    assert lengths_of(check_data(told), model, chat=True).prompt == found.prompt + 62
    job = job_of(told, Precision.FP32, 1, found)
    assert (job.prompt_tokens, job.new_tokens) == (found.prompt, 3 * min(told.model.max_new_tokens, 512))
    need = need_of(told, cards(1, 40 * GIB), 1, found)
    assert f"with prompts of {found.prompt} tokens at most" in need.sentence and "up to 3 turns" in need.sentence
    assert need.memory_mb > need_of(told, cards(1, 40 * GIB), 1).memory_mb
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "123", "chosen": "4" * 70, "rejected": "5"}))
    pairs = config(model, training={"algorithm": "dpo", "data_file": str(file)})
    of_pairs = lengths_of(check_data(pairs), model, chat=False)
    assert (of_pairs.prompt, of_pairs.answer) == (5, 72)
    assert job_of(pairs, Precision.FP32, 1, of_pairs).new_tokens == 72


def test_where_lengths_are_not_known_it_is_said(policy_model: Path, tmp_path: Path) -> None:
    told = config(str(policy_model))
    assert "prompts taken to have 512 tokens" in need_of(told, cards(1, 40 * GIB), 1).sentence
    bare = tmp_path / "bare"
    shutil.copytree(policy_model, bare)
    (bare / "tokenizer.json").write_text("{}")
    found = lengths_of(Texts(["äb"]), str(bare), chat=False)
    assert (found.prompt, found.said) == (5, "with prompts of 5 tokens at most, a token taken for a byte")


def test_what_fits_nowhere_is_refused_with_figures(policy_model: Path) -> None:
    with pytest.raises(JobCannotFit, match=r"(what would fit|choose a smaller model)"):
        need_of(config(str(policy_model), training={"batch_size": 512}), cards(1, GIB), 1)


def test_of_the_user_s_own_gpus_it_is_told_and_nothing_is_refused(
    policy_model: Path, standin: Callable[..., Machine], caplog: pytest.LogCaptureFixture
) -> None:
    standin("2x40GB")
    caplog.set_level(logging.INFO, "gpuherd")
    for size in (8, 512 * 64):
        training = {"batch_size": size, "num_rollouts_per_iteration": size}
        foretell(config(str(policy_model), training=training), 2, 2)
    small, large = caplog.messages
    assert small.startswith("PPO of") and "by ddp" in small and small.endswith("GiB on each GPU")
    assert large.startswith("memory may run out: PPO") and "what would fit" in large


def test_jobs_in_the_planner_s_words() -> None:
    told = config(training={"algorithm": "grpo", "use_bf16": True}, grpo={"kl_coef": 0.1})
    job = job_of(told, Precision.FP32, 1)
    assert (job.method, job.precision, job.keeps_reference) == (Method.GRPO, TrainingPrecision.MIXED, True)
    alone = config(training={"algorithm": "grpo"}, grpo={"kl_coef": 0})
    assert not job_of(alone, Precision.BF16, 1).keeps_reference
    lora = config(model={"use_lora": True, "load_in_4bit": True, "lora_r": 5})
    job = job_of(lora, Precision.NF4, 1)
    assert job.lora is not None and (job.lora.rank, job.base) == (5, Precision.NF4)
    dpo = config(training={"algorithm": "dpo", "data_file": "x"}, dpo={"reference_free": True})
    assert not job_of(dpo, Precision.FP32, 1).keeps_reference
