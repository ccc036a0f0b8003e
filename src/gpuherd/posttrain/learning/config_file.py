"""Reads a configuration from a file and the words behind it, checks it, and writes it as a file again.

What contradicts itself, or is not done here, is refused by its key, with what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.config.yaml_strict import parse_yaml, read_yaml
from gpuherd.posttrain.learning.config import DistributedBlock, EnvBlock, TrainConfig
from gpuherd.runs.records import jsonable


def read_config(file: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a YAML file, with ``training.batch_size=8`` and the like over it, checked.

    Raises UsageError, which names the key: unknown, there twice, of a wrong kind, or contradicting another.
    """
    values = {} if file is None else read_yaml(file)
    for word in overrides:
        set_value(values, word)
    config = read(TrainConfig, values)
    check(config)
    return config


def set_value(values: dict[str, Any], word: str) -> None:
    """Sets ``a.b=value`` in nested mappings; the value is YAML. Raises UsageError for a word that is no such thing.

    >>> values = {"training": {"seed": 1}}
    >>> set_value(values, "training.batch_size=8")
    >>> values
    {'training': {'seed': 1, 'batch_size': 8}}
    """
    key, sign, text = word.partition("=")
    names = key.split(".")
    if not sign or not all(names):
        raise UsageError(f"{printable(word)!r} is no setting; write key=value, as in training.batch_size=8")
    at: Any = values
    for depth, name in enumerate(names[:-1], 1):
        if at.get(name) is None:
            at[name] = {}
        at = at[name]
        if not isinstance(at, dict):
            raise UsageError(f"{printable(word)!r}: {'.'.join(names[:depth])} holds a value and no keys")
    at[names[-1]] = parse_yaml(f"value: {text}", f"{key}=...")["value"]


def as_yaml(config: TrainConfig) -> str:
    """The configuration as YAML that ``read_config`` reads back as equal."""
    import yaml

    text: str = yaml.safe_dump(jsonable(config), sort_keys=False, allow_unicode=True)
    return text


# Numbers that may be null, and what they must be otherwise.
_FROM_1 = (
    "training.num_epochs", "training.num_iterations", "training.batch_size", "training.mini_batch_size",
    "training.micro_batch_size", "training.gradient_accumulation_steps", "training.num_rollouts_per_iteration",
    "training.max_episode_length", "training.eval_episodes", "training.save_every", "training.save_total_limit",
    "training.log_every", "training.max_problems", "training.clear_cache_interval", "model.max_new_tokens",
    "model.generation_batch_size", "model.lora_r", "grpo.group_size", "ppo.num_ppo_epochs", "sft.max_trajectories",
)  # fmt: skip
_FROM_0 = (
    "training.weight_decay", "training.warmup_steps", "training.seed", "model.top_k", "ppo.value_loss_coef",
    "ppo.entropy_coef", "ppo.kl_coef", "grpo.kl_coef", "dpo.rpo_weight", "sft.bc_weight", "sft.world_model_weight",
)  # fmt: skip
_ABOVE_0 = (
    "training.learning_rate", "training.max_grad_norm", "training.adam_epsilon", "model.temperature", "model.top_p",
    "model.lora_alpha", "ppo.clip_range", "ppo.clip_range_vf", "ppo.target_kl", "grpo.clip_range", "grpo.temperature",
    "dpo.beta",
)  # fmt: skip
_FRACTIONS = ("model.top_p", "ppo.gamma", "ppo.gae_lambda", "grpo.gamma")
_BELOW_1 = ("training.adam_beta1", "training.adam_beta2", "model.lora_dropout", "dpo.label_smoothing")

_GREEDY = "policies are trained on drawn answers"
_ONE_FOLDER = "all of a training lies in its output folder; use output_dir or --output"


def check(config: TrainConfig) -> None:
    """Raises UsageError for the first thing that is wrong."""
    for problem in problems_of(config):
        raise UsageError(problem)


def problems_of(config: TrainConfig) -> Iterator[str]:
    """All that is wrong, a sentence each."""
    yield from _numbers(config)
    yield from _training(config)
    yield from _model(config)
    yield from _data(config)
    yield from _distributed(config.distributed)
    yield from _backend(config)
    if config.policy_env is not None:
        yield from _environment("policy_env", config.policy_env)
        if config.policy_env.mode == "client":
            yield "policy_env.mode=client: the policy is trained in it; leave it out, or say server"
    for number, each in enumerate(config.eval_envs):
        yield from _environment(f"eval_envs[{number}]", each)
        if each.mode == "server":
            yield f"eval_envs[{number}].mode=server: nothing is trained in it; leave it out, or say client"


