"""What an experiment can be asked for: every key of its configuration, typed. Light: no torch, no Hydra.

``settings_of`` makes it of composed values and checks what one key alone can't say: that the names in it are algorithms
and that no option is given that nobody reads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.jobs.rundir import safe_name
from gpuherd.posttrain.algos.interface import Precision, Sampling
from gpuherd.posttrain.config.typed import plain, read
from gpuherd.posttrain.evaluation.options import EvaluationOptions
from gpuherd.posttrain.rounds.choices import Choice, choices_of
from gpuherd.posttrain.training.options import StepOptions

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
Dtype = Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"]
# Where and when things run, not what comes out: a run that goes on may have others.
NEUTRAL = frozenset({"output_dir", "resume_from", "job_priority", "system.use_parallel_execution"})


@dataclass(frozen=True, slots=True)
class Naming:
    """``experiment``: its name is that of its folder."""

    name: str
    description: str = ""

    def __post_init__(self) -> None:
        if not self.name or safe_name(self.name) != self.name:
            raise UsageError(
                f"name={self.name!r}: letters, digits and . _ + = @ - are possible, at most 120, and it begins with"
                " none of . and -"
            )


@dataclass(frozen=True, slots=True)
class System:
    """``system``: how models compute.

    Attributes:
        attn_impl: flash_attention_2 where it is installed, else sdpa with a line in the log.
        dtype: of weights in memory; None: the checkpoint's own.
        amp_dtype: of autocast while training; None: none.
        clear_cache_interval: the GPU's cache is cleared every so many steps of a training; None: never.
        use_parallel_execution: False: one job at a time.
    """

    attn_impl: Literal["eager", "sdpa", "flash_attention_2"] = "eager"
    dtype: Dtype | None = None
    amp_dtype: Dtype | None = None
    clear_cache_interval: int | None = 10
    use_parallel_execution: bool = True

    @property
    def precision(self) -> Precision:
        """The same for algorithms."""
        dtype, amp = (None if each is None else DTYPES[each] for each in (self.dtype, self.amp_dtype))
        return Precision(dtype, amp, self.attn_impl)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """``training``: of every training.

    Attributes:
        micro_batch_size, gradient_checkpointing, dynamic_batch_size: as in ``StepOptions``.
        datasets: names of ``datasets``, ids of tasks, or files of problems; None: all of ``datasets``.
        seed: of initial weights and of the order of batches.
    """

    micro_batch_size: int = 4
    gradient_checkpointing: bool = False
    dynamic_batch_size: bool = False
    datasets: tuple[str, ...] | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DataCollection:
    """``data_collection``: of every round.

    Attributes:
        samples_per_example, bradley_terry_sampling, bradley_terry_beta: for all algorithms that have such an option and
            were not told themselves; None: each algorithm's own.
        seed: of all draws, those of evaluations too, and of the order of problems.
        max_examples: problems of the training split that are asked, the first ones in the seed's order; 0: all.
        reward_batch_size: completions that are scored at once.
        shards: jobs that share a round's problems; None: as many as there are GPUs for. Kept when a run goes on.
    """

    samples_per_example: int | None = None
    bradley_terry_sampling: bool | None = None
    bradley_terry_beta: float | None = None
    seed: int = 42
    max_examples: int = 0
    reward_batch_size: int = 32
    shards: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_examples", 0), ("reward_batch_size", 1), ("shards", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}={value}; the least is {least}")

    def shared(self) -> dict[str, Any]:
        """What is said here for all algorithms that have such an option."""
        names = ("samples_per_example", "bradley_terry_sampling", "bradley_terry_beta")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True)
class Generation:
    """``generation``: how completions are drawn, while data is collected and in evaluations."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    use_chat_template: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("top_k", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}; the least is {least}")
        if not 0 < self.temperature < math.inf:
            raise UsageError(
                f"temperature={self.temperature}; it is above 0 (evaluation.greedy takes the most probable)"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}; it is above 0 and at most 1")

    def sampling(self, seed: int) -> Sampling:
        """The same for algorithms, with the draws' seed."""
        return Sampling(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.batch_size,
            self.use_chat_template,
            seed,
        )


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """``evaluation``: of every round.

    Attributes:
        etas: at which guided policies are evaluated; empty: at their own alone.
        datasets_by_train: what policies trained on a data set are evaluated on; where it says nothing, on the same.
        num_samples, max_examples: completions a problem; problems of the split, 0: all.
        split, greedy, pass_at, majority_at, tie, kl, kl_samples, resamples, confidence: as in ``EvaluationOptions``.
        base: evaluate the reference models too.
    """

    etas: tuple[float, ...] = ()
    datasets_by_train: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    num_samples: int = 8
    max_examples: int = 0
    split: Literal["train", "heldout", "test"] = "test"
    greedy: bool = False
    pass_at: tuple[int, ...] = ()
    majority_at: tuple[int, ...] = ()
    tie: Literal["share", "first", "unique"] = "share"
    kl: Literal["exact", "k3", "k1", "none"] = "exact"
    kl_samples: int | None = None
    resamples: int = 1000
    confidence: float = 0.95
    base: bool = True

    def __post_init__(self) -> None:
        if self.max_examples < 0:
            raise UsageError(f"max_examples={self.max_examples}; the least is 0, for all")
        for name in ("etas", "pass_at", "majority_at"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(f"{name}={list(getattr(self, name))}: each is there once")

    def options(self, problem_seed: int) -> EvaluationOptions:
        """The same for evaluations. Raises UsageError."""
        values = {
            "split": self.split,
            "problems": self.max_examples or None,
            "samples": 1 if self.greedy else self.num_samples,
            "greedy": self.greedy,
            "etas": self.etas,
            "pass_at": self.pass_at,
            "majority_at": self.majority_at,
            "tie": self.tie,
            "kl": self.kl,
            "kl_samples": self.kl_samples,
            "resamples": self.resamples,
            "confidence": self.confidence,
            "problem_seed": problem_seed,
        }
        return read(EvaluationOptions, plain(values))


@dataclass(frozen=True, slots=True)
class Family:
    """``models.<family>``: a model that is trained or guided, and what its classifiers start from.

    Attributes:
        reference: id or folder.
        value: id or folder of a smaller model with the same tokenizer; None: guided algorithms can't use this family.
        adapter: a LoRA adapter on the reference.
        enabled: False: as if it were not there.
    """

    reference: str
    value: str | None = None
    adapter: str | None = None
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Dataset:
    """``datasets.<name>``: a task under a name of one's own.

    Attributes:
        task: id of a task, or a file of problems; None: the name is the id.
        settings: the task's own.
        reward_model, reward_dtype: of tasks that are scored by a model.
        processes: that compare formulas or run code side by side.
        allow_unconfined: run code of models where the kernel gives no protection.
        enabled: False: as if it were not there.
    """

    task: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward_model: str | None = None
    reward_dtype: Dtype | None = None
    processes: int | None = None
    allow_unconfined: bool = False
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """An experiment.

    Attributes:
        rounds_of_training: how many rounds of collecting, training and evaluating.
        parallel_generation: a round's data is collected by several jobs side by side.
        async_rounds: the data of the next round is collected while this one trains, with the policy before; for
            algorithms whose data may come from another policy (``plan.OFF_POLICY``). It changes results.
        job_priority: dotted name of a function: ``rounds.priority.JobDescription`` -> int, higher first; None: earlier
            rounds first.
        resume_from: the folder of a run that goes on, as ``--resume``.
        output_dir: where experiments are.
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
    models: Mapping[str, Family] = field(default_factory=dict)
    rounds_of_training: int = 2
    parallel_generation: bool = True
    async_rounds: bool = False
    job_priority: str | None = None
    resume_from: str | None = None
    output_dir: str = "outputs"

    def __post_init__(self) -> None:
        if self.rounds_of_training < 1:
            raise UsageError(f"rounds_of_training={self.rounds_of_training}; the least is 1")
        if not self.parallel_generation and (self.data_collection.shards or 1) != 1:
            raise UsageError("parallel_generation=false with data_collection.shards above 1; give one of them")
        steps = self.steps  # refused here, not in a job
        del steps

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

    def choices(self) -> tuple[Choice, ...]:
        """The enabled algorithms with their options. Raises UsageError."""
        return choices_of(self.algos, self.data_collection.shared())

    def families(self) -> dict[str, Family]:
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
        values = plain(self)
        for key in NEUTRAL:
            *path, last = key.split(".")
            place = values
            for part in path:
                place = place[part]
            del place[last]
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


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
        for name, family in settings.families().items():
            if choice.guided and family.value is None:
                raise UsageError(f"models.{name}.value is missing: algos.{choice.name} trains a classifier from it")
    settings.evaluation.options(settings.data_collection.seed)
    return settings
