"""transformers' own loading, told everything explicitly: class, dtype, device of each block, and only local files.

Refuses what transformers would let pass: a model of other shapes than the planned one, weights that are missing (it
fills them with random numbers). torch and transformers are imported inside functions only.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.load.placed import DISK, block_of
from gpuherd.models.load.prepare import Prepared
from gpuherd.models.load.quantised import loading_words
from gpuherd.models.names import shown
from gpuherd.models.plan.precision import Precision


def fitting_class(classes: Sequence[Any], config: Any, ready: Prepared) -> tuple[Any, dict[str, Any]]:
    """The first of the classes that builds the very model that was planned, and the device map that it is loaded with.

    The map is the planned one, with a place for buffers that lie in no block. What is loaded as it is stored quantised,
    and what the model's own code builds, is known only when it is loaded.

    Raises BadModel where transformers builds another model than was planned: a tensor is named.
    """
    device_map: dict[str, Any] = dict(ready.placement.device_map)
    if ready.precision is Precision.AS_STORED or not hasattr(classes[0], "_from_config"):
        return classes[0], device_map
    differences: list[str] = []
    for each in classes:
        empty = _empty_model(each, config)
        difference = _difference(empty, ready)
        if difference is None:
            first = next(iter(device_map.values()))
            for name, _ in empty.named_buffers(remove_duplicate=False):
                if block_of(name, device_map) is None:
                    device_map[name.rpartition(".")[0]] = first
            return each, device_map
        differences.append(f"{each.__name__} has {difference}")
    raise BadModel(
        f"{shown(ready.asked.model)}: transformers builds another model than was planned from its weights: "
        + "; ".join(differences)
    )


def _difference(empty: Any, ready: Prepared) -> str | None:
    """The first tensor that a model and its plan don't have alike, None where there is none."""
    planned = {tensor.name: tensor.shape for tensor in ready.base.tensors()}
    real = {name: tuple(each.shape) for name, each in empty.named_parameters(remove_duplicate=False)}
    real |= {name: tuple(each.shape) for name, each in empty.named_buffers() if name in planned}
    for name in (*real, *planned):
        if real.get(name) != planned.get(name):
            return f"{shown(name)} {_of_shape(real.get(name))}, planned {_of_shape(planned.get(name))}"
    return None


def _of_shape(shape: tuple[int, ...] | None) -> str:
    return "not at all" if shape is None else f"of shape {shape}"


def _empty_model(model_class: Any, config: Any) -> Any:
    """The model without memory."""
    import torch

    with torch.device("meta"):
        return model_class(config)


def from_pretrained(
    model_class: Any, config: Any, ready: Prepared, device_map: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """The model, and tensors of the checkpoint that it has no place for. Raises BadModel where some are missing."""
    words: dict[str, Any] = {**loading_words(ready.precision, ready.capabilities), **_file_words(ready, config)}
    folder = tempfile.TemporaryDirectory(prefix="gpuherd-offload-") if DISK in device_map.values() else None
    if folder is not None:
        words |= {"offload_folder": folder.name}
    with _no_progress_bars():
        model, told = model_class.from_pretrained(
            ready.folder,
            config=config,
            device_map=dict(device_map),
            weights_only=True,
            output_loading_info=True,
            trust_remote_code=ready.asked.trust_remote_code,
            local_files_only=True,
            **words,
        )
    if folder is not None:
        weakref.finalize(model, folder.cleanup)
    missing = [*told["missing_keys"], *(str(key) for key in told["mismatched_keys"])]
    if missing:
        # transformers fills them with random numbers, and goes on.
        raise BadModel(
            f"{shown(ready.asked.model)}: its checkpoint has no {few(sorted(missing))}, without which the model "
            "computes nonsense"
        )
    return model.eval(), sorted(told["unexpected_keys"])


def _file_words(ready: Prepared, config: Any) -> dict[str, Any]:
    """Which file is meant, where it is not the folder's usual one."""
    if ready.path.is_dir():
        return {}
    if ready.path.suffix.lower() == ".gguf":
        return {"gguf_file": ready.path.name}
    if ready.path.suffix.lower() == ".safetensors":
        config.transformers_weights = ready.path.name
        return {}
    if ready.path.name != "pytorch_model.bin":
        raise BadModel(f"{ready.path}: transformers loads a single file only if it is safetensors or GGUF")
    return {"use_safetensors": False}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps transformers' progress bars out of job logs."""
    from transformers.utils import logging as transformers_logging

    shown_before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            transformers_logging.enable_progress_bar()


def few(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    return ", ".join(shown(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
