"""All that is decided before a model is loaded, and everything that can be refused: in well under a second, without
torch.

Knows names and headers; where it goes is ``destination``, loading itself ``loading``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.models.load.asked import Asked, check
from gpuherd.models.load.classes import check_code
from gpuherd.models.load.destination import Placed, ThisMachine, destination
from gpuherd.models.load.options import said_precision
from gpuherd.models.load.placed import Placement
from gpuherd.models.load.quantised import check_bitsandbytes, check_cards
from gpuherd.models.names import ModelRef, parse_model, shown
from gpuherd.models.place.gpus import Capability
from gpuherd.models.place.request import precision_for, requested_precision
from gpuherd.models.place.result import MemoryPlan
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.known import known_model
from gpuherd.models.plan.naming import split_precision
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.reading import read_architecture


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that may be loaded.

    Attributes:
        asked: what was asked for.
        path: the model's folder or file on this machine.
        config: its parsed config.json.
        precision: in which it is loaded.
        base: the model as transformers builds it, without an adapter.
        placement: where its blocks go, those of an adapter beside it too.
        capabilities: of the GPUs that it goes to, where they are known.
        adapter: the adapter's folder.
        notes: sentences that a person should read.
    """

    asked: Asked
    path: Path
    config: Mapping[str, Any]
    precision: Precision
    base: Architecture
    placement: Placement
    capabilities: tuple[Capability | None, ...] = ()
    adapter: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the config is."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is."""
        return tokenizer_folder(self.path, self.adapter)


Placing = Callable[[Asked, Architecture, Precision, ThisMachine], Placed]


def prepare(asked: Asked, placing: Placing = destination) -> Prepared:
    """Decides everything about a loading; ``placing`` where the blocks go.

    Raises:
        UsageError: options that contradict each other, a device map that can't be, offloading that is not allowed.
        MissingModel, BadModel: the model, its adapter or a shard is not there, damaged, or needs code of its own.
        MissingExtra: bitsandbytes is needed and not there.
        ModelDoesNotFit: with the planner's figures, and what would fit.
    """
    check(asked)
    name, suffix = split_precision(asked.model)
    wanted = requested_precision(asked.model, suffix, said_precision(asked.dtype, asked.quantization))
    if wanted is not None:
        check_bitsandbytes(wanted)
    machine = ThisMachine(simulate=asked.simulate)
    ref = _reference(name)

    def fetched(what: ModelRef) -> Path:
        if what.path is None and (early := _before_it_is_fetched(what)) is not None:
            placing(asked, early, precision_for(early, wanted)[0], machine)
        return _located(what, asked)

    path, adapter = _apart(asked, ref, fetched)
    architecture = _architecture(asked, path)
    config = _config(path)
    check_code(asked.model, config, trusted=asked.trust_remote_code)
    if isinstance(asked.plan, MemoryPlan):
        wanted = _agreed(asked.plan, architecture, wanted)
    precision, assumed = precision_for(architecture, wanted)
    check_bitsandbytes(precision)
    in_memory = _beside(asked, architecture, adapter, precision)
    placement, cards, notes = placing(asked, in_memory, precision, machine)
    codes = precision.is_quantised or precision is Precision.AS_STORED
    if placement.offloads and (codes or adapter is not None):
        what = f"weights in {precision}" if codes else "a model with an adapter"
        raise UsageError(f"{what} can't be offloaded: all blocks must be on GPUs; see 'gpuherd plan' for what fits")
    return Prepared(
        asked=asked,
        path=path,
        config=config,
        precision=precision,
        base=architecture,
        placement=placement,
        capabilities=tuple(card.capability for card in cards),
        adapter=adapter,
        notes=(*in_memory.assumptions, *((assumed,) if assumed else ()), *notes, *check_cards(precision, cards)),
    )


# ---- the model -------------------------------------------------------------------------------------------------------


def located(asked: Asked) -> tuple[Path, Path | None]:
    """The model's folder or file on this machine, and that of its adapter, fetched if need be; nothing is planned.

    Raises as ``prepare``.
    """
    return _apart(asked, _reference(split_precision(asked.model)[0]), lambda what: _located(what, asked))


def tokenizer_folder(model: Path, adapter: Path | None) -> Path:
    """Where the tokenizer is: an adapter is saved with the one, and the chat template, that it was trained with."""
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        return adapter
    return model if model.is_dir() else model.parent


def _reference(name: str) -> ModelRef:
    """What is meant. A known name without its organisation stands for its id, if it is that model's very name."""
    known = known_model(name)
    if known is not None and "/" not in name and not Path(name).exists():
        if known.model_id.partition("/")[2].lower() != name.strip().lower():
            raise BadModel(
                f"model {shown(name)} is known by its shapes, which are those of {known.model_id}; to load it, give "
                "its own id on the Hugging Face Hub, or its folder"
            )
        name = known.model_id
    return parse_model(name)


