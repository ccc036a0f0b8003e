"""A model, as the user named it, as an architecture: from its weights' headers, its config, or shipped data.

Knows in which order a name is looked up: what is on this machine first, then known names, then the Hugging Face Hub.
Reads headers and configs only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, MissingExtra, MissingModel, naming_extras
from gpuherd.models.describe import known_models
from gpuherd.models.describe.config import model_type_of
from gpuherd.models.describe.description import Architecture, Block, Tensor
from gpuherd.models.describe.known_models import KnownModel
from gpuherd.models.describe.process import described, may_know
from gpuherd.models.names import WEIGHT_ENDINGS, ModelRef, is_there, parse_model, quoted
from gpuherd.options import nearest

if TYPE_CHECKING:
    from gpuherd.models.checkpoints.open import Checkpoint
    from gpuherd.models.lora.update import Merged
    from gpuherd.models.tensors.source import TensorInfo

# A person waits for a plan: a network that fails is tried again once, not for as long as a download is worth.
_WAITS = (1.0,)
# What files and the Hub are read with; known names and configs want neither.
EXTRAS = {"numpy": "plan", "huggingface_hub": "plan"}


def read_architecture(text: str, *, training: bool = False) -> Architecture:
    """The architecture of a model.

    Args:
        text: a folder (config.json, with weights or without), a weight file, a known name in any case
            (``llama-3.1-70b``), or a Hugging Face id. What exists on this machine wins over a known name. A folder that
            is an adapter is planned with the base that its config names.
        training: with what training steps need, measured where it isn't shipped and torch and transformers are there.

    Raises:
        MissingModel: it is not to be had; names of known models that are near are said.
        BadModel: it can't be a model, its architecture is not known, or config and weights disagree.
        MissingExtra: numpy or huggingface_hub is not installed, and this model wants it.
    """
    known = known_models.known_model(text)
    if known is not None and not is_there(text):
        return _of_known(known, text, training)
    ref = parse_model(text)
    with naming_extras(EXTRAS, "plans of model files need"):
        return _from_hub(ref, training) if ref.path is None else _local(ref.path, text, training)


def read_for_training(text: str) -> Architecture:
    """``read_architecture`` with what training steps need."""
    return read_architecture(text, training=True)


def _of_known(known: KnownModel, text: str, training: bool) -> Architecture:
    found = known_models.shipped(known.model_id, known.config, text)
    if found is None:
        found = described(known.config, text, training=training)
    return replace(_with_training(found, known.config, training), source="known")


def _with_training(architecture: Architecture, config: Mapping[str, Any], training: bool) -> Architecture:
    """The architecture with the peaks that transformers' own model of the config has, if it is to be trained and they
    aren't there; as it is where that can't be measured, or the model predicts no next token."""
    if not training or not architecture.predicts or architecture.trainings_measured:
        return architecture
    try:
        return known_models.with_peaks_of(architecture, described(config, architecture.model, training=True))
    except (BadModel, MissingExtra) as problem:
        return architecture.with_remarks(_as_remark(problem))


def _as_remark(problem: Exception) -> str:
    return f"{str(problem).rstrip('.')}."


def _of_fields(config: Mapping[str, Any], text: str, training: bool) -> Architecture:
    """By a config alone, which transformers builds the model of."""
    try:
        return described(config, text, training=training)
    except MissingExtra as problem:
        found = known_models.shipped_same(config, text)
        if found is None:
            raise
        return replace(found, source="known").with_remarks(_as_remark(problem))
    except BadModel as problem:
        if may_know(config):
            raise
        raise BadModel(f"{_unknown(config, text)}. {problem}") from None


def _unknown(config: Mapping[str, Any], text: str) -> str:
    """Why nothing can build it, and what to do."""
    model_type = model_type_of(config)
    if not model_type:
        return f"{quoted(text)}: its config.json has no model_type, so that its architecture is not known"
    near = nearest(model_type, known_models.known_types(), cutoff=0.8)
    hint = f" (nearest known: {near[0]})" if near else ""
    code = "; it needs code of its own" if isinstance(config.get("auto_map"), Mapping) else ""
    return (
        f"{quoted(text)} is of the architecture {quoted(model_type)}, whose shapes are not known here{hint}{code}. "
        "With its weights in the folder it can be planned from their headers"
    )


def _of_headers(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], text: str, training: bool
) -> Architecture:
    """By a config and the headers of the weights: what transformers builds, a known model with the same tensors, or the
    headers alone."""
    from gpuherd.models.describe import headers

    if not model_type_of(config):
        return headers.of_headers(config, tensors, text)
    try:
        built = described(config, text, training=training)
    except (BadModel, MissingExtra) as problem:
        for alike in known_models.shipped_alike(config, text):
            with suppress(BadModel):
                return _with_training(headers.of_weights(config, tensors, text, alike), config, training)
        found = known_models.with_shipped_peaks(headers.of_headers(config, tensors, text))
        return found.with_remarks(_as_remark(problem))
    return headers.of_weights(config, tensors, text, built)


def _local(path: Path, text: str, training: bool) -> Architecture:
    """A folder or file of this machine; a folder without weights by its config."""
    from gpuherd.models.describe import gguf

    if path.is_dir() and not _has_weights(path):
        return _of_config(path, text, training)
    from gpuherd.models.checkpoints.open import open_checkpoint
    from gpuherd.models.lora.adapter import is_adapter

    if is_adapter(path):
        return _of_adapter(path, text, training)
    source = open_checkpoint(path)
    if gguf.is_gguf(source.config):
        return gguf.architecture_of(source.config, source.tensors, text, training=training)
    return _with_ties_as_they_are(_of_headers(source.config, source.tensors, text, training), source)


def _with_ties_as_they_are(architecture: Architecture, source: Checkpoint) -> Architecture:
    """What the config says is tied, but the file holds twice with other numbers, is not tied: so transformers has it.

    Only the first rows are compared.
    """
    from gpuherd.models.describe.headers import Stored

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
    names = ", ".join(sorted(apart))
    remark = f"The config ties {names}, but the weights hold other numbers there: planned as not tied."
    return replace(architecture, blocks=blocks).with_remarks(remark)


def _differ(source: Checkpoint, ones: Sequence[TensorInfo], others: Sequence[TensorInfo]) -> bool:
    """Whether two stored tensors are there, and their first rows are not the same."""
    if len(ones) != 1 or len(others) != 1 or ones[0].name == others[0].name or ones[0].shape != others[0].shape:
        return False
    if ones[0].shares is not None or others[0].shares is not None:
        return False
    return bool((source.read(ones[0].name, 0, 1) != source.read(others[0].name, 0, 1)).any())


def _of_adapter(path: Path, text: str, training: bool) -> Architecture:
    """An adapter with the base that its config names."""
    from gpuherd.models.lora.adapter import adapter_base, is_adapter

    folder = path if path.is_dir() else path.parent
    base = adapter_base(path)
    if base is None:
        raise BadModel(f"{quoted(text)} is an adapter that names no base model; plan the base, with --adapter {text}")
    ref = parse_model(base)
    if ref.path is not None and is_adapter(ref.path):
        raise BadModel(f"{quoted(text)}: its base {quoted(base)} is itself an adapter; merge that one first")
    return replace(with_adapter(read_architecture(base, training=training), folder), model=text)


def _has_weights(folder: Path) -> bool:
    """Whether there are weights, or an index that promises some."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as problem:
        raise BadModel(f"{quoted(str(folder))} can't be listed: {problem.strerror}") from None
    return any(name.lower().endswith(WEIGHT_ENDINGS) or name.endswith(".index.json") for name in names)


