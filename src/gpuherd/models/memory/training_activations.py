"""Bytes that the forward pass keeps for the backward pass, layer by layer. Pure.

They are measured in transformers' own code (``describe.training_peaks``), for all parameters trained and for frozen
ones; what is added here is what an adapter keeps beside frozen modules, and every score where attention is to be
``eager``.

Where nothing could be measured (headers alone, no torch) the shapes of the tensors answer. For each token, with c bytes
a number in products and s in the residual stream, layers like Llama's keep (Korthikanti et al., arXiv 2205.05198, count
the same for one kind of layer in 16 bits):

- a norm its input and what it multiplies its weight with, in float32 where it computes in float32;
- a linear module that is trained its input; one copy of its own where autocast had to cast it;
- scaled dot-product attention queries, keys, values (repeated for each query head where batches are padded), its
  output and a float32 sum; a mask c bytes for each pair of tokens; eager attention every score;
- a gated network gate, activation and up; a plain one what its activation function needs;
- a mixture of experts the same for each expert of a token, and the tokens' copies that were sent to it.

Other layers kept up to twice that, so that twice is planned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuherd.models.describe.description import (
    BEFORE,
    Architecture,
    Block,
    Peaks,
    Polynomial,
    Role,
    Tensor,
    bytes_at,
    passing_bytes,
)
from gpuherd.models.memory.peak import widths_of
from gpuherd.models.memory.training_job import TrainingJob, TrainingPrecision
from gpuherd.models.memory.training_states import features, is_lora, is_target
from gpuherd.models.memory.weights import Precision

_FLOAT32 = 4
_NORM = re.compile(r"(?:norm\w*|ln|ln_\w+|layer_norm)\.weight$", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_UNMEASURED = 2  # layers kept up to twice what their shapes tell
_OUTPUT = re.compile(r"\.(o_proj|out_proj|c_proj|dense|dense_4h_to_h|down_proj|fc2|fc_out|w2|wo|o)\.weight$")
# What a norm keeps for each number that it reads: of 2 bytes trained and frozen, of 4 bytes trained and frozen.
_RMS_NORM, _LAYER_NORM = (6, 4, 8, 4), (2, 2, 4, 4)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one block keeps of one sequence for the backward pass.

    Attributes:
        whole: everything; ``entry``: its input alone, which is what checkpointing keeps.
        tokens: of the sequence, filled up to whole chunks where the layer computes in chunks.
        moments: what its backward pass needs for a moment on top of that (``TrainingPeaks.passing``).
    """

    whole: int
    entry: int = 0
    tokens: int = 0
    moments: tuple[Polynomial, ...] = ()

    def passing(self, sequences: int, *, gradients: bool) -> int:
        """The most that its backward pass needs for a moment, without ``gradients`` on top of those of parameters."""
        needs = (passing_bytes(each, sequences, self.tokens, gradients=gradients) for each in self.moments)
        return max(0, *needs) if self.moments else 0


def stream_bytes(job: TrainingJob) -> int:
    """Bytes of a number of the residual stream: those of the embedding's result."""
    if job.precision is TrainingPrecision.FP32:
        return _FLOAT32
    wide = job.wide and not job.base_precision.is_quantised
    return _FLOAT32 if casts(job) and (wide or job.base_precision is Precision.FP32) else 2


def product_bytes(job: TrainingJob) -> int:
    """Bytes of a number in matrix products."""
    return _FLOAT32 if job.precision is TrainingPrecision.FP32 else 2


def casts(job: TrainingJob) -> bool:
    """Whether autocast casts what goes into products. FSDP's mixed precision has bfloat16 parameters instead."""
    return job.precision is TrainingPrecision.MIXED and job.strategy != "fsdp"


def is_matrix(tensor: Tensor) -> bool:
    """Whether it is the weight of a linear module, quantised ones and others alike."""
    plain = tensor.role in (Role.LINEAR, Role.OTHER) and len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    return plain and not is_lora(tensor)


def kept_by(block: Block, architecture: Architecture, job: TrainingJob) -> Kept:
    """What a layer keeps of each sequence."""
    if architecture.trainings_measured:
        return _measured(block, architecture, job)
    layer, tokens = _LayerShapes(block, architecture, job), job.tokens
    entry = architecture.hidden_size * stream_bytes(job)
    return Kept(_UNMEASURED * layer.kept() * tokens, entry * tokens, tokens, ((0, layer.passing(), 0),))


