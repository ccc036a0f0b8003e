"""The keys of ``gpuherd train``'s file: a table of names for the options that ``gpuherd posttrain`` has too.

Most keys are MRLM's names for options of an algorithm, of draws or of steps: type, default and range are those of the
option that the table names. An algorithm's own block (``grpo:``) takes every option of its class by the option's name,
so that an algorithm that is registered is trained by this command too; and ``system``, ``generation`` and ``training``
are read by the names that rounds have for their keys. The other keys say what one training is made of beside its
algorithm; ``settings`` makes something of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class, algorithms
from gpuherd.posttrain.engine.options import MOST_SEED, Lora, StepOptions, Strategy
from gpuherd.posttrain.types import Algorithm, Sampling
from gpuherd.runs.records import field_types

Dtype = Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
Range = tuple[Callable[[float], bool], str]
OPTION: Any = object()  # the default is the option's
_FROM_1: Range = (lambda value: value >= 1, "the least is 1")
_FROM_0: Range = (lambda value: value >= 0, "the least is 0")
_SEED: Range = (lambda value: 0 <= value <= MOST_SEED, f"the least is 0, and the most {MOST_SEED:g}")
_ABOVE_0: Range = (lambda value: value > 0, "it is above 0")
_FRACTION: Range = (lambda value: 0 <= value <= 1, "it is from 0 to 1")
_LAW: Range = (lambda value: 0 < value <= 1, "it is from 0 to 1, and above 0")
_BELOW_1: Range = (lambda value: 0 <= value < 1, "it is from 0 to under 1")
_ONE_FOLDER = "all of a training lies in its output folder; use output_dir or --output"
_GREEDY = "policies are trained on drawn answers of the model itself; leave it out"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file.

    Attributes:
        name: within its block.
        to: the option that it stands for, after the class that has it (``options``: the algorithm's).
        kind, default: annotation and default, where they aren't the option's.
        right: what a number must be, where the option's class doesn't check it.
        free: it changes no result: a training that goes on may have another.
        refused: why nothing but the default is possible.
    """

    name: str
    to: str = ""
    kind: Any = None
    default: Any = OPTION
    right: Range | None = None
    free: bool = False
    refused: str | None = None


