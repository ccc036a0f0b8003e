"""One training of ``gpuherd train``: its file, and the words of the command line over it, as the types that rounds have
too: an algorithm with its options, draws, precision, steps, environments. No torch; pure, but for the look at a port.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import UsageError, printable
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.config.yaml_strict import parse_yaml, read_yaml
from gpuherd.posttrain.engine.options import Lora, Sharding, StepOptions, Strategy, Watching
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.learning.keys import BLOCKS, block_of, full_name, has_minibatches, is_free
from gpuherd.posttrain.learning.reading import Given, environment_keys, read_file, wrong_together
from gpuherd.posttrain.rollout.vllm import refuse_cut
from gpuherd.posttrain.runs import launch
from gpuherd.posttrain.runs.blocks import DTYPES
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
    watching: Watching
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
        try:
            seldom = self.algorithm.make().check(self.sampling)
        except UsageError as problem:
            raise UsageError(f"{block}.{problem}") from None
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
    where = Where(
        num_gpus=told["distributed.num_gpus"],
        gpu_ids=told["distributed.gpu_ids"],
        nnodes=told["distributed.num_nodes"],
        node_rank=told["distributed.node_rank"],
        master_addr=told["distributed.master_addr"],
        master_port=told["distributed.master_port"],
    )
    trajectories = told.get(f"{block}.max_trajectories") if told["training.data_file"] is None else None
    ending = "-8bit" if told["model.load_in_8bit"] else "-4bit" if told["model.load_in_4bit"] else ""
    found = TrainSettings(
        keys={
            **{name: jsonable(each) for name, each in told.items() if name not in ("policy_env", "eval_envs")},
            **_environment(told["policy_env"]),
            "eval_envs": [environment_keys(each) for each in told["eval_envs"]],
        },
        experiment_name=told["experiment_name"],
        output_dir=told["output_dir"],
        algorithm=_algorithm(kind, given),
        model=f"{told['model.model_name_or_path']}{ending}",
        device=told["model.device"] if told["model.device"] != "auto" else (told["model.device_map"] or "auto"),
        precision=_precision(told, amp),
        sampling=Sampling(
            max_new_tokens=min(told["model.max_new_tokens"], told["training.max_episode_length"]),
            temperature=told.get(f"{block}.temperature") or told["model.temperature"],
            top_p=1.0 if told["model.top_p"] is None else told["model.top_p"],
            top_k=told["model.top_k"] or 0,
            batch_size=told["model.generation_batch_size"],
            use_chat_template=told["model.use_chat_template"],
            seed=told["training.seed"],
        ),
        backend=told[BACKEND],
        watching=Watching(
            save_every=told["training.save_every"],
            keep=told["training.save_total_limit"] or 2,
            log_every=told["training.log_every"],
            report_to=tuple(name for name, wanted in asked.items() if wanted),
            run_name=told["training.wandb_run_name"] or told["experiment_name"],
            project=told["training.wandb_project"] or told["training.trackio_project"],
            callbacks=told["callbacks"],
        ),
        step_values={**_standing_for("steps.", told), "strategy": Strategy(told["distributed.strategy"])},
        micro_batch=told["training.micro_batch_size"],
        accumulation=told["training.gradient_accumulation_steps"],
        data_file=told["training.data_file"],
        problems=told["training.max_problems"] or trajectories,
        eval_every=told["training.eval_every"],
        eval_episodes=told["training.eval_episodes"],
        discount=told.get(f"{block}.gamma", 1.0) if "gamma" not in given.options else 1.0,
        policy_env=told["policy_env"],
        eval_envs=told["eval_envs"],
        where=where,
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


def placed(settings: TrainSettings, where: Where, engine: str = LOCAL) -> TrainSettings:
    """The settings with what the command line says of GPUs over them, checked.

    ``--gpu-ids`` and ``--num-gpus`` stand above both keys of the file, and ``enabled`` follows them.

    Args:
        engine: what starts the machines. Only where that is the user, one by one, each needs the address of the others.

    Raises UsageError.
    """
    keys: dict[str, Any] = {}
    if engine != LOCAL:
        for flag in ("gpu_ids", "node_rank", "master_addr", "master_port"):
            if getattr(where, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} is for machines that you start yourself; --engine {engine} chooses "
                    "that: leave it out"
                )
        # What a file says of machines that its user starts is none of a cluster's.
        keys |= {"num_gpus": settings.here, "gpu_ids": None, "node_rank": 0, "master_port": None}
    if where.num_gpus is not None and where.gpu_ids is not None and where.num_gpus != len(where.gpu_ids):
        raise UsageError(f"--num-gpus {where.num_gpus}, and --gpu-ids names {len(where.gpu_ids)}; leave one out")
    if where.num_gpus is not None or where.gpu_ids is not None:
        ids = None if where.gpu_ids is None else list(where.gpu_ids)
        keys |= {"num_gpus": where.num_gpus, "gpu_ids": ids, "enabled": None}
    others = {"num_nodes": "nnodes", "node_rank": "node_rank", "master_addr": "master_addr",
              "master_port": "master_port"}  # fmt: skip
    keys |= {key: getattr(where, flag) for key, flag in others.items() if getattr(where, flag) is not None}
    device = {} if where.device is None else {"model__device": where.device}
    found = settings.changed(**{f"distributed__{name}": each for name, each in keys.items()}, **device)
    if engine == LOCAL and found.machines > 1 and found.where.master_port is None:
        raise UsageError(
            "distributed.master_port is missing: with several nodes all must know it (a cluster's engine, --engine "
            f"{' or --engine '.join(names()[1:])}, starts them all, and then it isn't needed)"
        )
    return found


def command(settings: TrainSettings, folder: Path, *, on_cpu: bool, engine: str = LOCAL) -> list[str]:
    """The command that starts the training: Python alone, or torchrun (``launch``).

    On one machine torchrun finds a free port itself, unless one is configured. On several of a cluster it reads its
    place among them from the environment that each is given.
    """
    where = settings.where
    words = ["--output", str(folder), "--resume", "--device", "cpu" if on_cpu else "cuda"]
    rendezvous: Sequence[str] | None
    if settings.processes == 1:
        rendezvous = None
    elif settings.machines == 1 and where.master_port is None:
        rendezvous = launch.ALONE
    elif engine != LOCAL:
        rendezvous = ()
    else:
        address = "127.0.0.1" if settings.machines == 1 else where.master_addr
        rendezvous = (
            f"--nnodes={settings.machines}",
            f"--node-rank={where.node_rank}",
            f"--master-addr={address}",
            f"--master-port={where.master_port}",
        )
    return launch.command(MODULE, words, settings.here, rendezvous)


def check_port(settings: TrainSettings) -> None:
    """Raises UsageError where the port that this machine is to listen at is in use."""
    where = settings.where
    if where.master_port is None or where.node_rank != 0 or settings.processes == 1:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", where.master_port))
        except OSError as problem:
            hint = "" if settings.machines > 1 else ", or leave it out: a free one is found"
            raise UsageError(
                f"distributed.master_port={where.master_port} can't be listened at ({problem.strerror}); choose "
                f"another{hint}"
            ) from None
