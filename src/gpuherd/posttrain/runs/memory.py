"""What a training takes of its GPUs, of rounds and of ``gpuherd train``: memory on each by the plans of its models.

A training computes on as many GPUs as it is given, each with the whole model (DDP) or a part of each layer (FSDP).
Algorithms from human feedback train a proxy first: the larger of both trainings counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, JobCannotFit, MissingModel, UsageError
from gpuherd.lm.guidance.guide import Kind
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_for_training
from gpuherd.models.load.pretrained import check_bitsandbytes
from gpuherd.models.memory.kv_cache import MIB, Reserve, Workload
from gpuherd.models.memory.training_job import (
    ALL_LINEAR,
    LoraShape,
    Method,
    Optimiser,
    Strategy,
    TrainingJob,
    TrainingPrecision,
)
from gpuherd.models.memory.training_states import states_of, training_model, with_lora
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.resources import PlannedRequest, read_with_precision, resources_of
from gpuherd.models.place.training import TrainingPlan, TrainingRefusal, make_training_plan
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.packing import mask_bytes
from gpuherd.posttrain.engine.checkpoints import FILE_BYTES
from gpuherd.posttrain.engine.log_probs import CHUNK_NUMBERS
from gpuherd.posttrain.engine.options import Lora, Sharding, StepOptions
from gpuherd.posttrain.guidance.options import ComparingOptions, ValueOptions
from gpuherd.posttrain.policy_gradient.algorithm import ASKED_AT_ONCE, PolicyOptions
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.rollout.vllm import sampling_precision
from gpuherd.posttrain.runs.blocks import ModelPair
from gpuherd.posttrain.types import Precision as Loading
from gpuherd.units import gib

if TYPE_CHECKING:
    from gpuherd.posttrain.runs.settings import AlgorithmConfig

# Reward models of unknown architecture are encoders of less than half a billion numbers, usually.
_UNKNOWN_SCORER_MB = 2048
# Of models whose GPU is not known there is no end of room.
_BOUNDLESS = GpuSpec("0", "", total=0, free=1 << 60)


FLOAT32 = 4
# Bytes of two distributions of a chunk of tokens, their mixture and what is computed from them (algos.distill).
_COMPARED = 2 * FLOAT32 * CHUNK_NUMBERS
_BEYOND_16_BITS = 2  # bytes a number: planners count a reward model in 16 bits, and a proxy scores in 32
# What a vLLM that sleeps keeps of its GPU: CUDA's context and graphs. Measured by others, and not here: 1.1 GB in all
# (vLLM's issue 32714); graphs alone 1.5 GB (issue 47654) or 0.8 GB (SGLang's pull request 32718).
_ASLEEP_MB = 2048
# Types of models whose logits are what their head answers, as ``engine.log_probs`` needs it to compute them in chunks.
# All others are planned with whole logits, which are never less.
PLAIN_HEADS = frozenset(
    {"gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3"}
)
# Bytes of an optimiser's states for each number in float32.
_STATES: Mapping[str, int] = {Optimiser.ADAMW: 8, Optimiser.ADAMW_8BIT: 2, Optimiser.SGD: 0}


@dataclass(frozen=True, slots=True)
class TrainingNeed:
    """What a training takes of this machine.

    Attributes:
        gpus: of this machine; more than there are processes where a frozen model has a GPU of its own.
        memory_mb: on each of them.
        said: of what, for people.
    """

    gpus: int
    memory_mb: int
    said: str


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reward model that scores answers on the GPU of what draws them.

    Attributes:
        tokens: of a prompt with its answer, at most.
        dtype: None: the checkpoint's.
        rows: scored at once.
    """

    model: str
    tokens: int
    dtype: str | None = None
    rows: int = TaskOptions().reward_batch_size

    def memory(self, cards: Sequence[GpuSpec]) -> int:
        """What it takes next to others, in MB. Raises MissingModel."""
        try:
            architecture, precision = read_with_precision(self.model, self.dtype)
        except MissingModel:
            raise
        except BadModel:
            return _UNKNOWN_SCORER_MB  # an encoder of an architecture whose shapes the planner doesn't know
        load = Workload(self.rows, self.tokens, 1)
        return additional(resources_of(architecture, precision, load, cards, parallel="replica", most=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """A training to be planned, of rounds or of ``gpuherd train``.

    Attributes:
        name: what messages call it.
        choice: the algorithm, with as many processes as it has in all.
        family: the model that is trained, and what classifiers and proxies start from.
        loaded: how its weights and passes are.
        cards: as idle as it will find them; () where none are known.
        gpus: of one machine.
        prompt_tokens, new_tokens: of each sequence, at most.
        sampled: answers that a process draws at once, where the algorithm does.
        pairs: that a proxy learns from at once.
        width: how many numbers a classifier predicts of a token.
        scorers: that score answers while they are drawn, where the algorithm draws some and has no proxy.
        helps: the end of a refusal, where the planner knows nothing that would fit.
    """

    name: str
    choice: AlgorithmConfig
    family: ModelPair
    loaded: Loading
    steps: StepOptions
    cards: Sequence[GpuSpec]
    gpus: int
    prompt_tokens: int
    new_tokens: int
    sampled: int
    pairs: int
    width: int = 1
    scorers: Sequence[Scorer] = ()
    helps: str = "lower training.micro_batch_size or generation.max_new_tokens, or choose a smaller model"

    def memory(self, by_vllm: Callable[[], int] | None = None) -> TrainingNeed:
        """What it takes.

        Args:
            by_vllm: what vLLM takes, in MB, where that draws answers (``vllm_memory``). It sleeps while the policy
                learns, and the training has given up gradients and activations while it draws: the fuller of both
                moments counts.

        Raises JobCannotFit where it fits on no GPU here; MissingModel, BadModel; UsageError for quantised weights that
        FSDP would have to divide, MissingExtra without bitsandbytes.
        """
        choice, family, algorithm = self.choice, self.family, self.choice.make()
        model = family.value if choice.guided and family.value is not None else family.reference
        # Classifiers always learn in float32 (value.training), other weights where there is autocast.
        dtype = "fp32" if choice.guided else self.loaded.dtype
        architecture, precision = read_with_precision(model, dtype, read_for_training)
        frozen = precision if choice.guided else read_with_precision(model, self.loaded.frozen.dtype)[1]
        job = self.job(precision, frozen, chunked=architecture.model_type in PLAIN_HEADS)
        if by_vllm is not None:
            job = replace(job, sampled=1)
        proxy = None
        if isinstance(choice.options, ProxyOptions):
            base = choice.options.proxy_base(family.value, family.reference)
            proxy = read_with_precision(base, "fp32", read_for_training)[0]
        # The policy's answers are scored while it trains: by the proxy, on the same GPU, or by the task's model.
        scored_by = proxy if job.method.generates else None
        plan = self._plan(architecture, job, scored_by)
        memory = plan.memory_mb
        beside = ["its reference"] if job.keeps_reference else []
        if isinstance(choice.options, ValueOptions):
            memory += -(-_learnt_head(choice.options, self.width, architecture, job) // MIB)
            self._refuse(memory, f"{architecture.model} and the classifier's head")
        elif scored_by is not None:
            memory += -(-_BEYOND_16_BITS * scored_by.parameters // MIB)
            self._refuse(memory, f"{architecture.model} and its proxy in float32")
            beside.append(f"its proxy {scored_by.model}")
        elif job.method.generates and self.scorers:
            memory += sum(each.memory(self.cards) for each in self.scorers)
            beside += [f"reward model {each.model}" for each in self.scorers]
            self._refuse(memory, f"{architecture.model} and {beside[-1]}")
        if by_vllm is not None:
            memory += max(_ASLEEP_MB, by_vllm() - _idle_while_sampling(plan))
            self._refuse(memory, f"{architecture.model} and vLLM's copy of it")
        if packed := _packing_mask(choice.options, job):
            memory += packed
            self._refuse(memory, f"{architecture.model} and the mask of packed rows")
        memory += _COMPARED // MIB if algorithm.frozen_models else 0
        frozen_models = [f"{algorithm.frozen_role} {each}" for each in algorithm.frozen_models]
        for frozen_model in algorithm.frozen_models:
            added, own_gpu = self._frozen(frozen_model, job)
            memory = max(memory, own_gpu) if algorithm.frozen_apart else memory + added
            self._refuse(memory, f"{architecture.model} and {algorithm.frozen_role} {frozen_model}")
        beside += [] if algorithm.frozen_apart else frozen_models
        shared = "" if choice.gpus == 1 else f" by {job.strategy} on {choice.gpus} GPUs"
        told = f"{job.algorithm} of {architecture.model}{shared} in {job.precision}, {job.batch} at once"
        told += f", with {', '.join(beside)}" if beside else ""
        if by_vllm is not None:
            told += f", vLLM for {self.sampled} answers in turns with it"
        if proxy is not None:
            first = self._plan(proxy, self._of_proxy(job)).memory_mb
            if first > memory:
                memory, told = first, f"the proxy's training of {proxy.model} in float32, before {told}"
        gpus = self.gpus
        if algorithm.frozen_apart:
            gpus *= 2
            _roomiest(self.cards, gpus, self.name)
            told += f", {' and '.join(frozen_models)} on {'another' if gpus == 2 else 'others'}"
        told += host_words(architecture, job, self.steps, self.gpus, choice.gpus)
        return TrainingNeed(gpus, memory, told)

    def job(self, precision: Precision, frozen: Precision, *, chunked: bool) -> TrainingJob:
        """The training in the planner's words.

        Args:
            precision: how weights lie in memory that are trained.
            frozen: the same of those that no step changes, under an adapter or of the reference.
            chunked: the model's head is such that logits of all positions are never there at once.

        Raises UsageError, MissingExtra as ``memory``.
        """
        choice, algorithm = self.choice, self.choice.make()
        options, steps = choice.options, self.steps
        lora: Lora | None = getattr(options, "lora", None)
        base = frozen if lora is None or lora.quantization is None else Precision(lora.quantization)
        if lora is not None and lora.quantization is not None:
            check_bitsandbytes(base)
            if steps.shards:
                raise UsageError(f"lora.quantization={base} with strategy fsdp: codes can't be divided; use ddp")
        chunked = chunked and not choice.guided
        chunked = chunked and not (
            lora and any("head" in each or "embed_out" in each for each in lora.target_modules or ())
        )
        mixed = self.loaded.amp_dtype is not None
        return TrainingJob(
            method=algorithm.memory,
            strategy=Strategy(steps.strategy),
            precision=_training_precision(precision, mixed=mixed, lora=lora is not None),
            optimiser=Optimiser(getattr(options, "optimizer", Optimiser.ADAMW)),
            lora=None if lora is None else LoraShape(lora.r, lora.target_modules or (ALL_LINEAR,)),
            base=None if lora is None else base,
            # Of a comparison that a classifier learns from both sides are read.
            batch=steps.micro_batch_size * (2 if isinstance(options, ComparingOptions) else 1),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            accumulation=-(-choice.sequences_per_step // (choice.gpus * steps.micro_batch_size)),
            samples=getattr(options, "samples_per_prompt", 8),
            checkpointing=steps.gradient_checkpointing,
            attention="eager" if self.loaded.attention == "eager" else "sdpa",
            loss="chunked" if chunked or choice.guided else "whole",  # a classifier predicts no next token
            chunk=CHUNK_NUMBERS if chunked else None,
            reference=_reference(options),
            # FSDP computes in this type, and a divided reference lies in it.
            reference_in=Precision.BF16 if mixed and steps.shards else frozen,
            wide=lora is not None and frozen is not precision and not steps.shards,
            sampled=self.sampled if algorithm.memory.generates else None,
            weighed=ASKED_AT_ONCE if _weighs(choice, algorithm.memory) else 0,
            gathers=algorithm.memory.generates,
            reshard=steps.fsdp_sharding_strategy == Sharding.FULL_SHARD,
            bucket_view=True,
            algorithm=f"{algorithm.name}'s classifier" if choice.guided else algorithm.name,
        )

    def _plan(self, architecture: Architecture, job: TrainingJob, reward: Architecture | None = None) -> TrainingPlan:
        """How one training lies on its GPUs. Raises JobCannotFit."""
        cards = _roomiest(self.cards, self.gpus, self.name)
        found = make_training_plan(architecture, cards, job, count=self.gpus, reward=reward)
        if isinstance(found, TrainingRefusal):
            told = [each.sentence for each in found.alternatives[:3]]
            helps = f"what would fit: {'; '.join(told)}" if told else self.helps
            raise JobCannotFit(f"{self.name}: {found.reason}; {helps}")
        return found

    def _frozen(self, model: str, job: TrainingJob) -> tuple[int, int]:
        """What a frozen model takes that reads the answers of a micro-batch, in MB: next to another model, and on a GPU
        of its own. Of a head that is not plain the logits of all their tokens are there, in float32 at most."""
        architecture, precision = read_with_precision(model, None)
        load = Workload(job.batch, job.prompt_tokens + job.new_tokens, 1)
        plain = architecture.model_type in PLAIN_HEADS
        logits = job.batch * job.new_tokens * architecture.vocab_size
        logits = min(logits, CHUNK_NUMBERS) if plain else logits
        demand = resources_of(architecture, precision, load, self.cards, parallel="replica", most=1)
        more = -(-FLOAT32 * logits // MIB)
        return additional(demand) + more, demand.memory_mb + more

    def _of_proxy(self, job: TrainingJob) -> TrainingJob:
        """A proxy's training: pairs, without next-token prediction, and all its weights."""
        return replace(
            job,
            method=Method.DPO,
            precision=_training_precision(Precision.FP32, mixed=self.loaded.amp_dtype is not None),
            optimiser=Optimiser.ADAMW,
            lora=None,
            base=None,
            weighed=0,
            accumulation=2,
            batch=self.pairs,
            reference=False,
            loss="chunked",
            chunk=None,
            algorithm="the proxy",
        )

    def _refuse(self, memory_mb: int, said: str) -> None:
        refuse_together(self.cards, memory_mb, said, self.gpus)


def vllm_memory(model: str, training: Loading, answers: Workload, cards: Sequence[GpuSpec]) -> int:
    """What vLLM takes of a GPU for its copy of a policy in training and for so many answers at once, in MB: what
    ``rollout.vllm`` has it take. Raises MissingModel, BadModel."""
    architecture, precision = read_with_precision(model, sampling_precision(training).dtype)
    return resources_of(architecture, precision, answers, cards, parallel="replica", most=1).memory_mb


def _idle_while_sampling(plan: TrainingPlan) -> int:
    """Of what a training takes of each GPU, what it has given up while vLLM draws answers, in MB. Copies of weights
    for products are made by passes alone; those that FSDP has gathered are there, as they are handed over."""
    found = []
    for usage in (load.usage for load in plan.loads):
        drawing = next(each for each in usage.moments if each.name == "generating")
        copies = drawing.copies if plan.job.strategy is Strategy.FSDP else 0
        held = replace(drawing, cache=0, workspace=0, copies=copies)
        found.append((usage.fullest.total - held.total) // MIB)
    return min(found)


def _roomiest(cards: Sequence[GpuSpec], count: int, job: str) -> list[GpuSpec]:
    """So many GPUs, the emptiest; where none are known, such without an end of room. Raises JobCannotFit."""
    if not cards:
        return [replace(_BOUNDLESS, label=str(number)) for number in range(count)]
    if len(cards) < count:
        raise JobCannotFit(f"{job}: it trains on {count} GPUs together, and there are {len(cards)}")
    return sorted(cards, key=lambda card: -card.free)[:count]


def refuse_together(cards: Sequence[GpuSpec], memory_mb: int, said: str, gpus: int = 1) -> None:
    """Raises JobCannotFit where models together take more than the GPUs have."""
    most = min(card.free for card in _roomiest(cards, gpus, said))
    if memory_mb * MIB > most:
        place = "one GPU, and the roomiest here has" if gpus == 1 else f"each of {gpus} GPUs, and of those here one has"
        raise JobCannotFit(
            f"{said} together take {gib(memory_mb * MIB)} on {place} {gib(most)}; lower "
            "generation.batch_size or generation.max_new_tokens, or choose a smaller models.<name>.value"
        )


def _weighs(choice: AlgorithmConfig, method: Method) -> bool:
    """Whether log-probs are computed without gradients before a step's first update: of a reference, for values, or
    because that update is not the last. (A correction for another sampler asks for them as well.)"""
    options = choice.options
    if getattr(options, "kl_coef", 0) > 0:
        return True
    if not isinstance(options, PolicyOptions):
        return False
    rollouts = options.batch_size * options.samples_per_prompt
    several = getattr(options, "num_iterations", 1) > 1 or choice.sequences_per_step < rollouts
    corrects = not options.online or options.sampler_correction is not None
    return method is Method.PPO or several or corrects


def head_numbers(options: ValueOptions, width: int, architecture: Architecture) -> int:
    """Weights of a classifier's head: of kind Q those of each token of the vocabulary."""
    tokens = architecture.vocab_size if options.classifier_type is Kind.Q else 1
    return width * tokens * (architecture.hidden_size + 1)


def _learnt_head(options: ValueOptions, width: int, architecture: Architecture, job: TrainingJob) -> int:
    """Bytes of a head in training: weights, gradients, those of a micro-batch before they are added, states; and of
    kind Q for each token its rows of the head, with their gradients."""
    numbers = head_numbers(options, width, architecture)
    learnt = numbers * (3 * FLOAT32 + _STATES[options.optimizer])
    if options.classifier_type is not Kind.Q:
        return learnt
    tokens = job.batch * (job.prompt_tokens + job.new_tokens)
    return learnt + 2 * FLOAT32 * tokens * width * architecture.hidden_size


def _packing_mask(options: Any, job: TrainingJob) -> int:
    """What the attention mask of a micro-batch of packed rows takes in each process, in MB; 0 without packing."""
    if not getattr(options, "packing", False):
        return 0
    itemsize = 2 if job.precision is TrainingPrecision.BF16 else FLOAT32
    return -(-mask_bytes(job.batch, job.prompt_tokens + job.new_tokens, itemsize) // MIB)


def additional(demand: PlannedRequest) -> int:
    """Memory of a model next to another one, in MB: without the context and what is kept free, which are there once."""
    kept = Reserve()
    if demand.plan is None:  # on no GPU that is known: the part that is kept free was put on top
        alone = demand.memory_mb * (1 - kept.share)
        return max(1, int(alone) - (kept.context + kept.fixed) // MIB)
    total = max(load.gpu.total for load in demand.plan.loads)
    return max(1, demand.memory_mb - (kept.context + kept.on(total)) // MIB)


def host_memory(architecture: Architecture, job: TrainingJob, steps: StepOptions, processes: int) -> int:
    """Bytes of the computer's memory that each process on a GPU takes beside its programs, where FSDP divides the
    training: the file of a checkpoint that it writes, twice; where states are offloaded its rows of all of them too.
    Reading the model takes none: rows go to the GPU as they are read.
    """
    model = training_model(architecture)
    states = states_of(model if job.lora is None else with_lora(model, job.lora), job, processes)
    written = 2 * min(FILE_BYTES, states.gradients + states.optimiser)  # as large as weights that are trained
    held = states.parameters + states.quantisation + states.gradients + states.optimiser
    return written + (held if steps.fsdp_cpu_offload else 0)


def host_words(architecture: Architecture, job: TrainingJob, steps: StepOptions, here: int, processes: int) -> str:
    """Words for a sentence on a training of which so many processes run on this machine: what ``host_memory`` is for
    them; empty where FSDP divides nothing. Raises JobCannotFit where the machine has less memory."""
    if not steps.shards:
        return ""
    import psutil

    need, there = here * host_memory(architecture, job, steps, processes), psutil.virtual_memory().total
    if need > there:
        raise JobCannotFit(
            f"{here} processes take {gib(need)} of the computer's memory (fsdp_cpu_offload), which has {gib(there)}; "
            "take more machines, a smaller model, or an adapter (lora)"
        )
    return f", with {gib(need)} of the computer's memory"


def _reference(options: Any) -> bool | None:
    """Whether a reference is loaded, by the algorithm's options; None where they don't say."""
    if (free := getattr(options, "reference_free", None)) is not None:
        return not free
    kl = getattr(options, "kl_coef", None)
    return None if kl is None else bool(kl > 0)


def _training_precision(precision: Precision, *, mixed: bool, lora: bool = False) -> TrainingPrecision:
    if precision is Precision.FP32:
        return TrainingPrecision.MIXED if mixed else TrainingPrecision.FP32
    return TrainingPrecision.MIXED if lora and mixed else TrainingPrecision.BF16
