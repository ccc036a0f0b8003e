"""A configuration in the words of algorithms, samplers and trainees. Pure: a config in, frozen options out."""

from __future__ import annotations

from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.options import Sharding, StepOptions, Strategy
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.types import Precision, Sampling, cut_draws

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_of(config: TrainConfig) -> str:
    """The model's id or folder, with the ending that quantises it while it is loaded."""
    told = config.model
    ending = "-8bit" if told.load_in_8bit else "-4bit" if told.load_in_4bit else ""
    return f"{told.model_name_or_path}{ending}"


def precision_of(config: TrainConfig) -> Precision:
    """Of weights, passes and attention."""
    told = config.model
    dtype = told.torch_dtype or told.dtype
    attention = told.attn_implementation or ("flash_attention_2" if told.use_flash_attention else "sdpa")
    amp = "float16" if config.training.use_fp16 else "bfloat16" if config.training.use_bf16 else None
    weights = None if dtype in (None, "auto") else _DTYPES.get(dtype, dtype)
    if weights is None and amp is not None and not (told.load_in_8bit or told.load_in_4bit):
        weights = "float32"  # autocast is for weights that keep small changes
    return Precision(None if told.load_in_8bit or told.load_in_4bit else weights, amp, attention)


def on_policy(config: TrainConfig) -> bool:
    """Whether it learns by the log-probs of what it draws."""
    return bool(algorithm_class(config.training.algorithm.upper()).on_policy)


def cut(config: TrainConfig) -> str | None:
    """The warning of ``cut_draws``, where it is due."""
    return cut_draws(sampling_of(config), config.training.algorithm, "model") if on_policy(config) else None


def sampling_of(config: TrainConfig) -> Sampling:
    """How answers are drawn while it trains."""
    told, training = config.model, config.training
    temperature = told.temperature
    if training.algorithm == "grpo" and config.grpo.temperature is not None:
        temperature = config.grpo.temperature
    return Sampling(
        max_new_tokens=min(told.max_new_tokens, training.max_episode_length),
        temperature=temperature,
        top_p=1.0 if told.top_p is None else told.top_p,
        top_k=told.top_k or 0,
        batch_size=told.generation_batch_size,
        use_chat_template=told.use_chat_template,
        seed=training.seed,
    )


