"""What of a model is analysed: its weights, an adapter's update, or the weights minus those of the base.

Knows which of these there is for which model, and says so before anything is read but headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpuherd.errors import BadModel
from gpuherd.models.adapter import adapter_base, is_adapter, merge
from gpuherd.models.checkpoint import open_checkpoint
from gpuherd.models.kinds import NOT_COUNTED, buffer_of
from gpuherd.models.lora import MatrixEdit
from gpuherd.models.lora_experts import ExpertEdit, OneExpertEdit
from gpuherd.models.matrices import WeightMatrix, matrices
from gpuherd.models.source import TensorInfo, TensorSource
from gpuherd.models.update import AdapterUpdate, adapter_update, difference, update_matrices

SpectraOf = Literal["weights", "ba", "delta"]

# Masks, position ids and the like: no weights.
NOT_WEIGHTS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64"})


@dataclass(frozen=True, slots=True)
class Subject:
    """The tensors to analyse, as they come, and the matrices in them (with the reasons of those that are not).

    ``base``: what a whole model is compared with, else None. (An adapter's base is a part of ``source``.)
    """

    source: TensorSource
    matrices: list[WeightMatrix]
    base: TensorSource | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank r of each tensor whose update is taken as s B A; empty where nothing is."""
        low_rank = self.source.low_rank if isinstance(self.source, AdapterUpdate) else {}
        known = MatrixEdit | ExpertEdit | OneExpertEdit
        return tuple(edit.factors.rank for edit in low_rank.values() if isinstance(edit, known))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored, each storage once; the base's too where weights are compared with it."""
        sources = (self.source,) if self.base is None else (self.source, self.base)
        return sum(info.nbytes for source in sources for info in source.tensors.values() if info.shares is None)


def told_ranks(ranks: Sequence[int]) -> str:
    """The ranks of an adapter's modules in a few words: ``rank 8``, or ``ranks 4 to 16``."""
    least, most = min(ranks), max(ranks)
    return f"rank {least}" if least == most else f"ranks {least} to {most}"


def why_not(spectra_of: SpectraOf, *, adapter: bool, base: str | Path | None) -> str | None:
    """Why there are no such spectra of a model, None if there are."""
    if adapter and base is None:
        return "this is an adapter that names no base model: give it as source_model in the list, or by --base-model"
    if spectra_of == "ba" and not adapter:
        return "only an adapter has a BA, and this is a whole model; --spectra-of delta compares it with its base"
    if spectra_of == "delta" and base is None:
        return "there is no base to compare it with: give it as source_model in the list, or by --base-model"
    return None


def base_of(path: Path, given: str | None, spectra_of: SpectraOf) -> str | None:
    """The name of the base that is wanted to analyse a model: the one ``given``, else that of an adapter's own config.

    None where a whole model is analysed by itself, whatever it comes from, and where nobody names a base.
    """
    if is_adapter(path):
        return given or adapter_base(path)
    return (given or None) if spectra_of == "delta" else None


def open_subject(
    path: Path, base: Path | None, spectra_of: SpectraOf = "weights", *, embeddings: bool = False
) -> Subject:
    """Opens a model, and its base where that is needed. Reads headers only.

    Args:
        path: a whole model, or an adapter.
        base: needed for an adapter, and for ``delta``.
        spectra_of: what is analysed.
        embeddings: analyse embedding matrices too.

    Raises:
        BadModel, MissingModel: the model or its base can't be used, they don't belong together, or there are no such
            spectra of this model.
    """
    adapter = is_adapter(path)
    reason = why_not(spectra_of, adapter=adapter, base=base)
    if reason is not None:
        raise BadModel(reason)
    if base is None or (not adapter and spectra_of == "weights"):
        source = open_checkpoint(path)
        return Subject(source, list(matrices(source, embeddings=embeddings)))
    if is_adapter(base):
        raise BadModel("the base is itself an adapter; merge that one first")
    old = open_checkpoint(base)
    if not adapter:
        delta = difference(open_checkpoint(path), old)
        return Subject(delta, list(update_matrices(delta, embeddings=embeddings)), old)
    merged = merge(old, path)
    if spectra_of == "weights":
        return Subject(merged, list(matrices(merged, embeddings=embeddings)))
    update = adapter_update(merged, ba=spectra_of == "ba")
    return Subject(update, list(update_matrices(update, embeddings=embeddings)))


def count_weights(tensors: Mapping[str, TensorInfo], found: Iterable[WeightMatrix]) -> int:
    """How many weights the tensors hold: all numbers but integers and buffers, each storage once."""
    # Of a tied pair in one storage the embedding is counted, and that need not be the one that owns the storage.
    elsewhere = {name: info.shares is not None or buffer_of(info) is not None for name, info in tensors.items()}
    elsewhere |= {matrix.tensor: (matrix.skip or "").startswith(NOT_COUNTED) for matrix in found}
    return sum(
        math.prod(info.shape)
        for name, info in tensors.items()
        if not elsewhere[name] and info.scales_of is None and info.dtype not in NOT_WEIGHTS
    )


def count_analysed(found: Sequence[WeightMatrix]) -> int:
    """How many weights the matrices hold that are analysed."""
    return sum(matrix.params for matrix in found if matrix.skip is None)