BLOCKS: Mapping[str, tuple[Key, ...]] = {
    "": (
        Key("experiment_name", kind=str, default="training"),
        Key("description", kind=str, default="", free=True),
        Key("tags", kind=tuple[str, ...], default=(), free=True),
        Key("output_dir", kind=str | None, default=None, free=True),
        Key("callbacks", kind=tuple[str, ...], default=(), free=True),  # as rounds have them (``engine.callbacks``)
        Key("engine", kind=Any, default=None, free=True),  # as ``engines.block`` reads it, for the command line
    ),
    "training": (
        Key("algorithm", kind=str, default="ppo"),
        Key("num_epochs", kind=int, default=100, right=_FROM_1),
        Key("num_iterations", "options.max_steps", right=_FROM_1),
        Key("batch_size", kind=int, default=32, right=_FROM_1),
        Key("mini_batch_size", kind=int | None, default=None, right=_FROM_1),
        Key("gradient_accumulation_steps", kind=int, default=1, right=_FROM_1, free=True),
        Key("micro_batch_size", kind=int | None, default=None, right=_FROM_1, free=True),
        Key("learning_rate", "options.lr", default=None),
        Key("max_grad_norm", "options.grad_clip"),
        Key("optimizer", "options.optimizer"),
        Key("weight_decay", "options.weight_decay", right=_FROM_0),
        Key("adam_beta1", kind=float, default=0.9, right=_BELOW_1),
        Key("adam_beta2", kind=float, default=0.999, right=_BELOW_1),
        Key("adam_epsilon", "options.eps", right=_ABOVE_0),
        Key("lr_scheduler", "options.scheduler", default=None),
        Key("warmup_steps", "options.warmup_steps", right=_FROM_0),
        Key("num_rollouts_per_iteration", kind=int, default=128, right=_FROM_1),
        Key("max_episode_length", kind=int, default=512, right=_FROM_1),
        Key("eval_every", kind=int, default=10, right=(lambda value: value >= 0, "0 for never, or 1 and above")),
        Key("eval_episodes", kind=int, default=10, right=_FROM_1),
        Key("save_every", kind=int, default=10, right=_FROM_1, free=True),
        Key("save_total_limit", kind=int | None, default=None, right=_FROM_1, free=True),
        Key("checkpoint_dir", kind=Any, default=None, refused=_ONE_FOLDER),
        Key("log_every", kind=int, default=1, right=_FROM_1, free=True),
        Key("log_dir", kind=Any, default=None, refused=_ONE_FOLDER),
        Key("use_tensorboard", kind=bool, default=False, free=True),
        Key("wandb_project", kind=str | None, default=None, free=True),
        Key(
            "wandb_entity", kind=Any, default=None,
            refused="set WANDB_ENTITY in the environment, which wandb reads itself",
        ),
        Key("wandb_run_name", kind=str | None, default=None, free=True),
        Key("trackio_project", kind=str | None, default=None, free=True),
        Key("seed", "sampling.seed", right=_SEED),
        Key("use_fp16", kind=bool, default=False),
        Key("use_bf16", kind=bool, default=False),
        Key("data_file", kind=str | None, default=None),
        Key("max_problems", kind=int | None, default=None, right=_FROM_1),
        Key("dynamic_batch_size", "steps.dynamic_batch_size", free=True),
        Key("clear_cache_interval", "steps.clear_cache_interval", right=_FROM_1, free=True),
    ),
    "model": (
        Key("model_name_or_path", kind=str, default="gpt2"),
        Key("model_type", kind=Any, default=None, refused="the model's own config says what it is; leave it out"),
        Key("tokenizer_name_or_path", kind=str | None, default=None),
        Key(
            "trust_remote_code", kind=bool, default=False,
            refused="code that a model brings is not run while it is trained; use one without",
        ),
        Key("torch_dtype", kind=Dtype | None, default=None),
        Key("dtype", kind=Dtype | None, default=None),
        Key("use_flash_attention", kind=bool, default=False),
        Key("attn_implementation", kind=Literal["eager", "sdpa", "flash_attention_2"] | None, default=None),
        Key("gradient_checkpointing", "steps.gradient_checkpointing"),
        Key("load_in_8bit", kind=bool, default=False),
        Key("load_in_4bit", kind=bool, default=False),
        Key("use_lora", kind=bool, default=False),
        Key("lora_r", "lora.r", right=_FROM_1),
        Key("lora_alpha", "lora.alpha", right=_ABOVE_0),
        Key("lora_dropout", "lora.dropout", right=_BELOW_1),
        Key("lora_target_modules", "lora.target_modules"),
        Key("max_new_tokens", "sampling.max_new_tokens", right=_FROM_1),
        Key("temperature", "sampling.temperature", right=_ABOVE_0),
        Key("top_p", "sampling.top_p", kind=float | None, default=None, right=_LAW),
        Key("top_k", "sampling.top_k", kind=int | None, default=None, right=_FROM_0),
        Key("generation_batch_size", "sampling.batch_size", right=_FROM_1, free=True),
        Key("do_sample", kind=bool, default=True, refused=_GREEDY),
        Key("num_beams", kind=int, default=1, refused=_GREEDY),
        Key("repetition_penalty", kind=float, default=1.0, refused=_GREEDY),
        Key("length_penalty", kind=float, default=1.0, refused=_GREEDY),
        Key("use_chat_template", "sampling.use_chat_template"),
        Key("device", kind=str, default="auto"),
        Key("device_map", kind=str | None, default=None),
    ),
    "distributed": (
        Key("enabled", kind=bool | None, default=None, free=True),
        Key("backend", kind=Literal["nccl", "gloo"] | None, default=None, free=True),
        Key("num_gpus", kind=int | None, default=None, free=True),
        Key("gpu_ids", kind=tuple[int, ...] | None, default=None, free=True),
        Key("num_nodes", kind=int, default=1, free=True),
        Key("node_rank", kind=int, default=0, free=True),
        Key("master_addr", kind=str, default="localhost", free=True),
        Key("master_port", kind=int | None, default=None, free=True),
        Key("strategy", kind=Literal["single", "ddp", "fsdp", "deepspeed"], default=Strategy.DDP.value, free=True),
        Key("fsdp_sharding_strategy", "steps.fsdp_sharding_strategy", free=True),
        Key("fsdp_cpu_offload", "steps.fsdp_cpu_offload", free=True),
        Key("deepspeed_config", kind=Any, default=None, free=True),
        Key("zero_stage", kind=Any, default=None, free=True),
    ),
}  # fmt: skip
ENVIRONMENTS = ("policy_env", "eval_envs")
# Keys of rounds, and what stands for the same here.
ROUNDS: Mapping[str, str] = {
    "system.attn_impl": "model.attn_implementation",
    "system.dtype": "model.torch_dtype",
    "system.clear_cache_interval": "training.clear_cache_interval",
    "system.strategy": "distributed.strategy",
    "training.lr": "training.learning_rate",
    "training.gradient_checkpointing": "model.gradient_checkpointing",
    "generation.batch_size": "model.generation_batch_size",
    **{
        f"generation.{name}": f"model.{name}"
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "use_chat_template")
    },
}

