"""The keys of ``gpuherd train``'s file: a table of names for the options that ``gpuherd posttrain`` has too, and how a
file is read by it.

Most keys are MRLM's names for options of an algorithm, of draws or of steps: type, default and range are those of the
option that the table names. An algorithm's own block (``grpo:``) takes every option of its class by the option's name,
so that an algorithm that is registered is trained by this command too; and ``system``, ``generation`` and ``training``
are read by the names that rounds have for their keys. The other keys say what one training is made of beside its
algorithm; ``settings`` makes something of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Literal

from gpuherd.errors import UsageError, usage_named
from gpuherd.posttrain.algos.registry import algorithm_class, algorithms
from gpuherd.posttrain.config.typed import read, read_keys
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.engine.options import MOST_SEED, Lora, StepOptions, Strategy
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.types import Algorithm, BackendName, Sampling
from gpuherd.runs.records import field_types, jsonable

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
        to: the option that it stands for, after the class that has it (``options``: the algorithm's; ``train``:
            ``TrainSettings``; ``where``, ``watching``, ``sampling``, ``steps``, ``lora``).
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
        Key("experiment_name", "train.experiment_name", kind=str, default="training"),
        Key("description", kind=str, default="", free=True),
        Key("tags", kind=tuple[str, ...], default=(), free=True),
        Key("output_dir", "train.output_dir", kind=str | None, default=None, free=True),
        Key("callbacks", "watching.callbacks", kind=tuple[str, ...], default=(), free=True),
        Key("engine", kind=Any, default=None, free=True),  # as ``engines.block`` reads it, for the command line
    ),
    "training": (
        Key("algorithm", kind=str, default="ppo"),
        Key("num_epochs", kind=int, default=100, right=_FROM_1),
        Key("num_iterations", "options.max_steps", right=_FROM_1),
        Key("batch_size", kind=int, default=32, right=_FROM_1),
        Key("mini_batch_size", kind=int | None, default=None, right=_FROM_1),
        Key("gradient_accumulation_steps", "train.accumulation", kind=int, default=1, right=_FROM_1, free=True),
        Key("micro_batch_size", "train.micro_batch", kind=int | None, default=None, right=_FROM_1, free=True),
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
        Key(
            "eval_every", "train.eval_every", kind=int, default=10,
            right=(lambda value: value >= 0, "0 for never, or 1 and above"),
        ),
        Key("eval_episodes", "train.eval_episodes", kind=int, default=10, right=_FROM_1),
        Key("save_every", "watching.save_every", kind=int, default=10, right=_FROM_1, free=True),
        Key("save_total_limit", kind=int | None, default=None, right=_FROM_1, free=True),
        Key("checkpoint_dir", kind=Any, default=None, refused=_ONE_FOLDER),
        Key("log_every", "watching.log_every", kind=int, default=1, right=_FROM_1, free=True),
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
        Key("data_file", "train.data_file", kind=str | None, default=None),
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
        Key("generation_backend", kind=BackendName, default=BackendName.HF),
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
        Key("num_gpus", "where.num_gpus", kind=int | None, default=None, free=True),
        Key("gpu_ids", "where.gpu_ids", kind=tuple[int, ...] | None, default=None, free=True),
        Key("num_nodes", "where.nnodes", kind=int, default=1, free=True),
        Key("node_rank", "where.node_rank", kind=int, default=0, free=True),
        Key("master_addr", "where.master_addr", kind=str, default="localhost", free=True),
        Key("master_port", "where.master_port", kind=int | None, default=None, free=True),
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
    "generation.backend": "model.generation_backend",
    **{
        f"generation.{name}": f"model.{name}"
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "use_chat_template")
    },
}

_AUTOCAST = {"bf16": "use_bf16", "bfloat16": "use_bf16", "fp16": "use_fp16", "float16": "use_fp16"}
# Keys of an environment that say where its server is; there is none.
_SERVED = {"mode": Literal["server", "client"] | None, "remote": bool, "server_address": str | None}
_OF_TASK = ("reward_model", "reward", "reward_timeout")
# Options that this command sets by other keys, or that mean something in rounds alone.
_SET = {"online", "source", "pairing", "max_tries", "all_rounds", "save_every", "epochs", "batch_size", "lora", "betas"}


def trained_by(name: str) -> type[Algorithm]:
    """The algorithm of ``training.algorithm``. Raises UsageError for one that there isn't, or that trains no policy."""
    with usage_named(f"training.algorithm={name}: "):
        kind: type[Algorithm] = algorithm_class(name)
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


# ---- a file, read by the table


