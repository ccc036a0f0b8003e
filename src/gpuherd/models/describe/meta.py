"""Reads a model's architecture off the model itself: transformers builds it on the meta device from its config alone.

Nothing here knows a family by name. Blocks are the modules around and in the lists of layers that a forward pass calls,
in the order of the calls; what a layer keeps of a sequence is read off the cache that the model filled; peaks are
measured by ``peaks``. No code of a checkpoint is run (``trust_remote_code`` stays off), no file is read.

Needs torch and transformers; ``gpuherd.models.describe`` runs it in a process of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import nn

from gpuherd.errors import BadModel
from gpuherd.models.describe.config import (
    assumptions_of,
    images_of,
    model_type_of,
    quantised_of,
    stored_precision,
)
from gpuherd.models.describe.description import Architecture, Block, Kind, Peaks, Role, Tensor
from gpuherd.models.describe.peaks import Measured, measure_model, step_of
from gpuherd.models.describe.training_peaks import measure_training
from gpuherd.models.names import quoted

_log = logging.getLogger(__name__)
# Far above any model that exists; a config that asks for more would take minutes to build.
MOST_LAYERS, MOST_NUMBER = 1000, 1 << 40
_COUNTED = re.compile(r"(^|_)n?_?(num_)?(hidden_)?(layers?|blocks|heads|experts)$|^n_layer$|depth")
# Attributes of a layer that say which one it is, not how it computes.
_PLACE = re.compile(r"(idx|index|_id|number|depth|^training|gradient_checkpointing|_compiled|_hf_hook)$")
_MOST_KINDS = 16
# A list of modules with less than this part of the largest list's numbers is no list of layers (projections, norms).
_LAYERS_PART = 0.1
_INNER = (
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "hidden_dim",
    "ffn_hidden_size",
    "n_inner",
    "intermediate_size",
)


def describe_config(
    config: Mapping[str, Any], model: str, *, peaks: bool = True, training: bool = False
) -> Architecture:
    """The architecture of the model that transformers builds from a parsed config.json.

    Args:
        config: parsed.
        model: how the user named it.
        peaks: measure what answers need.
        training: measure what training steps need, where transformers can run one.

    Raises BadModel where transformers has no class for it, or can't build or run it.
    """
    built = build(config, model)
    with _can_run(model):
        found = _read(built, config, model, peaks)
    if not training:
        return found
    try:
        return _with_training(found, built)
    except Exception as problem:  # whatever a strange config makes transformers' code raise
        # Plans count such layers by their shapes, and say so.
        _log.warning("%s: its training steps can't be measured: %s", quoted(model), _first_line(problem))
        return found


def add_training(architecture: Architecture, config: Mapping[str, Any]) -> Architecture:
    """The same description with what training steps need. Raises BadModel as ``describe_config`` does."""
    built = build(config, architecture.model)
    with _can_run(architecture.model):
        return _with_training(architecture, built)


@contextmanager
def _can_run(model: str) -> Iterator[None]:
    try:
        yield
    except BadModel:
        raise
    except Exception as problem:  # as above
        raise BadModel(
            f"{quoted(model)}: transformers builds it, but can't run it: {_first_line(problem)}"
        ) from problem


def build(config: Mapping[str, Any], model: str) -> Any:
    """The model on the meta device. Raises BadModel."""
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = model_type_of(config)
    if model_type not in CONFIG_MAPPING:
        raise BadModel(f"{quoted(model)}: transformers has no model of the type {quoted(model_type or 'None')}")
    _check_sizes(config, model)
    fields = {key: _floats(value) for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(fields)
        with torch.device("meta"), no_init_weights():
            built = _class_of(parsed)._from_config(parsed, dtype=torch.bfloat16)
        built.tie_weights()
    except Exception as problem:  # as above
        raise BadModel(f"{quoted(model)}: transformers can't build it: {_first_line(problem)}") from problem
    return built.eval()


def _floats(value: Any) -> Any:
    """The value with the infinities that ``save_pretrained`` writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        tag = value.get("__float__") if len(value) == 1 else None
        if tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: _floats(each) for key, each in value.items()}
    return [_floats(each) for each in value] if isinstance(value, list) else value


def _check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Raises BadModel for numbers with which building would take minutes or all memory."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(value, model)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = MOST_LAYERS if _COUNTED.search(key) else MOST_NUMBER
            if value > most:
                raise BadModel(f"{quoted(model)}: its config has {quoted(key)} = {value}; it must be at most {most}")


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return quoted(f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300])


