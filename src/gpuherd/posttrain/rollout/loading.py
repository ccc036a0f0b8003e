"""A policy's model, tokenizer and end tokens in memory, on one device; models that stay in memory between uses. Imports
torch inside functions only.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.lm.tokens import end_tokens
from gpuherd.models.load.identity import tokenizer_in
from gpuherd.posttrain.types import Precision

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept models", default=None)

ATTENTIONS = ("eager", "sdpa", "flash_attention_2")


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A causal model and what it is asked with.

    Attributes:
        module: transformers' (or PEFT's) module, in evaluation mode.
        tokenizer: of the adapter's folder, where that has one.
        end_ids: tokens that end an answer.
        device: where it lies whole.
    """

    module: Any
    tokenizer: Any
    end_ids: tuple[int, ...]
    device: str


def device_map_of(device: str) -> Mapping[str, str] | str:
    """The device map that puts a whole model on ``cpu``, ``cuda`` or ``cuda:0``. Raises UsageError for another.

    >>> device_map_of("cpu"), device_map_of("cuda")
    ('cpu', {'': 'cuda:0'})
    """
    if device == "cpu":
        return "cpu"
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise UsageError(f"device {device!r}: it is cpu, cuda or cuda:0")
    return {"": f"cuda:{number or 0}"}


def load_causal(model: str, precision: Precision, device: str, *, adapter: str | None = None) -> LoadedModel:
    """The model in memory, in ``precision.dtype``, with the attention that is asked for.

    Where flash attention is not installed or does not know the model, sdpa is taken, and the log says so.
    Raises what ``models.load.load_model`` raises, UsageError for an attention or device that is none.
    """
    return kept((model, precision, device, adapter), lambda: load_anew(model, precision, device, adapter=adapter))


def load_anew(
    model: str, precision: Precision, device: str, *, adapter: str | None = None, sharded: bool = False
) -> LoadedModel:
    """``load_causal`` for a model that will be changed: never one that somebody else holds.

    Args:
        sharded: FSDP will divide it between the processes of the group, which all call this together. Each reads its
            own rows of each weight and no others; where that can't be, the model is loaded whole on the CPU.
    """
    if precision.attention not in ATTENTIONS:
        raise UsageError(f"attention {precision.attention!r} is none of {', '.join(ATTENTIONS)}")
    if sharded and (found := _load_rows(model, precision, device, adapter)) is not None:
        return found
    from gpuherd.models.load.loading import load_model

    place = device_map_of("cpu" if sharded else device)
    loaded = load_model(model, device_map=place, dtype=precision.dtype, adapter=adapter)
    set_attention(loaded.model, precision.attention)
    return LoadedModel(loaded.model, loaded.tokenizer, end_ids_of(loaded.model, loaded.tokenizer), loaded.input_device)


def _load_rows(model: str, precision: Precision, device: str, adapter: str | None) -> LoadedModel | None:
    """The model with this process's rows of each weight in hand; None where transformers can't divide it: weights that
    are stored as codes, or what ``division`` says."""
    import torch

    from gpuherd.models.load.options import CPU, LoadRequest
    from gpuherd.models.load.placement import all_on
    from gpuherd.models.load.prepare import prepare
    from gpuherd.models.load.pretrained import load_weights, with_adapter
    from gpuherd.models.memory.weights import Precision as Stored

    if (plan := division(device)) is None:
        return None
    request = LoadRequest(model, device_map=CPU, dtype=precision.dtype, adapter=adapter)
    # Whether all of it has room in one place does not matter: no process holds it.
    ready = prepare(request, lambda _request, whole, _precision, _machine: (all_on(whole, CPU), (), ()))
    if ready.precision.is_quantised or ready.precision is Stored.AS_STORED:
        return None
    # What is drawn later (a new adapter) is as where the model is loaded whole.
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        read, ready = load_weights(ready, divided=plan)
        module = with_rows(read)
    if ready.adapter is not None:
        module = with_adapter(module, ready.adapter, merge=False)
    set_attention(module.eval(), precision.attention)
    tokenizer = tokenizer_in(ready.tokenizer_folder)
    return LoadedModel(module, tokenizer, end_ids_of(module, tokenizer), device)


