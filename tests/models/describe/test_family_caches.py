"""What each layer keeps, against the cache that the real model fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.models.describe.formulas.encoders import ENCODERS
from tests.models.describe.formulas.fields import family_defaults
from tests.models.describe.formulas.from_config import architecture_of
from tests.models.describe.test_families import ALIKE, CASES

from gpuherd.models.describe.description import LayerCache

PROMPT = 6
# It keeps its recurrent states in its modules.
IN_MODULES = frozenset({"recurrent_gemma"})


def filled(model_type: str, fields: Mapping[str, Any]) -> Any:
    """The model in bfloat16, and its cache after a prompt of six tokens."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = getattr(transformers, family_defaults()[model_type]["class_name"])
    torch.manual_seed(0)
    model = kind._from_config(CONFIG_MAPPING[model_type](**fields), dtype=torch.bfloat16).eval()
    ids = torch.arange(1, PROMPT + 1)[None]
    more = {"decoder_input_ids": ids[:, :PROMPT]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True, **more)
    return output.get("past_key_values") if output.get("past_key_values") is not None else output["cache_params"]


def kept(layer: Any) -> LayerCache:
    """What a layer of the cache holds, as numbers."""
    numbers = {"keys": 0, torch.bfloat16: 0, torch.float32: 0}
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            assert tensor.dtype == torch.bfloat16
            numbers["keys"] += tensor.numel()
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None) or {}
        for tensor in states.values() if isinstance(states, dict) else states:
            if tensor is not None:
                numbers[tensor.dtype] += tensor.numel()
    return LayerCache(
        numbers["keys"] // PROMPT,
        getattr(layer, "sliding_window", None),
        numbers[torch.bfloat16],
        numbers[torch.float32],
    )


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        pytest.param(name, case, id=f"{name}-{number}", marks=[pytest.mark.slow] if number or name in ALIKE else [])
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
        if name not in ENCODERS and name not in IN_MODULES and not case.get("add_cross_attention")
    ],
)
def test_as_the_real_model_keeps_it(model_type: str, fields: Mapping[str, Any]) -> None:
    cache = filled(model_type, fields)
    ours = architecture_of({"model_type": model_type, **fields}, model_type)
    expected = [block.cache for block in ours.blocks if block.kind == "layer" and block.cache is not None]
    own = getattr(cache, "self_attention_cache", cache)
    found = [kept(layer) for layer in own.layers]
    if ours.is_encoder_decoder:
        across = [kept(layer).per_token for layer in cache.cross_attention_cache.layers]
        found = [LayerCache(layer.per_token, per_encoder_token=each) for layer, each in zip(found, across, strict=True)]
    assert found == expected
