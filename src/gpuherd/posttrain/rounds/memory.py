"""What a job of an experiment asks its queue for: one GPU, and so much of its memory by the plans of its models.

Every job computes on one GPU, where the models that it holds lie whole. Which those are depends on its phase: a
collection has the policy (a guided one is two models), a training what the algorithm trains, an evaluation both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.errors import BadModel, JobCannotFit, MissingModel
from gpuherd.models.plan.asking import in_precision
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.demand import Demand, demand_of
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.training import make_training_plan
from gpuherd.models.plan.training_job import LoraShape, Method, Optimiser, TrainingJob, TrainingPrecision
from gpuherd.models.plan.training_result import TrainingRefusal
from gpuherd.models.plan.wording import gib
from gpuherd.models.plan.workload import MIB, Reserve, Workload
from gpuherd.posttrain.rounds.blocks import Family
from gpuherd.posttrain.rounds.plan import Phase, Step
from gpuherd.posttrain.rounds.prepared import Prepared
from gpuherd.posttrain.rounds.settings import Settings

if TYPE_CHECKING:
    from gpuherd.posttrain.rounds.choices import Choice

# How each algorithm's training step is counted; those that train a classifier train the value model on given texts.
_METHODS: Mapping[str, Method] = {
    "SFT": Method.SFT,
    "DPO": Method.DPO,
    "GRPO": Method.GRPO,
    "REINFORCE": Method.GRPO,
    "GRPO-HF": Method.GRPO,
    "PPO": Method.PPO,
}
# Reward models of unknown architecture are encoders of less than half a billion numbers, usually.
_UNKNOWN_SCORER_MB = 2048
# Of models whose GPU is not known there is no end of room.
_BOUNDLESS = Card("0", "", total=0, free=1 << 60)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a job asks for.

    Attributes:
        gpus: 1.
        memory_mb: free memory that it needs there.
        sentence: what for, in words.
    """

    gpus: int
    memory_mb: int
    sentence: str


