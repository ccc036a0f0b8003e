"""A model with a LoRA adapter beside it, unmerged, as PEFT loads it: the base's tensors and the adapter's own.

Each of the adapter's tensors must find its place in the base; ``gpuherd.models.lora.adapter`` decides that, as it does
where adapters are merged. PEFT keeps the factors in float32 whatever they are stored in, and a module that the adapter
holds whole beside the base's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpuherd.models.plan.architecture import Architecture, Block, Tensor
from gpuherd.models.tensors.source import TensorInfo

if TYPE_CHECKING:
    from gpuherd.models.lora.update import Merged


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The tensors of an architecture as a source without numbers, for who asks for names and shapes alone."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> NoReturn:
        """Raises ValueError: there are no numbers."""
        raise ValueError(f"{name} has a shape and no numbers")

    def read_part(self, name: str, start: int, stop: int) -> NoReturn:
        """Raises ValueError: there are no numbers."""
        raise ValueError(f"{name}[{start}:{stop}] has a shape and no numbers")


def with_adapter(architecture: Architecture, adapter: Path) -> Architecture:
    """The architecture with an adapter's factors in the blocks of the modules that they change.

    Args:
        architecture: of the adapter's base model.
        adapter: the adapter's folder.

    Raises:
        BadModel, MissingModel: it is no LoRA adapter, it is damaged, or it is of another base: the module is named.
    """
    from gpuherd.models.checkpoints.open import ADAPTER_CONFIG, read_json
    from gpuherd.models.lora.adapter import merge

    infos = {
        tensor.name: TensorInfo(tensor.name, tensor.shape, "BF16", 2 * tensor.numel)
        for tensor in architecture.tensors()
        if tensor.tied_to is None and not tensor.buffer
    }
    merged = merge(_Shapes({"model_type": architecture.model_type}, infos), adapter)
    copied = tuple(read_json(adapter / ADAPTER_CONFIG).get("modules_to_save") or ())
    added = [*_factors(merged), *_copies(merged, copied)]
    blocks = tuple(
        _with(_resized(block, merged, copied), [part for part in added if _belongs(part, block)])
        for block in architecture.blocks
    )
    homeless = [part for part in added if not any(_belongs(part, block) for block in architecture.blocks)]
    if homeless:
        blocks = (*blocks, *(Block(part.name, "head", (part,)) for part in homeless))
    told = "The adapter lies beside its base, unmerged; its factors are kept in float32, as PEFT does."
    return replace(architecture, blocks=blocks, assumptions=(*architecture.assumptions, told))


def _factors(merged: Merged) -> Iterator[Tensor]:
    """The adapter's factors, by the modules that they change."""
    from gpuherd.models.lora.edits import ExpertEdit, MatrixEdit

    for name, edit in merged.edits.items():
        if not isinstance(edit, MatrixEdit | ExpertEdit):
            continue
        module = name.removesuffix(".weight")
        parts = {"lora_A": edit.factors.a, "lora_B": edit.factors.b, "lora_magnitude_vector": edit.factors.magnitude}
        for part, stored in parts.items():
            if stored is not None:
                yield Tensor(f"{module}.{part}.weight", stored.info.shape, keeps_fp32=True)


def _copies(merged: Merged, copied: Sequence[str]) -> Iterator[Tensor]:
    """The modules that the adapter has beside the base's own."""
    for name, stored in merged.replaced.items():
        module, _, last = name.rpartition(".")
        if _is_one(module, copied):
            yield Tensor(f"{module}.modules_to_save.{last}", stored.info.shape)


def _resized(block: Block, merged: Merged, copied: Sequence[str]) -> Block:
    """The block with the tensors that the adapter puts in the place of the base's: a vocabulary may have grown."""
    shapes = {
        name: stored.info.shape
        for name, stored in merged.replaced.items()
        if not _is_one(name.rpartition(".")[0], copied)
    }
    if not any(tensor.name in shapes for tensor in block.tensors):
        return block
    tensors = (replace(tensor, shape=shapes.get(tensor.name, tensor.shape)) for tensor in block.tensors)
    return replace(block, tensors=tuple(tensors))


def _is_one(module: str, names: Sequence[str]) -> bool:
    """Whether a module is named, by the end of its path."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _belongs(part: Tensor, block: Block) -> bool:
    return part.name.startswith(f"{block.name}.")


def _with(block: Block, parts: Sequence[Tensor]) -> Block:
    return replace(block, tensors=(*block.tensors, *parts)) if parts else block
