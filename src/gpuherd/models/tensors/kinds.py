"""What a stored tensor is, by its name, shape and format: a weight matrix, experts, a convolution, an embedding, or
nothing to analyse; and the tensor that a module's name means. Pure: headers and config in; how tensors are taken
apart is ``fused``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from gpuherd.models.tensors.fused import EXPERTS_APART, MAX_EXPERTS, holds_experts, holds_stacked_experts, is_fused
from gpuherd.models.tensors.source import READABLE, TensorInfo

Kind = Literal["linear", "expert", "conv", "embedding", "other"]

# How the reasons begin of what is counted in another tensor, or is no weight at all.
TIED = "tied to "
SCALES = "scales or codes of "
BUFFER = "a buffer, no weight: "
NOT_COUNTED = (TIED, SCALES, BUFFER)

_INPUT_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|tokens_embed|word_embedding|"
    r"embeddings|input_embeddings?|token_embd|transformer\.w)\.weight"
)
# A patch_embedding is a projection of pixels.
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:[\w-]*embed_tokens|embed_\w+_tokens|wte|wpe|embed_in|shared|tokens_embed|positions_embed|"
    r"embed_positions|(?:pos|level)_embed|(?!patch_)[\w-]*embeddings?|relative_attention_bias|"
    r"token_embd|position_embd|token_types|per_layer_token_embd|transformer\.w|emb|embeddings\.\w+_embed)\.weight"
)
_HEAD = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|output_layer|output|predictions\.decoder|lm_head\.decoder|generator_lm_head)\.weight"
)
# Matrices whose names don't end in .weight: those of torch.nn.MultiheadAttention, and of its RNN, LSTM and GRU, whose
# gates lie below each other (hr: the projection of an LSTM's output). Fused ones are known to ``fused``.
_BARE_MATRIX = re.compile(r"(?:.*\.)?(?:[qkv]_proj_weight|weight_(?:[ih]h|hr)(?:_l\d+(?:_reverse)?)?)")
# torch.nn.utils.weight_norm keeps a weight as its direction and its length, under old and new names.
_WEIGHT_NORM = re.compile(r"(?:.*\.)?(?:weight_[gv]|parametrizations\.\w+\.original[01])")
# Numbers that a checkpoint keeps next to its weights and no optimiser changes, by the end of the name.
_BUFFERS = tuple(
    (re.compile(rf"(?:.*\.)?(?:{names})"), what)
    for names, what in (
        (r"running_mean|running_var|cluster_size|embed_avg", "running statistics"),
        (r"(?:\w+_)?inv_freq|cos_cached|sin_cached|freqs_cis|rope_freqs\.weight|rope_factors_(?:long|short)\.weight",
         "rotary frequencies"),
        (r"(?:\w+_)?mask|masked_bias", "a mask"),
        (r"final_logits_bias", "an offset of the output"),
    )
)  # fmt: skip
# More kernel positions than this are no convolution; each is a matrix to us.
MAX_POSITIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Ties:
    """Which tensors are counted in another one.

    Attributes:
        counted_in: for a tensor with the numbers of another: the one where they are counted.
        embeddings: output heads that are the input embedding too, and stand for it, since the file has no other.
    """

    counted_in: Mapping[str, str]
    embeddings: frozenset[str]


def ties_of(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Ties:
    """The tensors that share their storage, and the output heads that the config says are the input embedding.

    Of a storage with several names the first counts that is an embedding, else the first that holds weights by its
    name, else the first.
    """
    groups: dict[str, list[str]] = {}
    for name, info in tensors.items():
        groups.setdefault(info.shares or name, []).append(name)
    counted: dict[str, str] = {}
    for names in groups.values():
        if len(names) > 1:
            owner = min(names, key=lambda name: _RANKS.get(_kind(tensors[name])[0], 1))
            counted |= {name: owner for name in names if name != owner}
    heads = _tied_heads(tensors, config)
    for head, embedding in heads.items():
        owner = head if embedding is None else counted.get(embedding, embedding)
        if owner != head:
            counted[head] = owner
    return Ties(counted, frozenset(head for head, embedding in heads.items() if embedding is None))


# Which kind of name is preferred for a storage; any other kind: 1.
_RANKS: Mapping[Kind, int] = {"embedding": 0, "other": 2}


def _tied_heads(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Mapping[str, str | None]:
    """For each output head that the config says is the input embedding: the embedding's name, None if only the head is
    in the file."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    said = [part.get("tie_word_embeddings") for part in parts]
    if not any(word is True for word in said):
        return {}
    # A config's parts can contradict each other: Qwen3-VL-MoE's as a whole says no, and its text part, by default, yes.
    # What stands twice in the file is then taken as two.
    denied = any(word is False for word in said)
    inputs = {info.shape: name for name, info in tensors.items() if _INPUT_EMBEDDING.fullmatch(name)}
    heads = {name: inputs.get(info.shape) for name, info in tensors.items() if _HEAD.fullmatch(name)}
    if not inputs:
        return heads if len(heads) == 1 else {}  # several are the outputs of layers
    return {} if denied else {head: embedding for head, embedding in heads.items() if embedding is not None}