def _class_of(config: Any) -> Any:
    """The class that is loaded to generate or, of encoders alone, to read: what its auto classes say."""
    from transformers.models.auto import modeling_auto as auto

    mappings = [
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_MAPPING,
    ]
    if not config.is_encoder_decoder:
        mappings = mappings[1:]
        # Encoders are in the list of causal models too, for those that use them as decoders.
        if type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
            mappings = mappings[-1:]
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, list | tuple) else found
    raise BadModel(f"transformers has no language model for {type(config).__name__}")


@dataclass(frozen=True, slots=True)
class Layers:
    """A list of layers that the forward pass calls.

    Attributes:
        path: of the module list, ``model.layers``.
        kinds: for each layer the number of the first layer that is of its kind.
        kept: how many layers from the first on have one of each kind, where there are two of a kind the second too.
    """

    path: str
    kinds: tuple[int, ...]
    kept: int

    def measured_as(self, number: int) -> str:
        """The layer that is measured for this one: the second of its kind, where there is one among those kept."""
        same = [n for n, kind in enumerate(self.kinds[: self.kept]) if kind == self.kinds[number]]
        return f"{self.path}.{next((n for n in same if n > 0), same[0])}"


def _read(built: Any, config: Mapping[str, Any], model: str, peaks: bool) -> Architecture:
    lists = layer_lists(built)
    tensors = _tensors(built)
    text = built.config.get_text_config() if not built.config.is_encoder_decoder else built.config
    quantisable = {each.name for each in tensors.values() if each.role is Role.LINEAR}
    measured = measure_model(built, lists, quantisable, peaks=peaks)
    # What answers alone don't call, such as layers that guess further tokens, lies in memory as a whole.
    lists = [each for each in lists if f"{each.path}.0" in measured.called]
    # Some classes tie the head whatever the config says; a checkpoint of such a config holds both, and both are loaded.
    says_untied = config.get("tie_word_embeddings") is False
    untied = {name for name, each in tensors.items() if says_untied and each.role is Role.HEAD}
    blocks = tuple(_blocks(built, lists, tensors, measured, untied))
    split = any(tensor.split for block in blocks for tensor in block.tensors)
    heads = _number(text, "num_attention_heads")
    return Architecture(
        model=model,
        model_type=built.config.model_type,
        class_name=type(built).__name__,
        blocks=blocks,
        hidden_size=_number(text, "hidden_size"),
        intermediate_size=_widest(text, blocks),
        vocab_size=_number(text, "vocab_size"),
        heads=heads,
        is_encoder_decoder=bool(built.config.is_encoder_decoder),
        stored=stored_precision(config),
        source="model",
        assumptions=(*assumptions_of(config), *quantised_of(config), *images_of(blocks)),
        max_tokens=_number(text, "max_position_embeddings") or None,
        tensor_parallel=split,
        tensor_parallel_limit=gcd(heads, _number(text, "num_key_value_heads") or heads) if split else None,
        peaks={block.peaks: measured.peaks[block.peaks] for block in blocks if block.peaks},
    )


def _with_training(architecture: Architecture, built: Any) -> Architecture:
    """The architecture with measured training steps; as it is where nothing predicts a next token."""
    if built.get_output_embeddings() is None:
        return architecture
    names = {block.name for block in architecture.blocks}
    lists = [layers for layers in layer_lists(built) if f"{layers.path}.0" in names]
    # One layer of each kind: what its backward pass needs doesn't depend on those below it.
    first = [replace(layers, kept=1 + max(layers.kinds)) for layers in lists]
    linear = {tensor.name for tensor in architecture.tensors() if tensor.role is Role.LINEAR}
    measured = measure_training(
        built,
        first,
        linear,
        step=step_of(built, first, linear),
        fill=max((each.fill for each in architecture.peaks.values()), default=1),
    )
    blocks = tuple(
        replace(block, peaks=_layer(block.name, lists, Layers.measured_as)) if block.kind == "layer" else block
        for block in architecture.blocks
    )
    peaks = {}
    for name in dict.fromkeys(block.peaks for block in blocks if block.peaks):
        one = _layer(name, lists, lambda layers, number: f"{layers.path}.{layers.kinds[number]}")
        inference = architecture.peaks.get(name, Peaks({}, {}))
        peaks[name] = replace(inference, training=measured.layers[one], inputs=measured.inputs.get(one, ()))
    return replace(architecture, blocks=blocks, peaks=peaks, around=measured.around)


