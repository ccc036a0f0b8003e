"""What a training plan says: how full each GPU gets at each moment of a step, or why nothing fits. Plain frozen data,
in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.result import Alternative
from gpuherd.models.plan.training_job import TrainingJob
from gpuherd.models.plan.workload import Reserve


@dataclass(frozen=True, slots=True)
class Moment:
    """What lies on one GPU at a moment of a training step.

    Attributes:
        name: ``generating``, ``loss``, ``reference`` (in place of ``loss`` where it is fuller),
            ``backward, last layer``, ``backward, first layer``,
            ``optimiser step``; with FSDP also ``backward, next layer`` and ``backward, embeddings``.
        parameters, quantisation, gradients, optimiser: of the model that is trained.
        copies: the parameters again, in the numbers of products: autocast's, or those that FSDP gathered.
        exchange: buffers in which GPUs exchange gradients.
        models: reference, reward and value models that lie beside it.
        activations: what the forward pass has kept.
        logits: of all positions, and what the loss makes of them.
        cache: keys and values of answers that are being generated.
        workspace: what an operation needs beside that.
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

    moments: tuple[Moment, ...]
    context: int = 0
    reserve: int = 0

    @property
    def fullest(self) -> Moment:
        """The moment that takes most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def total(self) -> int:
        """What must be free on the GPU: the fullest moment, the context and the reserve."""
        return self.fullest.total + self.context + self.reserve

    def most(self, part: str) -> int:
        """The largest that one part (``gradients``, ``activations``, ...) ever is."""
        return max(moment.parts()[part] for moment in self.moments)


@dataclass(frozen=True, slots=True)
class TrainingLoad:
    """A GPU of a training."""

    card: Card
    usage: TrainingUsage

    @property
    def left(self) -> int:
        """Bytes that stay free, beyond the reserve; below 0 where it doesn't fit."""
        return self.card.free - self.usage.total


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A training that fits.

    Attributes:
        trained: how many numbers are trained.
        loads: one for each GPU that is used. ``fsdp``: the fewest that fit; ``ddp``: all that fit; ``single``: one.
        checkpointed, plain: a GPU's usage with and without checkpointing, whichever the job asks for.
        largest_batch: on a GPU, with these tokens, on the GPUs of ``loads``.
        on_all: the same job divided over all cards: usage of the fullest card and largest batch; None where ``loads``
            has all of them or more cards change nothing.
        warnings: sentences that a person should read.
    """

    architecture: Architecture
    job: TrainingJob
    reserve: Reserve
    trained: int
    loads: tuple[TrainingLoad, ...]
    checkpointed: TrainingUsage
    plain: TrainingUsage
    largest_batch: int
    on_all: AllCards | None = None
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """How many GPUs it uses."""
        return len(self.loads)


@dataclass(frozen=True, slots=True)
class AllCards:
    """A training divided over all cards that were given."""

    gpus: int
    usage: TrainingUsage
    largest_batch: int


@dataclass(frozen=True, slots=True)
class TrainingRefusal:
    """No placement fits.

    Attributes:
        reason: one sentence with the figures.
        missing: bytes that the fullest GPU has too little.
        loads: the best placement, with GPUs fuller than they can be.
        checkpointed, plain: as in a plan.
        alternatives: what would fit, the smallest change first; each has been planned.
    """

    architecture: Architecture
    job: TrainingJob
    reserve: Reserve
    trained: int
    reason: str
    missing: int
    loads: tuple[TrainingLoad, ...]
    checkpointed: TrainingUsage
    plain: TrainingUsage
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()
