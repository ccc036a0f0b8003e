"""A model as the planner sees it: blocks in the order of computation, each with the shapes of its tensors and with what
it keeps of each sequence. Plain frozen data; no files, no bytes, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil, prod
from operator import attrgetter
from typing import Literal


class Role(StrEnum):
    """What a tensor is, as far as its size in memory depends on it."""

    LINEAR = "linear"  # the weight of a Linear or Conv1D module of the body: what bitsandbytes quantises
    HEAD = "head"  # the weight of the output head: never quantised
    EMBEDDING = "embedding"
    OTHER = "other"  # norms, biases, convolutions, experts fused into one parameter, what else there is


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in memory.

    Attributes:
        name: as transformers names it in the loaded model, ``model.layers.0.self_attn.q_proj.weight``.
        shape: as the loaded model has it.
        tied_to: name of the tensor whose storage it shares; its bytes are counted there.
        keeps_fp32: stays in float32 whatever the precision (transformers' ``_keep_in_fp32_modules_strict``).
        fp32_in_fp16: stays in float32 where the rest is float16, and is never quantised (transformers'
            ``_keep_in_fp32_modules``, such as ``wo`` of T5).
        transposed: the weight of a Conv1D, whose shape is (in, out): its output rows are the last dimension.
        stored_bytes: what it takes as its checkpoint stores it quantised (codes, scales, zero points), which is what
            lies in memory when it is loaded as it is; None where the checkpoint has plain numbers.
        split: transformers' tensor-parallel plan divides it evenly over the GPUs; False: each GPU has all of it.
        buffer: lies in memory but is no parameter, such as the correction of DeepSeek-V3's router.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.OTHER
    tied_to: str | None = None
    keeps_fp32: bool = False
    fp32_in_fp16: bool = False
    transposed: bool = False
    stored_bytes: int | None = None
    split: bool = False
    buffer: bool = False

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer keeps of each sequence while answers are generated, in numbers (not bytes).

    Attributes:
        per_token: numbers for each token: 2 x key heads x head size for plain attention; both latent parts for MLA.
        window: no more than so many tokens are kept (sliding-window or chunked attention); None for all.
        per_sequence: numbers kept whatever the length: convolution and state-space states, linear attention.
        per_sequence_fp32: the same, but in float32 whatever the precision.
        per_encoder_token: numbers for each token of an encoder's input: cross-attention.
    """

    per_token: int = 0
    window: int | None = None
    per_sequence: int = 0
    per_sequence_fp32: int = 0
    per_encoder_token: int = 0


Polynomial = tuple[float, float, float]  # coefficients of 1, t and t^2


def bytes_at(polynomial: Polynomial, tokens: int) -> int:
    """Its value, rounded up.

    >>> bytes_at((1, 2, 0.5), 3)
    12
    """
    once, each, pair = polynomial
    return ceil(once + each * tokens + pair * tokens * tokens)


# In ``Architecture.around``: before the name of a run for what is there when its first layer begins.
BEFORE = "before-"


def passing_bytes(polynomial: Polynomial, sequences: int, tokens: int, *, gradients: bool) -> int:
    """What an operation of a backward pass needs for a moment (``TrainingPeaks.passing``); without ``gradients`` what
    it needs in addition to those of parameters.

    >>> passing_bytes((100, 2, 1), 4, 3, gradients=True)
    160
    """
    once, each, pair = polynomial
    return ceil(once * gradients + sequences * (each * tokens + pair * tokens * tokens))


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes at one step of a block's computation, as a polynomial in the batch size b and the tokens t of a sequence.

    Attributes:
        once: coefficients of 1, t and t^2: tensors that all sequences of the batch share.
        each: coefficients of b, b t and b t^2.
        matrix: numbers of the weight that is multiplied with at this step; 4-bit weights are unpacked for it.
    """

    once: Polynomial
    each: Polynomial
    matrix: int = 0

    def at(self, tokens: int) -> tuple[int, int]:
        """Bytes whatever the batch, and bytes for each sequence."""
        return bytes_at(self.once, tokens), bytes_at(self.each, tokens)


@dataclass(frozen=True, slots=True)
class TrainingPeaks:
    """Measured bytes of one sequence of t tokens in a block's forward and backward pass, autocast's copies of weights
    left out.

    Attributes:
        kept: what the forward pass keeps for the backward pass, the block's result with it.
        entry: what the block reads, which is all that checkpointing keeps.
        passing: what the backward pass needs for a moment on top of what is kept: the largest of these. Their constant
            coefficients are of a whole batch: gradients of the block's own parameters.
    """

    kept: Polynomial
    entry: Polynomial = (0, 0, 0)
    passing: tuple[Polynomial, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedInput:
    """Linear weights that multiply the same tensor.

    Attributes:
        weights: their names from the block's on, ``.self_attn.q_proj.weight``.
        kept: the tensor is kept for the backward pass even where all weights are frozen.
    """

    weights: tuple[str, ...]
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured memory of a block's passes beyond weights and cache: a need is the largest of its curves.

    Attributes:
        prompt: while the prompt is read, t being its tokens; of a decoder with an encoder its first token, t being
            those that the encoder read.
        token: while one more token is computed, t being the tokens of the sequence with it, the window at most.
        fill: prompts are computed in whole chunks of so many tokens; 1 without chunks.
        training: a training step, by ``whole-`` or ``frozen-`` (all parameters are trained, or none of the block's own)
            and the precision: ``whole-fp32``, ``frozen-mixed``, ``whole-bf16``. Empty where it was not measured.
        inputs: which weights multiply the same tensor, for adapters; measured with ``training``.

    The keys of ``prompt`` and ``token`` are ``16`` and ``32`` for plain weights in bits, ``int8`` and ``4bit`` for
    bitsandbytes'.
    """

    prompt: Mapping[str, tuple[Curve, ...]]
    token: Mapping[str, tuple[Curve, ...]]
    fill: int = 1
    training: Mapping[str, TrainingPeaks] = field(default_factory=dict)
    inputs: tuple[SharedInput, ...] = ()


