"""The configuration of an experiment, typed and checked. Light: no torch, no Hydra.

``settings_of`` makes it of composed values and checks what one key alone can't say: that the names in it are algorithms
and that every option given is read. ``absolute`` resolves its paths. The blocks are in ``blocks``.

An algorithm's module is imported here, and is light: none imports torch with its options.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.names import user_path
from gpuherd.posttrain.algos.registry import algorithm_class, canonical
from gpuherd.posttrain.config.typed import at_least, read
from gpuherd.posttrain.engine.options import Lora, StepOptions, Strategy
from gpuherd.posttrain.rewards.function import FunctionName
from gpuherd.posttrain.rollout.vllm import COLLECTING, refuse_cut, reports_log_probs
from gpuherd.posttrain.runs.blocks import (
    DataCollection,
    Dataset,
    EvaluationSettings,
    Generation,
    ModelPair,
    Naming,
    System,
    TrainingSettings,
)
from gpuherd.posttrain.types import BackendName
from gpuherd.runs.records import jsonable
from gpuherd.runs.spec import digest_of

# Keys of a block under ``algos`` that are the experiment's and not the algorithm's.
_OURS = ("enabled", "algorithm", "gpus", "strategy")


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """An algorithm of an experiment.

    Attributes:
        name: its key under ``algos``; what its jobs and results are called by.
        algorithm: the name in the registry.
        options: of its ``Options``, checked.
        guided: its policies are the reference with a classifier.
        draws: whether it learns by the log-probs of what was drawn for it.
        collects: whether it learns from rows that are collected before. With ``online`` it samples while it trains,
            with ``preferences`` it learns from a file.
        gpus: of each training, one process a GPU.
        strategy: by which these processes share it.
    """

    name: str
    algorithm: str
    options: Any
    guided: bool
    draws: bool
    collects: bool
    gpus: int = 1
    strategy: Strategy = Strategy.SINGLE

    def make(self) -> Any:
        """The algorithm itself."""
        return algorithm_class(self.algorithm)(self.options)

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimiser step, over all processes; at least so many where rows are counted otherwise."""
        if (minibatch := getattr(self.options, "minibatch_size", None)) is not None:
            return int(minibatch)
        return int(getattr(self.options, "batch_size", 1) * getattr(self.options, "samples_per_prompt", 1))


def algorithm_configs(
    blocks: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Mapping[str, Any]],
    strategy: Strategy = Strategy.DDP,
) -> tuple[AlgorithmConfig, ...]:
    """The enabled algorithms of ``algos`` in order.

    Args:
        shared: by block of the configuration, options for all algorithms that have them and set none of this name
            themselves.
        strategy: of trainings on several GPUs, where an algorithm's block sets none.

    Raises UsageError: a name that is no algorithm, an option that is none; something shared that no algorithm reads.
    """
    found: list[AlgorithmConfig] = []
    read_by: set[str] = set()
    common = {key: value for block in shared.values() for key, value in block.items()}
    for name, block in blocks.items():
        where = f"algos.{name}"
        if not isinstance(block, Mapping):
            raise UsageError(f"{where} should be a mapping of options, as in {where}.enabled=true")
        ours = read(_Block, {key: block[key] for key in _OURS if key in block}, where)
        algorithm = canonical(name if ours.algorithm is None else ours.algorithm)
        kind = algorithm_class(algorithm)
        given = {key: value for key, value in block.items() if key not in _OURS}
        fields = {each.name for each in dataclasses.fields(kind.Options)}
        also = {key: value for key, value in common.items() if key in fields}
        options = read(kind.Options, {**also, **given}, where)
        if ours.enabled:
            for other in found:
                if other.name.lower() == name.lower():  # their folders too may be one
                    raise UsageError(
                        f"{where} and algos.{other.name} differ in case alone; write all options under "
                        f"algos.{algorithm}, or give one another name"
                    )
            read_by |= fields
            made = kind(options)
            config = AlgorithmConfig(name, algorithm, options, made.guided, made.draws, made.collects)
            found.append(_with_gpus(config, ours, strategy))
    for where, key in ((where, key) for where, several in shared.items() for key in several):
        if found and key not in read_by:
            raise UsageError(f"{where}.{key}: none of {', '.join(each.name for each in found)} reads it")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Block:
    enabled: bool = True
    algorithm: str | None = None
    gpus: int = 1
    strategy: Strategy | None = None