def adapter_factor(names: Iterable[str]) -> str | None:
    """The first name of a factor of a LoRA adapter that is not merged, None where there is none."""
    return next((name for name in names if ".lora_A." in name or ".lora_embedding_A" in name), None)


def is_input_embedding(name: str) -> bool:
    """Whether this is the name of the matrix that turns token ids into vectors."""
    return _INPUT_EMBEDDING.fullmatch(name) is not None


def buffer_of(info: TensorInfo) -> str | None:
    """Why a tensor of floating-point numbers holds no weights, None if it does, or if nothing tells.

    By its name; by its shape only the causal masks of GPT-2 and its kin, which are called ``attn.bias``.
    """
    what = next((what for names, what in _BUFFERS if names.fullmatch(info.name)), None)
    if what is None and info.name.endswith(".bias") and len(info.shape) == 4:
        square = info.shape[:2] == (1, 1) and info.shape[2] == info.shape[3]
        what = "a mask" if square else None
    return None if what is None else f"{BUFFER}{what}"


def classify(info: TensorInfo, ties: Ties, embeddings: bool) -> tuple[Kind, str | None]:
    """What a tensor of two or more axes is, and why it is not analysed (None if it is)."""
    if info.name in ties.counted_in:
        return "other", f"{TIED}{ties.counted_in[info.name]}, counted there"
    kind, reason = _kind(info)
    if kind == "linear" and info.name in ties.embeddings:
        kind = "embedding"
    return kind, "embedding (use --embeddings)" if kind == "embedding" and not embeddings else reason


def _kind(info: TensorInfo) -> tuple[Kind, str | None]:
    """The same by the tensor alone; for an embedding without a reason."""
    name, axes = info.name, len(info.shape)
    if info.dtype not in READABLE and not info.dequantized:
        return "other", f"stored as {info.dtype}, no weights"
    if 0 in info.shape:
        return "other", "empty"
    buffer = buffer_of(info)
    if buffer is not None:
        return "other", buffer
    if name.endswith("bias"):
        return "other", "a bias"
    if _WEIGHT_NORM.fullmatch(name):
        return "other", "the direction or the length of a weight (weight norm), no matrix as it stands"
    if axes == 2 and _EMBEDDING.fullmatch(name):
        return "embedding", None
    if holds_experts(name) and axes == 3:
        return ("expert", None) if info.shape[0] <= MAX_EXPERTS else ("other", f"{info.shape[0]} experts, too many")
    if holds_stacked_experts(name):
        return "expert", None
    if axes == 2 and (name.endswith(".weight") or name == "weight" or _BARE_MATRIX.fullmatch(name) or is_fused(name)):
        return "linear", None
    if axes in (3, 4, 5) and name.endswith("weight"):
        positions = math.prod(info.shape[2:])
        return ("conv", None) if positions <= MAX_POSITIONS else ("other", f"{positions} kernel positions, too many")
    return "other", "a parameter or buffer that no rule knows as a weight matrix"