@dataclass(frozen=True, slots=True)
class Given:
    """A file as it was read.

    Attributes:
        keys: all keys in full, with typed values, defaults where the file has none; environments as they are made.
        options: of the algorithm, as far as keys stand for them.
        named: the key of each of these options.
    """

    keys: dict[str, Any]
    options: dict[str, Any]
    named: Mapping[str, str]


def read_file(values: Mapping[str, Any]) -> tuple[type[Algorithm], Given]:
    """The algorithm of a file, and its keys by the table. Raises UsageError, which names the key."""
    possible = {block_of(each): each for each in algorithms().values() if not each.guided}
    values = _by_block(values, possible)
    _of_rounds(values)
    training = values.get("training")
    said = training.get("algorithm") if isinstance(training, Mapping) else None
    kind = trained_by("ppo" if said is None else str(said))
    _move(values, _spellings(kind))
    top = {key.name: key.kind for key in BLOCKS[""]}
    blocks = dict.fromkeys((*filter(None, BLOCKS), *ENVIRONMENTS, *possible), Any)
    read_keys({**top, **blocks}, values, "", all_keys(kind))
    values[""] = {name: each for name, each in values.items() if name in top}
    found = _blocks(kind, values, tuple(tables_of(kind)))
    for name, other in possible.items():
        if other is not kind and values.get(name) is not None:  # looked at, and of no use
            _move(alone := {name: values[name]}, _spellings(other))
            options, named = _options(other, _blocks(other, alone, tuple(alone)), tuple(alone))
            read(other.Options, options, name, named)
    _whole_steps(kind, values.get("training"), found)
    environments = [] if values.get("eval_envs") is None else values["eval_envs"]
    if not isinstance(environments, list | tuple):
        raise UsageError(f"eval_envs={environments}: it should be a list")
    told = values.get("policy_env")
    found["policy_env"] = None if told is None else read_environment("policy_env", told, "client")
    found["eval_envs"] = tuple(
        read_environment(f"eval_envs[{number}]", each, "server") for number, each in enumerate(environments)
    )
    return kind, Given(found, *_options(kind, found, tuple(tables_of(kind))))


def _by_block(values: Mapping[str, Any], kinds: Mapping[str, type[Algorithm]]) -> dict[str, Any]:
    """A file's values, copied, with each algorithm's block under the algorithm's own name, whatever its spelling.
    Raises UsageError for a block that is there twice."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        block = str(name)
        if block not in (*BLOCKS, *ENVIRONMENTS, *kinds):
            with suppress(UsageError):
                block = block_of(algorithm_class(block))
        if block in found:
            raise UsageError(f"the block {block} is there twice, as {name} too; keep one")
        found[block] = dict(value) if isinstance(value, Mapping) else value
    return found


def _move(values: dict[str, Any], names: Mapping[str, str]) -> None:
    """Puts what is said by other names (``rloo.lr``) under the table's. Raises UsageError where both are there."""
    for other, key in names.items():
        block, _, name = other.partition(".")
        if isinstance(told := values.get(block), dict) and name in told:
            at, _, last = key.partition(".")
            there = values[at] = {} if values.get(at) is None else values[at]
            if not isinstance(there, dict) or last in there:
                raise UsageError(f"{other} and {key} are the same key; keep one")
            there[last] = told.pop(name)


def _of_rounds(values: dict[str, Any]) -> None:
    """Puts what is said by the names of rounds under the table's. Raises UsageError."""
    names = dict(ROUNDS)
    if isinstance(told := values.get("system"), dict) and (amp := told.pop("amp_dtype", None)) is not None:
        if amp not in _AUTOCAST:
            raise UsageError(f"system.amp_dtype={amp}: it is one of {', '.join(_AUTOCAST)}")
        told["amp_dtype"], names["system.amp_dtype"] = True, f"training.{_AUTOCAST[amp]}"
    _move(values, names)
    for block in ("system", "generation"):
        known = [key.partition(".")[2] for key in ROUNDS if key.startswith(f"{block}.")]
        read_keys(dict.fromkeys(known, Any), values.pop(block, {}), block)  # refuses what rounds alone know


def _spellings(kind: type[Algorithm]) -> dict[str, str]:
    """The options by their own names, in full, for which there is a key of another name, and that key."""
    found = {"minibatch_size": "training.mini_batch_size"} if has_minibatches(kind) else {}
    for block, table in tables_of(kind).items():
        options = (key for key in table if key.to.startswith("options."))
        found |= {key.to.partition(".")[2]: full_name(block, key) for key in options}
    own, names = block_of(kind), {each.name for each in fields(kind.Options)}
    return {f"{own}.{option}": key for option, key in found.items() if option in names and key != f"{own}.{option}"}


