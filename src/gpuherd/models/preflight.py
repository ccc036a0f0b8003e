"""Looks a model over before any GPU is taken: is it there, whole, and of a kind that can be analysed?

Reads headers and configs only, so that it takes milliseconds even for a model of a terabyte. For a Hugging Face id it
checks the form of the id and nothing more: the job downloads the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpuherd.errors import BadModel
from gpuherd.models.adapter import adapter_base, check_adapter, is_adapter, merge
from gpuherd.models.checkpoint import open_checkpoint
from gpuherd.models.matrices import matrices
from gpuherd.models.names import ModelRef, parse_model, shown
from gpuherd.models.source import TensorSource

ADAPTER_RELATIONS = frozenset({"adapter", "lora", "peft", "qlora"})


@dataclass(frozen=True, slots=True)
class Preflight:
    """What the headers tell.

    Attributes:
        kind: ``model``, or ``adapter`` to be merged into ``base``.
        where: ``hub`` (nothing else is known then) or ``local``.
        base: the base model of an adapter, as the list or its own config names it; None for a model.
        total_bytes: all weights as stored, with the base's for an adapter; None when unknown.
        largest_matrix_bytes: the largest matrix to analyse, as float64; None when unknown.
        largest_side: the largest min(rows, columns) of these matrices: the size of its Gram matrix; None when unknown.
        num_matrices: matrices to analyse; None when unknown.
    """

    kind: Literal["model", "adapter"]
    where: Literal["hub", "local"]
    base: str | None = None
    total_bytes: int | None = None
    largest_matrix_bytes: int | None = None
    largest_side: int | None = None
    num_matrices: int | None = None


def examine(model: str, *, base: str | None = None, relation: str | None = None, embeddings: bool = False) -> Preflight:
    """The facts of a model, or of an adapter with its base.

    ``base`` is the list's ``source_model``, ``relation`` its ``base_model_relation``; ``embeddings`` counts embedding
    matrices in. Raises BadModel or MissingModel with a one-line reason.
    """
    ref = parse_model(model)
    wanted = (relation or "").strip().lower() in ADAPTER_RELATIONS
    if ref.path is None:
        if wanted and base:
            parse_model(base)
        return Preflight("adapter" if wanted else "model", "hub", base=(base or None) if wanted else None)
    if is_adapter(ref.path):
        return _examine_adapter(ref, ref.path, base, embeddings)
    if wanted:
        raise BadModel(
            f"model {shown(model)} is listed as {relation}, but has no adapter_config.json; "
            "a whole model has the relation finetune or none"
        )
    return _facts("model", ref, open_checkpoint(ref.path), None, embeddings)


def _examine_adapter(ref: ModelRef, path: Path, base: str | None, embeddings: bool) -> Preflight:
    named = base or adapter_base(path)
    if not named:
        raise BadModel(
            f"adapter {shown(ref.text)} has no base model: neither the list nor its adapter_config.json names one"
        )
    check_adapter(path)
    try:
        base_ref = parse_model(named)
        if base_ref.path is None:
            return Preflight("adapter", "local", base=named)
        if is_adapter(base_ref.path):
            raise BadModel("it is itself an adapter; merge that one first")
        return _facts("adapter", ref, merge(open_checkpoint(base_ref.path), path), named, embeddings)
    except BadModel as problem:
        raise type(problem)(f"adapter {shown(ref.text)}, base {shown(named)}: {problem}") from None


def _facts(
    kind: Literal["model", "adapter"], ref: ModelRef, source: TensorSource, base: str | None, embeddings: bool
) -> Preflight:
    found = list(matrices(source, embeddings=embeddings))
    analysed = [matrix for matrix in found if matrix.skip is None]
    if not analysed:
        first = f"; {found[0].longname} is not analysed: {found[0].skip}" if found else ""
        raise BadModel(f"model {shown(ref.text)} has no weight matrix to analyse{first}")
    return Preflight(
        kind,
        "local",
        base=base,
        total_bytes=sum(info.nbytes for info in source.tensors.values() if info.shares is None),
        largest_matrix_bytes=max(8 * matrix.params for matrix in analysed),
        largest_side=max(min(matrix.shape) for matrix in analysed),
        num_matrices=len(analysed),
    )
