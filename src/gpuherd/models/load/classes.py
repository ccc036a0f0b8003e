"""Which class of transformers a model is loaded as, and whether that needs code that the model brings.

transformers is imported inside functions only. No code of a model is ever imported here unless it was allowed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.names import shown
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.from_config import is_known, model_type_of

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
