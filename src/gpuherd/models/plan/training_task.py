"""A training job on a model: all that depends on neither the batch nor the number of GPUs, counted once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.training_activations import Kept, kept_by, stream_bytes
from gpuherd.models.plan.training_job import Method, TrainingJob
from gpuherd.models.plan.training_model import TrainingModel
from gpuherd.models.plan.training_states import is_trained, with_lora
from gpuherd.models.plan.usage import CostTable
from gpuherd.models.plan.weights import weight_bytes
from gpuherd.models.plan.workload import Reserve, Workload


@dataclass(frozen=True, slots=True)
class KeptByLayers:
    """Bytes a token that are kept for the backward pass.

    Attributes:
        whole, entries: by all layers together, whole and of each its input alone.
        widest: by the layer that keeps most.
        outside: by what stands around the layers.
    """

    whole: int
    entries: int
    widest: Kept
    outside: int


@dataclass(frozen=True, slots=True)
class Generation:
    """Bytes while answers to so many prompts are generated: keys and values at most, and what lies beside them."""

    cache: int
    workspace: int


class TrainingTask:
    """A job on a model, an adapter included.

    Raises:
        UsageError: the model has nothing to train (no linear module for an adapter, no head for the next token).

    Args:
        model: without an adapter.
        reward: a reward model, which lies whole on each GPU in 16 bits.
    """

    def __init__(self, model: TrainingModel, job: TrainingJob, reward: Architecture | None = None) -> None:
        self.plain, self.job, self.reward = model, job, reward
        self.architecture = model.architecture
        self._known: dict[int, CostTable] = {}
        self.model = model if job.lora is None else with_lora(model, job.lora)
        self.own = [(tensor, times) for tensor, times in self.model.tensors() if is_trained(tensor, job)]
        if not any(block.kind == "head" for block in model.around()):
            raise UsageError(
                f"{self.architecture.model} has no head that predicts a next token, which {job.method} trains; name a"
                " model of causal or of sequence-to-sequence language modelling"
            )
        self.value_model = job.method is Method.PPO and job.value == "model"
        self.trained = sum(tensor.numel * times for tensor, times in self.own) * (1 + self.value_model)
        if job.method is Method.PPO:
            self.trained += self.architecture.hidden_size + 1

    def changed(self, job: TrainingJob) -> TrainingTask:
        """Another job on the same model."""
        return TrainingTask(self.plain, job, self.reward)

    @cached_property
    def kept(self) -> KeptByLayers:
        """What the forward pass keeps."""
        layers = [(kept_by(block, self.architecture, self.job), times) for block, times in self.model.layers()]
        return KeptByLayers(
            whole=sum(layer.whole * times for layer, times in layers),
            entries=sum(layer.entry * times for layer, times in layers),
            widest=max((layer for layer, _ in layers), key=lambda layer: layer.whole, default=Kept(0)),
            outside=sum(kept_by(block, self.architecture, self.job).whole for block in self.model.around()),
        )

    def generation(self, job: TrainingJob) -> Generation:
        """What the answers take that are generated at once."""
        answers = job.batch * job.accumulation if job.sampled is None else job.sampled
        distinct, times = self._costs(job.prompt_tokens), [times for _, times in self.plain.blocks]
        caches = [distinct.cache(number, number + 1, answers) for number in range(len(times))]
        after_prompt = sum(each.after_prompt * many for each, many in zip(caches, times, strict=True))
        at_end = sum(each.at_end * many for each, many in zip(caches, times, strict=True))
        prompt, token = distinct.workspace(0, len(times), answers)
        cache = max(after_prompt, at_end)
        return Generation(cache, max(after_prompt + prompt, at_end + token) - cache)

    def weighing(self, job: TrainingJob) -> int:
        """What the layers need for a moment while whole answers are read at once, and no gradients are wanted."""
        return self._costs(job.tokens).workspace(0, len(self.plain.blocks), job.weighed * job.batch)[0]

    @cached_property
    def reference(self) -> int:
        """Bytes of the frozen copy of the model; 0 where there is none."""
        if not self.job.keeps_reference:
            return 0
        precision = self.job.reference_precision
        return sum(sum(weight_bytes(tensor, precision)) * times for tensor, times in self.plain.tensors())

    def _costs(self, prompt_tokens: int) -> CostTable:
        """Of each distinct block once, in the numbers that its layers pass on."""
        if prompt_tokens not in self._known:
            precision = self.job.base_precision
            if stream_bytes(self.job) == Precision.FP32.number_bytes:
                precision = Precision.FP32
            elif precision is Precision.FP32:
                precision = Precision.BF16
            blocks = tuple(block for block, _ in self.plain.blocks)
            workload = Workload(1, prompt_tokens, self.job.new_tokens)
            architecture = replace(self.architecture, blocks=blocks)
            self._known[prompt_tokens] = CostTable(architecture, precision, workload, Reserve())
        return self._known[prompt_tokens]
