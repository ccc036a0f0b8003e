"""What models really take: the storages of a loaded model, and of the cache that it keeps while it generates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuherd.models.memory.weights import Precision

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def loaded(folder: Path, precision: Precision) -> Any:
    """A model as ``from_pretrained`` puts it into memory."""
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[precision.computes_in]
    if not precision.is_quantised:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    settings = (
        BitsAndBytesConfig(load_in_8bit=True)
        if precision is Precision.INT8
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=precision is Precision.NF4_DQ,
            bnb_4bit_compute_dtype=dtype,
        )
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=settings).eval()


def nbytes(tensors: Iterable[Any]) -> int:
    """What tensors take, each storage once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def state_tensors(weight: Any) -> list[Any]:
    """What bitsandbytes keeps beside a weight; nothing beside a plain one."""
    if getattr(weight, "SCB", None) is not None:
        return [weight.SCB]
    state = getattr(weight, "quant_state", None)
    if state is None:
        return []
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def storage_bytes(model: Any) -> tuple[int, int, int]:
    """Bytes of a model's parameters, of their quantisation, and of its buffers."""
    parameters = list(model.parameters())
    return (
        nbytes(parameters),
        nbytes(each for weight in parameters for each in state_tensors(weight)),
        nbytes(model.buffers()),
    )


def cache_storage(model: Any, *, batch: int, prompt: int, new: int) -> int:
    """Bytes of the storages that the cache holds after so many new tokens."""
    answer = model.generate(
        torch.randint(3, 90, (batch, prompt)),
        attention_mask=torch.ones(batch, prompt, dtype=torch.long),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return nbytes(cache_tensors(answer.past_key_values))


def cache_tensors(cache: Any) -> list[Any]:
    """All tensors of a cache, of both parts of an encoder-decoder model's."""
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if hasattr(cache, "cross_attention_cache")
        else [cache]
    )
    found: list[Any] = []
    for layer in (layer for part in parts for layer in part.layers):
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                found.append(getattr(layer, name))
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None) or {}
            found += [each for each in (states.values() if isinstance(states, dict) else states) if each is not None]
    return found