class Memory:
    """What each step of an experiment asks for on a machine with these GPUs; each model is read once.

    Args:
        cards: as idle as jobs will find them; () on a machine without GPUs.
        prepared: the longest prompt of each data set, and what scores its completions.
    """

    def __init__(self, settings: Settings, cards: Sequence[Card], prepared: Prepared):
        self._settings, self._cards, self._prompts = settings, tuple(cards), prepared.prompt_tokens
        self._choices = {each.name: each for each in prepared.choices}
        self._reward_models = prepared.reward_models
        self._known: dict[tuple[object, ...], Asked] = {}

    def of(self, step: Step) -> Asked:
        """Of one step. Raises JobCannotFit where it fits on no GPU here; MissingModel, BadModel."""
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

    def _models(self, step: Step) -> tuple[str, ...]:
        """What lies on the GPU while a step decodes."""
        family = self._settings.families()[step.family]
        if step.policy_round is None:
            return (family.reference,)
        if self._choices[step.algorithm].guided:
            return (family.reference, *([] if family.value is None else [family.value]))
        # The divergence is measured with both models at hand.
        both = step.phase is Phase.EVALUATE and self._settings.evaluation.kl == "exact"
        return (family.reference, family.reference) if both else (family.reference,)

    def _decoding(self, models: Sequence[str], dataset: str) -> Asked:
        """Models that decode together on one GPU: their needs add up, but for the context and what is kept free."""
        told = self._settings.generation
        load = Workload(told.batch_size, self._prompts[dataset], told.max_new_tokens)
        demands = [
            demand_of(*in_precision(model, self._settings.system.dtype), load, self._cards, parallel="replica", most=1)
            for model in models
        ]
        total = demands[0].memory_mb + sum(_beside(each) for each in demands[1:]) + self._scoring(dataset)
        said = " and ".join(each.sentence.partition(":")[0] for each in demands)
        if dataset in self._reward_models:
            said += f", scored by {self._reward_models[dataset]}"
        self._refuse(total, said)
        return Asked(1, total, f"{said}: {gib(total * MIB)}")

    def _scoring(self, dataset: str) -> int:
        """What the model that scores takes beside the others, in MB; 0 where none does. Raises MissingModel."""
        model = self._reward_models.get(dataset)
        if model is None:
            return 0
        rows = self._settings.data_collection.reward_batch_size
        load = Workload(rows, self._prompts[dataset] + self._settings.generation.max_new_tokens, 1)
        try:
            architecture, precision = in_precision(model, self._settings.dataset(dataset).reward_dtype)
        except MissingModel:
            raise
        except BadModel:
            return _UNKNOWN_SCORER_MB  # an encoder of an architecture whose shapes the planner doesn't know
        return _beside(demand_of(architecture, precision, load, self._cards, parallel="replica", most=1))

    def _training(self, step: Step, family: Family) -> Asked:
        choice = self._choices[step.algorithm]
        model = family.value if choice.guided and family.value is not None else family.reference
        # Classifiers always learn in float32 (value.training), other weights where there is autocast.
        dtype = "fp32" if choice.guided else self._settings.system.training.dtype
        architecture, precision = in_precision(model, dtype)
        job = self._job(choice, precision, self._prompts[step.dataset])
        # A proxy that is learnt from preferences lies beside the policy, on whatever model it begins with.
        proxy = None
        if choice.algorithm == "GRPO-HF":
            said = getattr(choice.options, "proxy_model", None) or family.value or family.reference
            proxy = in_precision(said, self._settings.system.dtype)[0]
        roomiest = max(self._cards, key=lambda card: card.free, default=_BOUNDLESS)
        found = make_training_plan(architecture, [roomiest], job, gpus=1, reward=proxy)
        if isinstance(found, TrainingRefusal):
            raise JobCannotFit(f"{step.name}: {found.reason}; {_what_helps(found)}")
        memory = -(-found.loads[0].usage.total // MIB)
        if job.method.generates and choice.algorithm != "GRPO-HF":  # completions are scored while it trains
            memory += self._scoring(step.dataset)
            self._refuse(memory, f"{architecture.model} and what scores it")
        told = f"{job.method.upper()} of {architecture.model} in {job.precision}, {job.batch} at once"
        return Asked(1, memory, f"{told}: {gib(memory * MIB)}")

    def _job(self, choice: Choice, precision: Precision, prompt_tokens: int) -> TrainingJob:
        """How an algorithm trains, by its options where it has such."""
        told, options = self._settings, choice.options
        lora = getattr(options, "lora", None)
        reference = None
        if getattr(options, "reference_free", False):
            reference = False
        elif getattr(options, "kl_coef", None):
            reference = True
        return TrainingJob(
            method=Method.SFT if choice.guided else _METHODS[choice.algorithm],
            precision=_training_precision(precision, mixed=told.system.amp_dtype is not None),
            optimiser=Optimiser(getattr(options, "optimizer", Optimiser.ADAMW)),
            lora=None if lora is None else LoraShape(lora.r),
            batch=told.training.micro_batch_size,
            prompt_tokens=prompt_tokens,
            new_tokens=told.generation.max_new_tokens,
            samples=getattr(options, "samples_per_prompt", 8),
            checkpointing=told.training.gradient_checkpointing,
            attention="eager" if told.system.attn_impl == "eager" else "sdpa",
            reference=reference,
        )

    def _refuse(self, memory_mb: int, said: str) -> None:
        most = max((card.free for card in self._cards), default=_BOUNDLESS.free)
        if memory_mb * MIB > most:
            raise JobCannotFit(
                f"{said} together take {gib(memory_mb * MIB)} on one GPU, and the roomiest here has {gib(most)}; lower "
                "generation.batch_size or generation.max_new_tokens, or choose a smaller models.<name>.value"
            )


def _beside(demand: Demand) -> int:
    """What a model takes beside another one, in MB: without the context and what is kept free, which are there once."""
    kept = Reserve()
    if demand.plan is None:  # on no GPU that is known: the part that is kept free was put on top
        alone = demand.memory_mb * (1 - kept.share)
        return max(1, int(alone) - (kept.context + kept.fixed) // MIB)
    total = max(load.card.total for load in demand.plan.loads)
    return max(1, demand.memory_mb - (kept.context + kept.on(total)) // MIB)


def _training_precision(precision: Precision, *, mixed: bool) -> TrainingPrecision:
    if precision is Precision.FP32:
        return TrainingPrecision.MIXED if mixed else TrainingPrecision.FP32
    return TrainingPrecision.BF16


def _what_helps(refusal: TrainingRefusal) -> str:
    told = [each.sentence for each in refusal.alternatives[:3]]
    if told:
        return f"what would fit: {'; '.join(told)}"
    return "lower training.micro_batch_size or generation.max_new_tokens, or choose a smaller model"
