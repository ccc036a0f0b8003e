"""Bytes that a GPU needs for a moment beside weights and cache, while prompts are read and while answers grow. Pure.

What a block needs is a tuple of ``Line``s, one for each step of its computation: bytes that are there whatever the
batch, and bytes for each sequence. A GPU needs the greatest of all lines of its blocks, because blocks are computed one
after the other and free what they took: depth doesn't count.

Where the model was measured (``Architecture.peaks``) the lines are the measured ones. Of headers alone the formulas
count which tensors are alive at each step of a layer like Llama's in transformers' modelling code (5.23); they also
tell which part of a measured need each GPU of a tensor-parallel group has. They assume:

- prompts of unequal length, padded: a mask for each sequence, keys and values repeated for grouped heads;
- attention by a fused kernel (``sdpa``);
- experts by grouped products, as transformers 5 computes them;
- logits of the last position alone, their float32 copy, and what sampling with top-p takes;
- bitsandbytes 0.50 on CUDA: int8 products come out as 32-bit integers; for many tokens 4-bit matrices are unpacked.

Not counted: libraries' own workspaces and the allocator's gaps (the reserve).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from gpuherd.models.describe.description import Architecture, Block, Curve, Role, Tensor
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision

_FLOAT32 = 4
_INT64 = 8
# Sampling with top-p on float32 logits: the copy, sorted values and their int64 places, softmax and its running sum,
# two masks; of greedy decoding only the copy.
SAMPLING = 4 + 4 + 4 + 8 + 4 + 4 + 2


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + each x batch`` bytes."""

    fixed: int
    each: int

    def at(self, batch: int) -> int:
        """Bytes for so many sequences."""
        return self.fixed + self.each * batch


@dataclass(frozen=True, slots=True)
class Stages:
    """What one block needs at its steps: while the prompt is read, and for one more token."""

    prompt: tuple[Line, ...] = ()
    token: tuple[Line, ...] = ()


def stages_of(
    block: Block, architecture: Architecture, workload: Workload, precision: Precision, *, ways: int = 1
) -> Stages:
    """What a block needs, of the batch of ``workload`` independent.

    Args:
        block, architecture, precision: as they lie on one GPU.
        workload: its tokens.
        ways: GPUs that the block's divided tensors are divided over.
    """
    peaks = architecture.peaks.get(block.peaks or "")
    if peaks is not None and peaks.prompt:
        return _measured(block, architecture, workload, precision, ways)
    number, hidden, prompt = precision.number_bytes, architecture.hidden_size, workload.prompt_tokens
    normalising = 3 * hidden * number + 2 * hidden * _FLOAT32
    if block.kind == "layer":
        return _of_shapes(block, architecture, workload, precision, ways)
    if block.kind == "head":
        logits = architecture.vocab_size * (number + SAMPLING)
        read = hidden * number * prompt if architecture.is_encoder_decoder else 0
        token = 2 * hidden * number + logits + read
        return Stages((Line(0, 2 * hidden * number * prompt + logits),), (Line(0, token),))
    return Stages((Line(0, normalising * prompt),), (Line(0, normalising),))


def _of_shapes(block: Block, architecture: Architecture, workload: Workload, precision: Precision, ways: int) -> Stages:
    """What a layer needs that computes as Llama's do."""
    window = block.cache.window if block.cache is not None else None
    layer = _LayerSteps(
        architecture,
        widths_of(block, architecture, ways),
        precision,
        windowed=window is not None,
        kinds=len({each.cache.window for each in architecture.blocks if each.cache is not None}) or 1,
    )
    return Stages(layer.prompt(workload.prompt_tokens), layer.token(min(workload.tokens, window or workload.tokens)))


