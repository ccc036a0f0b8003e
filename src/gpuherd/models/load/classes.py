"""Which class of transformers a model is loaded as, and whether that needs code that the model brings.

transformers is imported inside functions only. No code of a model is ever imported here unless it was allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.names import shown
from gpuherd.models.plan.architecture import Architecture

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


def check_code(model: str, config: Mapping[str, Any], architecture: Architecture, *, trusted: bool) -> None:
    """Raises BadModel where a model can only be loaded by code of its own, which nobody has allowed."""
    code = own_code(config)
    if architecture.class_name is not None or trusted:
        return
    if code is not None:
        raise BadModel(
            f"{shown(model)} needs code of its own to be loaded ({shown(code)}); read that code, and then allow it "
            "with --trust-remote-code"
        )
    raise BadModel(
        f"{shown(model)} is of the architecture {shown(architecture.model_type)}, which transformers has no class for "
        "and the model brings no code for"
    )


def config_of(folder: Path, *, trusted: bool) -> Any:
    """The config as an object of transformers. Raises BadModel."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as problem:
        raise BadModel(f"{folder}: transformers can't use its config.json: {problem}") from None


def class_of(architecture: Architecture, config: Any, *, trusted: bool) -> Any:
    """The class that the model is loaded as: the one that was planned, else the one that the model brings.

    Raises BadModel: this transformers has no such class.
    """
    import transformers

    if architecture.class_name is not None:
        found = getattr(transformers, architecture.class_name, None)
        if found is None:
            raise BadModel(
                f"{shown(architecture.model)} is a {architecture.class_name}, which transformers "
                f"{transformers.__version__} doesn't have; a newer one may"
            )
        return found
    for name in _AUTO_CLASSES:
        auto_map = getattr(config, "auto_map", None) or {}
        if trusted and name in auto_map:
            return getattr(transformers, name)
    raise BadModel(f"{shown(architecture.model)}: there is no class to load it as")
