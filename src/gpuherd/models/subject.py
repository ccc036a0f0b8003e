"""Which tensors of a model are analysed (its weights, an adapter's update, or the weights minus those of the base), and
whether they can be: is the model there, whole, and of a kind that can be analysed?

Reads headers and configs only, so that it takes milliseconds even for a model of a terabyte, before any GPU is taken. A
model of the Hub, which its job downloads, is known by its headers where the caller can read them remotely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.checkpoints.quantized import quantised_as
from gpuherd.models.lora.adapter import adapter_base, check_adapter, is_adapter, merge
from gpuherd.models.lora.edits import BiasEdit
from gpuherd.models.lora.update import AdapterUpdate, adapter_update, difference, update_matrices
from gpuherd.models.names import ModelRef, parse_model, quoted
from gpuherd.models.tensors.kinds import NOT_COUNTED, buffer_of
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import HeadersOnly, TensorInfo, TensorSource

if TYPE_CHECKING:
    from gpuherd.models.checkpoints.hub_headers import RemoteModel


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
        return tuple(edit.factors.rank for edit in low_rank.values() if not isinstance(edit, BiasEdit))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored, each storage once; the base's too where weights are compared with it."""
        sources = (self.source,) if self.base is None else (self.source, self.base)
        return sum(info.nbytes for source in sources for info in source.tensors.values() if info.shares is None)


