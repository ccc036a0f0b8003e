"""How architectures store several matrices in one tensor, and taking them apart. Pure: names, shapes and config in.

A fused projection is always the same simple thing: along one axis, ``groups`` equal groups, each holding the parts in
order. One group of (q, k, v) is three blocks behind each other; ``heads`` groups of (q, k, v) is interleaving by head.
A rule counts only when the shape fits it exactly; a tensor that fits no rule is left whole. The experts of a mixture
that share one tensor lie in one of two forms: a 3-D tensor of one matrix an expert (transformers 5, GGUF), and matrices
below each other in a 2-D tensor (DBRX). docs/models.md has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuherd.models.tensors.source import FloatArray, TensorInfo

Config = Mapping[str, Any]
Shape = tuple[int, int]

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")
_HEAD_SIZE = ("head_dim", "kv_channels")


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """How a 2-D tensor holds its parts.

    Attributes:
        axis: 0 when the parts are groups of rows, 1 when they are groups of columns.
        groups: how often the sequence of parts repeats along the axis.
        parts: name and size within one group, in order.
    """

    axis: int
    groups: int
    parts: tuple[tuple[str, int], ...]

    def fits(self, shape: Shape) -> bool:
        """Whether the parts fill the axis exactly."""
        return self.groups > 0 and self.groups * sum(size for _, size in self.parts) == shape[self.axis]

    def part_shape(self, shape: Shape, part: int) -> Shape:
        """The shape of one part of a tensor of this shape."""
        size = self.groups * self.parts[part][1]
        return (size, shape[1]) if self.axis == 0 else (shape[0], size)

    def block(self, part: int) -> tuple[int, int] | None:
        """First row and row after the last of a part that is one block of rows, else None."""
        return self.runs(part)[0] if self.axis == 0 and self.groups == 1 else None

    def runs(self, part: int) -> tuple[tuple[int, int], ...]:
        """First and after the last index along the axis of each of the part's pieces, one for each group."""
        period = sum(size for _, size in self.parts)
        start = sum(size for _, size in self.parts[:part])
        size = self.parts[part][1]
        return tuple((first, first + size) for first in range(start, start + self.groups * period, period))

    def take(self, tensor: FloatArray, part: int) -> FloatArray:
        """One part: a view of the tensor where it is one block of it, else a copy."""
        rows, columns = tensor.shape
        start = sum(size for _, size in self.parts[:part])
        stop = start + self.parts[part][1]
        if self.groups == 1:
            return tensor[start:stop] if self.axis == 0 else tensor[:, start:stop]
        if self.axis == 0:
            grouped = tensor.reshape(self.groups, rows // self.groups, columns)
            return np.array(grouped[:, start:stop]).reshape(-1, columns)
        grouped = tensor.reshape(rows, self.groups, columns // self.groups)
        return np.array(grouped[:, :, start:stop]).reshape(rows, -1)


Rule = Callable[[Config, Shape], FusedLayout | None]


def _integer(config: Config, names: Sequence[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _qkv(axis: int, groups: int, q: int, k: int, v: int) -> FusedLayout:
    return FusedLayout(axis, groups, (("_q", q), ("_k", k), ("_v", v)))


def _thirds(_: Config, shape: Shape) -> FusedLayout | None:
    """Three square matrices behind each other; with fewer key heads the shape differs, and shows no more than that."""
    return _qkv(0, 1, *(shape[1],) * 3) if shape[0] == 3 * shape[1] else None


def _columns(_: Config, shape: Shape) -> FusedLayout | None:
    """Conv1D stores the transpose: (in, 3 in) is q, k, v and, in cross-attention, (in, 2 in) is k, v."""
    rows, columns = shape
    if columns == 3 * rows:
        return _qkv(1, 1, rows, rows, rows)
    return FusedLayout(1, 1, (("_k", rows), ("_v", rows))) if columns == 2 * rows else None


def _heads(config: Config, shape: Shape) -> tuple[int, int] | None:
    """How many query heads there are, and how many rows each has: the config says it, or they share the width.

    The width makes a wrong number of key heads show: with it the parts don't fill the tensor.
    """
    heads, size = _integer(config, _HEADS), _integer(config, _HEAD_SIZE)
    if heads is None or (size is None and shape[1] % heads):
        return None
    return heads, size or shape[1] // heads


def _key_heads(config: Config) -> int | None:
    """How many key heads the config gives; None where each query head has its own."""
    inner = config.get("attn_config")
    return _integer(config, _KV_HEADS) or (_integer(inner, _KV_HEADS) if isinstance(inner, Mapping) else None)


def _by_head(config: Config, shape: Shape) -> FusedLayout | None:
    """[heads, (q, k, v), head_dim]."""
    found = _heads(config, shape)
    return None if found is None else _qkv(0, found[0], *(found[1],) * 3)


def _behind(config: Config, shape: Shape, key_heads: int | None) -> FusedLayout | None:
    """All query heads, then so many key heads, then as many value heads."""
    found = _heads(config, shape)
    if found is None:
        return None
    heads, size = found
    kept = (key_heads or heads) * size
    return _qkv(0, 1, heads * size, kept, kept)


def _grouped_query(config: Config, shape: Shape) -> FusedLayout | None:
    """All query heads, then the (fewer) key heads, then the value heads."""
    return _behind(config, shape, _key_heads(config))


def _by_key_head(config: Config, shape: Shape) -> FusedLayout | None:
    """[key heads, (its query heads, k, v), head_dim]."""
    found = _heads(config, shape)
    if found is None:
        return None
    heads, size = found
    key_heads = _key_heads(config) or heads
    return None if heads % key_heads else _qkv(0, key_heads, heads // key_heads * size, size, size)


def _multi_query(config: Config, shape: Shape) -> FusedLayout | None:
    """All query heads, one key head, one value head; by head where ``multi_query``, on by default, is off."""
    return _behind(config, shape, 1) if config.get("multi_query", True) else _by_head(config, shape)


def _falcon(config: Config, shape: Shape) -> FusedLayout | None:
    if config.get("new_decoder_architecture") or config.get("model_type") == "RefinedWeb":
        return _by_key_head(config, shape)
    return _multi_query(config, shape)


def _mpt(config: Config, shape: Shape) -> FusedLayout | None:
    """Grouped as llm-foundry has it; by ``attn_type`` alone where each query head has its key head, or all have one."""
    inner = config.get("attn_config")
    kind = inner.get("attn_type") if isinstance(inner, Mapping) else None
    if kind == "multiquery_attention":
        return _behind(config, shape, 1)
    return _behind(config, shape, _key_heads(config) if kind == "grouped_query_attention" else None)


def _chatglm(config: Config, shape: Shape) -> FusedLayout | None:
    """From ChatGLM2 on with grouped heads one behind the other; ChatGLM-6B by head."""
    return _grouped_query(config, shape) if config.get("multi_query_attention") else _by_head(config, shape)


def _chatglm_gate(config: Config, _: Shape) -> FusedLayout | None:
    """From ChatGLM2 on gate and up; ChatGLM-6B, whose config has an ``inner_hidden_size`` instead, has no gate."""
    width = _integer(config, ("ffn_hidden_size",))
    return None if width is None else FusedLayout(0, 1, (("_gate", width), ("_up", width)))


def _codegen(_: Config, shape: Shape) -> FusedLayout | None:
    """Four groups (the four TPU cores it was trained on), each of q, v, k in that order."""
    if shape[0] != 3 * shape[1] or shape[1] % 4:
        return None
    size = shape[1] // 4
    return FusedLayout(0, 4, (("_q", size), ("_v", size), ("_k", size)))


def _gguf_qkv(config: Config, shape: Shape) -> FusedLayout | None:
    """All query heads, then the key heads, then the value heads, of a size that the metadata tell."""
    return None if _integer(config, _HEAD_SIZE) is None else _grouped_query(config, shape)


def _gguf_up(config: Config, shape: Shape) -> FusedLayout | None:
    """Phi-3's and ChatGLM's gate lies above the up projection in a tensor of twice the width."""
    width = _integer(config, ("intermediate_size",))
    return None if width is None or shape[0] != 2 * width else FusedLayout(0, 1, (("_gate", width), ("_up", width)))


def _row_halves(first: str, second: str) -> Rule:
    def rule(_: Config, shape: Shape) -> FusedLayout | None:
        return None if shape[0] % 2 else FusedLayout(0, 1, ((first, shape[0] // 2), (second, shape[0] // 2)))

    return rule


# One entry a layout: model_types (None: whatever it is, the name and shape tell enough), the end of the tensor's name,
# and the rule. The first entry that fits counts.
_RULES: tuple[tuple[frozenset[str] | None, re.Pattern[str], Rule], ...] = tuple(
    (frozenset(types.split()) if types else None, re.compile(rf"(?:.*\.)?(?:{name})"), rule)
    for types, name, rule in (
        ("gpt_bigcode", r"attn\.c_attn\.weight", _multi_query),
        ("gpt_neox gpt_neox_japanese bloom persimmon fuyu", r"query_key_value\.weight", _by_head),
        ("falcon RefinedWeb RefinedWebModel", r"query_key_value\.weight", _falcon),
        ("chatglm", r"query_key_value\.weight", _chatglm),
        ("chatglm", r"mlp\.dense_h_to_4h\.weight", _chatglm_gate),
        ("phi3 phi3_v phi4_multimodal phi4mm", r"qkv_proj\.weight", _grouped_query),
        ("minimax", r"qkv_proj\.weight", _by_head),
        ("codegen", r"qkv_proj\.weight", _codegen),
        ("mpt", r"Wqkv\.weight", _mpt),
        ("dbrx", r"Wqkv\.weight", _grouped_query),
        ("modernbert", r"Wqkv\.weight", _thirds),
        ("modernbert modernbert-decoder", r"mlp\.Wi\.weight", _row_halves("_input", "_gate")),
        ("internlm2", r"wqkv\.weight", _by_key_head),
        ("deberta", r"attention\.self\.in_proj\.weight", _by_head),
        ("gguf", r"attn_qkv\.weight", _gguf_qkv),
        ("gguf", r"ffn_up\.weight", _gguf_up),
        ("qwen", r"c_attn\.weight", _thirds),
        (None, r"c_attn\.weight", _columns),
        (None, r"in_proj_weight", _thirds),
        (None, r"W_pack\.weight", _thirds),
        (None, r"(?:attn|attention|self_attn)\.qkv\.weight", _thirds),
        (None, r"(?:mlp|feed_forward|shared_expert|shared_experts)\.gate_up_proj\.weight", _row_halves("_gate", "_up")),
    )
)


def is_fused(name: str) -> bool:
    """Whether a tensor of this name is fused in some architecture."""
    return any(pattern.fullmatch(name) for _, pattern, _ in _RULES)


def layout_of(name: str, shape: Shape, config: Config) -> FusedLayout | None:
    """The layout of a fused 2-D tensor, None when it holds one matrix or when no rule fits it exactly."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for types, pattern, rule in _RULES:
            if types is not None and str(part.get("model_type")) not in types:
                continue
            if pattern.fullmatch(name):
                layout = rule(part, shape)
                if layout is not None and layout.fits(shape):
                    return layout
    return None


# ---- experts that share one tensor -----------------------------------------------------------------------------------

# More than this in one tensor are no mixture; each is a matrix to us.
MAX_EXPERTS = 1 << 16
# Below an expert's number stands what belongs to it alone: a convolution, if it has three axes.
_EXPERTS = re.compile(
    r"(?!.*experts\.\d+\.)(?:.*\.)?"
    r"(?:(?:(?:shared_)?experts|moe|block_sparse_moe)\.(?:.*\.)?[^.]+|(?:input|output)_linear\.weight)"
)
_GGUF = re.compile(r"(?P<stem>(?:.*\.)?ffn_(?:gate_up|gate|up|down))_(?:ch)?exps(?:\.weight)?")
_STACKED = re.compile(r"(?:.*\.)?experts\.mlp\.(?:w1|v1|w2)")
# One entry a name of the tensor with experts' gate and up projections: its ends, and what in it is replaced by what to
# name the tensor with their down projections.
_GATE_UP: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("gate_up_proj", "gate_up_proj.weight"), "gate_up_proj", "down_proj"),
    (("input_linear.weight",), "input_linear", "output_linear"),
    (("ffn_gate_up_exps.weight",), "ffn_gate_up_", "ffn_down_"),
    (("experts.fc1.weight",), "experts.fc1", "experts.fc2"),
)
# The same parameters where a checkpoint has a tensor an expert: for each form, what in the module's name is replaced by
# what, and the matrices that lie below each other in the parameter that transformers makes of them.
EXPERTS_APART = {
    "gate_up_proj": (
        ("", "", ("gate_proj", "up_proj")),
        ("mlp.experts", "block_sparse_moe.experts", ("w1", "w3")),
    ),
    "down_proj": (("", "", ("down_proj",)), ("mlp.experts", "block_sparse_moe.experts", ("w2",))),
}
# model_types whose gate and up projections alternate column by column.
_ALTERNATING_EXPERTS = frozenset({"gpt_oss"})


def holds_experts(name: str) -> bool:
    """Whether a 3-D tensor of this name holds an expert along its first axis."""
    return bool(_EXPERTS.fullmatch(name) or _GGUF.fullmatch(name))


def holds_stacked_experts(name: str) -> bool:
    """Whether a 2-D tensor of this name holds experts below each other."""
    return bool(_STACKED.fullmatch(name))


def stacked_experts(info: TensorInfo, config: Mapping[str, Any]) -> int | None:
    """How many experts lie below each other in a 2-D tensor; None if the config does not say."""
    ffn = config.get("ffn_config")
    count = ffn.get("moe_num_experts") if isinstance(ffn, Mapping) else None
    return count if type(count) is int and 0 < count <= MAX_EXPERTS and info.shape[0] % count == 0 else None


def expert_name(longname: str, expert: int) -> str:
    """As models with separate experts call them.

    >>> expert_name("h.0.experts.down_proj", 3), expert_name("blk.0.ffn_down_exps", 3)
    ('h.0.experts.3.down_proj', 'blk.0.ffn_down.3')
    """
    match = _GGUF.fullmatch(longname)
    if match:
        return f"{match['stem']}.{expert}"
    before, experts, after = longname.rpartition("experts.")
    return f"{before}{experts}{expert}.{after}" if experts else f"{longname}.{expert}"


def part_name(longname: str, part: str) -> str:
    """The name of an expert's gate or up projection; names of a form that is not known get the part added.

    >>> part_name("experts.3.gate_up_proj", "gate"), part_name("blk.0.ffn_gate_up.3", "up"), part_name("w.3", "up")
    ('experts.3.gate_proj', 'blk.0.ffn_up.3', 'w.3_up')
    """
    if longname.endswith("gate_up_proj"):
        return f"{longname.removesuffix('gate_up_proj')}{part}_proj"
    if "ffn_gate_up." in longname:
        return longname.replace("ffn_gate_up.", f"ffn_{part}.")
    return f"{longname}_{part}"


def expert_layout(name: str, shape: Shape, tensors: Mapping[str, TensorInfo], config: Config) -> FusedLayout | None:
    """The layout of one expert's gate and up projection in a fused tensor, None when it holds one matrix.

    The shape of the same expert's down projection, in another of the ``tensors``, tells whether the matrices are stored
    (out, in) or transposed, which the name does not.
    """
    fused, down = next((names for endings, *names in _GATE_UP if name.endswith(endings)), ("", ""))
    found = tensors.get(name.replace(fused, down)) if fused else None
    if found is None or len(found.shape) != 3:
        return None
    (rows, columns), (outputs, inputs) = shape, found.shape[1:]
    if outputs == columns and 2 * inputs == rows:
        return FusedLayout(0, 1, (("gate", rows // 2), ("up", rows // 2)))
    if inputs == rows and 2 * outputs == columns:
        if config.get("model_type") in _ALTERNATING_EXPERTS:
            return FusedLayout(1, columns // 2, (("gate", 1), ("up", 1)))
        return FusedLayout(1, 1, (("gate", columns // 2), ("up", columns // 2)))
    return None
