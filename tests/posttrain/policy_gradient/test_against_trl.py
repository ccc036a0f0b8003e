"""GRPO's loss and gradient are those of TRL's GRPOTrainer on the same batch, and so are its advantages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.policy_gradient.rollouts import MIXED

from gpuherd.posttrain.policy_gradient.advantages import Normalization, grouped_advantages
from gpuherd.posttrain.policy_gradient.batch import batch_of, rectangle
from gpuherd.posttrain.policy_gradient.forward import weighed
from gpuherd.posttrain.policy_gradient.losses import LossType
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


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("kind", list(LossType))
def test_loss_and_gradient(trainer: Any, kind: LossType, corrected: bool) -> None:
    model = trainer.model.eval()  # as TRL divides in one whole batch
    now, _ = weighed(model, MIXED, TEMPERATURE, "cpu", 4)
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
    trainer.loss_type, trainer.args.use_bias_correction_kl = str(kind), corrected
    model.zero_grad()
    wanted = trainer._compute_loss(model, theirs)
    wanted.backward()
    slopes = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model.zero_grad()
    how = Objective(model, "cpu", TEMPERATURE, kind, MOST, (0.2, 0.28), kl_coef=BETA, kl_correction=corrected)
    found = how.loss(items) / how.weight(items)
    found.backward()  # type: ignore[no-untyped-call]
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
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
