"""A policy's model, tokenizer and end tokens in memory, on one device; models that stay in memory between uses. Imports
torch inside functions only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.lm.tokens import end_tokens
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


def load_anew(model: str, precision: Precision, device: str, *, adapter: str | None = None) -> LoadedModel:
    """``load_causal`` for a model that will be changed: never one that somebody else holds."""
    if precision.attention not in ATTENTIONS:
        raise UsageError(f"attention {precision.attention!r} is none of {', '.join(ATTENTIONS)}")
    from gpuherd.models.load.loading import load_model

    loaded = load_model(model, device_map=device_map_of(device), dtype=precision.dtype, adapter=adapter)
    set_attention(loaded.model, precision.attention)
    return LoadedModel(loaded.model, loaded.tokenizer, end_ids_of(loaded.model, loaded.tokenizer), loaded.input_device)


def load_frozen(
    model: str, precision: Precision, device: str, *, adapter: str | None = None, sharded: bool = False
) -> LoadedModel:
    """``load_anew`` for weights that no step changes: in ``precision.frozen``.

    Under autocast activations between the layers stay in float32, as it is with weights in float32, so that every
    figure is the same to the bit.

    Args:
        sharded: FSDP will divide it. It gives each layer bfloat16 weights and activations anyway, of float32 ones too.
    """
    held = precision.frozen
    loaded = load_anew(model, held, device, adapter=adapter)
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
