"""Finds the base model's tensor for a module that an adapter names. Pure: names in, names out.

An adapter names modules as the model's tree has them, a checkpoint tensors as they were saved, and the two may differ
by leading parts: ``transformer.h.0.attn.c_attn`` and ``h.0.attn.c_attn.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from gpuherd.models.tensors.kinds import ties_of
from gpuherd.models.tensors.source import TensorInfo

# model_type of architectures whose blocks are made of transformers' Conv1D, which stores the transpose.
_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "ctrl"})
_CONV1D_MODULES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
# Parameters that transformers makes of the experts of a checkpoint: what the module is called there, and the matrices
# that lie below each other in them.
_FUSED_EXPERTS = {
    "gate_up_proj": (
        ("", "", ("gate_proj", "up_proj")),
        ("mlp.experts", "block_sparse_moe.experts", ("w1", "w3")),
    ),
    "down_proj": (("", "", ("down_proj",)), ("mlp.experts", "block_sparse_moe.experts", ("w2",))),
}


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
        for parameter, stored in _FUSED_EXPERTS.items():
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
