"""What a job of an experiment asks its queue for: GPUs, and so much memory on each by the plans of its models.

A job computes on one GPU, where the models that it holds lie whole; a training on as many as its algorithm is given,
each with the whole model (DDP) or a part of each layer (FSDP). Which models those are depends on its phase: a
collection has the policy (a guided one is two models), a training what the algorithm trains, an evaluation both.
Algorithms from human feedback train a proxy first: the larger of both trainings counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from gpuherd.models.place.training import TrainingRefusal, make_training_plan
from gpuherd.posttrain.engine.checkpoints import FILE_BYTES
from gpuherd.posttrain.engine.log_probs import CHUNK_NUMBERS
from gpuherd.posttrain.engine.options import Lora, Sharding, StepOptions
from gpuherd.posttrain.guidance.options import ComparingOptions, Loss, ValueOptions
from gpuherd.posttrain.policy_gradient.algorithm import ASKED_AT_ONCE, PolicyOptions
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.runs.blocks import ModelPair
from gpuherd.posttrain.runs.plan import Phase, Step, StepRequest
from gpuherd.posttrain.runs.prepare import Prepared
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.posttrain.types import Precision as Loading
from gpuherd.units import gib

if TYPE_CHECKING:
    from gpuherd.posttrain.runs.settings import AlgorithmConfig

# Reward models of unknown architecture are encoders of less than half a billion numbers, usually.
_UNKNOWN_SCORER_MB = 2048
# Of models whose GPU is not known there is no end of room.
_BOUNDLESS = GpuSpec("0", "", total=0, free=1 << 60)


_FLOAT32 = 4
_BEYOND_16_BITS = 2  # bytes a number: planners count a reward model in 16 bits, and a proxy scores in 32
# Types of models whose logits are what their head answers, as ``engine.log_probs`` needs it to compute them in chunks.
# All others are planned with whole logits, which are never less.
PLAIN_HEADS = frozenset(
    {"gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3"}
)
# Bytes of an optimiser's states for each number in float32.
_STATES: Mapping[str, int] = {Optimiser.ADAMW: 8, Optimiser.ADAMW_8BIT: 2, Optimiser.SGD: 0}


@dataclass(frozen=True, slots=True)
class _Held:
    """A model that decodes: its name, in which dtype, and of a classifier its options and how many numbers it predicts
    of a token."""

    model: str
    dtype: str | None
    guiding: ValueOptions | None = None
    width: int = 1


class Memory:
    """What each step of an experiment asks for on a machine with these GPUs; each model is read once.

    Args:
        cards: as idle as jobs will find them; () on a machine without GPUs.
        prepared: the longest prompt of each data set, and what scores its completions.
    """

    def __init__(self, settings: Settings, cards: Sequence[GpuSpec], prepared: Prepared):
        self._settings, self._cards, self._prompts = settings, tuple(cards), prepared.prompt_tokens
        self._choices = {each.name: each for each in prepared.choices}
        self._reward_models, self._right_or_wrong = prepared.reward_models, prepared.right_or_wrong
        self._known: dict[tuple[object, ...], StepRequest] = {}

    def of(self, step: Step) -> StepRequest:
        """Of one step. Raises JobCannotFit where it fits on no GPU here; MissingModel, BadModel."""
        if step.joins:
            return StepRequest(0, 0, "joins shards")
        name = step.evaluated_on if step.evaluated_on is not None else step.dataset
        if step.phase is Phase.TRAIN:
            key: tuple[object, ...] = (step.algorithm, step.family, name)
            if key not in self._known:
                self._known[key] = self._training(step, self._settings.families()[step.family])
            return self._known[key]
        models = self._models(step)
        if (models, name) not in self._known:
            self._known[models, name] = self._decoding(models, name)
        return self._known[models, name]

    def _models(self, step: Step) -> tuple[_Held, ...]:
        """What lies on the GPU while a step decodes."""
        family, choice, dtype = (
            self._settings.families()[step.family],
            self._choices.get(step.algorithm),
            self._settings.system.dtype,
        )
        other = choice.make().collected_from if choice is not None and step.phase is Phase.COLLECT else None
        if other is not None:
            return (_Held(other, dtype),)
        policy = _Held(family.reference, dtype)
        if step.policy_round is None or choice is None:
            return (policy,)
        if choice.guided:
            # A classifier is kept in the float32 that it was trained in, and loaded so where nothing else is said.
            if family.value is None:
                return (policy,)
            return (policy, _Held(family.value, dtype or "fp32", choice.options, self._width(choice, step.dataset)))
        # The divergence is measured with both models at hand.
        both = step.phase is Phase.EVALUATE and self._settings.evaluation.kl == "exact"
        return (policy, policy) if both else (policy,)

    def _decoding(self, models: Sequence[_Held], dataset: str) -> StepRequest:
        """Models that decode together on one GPU: their needs add up, but for the context and what is kept free."""
        demands, heads = [], 0
        for each in models:
            architecture, precision = read_with_precision(each.model, each.dtype)
            load = self._load(dataset, each.guiding)
            demands.append(resources_of(architecture, precision, load, self._cards, parallel="replica", most=1))
            if each.guiding is not None:
                heads += _decoding_head(each.guiding, each.width, architecture, precision, load.batch)
        total = demands[0].memory_mb + sum(_additional(each) for each in demands[1:]) + self._scoring(dataset)
        total += -(-heads // MIB)
        said = " and ".join(each.sentence.partition(":")[0] for each in demands)
        if dataset in self._reward_models:
            said += f", scored by {self._reward_models[dataset]}"
        self._refuse(total, said)
        return StepRequest(1, total, f"{said}: {gib(total * MIB)}")

    def _load(self, dataset: str, guiding: ValueOptions | None) -> Workload:
        """What is decoded at once. A classifier reads the candidates of a step behind what there is: a pass of as many
        tokens as a short prompt's."""
        told, prompt = self._settings.generation, self._prompts[dataset]
        if guiding is None:
            return Workload(told.batch_size, prompt, told.max_new_tokens)
        top_k = guiding.guidance.top_k
        return Workload(told.batch_size, max(prompt, top_k), told.max_new_tokens + top_k)

    def _scoring(self, dataset: str) -> int:
        """Memory of the model that scores next to the others, in MB; 0 where none does. Raises MissingModel."""
        model = self._reward_models.get(dataset)
        if model is None:
            return 0
        rows = self._settings.data_collection.reward_batch_size
        load = Workload(rows, self._prompts[dataset] + self._settings.generation.max_new_tokens, 1)
        try:
            architecture, precision = read_with_precision(model, self._settings.dataset(dataset).reward_dtype)
        except MissingModel:
            raise
        except BadModel:
            return _UNKNOWN_SCORER_MB  # an encoder of an architecture whose shapes the planner doesn't know
        return _additional(resources_of(architecture, precision, load, self._cards, parallel="replica", most=1))

    def _training(self, step: Step, family: ModelPair) -> StepRequest:
        choice = self._choices[step.algorithm]
        model = family.value if choice.guided and family.value is not None else family.reference
        # Classifiers always learn in float32 (value.training), other weights where there is autocast.
        dtype = "fp32" if choice.guided else self._settings.system.training.dtype
        architecture, precision = read_with_precision(model, dtype, read_for_training)
        frozen = (
            precision if choice.guided else read_with_precision(model, self._settings.system.training.frozen.dtype)[1]
        )
        job = self._job(choice, architecture, precision, frozen, self._prompts[step.dataset])
        proxy = None
        if isinstance(choice.options, ProxyOptions):
            base = choice.options.proxy_base(family.value, family.reference)
            proxy = read_with_precision(base, "fp32", read_for_training)[0]
        # The policy's answers are scored while it trains: by the proxy, on the same GPU, or by the task's model.
        scored_by = proxy if job.method.generates else None
        memory = self._learning(step, architecture, job, scored_by)
        if isinstance(choice.options, ValueOptions):
            width = self._width(choice, step.dataset)
            memory += -(-_learnt_head(choice.options, width, architecture, job) // MIB)
            self._refuse(memory, f"{architecture.model} and the classifier's head", choice.gpus)
        elif scored_by is not None:
            memory += -(-_BEYOND_16_BITS * scored_by.parameters // MIB)
            self._refuse(memory, f"{architecture.model} and its proxy in float32", choice.gpus)
        elif job.method.generates:
            memory += self._scoring(step.dataset)
            self._refuse(memory, f"{architecture.model} and what scores it", choice.gpus)
        for frozen_model in choice.make().frozen_models:
            memory += self._frozen(frozen_model, job)
            self._refuse(memory, f"{architecture.model} and {frozen_model}", choice.gpus)
        shared = "" if choice.gpus == 1 else f" by {job.strategy} on {choice.gpus} GPUs"
        told = f"{job.method.upper()} of {architecture.model}{shared} in {job.precision}, {job.batch} at once"
        if proxy is not None:
            first = self._learning(step, proxy, self._of_proxy(job))
            if first > memory:
                memory, told = first, f"the proxy's training of {proxy.model} in float32, before {told}"
        each = "" if choice.gpus == 1 else " on each"
        gpus = choice.gpus if self._cards else 1  # on a machine without GPUs all processes are on the CPU
        host = host_words(architecture, job, self._settings.steps_of(choice, choice.gpus), choice.gpus, choice.gpus)
        return StepRequest(gpus, memory, f"{told}{host}: {gib(memory * MIB)}{each}")

    def _frozen(self, model: str, job: TrainingJob) -> int:
        """What a frozen model takes that reads the answers of a micro-batch, in MB: with its logits of all their tokens
        and as many again in float32, of which one answer's at a time are needed."""
        architecture, precision = read_with_precision(model, None)
        load = Workload(job.batch, job.prompt_tokens + job.new_tokens, 1)
        logits = _FLOAT32 * (job.batch + 1) * job.new_tokens * architecture.vocab_size
        demand = resources_of(architecture, precision, load, self._cards, parallel="replica", most=1)
        return _additional(demand) + -(-logits // MIB)

    def _width(self, choice: AlgorithmConfig, dataset: str) -> int:
        """How many numbers a classifier predicts of a token: where its loss is left to the data, one of right and
        wrong, else those of a histogram."""
        options: ValueOptions = choice.options
        by_atoms = options.loss_type is Loss.MLE or (options.loss_type is None and dataset not in self._right_or_wrong)
        return options.num_atoms if by_atoms else 1

    def _learning(
        self, step: Step, architecture: Architecture, job: TrainingJob, reward: Architecture | None = None
    ) -> int:
        """What one training takes on each of its GPUs, in MB. Raises JobCannotFit."""
        gpus = self._choices[step.algorithm].gpus
        found = make_training_plan(architecture, self._roomiest(gpus, step.name), job, count=gpus, reward=reward)
        if isinstance(found, TrainingRefusal):
            raise JobCannotFit(f"{step.name}: {found.reason}; {_what_helps(found)}")
        return -(-max(load.usage.total for load in found.loads) // MIB)

    def _roomiest(self, count: int, job: str) -> list[GpuSpec]:
        """So many GPUs, the emptiest; where none are known, such without an end of room. Raises JobCannotFit."""
        if not self._cards:
            return [replace(_BOUNDLESS, label=str(number)) for number in range(count)]
        if len(self._cards) < count:
            raise JobCannotFit(f"{job}: it trains on {count} GPUs together, and there are {len(self._cards)}")
        return sorted(self._cards, key=lambda card: -card.free)[:count]

    def _of_proxy(self, job: TrainingJob) -> TrainingJob:
        """A proxy's training: pairs, without next-token prediction, and all its weights."""
        mixed = self._settings.system.amp_dtype is not None
        return replace(
            job,
            method=Method.DPO,
            precision=_training_precision(Precision.FP32, mixed=mixed),
            optimiser=Optimiser.ADAMW,
            lora=None,
            base=None,
            weighed=0,
            accumulation=2,
            batch=self._settings.training.micro_batch_size,
            reference=False,
            loss="chunked",
            chunk=None,
        )

    def _job(
        self,
        choice: AlgorithmConfig,
        architecture: Architecture,
        precision: Precision,
        frozen: Precision,
        prompt_tokens: int,
    ) -> TrainingJob:
        """How an algorithm trains. ``precision``, ``frozen``: as in ``training_job``."""
        told, algorithm = self._settings, choice.make()
        job = training_job(
            algorithm.memory,
            choice.options,
            told.steps_of(choice, choice.gpus),
            processes=choice.gpus,
            sequences=choice.sequences_per_step,
            precision=precision,
            frozen=frozen,
            loaded=told.system.training,
            prompt_tokens=prompt_tokens,
            new_tokens=told.generation.max_new_tokens,
            sampled=told.generation.batch_size,
            weighs=isinstance(choice.options, PolicyOptions),
            chunked=architecture.model_type in PLAIN_HEADS and not algorithm.whole_logits,
        )
        if isinstance(choice.options, ComparingOptions):
            job = replace(job, batch=2 * job.batch)  # of a comparison both sides are read
        # A classifier predicts no next token.
        return replace(job, loss="chunked", chunk=None) if choice.guided else job

    def _refuse(self, memory_mb: int, said: str, gpus: int = 1) -> None:
        most = min(card.free for card in self._roomiest(gpus, said))
        if memory_mb * MIB > most:
            place = (
                "one GPU, and the roomiest here has" if gpus == 1 else f"each of {gpus} GPUs, and of those here one has"
            )
            raise JobCannotFit(
                f"{said} together take {gib(memory_mb * MIB)} on {place} {gib(most)}; lower "
                "generation.batch_size or generation.max_new_tokens, or choose a smaller models.<name>.value"
            )


def _head_numbers(options: ValueOptions, width: int, architecture: Architecture) -> int:
    """Weights of a classifier's head: of kind Q those of each token of the vocabulary."""
    tokens = architecture.vocab_size if options.classifier_type is Kind.Q else 1
    return width * tokens * (architecture.hidden_size + 1)


def _decoding_head(
    options: ValueOptions, width: int, architecture: Architecture, precision: Precision, rows: int
) -> int:
    """Bytes of a head that is asked, and of kind Q of the candidates' rows of it, in float32 too."""
    number = _FLOAT32 if precision is Precision.FP32 else 2
    weights = number * _head_numbers(options, width, architecture)
    if options.classifier_type is not Kind.Q:
        return weights
    return weights + (number + _FLOAT32) * rows * options.guidance.top_k * width * architecture.hidden_size


def _learnt_head(options: ValueOptions, width: int, architecture: Architecture, job: TrainingJob) -> int:
    """Bytes of a head in training: weights, gradients, those of a micro-batch before they are added, states; and of
    kind Q for each token its rows of the head, with their gradients."""
    numbers = _head_numbers(options, width, architecture)
    learnt = numbers * (3 * _FLOAT32 + _STATES[options.optimizer])
    if options.classifier_type is not Kind.Q:
        return learnt
    tokens = job.batch * (job.prompt_tokens + job.new_tokens)
    return learnt + 2 * _FLOAT32 * tokens * width * architecture.hidden_size


def _additional(demand: PlannedRequest) -> int:
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


def training_job(
    method: Method,
    options: Any,
    steps: StepOptions,
    *,
    processes: int,
    sequences: int,
    precision: Precision,
    frozen: Precision,
    loaded: Loading,
    prompt_tokens: int,
    new_tokens: int,
    sampled: int,
    weighs: bool,
    chunked: bool,
) -> TrainingJob:
    """A training in the planner's words, of rounds and of ``gpuherd train``.

    Args:
        options: of the algorithm; those that it doesn't have are left at the planner's defaults.
        steps: micro-batches and strategy of each process.
        sequences: of an optimiser step, over all processes.
        precision, frozen: how weights lie in memory that are trained, and those that no step changes, under an adapter
            or of the reference.
        loaded: autocast and attention.
        sampled: answers that a process draws at once, where the method does.
        weighs: log-probs are computed without gradients before a step's first update.
        chunked: logits of all positions are never there at once, unless the head is under an adapter.

    Raises UsageError for quantised weights that FSDP would have to divide, MissingExtra without bitsandbytes.
    """
    lora: Lora | None = getattr(options, "lora", None)
    base = frozen if lora is None or lora.quantization is None else Precision(lora.quantization)
    if lora is not None and lora.quantization is not None:
        check_bitsandbytes(base)
        if steps.shards:
            raise UsageError(f"lora.quantization={base} with strategy fsdp: codes can't be divided; use ddp")
    chunked = chunked and not (
        lora and any("head" in each or "embed_out" in each for each in lora.target_modules or ())
    )
    return TrainingJob(
        method=method,
        strategy=Strategy(steps.strategy),
        precision=_training_precision(precision, mixed=loaded.amp_dtype is not None, lora=lora is not None),
        optimiser=Optimiser(getattr(options, "optimizer", Optimiser.ADAMW)),
        lora=None if lora is None else LoraShape(lora.r, lora.target_modules or (ALL_LINEAR,)),
        base=None if lora is None else base,
        batch=steps.micro_batch_size,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        accumulation=-(-sequences // (processes * steps.micro_batch_size)),
        samples=getattr(options, "samples_per_prompt", 8),
        checkpointing=steps.gradient_checkpointing,
        attention="eager" if loaded.attention == "eager" else "sdpa",
        loss="chunked" if chunked else "whole",
        chunk=CHUNK_NUMBERS if chunked else None,
        reference=_reference(options),
        reference_in=frozen,
        wide=lora is not None and frozen is not precision and not steps.shards,
        sampled=sampled if method.generates else None,
        weighed=ASKED_AT_ONCE if weighs else 0,
        gathers=method.generates,
        reshard=steps.fsdp_sharding_strategy == Sharding.FULL_SHARD,
        bucket_view=True,
    )


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


def _what_helps(refusal: TrainingRefusal) -> str:
    told = [each.sentence for each in refusal.alternatives[:3]]
    if told:
        return f"what would fit: {'; '.join(told)}"
    return "lower training.micro_batch_size or generation.max_new_tokens, or choose a smaller model"