# Options that this command sets by other keys, or that mean something in rounds alone.
_SET = {"online", "source", "pairing", "max_tries", "all_rounds", "save_every", "epochs", "batch_size", "lora", "betas"}


def trained_by(name: str) -> type[Algorithm]:
    """The algorithm of ``training.algorithm``. Raises UsageError for one that there isn't, or that trains no policy."""
    try:
        kind: type[Algorithm] = algorithm_class(name)
    except UsageError as problem:
        raise UsageError(f"training.algorithm={name}: {problem}") from None
    if kind.guided:
        possible = ", ".join(block_of(each) for each in algorithms().values() if not each.guided)
        raise UsageError(
            f"training.algorithm={name}: it trains a classifier that guides a model, which gpuherd posttrain does; here"
            f" it is one of {possible}"
        )
    return kind


def block_of(kind: type[Algorithm]) -> str:
    """The name of an algorithm's block: its own, in lower case."""
    return kind.name.lower()


@cache
def block_keys(kind: type[Algorithm]) -> tuple[Key, ...]:
    """The keys of an algorithm's block: its options by their names, and MRLM's names for some."""
    names = {each.name for each in fields(kind.Options)}
    found: list[Key] = []
    done = {each.to.partition(".")[2] for block in BLOCKS.values() for each in block if each.to.startswith("options.")}
    done |= _SET | {"minibatch_size"}
    if kind.memory.generates:
        found += [
            Key("group_size", "options.samples_per_prompt", right=_FROM_1),
            Key("temperature", kind=float | None, default=None, right=_ABOVE_0),  # stands above the model's
        ]
        done |= {"samples_per_prompt"}
        if "gamma" not in names:  # of later turns
            found.append(Key("gamma", kind=float, default=1.0, right=_FRACTION))
    if "reward_normalization" in names:
        found.append(Key("normalize_rewards", kind=bool, default=True))
    if "source" in names:
        done |= {"samples_per_example"}
        found += [
            Key(
                "collect_every", kind=int, default=1,
                refused="one training collects once, before it begins; for more rounds use gpuherd posttrain",
            ),
            Key("max_trajectories", kind=int, default=1000, right=_FROM_1),
        ]  # fmt: skip
    if "teacher_device" in names:
        found.append(
            Key(
                "teacher_device", kind=str, default="same",
                refused="gpuherd posttrain gives a teacher a GPU of its own; here it lies next to the policy",
            )
        )  # fmt: skip
        done |= {"teacher_device"}
    if "samples_per_example" in names - done and "samples_per_prompt" not in names:
        found.append(Key("samples_per_prompt", "options.samples_per_example"))
        done |= {"samples_per_example"}
    return (*found, *(Key(each.name, f"options.{each.name}") for each in fields(kind.Options) if each.name not in done))


def declared(kind: type[Algorithm], key: Key) -> tuple[Any, Any]:
    """What values a key takes, and the one that it has where the file has none (``MISSING``: it must have one)."""
    if key.kind is not None:
        return key.kind, key.default
    root, _, name = key.to.partition(".")
    owners: dict[str, type] = {"options": kind.Options, "sampling": Sampling, "steps": StepOptions, "lora": Lora}
    taken = field_types(owners[root])[name]
    if key.default is None:
        return taken | None, None
    return taken, next(each.default for each in fields(owners[root]) if each.name == name)


def tables_of(kind: type[Algorithm]) -> dict[str, Sequence[Key]]:
    """The keys of each block that counts for an algorithm."""
    return {**BLOCKS, block_of(kind): block_keys(kind)}


@cache
def all_keys(kind: type[Algorithm]) -> tuple[str, ...]:
    """All keys of a file that trains by an algorithm, in full."""
    return tuple(full_name(block, key) for block, table in tables_of(kind).items() for key in table)


def full_name(block: str, key: Key) -> str:
    """A key with its block, which the keys at the top have not."""
    return f"{block}.{key.name}" if block else key.name


def has_minibatches(kind: type[Algorithm]) -> bool:
    """Whether an algorithm that samples may divide the rollouts of a step."""
    return getattr(kind.Options, "minibatches", False)


def is_free(key: str, kind: type[Algorithm]) -> bool:
    """Whether a key changes no result, so that a training that goes on may have another value of it."""
    block, _, name = key.rpartition(".")
    if block in ENVIRONMENTS:
        return name == "reward_timeout"
    return any(each.free for each in tables_of(kind)[block] if each.name == name)
