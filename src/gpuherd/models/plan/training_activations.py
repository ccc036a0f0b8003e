"""Bytes that the forward pass keeps for the backward pass, layer by layer. Pure.

What autograd saves follows from the operations of transformers' layers (read off saved tensors, transformers 5.23,
torch 2.13; tests hold it against measured peaks): Korthikanti et al., arXiv 2205.05198, count the same for one kind of
layer in 16 bits. For each token, with c bytes a number in products and s in the residual stream:

- a norm keeps its input and what it multiplies its weight with, in float32 where it computes in float32;
- a linear module that is trained keeps its input; one copy of its own where autocast had to cast it;
- scaled dot-product attention keeps queries, keys, values (repeated for each query head where batches are padded), its
  output and a float32 sum; a mask keeps c bytes for each pair of tokens; eager attention keeps every score;
- a gated network keeps gate, activation and up; a plain one what its activation function needs;
- a mixture of experts keeps the same for each expert of a token, and the tokens' copies that were sent to it;
- a recurrent part keeps its states, as transformers' own code makes them where there are no kernels for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpuherd.models.plan.architecture import Architecture, Block, Role, Tensor
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.training_job import TrainingJob, TrainingPrecision
from gpuherd.models.plan.training_states import features, is_lora, is_target
from gpuherd.models.plan.widths import widths_of

_FLOAT32 = 4
_NORM = re.compile(r"(?:norm\w*|ln|ln_\w+|layer_norm)\.weight$", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_OUTPUT = re.compile(r"\.(o_proj|out_proj|c_proj|dense|dense_4h_to_h|down_proj|fc2|fc_out|w2|wo|o)\.weight$")

Norm = Literal["rms", "rms-fp32", "layer", "cohere"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a family computes its layers, as far as saved bytes depend on it.

    Attributes:
        norm: ``rms`` multiplies its weight in the type of the stream, ``rms-fp32`` in float32; ``layer`` is torch's
            own; ``cohere`` a layer norm in float32.
        activation: how many numbers of the inner width its activation function keeps in a plain (not gated) network.
        input_is_output: the activation function keeps its result, which the next module keeps anyway.
        fused_qkv: queries, keys and values are parts of one tensor, which is kept whole beside rotated copies.
        dropouts: masks of the stream's width, a byte a number.
        eager: its attention has no other way; ``capped``: its scores go through tanh.
        norms: how many norms of a layer have no weight.
    """

    norm: Norm = "rms"
    activation: int = 1
    input_is_output: bool = False
    fused_qkv: bool = False
    dropouts: int = 0
    eager: bool = False
    capped: bool = False
    norms: int = 0


_RMS, _LAYER, _RMS_FP32 = Recipe(), Recipe("layer"), Recipe("rms-fp32")
_GELU_NEW = 4
_UNKNOWN = 2  # of a family that is not known: its layers kept up to twice what their shapes tell
RECIPES: Mapping[str, Recipe] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "granite", "smollm3", "glm", "glm4"),
        _RMS,
    ),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "olmoe"), _RMS),
    **dict.fromkeys(("gemma", "gemma3_text", "gemma3", "olmo2", "olmo3"), _RMS_FP32),
    "gemma2": Recipe("rms-fp32", eager=True, capped=True),
    "gpt2": Recipe("layer", _GELU_NEW, dropouts=2),
    "gptj": Recipe("layer", _GELU_NEW, eager=True),
    "gpt_neo": Recipe("layer", _GELU_NEW, eager=True),
    "gpt_neox": Recipe("layer", fused_qkv=True),
    "phi": Recipe("layer", _GELU_NEW),
    "opt": Recipe("layer", 1, input_is_output=True, dropouts=2),
    "bloom": Recipe("layer", eager=True),
    **dict.fromkeys(("cohere", "cohere2"), Recipe("cohere")),
    "olmo": Recipe("rms", norms=2),
    **dict.fromkeys(("stablelm", "starcoder2", "nemotron"), _LAYER),
}