def _number(config: Any, name: str) -> int:
    """A whole number of a config, 0 where there is none."""
    found = getattr(config, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def _widest(text: Any, blocks: Sequence[Block]) -> int:
    """The most numbers that one token has in a feed-forward network: of a mixture in all of its experts together."""
    found = [_number(text, name) for name in _INNER if _number(text, name)]
    dense = max(found[0], _number(text, "decoder_ffn_dim")) if found else 0
    if not any(_is_experts(tensor) for block in blocks for tensor in block.tensors):
        return dense or 4 * _number(text, "hidden_size")
    inner = _number(text, "moe_intermediate_size") or dense
    chosen = _number(text, "num_experts_per_tok") or _number(text, "top_k") or 1
    shared = _number(text, "shared_expert_intermediate_size") or inner * _number(text, "n_shared_experts")
    return max(dense, chosen * inner + shared)


def _is_experts(tensor: Tensor) -> bool:
    return len(tensor.shape) == 3 and "expert" in tensor.name


# --- lists of layers -----------------------------------------------------------------------------------------------


def layer_lists(built: Any) -> list[Layers]:
    """The outermost module lists of the text model, its encoder first."""
    text = _text_root(built)
    found: list[Layers] = []
    for name, module in built.named_modules():
        inside = any(name.startswith(f"{each.path}.") for each in found)
        if not isinstance(module, nn.ModuleList) or inside or not (text == "" or name.startswith(f"{text}.")):
            continue
        members = list(module)
        if members and all(next(each.parameters(), None) is not None for each in members):
            kinds = _kinds(built, members)
            found.append(Layers(name, kinds, _prefix(kinds)))
    if not found:
        raise BadModel("transformers' model of it has no list of layers")
    sizes = [sum(each.numel() for each in built.get_submodule(layers.path).parameters()) for layers in found]
    return [layers for layers, size in zip(found, sizes, strict=True) if size >= _LAYERS_PART * max(sizes)]


def _text_root(built: Any) -> str:
    """Path of the module that reads texts; "" for the whole model."""
    if built.config.is_encoder_decoder:
        return ""
    decoder = built.get_decoder() if hasattr(built, "get_decoder") else None
    if decoder is None or built.config.get_text_config() is built.config:
        return ""
    return next((name for name, module in built.named_modules() if module is decoder), "")


def _kinds(built: Any, members: Sequence[nn.Module]) -> tuple[int, ...]:
    """Layers that have the same shapes and the same settings compute alike."""
    types = getattr(built.config.get_text_config(), "layer_types", None) or []
    pairs = list(zip(members, types if len(types) == len(members) else [None] * len(members), strict=True))
    exact = [_signature(each, kind, settings=True) for each, kind in pairs]
    if len(set(exact)) > _MOST_KINDS:  # a setting that differs from layer to layer, such as a scale by its depth
        exact = [_signature(each, kind, settings=False) for each, kind in pairs]
    return tuple(exact.index(each) for each in exact)


def _signature(layer: nn.Module, kind: str | None, *, settings: bool) -> object:
    shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    classes = tuple(type(each).__name__ for each in layer.modules())
    if not settings:
        return kind, shapes, classes
    values = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if (value is None or isinstance(value, bool | int | str)) and not _PLACE.search(key)
    )
    return kind, shapes, classes, values


def _prefix(kinds: Sequence[int]) -> int:
    """How many layers to measure: of each kind the second layer too, because the first has nothing below it."""
    places = {kind: [n for n, each in enumerate(kinds) if each == kind] for kind in set(kinds)}
    return 1 + max(next((n for n in numbers if n > 0), numbers[0]) for numbers in places.values())


# --- tensors -------------------------------------------------------------------------------------------------------


def _tensors(built: Any) -> dict[str, Tensor]:
    """All parameters and saved buffers by name; which name owns a storage is decided with the blocks."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    strict, half = built._keep_in_fp32_modules_strict or (), built._keep_in_fp32_modules or ()
    unquantised = HfQuantizer.get_modules_to_not_convert(built, None, [*half, *strict])
    modules, saved = dict(built.named_modules()), set(built.state_dict())
    head, plan = built.get_output_embeddings(), _tensor_parallel_plan(built)
    buffers = {name: value for name, value in built.named_buffers() if name in saved}
    found = {}
    for name, value in [*built.named_parameters(remove_duplicate=False), *buffers.items()]:
        path, _, last = name.rpartition(".")
        module = modules[path]
        conv = isinstance(module, Conv1D)
        role = Role.OTHER
        if module is head and last == "weight":
            role = Role.HEAD
        elif isinstance(module, nn.Embedding):
            role = Role.EMBEDDING
        elif last == "weight" and (type(module) is nn.Linear or conv):
            # What is kept for its precision alone is quantised as little, but its role is the same.
            precise = any(each in name for each in (*half, *strict))
            role = Role.LINEAR if precise or should_convert_module(path, unquantised) else Role.OTHER
        found[name] = Tensor(
            name,
            tuple(value.shape),
            role,
            keeps_fp32=value.dtype == torch.float32 or any(each in name for each in strict),
            fp32_in_fp16=any(each in name for each in half),
            transposed=conv and last == "weight",
            split=_is_split(name, plan),
            buffer=name in buffers,
        )
    return found


def _tensor_parallel_plan(built: Any) -> Mapping[str, str]:
    try:
        return dict(built.tp_plan or {}) if built.config.get_text_config().base_model_tp_plan else {}
    except (AttributeError, TypeError, ValueError):
        return {}


def _is_split(name: str, plan: Mapping[str, str]) -> bool:
    """Whether transformers' plan divides the tensor: weights along rows or columns, biases only with rows."""
    path, _, last = name.rpartition(".")
    style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path)) or ""
    kind = style.removeprefix("packed_")
    return kind.startswith(("colwise", "embedding")) or (kind.startswith("rowwise") and last != "bias")