def division(device: str) -> Any:
    """transformers' plan to load a model so that each process of the group reads its own rows; None where there is one
    process, where transformers is of before it could, or for another device than torch prefers, which it takes."""
    import torch
    import transformers.distributed

    preferred = torch.accelerator.current_accelerator()
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    divides = "fsdp_size" in getattr(transformers.distributed.DistributedConfig, "__dataclass_fields__", ())
    if size == 1 or not divides or device.partition(":")[0] != ("cpu" if preferred is None else preferred.type):
        return None
    return transformers.distributed.DistributedConfig(fsdp_size=size)


def with_rows(read: Any) -> Any:
    """The module of a model that transformers has loaded and sharded itself: not sharded yet, without memory, with this
    process's rows in hand (``strategies.hold``), so that adapters and heads can be put on it before it is."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from gpuherd.posttrain.engine import strategies

    config = copy.deepcopy(read.config)
    config.distributed_config = None
    plain: Any = next(each for each in type(read).__mro__ if not issubclass(each, FSDPModule))
    with torch.device("meta"):
        module = plain(config)
    module.tie_weights()
    strategies.hold(module, read)
    for name in ("generation_config", "_weight_conversions"):  # the second says how it is saved
        if hasattr(read, name):
            setattr(module, name, getattr(read, name))
    return module


def load_frozen(
    model: str, precision: Precision, device: str, *, adapter: str | None = None, sharded: bool = False
) -> LoadedModel:
    """``load_anew`` for weights that no step changes: in ``precision.frozen``.

    Under autocast activations between the layers stay in float32, as it is with weights in float32, so that every
    figure is the same to the bit.

    Args:
        sharded: as in ``load_anew``. FSDP gives each layer bfloat16 weights and activations, of float32 ones too.
    """
    held = precision.frozen
    loaded = load_anew(model, held, device, adapter=adapter, sharded=sharded)
    if held != precision and not sharded and not getattr(loaded.module, "is_quantized", False):
        loaded.module.get_input_embeddings().register_forward_hook(lambda _module, _given, made: made.float())
    return loaded


def end_ids_of(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer of this model: all that its configs and the tokenizer name.

    Raises UsageError where there are none: no answer would ever end.
    """
    generation = getattr(module, "generation_config", None)
    found = end_tokens(tokenizer, module.config.to_dict(), None if generation is None else generation.to_dict())
    if not found.ids:
        raise UsageError("neither the model's configs nor its tokenizer name a token that ends an answer (eos_token)")
    return found.ids


@functools.cache
def _warn_of_attention(kind: str, problem: str) -> None:
    """Once a process: the reference model is loaded in the same way as the policy."""
    logger.warning("attention %s can't be had: %s", kind, problem)


def set_attention(module: Any, wanted: str) -> None:
    """Has the model attend as is wanted; where it can't by sdpa, or eagerly, with a warning."""
    if module.config._attn_implementation == wanted:
        return
    for each in dict.fromkeys((wanted, "sdpa", "eager")):
        try:
            module.set_attn_implementation(each)
        except (ImportError, ValueError) as problem:
            _warn_of_attention(each, str(problem))
        else:
            return


# --- models that stay in memory ---------------------------------------------------------------------------------------


@contextmanager
def keeping_models() -> Iterator[None]:
    """While it lasts, what is loaded through ``kept`` stays in memory and is found again."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(key: Hashable, load: Callable[[], T]) -> T:
    """What ``load`` gives; where models are kept, what it gave for this key before."""
    there = _KEPT.get()
    if there is None:
        return load()
    if key not in there:
        there[key] = load()
    found: T = there[key]
    return found
