"""Finds for each tensor of the loaded model the tensors of a checkpoint that it is made of. Pure.

Checkpoints differ from the loaded model by wrapping modules (``transformer.h.0...`` and ``h.0...``), by names of older
releases, and by experts that are stored one by one and loaded as one tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpuherd.models.tensors.source import TensorInfo

# Modules around a model's own, which a checkpoint may have or not.
_WRAPPERS = frozenset(
    {"model", "transformer", "language_model", "gpt_neox", "backbone", "bert", "roberta", "distilbert", "vision_model"}
)
# Older names -> names in the loaded model, in this order.
_RENAMED: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^embed_out\.", "lm_head."),
        (r"^embedding\.weight$", "embeddings.weight"),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.router\.layer\.weight$", ".router.weight"),
    )
]
_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
_GATE_UP = frozenset({"gate_proj", "up_proj", "w1", "w3"})
_DOWN = frozenset({"down_proj", "w2"})
# Where a module of the loaded model has another name than the one it is stored under: loaded -> stored.
_ELSEWHERE = ((".mlp.", ".block_sparse_moe."), (".mlp.router.", ".block_sparse_moe.gate."))


class Stored:
    """A checkpoint's tensors, to be looked up by the names of the loaded model."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._by_name: dict[str, TensorInfo] = {}
        self._experts: dict[str, list[TensorInfo]] = defaultdict(list)
        self._scales: dict[str, list[TensorInfo]] = defaultdict(list)
        for name, info in tensors.items():
            if info.scales_of is not None:
                self._scales[info.scales_of].append(info)
                continue
            plain = _plain(name)
            self._by_name.setdefault(plain, info)
            match = _EXPERT.fullmatch(plain)
            if match is not None:
                self._experts[match["module"]].append(info)

    def of(self, name: str) -> Sequence[TensorInfo]:
        """The tensors that are loaded into this one: one, or those of all experts; none if there are none."""
        for candidate in _names(_plain(name)):
            if candidate in self._by_name:
                return [self._by_name[candidate]]
            module, _, last = candidate.rpartition(".")
            wanted = {"gate_up_proj": _GATE_UP, "down_proj": _DOWN}.get(last)
            if wanted is not None and module in self._experts:
                return [info for info in self._experts[module] if info.name.split(".")[-2] in wanted]
        return []

    def scales_of(self, info: TensorInfo) -> Sequence[TensorInfo]:
        """The scales, zeros and tables that belong to a tensor of codes."""
        return self._scales.get(info.name, [])


def _plain(name: str) -> str:
    """A name without wrapping modules, as newer releases have it."""
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    for pattern, replacement in _RENAMED:
        plain = pattern.sub(replacement, plain)
    return plain


def _names(plain: str) -> Sequence[str]:
    """The names that a tensor may be stored under."""
    return [plain, *(plain.replace(loaded, stored) for loaded, stored in reversed(_ELSEWHERE) if loaded in plain)]
