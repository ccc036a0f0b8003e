"""Bytes that a GPU needs for a moment beside weights and cache, while prompts are read and while answers grow. Pure.

What a block needs is a tuple of ``Line``s, one for each step of its computation: bytes that are there whatever the
batch, and bytes for each sequence. A GPU needs the greatest of all lines of its blocks, because blocks are computed one
after the other and free what they took: depth doesn't count.

The formulas count which tensors are alive at each step of transformers' modelling code (5.23), in inference. They are
held against a measurement of that code under fake tensors in ``tests/models/plan/test_workspace.py``: never below, at
most 10 % above for the families named there (of state-space and linear-attention layers at most a half above, without
kernels of their own). What they assume:

- prompts of unequal length, padded: a mask for each sequence, keys and values repeated for grouped heads;
- attention by a fused kernel (``sdpa``), unless the family can't (``habits``): then a score for each pair of tokens;
- experts by grouped products, as transformers 5 computes them;
- logits of the last position alone, their float32 copy, and what sampling with top-p takes;
- bitsandbytes 0.50 on CUDA: int8 products come out as 32-bit integers; for many tokens 4-bit matrices are unpacked.

Not counted: libraries' own workspaces and the allocator's gaps (the reserve), and the first computation of a prompt
beyond a window in layers that cut it in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from gpuherd.models.plan.architecture import Architecture, Block, Curve
from gpuherd.models.plan.habits import FAMILIES, Attention, Family
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.widths import Widths, widths_of
from gpuherd.models.plan.workload import Workload

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
    block: Block,
    architecture: Architecture,
    workload: Workload,
    precision: Precision,
    *,
    attention: Attention | None = None,
    ways: int = 1,
) -> Stages:
    """What a block needs, of the batch of ``workload`` independent.

    Args:
        block, architecture, precision: as they lie on one GPU.
        workload: its tokens.
        attention: instead of the family's own.
        ways: GPUs that the block's divided tensors are divided over.
    """
    if attention is None and block.peaks in architecture.peaks:
        return _measured(block, architecture, workload, precision, ways)
    family = FAMILIES.get(architecture.model_type, Family())
    number, hidden, prompt = precision.number_bytes, architecture.hidden_size, workload.prompt_tokens
    normalising = 3 * hidden * number + 2 * hidden * _FLOAT32
    if block.kind == "layer":
        window = block.cache.window if block.cache is not None else None
        layer = _Layer(
            architecture,
            family,
            widths_of(block, architecture, ways),
            precision,
            attention or family.attention,
            windowed=window is not None,
            keeps=block.cache is not None,
            states=block.cache.per_sequence + block.cache.per_sequence_fp32 if block.cache is not None else 0,
            kinds=len({each.cache.window for each in architecture.blocks if each.cache is not None}) or 1,
        )
        if not architecture.is_encoder_decoder:
            return Stages(layer.prompt(prompt), layer.token(min(workload.tokens, window or workload.tokens)))
        if block.cache is None:  # of the encoder, which is done when the first token is asked for
            return Stages(layer.prompt(prompt))
        return Stages(layer.crossing(prompt), layer.crossed(1 + workload.new_tokens, prompt))
    if block.kind == "head":
        logits = architecture.vocab_size * (number + SAMPLING)
        read = hidden * number * prompt if architecture.is_encoder_decoder else 0
        token = 2 * hidden * number + logits + read
        return Stages((Line(0, 2 * hidden * number * prompt + logits),), (Line(0, token),))
    return Stages((Line(0, normalising * prompt),), (Line(0, normalising),))


def _measured(block: Block, architecture: Architecture, workload: Workload, precision: Precision, ways: int) -> Stages:
    """What a measured block needs. Of a tensor-parallel group each GPU needs the part that the formulas tell."""
    peaks, window = architecture.peaks[block.peaks or ""], block.cache.window if block.cache is not None else None
    prompt, longest = workload.prompt_tokens, min(workload.tokens, window or workload.tokens)
    if architecture.is_encoder_decoder:  # measured with as many tokens of its own as the encoder read
        longest = max(prompt, 1 + workload.new_tokens)
    filled = -(-prompt // peaks.fill) * peaks.fill
    found = Stages(_lines(peaks.prompt, filled, precision), _lines(peaks.token, longest, precision))
    if ways == 1:
        return found
    plain = replace(block, peaks=None)
    whole, part = (stages_of(plain, architecture, workload, precision, ways=n) for n in (1, ways))
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


@dataclass(frozen=True, slots=True)
class _Layer:
    """The steps of one layer; bytes for each sequence."""

    architecture: Architecture
    family: Family
    widths: Widths
    precision: Precision
    attention: Attention
    windowed: bool
    keeps: bool
    kinds: int
    states: int

    def prompt(self, tokens: int) -> tuple[Line, ...]:
        """The steps for all tokens of a prompt at once."""
        mask = self._mask(tokens, tokens)
        steps = [
            self._normalising(tokens),
            self._rotary(tokens),
            self._attention(tokens, tokens),
            self._mlp(tokens) + self._kept_scores(tokens, tokens),
            self._recurrent(tokens),
        ]
        return (*self._biased(tokens, Line(0, max(steps) + mask)), *self._unpacking(tokens, mask))

    def token(self, tokens: int) -> tuple[Line, ...]:
        """The steps for one more token after ``tokens``; the layer's keys, then its values, are copied to grow."""
        mask = self._mask(1, tokens)
        steps = [
            self._growing(tokens),
            self._attention(1, tokens),
            self._mlp(1) + self._kept_scores(1, tokens),
            self._recurrent(1),
        ]
        return (Line(0, max(steps) + mask), *self._unpacking(1, mask))

    def crossing(self, read: int) -> tuple[Line, ...]:
        """The steps of a decoder for its first token, when it makes keys and values of what the encoder read."""
        made = (self._hidden + 4 * self.widths.keys * self._number) * read
        return (Line(0, made + self._attention(1, read) + self._mask(1, read)), *self._unpacking(read, 0))

    def crossed(self, tokens: int, read: int) -> tuple[Line, ...]:
        """The steps for one more token of a decoder; what the encoder gave out stays to the end."""
        kept = self._hidden * read
        steps = [*self.token(tokens), Line(0, self._attention(1, read) + self._mask(1, read))]
        return tuple(Line(line.fixed, line.each + kept) for line in steps)

    def _biased(self, tokens: int, line: Line) -> tuple[Line, ...]:
        """The line with a bias for each pair of tokens and head, which all sequences and layers share; and the making
        of that bias, out of int64 distances."""
        if not self.family.biased:
            return (line,)
        bias = tokens * tokens * self.architecture.heads * self._number
        return (Line(line.fixed + bias, line.each), Line(bias + tokens * tokens * 6 * _INT64, 0))

    def _growing(self, tokens: int) -> int:
        """The new token's states, and keys beside their longer copy (a layer with a window: values too)."""
        copies = 2 if self.windowed else 1
        kept = copies * self.widths.keys * tokens * self._number
        biases = 5 * self.architecture.heads * tokens * _FLOAT32
        as_float32 = self.widths.query * tokens * _FLOAT32 if self.family.keys_fp32 else 0
        return 8 * self._hidden + 4 * self.widths.query * self._number + biases + max(kept, as_float32)

    @property
    def _number(self) -> int:
        return self.precision.number_bytes

    @property
    def _hidden(self) -> int:
        return self.architecture.hidden_size * self._number

    def _mask(self, asking: int, asked: int) -> int:
        """The masks of allowed pairs, two tables of angles, and int64 ids, places and the like."""
        kinds = self.kinds
        pair = kinds * self._number if self.attention == "eager" else kinds
        angles = 2 * kinds * self.widths.query // max(self.architecture.heads, 1) * _FLOAT32
        return asking * (asked * pair + angles) + 4 * _INT64 * asked + self.family.table

    def _recurrent(self, tokens: int) -> int:
        """A recurrent part: its prompt in whole chunks, or copies of its state for one more token."""
        if not self.widths.recurrent:
            return 0
        if tokens == 1:  # of a prompt of one token too
            return 8 * self._hidden + 5 * self.states * _FLOAT32
        filled = -(-tokens // self.widths.chunk) * self.widths.chunk
        return 5 * self._hidden * tokens + filled * self.widths.recurrent + self.states * _FLOAT32

    def _normalising(self, tokens: int) -> int:
        """Embedding, layer input, residual; the numbers as float32 and scaled."""
        return tokens * (3 * self._hidden + 2 * self.architecture.hidden_size * _FLOAT32)

    def _rotary(self, tokens: int) -> int:
        """Queries, keys and values, the first two turned: three temporaries of what is being turned."""
        query, keys = self.widths.query, self.widths.keys
        own_cache = 2 * keys * self._number
        if self.family.rotary_fp32:
            turned = (2 * query + 4 * keys) * _FLOAT32 + (query + 2 * keys) * self._number
        else:
            turned = max(4 * query + 2 * keys, 2 * query + 5 * keys) * self._number
        normed = query * (self._number + 2 * _FLOAT32) if self.widths.query_norm else 0
        return tokens * (3 * self._hidden + max(turned, normed) - own_cache)

    def _attention(self, asking: int, asked: int) -> int:
        """Queries and the output; keys and values repeated for grouped heads; scores where no kernel is fused."""
        query, number = self.widths.query, self._number
        alive = (3 + self.family.attended) * self._hidden * asking + 2 * query * number * asking
        if not self.keeps:
            alive += self.widths.keys * number * asked
        if self.widths.latent:
            alive += (query * asking + (query + self.widths.latent) * asked) * number
        elif query > self.widths.keys and (asking > 1 or self.attention == "eager"):
            alive += 2 * query * asked * number
        return alive + self._scores(asking, asked)

    def _scores(self, asking: int, asked: int) -> int:
        """The mask as numbers for a fused kernel; else a score for each pair, and copies of what they are made from."""
        pairs, half = self.architecture.heads * asking * asked, self._number < _FLOAT32
        if self.attention == "sdpa":
            biases = (2 * pairs + asking * asked) * self._number if self.family.biased else 0
            return asking * (asked * self._number + self.architecture.heads * _FLOAT32) + biases
        if self.attention == "math":
            return asking * asked * self._number + self._plain_kernel(pairs, asking, asked)
        softmax = (2 if half or self.family.scores_fp32 else 1) * _FLOAT32 if self.family.softmax_fp32 else 0
        return pairs * (self.family.masked * self._number + softmax)

    def _plain_kernel(self, pairs: int, asking: int, asked: int) -> int:
        """Torch's kernel that isn't fused: all in float32; first queries, keys and values, then the output too."""
        query, half = self.widths.query, self._number < _FLOAT32
        keys = query if self.widths.latent else self.widths.keys
        spread = query * asked if asking == 1 else 0  # one head's keys for all heads
        copies = 2 * query * asking + 2 * keys * asked
        before = 2 * pairs + spread + (copies if half else copies // 2)
        after = pairs + query * (3 * asking + asked)
        return max(before * _FLOAT32, after * _FLOAT32 + (pairs * self._number if half else 0))

    def _kept_scores(self, asking: int, asked: int) -> int:
        if self.attention != "eager":
            return 0
        return self.family.scores * self.architecture.heads * asking * asked * self._number

    def _copies(self) -> int:
        """Copies of the MLP's middle that are alive at once."""
        if self.family.inner is not None:
            return self.family.inner
        return (4 if self.widths.fused else self.family.gated) if self.widths.gated else 2

    def _mlp(self, tokens: int) -> int:
        """The greatest of the MLP's steps: its middle, or what experts take in and give out."""
        number, hidden, widths = self._number, self.architecture.hidden_size, self.widths
        middle = self._copies() * widths.inner * number
        if self.precision is Precision.INT8 and widths.inner:
            outputs = 2 if widths.fused else 1
            before = 1 if widths.gated and not widths.fused else 0
            middle = max(middle, ((before + outputs) * number + outputs * _FLOAT32) * widths.inner + hidden)
        if self.family.all_experts:
            each = widths.expert_inner // max(widths.experts, 1)
            experts = widths.choices * (hidden + self.family.experts * each) * number
        else:
            routed = widths.experts * hidden
            experts = max(routed + self.family.experts * widths.expert_inner, 4 * routed) * number
        routing = 2 * widths.choices * _FLOAT32 + 4 * widths.experts * _INT64
        return tokens * (self.family.hidden * self._hidden + max(middle, experts) + routing)

    def _unpacking(self, tokens: int, mask: int) -> tuple[Line, ...]:
        """A 4-bit matrix in 16 bits, and with double quantisation its scales in two float32 copies."""
        if self.precision not in (Precision.NF4, Precision.NF4_DQ):
            return ()
        fixed = self.widths.largest * self._number
        if self.precision is Precision.NF4_DQ:
            fixed += 2 * _FLOAT32 * -(-self.widths.largest // 64)
        alive = self.family.hidden * self._hidden + max(self._copies() - 1, 1) * self.widths.inner * self._number
        return (Line(fixed, tokens * alive + mask),)
