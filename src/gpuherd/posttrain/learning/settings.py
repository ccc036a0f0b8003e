"""One training of ``gpuherd train``: its file as the types that rounds have too: an algorithm with its options, draws,
precision, steps, environments. Refuses by its key what contradicts itself or is not done here. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable, usage_named
from gpuherd.jobs.run_dir import safe_name
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.config.yaml_strict import parse_yaml, read_yaml
from gpuherd.posttrain.engine.options import Lora, Sharding, StepOptions, Strategy
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.learning.keys import (
    BLOCKS,
    Given,
    block_of,
    environment_keys,
    full_name,
    has_minibatches,
    is_free,
    read_file,
)
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rollout.vllm import refuse_cut
from gpuherd.posttrain.runs.blocks import DTYPES
from gpuherd.posttrain.runs.folder import TrainDirectory
from gpuherd.posttrain.runs.options import Where
from gpuherd.posttrain.runs.settings import AlgorithmConfig
from gpuherd.posttrain.types import Algorithm, BackendName, Precision, Sampling, cut_draws
from gpuherd.runs.records import jsonable

MODULE = "gpuherd.posttrain.learning"
BACKEND = "model.generation_backend"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One training.

    Attributes:
        keys: all keys of the file in full, with their values as JSON has them: what config.yaml holds.
        algorithm: with its options; ``with_problems`` says how often it goes over the problems.
        model: its id or folder, with the ending that quantises it while it is loaded.
        device: auto, cpu or cuda.
        sampling: how answers are drawn while it trains; its seed is that of all draws, orders, and new adapters.
        backend: what decodes them.
        watching: how it is logged and kept.
        step_values: of ``StepOptions``, for several processes; ``micro_batch`` items at once, or in so many parts
            (``accumulation``).
        data_file: what dpo and sft learn from; ``problems``: how many of the training split; None: all.
        eval_every, eval_episodes: steps between evaluations on ``eval_envs``, and problems in each.
        discount: what a later turn of an episode earns counts so much less.
        where: processes and machines.
    """

    keys: Mapping[str, Any]
    experiment_name: str
    output_dir: str | None
    algorithm: AlgorithmConfig
    model: str
    device: str
    precision: Precision
    sampling: Sampling
    backend: BackendName
    watching: Hooks
    step_values: Mapping[str, Any]
    micro_batch: int | None
    accumulation: int
    data_file: str | None
    problems: int | None
    eval_every: int
    eval_episodes: int
    discount: float
    policy_env: EnvironmentOptions | None
    eval_envs: tuple[EnvironmentOptions, ...]
    where: Where

    @property
    def kind(self) -> type[Algorithm]:
        """The class of the algorithm."""
        found: type[Algorithm] = algorithm_class(self.algorithm.algorithm)
        return found

    @property
    def base(self) -> str:
        """The model's id or folder as the file has it."""
        return str(self.keys["model.model_name_or_path"])

    def directory(self, output: str | None = None) -> TrainDirectory:
        """The folder that is said, else the configuration's, else ``outputs/`` with the experiment's name (as a file's:
        it leads nowhere else)."""
        return TrainDirectory(output or self.output_dir or Path("outputs") / safe_name(self.experiment_name))

    @property
    def samples(self) -> bool:
        """Whether it samples while it trains."""
        return self.kind.memory.generates

    @property
    def on_cpu(self) -> bool:
        """It is to compute on the CPU, whatever GPUs there are."""
        return self.device == "cpu"

    @property
    def here(self) -> int:
        """Processes of this machine, one a GPU."""
        return len(self.where.gpu_ids) if self.where.gpu_ids is not None else self.where.num_gpus or 1

    @property
    def machines(self) -> int:
        """How many train together."""
        return self.where.nnodes or 1

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.here * self.machines

    @property
    def gpu_ids(self) -> tuple[int, ...] | None:
        """Which GPUs are taken; None: any that are free, or none."""
        return None if self.on_cpu else self.where.gpu_ids

    @property
    def cut(self) -> str | None:
        """The warning of ``cut_draws``, where it is due."""
        return cut_draws(self.sampling, self.algorithm.name, "model") if self.algorithm.draws else None

    def warnings(self) -> tuple[str, ...]:
        """What is allowed and seldom meant. Raises UsageError for options that don't go with the draws."""
        block = block_of(self.kind)
        with usage_named(f"{block}."):
            seldom = self.algorithm.make().check(self.sampling)
        return (*([] if self.cut is None else [self.cut]), *(f"{block}.{each}" for each in seldom))

    def steps(self, processes: int) -> StepOptions:
        """How a step is divided. Raises UsageError where so many processes don't divide the batch."""
        rows = self.algorithm.sequences_per_step
        if rows % processes:
            raise UsageError(
                f"training.{_rows_key(self)}={rows} is no multiple of the {processes} processes; choose one that is"
            )
        values = dict(self.step_values)
        if processes == 1:
            values["strategy"] = Strategy.SINGLE
        if values["strategy"] != Strategy.FSDP:
            values |= {"fsdp_sharding_strategy": Sharding.FULL_SHARD, "fsdp_cpu_offload": False}
        return StepOptions(micro_batch_size=self.micro_batch or -(-rows // (processes * self.accumulation)), **values)

    def with_problems(self, count: int) -> AlgorithmConfig:
        """The algorithm on so many problems: one that samples goes over them as often as its steps take. Raises
        UsageError where a step wants more."""
        if not self.samples:
            return self.algorithm
        options = self.algorithm.options
        if options.batch_size > count:
            raise UsageError(
                f"training.num_rollouts_per_iteration={self.keys['training.num_rollouts_per_iteration']} asks for "
                f"{options.batch_size} problems a step, and there are {count}; lower it, or name more problems"
            )
        epochs = -(-options.max_steps // -(-count // options.batch_size))
        return replace(self.algorithm, options=replace(options, epochs=epochs))

    def changed(self, **keys: Any) -> TrainSettings:
        """With other values of some keys (``distributed__num_gpus=2``). Raises UsageError."""
        return settings_of(_nested({**self.keys, **{name.replace("__", "."): each for name, each in keys.items()}}))

    def as_yaml(self) -> str:
        """YAML that ``read_settings`` reads back as equal."""
        import yaml

        text: str = yaml.safe_dump(_nested(self.keys), sort_keys=False, allow_unicode=True)
        return text

    def deciding(self) -> dict[str, Any]:
        """All keys that change results."""
        return {key: each for key, each in self.keys.items() if not is_free(key, self.kind)} | {
            "eval_envs": [
                {name: each for name, each in block.items() if name != "reward_timeout"}
                for block in self.keys["eval_envs"]
            ]
        }


def read_settings(file: str | Path | None, overrides: Sequence[str] = ()) -> TrainSettings:
    """The training of a YAML file, with ``training.batch_size=8`` and the like over it.

    Raises UsageError, which names the key: unknown, there twice, of a wrong kind, or contradicting another.
    """
    values = {} if file is None else read_yaml(file)
    for word in overrides:
        set_value(values, word)
    return settings_of(values)


def set_value(values: dict[str, Any], word: str) -> None:
    """Sets ``a.b=value`` in nested mappings; the value is YAML. Raises UsageError for a word that is no such thing.

    >>> values = {"training": {"seed": 1}}
    >>> set_value(values, "training.batch_size=8")
    >>> values
    {'training': {'seed': 1, 'batch_size': 8}}
    """
    key, sign, text = word.partition("=")
    parts = key.split(".")
    if not sign or not all(parts):
        raise UsageError(f"{printable(word)!r} is no setting; write key=value, as in training.batch_size=8")
    at: Any = values
    for depth, name in enumerate(parts[:-1], 1):
        if at.get(name) is None:
            at[name] = {}
        at = at[name]
        if not isinstance(at, dict):
            raise UsageError(f"{printable(word)!r}: {'.'.join(parts[:depth])} holds a value and no keys")
    at[parts[-1]] = parse_yaml(f"value: {text}", f"{key}=...")["value"]


def settings_of(values: Mapping[str, Any]) -> TrainSettings:
    """The training of a file's values. Raises UsageError, which names the key."""
    kind, given = read_file(values)
    for problem in wrong_together(kind, given.keys):
        raise UsageError(problem)
    told, block = given.keys, block_of(kind)
    amp = "float16" if told["training.use_fp16"] else "bfloat16" if told["training.use_bf16"] else None
    asked = {
        "tensorboard": told["training.use_tensorboard"],
        "wandb": told["training.wandb_project"],
        "trackio": told["training.trackio_project"],
    }
    trajectories = told.get(f"{block}.max_trajectories") if told["training.data_file"] is None else None
    ending = "-8bit" if told["model.load_in_8bit"] else "-4bit" if told["model.load_in_4bit"] else ""
    found = TrainSettings(
        keys={
            **{name: jsonable(each) for name, each in told.items() if name not in ("policy_env", "eval_envs")},
            **_environment(told["policy_env"]),
            "eval_envs": [environment_keys(each) for each in told["eval_envs"]],
        },
        algorithm=_algorithm(kind, given),
        model=f"{told['model.model_name_or_path']}{ending}",
        device=told["model.device"] if told["model.device"] != "auto" else (told["model.device_map"] or "auto"),
        precision=_precision(told, amp),
        sampling=replace(
            Sampling(**_standing_for("sampling.", told)),
            max_new_tokens=min(told["model.max_new_tokens"], told["training.max_episode_length"]),
            temperature=told.get(f"{block}.temperature") or told["model.temperature"],
            top_p=1.0 if told["model.top_p"] is None else told["model.top_p"],
            top_k=told["model.top_k"] or 0,
        ),
        backend=told[BACKEND],
        watching=Hooks(
            **_standing_for("watching.", told),
            keep=told["training.save_total_limit"] or 2,
            report_to=tuple(name for name, wanted in asked.items() if wanted),
            run_name=told["training.wandb_run_name"] or told["experiment_name"],
            project=told["training.wandb_project"] or told["training.trackio_project"],
        ),
        step_values={**_standing_for("steps.", told), "strategy": Strategy(told["distributed.strategy"])},
        problems=told["training.max_problems"] or trajectories,
        discount=told.get(f"{block}.gamma", 1.0) if "gamma" not in given.options else 1.0,
        policy_env=told["policy_env"],
        eval_envs=told["eval_envs"],
        where=Where(**_standing_for("where.", told)),
        **_standing_for("train.", told),
    )
    if found.backend is BackendName.VLLM:
        _check_vllm(found)
    return found


def _check_vllm(told: TrainSettings) -> None:
    """Raises UsageError where vLLM could not sample what is learnt from."""
    algorithm, name = told.algorithm.make(), told.algorithm.name
    if not algorithm.samples and not (algorithm.collects and told.policy_env is not None):
        raise UsageError(f"{BACKEND}=vllm: {name} samples no answers here; leave the key out")
    if told.algorithm.draws:
        refuse_cut(told.sampling, name, BACKEND, "model")
    if algorithm.samples and told.model != told.base:
        raise UsageError(
            f"{BACKEND}=vllm with model.load_in_8bit or load_in_4bit: quantised weights can't be handed over to it "
            "after each step; set it to hf, or train without quantisation"
        )


def _standing_for(owner: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that stand for options of one owner (``steps.``, ``lora.``), by the options' names."""
    return {
        key.to.removeprefix(owner): told[full_name(block, key)]
        for block, table in BLOCKS.items()
        for key in table
        if key.to.startswith(owner)
    }


def _environment(told: EnvironmentOptions | None) -> dict[str, Any]:
    if told is None:
        return {"policy_env": None}
    return {f"policy_env.{name}": each for name, each in environment_keys(told).items()}


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as blocks."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        block, _, name = key.rpartition(".")
        (found.setdefault(block, {}) if block else found)[name] = value
    return found


def _precision(told: Mapping[str, Any], amp: str | None) -> Precision:
    """Of weights, passes and attention."""
    dtype = told["model.torch_dtype"] or told["model.dtype"]
    weights = None if dtype in (None, "auto") else DTYPES[dtype]
    quantised = told["model.load_in_8bit"] or told["model.load_in_4bit"]
    if weights is None and amp is not None:
        weights = "float32"  # autocast is for weights that keep small changes
    attention = told["model.attn_implementation"]
    attention = attention or ("flash_attention_2" if told["model.use_flash_attention"] else "sdpa")
    return Precision(None if quantised else weights, amp, attention)


def _algorithm(kind: type[Algorithm], given: Given) -> AlgorithmConfig:
    """The algorithm with its options. Raises UsageError."""
    told, block, known = given.keys, block_of(kind), {each.name for each in fields(kind.Options)}
    options = {**given.options, "betas": (told["training.adam_beta1"], told["training.adam_beta2"])}
    if told["model.use_lora"]:
        options["lora"] = Lora(**_standing_for("lora.", told))
    if told.get(f"{block}.normalize_rewards") is False:
        options["reward_normalization"] = "none"
    if "source" in known:
        options |= {
            "source": "answers" if told["training.data_file"] is not None else "samples",
            "samples_per_example": 1,
        }
    if kind.memory.generates:
        rollouts = told["training.num_rollouts_per_iteration"]
        options["batch_size"] = rollouts // max(1, options["samples_per_prompt"])
        options["max_steps"] = told["training.num_iterations"] or told["training.num_epochs"]
        if "online" in known:
            options["online"] = True
        if has_minibatches(kind):
            rows = told["training.mini_batch_size"] or told["training.batch_size"]
            options["minibatch_size"] = min(rows, rollouts)
    else:
        options |= {"batch_size": told["training.batch_size"], "epochs": told["training.num_epochs"]}
    made = kind(read(kind.Options, options, block, given.named))  # type: ignore[call-arg]
    where = told["distributed.gpu_ids"]
    processes = (len(where) if where is not None else told["distributed.num_gpus"] or 1) * told["distributed.num_nodes"]
    strategy = Strategy.SINGLE if processes == 1 else Strategy(told["distributed.strategy"])
    return AlgorithmConfig(block, kind.name, made.options, False, made.draws, made.collects, processes, strategy)


def _rows_key(settings: TrainSettings) -> str:
    """The key that says how many rollouts or rows an optimiser step has."""
    told = {name: settings.keys[f"training.{name}"] for name in ("mini_batch_size", "num_rollouts_per_iteration")}
    rows = settings.algorithm.sequences_per_step
    if settings.samples and rows == told["num_rollouts_per_iteration"] < (
        told["mini_batch_size"] or settings.keys["training.batch_size"]
    ):
        return "num_rollouts_per_iteration"
    return "mini_batch_size" if settings.samples and told["mini_batch_size"] is not None else "batch_size"


# ---- what contradicts itself


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