# ---- the base model's tensor for a module that an adapter names. Pure: names in, names out --------------------------
#
# An adapter names modules as the model's tree has them, a checkpoint tensors as they were saved, and the two may
# differ by leading parts: ``transformer.h.0.attn.c_attn`` and ``h.0.attn.c_attn.weight``.

# model_type of architectures whose blocks are made of transformers' Conv1D, which stores the transpose.
_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "ctrl"})
_CONV1D_MODULES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")


class BaseNames:
    """The tensor names of a base model, to be looked up by an adapter's names."""

    def __init__(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._config = config
        self._by_tail: dict[str, list[str]] = {}
        for name in tensors:
            self._by_tail.setdefault(".".join(name.split(".")[-2:]), []).append(name)

    def tensor(self, name: str) -> str | None:
        """The base tensor of this name: exactly so, else without leading parts, else the only one that has more."""
        parts = name.split(".")
        for first in range(len(parts) - 1):
            shorter = ".".join(parts[first:])
            if shorter in self._tensors:
                return shorter
        longer = [other for other in self._by_tail.get(".".join(parts[-2:]), ()) if other.endswith(f".{name}")]
        return longer[0] if len(longer) == 1 else None

    def weight(self, module: str) -> str | None:
        """The weight of a module. The head of a tied model is its input embedding, whether or not the file has both."""
        name = self.tensor(f"{module}.weight")
        if not self.is_head(f"{module}.weight"):
            return name
        if name is None:
            # Another name for the head (transformers 5 renames GPT-NeoX's), else the embedding that it is tied to.
            for endings in (_HEADS, _EMBEDDINGS):
                found = [name for name in self._tensors if name.endswith(endings)]
                if found:
                    return found[0] if len(found) == 1 else None
            return None
        return ties_of(self._tensors, self._config).counted_in.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a base tensor."""
        return self._tensors[name].shape

    def is_head(self, name: str) -> bool:
        """Whether this is the name of an output head's weight."""
        return name.endswith(_HEADS)

    def parameters(self, module: str, targets: Iterable[str]) -> list[str]:
        """The base tensors of a module that are parameters without ``.weight`` and that the adapter may mean."""
        found = []
        for target in targets:
            _, _, parameter = target.rpartition(".")
            name = self.tensor(f"{module}.{parameter}")
            if name is not None and f"{module}.{parameter}".endswith(target):
                found.append(name)
        return found

    def experts_apart(self, module: str, targets: Iterable[str]) -> list[list[list[str]]]:
        """The matrices of a module's experts where each is a tensor of its own, though the adapter means them fused.

        For each parameter that the adapter may mean, for each expert, the names of what is fused in it, in order.
        """
        found = []
        for parameter, stored in EXPERTS_APART.items():
            if not any(f"{module}.{parameter}".endswith(target) for target in targets):
                continue
            for before, after, parts in stored:
                experts = list(self._one_after_the_other(module.replace(before, after), parts))
                if experts:
                    found.append(experts)
                    break
        return found

    def _one_after_the_other(self, module: str, parts: Iterable[str]) -> Iterator[list[str]]:
        for expert in count():
            names = [self.tensor(f"{module}.{expert}.{part}.weight") for part in parts]
            if None in names:
                return
            yield [name for name in names if name is not None]

    def stores_transpose(self, module: str, configured: bool) -> bool:
        """Whether a module's weight is stored (in, out).

        By architecture where that is known, since PEFT's own flag ``fan_in_fan_out`` is one for the whole adapter.
        """
        if str(self._config.get("model_type")) in _CONV1D_TYPES:
            return module.rpartition(".")[2] in _CONV1D_MODULES
        return configured