def _blocks(kind: type[Algorithm], values: Mapping[str, Any], blocks: Sequence[str]) -> dict[str, Any]:
    """The keys of these blocks in full. Raises UsageError."""
    tables = tables_of(kind)
    return {
        key: each for block in blocks for key, each in _block(kind, block, tables[block], values.get(block)).items()
    }


def _block(kind: type[Algorithm], block: str, table: Sequence[Key], values: Any) -> dict[str, Any]:
    """The keys of a block in full, those that aren't given at their defaults. Raises UsageError."""
    known = {key.name: declared(kind, key) for key in table}
    annotations = {name: each for name, (each, _) in known.items()}
    found = read_keys(annotations, {} if values is None else values, block, all_keys(kind))
    full = {}
    for key in table:
        name = full_name(block, key)
        value = full[name] = found.get(key.name, known[key.name][1])
        if value is MISSING:
            raise UsageError(f"{name} is missing")
        if key.right is not None and value is not None and not (-math.inf < value < math.inf and key.right[0](value)):
            raise UsageError(f"{name}={value}; {key.right[1]}")
        if key.refused is not None and value != key.default:
            shown = "" if key.default is None or isinstance(value, bool) else f"={value}"
            raise UsageError(f"{name}{shown}: {key.refused}")
    return full


def _whole_steps(kind: type[Algorithm], training: Any, keys: dict[str, Any]) -> None:
    """Of an algorithm that learns from all rollouts of a step at once: so many are its batch. Raises UsageError for
    another."""
    if not kind.memory.generates or has_minibatches(kind):
        return
    rollouts = keys["training.num_rollouts_per_iteration"]
    for name in ("mini_batch_size", "batch_size"):
        if (told := (training or {}).get(name)) not in (None, rollouts):
            raise UsageError(
                f"training.{name}={told}: {block_of(kind)} learns from all {rollouts} rollouts of a step at once "
                "(num_rollouts_per_iteration); leave it out"
            )
    keys["training.batch_size"] = rollouts


def _options(
    kind: type[Algorithm], keys: Mapping[str, Any], blocks: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The algorithm's options that keys of these blocks stand for, and the key of each."""
    tables = tables_of(kind)
    known = {each.name: each.default for each in fields(kind.Options)}
    options: dict[str, Any] = {}
    named: dict[str, str] = {}
    for block in blocks:
        for key in tables[block]:
            option = key.to.removeprefix("options.")
            if key.to == f"options.{option}" and option in known:
                named[option] = full_name(block, key)
                value = keys[named[option]]
                if value is not None or known[option] is None or key.default is OPTION:
                    options[option] = value  # null: the algorithm's own
    return options, named


def read_environment(where: str, values: Any, other: str) -> EnvironmentOptions:
    """An environment of a block.

    Args:
        other: the ``mode`` that would be wrong here.

    Raises UsageError, which names the key.
    """
    kinds = {
        **field_types(EnvironmentOptions),
        **{name: field_types(TaskOptions)[name] for name in _OF_TASK},
        **_SERVED,
    }
    given = read_keys({name: each for name, each in kinds.items() if name not in ("only", "task")}, values, where)
    if given.pop("remote", False) or given.pop("server_address", None) is not None:
        raise UsageError(
            f"{where}: environments behind a gRPC server are not reached from here; name one that runs here"
        )
    if given.pop("mode", None) == other:
        what = (
            ("the policy is trained in it", "server") if other == "client" else ("nothing is trained in it", "client")
        )
        raise UsageError(f"{where}.mode={other}: {what[0]}; leave it out, or say {what[1]}")
    if given.get("env_type") == "custom" and given.get("custom_class") is None:
        raise UsageError(f"{where}.custom_class is missing: the dotted name of an environment")
    if given.get("env_type") != "custom" and (given.get("custom_class") is not None or given.get("custom_kwargs")):
        raise UsageError(f"{where}.custom_class and custom_kwargs are for env_type custom")
    if given.get("dataset") is None and given.get("problems") is None:
        raise UsageError(f"{where}.dataset is missing: a task by name (arithmetic, gsm8k), or a file of problems")
    if given.get("dataset") is not None and given.get("problems") is not None:
        raise UsageError(f"{where}.problems and {where}.dataset are two sources of problems; keep one")
    task = read(TaskOptions, {name: given.pop(name) for name in _OF_TASK if name in given}, where)
    return read(EnvironmentOptions, {**given, "task": task}, where)


def environment_keys(options: EnvironmentOptions) -> dict[str, Any]:
    """The keys that ``read_environment`` makes equal options of."""
    found = {name: each for name, each in jsonable(options).items() if name not in ("only", "task")}
    return found | {name: getattr(options.task, name) for name in _OF_TASK}