def kept_around(architecture: Architecture, blocks: Sequence[Block], job: TrainingJob) -> int:
    """What the blocks around the layers keep of each sequence."""
    if architecture.trainings_measured:
        return bytes_at(architecture.around[_run(job)], job.tokens)
    return sum(_kept_outside(block, architecture, job) for block in blocks) * job.tokens


def kept_before(architecture: Architecture, job: TrainingJob) -> int:
    """What all layers read of each sequence, masks and tables of angles, as far as it was measured."""
    return bytes_at(architecture.around.get(BEFORE + _run(job), (0, 0, 0)), job.tokens)


def _run(job: TrainingJob) -> str:
    """Which of the measured runs computes as the job does. Frozen weights of 16 bits or fewer pass on what bfloat16
    ones pass on, with autocast or without."""
    precision = "mixed" if stream_bytes(job) == _FLOAT32 else "bf16"
    if job.precision is TrainingPrecision.FP32:
        precision = "fp32"
    return f"{'whole' if job.lora is None else 'frozen'}-{precision}"


def _measured(block: Block, architecture: Architecture, job: TrainingJob) -> Kept:
    peaks = architecture.peaks[block.peaks or ""]
    found, tokens = peaks.training[_run(job)], -(-job.tokens // peaks.fill) * peaks.fill
    whole = bytes_at(found.kept, tokens) + _of_adapters(block, peaks, job) * tokens
    number, heads, scores = product_bytes(job), architecture.heads, 0
    if job.attention == "eager" and found.kept[2] < heads * number:  # measured with a kernel that keeps no scores
        whole += heads * (_FLOAT32 + (number if number < _FLOAT32 else 0)) * tokens * tokens
        scores = heads * _FLOAT32
    moments = tuple((once, each, pair + scores) for once, each, pair in found.passing)
    return Kept(whole, bytes_at(found.entry, tokens), tokens, moments)


def _of_adapters(block: Block, peaks: Peaks, job: TrainingJob) -> int:
    """What PEFT's adapters in a block, and bitsandbytes' 8-bit products, keep of each token next to frozen modules: an
    adapter its input, cast to its numbers, and what its first matrix makes of it."""
    if job.lora is None:
        return 0
    targets = {each.name.removeprefix(block.name): features(each)[0] for each in block.tensors if is_target(each, job)}
    number = product_bytes(job) if casts(job) else _FLOAT32
    down = job.lora.rank * number * len(targets)
    widths = {each.name.removeprefix(block.name): features(each)[0] for each in block.tensors if is_matrix(each)}
    if job.precision is TrainingPrecision.FP32:  # no cast: what is read is kept itself, once
        read = [each for each in peaks.inputs if not each.kept]
        return down + number * sum(max(targets.get(name, 0) for name in each.weights) for each in read)
    saved = 0
    if job.base_precision is Precision.INT8:
        saved = product_bytes(job) * sum(max(widths.get(name, 0) for name in each.weights) for each in peaks.inputs)
    return down + saved + number * sum(targets.values())


def _kept_outside(block: Block, architecture: Architecture, job: TrainingJob) -> int:
    """What a block around the layers keeps of each token."""
    if block.kind == "norm":
        return _norms(block, job, ())
    if block.kind == "head":
        return architecture.hidden_size * product_bytes(job) if job.lora is None else 0
    if block.kind == "embedding" and any(tensor.role is Role.EMBEDDING for tensor in block.tensors):
        mask = job.tokens * product_bytes(job)
        return architecture.hidden_size * stream_bytes(job) + mask
    return 0


class _LayerShapes:
    """One layer's linear modules, sorted by what they read."""

    def __init__(self, block: Block, architecture: Architecture, job: TrainingJob) -> None:
        self.block, self.architecture, self.job = block, architecture, job
        self.number, self.stream = product_bytes(job), stream_bytes(job)
        self.widths = widths_of(block, architecture)
        self.groups = _by_module([tensor for tensor in block.tensors if is_matrix(tensor)])

    def kept(self) -> int:
        """Bytes a token."""
        total = sum(self._group(name, group) for name, group in self.groups.items()) + self._experts()
        return total + _norms(self.block, self.job, self._head_widths())

    def passing(self) -> int:
        """Gradients of what lies between the widest two products."""
        widest = max((features(out)[0] for _, out in map(_split, self.groups.values()) if out is not None), default=0)
        widest = max(widest, self.widths.expert_inner)
        scores = self.architecture.heads * self.job.tokens * _FLOAT32 if self.job.attention == "eager" else 0
        return self.number * 3 * widest + self.stream * 2 * self.architecture.hidden_size + scores

    def _group(self, name: str, group: list[Tensor]) -> int:
        readers, out = _split(group)
        inner = features(out)[0] if out is not None else 0
        kept = self._inputs(readers) + (self._inputs([out]) if out is not None else 0)
        if _ATTENTION.search(name):
            return kept + self._attention(out, inner)
        wide = sum(features(tensor)[1] for tensor in readers)
        if out is None:
            return kept + self.number * wide
        return kept + self.number * (3 if wide >= 2 * inner else 1) * inner

    def _attention(self, out: Tensor | None, width: int) -> int:
        heads, tokens = max(1, self.architecture.heads), self.job.tokens
        keys = width if self._key_heads(width) > 1 else width // heads
        kept = self.number * (width + 2 * keys)
        if self.job.attention == "eager":
            return kept + heads * tokens * (_FLOAT32 + (self.number if self.number < _FLOAT32 else 0))
        own = 0 if out is not None and self._keeps_input(out) else self.number * width
        return kept + own + heads * _FLOAT32 + self.number * tokens

    def _outputs(self) -> Iterator[Tensor]:
        for name, group in self.groups.items():
            out = _split(group)[1]
            if out is not None and _ATTENTION.search(name):
                yield out

    def _inputs(self, linears: list[Tensor]) -> int:
        """What linear modules that read the same keep of it."""
        job, number = self.job, self.number
        width = max((features(tensor)[0] for tensor in linears), default=0)
        if job.lora is None:
            inside = all(_OUTPUT.search(tensor.name) for tensor in linears)
            return width * number * (len(linears) if self.stream != number and not inside else 1)
        targets = [tensor for tensor in linears if is_target(tensor, job)]
        down = job.lora.rank * (number if casts(job) else _FLOAT32) * len(targets)
        if job.precision is TrainingPrecision.FP32:
            return down + (width * number if targets else 0)
        saved = width * number if job.base_precision is Precision.INT8 and linears else 0
        return down + saved + width * (number if casts(job) else _FLOAT32) * len(targets)

    def _keeps_input(self, tensor: Tensor) -> bool:
        """Whether a module keeps the very tensor that it reads, not a copy."""
        return self.job.lora is None or (self.job.precision is TrainingPrecision.FP32 and is_target(tensor, self.job))

    def _head_widths(self) -> tuple[int, int]:
        """Widths of all queries and of all keys."""
        width = max((features(out)[0] for out in self._outputs()), default=0)
        return width, self._key_heads(width) * (width // max(1, self.architecture.heads))

    def _key_heads(self, width: int) -> int:
        size = width // max(1, self.architecture.heads)
        per_token = self.block.cache.per_token if self.block.cache is not None else 0
        return max(1, per_token // (2 * size)) if size and per_token else self.architecture.heads

    def _experts(self) -> int:
        """What the experts of a token keep that are fused into one parameter, and the copies that they are sent."""
        width, experts = self.widths.expert_inner, self.widths.experts
        if not width:
            return 0
        trained = self.job.lora is None
        return self.number * ((3 + trained) * width + experts * self.architecture.hidden_size * (1 + trained))


def _norms(block: Block, job: TrainingJob, heads: tuple[int, ...]) -> int:
    """What all norms of a block keep. The first two read the stream; others the result of a product."""
    stream, number, frozen = stream_bytes(job), product_bytes(job), job.lora is not None
    biased = any(re.search(r"(norm\w*|ln_\w+)\.bias$", tensor.name, re.IGNORECASE) for tensor in block.tensors)
    sizes = _LAYER_NORM if biased else _RMS_NORM
    total = of_stream = 0
    for tensor in block.tensors:
        if len(tensor.shape) != 1 or not _NORM.search(tensor.name) or is_lora(tensor):
            continue
        if heads and re.search(r"[qk]_\w*norm", tensor.name):
            width, read = heads["k_" in tensor.name], number
        else:
            of_stream += 1
            width, read = tensor.shape[0], stream if of_stream <= 2 else number
        total += width * sizes[(2 if read == _FLOAT32 else 0) + frozen]
    return total


def _by_module(linears: list[Tensor]) -> dict[str, list[Tensor]]:
    """Linear weights by the module that they are parts of: ``self_attn``, ``mlp``."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in linears:
        module = tensor.name.removesuffix(".weight").rpartition(".")[0]
        groups.setdefault(module, []).append(tensor)
    return groups


def _split(group: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """The modules that read what the group is given, and the one whose result leaves it."""
    outs = [tensor for tensor in group if _OUTPUT.search(tensor.name)]
    out = outs[-1] if outs else None
    return [tensor for tensor in group if tensor is not out], out
