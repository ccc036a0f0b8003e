"""What is to be trained, and how: plain frozen data, with the rules that make a job possible at all. No bytes here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

from gpuherd.errors import UsageError
from gpuherd.models.memory.weights import Precision

ALL_LINEAR = "all-linear"
_ATTENTIONS, _LOSSES, _VALUES = ("sdpa", "eager"), ("whole", "chunked"), ("head", "model")
_COUNTED = ("batch", "prompt_tokens", "new_tokens", "accumulation", "samples", "sampled", "weighed", "chunk")
_WHOLE = (Precision.INT8, Precision.AS_STORED)  # codes that FSDP can't divide
_MOST = 10**12  # of anything that is counted: more is a slip of the hand


class Method(StrEnum):
    """How the model learns."""

    SFT = "sft"  # next tokens of given texts
    DPO = "dpo"  # pairs of a chosen and a rejected answer: arXiv 2305.18290
    GRPO = "grpo"  # groups of own answers, compared with each other: arXiv 2402.03300
    PPO = "ppo"  # own answers, and a value for each token: arXiv 1707.06347

    @property
    def generates(self) -> bool:
        """Whether the model answers prompts itself while it is trained."""
        return self in (Method.GRPO, Method.PPO)


class Strategy(StrEnum):
    """How several GPUs share the work."""

    SINGLE = "single"  # one GPU
    DDP = "ddp"  # each GPU has everything, and a batch of its own
    FSDP = "fsdp"  # parameters, gradients and optimiser states are divided: torch's fully_shard


class TrainingPrecision(StrEnum):
    """In what numbers is trained."""

    FP32 = "fp32"
    MIXED = "mixed"  # parameters in float32, products in bfloat16 (autocast; with fsdp a bfloat16 copy of what is used)
    BF16 = "bf16"  # parameters, gradients and optimiser states in bfloat16


class Optimiser(StrEnum):
    """Who changes the parameters."""

    ADAMW = "adamw"  # torch's, fused
    ADAMW_8BIT = "adamw-8bit"  # bitsandbytes'
    SGD = "sgd"  # without momentum
    ADAFACTOR = "adafactor"  # transformers', without momentum


@dataclass(frozen=True, slots=True)
class LoraShape:
    """A low-rank adapter (arXiv 2106.09685) that is trained in place of the model.

    Attributes:
        rank: of each pair of matrices.
        targets: names of the modules that get one, as PEFT takes them (``q_proj``); ``all-linear``: every linear module
            of the body.
    """

    rank: int = 16
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        _at_least_one(rank=self.rank)
        if not self.targets:
            raise UsageError("a LoRA adapter without targets trains nothing; name modules, or all-linear")


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training to be planned. Raises UsageError for what is impossible.

    Attributes:
        method, strategy, precision, optimiser: see there.
        lora: trained in place of the model; its numbers are float32, as PEFT makes them.
        base: with ``lora``, how the frozen model lies in memory (``nf4`` is QLoRA, arXiv 2305.14314); None: as
            ``precision`` says, ``mixed`` meaning bf16.
        batch: sequences on a GPU in one forward and backward pass; for ``dpo`` pairs, for ``grpo`` and ``ppo`` answers.
        prompt_tokens, new_tokens: of each sequence, at most. ``sft`` trains on all of them.
        accumulation: passes before the optimiser steps.
        samples: with ``grpo``, answers to each prompt, which are compared.
        checkpointing: whether layers keep their input alone and are computed again for the backward pass
            (arXiv 1604.06174).
        attention: ``sdpa`` (flash and memory-efficient kernels) or ``eager``, which keeps every score.
        loss: ``whole``: logits of all positions at once; ``chunked``: a part of them after the other, as TRL 1.16 and
            Liger do.
        chunk: of a chunked loss, how many logits exist at once, in float32 and of whole rows of the vocabulary, as
            ``gpuherd.posttrain`` computes them; None: TRL's tiles.
        reference: whether a frozen copy of the model is asked too; None: as the method needs it (``dpo`` and ``ppo``
            yes; ``grpo`` no, as its KL weight is 0 unless one is set). With ``lora`` it costs nothing: the adapter is
            switched off instead.
        reference_in: how that copy lies in memory; None: as the parameters.
        wide: under autocast, layers of a frozen model pass float32 on to each other though its weights are narrower.
        sampled: with ``grpo`` and ``ppo``, answers that are generated at once on a GPU; None: those of all passes of a
            step, as TRL does.
        weighed: between generation and the loss the log-probabilities of so many times ``batch`` answers are asked at
            once, without gradients; 0: none are.
        gathers: with ``fsdp``, each GPU holds the whole model while it generates and computes log-probabilities; False:
            it stays divided. A reference is divided in either case.
        value: with ``ppo``, whether values come from a ``head`` on the model or from a ``model`` of the same size,
            trained next to it.
        reshard: with ``fsdp``, whether a layer's parameters are given up between forward and backward (full shard) or
            kept (grad-op).
        bucket_view: with ``ddp``, ``gradient_as_bucket_view``: gradients lie in DDP's buckets instead of next to them.
        algorithm: what sentences call it; "": by its method.
    """

    method: Method = Method.SFT
    strategy: Strategy = Strategy.SINGLE
    precision: TrainingPrecision = TrainingPrecision.MIXED
    optimiser: Optimiser = Optimiser.ADAMW
    lora: LoraShape | None = None
    base: Precision | None = None
    batch: int = 1
    prompt_tokens: int = 512
    new_tokens: int = 512
    accumulation: int = 1
    samples: int = 8
    checkpointing: bool = True
    attention: Literal["sdpa", "eager"] = "sdpa"
    loss: Literal["whole", "chunked"] = "whole"
    chunk: int | None = None
    reference: bool | None = None
    reference_in: Precision | None = None
    wide: bool = False
    sampled: int | None = None
    weighed: int = 0
    gathers: bool = False
    value: Literal["head", "model"] = "head"
    reshard: bool = True
    bucket_view: bool = False
    algorithm: str = ""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _COUNTED} | {"weighed": self.weighed or 1}
        _at_least_one(**{name: 1 if number is None else number for name, number in given.items()})
        for name, words in (("attention", _ATTENTIONS), ("loss", _LOSSES), ("value", _VALUES)):
            if getattr(self, name) not in words:
                raise UsageError(f"{name}={getattr(self, name)!r}: it is one of {', '.join(words)}")
        if self.base is not None and self.lora is None:
            raise UsageError(
                f"base={self.base}: only a model under a LoRA adapter is frozen; add lora, or leave base out"
            )
        if self.strategy is Strategy.FSDP and self.base in _WHOLE:
            raise UsageError(f"fsdp can't divide weights that lie as {self.base}; take base=nf4, or ddp")
        if self.strategy is Strategy.FSDP and self.optimiser is Optimiser.ADAMW_8BIT:
            raise UsageError(
                "fsdp can't divide the states of bitsandbytes' 8-bit AdamW; take adafactor or adamw, or ddp"
            )

    @property
    def base_precision(self) -> Precision:
        """How the parameters lie in memory, the adapter's own not counted."""
        if self.base is not None:
            return self.base
        if self.precision is TrainingPrecision.FP32 or (
            self.precision is TrainingPrecision.MIXED and self.lora is None
        ):
            return Precision.FP32
        return Precision.BF16

    @property
    def computes_in(self) -> Precision:
        """The numbers of products."""
        return Precision.FP32 if self.precision is TrainingPrecision.FP32 else Precision.BF16

    @property
    def divisible(self) -> bool:
        """Whether FSDP can divide it."""
        return self.optimiser is not Optimiser.ADAMW_8BIT and self.base not in _WHOLE

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the model lies in memory."""
        needed = self.method in (Method.DPO, Method.PPO) if self.reference is None else self.reference
        return needed and self.lora is None and self.method is not Method.SFT

    @property
    def reference_precision(self) -> Precision:
        """How the reference's weights lie in memory."""
        return self.reference_in or self.base_precision

    @property
    def asks_reference_last(self) -> bool:
        """Whether the reference answers while the model's own pass is kept for its backward pass, as DPO's code has it.
        With ``reference=False`` its log-probabilities were computed before the training."""
        return self.method is Method.DPO and self.reference is not False

    @property
    def tokens(self) -> int:
        """Of one sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def sequences(self) -> int:
        """In one pass on a GPU: a pair of ``dpo`` is two."""
        return 2 * self.batch if self.method is Method.DPO else self.batch

    @property
    def passed_tokens(self) -> int:
        """That go through the layers of a GPU in one pass, padding counted."""
        return self.sequences * self.tokens

    @property
    def scored_tokens(self) -> int:
        """Whose logits are computed in one pass: of ``grpo`` and ``ppo`` those of the answers alone."""
        return self.sequences * (self.new_tokens + 1) if self.method.generates else self.passed_tokens


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise UsageError(f"{name}={value!r}: it must be a whole number, at least 1 and at most 10^12")


# What lies on one GPU at each moment of a training step. Plain frozen data, in bytes.


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What lies on one GPU at a moment of a training step.

    Attributes:
        name: ``generating``, ``loss``, ``reference`` (in place of ``loss`` where it is fuller),
            ``backward, last layer``, ``backward, first layer``,
            ``backward, embeddings`` (where the embedding is the head too, and with FSDP),
            ``optimiser step``; with FSDP also ``backward, next layer``.
        parameters, quantisation, gradients, optimiser: of the model that is trained.
        copies: the parameters again, in the numbers of products: autocast's, or those that FSDP gathered.
        exchange: buffers in which GPUs exchange gradients.
        models: reference, reward and value models next to it.
        activations: what the forward pass has kept.
        logits: of all positions, and what the loss makes of them.
        cache: keys and values of answers that are being generated.
        workspace: what an operation needs on top of that.
    """

    name: str
    parameters: int = 0
    quantisation: int = 0
    gradients: int = 0
    optimiser: int = 0
    copies: int = 0
    exchange: int = 0
    models: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        held = self.parameters + self.quantisation + self.gradients + self.optimiser + self.copies + self.exchange
        return held + self.models + self.activations + self.logits + self.cache + self.workspace

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}


@dataclass(frozen=True, slots=True)
class TrainingUsage:
    """One GPU of a training: all moments of a step, in their order."""

    moments: tuple[StepMemory, ...]
    context: int = 0
    reserve: int = 0

    @property
    def fullest(self) -> StepMemory:
        """The moment that takes most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def total(self) -> int:
        """What must be free on the GPU: the fullest moment, the context and the reserve."""
        return self.fullest.total + self.context + self.reserve

    def most(self, part: str) -> int:
        """The largest that one part (``gradients``, ``activations``, ...) ever is."""
        return max(moment.parts()[part] for moment in self.moments)
