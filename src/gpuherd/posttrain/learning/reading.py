"""Reads a file of ``gpuherd train`` by the table of its keys, and refuses by its key what contradicts itself or is not
done here, with what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class, algorithms
from gpuherd.posttrain.config.typed import read, read_keys
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.learning.keys import (
    BLOCKS,
    ENVIRONMENTS,
    OPTION,
    ROUNDS,
    Key,
    all_keys,
    block_of,
    declared,
    full_name,
    has_minibatches,
    tables_of,
    trained_by,
)
from gpuherd.posttrain.types import Algorithm
from gpuherd.runs.records import field_types, jsonable

_AUTOCAST = {"bf16": "use_bf16", "bfloat16": "use_bf16", "fp16": "use_fp16", "float16": "use_fp16"}
# Keys of an environment that say where its server is; there is none.
_SERVED = {"mode": Literal["server", "client"] | None, "remote": bool, "server_address": str | None}
_OF_TASK = ("reward_model", "reward", "reward_timeout")


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


def wrong_together(kind: type[Algorithm], keys: Mapping[str, Any]) -> Iterator[str]:
    """What contradicts itself in a file, a sentence each."""
    yield from _training(kind, keys)
    yield from _model(keys)
    yield from _data(kind, keys)
    yield from _distributed(keys)


def _training(kind: type[Algorithm], keys: Mapping[str, Any]) -> Iterator[str]:
    block = block_of(kind)
    if keys["training.use_fp16"] and keys["training.use_bf16"]:
        yield "training.use_fp16 and training.use_bf16 are both true; choose one (bf16 needs no loss scaling)"
    if kind.memory.generates and (rollouts := keys["training.num_rollouts_per_iteration"]) % (
        group := keys[f"{block}.group_size"]
    ):
        yield (
            f"training.num_rollouts_per_iteration={rollouts} is no multiple of {block}.group_size={group}; groups are "
            "whole"
        )
    if keys["training.wandb_project"] and keys["training.trackio_project"] not in (
        None,
        keys["training.wandb_project"],
    ):
        yield "training.trackio_project and training.wandb_project differ; call them the same, or leave one out"
    if not kind.memory.generates and keys["training.log_every"] != 1:
        yield f"training.log_every={keys['training.log_every']}: {block} logs every step; leave it at 1"


def _model(keys: Mapping[str, Any]) -> Iterator[str]:
    told = {key.name: keys[f"model.{key.name}"] for key in BLOCKS["model"]}
    quantised = told["load_in_8bit"] or told["load_in_4bit"]
    if None not in (told["torch_dtype"], told["dtype"]) and told["torch_dtype"] != told["dtype"]:
        yield f"model.torch_dtype={told['torch_dtype']} and model.dtype={told['dtype']} are the same key; keep one"
    if told["tokenizer_name_or_path"] not in (None, told["model_name_or_path"]):
        yield "model.tokenizer_name_or_path: a model is trained with its own tokenizer; save it into the model's folder"
    if told["load_in_8bit"] and told["load_in_4bit"]:
        yield "model.load_in_8bit and model.load_in_4bit are both true; choose one"
    if quantised and not told["use_lora"]:
        yield "model.load_in_8bit and load_in_4bit: quantised weights are trained under an adapter; set model.use_lora"
    if quantised and keys["distributed.strategy"] == "fsdp":
        yield "model.load_in_8bit or load_in_4bit with distributed.strategy=fsdp: codes are not divided; use ddp"
    if told["use_flash_attention"] and told["attn_implementation"] not in (None, "flash_attention_2"):
        yield f"model.use_flash_attention and model.attn_implementation={told['attn_implementation']}: keep one"
    if told["device"] not in ("auto", "cpu", "cuda"):
        yield f"model.device={told['device']}; it is auto, cpu or cuda; which GPUs say distributed.gpu_ids"
    if told["device_map"] not in (None, "auto", "cpu", "cuda"):
        yield f"model.device_map={told['device_map']}; it is auto, cpu or cuda: processes share models by fsdp"


def _data(kind: type[Algorithm], keys: Mapping[str, Any]) -> Iterator[str]:
    name, file, env = block_of(kind), keys["training.data_file"], keys["policy_env"]
    if kind.memory.generates:
        if file is not None:
            yield f"training.data_file: {name} samples itself; name its problems by policy_env.dataset"
        if env is None:
            yield f"policy_env is missing: {name} answers its problems"
    elif file is None and env is None:
        yield f"training.data_file is missing: {name} learns from it (or from a policy_env's problems)"
    elif file is not None and env is not None:
        yield "training.data_file and policy_env are two sources of what is learnt from; keep one"


def _distributed(keys: Mapping[str, Any]) -> Iterator[str]:
    told = {key.name: keys[f"distributed.{key.name}"] for key in BLOCKS["distributed"]}
    number, ids, nodes, port = (told[name] for name in ("num_gpus", "gpu_ids", "num_nodes", "master_port"))
    here = len(ids) if ids is not None else 1 if number is None else number
    if told["strategy"] == "deepspeed" or told["deepspeed_config"] is not None or told["zero_stage"] is not None:
        yield "distributed: DeepSpeed is not used; strategy: fsdp divides weights and states as ZeRO stage 3 does"
    if number is not None and number < 1:
        yield f"distributed.num_gpus={number}; the least is 1 (for a CPU: --device cpu)"
    if ids is not None:
        if len(set(ids)) < len(ids) or any(each < 0 for each in ids) or not ids:
            yield f"distributed.gpu_ids={list(ids)}: numbers of GPUs from 0 on, each once"
        elif number is not None and number != len(ids):
            yield f"distributed.num_gpus={number}, and distributed.gpu_ids names {len(ids)}"
    if nodes < 1 or not 0 <= told["node_rank"] < nodes:
        yield f"distributed.node_rank={told['node_rank']} of num_nodes={nodes}: ranks are counted from 0"
    many = here > 1 or nodes > 1
    if told["enabled"] and not many:
        yield f"distributed.enabled with {here} GPU; it takes 2 or more"
    if told["enabled"] is False and many:
        yield "distributed.enabled=false, and more than one GPU is asked for; leave one of the two out"
    if many and told["strategy"] == "single":
        yield "distributed.strategy=single with several processes; choose ddp or fsdp"
    if told["fsdp_cpu_offload"] and told["strategy"] != "fsdp":
        yield "distributed.fsdp_cpu_offload is for strategy fsdp"
    if port is not None and not 1 <= port <= 65535:
        yield f"distributed.master_port={port}; it is from 1 to 65535"
    on_cpu = (keys["model.device"] if keys["model.device"] != "auto" else keys["model.device_map"]) == "cpu"
    fitting = "gloo" if on_cpu else "nccl"
    if many and told["backend"] not in (None, fitting):
        place = "a CPU" if on_cpu else "GPUs"
        yield f"distributed.backend={told['backend']}: tensors on {place} are exchanged by {fitting}; leave it out"