def _numbers(config: TrainConfig) -> Iterator[str]:
    def wrong(keys: Iterable[str], right: Callable[[float], bool], wanted: str) -> Iterator[str]:
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not (right(value) and math.isfinite(value)):
                yield f"{key}={value}; {wanted}"

    yield from wrong(_FROM_1, lambda value: value >= 1, "the least is 1")
    yield from wrong(_FROM_0, lambda value: value >= 0, "the least is 0")
    yield from wrong(_ABOVE_0, lambda value: value > 0, "it is above 0")
    yield from wrong(("ppo.clip_range", "grpo.clip_range"), lambda value: value <= 1, "it is at most 1")
    yield from wrong(_FRACTIONS, lambda value: 0 <= value <= 1, "it is from 0 to 1")
    yield from wrong(_BELOW_1, lambda value: 0 <= value < 1, "it is from 0 to under 1")


def _training(config: TrainConfig) -> Iterator[str]:
    told = config.training
    if told.eval_every < 0:
        yield f"training.eval_every={told.eval_every}; 0 for never, or 1 and above"
    if told.use_fp16 and told.use_bf16:
        yield "training.use_fp16 and training.use_bf16 are both true; choose one (bf16 needs no loss scaling)"
    for name in ("checkpoint_dir", "log_dir"):
        if getattr(told, name) is not None:
            yield f"training.{name}: {_ONE_FOLDER}"
    if told.wandb_project and told.trackio_project not in (None, told.wandb_project):
        yield "training.trackio_project and training.wandb_project differ; call them the same, or leave one out"
    if told.wandb_entity is not None:
        yield "training.wandb_entity: set WANDB_ENTITY in the environment, which wandb reads itself"
    group = config.grpo.group_size
    if told.algorithm == "grpo" and told.num_rollouts_per_iteration % group:
        yield (
            f"training.num_rollouts_per_iteration={told.num_rollouts_per_iteration} is no multiple of "
            f"grpo.group_size={group}; groups are whole"
        )
    if told.algorithm == "grpo" and group == 1:
        yield "grpo.group_size=1: an answer alone in its group is no better and no worse; 2 or more"
    if told.algorithm == "dpo" and told.data_file is None and config.dpo.samples_per_prompt < 2:
        yield f"dpo.samples_per_prompt={config.dpo.samples_per_prompt}: the best and the worst are of 2 or more"
    if told.algorithm in ("dpo", "sft") and told.log_every != 1:
        yield f"training.log_every={told.log_every}: {told.algorithm} logs every step; leave it at 1"
    if told.algorithm == "sft" and config.sft.collect_every != 1:
        yield "sft.collect_every: one training collects once, before it begins; for more rounds use gpuherd posttrain"


def _model(config: TrainConfig) -> Iterator[str]:
    told = config.model
    if told.torch_dtype is not None and told.dtype is not None and told.torch_dtype != told.dtype:
        yield f"model.torch_dtype={told.torch_dtype} and model.dtype={told.dtype} are the same key; keep one"
    if told.model_type is not None:
        yield "model.model_type: the model's own config says what it is; leave it out"
    if told.tokenizer_name_or_path not in (None, told.model_name_or_path):
        yield "model.tokenizer_name_or_path: a model is trained with its own tokenizer; save it into the model's folder"
    if told.trust_remote_code:
        yield "model.trust_remote_code: code that a model brings is not run while it is trained; use one without"
    if told.load_in_8bit and told.load_in_4bit:
        yield "model.load_in_8bit and model.load_in_4bit are both true; choose one"
    if (told.load_in_8bit or told.load_in_4bit) and not told.use_lora:
        yield "model.load_in_8bit and load_in_4bit: quantised weights are trained under an adapter; set model.use_lora"
    if (told.load_in_8bit or told.load_in_4bit) and config.distributed.strategy == "fsdp":
        yield "model.load_in_8bit or load_in_4bit with distributed.strategy=fsdp: codes are not divided; use ddp"
    if told.use_flash_attention and told.attn_implementation not in (None, "flash_attention_2"):
        yield f"model.use_flash_attention and model.attn_implementation={told.attn_implementation}: keep one"
    if not told.do_sample:
        yield f"model.do_sample=false: {_GREEDY}"
    if told.num_beams != 1:
        yield f"model.num_beams={told.num_beams}: {_GREEDY}, not on beams; leave it at 1"
    for name in ("repetition_penalty", "length_penalty"):
        if getattr(told, name) != 1:
            yield f"model.{name}={getattr(told, name)}: {_GREEDY} of the model itself; leave it at 1"
    if told.device not in ("auto", "cpu", "cuda"):
        yield f"model.device={printable(told.device)}; it is auto, cpu or cuda; which GPUs say distributed.gpu_ids"
    if told.device_map not in (None, "auto", "cpu", "cuda"):
        yield f"model.device_map={printable(told.device_map)}; it is auto, cpu or cuda: processes share models by fsdp"