# --- blocks --------------------------------------------------------------------------------------------------------


def _blocks(
    built: Any, lists: Sequence[Layers], tensors: Mapping[str, Tensor], measured: Measured, untied: Collection[str]
) -> Iterator[Block]:
    """All blocks in the order in which they are called, each tensor in one of them, tied ones but ``untied`` after
    their owner."""
    owners: dict[int, str] = {}
    left = dict(tensors)
    for name, kind in _in_order(built, lists, measured):
        found = []
        for each in [key for key in left if key == name or key.startswith(f"{name}.")]:
            storage = id(built.get_parameter_or_buffer(each))
            owner = owners.setdefault(storage, each)
            found.append(replace(left.pop(each), tied_to=None if owner == each or each in untied else owner))
        if kind == "layer":
            key = _layer(name, lists, Layers.measured_as)
            yield Block(name, "layer", tuple(found), measured.caches.get(key), key if key in measured.peaks else None)
        else:
            yield Block(name, kind, tuple(found))


def _layer(name: str, lists: Sequence[Layers], of: Callable[[Layers, int], str]) -> str:
    """What the list that holds a layer says of it."""
    path, _, number = name.rpartition(".")
    return of(next(each for each in lists if each.path == path), int(number))


def _in_order(built: Any, lists: Sequence[Layers], measured: Measured) -> list[tuple[str, Kind]]:
    """Names of blocks and their kinds, in the order of the first call; what is never called comes first."""
    names = _outermost(built, lists)
    called = {name: place for place, name in enumerate(measured.called)}
    modules, head = dict(built.named_modules()), built.get_output_embeddings()

    def kind_of(name: str) -> Kind:
        module = modules.get(name)
        if module is None or (head is not None and any(each is head for each in module.modules())):
            return "head"
        if name not in called:
            bare = isinstance(module, nn.Embedding) or next(module.parameters(), None) is None
            return "embedding" if bare else "other"
        return "embedding" if called[name] < called[f"{_list_of(name, lists).path}.0"] else "norm"

    kinds = {name: kind_of(name) for name in names}
    # Heads last: some are called in between, some are no module at all.
    uncalled = {"other": -2, "embedding": -1}
    places = {
        name: len(called) if kind == "head" else called.get(name, uncalled.get(kind, 0)) for name, kind in kinds.items()
    }
    placed = [(places[name], n, [(name, kinds[name])]) for n, name in enumerate(names)]
    for each in lists:
        placed.append((called[f"{each.path}.0"], 0, [(f"{each.path}.{n}", "layer") for n in range(len(each.kinds))]))
    return [block for _, _, blocks in sorted(placed) for block in blocks]


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _list_of(name: str, lists: Sequence[Layers]) -> Layers:
    """The list of layers that a module belongs to: the one with the longest common path, the last if there is none."""

    def common(layers: Layers) -> int:
        pairs = zip(name.split("."), layers.path.split("."), strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), 0)

    return max(reversed(lists), key=common)


def _outermost(built: Any, lists: Sequence[Layers]) -> list[str]:
    """Modules around the lists of layers, each as a whole, and parameters next to them."""
    paths = [each.path for each in lists]

    def below(name: str, module: nn.Module) -> Iterator[str]:
        for last, child in module.named_children():
            path = f"{name}.{last}".lstrip(".")
            if path in paths:
                continue
            if any(each.startswith(f"{path}.") for each in paths):
                yield from below(path, child)
            elif _has_tensors(child) or "norm" in type(child).__name__.lower():
                yield path
        for last, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if f"{name}.{last}".lstrip(".") in built.state_dict():
                yield f"{name}.{last}".lstrip(".")

    return list(dict.fromkeys(below("", built)))