_FORM = attrgetter("shape", "role", "keeps_fp32", "fp32_in_fp16", "transposed", "stored_bytes", "split")
Kind = Literal["embedding", "layer", "norm", "head", "other"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the model that lies on one GPU as a whole.

    Attributes:
        name: the module's path, which is also its key in a device map: ``model.layers.7``, ``lm_head``.
        kind: ``embedding`` (everything before the first layer), ``layer``, ``norm``, ``head``, or ``other`` (a part
            next to the text model, such as an image encoder).
        peaks: key of its measurement in ``Architecture.peaks``; None where it was not measured.
    """

    name: str
    kind: Kind
    tensors: tuple[Tensor, ...]
    cache: LayerCache | None = None
    peaks: str | None = None

    @property
    def form(self) -> object:
        """All that its memory depends on: names of tensors from the block's on. Which are tied is no part of it."""
        start = len(self.name)
        tensors = tuple((each.name[start:], *_FORM(each)) for each in self.tensors)
        return self.kind, self.cache, self.peaks, tensors


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that a memory plan needs to know of a model.

    Attributes:
        model: as the user named it.
        model_type: of its config: ``llama``, ``gpt2``, ...
        class_name: the transformers class that is loaded, such as ``LlamaForCausalLM``; None if not known.
        blocks: in the order of computation; encoder first, where there is one.
        hidden_size, intermediate_size, vocab_size, heads: of the (text) config. ``intermediate_size`` is the widest
            that one token goes through at once: of a mixture all experts of a token together.
        layers: how many blocks are layers.
        is_encoder_decoder: the prompt goes to the encoder; the decoder starts from one token.
        stored: precision of the checkpoint, or of the config where there is none; None where neither tells.
        stored_method: of a checkpoint that is quantised already, what its config calls the method: ``fp8``, ``mxfp4``.
        source: what the shapes are taken from: ``weights`` (headers), ``known`` (shipped data) or ``model``
            (transformers built it on the meta device).
        assumptions: sentences on what could not be known and was assumed.
        max_tokens: the longest sequence it was made for, None if its config doesn't say.
        tensor_parallel: whether transformers can split its layers over GPUs (it has a tensor-parallel plan).
        tensor_parallel_limit: the largest number of GPUs that divides its heads; None where it can't be split.
        peaks: measured memory of the blocks' passes, by ``Block.peaks``; of a block that has none the formulas of
            ``workspace`` and ``training_activations`` answer.
        around: measured bytes of one sequence of t tokens that all that stands around the layers keeps for a backward
            pass, logits left out; by the keys of ``Peaks.training``.
    """

    model: str
    model_type: str
    class_name: str | None
    blocks: tuple[Block, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    heads: int
    is_encoder_decoder: bool = False
    stored: str | None = None
    stored_method: str | None = None
    source: Literal["weights", "known", "model"] = "model"
    assumptions: tuple[str, ...] = ()
    max_tokens: int | None = None
    tensor_parallel: bool = False
    tensor_parallel_limit: int | None = None
    peaks: Mapping[str, Peaks] = field(default_factory=dict, hash=False, repr=False)
    around: Mapping[str, Polynomial] = field(default_factory=dict, hash=False, repr=False)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return sum(block.kind == "layer" for block in self.blocks)

    @property
    def writes_answers(self) -> bool:
        """Whether it keeps anything of a sequence; an encoder alone does not."""
        return any(block.cache is not None for block in self.blocks)

    @property
    def predicts(self) -> bool:
        """Whether it has a head that predicts a next token."""
        return any(block.kind == "head" for block in self.blocks)

    def with_remarks(self, *sentences: str) -> Architecture:
        """The same with further assumptions."""
        return replace(self, assumptions=(*self.assumptions, *sentences))

    @property
    def trainings_measured(self) -> bool:
        """Whether every layer's training step was measured."""
        keys = {block.peaks or "" for block in self.blocks if block.kind == "layer"}
        return bool(self.around) and all(key in self.peaks and self.peaks[key].training for key in keys)

    @property
    def parameters(self) -> int:
        """How many numbers the model has, tied ones once and without buffers."""
        return sum(tensor.numel for tensor in self.tensors() if tensor.tied_to is None and not tensor.buffer)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in order, tied ones too."""
        for block in self.blocks:
            yield from block.tensors