def _data(config: TrainConfig) -> Iterator[str]:
    told = config.training
    if told.algorithm in ("ppo", "grpo"):
        if told.data_file is not None:
            yield f"training.data_file: {told.algorithm} samples itself; name its problems by policy_env.dataset"
        if config.policy_env is None:
            yield f"policy_env is missing: {told.algorithm} answers its problems"
    elif told.data_file is None and config.policy_env is None:
        yield f"training.data_file is missing: {told.algorithm} learns from it (or from a policy_env's problems)"
    elif told.data_file is not None and config.policy_env is not None:
        yield "training.data_file and policy_env are two sources of what is learnt from; keep one"


def _distributed(told: DistributedBlock) -> Iterator[str]:
    if told.strategy == "deepspeed" or told.deepspeed_config is not None or told.zero_stage is not None:
        yield "distributed: DeepSpeed is not used; strategy: fsdp divides weights and states as ZeRO stage 3 does"
    if told.num_gpus is not None and told.num_gpus < 1:
        yield f"distributed.num_gpus={told.num_gpus}; the least is 1 (for a CPU: --device cpu)"
    if told.gpu_ids is not None:
        if len(set(told.gpu_ids)) < len(told.gpu_ids) or any(each < 0 for each in told.gpu_ids) or not told.gpu_ids:
            yield f"distributed.gpu_ids={list(told.gpu_ids)}: numbers of GPUs from 0 on, each once"
        elif told.num_gpus is not None and told.num_gpus != len(told.gpu_ids):
            yield f"distributed.num_gpus={told.num_gpus}, and distributed.gpu_ids names {len(told.gpu_ids)}"
    if told.num_nodes < 1 or not 0 <= told.node_rank < told.num_nodes:
        yield f"distributed.node_rank={told.node_rank} of num_nodes={told.num_nodes}: ranks are counted from 0"
    many = told.gpu_count > 1 or told.num_nodes > 1
    if told.enabled and not many:
        yield f"distributed.enabled with {told.gpu_count} GPU; it takes 2 or more"
    if told.enabled is False and many:
        yield "distributed.enabled=false, and more than one GPU is asked for; leave one of the two out"
    if many and told.strategy == "single":
        yield "distributed.strategy=single with several processes; choose ddp or fsdp"
    if told.fsdp_cpu_offload and told.strategy != "fsdp":
        yield "distributed.fsdp_cpu_offload is for strategy fsdp"
    if told.master_port is not None and not 1 <= told.master_port <= 65535:
        yield f"distributed.master_port={told.master_port}; it is from 1 to 65535"


def _backend(config: TrainConfig) -> Iterator[str]:
    told = config.distributed
    if told.backend is None or told.gpu_count * told.num_nodes == 1:
        return
    fitting = "gloo" if config.on_cpu else "nccl"
    if told.backend != fitting:
        place = "a CPU" if config.on_cpu else "GPUs"
        yield f"distributed.backend={told.backend}: tensors on {place} are exchanged by {fitting}; leave it out"


def _environment(where: str, told: EnvBlock) -> Iterator[str]:
    if told.remote or told.server_address is not None:
        yield f"{where}: environments behind a gRPC server are not reached from here; name one that runs here"
    if told.env_type == "custom" and told.custom_class is None:
        yield f"{where}.custom_class is missing: the dotted name of an environment"
    if told.env_type != "custom" and (told.custom_class is not None or told.custom_kwargs):
        yield f"{where}.custom_class and custom_kwargs are for env_type custom"
    if told.problems is not None and told.dataset is not None:
        yield f"{where}.problems and {where}.dataset are two sources of problems; keep one"
    if told.problems is None and told.dataset is None:
        yield f"{where}.dataset is missing: a task by name (arithmetic, gsm8k), or a file of problems"
    if told.timeout <= 0:
        yield f"{where}.timeout={told.timeout}; seconds above 0"
    if told.max_attempts is not None and told.max_attempts < 1:
        yield f"{where}.max_attempts={told.max_attempts}; the least is 1"
    if told.reward_clip is not None and told.reward_clip <= 0:
        yield f"{where}.reward_clip={told.reward_clip}; above 0"
