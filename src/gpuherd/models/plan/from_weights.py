"""A model's architecture from the headers of its weights, checked against its config. Pure.

Where the family is known, the order of blocks, roles and caches are its own, and each tensor must be in the checkpoint
with the shape that the config asks for. Where it isn't, ``from_headers`` takes what the names tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.quantized import method_of
from gpuherd.models.names import shown
from gpuherd.models.plan import from_config, from_headers
from gpuherd.models.plan.architecture import Architecture, Block, Tensor
from gpuherd.models.plan.matching import Stored
from gpuherd.models.plan.precision import Precision
from gpuherd.models.tensors.source import TensorInfo

_PRECISIONS = {"F32": "fp32", "F64": "fp32", "F16": "fp16", "BF16": "bf16"}
# Tables and codes of so little that only what is left over and above it is worth a sentence.
_LEFT_OVER = 0.01


def architecture_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    model: str,
    described: Architecture | None = None,
) -> Architecture:
    """The architecture of a checkpoint.

    Args:
        config: its config.json, empty if there is none.
        tensors: what its headers list (``Checkpoint.tensors``).
        model: how the user named it, for messages.
        described: what transformers builds of the config, where no formula knows the family.

    Raises:
        BadModel: a tensor has another shape than the config asks for, tensors are missing, or what the plan needs can
            be told from neither.
    """
    if from_config.is_known(config):
        return _checked(from_config.architecture_of(config, model), config, tensors, model)
    if described is None:
        return from_headers.architecture_of(config, tensors, model)
    try:
        return _checked(described, config, tensors, model)
    except BadModel:
        # transformers renames some models' tensors while it loads them: as many numbers are the same model.
        held = sum(prod(info.shape) for info in tensors.values() if info.scales_of is None and info.shares is None)
        quantised = any(info.decoded for info in tensors.values())
        if quantised or abs(held - described.parameters) > _LEFT_OVER * described.parameters:
            return from_headers.architecture_of(config, tensors, model)
    told = "Its weights have other names than transformers' modules: their shapes are taken from the config."
    return replace(
        described,
        stored=stored_precision(tensors) or described.stored,
        assumptions=(*described.assumptions, told),
    )


def _checked(
    formula: Architecture, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str
) -> Architecture:
    """What the config says, held against the headers. Raises BadModel where they disagree."""
    stored = Stored(tensors)
    used: set[str] = set()
    blocks = [_found(block, stored, used, formula, model) for block in formula.blocks]
    kept = tuple(block for block in blocks if block is not None)
    assumptions = [*from_config.assumptions_of(config), *from_config.images_of(kept)]
    if len(kept) < len(blocks):
        absent = [block for block, found in zip(formula.blocks, blocks, strict=True) if found is None]
        what = "output head" if absent[0].kind == "head" else absent[0].name
        assumptions.append(f"The weights hold no {what}: planned without one.")
    quantised = Counter(info.dtype for info in tensors.values() if info.decoded)
    if quantised:
        assumptions.append(f"Stored quantised ({', '.join(quantised)}): as-stored is the size of its codes and scales.")
    assumptions += _left_over(tensors, used)
    return replace(
        formula,
        blocks=kept,
        stored_method=method_of(config) if quantised else None,
        stored=Precision.AS_STORED.value if quantised else stored_precision(tensors) or formula.stored,
        source="weights",
        assumptions=tuple(assumptions),
    )


def stored_precision(tensors: Mapping[str, TensorInfo]) -> str | None:
    """The precision that most bytes are stored in; None where it is none that weights lie in."""
    counted: Counter[str] = Counter()
    for info in tensors.values():
        counted[info.dtype] += info.nbytes
    most = counted.most_common(1)
    return _PRECISIONS.get(most[0][0]) if most else None


def _found(block: Block, stored: Stored, used: set[str], formula: Architecture, model: str) -> Block | None:
    """The block with the sizes that the checkpoint stores; None for a head or pooler that it hasn't."""
    tensors = []
    for tensor in block.tensors:
        infos = stored.of(tensor.name)
        if not infos:
            if tensor.tied_to is not None or tensor.buffer or stored_elsewhere(tensor, formula, stored):
                tensors.append(tensor)
                continue
            # Encoders that were saved with a head for labels or masked words have no pooler.
            if block.kind == "head" or block.name.rpartition(".")[2] == "pooler":
                return None
            raise BadModel(
                f"{shown(model)}: config and weights disagree: the config ({formula.model_type}) asks for "
                f"{shown(tensor.name)} of shape {tensor.shape}, which the weights don't have"
            )
        _check_shape(tensor, infos, formula, model)
        used.update(info.name for info in infos)
        tensors.append(_as_stored(tensor, infos, stored))
    return replace(block, tensors=tuple(tensors))


def stored_elsewhere(tensor: Tensor, formula: Architecture, stored: Stored) -> bool:
    """Whether only another name of the same storage is in the file, such as the head for the embedding."""
    return any(stored.of(other.name) for other in formula.tensors() if other.tied_to == tensor.name)


def _check_shape(tensor: Tensor, infos: Sequence[TensorInfo], formula: Architecture, model: str) -> None:
    """One tensor of the very shape, or experts that are as many numbers, each of the two last axes."""
    if len(infos) == 1:
        fits = infos[0].shape == tensor.shape or (infos[0].decoded and sorted(infos[0].shape) == sorted(tensor.shape))
    else:
        fits = sum(prod(info.shape) for info in infos) == tensor.numel
    if fits:
        return
    each = infos[0]
    what = shown(each.name) if len(infos) == 1 else f"{shown(each.name)} and {len(infos) - 1} more experts"
    raise BadModel(
        f"{shown(model)}: config and weights disagree: {what} has the shape {each.shape} in the weights; the config "
        f"({formula.model_type}) asks for {tensor.shape}"
    )


def _as_stored(tensor: Tensor, infos: Sequence[TensorInfo], stored: Stored) -> Tensor:
    """The tensor with the bytes of its codes, where it is stored as such."""
    if not any(info.decoded for info in infos):
        return tensor
    parts = [part for info in infos for part in (info, *stored.scales_of(info)) if "quant_state." not in part.name]
    return replace(tensor, stored_bytes=sum(part.nbytes for part in parts))


def _left_over(tensors: Mapping[str, TensorInfo], used: set[str]) -> list[str]:
    """A sentence on what the checkpoint holds and the loaded model does not, if that is much."""
    left = [
        info for info in tensors.values() if info.name not in used and info.scales_of is None and info.shares is None
    ]
    size, whole = sum(info.nbytes for info in left), sum(info.nbytes for info in tensors.values())
    if size <= _LEFT_OVER * whole:
        return []
    return [
        f"{len(left)} tensors of the checkpoint ({size / 1e9:.2f} GB, such as {shown(left[0].name)}) are no part of "
        "the model that is planned."
    ]
