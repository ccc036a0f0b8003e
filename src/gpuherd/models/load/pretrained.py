"""transformers' own loading, told everything explicitly: class, dtype, device of each block, and only local files.

Refuses what transformers would let pass: a model of other shapes than the planned one, weights that are missing (it
fills them with random numbers). torch and transformers are imported inside functions only.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.load.fitting import Built, Fitted, fitted
from gpuherd.models.load.placed import DISK, Placement, block_of
from gpuherd.models.load.prepare import Prepared
from gpuherd.models.load.quantised import loading_words
from gpuherd.models.names import shown
from gpuherd.models.plan.precision import Precision


def fitted_class(classes: Sequence[Any], config: Any, ready: Prepared) -> tuple[Any, Prepared, dict[str, Any]]:
    """The first of the classes that builds the very model that was planned, the plan in its names, and the device map
    that it is loaded with: the planned one, with a place for buffers that lie in no block.

    What is loaded as it is stored quantised, and what the model's own code builds, is known only when it is loaded.

    Raises BadModel where transformers builds another model than was planned: a tensor is named.
    """
    if ready.precision is Precision.AS_STORED or not hasattr(classes[0], "_from_config"):
        return classes[0], ready, dict(ready.placement.device_map)
    from gpuherd.models.checkpoint import open_checkpoint

    stored = open_checkpoint(ready.path).tensors
    differences: list[str] = []
    for each in classes:
        empty = _empty_model(each, config)
        found = fitted(ready.base, ready.placement, _built(empty), stored)
        if isinstance(found, Fitted):
            ready = replace(ready, base=found.base, placement=found.placement)
            return each, ready, _whole_map(empty, found.placement)
        differences.append(f"{each.__name__} has {found}")
    raise BadModel(
        f"{shown(ready.asked.model)}: transformers builds another model than was planned from its weights: "
        + "; ".join(differences)
    )


def _built(empty: Any) -> Built:
    """The shapes of a model without memory."""
    parameters: dict[str, tuple[int, ...]] = {}
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, each in empty.named_parameters(remove_duplicate=False):
        parameters[name] = tuple(each.shape)
        owner = owners.setdefault(id(each), name)
        if owner != name:
            tied[name] = owner
    return Built(
        parameters=parameters,
        buffers={name: tuple(each.shape) for name, each in empty.named_buffers(remove_duplicate=False)},
        tied=tied,
        prefix=str(getattr(empty, "base_model_prefix", "")),
    )


def _whole_map(empty: Any, placement: Placement) -> dict[str, Any]:
    """The device map, with the buffers that lie in no block beside the first block."""
    device_map: dict[str, Any] = dict(placement.device_map)
    first = next(iter(device_map.values()))
    for name, _ in empty.named_buffers(remove_duplicate=False):
        if block_of(name, device_map) is None:
            device_map[name.rpartition(".")[0]] = first
    return device_map


def _empty_model(model_class: Any, config: Any) -> Any:
    """The model without memory."""
    import torch

    with torch.device("meta"):
        return model_class(config)


def from_pretrained(
    model_class: Any, config: Any, ready: Prepared, device_map: Mapping[str, Any] | None, **more: Any
) -> tuple[Any, list[str]]:
    """The model, and tensors of the checkpoint that it has no place for. Raises BadModel where some are missing.

    ``more``: further words for transformers; without a device map they say where it goes.
    """
    words: dict[str, Any] = {**loading_words(ready.precision, ready.capabilities), **_file_words(ready, config)}
    offloads = device_map is not None and DISK in device_map.values()
    folder = tempfile.TemporaryDirectory(prefix="gpuherd-offload-") if offloads else None
    if folder is not None:
        words |= {"offload_folder": folder.name}
    with _no_progress_bars(), _told_apart(ready):
        model, told = model_class.from_pretrained(
            ready.folder,
            config=config,
            device_map=None if device_map is None else dict(device_map),
            weights_only=True,
            output_loading_info=True,
            trust_remote_code=ready.asked.trust_remote_code,
            local_files_only=True,
            **words,
            **more,
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
    if ready.path.suffix.lower() == ".safetensors":
        config.transformers_weights = ready.path.name
        return {}
    if ready.path.name != "pytorch_model.bin":
        raise BadModel(f"{ready.path}: transformers loads a single file only if it is safetensors")
    return {"use_safetensors": False}


@contextmanager
def _told_apart(ready: Prepared) -> Iterator[None]:
    """A library that the model's quantisation or code wants, and what is wrong with the model, as our errors."""
    try:
        yield
    except ImportError as missing:
        raise MissingExtra(f"{shown(ready.asked.model)} needs a library that is not installed: {missing}") from None
    except ValueError as problem:
        raise BadModel(f"{shown(ready.asked.model)}: transformers can't load it: {problem}") from None


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
