"""TRL's trainers as gpuherd runs them. Imports torch and TRL: import this module where something is trained.

Only the stable trainers of TRL are built on. Of each is taken what it computes; what it would do besides is not: rows
come as token ids and are taken as they are, nothing is cut or tokenised again, no model card is written, and nothing is
sent to anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head


class _AsIs:
    """What all of them share."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """TRL would report the trainer, the kind of model and the GPUs to its makers."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """TRL would write a README beside each checkpoint."""


class Supervised(_AsIs, SFTTrainer):  # type: ignore[misc]
    """Next-token training on rows of ``input_ids`` and ``labels`` (-100: not trained on).

    The loss is the mean over the trained tokens of a step, over all micro-batches and processes.
    """


@dataclass
class WeighingCollator(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """Pads ``weights`` beside the rest; what is padding weighs nothing."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of rows."""
        batch: dict[str, Any] = super().torch_call(examples)
        weights = torch.zeros(batch["labels"].shape, dtype=torch.float32)
        for row, example in enumerate(examples):
            weights[row, : len(example["weights"])] = torch.tensor(example["weights"], dtype=torch.float32)
        return {**batch, "weights": weights}


class Weighing(Supervised):
    """The same with a weight a token (``weights``): the loss of a step is the sum of weight times -ln p over its rows.

    Weights carry the step's own denominators (``weighing.weighted``), as batches are known before training begins.
    """

    loss_is_scaled_for_ga = True  # the rows of a micro-batch give a part of a sum, and no mean

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """The part of the step's loss that these rows have."""
        weights = inputs.pop("weights")
        outputs = model(**inputs, fused_lm_head=True)
        loss = -(outputs.log_probs * weights[:, 1:]).sum()
        # Gradients and figures are averaged over processes.
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


@dataclass
class PreferringCollator(DataCollatorForPreference):  # type: ignore[misc]
    """Hands ``rpo_weight`` of each row on."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of rows."""
        batch: dict[str, Any] = super().torch_call(examples)
        weights = [each["rpo_weight"] for each in examples]
        return {**batch, "rpo_weights": torch.tensor(weights, dtype=torch.float32)}


class Preferring(_AsIs, DPOTrainer):  # type: ignore[misc]
    """DPO on rows of ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` and ``rpo_weight``.

    The loss of a micro-batch is the mean over its rows of TRL's losses and ``rpo_weight`` times -ln pi(chosen). (TRL's
    own second part of RPO, ``sft``, is a mean over the micro-batch's tokens: the step's loss would depend on how it is
    cut, and be NaN where all chosen completions are empty.)
    """

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        weights = inputs.pop("rpo_weights")
        if not weights.any():
            return super()._compute_loss(model, inputs, return_outputs)
        passes: list[Any] = []  # the policy's own; TRL's loss needs one

        def remembered(**words: Any) -> Any:
            passes.append(model(**words))
            return passes[-1]

        loss = super()._compute_loss(remembered, inputs, False)
        chosen, _ = passes[0].log_probs.sum(dim=1).chunk(2)  # 0 where a token is no completion's
        loss = loss - (weights * chosen).mean()
        return (loss, passes[0]) if return_outputs else loss

    def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
        """Without a reference: each completion is as probable as any other under it, so that it falls out of the loss
        (TRL has no setting for it any more; with one it would be asked for these figures here)."""
        nothing = [0.0] * len(dataset)
        return dataset.add_column("ref_chosen_logps", nothing).add_column("ref_rejected_logps", nothing)


class Rewarding(_AsIs, RewardTrainer):  # type: ignore[misc]
    """A Bradley-Terry reward model on rows of ``chosen_ids`` and ``rejected_ids``, prompt included."""


class Exploring(_AsIs, GRPOTrainer):  # type: ignore[misc]
    """GRPO; sampling and rewards are ours (``rollout_func``, ``reward_funcs``), and so is the reference: TRL would load
    one in the type of the trained weights, and copy an adapter that it finds.

    Args:
        ref_model: None: the trained model without its adapter, or with ``beta`` 0 none.
    """

    def __init__(self, *, args: Any, ref_model: Any, **words: Any) -> None:
        beta, args.beta = args.beta, 0.0
        super().__init__(args=args, **words)
        self.beta = args.beta = beta
        if ref_model is not None:
            add_fused_lm_head(ref_model, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)


def dataset_of(rows: Sequence[dict[str, Any]], order: Sequence[int]) -> Any:
    """The rows as TRL takes them, those of ``order`` one after the other."""
    from datasets import Dataset

    return Dataset.from_list(list(rows)).select(list(order))


def exploring(**words: Any) -> Exploring:
    """A GRPO trainer with a ``rollout_func``. TRL warns that this hook may change; tests tell whether it has."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using 'rollout_func'")
        return Exploring(**words)


def on_one_device(settings: Any) -> Any:
    """TRL's settings for a process that uses one GPU, whatever it sees: Trainer would spread the model over all of them
    by DataParallel, which TRL refuses."""
    if settings.n_gpu > 1:
        settings._n_gpu = 1
    return settings


def padding(tokenizer: Any) -> int:
    """The token that rows are filled up with; it is masked wherever it stands."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(found)
