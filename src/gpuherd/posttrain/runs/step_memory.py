"""What a job of an experiment asks its queue for: GPUs, and so much memory on each by the plans of its models.

A job computes on one GPU, where the models that it holds lie whole; a training on as many as its algorithm is given.
Which models those are depends on its phase: a collection has the policy (a guided one is two models), a training what
the algorithm trains (``runs.memory``), an evaluation both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.lm.guidance.guide import Kind
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import MIB, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.resources import read_with_precision, resources_of
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.rollout.lengths import Lengths, lengths_of
from gpuherd.posttrain.runs.blocks import ModelPair
from gpuherd.posttrain.runs.memory import (
    FLOAT32,
    Scorer,
    TrainingTask,
    additional,
    head_numbers,
    refuse_together,
    vllm_memory,
)
from gpuherd.posttrain.runs.plan import Phase, Step, StepRequest
from gpuherd.posttrain.runs.prepare import Prepared
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.posttrain.types import Algorithm, BackendName
from gpuherd.units import gib

if TYPE_CHECKING:
    from gpuherd.posttrain.runs.settings import AlgorithmConfig


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
        prepared: of each data set the longest prompt, the answers to imitate, and what scores its completions.
    """

    def __init__(self, settings: Settings, cards: Sequence[GpuSpec], prepared: Prepared):
        self._settings, self._cards, self._prompts = settings, tuple(cards), prepared.prompt_tokens
        self._choices, self._imitated = {each.name: each for each in prepared.choices}, prepared.imitated
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
        total = demands[0].memory_mb + sum(additional(each) for each in demands[1:]) + -(-heads // MIB)
        said = " and ".join(each.sentence.partition(":")[0] for each in demands)
        for scorer in self._scorers(dataset):
            total += scorer.memory(self._cards)
            said += f", scored by {scorer.model}"
        refuse_together(self._cards, total, said)
        return StepRequest(1, total, f"{said}: {gib(total * MIB)}")

    def _load(self, dataset: str, guiding: ValueOptions | None) -> Workload:
        """What is decoded at once. A classifier reads the candidates of a step behind what there is: a pass of as many
        tokens as a short prompt's."""
        told, prompt = self._settings.generation, self._prompts[dataset]
        if guiding is None:
            return Workload(told.batch_size, prompt, told.max_new_tokens)
        top_k = guiding.guidance.top_k
        return Workload(told.batch_size, max(prompt, top_k), told.max_new_tokens + top_k)

    def _scorers(self, dataset: str) -> tuple[Scorer, ...]:
        """The model that scores next to the others, where one does."""
        model, told = self._reward_models.get(dataset), self._settings
        if model is None:
            return ()
        tokens = self._prompts[dataset] + told.generation.max_new_tokens
        return (Scorer(model, tokens, told.dataset(dataset).reward_dtype, told.data_collection.reward_batch_size),)

    def _lengths(self, algorithm: Algorithm, model: str, dataset: str) -> Lengths:
        """The most tokens of what is learnt from: as they are where they are known before the start."""
        told = self._settings.generation
        if algorithm.imitates:
            return lengths_of(self._imitated[dataset], model, chat=told.use_chat_template)
        prompt, new = self._prompts[dataset], told.max_new_tokens
        drawn = "which are drawn before it" if algorithm.collects else "which are drawn"
        if not (algorithm.collects or algorithm.samples):
            drawn = "as rows of its file are taken to be"
        said = f"with prompts of {prompt} tokens at most and answers of max_new_tokens={new}, {drawn}"
        return Lengths(prompt, new, 1, said)

    def _training(self, step: Step, family: ModelPair) -> StepRequest:
        choice, told = self._choices[step.algorithm], self._settings
        lengths = self._lengths(choice.make(), family.reference, step.dataset)
        task = TrainingTask(
            name=step.name,
            choice=choice,
            family=family,
            loaded=told.system.training,
            steps=told.steps_of(choice, choice.gpus),
            cards=self._cards,
            gpus=choice.gpus,
            prompt_tokens=lengths.prompt,
            new_tokens=lengths.answer or told.generation.max_new_tokens,
            sampled=told.generation.batch_size,
            pairs=told.training.micro_batch_size,
            width=self._width(choice, step.dataset) if isinstance(choice.options, ValueOptions) else 1,
            scorers=self._scorers(step.dataset),
        )
        by_vllm = told.generation.backend is BackendName.VLLM and bool(choice.make().samples)
        answers = self._load(step.dataset, None)
        sampler = (lambda: vllm_memory(family.reference, task.loaded, answers, self._cards)) if by_vllm else None
        found = task.memory(sampler)
        gpus = found.gpus if self._cards else 1  # on a machine without GPUs all processes are on the CPU
        each = "" if found.gpus == 1 else " on each"
        said = f"{found.said}, {lengths.said}"
        return StepRequest(gpus, found.memory_mb, f"{said}: {gib(found.memory_mb * MIB)}{each}")

    def _width(self, choice: AlgorithmConfig, dataset: str) -> int:
        """How many numbers a classifier predicts of a token: where its loss is left to the data, one of right and
        wrong, else those of a histogram."""
        options: ValueOptions = choice.options
        by_atoms = options.loss_type is Loss.MLE or (options.loss_type is None and dataset not in self._right_or_wrong)
        return options.num_atoms if by_atoms else 1


def _decoding_head(
    options: ValueOptions, width: int, architecture: Architecture, precision: Precision, rows: int
) -> int:
    """Bytes of a head that is asked, and of kind Q of the candidates' rows of it, in float32 too."""
    number = FLOAT32 if precision is Precision.FP32 else 2
    weights = number * head_numbers(options, width, architecture)
    if options.classifier_type is not Kind.Q:
        return weights
    return weights + (number + FLOAT32) * rows * options.guidance.top_k * width * architecture.hidden_size