_NORM_BYTES: Mapping[Norm, tuple[int, int, int, int]] = {
    # a 2-byte input: trained, frozen; a 4-byte input: trained, frozen
    "rms": (6, 4, 8, 4),
    "rms-fp32": (8, 4, 8, 4),
    "layer": (2, 2, 4, 4),
    "cohere": (12, 8, 12, 8),
}


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes a token that one block keeps for the backward pass.

    Attributes:
        whole: everything; ``entry``: its input alone, which is what checkpointing keeps.
        passing: what its backward pass needs for a moment beside that.
    """

    whole: int
    entry: int = 0
    passing: int = 0


def recipe_of(architecture: Architecture) -> Recipe | None:
    """How the model's family computes; None where it isn't known, and then its layers are taken for those of Llama, or
    of GPT-2 with torch's own GELU where its norms have biases, and counted twice."""
    return RECIPES.get(architecture.model_type)


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
    """What a block keeps of each token."""
    entry = architecture.hidden_size * stream_bytes(job)
    if block.kind == "layer":
        layer = _Layer(block, architecture, job)
        times = 1 if recipe_of(architecture) is not None else _UNKNOWN
        states = layer.recurrent()
        return Kept(times * layer.kept() + states, entry, layer.passing() + states)
    if block.kind == "norm":
        return Kept(_norms(block.tensors, architecture, job, _recipe(architecture, block), ()))
    if block.kind == "head":
        trained = job.lora is None
        return Kept(architecture.hidden_size * product_bytes(job) if trained else 0)
    if block.kind == "embedding" and any(tensor.role is Role.EMBEDDING for tensor in block.tensors):
        mask = job.tokens * product_bytes(job)
        return Kept(entry + mask)
    return Kept(0)


class _Layer:
    """One layer's linear modules, sorted by what they read."""

    def __init__(self, block: Block, architecture: Architecture, job: TrainingJob) -> None:
        self.block, self.architecture, self.job = block, architecture, job
        self.recipe = _recipe(architecture, block)
        self.number, self.stream = product_bytes(job), stream_bytes(job)
        self.widths = widths_of(block, architecture)
        self.groups = _by_module([tensor for tensor in block.tensors if is_matrix(tensor)])

    def kept(self) -> int:
        """Bytes a token."""
        total = sum(self._group(name, group) for name, group in self.groups.items()) + self._experts()
        total += _norms(self.block.tensors, self.architecture, self.job, self.recipe, self._head_widths())
        return total + self.recipe.dropouts * self.architecture.hidden_size

    def recurrent(self) -> int:
        """What a recurrent part keeps of each token, without kernels of its own: about what it takes in inference."""
        chunk, tokens = self.widths.chunk, self.job.tokens
        return -(-self.widths.recurrent * -(-tokens // chunk) * chunk // tokens)

    def passing(self) -> int:
        """Gradients of what lies between the widest two products."""
        widest = max((features(out)[0] for _, out in map(_split, self.groups.values()) if out is not None), default=0)
        widest = max(widest, self.widths.expert_inner)
        scores = self.architecture.heads * self.job.tokens * _FLOAT32 if self._keeps_scores() else 0
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
        if wide >= 2 * inner:
            return kept + self.number * 3 * inner
        if self.recipe.input_is_output:
            return kept + (0 if self._keeps_input(out) else self.number * inner)
        return kept + self.number * self.recipe.activation * inner

    def _attention(self, out: Tensor | None, width: int) -> int:
        heads, tokens = max(1, self.architecture.heads), self.job.tokens
        keys = width if self._key_heads(width) > 1 else width // heads
        kept = self.number * (width + 2 * keys)
        if self.recipe.fused_qkv:
            kept += self.number * 2 * width
        if self._keeps_scores():
            score = _FLOAT32 + (self.number if self.number < _FLOAT32 else 0)
            return kept + heads * tokens * (score + (self.number if self.recipe.capped else 0))
        own = 0 if out is not None and self._keeps_input(out) else self.number * width
        return kept + own + heads * _FLOAT32 + self.number * tokens

    def _keeps_scores(self) -> bool:
        return self.job.attention == "eager" or self.recipe.eager

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


def _norms(
    tensors: tuple[Tensor, ...], architecture: Architecture, job: TrainingJob, recipe: Recipe, heads: tuple[int, ...]
) -> int:
    """What all norms of a block keep. The first two read the stream; others the result of a product."""
    hidden, stream, number = architecture.hidden_size, stream_bytes(job), product_bytes(job)
    frozen = job.lora is not None
    total = recipe.norms * hidden * _norm(recipe.norm, stream, True)
    of_stream = 0
    for tensor in tensors:
        if len(tensor.shape) != 1 or not _NORM.search(tensor.name) or is_lora(tensor):
            continue
        if heads and re.search(r"[qk]_\w*norm", tensor.name):
            total += heads["k_" in tensor.name] * _norm(recipe.norm, number, frozen)
            continue
        of_stream += 1
        total += tensor.shape[0] * _norm(recipe.norm, stream if of_stream <= 2 else number, frozen)
    return total


def _norm(kind: Norm, read: int, frozen: bool) -> int:
    return _NORM_BYTES[kind][(2 if read == _FLOAT32 else 0) + frozen]


def _recipe(architecture: Architecture, block: Block) -> Recipe:
    known = recipe_of(architecture)
    if known is not None:
        return known
    biased = any(re.search(r"(norm\w*|ln_\w+)\.bias$", tensor.name, re.IGNORECASE) for tensor in block.tensors)
    return _LAYER if biased else _RMS


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