def _with_gpus(config: AlgorithmConfig, block: _Block, strategy: Strategy) -> AlgorithmConfig:
    """The algorithm with the GPUs of its block. Raises UsageError where so many can't share its steps."""
    where = f"algos.{config.name}"
    if block.gpus < 1:
        raise UsageError(f"{where}.gpus={block.gpus}; the least is 1")
    if block.gpus == 1:
        if block.strategy is not None:
            raise UsageError(f"{where}.strategy={block.strategy}: on 1 GPU nothing is shared; set {where}.gpus too")
        return config
    if block.strategy == Strategy.SINGLE:
        raise UsageError(f"{where}.strategy=single with {where}.gpus={block.gpus}; choose ddp or fsdp")
    rows = config.sequences_per_step
    if rows % block.gpus:
        raise UsageError(
            f"{where}.gpus={block.gpus}: a step has {rows} sequences, no multiple of it; choose one that is"
        )
    return dataclasses.replace(config, gpus=block.gpus, strategy=block.strategy or strategy)


# Where and when things run, not what comes out: a run that goes on may have others.
NEUTRAL = frozenset(
    {"callbacks", "engine", "output_dir", "resume_from", "job_priority", "system.use_parallel_execution"}
)
# How work is divided among jobs: results are the same to the bit.
DIVISION = frozenset({"parallel_generation", "data_collection.shards", "evaluation.shards"})


