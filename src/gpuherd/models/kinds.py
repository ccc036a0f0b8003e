"""What a stored tensor is, by its name, shape and format: a weight matrix, experts, a convolution, an embedding, or
nothing to analyse. Pure: headers and config in; how tensors are taken apart is ``fused`` and ``experts``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from gpuherd.models.dtypes import READABLE
from gpuherd.models.experts import MAX_EXPERTS, holds_experts, holds_stacked_experts
from gpuherd.models.source import TensorInfo

Kind = Literal["linear", "expert", "conv", "embedding", "other"]

# How the reasons of what is counted in another tensor begin.
TIED = "tied to "
SCALES = "scales or codes of "

_INPUT_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|tokens_embed|word_embedding|"
    r"token_embd|transformer\.w)\.weight"
)
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:[\w-]*embed_tokens|wte|wpe|tok_embeddings|embed_in|shared|tokens_embed|positions_embed|"
    r"word_embedding|embed_positions|[\w-]*embeddings?|relative_attention_bias|"
    r"token_embd|position_embd|token_types|per_layer_token_embd|transformer\.w)\.weight"
)
_HEAD = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|output_layer|output|predictions\.decoder|lm_head\.decoder|generator_lm_head)\.weight"
)
# Matrices whose names don't end in .weight: those of torch.nn.MultiheadAttention, and of its RNN, LSTM and GRU, whose
# gates lie below each other.
_BARE_MATRIX = re.compile(r"(?:.*\.)?(?:in_proj_weight|[qkv]_proj_weight|weight_[ih]h(?:_l\d+(?:_reverse)?)?)")
# torch.nn.utils.weight_norm keeps a weight as its direction and its length, under old and new names.
_WEIGHT_NORM = re.compile(r"(?:.*\.)?(?:weight_[gv]|parametrizations\.\w+\.original[01])")
# More kernel positions than this are no convolution; each is a matrix to us.
MAX_POSITIONS = 1 << 16


def tied_heads(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Mapping[str, str | None]:
    """For each output head that the config says is the input embedding: the embedding's name, None if only the head is
    in the file (it then is the embedding)."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    if not any(part.get("tie_word_embeddings") is True for part in parts):
        return {}
    inputs = {info.shape: name for name, info in tensors.items() if _INPUT_EMBEDDING.fullmatch(name)}
    return {
        name: inputs.get(info.shape)
        for name, info in tensors.items()
        if _HEAD.fullmatch(name) and (info.shape in inputs or not inputs)
    }


def classify(info: TensorInfo, tied: Mapping[str, str | None], embeddings: bool) -> tuple[Kind, str | None]:
    """What a tensor of two or more axes is, and why it is not analysed (None if it is)."""
    name, axes = info.name, len(info.shape)
    same_as = tied.get(name) or info.shares
    if same_as is not None and tied.get(same_as) == name:
        same_as = None  # a head that comes first in the file is counted as the embedding, not the other way about
    if same_as:
        return "other", f"{TIED}{same_as}, counted there"
    if info.dtype not in READABLE and not info.decoded:
        return "other", f"stored as {info.dtype}, no weights"
    if 0 in info.shape:
        return "other", "empty"
    if name.endswith("bias"):
        return "other", "a bias"
    if _WEIGHT_NORM.fullmatch(name):
        return "other", "the direction or the length of a weight (weight norm), no matrix as it stands"
    if axes == 2 and (_EMBEDDING.fullmatch(name) or name in tied):
        return "embedding", None if embeddings else "embedding (use --embeddings)"
    if holds_experts(name) and axes == 3:
        return ("expert", None) if info.shape[0] <= MAX_EXPERTS else ("other", f"{info.shape[0]} experts, too many")
    if holds_stacked_experts(name):
        return "expert", None
    if axes == 2 and (name.endswith(".weight") or name == "weight" or _BARE_MATRIX.fullmatch(name)):
        return "linear", None
    if axes in (3, 4, 5) and name.endswith("weight"):
        positions = math.prod(info.shape[2:])
        return ("conv", None) if positions <= MAX_POSITIONS else ("other", f"{positions} kernel positions, too many")
    return "other", "a parameter or buffer that no rule knows as a weight matrix"
