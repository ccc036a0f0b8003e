"""GRPO's loss and gradient are those of TRL's GRPOTrainer on the same batch, and so are its advantages."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.policy_gradient.rollouts import MIXED, rollout

from gpuherd.posttrain.algos.rloo import divergence, leave_one_out
from gpuherd.posttrain.policy_gradient.advantages import Normalization, grouped_advantages
from gpuherd.posttrain.policy_gradient.algorithm import LossType
from gpuherd.posttrain.policy_gradient.forward import batch_of, rectangle, score_rollouts
from gpuherd.posttrain.policy_gradient.objective import Item, Objective

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEMPERATURE, BETA, MOST = 0.7, 0.1, 6


@pytest.fixture(scope="module")
def trainer(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=MOST,
        temperature=TEMPERATURE,
        beta=BETA,
        epsilon=0.2,
        epsilon_high=0.28,
        disable_dropout=True,
    )
    model = AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(policy_model)
    rows = Dataset.from_list([{"prompt": "q"}] * 8)
    return GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args=arguments, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip


@pytest.mark.parametrize(("corrected", "most"), [(True, None), (False, None), (True, 1.5)])
@pytest.mark.parametrize("kind", list(LossType))
def test_loss_and_gradient(trainer: Any, kind: LossType, corrected: bool, most: float | None) -> None:
    model = trainer.model.eval()  # as TRL divides in one whole batch
    now, _ = score_rollouts(model, MIXED, TEMPERATURE, "cpu", 4)
    drawn = torch.Generator().manual_seed(0)
    items = [
        Item(
            each,
            [(-1.0) ** number * 1.5] * len(each.ids),
            [float(value + torch.randn((), generator=drawn) * 0.3) for value in log_probs],
            [float(value + torch.randn((), generator=drawn) * 0.3) for value in log_probs],
        )
        for number, (each, log_probs) in enumerate(zip(MIXED, now, strict=True))
    ]
    batch = batch_of(MIXED, "cpu")
    wide = batch.answers.shape[1]
    left = batch.ids.shape[1] - wide
    theirs = {
        "prompt_ids": batch.ids[:, :left],
        "prompt_mask": batch.mask[:, :left],
        "completion_ids": batch.answers,
        "completion_mask": batch.mask[:, left:],
        "tool_mask": batch.by_policy.long(),
        "advantages": torch.tensor([each.advantages[0] for each in items]),
        "old_per_token_logps": rectangle([[value or 0.0 for value in each.old or ()] for each in items], wide, "cpu"),
        "ref_per_token_logps": rectangle([each.reference for each in items], wide, "cpu"),
        "num_items_in_batch": batch.by_policy.sum().float(),
    }
    whole = kind == LossType.GSPO  # TRL has it as two options
    trainer.loss_type, trainer.args.use_bias_correction_kl = "grpo" if whole else str(kind), corrected
    trainer.importance_sampling_level, trainer.args.delta = "sequence" if whole else "token", most
    model.zero_grad()
    wanted = trainer._compute_loss(model, theirs)
    wanted.backward()
    slopes = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model.zero_grad()
    how = Objective(
        model, "cpu", TEMPERATURE, kind, MOST, (0.2, 0.28), clip_most=most, kl_coef=BETA, kl_correction=corrected
    )
    found = how.loss(items).total / how.weight(items)
    found.backward()  # type: ignore[no-untyped-call]
    # One ratio for an answer: these four terms of about 1.5 nearly cancel out, and TRL has rounded some to float32.
    near = 1e-6 if whole else 0.0
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5, abs=near)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, slopes[name], rtol=1e-4, atol=1e-5), name


def test_advantages_are_those_that_trl_computes(trainer: Any) -> None:
    """TRL has them inside of its generation: so a whole step of it is taken apart, with rewards that are known."""
    rewards = [0.0, 1.0, 0.25, 3.0]
    trainer.reward_funcs[0] = lambda completions, **_: rewards[: len(completions)]
    for scale, ours in (("group", Normalization.GROUP), ("batch", Normalization.BATCH), ("none", Normalization.NONE)):
        trainer.scale_rewards = scale
        trainer.model.train()
        made = trainer._generate_and_score_completions([{"prompt": "q"}] * 4)
        wanted = grouped_advantages(rewards, [0] * 4, ours)
        assert made["advantages"].tolist() == pytest.approx(wanted, rel=1e-5)
        assert math.fsum(wanted) == pytest.approx(0, abs=1e-9)


def test_advantages_of_rloo_are_those_that_trl_computes(policy_model: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import RLOOConfig, RLOOTrainer

    rewards = [0.0, 1.0, 0.25, 3.0]
    arguments = RLOOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=4,
        num_generations=4, max_completion_length=MOST, temperature=TEMPERATURE, beta=BETA, disable_dropout=True,
    )  # fmt: skip
    trainer = RLOOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.float64),
        lambda completions, **_: rewards[: len(completions)],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "q"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(policy_model),
    )
    with torch.no_grad():  # so that there is a divergence from the reference
        trainer.model.lm_head.weight *= 1.5
    made = trainer._generate_and_score_completions([{"prompt": "q"}] * 4)
    lengths = made["completion_mask"].sum(dim=1).tolist()
    rollouts = [
        rollout(prompt[-1:], ids[:length])
        for prompt, ids, length in zip(
            made["prompt_ids"].tolist(), made["completion_ids"].tolist(), lengths, strict=True
        )
    ]
    now, _ = score_rollouts(trainer.model.eval(), rollouts, TEMPERATURE, "cpu", 4)
    reference, _ = score_rollouts(trainer.ref_model.eval(), rollouts, TEMPERATURE, "cpu", 4)
    drawn = [replace(each, log_probs=tuple(log_probs)) for each, log_probs in zip(rollouts, now, strict=True)]
    apart = [divergence(each, theirs) for each, theirs in zip(drawn, reference, strict=True)]
    assert max(map(abs, apart)) > 0.01
    earned = [reward - BETA * far for reward, far in zip(rewards, apart, strict=True)]
    assert made["advantages"].tolist() == pytest.approx(leave_one_out(earned, [0] * 4), rel=1e-4)