def _of_config(folder: Path, text: str, training: bool) -> Architecture:
    from gpuherd.models.checkpoints.open import read_json

    config = folder / "config.json"
    if not config.exists():
        raise MissingModel(f"{quoted(text)} is no model folder: it has neither a config.json nor weights")
    return _of_fields(read_json(config), text, training)


def _from_hub(ref: ModelRef, training: bool) -> Architecture:
    """A model of the Hugging Face Hub: in the local cache, or by its headers over the network."""
    from gpuherd.models.checkpoints.hub_headers import read_remote

    cached = _cached(ref)
    if cached is not None:
        return replace(_local(cached, ref.text, training), model=ref.text)
    try:
        remote = read_remote(ref, waits=_WAITS)
    except MissingModel as problem:
        near = known_models.nearest_names(ref.text)
        hint = f" (near known names: {', '.join(near)})" if near else ""
        raise MissingModel(f"{problem}{hint}") from None
    if not remote.tensors:
        return _of_fields(remote.config, ref.text, training)
    return _of_headers(remote.config, remote.tensors, ref.text, training)


def _cached(ref: ModelRef) -> Path | None:
    """The snapshot in the local cache, if its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(ref.repo_id or "", "config.json", revision=ref.revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    return folder if _has_weights(folder) else None


# A model with a LoRA adapter beside it, unmerged, as PEFT loads it: the base's tensors and the adapter's own.
#
# Each of the adapter's tensors must find its place in the base; ``gpuherd.models.lora.adapter`` decides that, as it
# does where adapters are merged. PEFT keeps the factors in float32 whatever they are stored in, and a module that the
# adapter holds whole beside the base's own.


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
    from gpuherd.models.tensors.source import HeadersOnly, TensorInfo

    infos = {
        tensor.name: TensorInfo(tensor.name, tensor.shape, "BF16", 2 * tensor.numel)
        for tensor in architecture.tensors()
        if tensor.tied_to is None and not tensor.buffer
    }
    merged = merge(HeadersOnly({"model_type": architecture.model_type}, infos), adapter)
    copied = tuple(read_json(adapter / ADAPTER_CONFIG).get("modules_to_save") or ())
    added = [*_factors(merged), *_copies(merged, copied)]
    # Others take the place of the base's: a vocabulary may have grown.
    whole = {name: stored.info.shape for name, stored in merged.replaced.items()}
    shapes = {name: shape for name, shape in whole.items() if not _is_one(name.rpartition(".")[0], copied)}
    blocks, placed = [], set[str]()
    for block in architecture.blocks:
        own = [part for part in added if part.name.startswith(f"{block.name}.")]
        placed.update(part.name for part in own)
        tensors = [replace(each, shape=shapes.get(each.name, each.shape)) for each in block.tensors]
        blocks.append(replace(block, tensors=(*tensors, *own)))
    blocks += [Block(part.name, "head", (part,)) for part in added if part.name not in placed]
    remark = "The adapter lies beside its base, unmerged; its factors are kept in float32, as PEFT does."
    return replace(architecture, blocks=tuple(blocks)).with_remarks(remark)


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
    """The modules that the adapter has next to the base's own."""
    for name, stored in merged.replaced.items():
        module, _, last = name.rpartition(".")
        if _is_one(module, copied):
            yield Tensor(f"{module}.modules_to_save.{last}", stored.info.shape)


def _is_one(module: str, names: Sequence[str]) -> bool:
    """Whether a module is named, by the end of its path."""
    return any(f".{module}".endswith(f".{name}") for name in names)