def _located(ref: ModelRef, asked: Asked) -> Path:
    """The folder or file on this machine, fetched if need be with all that loading takes."""
    from gpuherd.models.locate import locate

    return locate(ref, for_loading=True, with_code=asked.trust_remote_code)


def _before_it_is_fetched(ref: ModelRef) -> Architecture | None:
    """What a model of the Hub is by its headers: what has no place is refused before gigabytes are fetched.

    None of an adapter, and of what can't be asked for now but is here already.
    """
    from gpuherd.models.locate import cached_copy
    from gpuherd.models.remote_headers import OnlyAdapter

    try:
        return read_architecture(ref.text)
    except OnlyAdapter:
        return None
    except MissingModel:
        if cached_copy(ref) is None:
            raise
        return None


def _apart(asked: Asked, ref: ModelRef, fetched: Callable[[ModelRef], Path]) -> tuple[Path, Path | None]:
    """The base model and the adapter, where the model is one or comes with one."""
    from gpuherd.models.adapter import adapter_base, is_adapter

    path = fetched(ref)
    if is_adapter(path):
        if asked.adapter is not None:
            raise UsageError(f"model {shown(ref.text)} is an adapter itself; give its base as the model")
        base = adapter_base(path)
        if base is None:
            raise BadModel(f"model {shown(ref.text)} is an adapter, and its adapter_config.json names no base model")
        return fetched(parse_model(base)), path
    if asked.adapter is None:
        if asked.merge_adapter:
            raise UsageError("merge_adapter: there is no adapter to merge; name one")
        return path, None
    found = _located(parse_model(asked.adapter), asked)
    if not is_adapter(found):
        raise BadModel(f"adapter {shown(asked.adapter)} has no adapter_config.json")
    return path, found


def _architecture(asked: Asked, path: Path) -> Architecture:
    """The architecture by the headers of its weights, every one of which is looked at: a shard that is missing, a
    damaged file, a pickle with code in it are found here."""
    if path.suffix.lower() == ".gguf" or (path.is_dir() and not (path / "config.json").exists() and _has_gguf(path)):
        raise BadModel(
            f"{shown(asked.model)} is a GGUF file, which can be planned and analysed, but is not loaded here: give the "
            "model that it was made from, quantised on the way if need be (--quantization nf4)"
        )
    found = read_architecture(str(path))
    if found.source != "weights":
        raise MissingModel(f"{shown(asked.model)} can be planned by its config, but there are no weights to load")
    return replace(found, model=asked.model)


def _has_gguf(folder: Path) -> bool:
    return any(file.suffix.lower() == ".gguf" for file in folder.iterdir())


def _config(path: Path) -> Mapping[str, Any]:
    from gpuherd.models.checkpoint import read_json

    return read_json((path if path.is_dir() else path.parent) / "config.json")


def _beside(asked: Asked, base: Architecture, adapter: Path | None, precision: Precision) -> Architecture:
    """What lies in memory of a model with an adapter: of one that is merged the base alone.

    Raises BadModel where the adapter is damaged or for another base, UsageError where it can't be merged.
    """
    if adapter is None:
        return base
    from gpuherd.models.plan.adapters import with_adapter

    beside = with_adapter(base, adapter)
    if not asked.merge_adapter:
        return beside
    if precision.is_quantised or precision is Precision.AS_STORED:
        raise UsageError(
            f"an adapter can't be merged into weights in {precision} without loss: merge it first with 'gpuherd merge' "
            "and load the merged model, or leave it unmerged"
        )
    return base


def _agreed(plan: MemoryPlan, architecture: Architecture, wanted: Precision | None) -> Precision:
    """The plan's precision. Raises UsageError where the plan is for another model or another precision."""
    planned = {tensor.name: tensor.shape for tensor in plan.architecture.tensors()}
    there = {tensor.name: tensor.shape for tensor in architecture.tensors()}
    other = next((name for name in (*planned, *there) if planned.get(name) != there.get(name)), None)
    if other is not None:
        raise UsageError(
            f"the plan is for {shown(plan.architecture.model)}, where {other} has the shape "
            f"{planned.get(other, 'of no tensor')}; in {shown(architecture.model)} it has {there.get(other, 'none')}. "
            "Plan this model, or give only the plan's device_map"
        )
    if wanted is not None and wanted is not plan.precision:
        raise UsageError(f"the plan is for {plan.precision}, and {wanted} was asked for; plan it in {wanted}")
    return plan.precision
