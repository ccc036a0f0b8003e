"""Step by step the losses of SFT, DPO and reward models are those of TRL's trainers, by the same rows and settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.preference.vowels import comparisons, episodes, training

from gpuherd.posttrain.algos.dpo import DPO, row_of
from gpuherd.posttrain.algos.sft import SFT, Weights
from gpuherd.posttrain.algos.sft import row_of as sft_row_of
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.fit import order
from gpuherd.posttrain.engine.options import StepOptions
from gpuherd.posttrain.preference.reward_model import RewardTraining, train_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

STEPS, BATCH, LR = 6, 4, 3e-3
OURS: dict[str, Any] = {"lr": LR, "batch_size": BATCH, "max_steps": STEPS, "epochs": 9, "scheduler": "linear"}
IN_TWO = StepOptions(micro_batch_size=2)


def arguments(kind: Any, folder: Path, **other: Any) -> Any:
    """TRL's settings for the same; all that its defaults would do otherwise is said."""
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="linear",
        warmup_steps=0,
        max_grad_norm=1.0,
        weight_decay=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        **other,
    )


def theirs(trainer_class: Any, model: Any, rows: Sequence[dict[str, Any]], settings: Any, **other: Any) -> list[Any]:
    """What a trainer of TRL logs of each step, given token ids and leaving them as they are."""
    from datasets import Dataset

    class AsIs(trainer_class):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    places = order(len(rows), STEPS, BATCH, 0)
    trainer = AsIs(model=model, args=settings, train_dataset=Dataset.from_list(list(rows)).select(places), **other)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def held_together(folder: Path, logged: Sequence[Any], names: Sequence[str], digits: float = 1e-4) -> None:
    lines = read_curves(folder)
    assert len(lines) == len(logged) == STEPS
    for name in names:
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in logged], rel=digits), name
    assert lines[-1]["loss"] < 0.97 * lines[0]["loss"]  # it moved


def causal(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_sft(policy_model: Path, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    rows = episodes()
    SFT(SFT.Options(**OURS)).train(training(policy_model, rows, tmp_path / "ours", steps=IN_TWO))
    logged = theirs(
        SFTTrainer,
        causal(policy_model),
        [sft_row_of(each, Weights(1.0, 0.0)) for each in rows],
        arguments(SFTConfig, tmp_path / "theirs"),
        processing_class=tokenizer_of(policy_model),
    )
    held_together(tmp_path / "ours", logged, ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy"))


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_dpo(kind: str, policy_model: Path, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    rows = comparisons()
    options = DPO.Options(**OURS, loss_type=kind, beta=0.3)
    DPO(options).train(training(policy_model, rows, tmp_path / "ours", steps=IN_TWO))
    logged = theirs(
        DPOTrainer,
        causal(policy_model),
        [row_of(each) for each in rows],
        arguments(DPOConfig, tmp_path / "theirs", loss_type=[kind], beta=0.3),
        ref_model=causal(policy_model),
        processing_class=tokenizer_of(policy_model),
    )
    names = ("loss", "learning_rate", "rewards/accuracies", "logps/chosen", "logps/rejected", "mean_token_accuracy")
    held_together(tmp_path / "ours", logged, names)


def test_a_reward_model(policy_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    rows = comparisons()
    start = RewardTraining(batch_size=8, max_steps=1, lr=1e-30)  # the head is drawn anew: both begin with this one
    first = train_reward_model(rows, str(policy_model), tmp_path / "first", start)
    options = RewardTraining(batch_size=BATCH, max_steps=STEPS, epochs=9, lr=LR)
    train_reward_model(rows, str(first), tmp_path / "ours", options, steps=IN_TWO)
    before = [[*each.prompt_ids, *each.context_ids] for each in rows]
    settings = arguments(RewardConfig, tmp_path / "theirs")
    settings.lr_scheduler_type = "constant"
    logged = theirs(
        RewardTrainer,
        AutoModelForSequenceClassification.from_pretrained(first, dtype=torch.float32),
        [
            {"chosen_ids": [*prompt, *each.chosen_ids], "rejected_ids": [*prompt, *each.rejected_ids]}
            for prompt, each in zip(before, rows, strict=True)
        ],
        settings,
        processing_class=tokenizer_of(first),
    )
    held_together(tmp_path / "ours", logged, ("loss", "grad_norm", "accuracy", "margin"))
