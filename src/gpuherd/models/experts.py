"""Experts of a mixture that share one tensor: which tensors hold them, how many, and what each is called. Pure.

Two forms are known: a 3-D tensor of one matrix an expert (transformers 5, GGUF), and matrices below each other in a
2-D tensor (DBRX). How gate and up projections lie within one expert is ``fused.expert_layout``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpuherd.models.fused import Shape
from gpuherd.models.source import TensorInfo

# More than this in one tensor are no mixture; each is a matrix to us.
MAX_EXPERTS = 1 << 16
# Below an expert's number stands what belongs to it alone: a convolution, if it has three axes.
_EXPERTS = re.compile(
    r"(?!.*experts\.\d+\.)(?:.*\.)?"
    r"(?:(?:(?:shared_)?experts|moe|block_sparse_moe)\.(?:.*\.)?[^.]+|(?:input|output)_linear\.weight)"
)
_GGUF = re.compile(r"(?P<stem>(?:.*\.)?ffn_(?:gate_up|gate|up|down))_(?:ch)?exps(?:\.weight)?")
_STACKED = re.compile(r"(?:.*\.)?experts\.mlp\.(?:w1|v1|w2)")
# The tensor of an expert's gate and up projections, and that of its down projection.
_DOWN_OF = (
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("ffn_gate_up_", "ffn_down_"),
    ("experts.fc1", "experts.fc2"),
)


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


def down_shape(name: str, tensors: Mapping[str, TensorInfo]) -> Shape | None:
    """The shape of one expert's down projection, for a fused gate and up projection; None if there is none."""
    for fused, down_name in _DOWN_OF:
        down = tensors.get(name.replace(fused, down_name)) if fused in name else None
        if down is not None and len(down.shape) == 3:
            return down.shape[1], down.shape[2]
    return None


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
