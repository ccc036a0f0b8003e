"""The blocks of an experiment's configuration, typed. Light: no torch, no Hydra."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.jobs.run_dir import safe_name
from gpuherd.posttrain.config.typed import at_least, check_range, read
from gpuherd.posttrain.data.options import REWARD_TIMEOUT_S
from gpuherd.posttrain.engine.options import MOST_SEED, Strategy
from gpuherd.posttrain.eval.results import EvaluationOptions
from gpuherd.posttrain.types import BackendName, Precision, Sampling
from gpuherd.runs.records import jsonable

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
Dtype = Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"]


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
        amp_dtype: of autocast while training, over weights in float32; None: none.
        clear_cache_interval: the GPU's cache is cleared every so many steps of a training; None: never.
        use_parallel_execution: False: one job at a time.
        strategy: of trainings on several GPUs (``algos.NAME.gpus``), where the algorithm's block sets none.
    """

    attn_impl: Literal["eager", "sdpa", "flash_attention_2"] = "eager"
    dtype: Dtype | None = None
    amp_dtype: Dtype | None = None
    clear_cache_interval: int | None = 10
    use_parallel_execution: bool = True
    strategy: Strategy = Strategy.DDP

    def __post_init__(self) -> None:
        if self.strategy == Strategy.SINGLE:
            raise UsageError("strategy=single: of trainings on several GPUs it is ddp or fsdp")

    @property
    def precision(self) -> Precision:
        """The same for algorithms."""
        dtype, amp = (None if each is None else DTYPES[each] for each in (self.dtype, self.amp_dtype))
        return Precision(dtype, amp, self.attn_impl)

    @property
    def training(self) -> Precision:
        """The same while training. Under autocast the weights are float32: what a step changes, often less than 1/256
        of a weight, would be rounded away in bfloat16."""
        return self.precision if self.amp_dtype is None else replace(self.precision, dtype="float32")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """``training``: of every training.

    Attributes:
        micro_batch_size, gradient_checkpointing, dynamic_batch_size: as in ``StepOptions``.
        datasets: names of ``datasets``, ids of tasks, or files of problems; None: all of ``datasets``.
        lr: learning rate of all algorithms that set none themselves; None: each algorithm's own.
        seed: of initial weights and of the order of batches.
    """

    micro_batch_size: int = 4
    gradient_checkpointing: bool = False
    dynamic_batch_size: bool = False
    datasets: tuple[str, ...] | None = None
    lr: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "lr", above=0)
        check_range(self, "seed", -MOST_SEED, most=MOST_SEED)

    def shared(self) -> dict[str, Any]:
        """Options for all algorithms that set none of this name themselves."""
        return {} if self.lr is None else {"lr": self.lr}


@dataclass(frozen=True, slots=True)
class DataCollection:
    """``data_collection``: of every round.

    Attributes:
        samples_per_example, bradley_terry_sampling, bradley_terry_beta: for all algorithms that have such an option and
            set none themselves; None: each algorithm's own.
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
        at_least(self, max_examples=0, reward_batch_size=1, shards=1, seed=0)

    def shared(self) -> dict[str, Any]:
        """Options for all algorithms that have them and set none of this name themselves."""
        names = ("samples_per_example", "bradley_terry_sampling", "bradley_terry_beta")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True)
class Generation:
    """``generation``: how completions are drawn, while data is collected and in evaluations; ``backend``: what decodes
    while data is collected, and while a policy that trains samples."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    use_chat_template: bool = False
    backend: BackendName = BackendName.HF

    def __post_init__(self) -> None:
        at_least(self, max_new_tokens=1, batch_size=1, top_k=0)
        if not 0 < self.temperature < math.inf:
            raise UsageError(
                f"temperature={self.temperature}; it is above 0 (evaluation.greedy takes the most probable)"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}; it is above 0 and at most 1")

    def sampling(self, seed: int) -> Sampling:
        """The same for algorithms, with the draws' seed."""
        drawn = {each.name: getattr(self, each.name) for each in fields(Sampling) if each.name != "seed"}
        return Sampling(**drawn, seed=seed)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """``evaluation``: of every round.

    Attributes:
        etas: at which guided policies are evaluated in addition to their own.
        datasets_by_train: what policies trained on a data set are evaluated on; where it says nothing, on the same.
        num_samples, max_examples: completions a problem; problems of the split, 0: all.
        split, greedy, pass_at, majority_at, tie, kl, kl_samples, resamples, confidence: as in ``EvaluationOptions``.
        base: evaluate the reference models too.
        backend: what decodes them; guided policies by transformers alone.
        shards: jobs that share an evaluation's problems; None: as many as there are GPUs for. Results don't depend on
            it. Kept when a run goes on.
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
    backend: BackendName = BackendName.HF
    shards: int | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise UsageError(f"num_samples={self.num_samples}; the least is 1")
        if self.max_examples < 0:
            raise UsageError(f"max_examples={self.max_examples}; the least is 0, for all")
        at_least(self, shards=1)
        for name in ("etas", "pass_at", "majority_at"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(f"{name}={list(getattr(self, name))}: each is there once")

    def options(self, problem_seed: int) -> EvaluationOptions:
        """The same for evaluations. Raises UsageError."""
        shared = {each.name for each in fields(EvaluationOptions)}
        values = {name: each for name, each in jsonable(self).items() if name in shared}
        values["samples"] = 1 if self.greedy else self.num_samples
        values |= {"problems": self.max_examples or None, "problem_seed": problem_seed}
        return read(EvaluationOptions, values)


@dataclass(frozen=True, slots=True)
class ModelPair:
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
        reward: a function of the user's that scores, ``package.module:function`` or ``path/to/file.py:function``; None:
            the task itself.
        reward_timeout: seconds of that function for a batch.
        processes: that compare formulas or run code side by side.
        allow_unconfined: run code of models where the kernel gives no protection.
        enabled: False: as if it were not there.
    """

    task: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward_model: str | None = None
    reward_dtype: Dtype | None = None
    reward: str | None = None
    reward_timeout: float = REWARD_TIMEOUT_S
    processes: int | None = None
    allow_unconfined: bool = False
    enabled: bool = True
