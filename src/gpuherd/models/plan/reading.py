"""A model, as the user named it, as an architecture: from its weights' headers, its config, or shipped data.

Knows in which order a name is looked up: what is on this machine first, then known names, then the Hugging Face Hub.
Reads headers and configs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, MissingExtra, MissingModel, naming_extras
from gpuherd.models.describe import described
from gpuherd.models.describe.cache import shipped, with_shipped_peaks
from gpuherd.models.names import ModelRef, parse_model, shown
from gpuherd.models.plan import from_config
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.known import KnownModel, known_model, nearest_names

if TYPE_CHECKING:
    from gpuherd.models.checkpoints.open import Checkpoint
    from gpuherd.models.tensors.source import TensorInfo

# A person waits for a plan: a network that fails is tried again once, not for as long as a download is worth.
_WAITS = (1.0,)
# What files and the Hub are read with; known names and configs want neither.
EXTRAS = {"numpy": "plan", "huggingface_hub": "plan"}
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


def read_architecture(text: str) -> Architecture:
    """The architecture of a model.

    Args:
        text: a folder (config.json, with weights or without), a weight file, a known name in any case
            (``llama-3.1-70b``), or a Hugging Face id. What exists on this machine wins over a known name. A folder that
            is an adapter is planned beside the base that its config names.

    Raises:
        MissingModel: it is not to be had; names of known models that are near are said.
        BadModel: it can't be a model, its architecture is not known, or config and weights disagree.
        MissingExtra: numpy or huggingface_hub is not installed, and this model wants it.
    """
    known = known_model(text)
    if known is not None and not _exists(text):
        return _of_known(known, text)
    ref = parse_model(text)
    with naming_extras(EXTRAS, "plans of model files need"):
        return _from_hub(ref) if ref.path is None else _local(ref.path, text)


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _of_known(known: KnownModel, text: str) -> Architecture:
    found = shipped(known.model_id, known.config, text)
    if found is None:
        found = with_shipped_peaks(from_config.architecture_of(known.config, text))
    return replace(found, source="known")


def _of_fields(config: Mapping[str, Any], text: str) -> Architecture:
    """By a config alone: a family's formulas, or what transformers builds."""
    if from_config.is_known(config) or not from_config.model_type_of(config):
        return with_shipped_peaks(from_config.architecture_of(config, text))
    try:
        return described(config, text)
    except (BadModel, MissingExtra) as problem:
        raise BadModel(f"{from_config.unknown(config, text)}. {problem}") from None


def _of_headers(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], text: str) -> Architecture:
    """By a config and the headers of the weights."""
    from gpuherd.models.plan import from_weights

    if from_config.is_known(config) or not from_config.model_type_of(config):
        return with_shipped_peaks(from_weights.architecture_of(config, tensors, text))
    try:
        built = described(config, text)
    except (BadModel, MissingExtra) as problem:
        found = from_weights.architecture_of(config, tensors, text)
        return replace(found, assumptions=(*found.assumptions, f"{str(problem).rstrip('.')}."))
    return from_weights.architecture_of(config, tensors, text, built)


def _local(path: Path, text: str) -> Architecture:
    """A folder or file of this machine; a folder without weights by its config."""
    from gpuherd.models.plan import from_gguf

    if path.is_dir() and not _has_weights(path):
        return _of_config(path, text)
    from gpuherd.models.checkpoints.open import open_checkpoint
    from gpuherd.models.lora.adapter import is_adapter

    if is_adapter(path):
        return _of_adapter(path, text)
    source = open_checkpoint(path)
    if from_gguf.is_gguf(source.config):
        return with_shipped_peaks(from_gguf.architecture_of(source.config, source.tensors, text))
    return _with_ties_as_they_are(_of_headers(source.config, source.tensors, text), source)


def _with_ties_as_they_are(architecture: Architecture, source: Checkpoint) -> Architecture:
    """What the config says is tied, but the file holds twice with other numbers, is not tied: so transformers has it.

    Only the first rows are compared.
    """
    from gpuherd.models.plan.matching import Stored

    stored = Stored(source.tensors)
    apart = {
        tensor.name
        for tensor in architecture.tensors()
        if tensor.tied_to is not None and _differ(source, stored.of(tensor.name), stored.of(tensor.tied_to))
    }
    if not apart:
        return architecture
    blocks = tuple(
        replace(block, tensors=tuple(replace(t, tied_to=None) if t.name in apart else t for t in block.tensors))
        for block in architecture.blocks
    )
    told = f"The config ties {', '.join(sorted(apart))}, but the weights hold other numbers there: planned as not tied."
    return replace(architecture, blocks=blocks, assumptions=(*architecture.assumptions, told))


def _differ(source: Checkpoint, ones: Sequence[TensorInfo], others: Sequence[TensorInfo]) -> bool:
    """Whether two stored tensors are there, and their first rows are not the same."""
    if len(ones) != 1 or len(others) != 1 or ones[0].name == others[0].name or ones[0].shape != others[0].shape:
        return False
    if ones[0].shares is not None or others[0].shares is not None:
        return False
    return bool((source.read_part(ones[0].name, 0, 1) != source.read_part(others[0].name, 0, 1)).any())


def _of_adapter(path: Path, text: str) -> Architecture:
    """An adapter beside the base that its config names."""
    from gpuherd.models.lora.adapter import adapter_base, is_adapter
    from gpuherd.models.plan.adapters import with_adapter

    folder = path if path.is_dir() else path.parent
    base = adapter_base(path)
    if base is None:
        raise BadModel(f"{shown(text)} is an adapter that names no base model; plan the base, with --adapter {text}")
    ref = parse_model(base)
    if ref.path is not None and is_adapter(ref.path):
        raise BadModel(f"{shown(text)}: its base {shown(base)} is itself an adapter; merge that one first")
    return replace(with_adapter(read_architecture(base), folder), model=text)


def _has_weights(folder: Path) -> bool:
    """Whether there are weights, or an index that promises some."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as problem:
        raise BadModel(f"{shown(str(folder))} can't be listed: {problem.strerror}") from None
    return any(Path(name).suffix.lower() in _WEIGHTS or name.endswith(".index.json") for name in names)


def _of_config(folder: Path, text: str) -> Architecture:
    from gpuherd.models.checkpoints.open import read_json

    config = folder / "config.json"
    if not config.exists():
        raise MissingModel(f"{shown(text)} is no model folder: it has neither a config.json nor weights")
    return _of_fields(read_json(config), text)


def _from_hub(ref: ModelRef) -> Architecture:
    """A model of the Hugging Face Hub: in the local cache, or by its headers over the network."""
    from gpuherd.models.checkpoints.hub_headers import read_remote

    cached = _cached(ref)
    if cached is not None:
        return replace(_local(cached, ref.text), model=ref.text)
    try:
        remote = read_remote(ref, waits=_WAITS)
    except MissingModel as problem:
        near = nearest_names(ref.text)
        hint = f" (near known names: {', '.join(near)})" if near else ""
        raise MissingModel(f"{problem}{hint}") from None
    if not remote.tensors:
        return _of_fields(remote.config, ref.text)
    return _of_headers(remote.config, remote.tensors, ref.text)


def _cached(ref: ModelRef) -> Path | None:
    """The snapshot in the local cache, if its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(ref.repo_id or "", "config.json", revision=ref.revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    return folder if _has_weights(folder) else None