def steps_of(config: TrainConfig, world_size: int) -> StepOptions:
    """How a step is divided. Raises UsageError where the processes don't divide the batch."""
    rows = rows_of_a_step(config)
    if rows % world_size:
        raise UsageError(
            f"training.{_rows_key(config)}={rows} is no multiple of the {world_size} processes; choose one that is"
        )
    told, shared = config.training, config.distributed
    strategy = Strategy.SINGLE if world_size == 1 else Strategy(shared.strategy)
    return StepOptions(
        micro_batch_size=told.micro_batch_size or -(-rows // (world_size * told.gradient_accumulation_steps)),
        gradient_checkpointing=config.model.gradient_checkpointing,
        clear_cache_interval=told.clear_cache_interval,
        dynamic_batch_size=told.dynamic_batch_size,
        strategy=strategy,
        fsdp_sharding_strategy=shared.fsdp_sharding_strategy if strategy is Strategy.FSDP else Sharding.FULL_SHARD,
        fsdp_cpu_offload=shared.fsdp_cpu_offload if strategy is Strategy.FSDP else False,
    )


def rows_of_a_step(config: TrainConfig) -> int:
    """Rollouts or rows of one optimiser step, over all processes."""
    told = config.training
    if told.algorithm in ("dpo", "sft"):
        return told.batch_size
    return min(told.mini_batch_size or told.batch_size, told.num_rollouts_per_iteration)


def _rows_key(config: TrainConfig) -> str:
    told = config.training
    if told.algorithm in ("dpo", "sft"):
        return "batch_size"
    if told.num_rollouts_per_iteration < (told.mini_batch_size or told.batch_size):
        return "num_rollouts_per_iteration"
    return "batch_size" if told.mini_batch_size is None else "mini_batch_size"


def problems_wanted(config: TrainConfig) -> int | None:
    """How many problems of the training split there are to be; None: all."""
    told = config.training
    if told.max_problems is None and told.algorithm == "sft" and told.data_file is None:
        return config.sft.max_trajectories
    return told.max_problems


def options_of(config: TrainConfig, problems: int) -> dict[str, Any]:
    """The algorithm's options, by their names in its ``Options``.

    Args:
        problems: of the training split, for the passes that the iterations of ppo and grpo take.
    """
    kind = config.training.algorithm
    if kind == "ppo":
        return {**_common(config), **_sampled(config, problems, 1), **_ppo(config)}
    if kind == "grpo":
        return {**_common(config), **_sampled(config, problems, config.grpo.group_size), **_grpo(config)}
    rows = {"batch_size": config.training.batch_size, "epochs": config.training.num_epochs}
    if config.training.num_iterations is not None:
        rows["max_steps"] = config.training.num_iterations
    return {**_common(config), **rows, **(_dpo(config) if kind == "dpo" else _sft(config))}


def _common(config: TrainConfig) -> dict[str, Any]:
    told, model = config.training, config.model
    options: dict[str, Any] = {
        "weight_decay": told.weight_decay,
        "grad_clip": told.max_grad_norm,
        "warmup_steps": told.warmup_steps,
        "optimizer": told.optimizer,
        "betas": (told.adam_beta1, told.adam_beta2),
        "eps": told.adam_epsilon,
    }
    if told.learning_rate is not None:
        options["lr"] = told.learning_rate
    if told.lr_scheduler is not None:
        options["scheduler"] = told.lr_scheduler
    if model.use_lora:
        options["lora"] = {
            "r": model.lora_r,
            "alpha": model.lora_alpha,
            "dropout": model.lora_dropout,
            "target_modules": None if model.lora_target_modules is None else list(model.lora_target_modules),
        }
    return options


def _sampled(config: TrainConfig, problems: int, samples: int) -> dict[str, Any]:
    """Of algorithms that sample while they train: so many iterations, over the problems as often as it takes."""
    told = config.training
    batch = told.num_rollouts_per_iteration // samples
    if batch > problems:
        raise UsageError(
            f"training.num_rollouts_per_iteration={told.num_rollouts_per_iteration} asks for {batch} problems a step, "
            f"and there are {problems}; lower it, or name more problems"
        )
    iterations = told.num_iterations or told.num_epochs
    return {
        "samples_per_prompt": samples,
        "batch_size": batch,
        "epochs": -(-iterations // -(-problems // batch)),
        "max_steps": iterations,
        "minibatch_size": rows_of_a_step(config),
        "online": True,
    }


def _ppo(config: TrainConfig) -> dict[str, Any]:
    told = config.ppo
    return {
        "clip_range": told.clip_range,
        "clip_range_vf": told.clip_range_vf,
        "gamma": told.gamma,
        "gae_lambda": told.gae_lambda,
        "num_ppo_epochs": told.num_ppo_epochs,
        "value_loss_coef": told.value_loss_coef,
        "entropy_coef": told.entropy_coef,
        "target_kl": told.target_kl,
        "normalize_advantages": told.normalize_advantages,
        "kl_coef": told.kl_coef,
    }


def _grpo(config: TrainConfig) -> dict[str, Any]:
    told = config.grpo
    return {
        "reward_normalization": told.reward_normalization if told.normalize_rewards else "none",
        "clip_range": told.clip_range,
        "kl_coef": told.kl_coef,
    }


def _dpo(config: TrainConfig) -> dict[str, Any]:
    told = config.dpo
    return {
        "beta": told.beta,
        "reference_free": told.reference_free,
        "label_smoothing": told.label_smoothing,
        "loss_type": told.loss_type,
        "rpo_weight": told.rpo_weight,
        "samples_per_example": told.samples_per_prompt,
    }


def _sft(config: TrainConfig) -> dict[str, Any]:
    told = config.sft
    return {
        "source": "answers" if config.training.data_file is not None else "samples",
        "samples_per_example": 1,
        "mode": told.mode,
        "bc_weight": told.bc_weight,
        "world_model_weight": told.world_model_weight,
        "filter_low_reward": told.filter_low_reward,
        "min_reward_threshold": told.min_reward_threshold,
        "packing": told.packing,
    }
