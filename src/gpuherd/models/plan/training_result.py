"""What lies on one GPU at each moment of a training step. Plain frozen data, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