def format_ranks(ranks: Sequence[int]) -> str:
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
    """The name of the base that a model is analysed with: the one ``given``, else that of an adapter's own config.

    None where a whole model is analysed by itself, whatever it comes from, and where no base is named.
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


# ---- before any GPU is taken -----------------------------------------------------------------------------------------

ADAPTER_RELATIONS = frozenset({"adapter", "lora", "peft", "qlora"})


@dataclass(frozen=True, slots=True)
class Preflight:
    """What the headers tell.

    Attributes:
        kind: ``model``, or ``adapter`` of ``base``.
        where: ``hub`` (nothing else is known where its headers can't be had) or ``local``.
        base: the base model of an adapter, as the list or its own config names it; of a model only where it is
            compared with that, else None.
        total_bytes: all weights that are read, as stored: the base's too where it is needed; None when unknown.
        largest_side: the largest min(rows, columns) of these matrices: the size of its Gram matrix; None when unknown.
        num_matrices: matrices to analyse; None when unknown.
        params: all weights, each once; None when unknown.
        params_analysed: weights in the matrices to analyse; None when unknown.
    """

    kind: Literal["model", "adapter"]
    where: Literal["hub", "local"]
    base: str | None = None
    total_bytes: int | None = None
    largest_side: int | None = None
    num_matrices: int | None = None
    params: int | None = None
    params_analysed: int | None = None

    @property
    def share(self) -> float | None:
        """The share of the weights that are to be analysed, None when unknown."""
        return self.params_analysed / self.params if self.params and self.params_analysed is not None else None


# Reads config and headers of a Hub model; None where they are not available.
ReadHub = Callable[[ModelRef], "RemoteModel | None"]
# Picks the matrices to analyse: of all, and the names of all tensors. Raises BadModel where the choice does not fit.
Choice = Callable[[Sequence[WeightMatrix], Iterable[str]], list[WeightMatrix]]


def everything(matrices: Sequence[WeightMatrix], tensors: Iterable[str]) -> list[WeightMatrix]:  # noqa: ARG001
    """The choice that leaves nothing out."""
    return list(matrices)


def unseen(ref: ModelRef) -> RemoteModel | None:  # noqa: ARG001
    """Reads nothing: for callers that may not use the network."""
    return None


def examine(
    model: str,
    *,
    base: str | None = None,
    relation: str | None = None,
    embeddings: bool = False,
    spectra_of: SpectraOf = "weights",
    choose: Choice = everything,
    read_hub: ReadHub = unseen,
) -> Preflight:
    """The facts of a model, or of an adapter with its base.

    Args:
        model: an id or a path.
        base: the list's ``source_model``.
        relation: the list's ``base_model_relation``; None where it says nothing.
        embeddings: count embedding matrices in.
        spectra_of: what is analysed; for ``delta`` the base counts too.
        choose: which matrices are to be analysed.
        read_hub: reads headers of models of the Hub.

    Raises:
        BadModel, MissingModel: with a one-line reason.
    """
    ref = parse_model(model)
    listed_as_adapter = (relation or "").strip().lower() in ADAPTER_RELATIONS
    query = _Query(base or None, spectra_of, embeddings, choose, read_hub)
    if ref.path is None:
        return _examine_hub(ref, query, listed_as_adapter, relation is not None)
    named = base_of(ref.path, query.base, spectra_of)
    if is_adapter(ref.path):
        if not named:
            raise BadModel(
                f"adapter {quoted(model)} has no base model: neither the list nor its adapter_config.json names one"
            )
        check_adapter(ref.path)
        return _facts("adapter", ref, ref.path, named, query)
    if listed_as_adapter:
        raise BadModel(
            f"model {quoted(model)} is listed as {relation}, but has no adapter_config.json; "
            "a whole model has the relation finetune or none"
        )
    reason = why_not(spectra_of, adapter=False, base=query.base)
    if reason is not None:
        raise BadModel(f"model {quoted(model)}: {reason}")
    return _facts("model", ref, ref.path, named, query)


@dataclass(frozen=True, slots=True)
class _Query:
    """What is to be examined of a model."""

    base: str | None
    spectra_of: SpectraOf
    embeddings: bool
    choose: Choice
    read_hub: ReadHub


def _examine_hub(ref: ModelRef, query: _Query, adapter: bool, kind_listed: bool) -> Preflight:
    """Examines a Hub model by the list's columns and its headers. ``kind_listed``: whether the list names its kind."""
    # An adapter of the Hub may name its base in its own config.
    reason = None if adapter else why_not(query.spectra_of, adapter=False, base=query.base)
    if reason is not None and kind_listed:
        raise BadModel(f"model {quoted(ref.text)}: {reason}")
    needed = query.base is not None and (adapter or query.spectra_of == "delta")
    base = parse_model(query.base) if query.base is not None and needed else None
    plain = Preflight("adapter" if adapter else "model", "hub", base=query.base if needed else None)
    if adapter:
        return plain if base is None else replace(plain, largest_side=_side_with(base, query))
    source = _headers(ref, query)
    if source is None or query.spectra_of == "ba":
        return plain
    found = list(matrices(source, embeddings=query.embeddings))
    return replace(_counted("model", ref, plain.base, Subject(source, found), query), where="hub")


def _side_with(base: ModelRef, query: _Query) -> int | None:
    """The largest side of the base's matrices, which an adapter does not change; None where it is unknown."""
    if query.spectra_of == "ba":
        return None
    try:
        source = _headers(base, query) if base.path is None else open_checkpoint(base.path)
        found = [] if source is None else query.choose([*matrices(source, embeddings=query.embeddings)], source.tensors)
    except BadModel:
        return None
    return max((min(matrix.shape) for matrix in found if matrix.skip is None), default=None)


def _headers(ref: ModelRef, query: _Query) -> TensorSource | None:
    """A Hub model's headers, from the Hub or the cache; None where there are none, or the weights are quantised."""
    remote = query.read_hub(ref)
    if remote is not None:
        codes = quantised_as(remote.config, remote.tensors.values()) is not None
        return HeadersOnly(remote.config, remote.tensors) if remote.tensors and not codes else None
    from gpuherd.models.checkpoints.hub import cached_copy

    try:
        folder = cached_copy(ref)
        return None if folder is None else open_checkpoint(folder)
    except (BadModel, OSError, ModuleNotFoundError):
        return None


def _facts(kind: Literal["model", "adapter"], ref: ModelRef, path: Path, base: str | None, query: _Query) -> Preflight:
    try:
        base_path = None if base is None else parse_model(base).path
        if base is not None and base_path is None:
            return Preflight(kind, "local", base=base, largest_side=_side_with(parse_model(base), query))
        subject = open_subject(path, base_path, query.spectra_of, embeddings=query.embeddings)
        return _counted(kind, ref, base, subject, query)
    except BadModel as problem:
        if base is None:
            raise
        raise type(problem)(f"{kind} {quoted(ref.text)}, base {quoted(base)}: {problem}") from None


def _counted(
    kind: Literal["model", "adapter"], ref: ModelRef, base: str | None, subject: Subject, query: _Query
) -> Preflight:
    tensors = subject.source.tensors
    found = query.choose(subject.matrices, tensors)
    analysed = [matrix for matrix in found if matrix.skip is None]
    if not analysed:
        first = f"; {found[0].longname} is not analysed: {found[0].skip}" if found else ""
        raise BadModel(f"model {quoted(ref.text)} has no weight matrix to analyse{first}")
    return Preflight(
        kind,
        "local",
        base=base,
        total_bytes=subject.total_bytes,
        largest_side=max(min(matrix.shape) for matrix in analysed),
        num_matrices=len(analysed),
        params=count_weights(tensors, subject.matrices),
        params_analysed=count_analysed(found),
    )
