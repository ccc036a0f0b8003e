"""Learns a reward model from comparisons: Bradley and Terry's, where the probability that a completion is preferred is
the logistic function of the difference of rewards. Its loss is -ln sigmoid(r(chosen) - r(rejected)), the mean over
pairs (Ouyang et al. 2022, arXiv 2203.02155, equation 1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.guidance.guide import FILE
from gpuherd.models.checkpoints.hub import locate
from gpuherd.models.describe.config import model_type_of
from gpuherd.models.load.pretrained import check_code, config_of, has_class
from gpuherd.models.lora.adapter import is_adapter
from gpuherd.models.memory.weights import split_precision
from gpuherd.models.names import parse_model, quoted
from gpuherd.posttrain.engine.fit import TrainPlan, TrainSetup, digest, fit, save_every_for, steps_for
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Watching
from gpuherd.posttrain.engine.strategies import without_dropout
from gpuherd.posttrain.rewards.reward_model import FORM_FILE, Form
from gpuherd.posttrain.rollout.loading import division, set_attention, with_rows
from gpuherd.posttrain.types import Comparison, Precision

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.engine.train_engine import Loss

STAGE = "reward model"


@dataclass(frozen=True, slots=True)
class RewardTraining:
    """How a reward model is learnt.

    Attributes:
        epochs: how often each pair is learnt from.
        batch_size: pairs of an optimiser step, over all processes.
        max_steps: no more optimiser steps than this.
        save_every: steps between checkpoints; None: by the number of steps.
    """

    epochs: int = 5
    batch_size: int = 16
    lr: float = 1e-5
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    warmup_steps: int = 0
    max_steps: int | None = None
    num_workers: int = 0
    save_every: int | None = None


def train_reward_model(
    comparisons: Sequence[Comparison],
    base: str,
    folder: Path,
    options: RewardTraining | None = None,
    *,
    precision: Precision | None = None,
    device: str = "cpu",
    seed: int = 0,
    steps: StepOptions | None = None,
    use_chat_template: bool = False,
    watching: Watching | None = None,
) -> Path:
    """The folder of a reward model (``folder/model``), for ``rewards.reward_model.RewardModel``; ``scores_of_ids`` of
    that takes a rollout's own tokens. Goes on from a checkpoint in ``folder``; does nothing where it is done.

    Args:
        comparisons: with ids of the base model's tokenizer.
        base: an id of the Hub or a folder: a causal model, which gets a new head, or a reward model to go on with.
        precision: without a dtype the weights are in float32, whatever the checkpoint's are.
        use_chat_template: prompts are conversations by the template; only said to who scores texts later.
        watching: how it is logged, kept and stopped; without, or where that names none, ``options.save_every`` counts.

    Raises UsageError (no comparisons, or some that are longer than the model's places), and what ``fit`` raises.
    """
    options, precision, steps = options or RewardTraining(), precision or Precision(), steps or StepOptions()
    watching = watching or Watching()
    if not comparisons:
        raise UsageError("a reward model is learnt from comparisons, and there are none")
    rows = [_row(each) for each in comparisons]
    form = Form.TURN if use_chat_template else Form.ENDED
    total = steps_for(len(rows), options.epochs, options.batch_size, options.max_steps)
    plan = TrainPlan(
        folder=folder,
        stage=STAGE,
        optimiser=OptimiserOptions(
            learning_rate=options.lr,
            weight_decay=options.weight_decay,
            max_grad_norm=options.grad_clip,
            warmup_steps=options.warmup_steps,
        ),
        steps=steps,
        batch_size=options.batch_size,
        total_steps=total,
        amp_dtype=precision.amp_dtype,
        device=device,
        seed=seed,
        num_workers=options.num_workers,
        watching=replace(watching, save_every=watching.save_every or save_every_for(total, options.save_every)),
        identity={
            "algorithm": STAGE,
            "model": base,
            "data": digest(rows),
            "seed": seed,
            "precision": [precision.dtype, precision.amp_dtype],
            "options": {
                name: said for name, said in asdict(options).items() if name not in ("num_workers", "save_every")
            },
        },
    )

    def build(world: DistEnv) -> TrainSetup[dict[str, list[int]], Sides]:
        module, tokenizer = load_base(base, precision, world.device, seed, sharded=steps.shards)
        _check_lengths(comparisons, rows, module)
        fill = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        module.config.get_text_config().pad_token_id = fill  # the score is read at the last token that is another
        return TrainSetup(module, tokenizer, BradleyTerry(int(fill), world.device))

    return fit(plan, rows, build, extra_files={FORM_FILE: json.dumps({"form": form.value}) + "\n"})


@dataclass(frozen=True, slots=True)
class Sides:
    """A comparison to learn from: the tokens of both sides, prompt included."""

    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True, slots=True)
class BradleyTerry:
    """The loss, an ``engine.fit.Objective``.

    Attributes:
        fill: the token that the model takes for filling.
    """

    fill: int
    device: str

    def items(self, rows: Sequence[dict[str, list[int]]]) -> list[Sides]:
        """Each pair is for itself."""
        return [Sides(row["chosen_ids"], row["rejected_ids"]) for row in rows]

    def loss(self, module: Any, items: Sequence[Sides]) -> Loss:
        """The sum over some pairs."""
        from torch.nn.functional import logsigmoid

        from gpuherd.posttrain.engine.log_probs import padded
        from gpuherd.posttrain.engine.train_engine import Loss

        pairs = len(items)
        ids, mask = padded([each.chosen for each in items] + [each.rejected for each in items], self.device, self.fill)
        rewards = module(input_ids=ids, attention_mask=mask).logits[:, 0].float()
        margins = rewards[:pairs] - rewards[pairs:]
        return Loss(
            -logsigmoid(margins).sum(),
            {
                "accuracy": ((margins > 0).sum(), pairs),
                "margin": (margins.sum(), pairs),
                "mean_reward": (rewards.sum(), 2 * pairs),
            },
        )


def load_base(base: str, precision: Precision, device: str, seed: int, *, sharded: bool = False) -> tuple[Any, Any]:
    """A model for sequences with one output, and its tokenizer; a head that the checkpoint has not is drawn by the
    seed. Raises BadModel where anything else is missing.

    Args:
        sharded: as in ``rollout.loading.load_anew``.
    """
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    folder = locate(parse_model(base), for_loading=True)
    refuse_base(base, folder)
    config = config_of(folder, trusted=False)
    config.num_labels = 1
    plan = division(device) if sharded else None
    transformers.set_seed(seed)
    said = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # that the head is new is meant
    try:
        module, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32 if precision.dtype is None else getattr(torch, precision.dtype),
            weights_only=True,
            output_loading_info=True,
            local_files_only=True,
            **({} if plan is None else {"distributed_config": plan}),
        )
    finally:
        transformers_logging.set_verbosity(said)
    heads = ("score", "classifier", "classification_head", "pre_classifier")
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(heads))
    if missing:
        raise BadModel(f"{quoted(base)}: its checkpoint has no {missing[0]}, which would be made up at random")
    if plan is not None:
        module = with_rows(module)
        transformers.set_seed(seed)
        _draw(module, info["missing_keys"])
    set_attention(module, precision.attention)
    without_dropout(module)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return module if sharded else module.to(device), tokenizer


def _draw(module: Any, names: Iterable[str]) -> None:
    """Draws these weights, whole and in each process alike, as transformers does for a model that is not sharded."""
    import torch

    for owner in sorted({name.rpartition(".")[0] for name in names}):
        head = module.get_submodule(owner)
        for name, weight in list(head.named_parameters(recurse=False)):
            setattr(head, name, torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype)))
        module._init_weights(head)


def refuse_base(base: str, folder: Path) -> None:
    """Raises UsageError or BadModel where a reward model can't start from this one, from its small files alone: an
    adapter, a classifier that guides, one with several outputs, one whose architecture scores no sequences.

    Args:
        folder: with its config.json.
    """
    if split_precision(base)[1] is not None:
        raise UsageError(f"{quoted(base)}: a reward model is trained whole; name the model without its precision")
    if is_adapter(folder):
        raise UsageError(f"{quoted(base)} is an adapter; a reward model starts from a whole one: merge it first")
    if (folder / FILE).is_file():
        raise UsageError(
            f"{quoted(base)} is a classifier that guides; a reward model starts from a causal model or a reward model"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise BadModel(f"{folder / 'config.json'} can't be read: {problem}") from None
    if not isinstance(config, dict):
        raise BadModel(f"{folder / 'config.json'} is no mapping")
    check_code(base, config, trusted=False)
    named = [each for each in config.get("architectures") or () if isinstance(each, str)]
    outputs = len(config["id2label"]) if isinstance(config.get("id2label"), dict) else config.get("num_labels", 2)
    if any(each.endswith("ForSequenceClassification") for each in named) and outputs != 1:
        raise UsageError(
            f"{quoted(base)} classifies into {outputs} kinds; a reward model has one output: start from a causal "
            "model or a reward model"
        )
    if has_class(config, "ForSequenceClassification") is False:
        raise BadModel(
            f"{quoted(base)} is of the architecture {model_type_of(config)}, which scores no sequences in "
            "transformers; name another model of the same tokenizer (proxy_model)"
        )


def _row(each: Comparison) -> dict[str, list[int]]:
    before = [*each.prompt_ids, *each.context_ids]
    return {"chosen_ids": [*before, *each.chosen_ids], "rejected_ids": [*before, *each.rejected_ids]}


def _check_lengths(comparisons: Sequence[Comparison], rows: Sequence[dict[str, list[int]]], module: Any) -> None:
    most = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    for each, row in zip(comparisons, rows, strict=True):
        longest = max(map(len, row.values()))
        if most is not None and longest > most:
            raise UsageError(
                f"problem {each.problem}: prompt and completion have {longest} tokens, and the reward model has places "
                f"for {most}; take a base model with more, or lower generation.max_new_tokens"
            )