def _measured(block: Block, architecture: Architecture, workload: Workload, precision: Precision, ways: int) -> Stages:
    """What a measured block needs. Of a tensor-parallel group each GPU needs the part that its shapes tell."""
    peaks, window = architecture.peaks[block.peaks or ""], block.cache.window if block.cache is not None else None
    prompt, longest = workload.prompt_tokens, min(workload.tokens, window or workload.tokens)
    if architecture.is_encoder_decoder:  # measured with as many tokens of its own as the encoder read
        longest = max(prompt, 1 + workload.new_tokens)
    filled = -(-prompt // peaks.fill) * peaks.fill
    found = Stages(_lines(peaks.prompt, filled, precision), _lines(peaks.token, longest, precision))
    if ways == 1:
        return found
    whole, part = (_of_shapes(block, architecture, workload, precision, n) for n in (1, ways))
    return Stages(
        _divided(found.prompt, whole.prompt, part.prompt, workload.batch),
        _divided(found.token, whole.token, part.token, workload.batch),
    )


def _lines(curves: Mapping[str, Sequence[Curve]], tokens: int, precision: Precision) -> tuple[Line, ...]:
    key = {Precision.FP32: "32", Precision.INT8: "int8", Precision.NF4: "4bit", Precision.NF4_DQ: "4bit"}
    found = []
    for curve in curves.get(key.get(precision, "16"), ()):
        fixed, each = curve.at(tokens)
        fixed += curve.matrix * precision.number_bytes
        if precision is Precision.NF4_DQ:
            fixed += 2 * _FLOAT32 * -(-curve.matrix // 64)
        found.append(Line(fixed, each))
    return tuple(dict.fromkeys(found))


def _divided(found: Sequence[Line], whole: Sequence[Line], part: Sequence[Line], batch: int) -> tuple[Line, ...]:
    """The lines by the ratio of two others, at a batch."""
    most, least = (max((line.at(batch) for line in lines), default=0) for lines in (whole, part))
    share = least / most if most else 1.0
    return tuple(Line(ceil(line.fixed * share), ceil(line.each * share)) for line in found)


# Tensors that are alive at once in transformers' modelling code of Llama.
_HIDDEN = 4  # hidden states next to the MLP: of embedding, layer, attention, normalised
_GATED, _GATE_FUSED, _UNGATED = 3, 4, 2  # copies of the MLP's middle
_EXPERTS = 4  # copies of all experts' middles


@dataclass(frozen=True, slots=True)
class _LayerSteps:
    """The steps of one layer; bytes for each sequence."""

    architecture: Architecture
    widths: Widths
    precision: Precision
    windowed: bool
    kinds: int

    def prompt(self, tokens: int) -> tuple[Line, ...]:
        """The steps for all tokens of a prompt at once."""
        mask = self._mask(tokens, tokens)
        steps = [self._normalising(tokens), self._rotary(tokens), self._attention(tokens, tokens), self._mlp(tokens)]
        return (Line(0, max(steps) + mask), *self._unpacking(tokens, mask))

    def token(self, tokens: int) -> tuple[Line, ...]:
        """The steps for one more token after ``tokens``; the layer's keys, then its values, are copied to grow."""
        mask = self._mask(1, tokens)
        steps = [self._growing(tokens), self._attention(1, tokens), self._mlp(1)]
        return (Line(0, max(steps) + mask), *self._unpacking(1, mask))

    def _growing(self, tokens: int) -> int:
        """The new token's states, and keys with their longer copy (a layer with a window: values too)."""
        copies = 2 if self.windowed else 1
        kept = copies * self.widths.keys * tokens * self._number
        biases = 5 * self.architecture.heads * tokens * _FLOAT32
        return 8 * self._hidden + 4 * self.widths.query * self._number + biases + kept

    @property
    def _number(self) -> int:
        return self.precision.number_bytes

    @property
    def _hidden(self) -> int:
        return self.architecture.hidden_size * self._number

    def _mask(self, queries: int, keys: int) -> int:
        """The masks of allowed pairs, two tables of angles, and int64 ids, places and the like."""
        angles = 2 * self.kinds * self.widths.query // max(self.architecture.heads, 1) * _FLOAT32
        return queries * (keys * self.kinds + angles) + 4 * _INT64 * keys

    def _normalising(self, tokens: int) -> int:
        """Embedding, layer input, residual; the numbers as float32 and scaled."""
        return tokens * (3 * self._hidden + 2 * self.architecture.hidden_size * _FLOAT32)

    def _rotary(self, tokens: int) -> int:
        """Queries, keys and values, the first two turned: three temporaries of what is being turned."""
        query, keys = self.widths.query, self.widths.keys
        own_cache = 2 * keys * self._number
        turned = max(4 * query + 2 * keys, 2 * query + 5 * keys) * self._number
        normed = query * (self._number + 2 * _FLOAT32) if self.widths.query_norm else 0
        return tokens * (3 * self._hidden + max(turned, normed) - own_cache)

    def _attention(self, queries: int, keys: int) -> int:
        """Queries and the output; keys and values repeated for grouped heads; the mask as numbers for the kernel."""
        query, number = self.widths.query, self._number
        alive = 3 * self._hidden * queries + 2 * query * number * queries
        if self.widths.latent:
            alive += (query * queries + (query + self.widths.latent) * keys) * number
        elif query > self.widths.keys and queries > 1:
            alive += 2 * query * keys * number
        return alive + queries * (keys * number + self.architecture.heads * _FLOAT32)

    def _copies(self) -> int:
        """Copies of the MLP's middle that are alive at once."""
        if not self.widths.gated:
            return _UNGATED
        return _GATE_FUSED if self.widths.fused else _GATED

    def _mlp(self, tokens: int) -> int:
        """The greatest of the MLP's steps: its middle, or what experts take in and give out."""
        number, hidden, widths = self._number, self.architecture.hidden_size, self.widths
        middle = self._copies() * widths.inner * number
        if self.precision is Precision.INT8 and widths.inner:
            outputs = 2 if widths.fused else 1
            before = 1 if widths.gated and not widths.fused else 0
            middle = max(middle, ((before + outputs) * number + outputs * _FLOAT32) * widths.inner + hidden)
        routed = widths.experts * hidden
        experts = max(routed + _EXPERTS * widths.expert_inner, 4 * routed) * number
        routing = 2 * widths.choices * _FLOAT32 + 4 * widths.experts * _INT64
        return tokens * (_HIDDEN * self._hidden + max(middle, experts) + routing)

    def _unpacking(self, tokens: int, mask: int) -> tuple[Line, ...]:
        """A 4-bit matrix in 16 bits, and with double quantisation its scales in two float32 copies."""
        if self.precision not in (Precision.NF4, Precision.NF4_DQ):
            return ()
        fixed = self.widths.largest * self._number
        if self.precision is Precision.NF4_DQ:
            fixed += 2 * _FLOAT32 * -(-self.widths.largest // 64)
        alive = _HIDDEN * self._hidden + max(self._copies() - 1, 1) * self.widths.inner * self._number
        return (Line(fixed, tokens * alive + mask),)


# ---- how wide a block is at each of its steps, read off the shapes of its tensors ------------------------------------
#
# The names are those that transformers' families use; a block that has none of them gets the widths of its config.

_QUERY = frozenset({"q_proj", "q_b_proj", "wq", "q", "query"})
_FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"})
_GATE = frozenset({"gate_proj", "wi_1", "w3", "v_proj_mlp"})
_INTO = frozenset({"gate_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "wi", "wi_0", "wi_1", "w1", "w3"})


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers for one token at the steps of a layer.

    Attributes:
        query, keys: of queries of all heads, and of keys (as many values) as they are cached.
        latent: of the keys and values that a compressed cache is expanded to (MLA); 0 without.
        inner: of the MLP's middle; 0 where experts are all it has.
        gated, fused: whether the MLP has a gate, and whether gate and middle come out of one matrix.
        expert_inner: of the middle of all experts of a token together; 0 without experts.
        experts, choices: how many experts a token goes to, of how many.
        query_norm: queries and keys are normalised.
        largest: numbers of the largest quantisable matrix.
    """

    query: int
    keys: int
    latent: int
    inner: int
    gated: bool
    fused: bool
    expert_inner: int
    experts: int
    choices: int
    query_norm: bool
    largest: int


def widths_of(block: Block, architecture: Architecture, ways: int = 1) -> Widths:
    """The widths of one layer, on one of ``ways`` GPUs that its divided tensors are divided over.

    A matrix of several parts in one (queries with keys and values, gate with middle) gives all of its outputs on every
    GPU, because transformers gathers them before it takes them apart.
    """
    matrices = {_leaf(tensor): tensor for tensor in block.tensors if len(tensor.shape) == 2}
    leaves = {_leaf(tensor) for tensor in block.tensors}
    hidden = architecture.hidden_size
    # Where nothing is kept (encoders) there are as many keys as queries.
    keys = block.cache.per_token // 2 if block.cache is not None else _query(matrices, hidden, hidden)
    latent = _rows(matrices["kv_b_proj"]) if "kv_b_proj" in matrices else 0
    inner, fused = _inner(matrices)
    choices, of_one = _experts(block.tensors, hidden)
    experts = max(1, round((architecture.intermediate_size - inner) / of_one)) if of_one else 0
    if not inner and not of_one:
        inner = architecture.intermediate_size
    in_heads = ways if divides_heads(block) else 1
    in_middle = ways if not fused and any(each.split for leaf, each in matrices.items() if leaf in _INTO) else 1
    in_experts = ways if any(tensor.split for tensor in block.tensors if len(tensor.shape) == 3) else 1
    return Widths(
        query=-(-_query(matrices, keys, hidden) // in_heads),
        keys=-(-keys // in_heads),
        latent=-(-latent // in_heads),
        inner=-(-inner // in_middle),
        gated=bool(_GATE & leaves) or fused or inner == 0 or not (_INTO & leaves),
        fused=fused,
        expert_inner=-(-experts * of_one // in_experts),
        experts=experts,
        choices=choices,
        query_norm="q_norm" in leaves,
        largest=max((_part(tensor, ways) for tensor in matrices.values() if tensor.role is Role.LINEAR), default=0),
    )


def divides_heads(block: Block) -> bool:
    """Whether each GPU of a tensor-parallel group has a part of the heads, and keeps keys and values of those alone."""
    return any(tensor.split and _leaf(tensor) in _QUERY for tensor in block.tensors)


def _part(tensor: Tensor, ways: int) -> int:
    return -(-tensor.numel // ways) if tensor.split else tensor.numel


def _leaf(tensor: Tensor) -> str:
    """The module's own name: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    parts = tensor.name.rsplit(".", 2)
    return parts[-2] if len(parts) > 1 else tensor.name


def _rows(tensor: Tensor) -> int:
    return tensor.shape[-1 if tensor.transposed else 0]


def _query(matrices: dict[str, Tensor], keys: int, hidden: int) -> int:
    for leaf, tensor in matrices.items():
        if leaf in _QUERY:
            return _rows(tensor)
    for leaf, tensor in matrices.items():
        if leaf in _FUSED:
            return max(_rows(tensor) - 2 * keys, hidden)
    return hidden


def _inner(matrices: dict[str, Tensor]) -> tuple[int, bool]:
    """The width of the MLP's middle, and whether its gate comes out of the same matrix."""
    if "gate_up_proj" in matrices:
        return _rows(matrices["gate_up_proj"]) // 2, True
    return max((_rows(tensor) for leaf, tensor in matrices.items() if leaf in _INTO), default=0), False


def _experts(tensors: Iterable[Tensor], hidden: int) -> tuple[int, int]:
    """How many experts there are and the width of one's middle; zeros without experts fused into one parameter."""
    for tensor in tensors:
        if len(tensor.shape) == 3 and tensor.name.endswith("gate_up_proj"):
            return tensor.shape[0], tensor.shape[1] * tensor.shape[2] // hidden // 2
    return 0, 0
