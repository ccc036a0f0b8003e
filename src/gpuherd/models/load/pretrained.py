"""transformers' own loading with everything explicit: class, dtype, device of each block, and only local files; and
PEFT's modules on the result.

Refuses what transformers would let pass: a model of other shapes than the planned one, weights that are missing (it
fills them with random numbers). torch, transformers and PEFT are imported inside functions only.
"""

from __future__ import annotations

import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingExtra, naming_extras
from gpuherd.models.load.options import DISK
from gpuherd.models.load.placement import Built, Fitted, Placement, block_of, fitted
from gpuherd.models.load.prepare import Prepared
from gpuherd.models.load.support import EXTRAS, loading_words, runs_own_code
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
    from gpuherd.models.checkpoints.open import open_checkpoint

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
        f"{shown(ready.request.model)}: transformers builds another model than was planned from its weights: "
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
    """The device map, with the buffers that lie in no block beside the first block.

    By their module where it has no block inside: accelerate moves a module that it is told of with all that is in it.
    """
    device_map: dict[str, Any] = dict(placement.device_map)
    first = next(iter(device_map.values()))
    outside = [name for name, _ in empty.named_buffers(remove_duplicate=False) if block_of(name, device_map) is None]
    for name in outside:
        module = name.rpartition(".")[0]
        holds_blocks = not module or any(block.startswith(f"{module}.") for block in placement.by_block)
        device_map[name if holds_blocks else module] = first
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
    overflows = any(tensor.fp32_in_fp16 for tensor in ready.base.tensors())
    words: dict[str, Any] = {
        **loading_words(ready.precision, ready.capabilities, overflows=overflows),
        **_file_words(ready, config),
    }
    offloads = device_map is not None and DISK in device_map.values()
    folder = tempfile.TemporaryDirectory(prefix="gpuherd-offload-") if offloads else None
    if folder is not None:
        words |= {"offload_folder": folder.name}
    with _no_progress_bars(), _no_word_on_buffers(), _told_apart(ready):
        model, told = model_class.from_pretrained(
            ready.folder,
            config=config,
            device_map=None if device_map is None else dict(device_map),
            weights_only=True,
            output_loading_info=True,
            trust_remote_code=runs_own_code(ready.config, trusted=ready.request.trust_remote_code),
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
            f"{shown(ready.request.model)}: its checkpoint has no {few(sorted(missing))}, without which the model "
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
        raise MissingExtra(f"{shown(ready.request.model)} needs a library that is not installed: {missing}") from None
    except ValueError as problem:
        raise BadModel(f"{shown(ready.request.model)}: transformers can't load it: {problem}") from None


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


@contextmanager
def _no_word_on_buffers() -> Iterator[None]:
    """accelerate warns of a buffer's name in a device map, which transformers reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules", UserWarning)
        yield


def few(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    return ", ".join(shown(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- adapters --------------------------------------------------------------------------------------------------------


def with_adapter(model: Any, adapter: Path, *, merge: bool) -> Any:
    """The model with the adapter: PEFT's model, or the model itself with changed weights where it is merged.

    The adapter's factors come to the device of the module that they belong to. Merging adds them module by module, so
    that no more than one weight is in memory twice.

    Raises BadModel where PEFT can't use it.
    """
    with naming_extras(EXTRAS, "loading adapters takes"):
        from peft import PeftModel
    try:
        # Read on the CPU first: PEFT's default is the first GPU, whatever lies there.
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu", local_files_only=True)
    except (ValueError, KeyError, RuntimeError, OSError) as problem:
        raise BadModel(f"{adapter} can't be put on this model: {problem}") from None
    if not merge:
        return adapted.eval()
    # PEFT's "safe" merge rounds the update to the weights' precision before it adds it; this one rounds the sum alone.
    return adapted.merge_and_unload().eval()
