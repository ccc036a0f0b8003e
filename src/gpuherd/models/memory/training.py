"""A training job on a model: all that depends on neither the batch nor the number of GPUs, counted once, and what one
GPU holds at each moment of a step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture, Block, Role, Tensor
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.training_activations import (
    Kept,
    casts,
    is_matrix,
    kept_around,
    kept_before,
    kept_by,
    product_bytes,
    stream_bytes,
)
from gpuherd.models.memory.training_job import (
    Method,
    Optimiser,
    StepMemory,
    Strategy,
    TrainingJob,
    TrainingPrecision,
    TrainingUsage,
)
from gpuherd.models.memory.training_states import (
    TrainingModel,
    is_lora,
    is_trained,
    part_of,
    states_of,
    trained_number_bytes,
    training_model,
    with_lora,
)
from gpuherd.models.memory.usage import CostTable, HasMemory
from gpuherd.models.memory.weights import Precision, quantises, weight_bytes


@dataclass(frozen=True, slots=True)
class KeptByLayers:
    """Bytes of one sequence that are kept for the backward pass.

    Attributes:
        whole, entries: by all layers together, whole and of each its input alone.
        widest: by the layer that keeps most.
        outside: by what stands around the layers.
        before: of what all layers read, until the first layer's backward pass is over.
    """

    whole: int
    entries: int
    widest: Kept
    outside: int
    before: int


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
        if not self.architecture.predicts:
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
            outside=kept_around(self.architecture, self.model.around(), self.job),
            before=kept_before(self.architecture, self.job),
        )

    def generation(self, job: TrainingJob) -> tuple[int, int]:
        """Bytes of the answers that are generated at once: keys and values at most, and what there is next to them."""
        answers = job.batch * job.accumulation if job.sampled is None else job.sampled
        distinct, times = self._costs(job.prompt_tokens), [times for _, times in self.plain.blocks]
        caches = [distinct.cache(number, number + 1, answers) * many for number, many in enumerate(times)]
        after_prompt, at_end = sum(each.after_prompt for each in caches), sum(each.at_end for each in caches)
        prompt, token = distinct.workspace(0, len(times), answers)
        cache = max(after_prompt, at_end)
        return cache, max(after_prompt + prompt, at_end + token) - cache

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


# What one GPU holds at each moment of a training step. Pure.
#
# A step goes through: answers are generated (``grpo``, ``ppo``); the forward pass keeps activations until the loss is
# there; the backward pass gives them up layer by layer while gradients grow; the optimiser steps. The planner needs
# the fullest of these moments, not the sum of everything that ever lies there.
#
# DPO's reference answers when the model's own forward pass is done and kept: its logits lie beside the model's own
# log-probabilities.
#
# Where whole logits are computed, the loss is float32 and three times as large as the logits in its backward pass:
# the log-probabilities, the gradient of the chosen ones, and the gradient of the logits (torch's cross entropy; the
# same with ``log_softmax`` and ``gather``).

_FLOAT32 = 4
_SCORED = 5 * _FLOAT32  # of each score of an answer: its copy, log-probabilities, probabilities, the clamped, products
_TOKEN_TILE, _VOCAB_TILE = 4096, 32768  # of TRL 1.16's chunked loss


def training_usage(
    architecture: Architecture,
    job: TrainingJob,
    reserve: Reserve,
    card: HasMemory,
    *,
    gpus: int = 1,
    reward: Architecture | None = None,
) -> TrainingUsage:
    """What each of ``gpus`` equal parts of a job takes on a card.

    Args:
        architecture: the model, without an adapter.
        gpus: how many share the job by its strategy.
        reward: a reward model, which lies whole on each GPU in 16 bits.
    """
    return Step(TrainingTask(training_model(architecture), job, reward), gpus).usage(reserve, card.total)


class Step:
    """A step of a task on each of ``gpus`` GPUs: all that doesn't depend on the batch, which the largest batch is found
    with without walking over tensors again."""

    def __init__(self, task: TrainingTask, gpus: int = 1) -> None:
        if task.job.strategy is Strategy.FSDP and gpus == 1:  # nothing is divided
            task = task.changed(replace(task.job, strategy=Strategy.SINGLE))
        self.task, self.job, self.model = task, task.job, task.model
        self.shards = gpus if self.job.strategy is Strategy.FSDP else 1
        self.replicated = self.job.strategy is Strategy.DDP and gpus > 1
        self.value_model = task.value_model
        self._sizes()
        self._copies()
        self._gradients()

    def _sizes(self) -> None:
        job, own, reward = self.job, self.task.own, self.task.reward
        self.states = states_of(self.model, job, self.shards)
        products = [tensor.numel for tensor, _ in self.model.tensors() if _multiplies(tensor)]
        self.largest_matrix = max(products, default=0)
        self.largest_tensor = max(prod(part_of(tensor.shape, self.shards)) for tensor, _ in own)
        self.largest_gradient = max(tensor.numel * trained_number_bytes(tensor, job) for tensor, _ in own)
        self.exchange = self.states.gradients if self.replicated else 0
        self.models = -(-self.task.reference // self.shards)
        self.models += 2 * reward.parameters if reward is not None else 0

    def _copies(self) -> None:
        """Parameters in the numbers of products."""
        job = self.job
        in_products = self._sizes_of(lambda block: _copy_bytes(block, job, self.shards))
        self.copies_of_layers, self.copy_of_layer, self.copies_around = in_products
        # Of frozen weights autocast keeps no copy; the backward pass keeps those that gradients go back through.
        self.largest_cast = max(size for block, _ in self.model.blocks for size in (0, *_frozen_copies(block, job)))
        frozen = self._sizes_of(lambda block: sum(_frozen_copies(block, job)))
        self.frozen_of_layers, self.frozen_of_layer, self.frozen_around = frozen

    def _sizes_of(self, size: Callable[[Block], int]) -> tuple[int, int, int]:
        """A size of all layers together, of the largest layer, and of what stands around them."""
        layers = [(size(block), times) for block, times in self.model.layers()]
        largest = max((each for each, _ in layers), default=0)
        return sum(each * times for each, times in layers), largest, sum(map(size, self.model.around()))

    def _gradients(self) -> None:
        """Gradients that the backward pass makes first and last, and FSDP's whole ones."""
        around = self.model.around()
        after = [tensor for block in around if block.kind in ("norm", "head") for tensor in block.tensors]
        tied = {tensor.tied_to for tensor in after}
        early = [tensor for block in around if block.kind == "embedding" for tensor in block.tensors]
        after += [tensor for tensor in early if tensor.name in tied]
        self.gradients_around = self._part(after)
        tables = [tensor for tensor in early if tensor.name in tied]
        self.tied_gradient, self.tied_unit = self._part(tables), _undivided_gradients(tables, self.job)
        self.gradients_before = self._part([tensor for tensor in early if tensor.name not in tied])
        self.gradients_of_layer = self._part(self.model.first_layer().tensors)
        units = self._sizes_of(lambda block: _undivided_gradients(block.tensors, self.job))
        _, self.widest_unit, self.unit_around = units

    def _part(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the gradients of these tensors on one GPU."""
        return sum(
            prod(part_of(tensor.shape, self.shards)) * trained_number_bytes(tensor, self.job)
            for tensor in tensors
            if tensor.tied_to is None and is_trained(tensor, self.job)
        )

    def usage(self, reserve: Reserve, total: int, batch: int | None = None) -> TrainingUsage:
        """What a card of ``total`` bytes holds, with another batch than the job's if one is named."""
        return TrainingUsage(self._moments(batch), reserve.context, reserve.on(total))

    def most(self, batch: int | None = None) -> int:
        """The bytes of the fullest moment."""
        return max(moment.total for moment in self._moments(batch))

    def _moments(self, batch: int | None) -> tuple[StepMemory, ...]:
        job = self.job if batch is None or batch == self.job.batch else replace(self.job, batch=batch)
        return (*self._generating(job), *self._weighing(job), *self._learning(job), self._stepping())

    def _always(self, name: str, *, gradients: bool) -> StepMemory:
        """What is in memory at any moment. A value model of the same size doubles what is trained."""
        states, times = self.states, 1 + self.value_model
        apart = gradients and not (self.replicated and self.job.bucket_view)
        return StepMemory(
            name,
            parameters=states.parameters * times,
            quantisation=states.quantisation * times,
            gradients=states.gradients * times if apart else 0,
            optimiser=states.optimiser * times,
            exchange=self.exchange * times,
            models=self.models,
        )

    def _generating(self, job: TrainingJob) -> list[StepMemory]:
        """Gradients have been given up."""
        if not job.method.generates:
            return []
        cache, workspace = self.task.generation(job)
        always = self._always("generating", gradients=False)
        return [replace(always, cache=cache, workspace=workspace, copies=self._copies_without_gradients(job))]

    def _weighing(self, job: TrainingJob) -> list[StepMemory]:
        """Log-probabilities of answers before anything is learnt from them, under the model or its reference: logits of
        all, and of one answer after the other their float32 copy and what entropies are made of."""
        if not job.weighed:
            return []
        scores = self.task.architecture.vocab_size * (job.new_tokens + 1)
        logits = scores * (product_bytes(job) * job.weighed * job.batch + _SCORED)
        if job.loss == "chunked" and job.chunk is not None:
            hidden, answers = self.task.architecture.hidden_size, job.weighed * job.batch * (job.new_tokens + 1)
            chunk = self._chunk(job, answers)
            logits = 2 * chunk + answers * hidden * stream_bytes(job)
        always = self._always("weighing", gradients=False)
        copies, architecture = self._copies_without_gradients(job), self.task.architecture
        states = 0  # a value head reads the last of all layers' results
        if job.method is Method.PPO and job.value == "head":
            states = (architecture.layers + 1) * architecture.hidden_size * stream_bytes(job)
        activations = states * job.tokens * job.weighed * job.batch
        workspace = self.task.weighing(job)
        return [replace(always, activations=activations, logits=logits, workspace=workspace, copies=copies)]

    def _copies_without_gradients(self, job: TrainingJob) -> int:
        """Copies while answers are generated or asked: autocast keeps its own until a pass is done."""
        if casts(job):
            return self.copies_of_layers + self.copies_around + self.largest_cast
        if self.shards == 1:
            return 0
        return self.copies_around + (self.copies_of_layers if job.gathers else 2 * self.copy_of_layer)

    def _learning(self, job: TrainingJob) -> list[StepMemory]:
        """The forward pass up to the loss, and the backward pass at the last layer and at the first."""
        sequences, times, kept = job.sequences, 1 + self.value_model, self.task.kept
        activations = ((kept.entries if job.checkpointing else kept.whole) * times + kept.outside) * sequences
        again = kept.widest.whole * sequences if job.checkpointing else 0
        waiting = job.accumulation > 1
        # Gradients that a pass makes in the layer count with it, unless all of them are counted already.
        apart = not waiting and self.shards == 1
        passing = kept.widest.passing(sequences, gradients=apart)
        before = self._always("loss", gradients=waiting)
        fresh = self.largest_gradient if waiting else 0
        all_copies = (self.copies_of_layers if not job.checkpointing or casts(job) else 0) + self.copies_around
        all_copies += self.frozen_around + (0 if job.checkpointing else self.frozen_of_layers)
        if self.shards > 1:
            all_copies = self.copies_around + (self.copies_of_layers if not job.reshard else self.copy_of_layer)
        forward, backward, chunk = self._logits(job)
        loss = [
            replace(before, activations=activations, logits=forward + chunk, copies=all_copies),
            replace(before, activations=activations, logits=backward + chunk, copies=self._alive_copies(job)),
        ]
        if job.asks_reference_last and (job.loss == "whole" or job.chunk is not None):
            asked = replace(before, name="reference", activations=activations, copies=self._copies_of_reference(job))
            # Log-probabilities of every word, which the backward pass needs.
            scores = _FLOAT32 * self.task.architecture.vocab_size * job.scored_tokens
            waits = scores if job.loss == "whole" else self._kept_chunk(job)
            loss.append(replace(asked, logits=waits + forward))
        top = replace(
            self._always("backward, last layer", gradients=waiting),
            activations=activations + again,
            workspace=passing + fresh,
            copies=self._copies_in_layers(job, first=False),
        )
        if not waiting:
            top = replace(top, gradients=top.gradients + self.gradients_around)
        bottom = replace(
            self._always("backward, first layer", gradients=True),
            activations=(kept.widest.whole + kept.before) * sequences,
            workspace=kept.widest.passing(sequences, gradients=apart and not self.replicated) + fresh,
            copies=self._copies_in_layers(job, first=True),
        )
        if not waiting and not self.replicated:
            own = (self.gradients_of_layer + self.gradients_before) * times
            bottom = replace(bottom, gradients=bottom.gradients - own)
        fullest = max(loss, key=lambda moment: moment.total)
        if self.shards > 1:
            return [fullest, *self._dividing(job, top, bottom)]
        # Autograd keeps the head's gradient of a tied table until the embedding's is there, and adds them in a third.
        # Gradients that are held include that third, but where it is added to them, or copied into DDP's buckets.
        held = waiting or (self.replicated and self.job.bucket_view)
        end = replace(
            self._always("backward, embeddings", gradients=True),
            workspace=(3 if held else 2) * self.tied_gradient * times,
        )
        return [fullest, top, bottom, *([end] if end.workspace else [])]

    def _dividing(self, job: TrainingJob, top: StepMemory, bottom: StepMemory) -> list[StepMemory]:
        """FSDP's backward pass: a layer's whole gradients, the buffer of the layer before that is being sent, and the
        whole gradients of what stands around the layers, which are sent last."""
        whole = self.widest_unit + self.unit_around
        sending = self._buffer(self.widest_unit)
        widest = self.task.kept.widest
        done = widest.entry if job.checkpointing else widest.whole
        end = self._always("backward, embeddings", gradients=True)
        # Both gradients of a tied table and their sum lie there while the first layer's are being sent.
        adding = self.unit_around + 2 * self.tied_unit + sending
        return [
            replace(top, exchange=whole),
            replace(
                top,
                name="backward, next layer",
                activations=max(0, top.activations - done * job.sequences),
                copies=top.copies - (0 if job.reshard else self.copy_of_layer),
                exchange=whole + sending,
            ),
            replace(bottom, exchange=whole + sending),
            replace(
                end, copies=self.copies_around, exchange=max(adding, self.unit_around + self._buffer(self.unit_around))
            ),
        ]

    def _buffer(self, gradients: int) -> int:
        """What sends whole gradients: of mixed precision in float32."""
        return gradients * (2 if self.job.precision is TrainingPrecision.MIXED else 1)

    def _copies_in_layers(self, job: TrainingJob, *, first: bool) -> int:
        """Copies while the last layer's backward pass begins, or the first one's."""
        if self.shards > 1:
            return self.copies_around + 2 * self.copy_of_layer if first else self._alive_copies(job)
        if job.checkpointing or first:
            return self.copy_of_layer + self.frozen_of_layer
        return self.copies_of_layers + self.frozen_of_layers

    def _alive_copies(self, job: TrainingJob) -> int:
        """Copies that the backward pass has when it begins."""
        if self.shards > 1:
            return self.copies_around + (2 * self.copy_of_layer if job.reshard else self.copies_of_layers)
        return (
            self.copies_around
            + self.frozen_around
            + (0 if job.checkpointing else self.copies_of_layers + self.frozen_of_layers)
        )

    def _copies_of_reference(self, job: TrainingJob) -> int:
        """Copies of the model's own parameters that its backward pass waits for, and those that a divided reference
        gathers, or that autocast makes of one matrix of a float32 reference: counted by what they exceed the logits'
        float32 copies, which are made when those of the head are gone."""
        if not job.keeps_reference:
            return self._alive_copies(job)
        if self.shards > 1:
            return self._alive_copies(job) + self.copies_around + 2 * self.copy_of_layer
        if not casts(job) or job.reference_precision is not Precision.FP32:
            return self._alive_copies(job)
        scores = product_bytes(job) * self.task.architecture.vocab_size * job.scored_tokens
        later = max(0, self._logits(job)[0] - scores)
        return self._alive_copies(job) + max(0, product_bytes(job) * self.largest_matrix - later)

    def _logits(self, job: TrainingJob) -> tuple[int, int, int]:
        """At the end of the forward pass, in the loss's backward pass, and what a chunked loss needs instead."""
        vocab, positions, number = self.task.architecture.vocab_size, job.scored_tokens, product_bytes(job)
        if job.loss == "whole":
            copy = _FLOAT32 if number != _FLOAT32 else 0
            return (number + copy + _FLOAT32) * vocab * positions, 3 * _FLOAT32 * vocab * positions, 0
        if job.chunk is not None:
            return self._by_positions(job)
        tile = min(positions, _TOKEN_TILE) * min(vocab, _VOCAB_TILE) * number
        head = 0 if job.lora is not None else vocab * self.task.architecture.hidden_size * _FLOAT32
        return 0, 0, tile + head + positions * self.task.architecture.hidden_size * _FLOAT32

    def _by_positions(self, job: TrainingJob) -> tuple[int, int, int]:
        """``_logits`` of a loss by chunks of positions: a chunk's logits and their shares; the hidden states that are
        read, and in the backward pass their gradient; the head's gradient, added up in float32 next to each chunk's."""
        hidden, number = self.task.architecture.hidden_size, product_bytes(job)
        read = job.scored_tokens * hidden * stream_bytes(job)
        head = self.task.architecture.vocab_size * hidden
        learnt = 0 if job.lora is not None else head * (_FLOAT32 + (number if number != _FLOAT32 else 0))
        two = 2 * self._chunk(job, job.scored_tokens)
        return two + read, two + 2 * read + learnt, 0

    def _chunk(self, job: TrainingJob, positions: int) -> int:
        """Bytes of a chunk of logits in float32: of one position at least."""
        vocab = self.task.architecture.vocab_size
        return _FLOAT32 * vocab * min(positions, max(1, (job.chunk or 0) // vocab))

    def _kept_chunk(self, job: TrainingJob) -> int:
        """What waits for a chunked loss's backward pass: the hidden states, and a batch's only chunk."""
        only = job.scored_tokens * self.task.architecture.vocab_size <= (job.chunk or 0)
        kept = self._chunk(job, job.scored_tokens) if only else 0
        return kept + job.scored_tokens * self.task.architecture.hidden_size * stream_bytes(job)

    def _stepping(self) -> StepMemory:
        """Adafactor makes float32 copies of one tensor after the other; the others work in place."""
        always = self._always("optimiser step", gradients=True)
        if self.job.optimiser is not Optimiser.ADAFACTOR:
            return always
        copies = 4 if self.job.precision is TrainingPrecision.BF16 else 2
        return replace(always, workspace=copies * _FLOAT32 * self.largest_tensor)


def _copy_bytes(block: Block, job: TrainingJob, shards: int) -> int:
    """A block's parameters in the numbers of products: FSDP gathers all of them; autocast casts those of products."""
    number = product_bytes(job)
    if shards > 1:
        return sum(
            weight_bytes(tensor, job.base_precision)[0]
            if quantises(tensor, job.base_precision)
            else tensor.numel * number
            for tensor in block.tensors
            if tensor.tied_to is None
        )
    if not casts(job):
        return 0
    return sum(tensor.numel * number for tensor in block.tensors if _is_cast(tensor, job))


def _is_cast(tensor: Tensor, job: TrainingJob) -> bool:
    return is_lora(tensor) if job.lora is not None else _multiplies(tensor)


def _multiplies(tensor: Tensor) -> bool:
    return tensor.role is Role.HEAD or is_matrix(tensor) or ".experts." in tensor.name


def _frozen_copies(block: Block, job: TrainingJob) -> list[int]:
    """Bytes of each copy that autocast makes of a block's frozen weights."""
    if job.lora is None or not casts(job) or job.base_precision is not Precision.FP32:
        return []
    return [tensor.numel * product_bytes(job) for tensor in block.tensors if _multiplies(tensor)]


def _undivided_gradients(tensors: Iterable[Tensor], job: TrainingJob) -> int:
    """Bytes of the gradients of these tensors before FSDP divides them."""
    return sum(
        tensor.numel * product_bytes(job) for tensor in tensors if tensor.tied_to is None and is_trained(tensor, job)
    )
