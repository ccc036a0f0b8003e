"""A configuration as options of algorithms, samplers, steps and processes. Pure, but for the look at a port."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.engine.options import Sharding, StepOptions, Strategy
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.config_file import check
from gpuherd.posttrain.runs import launch
from gpuherd.posttrain.runs.options import Where
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


# Options of algorithms, and the keys of the file that hold them. Those of an algorithm's own block (``ppo:``) that have
# the option's name are not listed: they are options as they are.
_EVERY = {
    "lr": "training.learning_rate",
    "scheduler": "training.lr_scheduler",
    "weight_decay": "training.weight_decay",
    "grad_clip": "training.max_grad_norm",
    "warmup_steps": "training.warmup_steps",
    "optimizer": "training.optimizer",
    "eps": "training.adam_epsilon",
}
_FROM_ROWS = {
    "batch_size": "training.batch_size",
    "epochs": "training.num_epochs",
    "max_steps": "training.num_iterations",
}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "ppo": _EVERY,
    "grpo": {**_EVERY, "samples_per_prompt": "grpo.group_size"},
    "dpo": {**_EVERY, **_FROM_ROWS, "samples_per_example": "dpo.samples_per_prompt"},
    "sft": {**_EVERY, **_FROM_ROWS},
}
_OWN = ("lr", "scheduler", "max_steps")  # null: the algorithm's own
_LORA = {
    "r": "model.lora_r",
    "alpha": "model.lora_alpha",
    "dropout": "model.lora_dropout",
    "target_modules": "model.lora_target_modules",
}


def options_of(config: TrainConfig, problems: int) -> dict[str, Any]:
    """The algorithm's options, by their names in its ``Options``.

    Args:
        problems: of the training split, for the passes that the iterations of ppo and grpo take.
    """
    told, kind = config.training, config.training.algorithm
    block, known = getattr(config, kind), {each.name for each in fields(algorithm_class(kind.upper()).Options)}
    options = {each.name: getattr(block, each.name) for each in fields(block) if each.name in known}
    options |= _values(config, _KEYS[kind])
    options = {name: value for name, value in options.items() if value is not None or name not in _OWN}
    options["betas"] = (told.adam_beta1, told.adam_beta2)
    if config.model.use_lora:
        options["lora"] = _values(config, _LORA)
    if kind == "grpo" and not config.grpo.normalize_rewards:
        options["reward_normalization"] = "none"
    if kind == "sft":
        options |= {"source": "answers" if told.data_file is not None else "samples", "samples_per_example": 1}
    if kind in ("ppo", "grpo"):
        options |= _sampled(config, problems, options.get("samples_per_prompt", 1))
    return options


def _values(config: TrainConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: attrgetter(key)(config) for name, key in keys.items()}


def algorithm_options(config: TrainConfig, problems: int) -> Any:
    """The options of the algorithm's own kind. Raises UsageError."""
    name = config.training.algorithm.upper()
    return read(algorithm_class(name).Options, options_of(config, problems), name)


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


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this machine, among all.

    Attributes:
        here: how many.
        size: on all machines.
        on_cpu: they take no GPUs.
        gpu_ids: which GPUs; None: any that are free.
    """

    here: int
    size: int
    on_cpu: bool
    gpu_ids: tuple[int, ...] | None


def placed(config: TrainConfig, where: Where, engine: str = LOCAL) -> TrainConfig:
    """The configuration with what the command line says of GPUs over it, checked.

    ``--gpu-ids`` and ``--num-gpus`` stand above both keys of the file, and ``enabled`` follows them.

    Args:
        engine: what starts the machines. Only where that is the user, one by one, each needs the address of the others.

    Raises UsageError.
    """
    told = config.distributed
    if engine != LOCAL:
        for flag in ("gpu_ids", "node_rank", "master_addr", "master_port"):
            if getattr(where, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} is for machines that you start yourself; --engine {engine} chooses "
                    "that: leave it out"
                )
        # What a file says of machines that its user starts is none of a cluster's.
        told = replace(told, num_gpus=told.gpu_count, gpu_ids=None, node_rank=0, master_port=None)
    if where.num_gpus is not None and where.gpu_ids is not None and where.num_gpus != len(where.gpu_ids):
        raise UsageError(f"--num-gpus {where.num_gpus}, and --gpu-ids names {len(where.gpu_ids)}; leave one out")
    if where.num_gpus is not None or where.gpu_ids is not None:
        told = replace(told, num_gpus=where.num_gpus, gpu_ids=where.gpu_ids, enabled=None)
    if where.nnodes is not None:
        told = replace(told, num_nodes=where.nnodes)
    if where.node_rank is not None:
        told = replace(told, node_rank=where.node_rank)
    if where.master_addr is not None:
        told = replace(told, master_addr=where.master_addr)
    if where.master_port is not None:
        told = replace(told, master_port=where.master_port)
    model = config.model if where.device is None else replace(config.model, device=where.device)
    found = replace(config, distributed=told, model=model)
    check(found)
    if engine == LOCAL and told.num_nodes > 1 and told.master_port is None:
        raise UsageError(
            "distributed.master_port is missing: with several nodes all must know it (a cluster's engine, --engine "
            f"{' or --engine '.join(names()[1:])}, starts them all, and then it isn't needed)"
        )
    return found


def processes_of(config: TrainConfig) -> Processes:
    """How many processes, and on what."""
    told = config.distributed
    here = told.gpu_count
    return Processes(here, here * told.num_nodes, config.on_cpu, None if config.on_cpu else told.gpu_ids)


MODULE = "gpuherd.posttrain.learning"


def command(processes: Processes, config: TrainConfig, folder: Path, *, on_cpu: bool, engine: str = LOCAL) -> list[str]:
    """The command that starts the training: Python alone, or torchrun (``launch``).

    On one machine torchrun finds a free port itself, unless one is configured. On several of a cluster it reads its
    place among them from the environment that each is given.
    """
    told = config.distributed
    words = ["--output", str(folder), "--resume", "--device", "cpu" if on_cpu else "cuda"]
    rendezvous: Sequence[str] | None
    if processes.size == 1:
        rendezvous = None
    elif told.num_nodes == 1 and told.master_port is None:
        rendezvous = launch.ALONE
    elif engine != LOCAL:
        rendezvous = ()
    else:
        address = "127.0.0.1" if told.num_nodes == 1 else told.master_addr
        rendezvous = (
            f"--nnodes={told.num_nodes}",
            f"--node-rank={told.node_rank}",
            f"--master-addr={address}",
            f"--master-port={told.master_port}",
        )
    return launch.command(MODULE, words, processes.here, rendezvous)


def check_port(config: TrainConfig) -> None:
    """Raises UsageError where the port that this machine is to listen at is in use."""
    told = config.distributed
    if told.master_port is None or told.node_rank != 0 or told.gpu_count * told.num_nodes == 1:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", told.master_port))
        except OSError as problem:
            hint = "" if told.num_nodes > 1 else ", or leave it out: a free one is found"
            raise UsageError(
                f"distributed.master_port={told.master_port} can't be listened at ({problem.strerror}); choose "
                f"another{hint}"
            ) from None
