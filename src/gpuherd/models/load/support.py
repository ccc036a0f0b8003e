"""What transformers, bitsandbytes and the GPUs support: the class that a model is loaded as, whether that needs code
that the model brings, and the settings of its precision.

What can be decided before torch is imported (is bitsandbytes there, can the card compute so) is separate from what
needs it; transformers is imported inside functions only. No code of a model is ever imported here unless it was
allowed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingExtra, UsageError
from gpuherd.models.names import shown
from gpuherd.models.place.gpus import Capability, GpuSpec, capability_verdict
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.from_config import is_known, model_type_of
from gpuherd.models.plan.precision import Precision

# ---- classes ---------------------------------------------------------------------------------------------------------

# What a model that brings its own code is loaded by, in this order.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")


def own_code(config: Mapping[str, Any]) -> str | None:
    """The class that a model's config says to import from the model's own files: ``modeling_x.XForCausalLM``; None
    where it names none."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    for name in _AUTO_CLASSES:
        reference = auto_map.get(name)
        if isinstance(reference, str):
            return reference.rpartition("--")[2]
    return None


def check_code(model: str, config: Mapping[str, Any], *, trusted: bool) -> None:
    """Raises BadModel where a model can only be loaded by code of its own, which nobody has allowed. Imports nothing:
    what transformers has is told by its files."""
    code = own_code(config)
    if trusted or code is None or _in_transformers(config):
        return
    raise BadModel(
        f"{shown(model)} needs code of its own to be loaded ({shown(code)}); read that code, and then allow it with "
        "--trust-remote-code"
    )


def _in_transformers(config: Mapping[str, Any]) -> bool:
    """Whether transformers itself has this architecture: known here, or a folder of its own there."""
    if is_known(config):
        return True
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    name = model_type_of(config).replace("-", "_")
    return any((Path(place) / "models" / name).is_dir() for place in places or () if name.isidentifier())


def has_class(config: Mapping[str, Any], task: str) -> bool | None:
    """Whether transformers has a class of this architecture for a task (``ForSequenceClassification``); None where that
    can't be told. Imports nothing: its files tell."""
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    name = model_type_of(config).replace("-", "_")
    files = [file for place in places or () for file in (Path(place) / "models" / name).glob("modeling_*.py")]
    if not name.isidentifier() or not files:
        return None
    return any(f"{task}(" in file.read_text(encoding="utf-8", errors="replace") for file in files)


def runs_own_code(config: Mapping[str, Any], *, trusted: bool) -> bool:
    """Whether the model's own code is run: where that is allowed, and transformers has not its architecture."""
    return trusted and not _in_transformers(config)


def config_of(folder: Path, *, trusted: bool) -> Any:
    """The config as an object of transformers; ``trusted``: by the model's own code. Raises BadModel."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
    except ImportError as missing:
        raise MissingExtra(f"{folder}: its own code needs a library that is not installed: {missing}") from None
    except (ValueError, OSError, KeyError, TypeError) as problem:
        raise BadModel(f"{folder}: transformers can't use its config.json: {problem}") from None


def classes_for(architecture: Architecture, config: Any, *, trusted: bool) -> list[Any]:
    """The classes that the model may be loaded as, the likeliest first: the one that its config names, the one that was
    planned; of a model with code of its own that code's.

    A class for another kind of config is left out, whatever the config names.

    Raises BadModel: there are none.
    """
    import transformers

    named = [*(getattr(config, "architectures", None) or ()), architecture.class_name]
    found: list[Any] = [getattr(transformers, name, None) for name in dict.fromkeys(named) if isinstance(name, str)]
    models: list[Any] = [
        each for each in found if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel)
    ]
    classes = [each for each in models if each.config_class is not None and isinstance(config, each.config_class)]
    if classes:
        return classes
    auto_map = getattr(config, "auto_map", None) or {}
    own = [getattr(transformers, name) for name in _AUTO_CLASSES if trusted and name in auto_map]
    if own:
        return own
    raise BadModel(
        f"{shown(architecture.model)} is a {shown(str(named[0]))}, which transformers {transformers.__version__} does "
        "not have"
    )


# ---- precisions ------------------------------------------------------------------------------------------------------

EXTRAS = {"torch": "load", "transformers": "load", "accelerate": "load", "peft": "load", "safetensors": "load"}
# Of checkpoints that are stored in 8 bits: weights and their scales.
_EIGHT_BITS = frozenset(
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
)
_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# bfloat16 is emulated below; the product of 4-bit weights is then computed in float16, which takes as much.
_BF16_FROM = (8, 0)


def check_bitsandbytes(precision: Precision) -> None:
    """Raises MissingExtra where bitsandbytes is needed and not installed. Imports nothing."""
    if precision.is_quantised and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra(
            f"bitsandbytes is not installed, and {precision} needs it; pip install 'gpuherd[bnb]' brings it, or load "
            "the model in bf16 or fp16"
        )


def check_cards(precision: Precision, cards: Sequence[GpuSpec]) -> tuple[str, ...]:
    """Sentences on cards that are slow with this precision. Raises UsageError for one that can't do it at all."""
    told = [(card, capability_verdict(precision, card.capability)) for card in cards]
    for card, said in told:
        if not said.possible:
            raise UsageError(f"GPU {card.label} ({card.name}): {said.sentence}; load the model in another dtype")
    return tuple(f"on GPU {card.label} ({card.name}) {said.sentence}" for card, said in told if said.sentence)


def loading_words(
    precision: Precision, capabilities: Sequence[Capability | None] = (), *, overflows: bool = False
) -> dict[str, Any]:
    """What ``from_pretrained`` is told of the precision. Imports torch and transformers.

    Args:
        capabilities: of the GPUs that it will lie on.
        overflows: float16 is too narrow for a part of the model, which transformers would keep in float32.
    """
    import torch

    plain = precision.computes_in
    emulated = any(each is not None and each < _BF16_FROM for each in capabilities)
    if precision in (Precision.NF4, Precision.NF4_DQ) and emulated and not overflows:
        plain = Precision.FP16
    dtype = getattr(torch, _DTYPES[plain])
    if precision is Precision.AS_STORED:
        return {"dtype": "auto"}
    if not precision.is_quantised:
        return {"dtype": dtype}
    from transformers import BitsAndBytesConfig

    if precision is Precision.INT8:
        return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=precision is Precision.NF4_DQ,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization_config": settings}


def expected_dtypes(precision: Precision) -> frozenset[str]:
    """In which torch dtypes weights that are no codes may lie, beside those that stay in float32 anyway."""
    if precision is Precision.AS_STORED:
        return frozenset(_DTYPES.values()) | _EIGHT_BITS
    if precision in (Precision.NF4, Precision.NF4_DQ):
        return frozenset({"bfloat16", "float16"})
    return frozenset({_DTYPES[precision.computes_in]})