def may_change(key: str) -> bool:
    """Whether a run that goes on may have another value of this key. Of GPUs and strategies of trainings too, by which
    results differ as far as the order of additions does."""
    return (
        key in NEUTRAL
        or key in DIVISION
        or key == "system.strategy"
        or re.fullmatch(r"algos\.[^.]+\.(gpus|strategy)", key) is not None
        or (key.startswith("datasets.") and key.endswith(".reward_timeout"))
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """An experiment.

    Attributes:
        rounds_of_training: how many rounds of collecting, training and evaluating.
        parallel_generation: a round's data is collected by several jobs side by side.
        async_rounds: the data of the next round is collected while this one trains, with the policy before; for
            algorithms whose data may come from another policy (``Algorithm.off_policy``). It changes results.
        job_priority: dotted name of a function: ``rounds.priority.JobDescription`` -> int, higher first; None: earlier
            rounds first.
        callbacks: classes that are called while models are trained (``engine.callbacks``).
        resume_from: the folder of a run that goes on, as ``--resume``.
        output_dir: where experiments are.
        engine: what runs the jobs, as ``engines.block`` reads it; flags go before it.
        algos: by a name of one's own: ``enabled``, ``algorithm`` (None: the name is the algorithm's), and its options.
    """

    experiment: Naming
    system: System = field(default_factory=System)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    data_collection: DataCollection = field(default_factory=DataCollection)
    generation: Generation = field(default_factory=Generation)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    algos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    models: Mapping[str, ModelPair] = field(default_factory=dict)
    rounds_of_training: int = 2
    parallel_generation: bool = True
    async_rounds: bool = False
    job_priority: str | None = None
    callbacks: tuple[str, ...] = ()
    resume_from: str | None = None
    output_dir: str = "outputs"
    engine: Any = None

    def __post_init__(self) -> None:
        at_least(self, rounds_of_training=1)
        if not self.parallel_generation and (self.data_collection.shards or 1) != 1:
            raise UsageError("parallel_generation=false with data_collection.shards above 1; give one of them")
        try:
            self.steps  # noqa: B018 - what makes no sense is refused here, and not in a job
        except UsageError as problem:
            block = "system" if str(problem).startswith("clear_cache_interval") else "training"
            raise UsageError(f"{block}.{problem}") from None

    @property
    def steps(self) -> StepOptions:
        """How a training step is fitted into memory."""
        told = self.training
        return StepOptions(
            micro_batch_size=told.micro_batch_size,
            gradient_checkpointing=told.gradient_checkpointing,
            clear_cache_interval=self.system.clear_cache_interval,
            dynamic_batch_size=told.dynamic_batch_size,
        )

    def choices(self) -> tuple[AlgorithmConfig, ...]:
        """The enabled algorithms with their options. Raises UsageError."""
        shared = {"training": self.training.shared(), "data_collection": self.data_collection.shared()}
        return algorithm_configs(self.algos, shared, self.system.strategy)

    def steps_of(self, choice: AlgorithmConfig, processes: int) -> StepOptions:
        """How a training step of an algorithm is fitted into memory and shared by so many processes. Raises UsageError
        for settings that contradict each other."""
        return self.steps if processes == 1 else dataclasses.replace(self.steps, strategy=choice.strategy)

    def families(self) -> dict[str, ModelPair]:
        """The enabled ones."""
        return {name: each for name, each in self.models.items() if each.enabled}

    def dataset(self, name: str) -> Dataset:
        """The data set of a name: one of ``datasets``, or else the task or file of that name as it is."""
        found = {each.lower(): each for each in self.datasets}
        known = name if name in self.datasets else found.get(name.lower())
        return self.datasets[known] if known is not None else Dataset(task=name)

    def trained_on(self) -> tuple[str, ...]:
        """Names of the data sets that are trained on, each once."""
        enabled = tuple(name for name, each in self.datasets.items() if each.enabled)
        names = enabled if self.training.datasets is None else self.training.datasets
        return tuple(dict.fromkeys(names))

    def evaluated_on(self, dataset: str) -> tuple[str, ...]:
        """Names of the data sets that policies trained on this one are evaluated on."""
        return tuple(dict.fromkeys(self.evaluation.datasets_by_train.get(dataset, (dataset,))))

    def identity(self) -> str:
        """All that the results depend on, as one digest."""
        return digest_of(json.dumps(self._deciding(), sort_keys=True))

    def earlier_identity(self, recorded: Mapping[str, Any]) -> str:
        """The identity that a run of an earlier version has, where how it was divided was part of it.

        Args:
            recorded: the settings of that run, as JSON values.

        Raises KeyError, TypeError, AttributeError where they are none.
        """
        values, shards = self._deciding(), recorded["evaluation"].get("shards")
        values["parallel_generation"] = recorded["parallel_generation"]
        values["data_collection"]["shards"] = recorded["data_collection"]["shards"]
        values["evaluation"] |= {} if shards is None else {"shards": shards}
        return digest_of(json.dumps(values, sort_keys=True))

    def _deciding(self) -> dict[str, Any]:
        """All that the results depend on, as JSON values: those of runs that were begun before there was a key."""
        values: dict[str, Any] = jsonable(self)
        if self.system.strategy == Strategy.DDP:
            del values["system"]["strategy"]
        for key in NEUTRAL:
            *path, last = key.split(".")
            place = values
            for part in path:
                place = place[part]
            del place[last]
        for told in values["datasets"].values():
            del told["reward_timeout"]
            if told["reward"] is None:
                del told["reward"]
        values["parallel_generation"], values["data_collection"]["shards"] = True, None
        del values["evaluation"]["shards"]
        for block in ("generation", "evaluation"):
            if getattr(self, block).backend is BackendName.HF:
                del values[block]["backend"]
        return values


def settings_of(values: Mapping[str, Any]) -> Settings:
    """An experiment of composed values. Raises UsageError, with the full key and what to do."""
    settings = read(Settings, values)
    choices = settings.choices()
    if not choices:
        raise UsageError("no algorithm is enabled; choose some, as in algos=[PITA,GRPO]")
    if not settings.families():
        raise UsageError("no models: choose a pair, as in models=gpt2, or name one: models.mine.reference=FOLDER")
    if not settings.trained_on():
        raise UsageError("no data sets: choose some, as in datasets=[arithmetic], or training.datasets=[arithmetic]")
    for trained in settings.evaluation.datasets_by_train:
        if trained not in settings.trained_on():
            raise UsageError(
                f"evaluation.datasets_by_train.{trained}: nothing is trained on it; there are "
                f"{', '.join(settings.trained_on())}"
            )
    for choice in choices:
        try:
            settings.steps_of(choice, choice.gpus)
        except UsageError as problem:
            raise UsageError(f"algos.{choice.name}.gpus={choice.gpus}: {problem}") from None
        for name, family in settings.families().items():
            if choice.guided and family.value is None:
                raise UsageError(f"models.{name}.value is missing: algos.{choice.name} trains a classifier from it")
    etas: dict[str, tuple[float, ...]] = {"evaluation.etas": settings.evaluation.etas}
    etas |= {f"algos.{each.name}.guidance.eta": (each.options.guidance.eta,) for each in choices if each.guided}
    for key, told in etas.items():
        if math.inf in told:
            raise UsageError(
                f"{key}: an infinite eta leaves the reference as it is, and evaluation.base evaluates that"
            )
    settings.evaluation.options(settings.data_collection.seed)
    if settings.generation.backend is BackendName.VLLM:
        _check_vllm(settings, choices)
    if settings.evaluation.backend is BackendName.VLLM:
        _check_evaluation_by_vllm(settings, choices)
    return settings


def _check_vllm(settings: Settings, choices: Sequence[AlgorithmConfig]) -> None:
    """Raises UsageError where vLLM could not sample what an algorithm learns from."""
    samples = {each.name: each.make().samples for each in choices}
    if not any(each.collects or samples[each.name] for each in choices):
        raise UsageError("generation.backend=vllm: no algorithm here samples answers; leave the key out")
    for choice in choices:
        if choice.draws and (choice.collects or samples[choice.name]):
            refuse_cut(settings.generation.sampling(0), f"algos.{choice.name}", COLLECTING, "generation")
        lora: Lora | None = getattr(choice.options, "lora", None)
        if samples[choice.name] and lora is not None and lora.quantization is not None:
            raise UsageError(
                f"algos.{choice.name}.lora.quantization={lora.quantization} with generation.backend=vllm: quantised "
                "weights can't be handed over to it after each step; set generation.backend=hf, or leave one out"
            )


def _check_evaluation_by_vllm(settings: Settings, choices: Sequence[AlgorithmConfig]) -> None:
    """Raises UsageError for a policy that vLLM can't decode, and a divergence that its log-probs don't give."""
    for choice in choices:
        if choice.guided:
            raise UsageError(
                f"evaluation.backend=vllm: policies of algos.{choice.name} are guided, which it can't decode; set "
                "evaluation.backend=hf"
            )
    told, sampling = settings.evaluation, settings.generation.sampling(0)
    if told.kl in ("k1", "k3") and not reports_log_probs(sampling, greedy=told.greedy):
        raise UsageError(
            f"evaluation.kl={told.kl} is of log-probs at the sampling temperature, which vLLM does not report of "
            f"{'greedy answers' if told.greedy else 'cut draws'}; set evaluation.kl=exact or none, "
            "generation.temperature=1, or evaluation.backend=hf"
        )


def absolute(settings: Settings) -> Settings:
    """The settings with absolute paths. A file among ``training.datasets`` (or ``evaluation.datasets_by_train``)
    becomes a data set that is called like the file. Raises UsageError where that name means something else already."""
    datasets = {name: _dataset(name, each) for name, each in settings.datasets.items()}
    trained = settings.training.datasets
    if trained is not None:
        trained = tuple(_named(name, datasets) for name in trained)
    evaluated = {
        _named(name, datasets): tuple(_named(each, datasets) for each in names)
        for name, names in settings.evaluation.datasets_by_train.items()
    }
    families = {
        name: replace(each, reference=_path(each.reference), value=_or_none(each.value), adapter=_or_none(each.adapter))
        for name, each in settings.models.items()
    }
    return replace(
        settings,
        training=replace(settings.training, datasets=trained),
        evaluation=replace(settings.evaluation, datasets_by_train=evaluated),
        datasets=datasets,
        models=families,
        algos={name: _options(block) for name, block in settings.algos.items()},
        callbacks=tuple(str(FunctionName.of(each, "callbacks", "class").absolute) for each in settings.callbacks),
    )


def _dataset(name: str, told: Dataset) -> Dataset:
    try:
        reward = None if told.reward is None else str(FunctionName.of(told.reward).absolute)
    except UsageError as problem:
        raise UsageError(f"datasets.{name}: {problem}") from None
    return replace(told, task=_or_none(told.task), reward_model=_or_none(told.reward_model), reward=reward)


def _named(name: str, datasets: dict[str, Dataset]) -> str:
    """The name of a data set; of a file one that is new, which ``datasets`` is given."""
    if name in datasets or not _is_file(name):
        return name
    path, short = _path(name), Path(name).stem
    known = datasets.setdefault(short, Dataset(task=path, enabled=False))
    if known.task != path:
        raise UsageError(f"{name}: a data set is called {short} already; name this one: datasets.<name>.task={name}")
    return short


def _is_file(name: str) -> bool:
    try:
        return ("/" in name or "." in name) and user_path(name).is_file()
    except (OSError, ValueError):
        return False


def _path(name: str) -> str:
    """An absolute path where there is such a file or folder, else the name as it is (an id)."""
    try:
        path = user_path(name)
        return str(path.absolute()) if path.exists() else name
    except (OSError, ValueError, RuntimeError):
        return name


def _or_none(name: str | None) -> str | None:
    return None if name is None else _path(name)


def _options(block: Any) -> Any:
    """An algorithm's options with absolute paths: texts that look like a path and are one."""
    if isinstance(block, Mapping):
        return {name: _options(each) for name, each in block.items()}
    if isinstance(block, str) and ("/" in block or "." in block):
        return _path(block)
    return block
