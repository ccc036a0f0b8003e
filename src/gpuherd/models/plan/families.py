"""The families of models whose shapes are known by formula: ``model_type`` of a config -> its layout. Pure.

Names, shapes and roles are those of the model that transformers 5 builds; tests compare every one with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuherd.models.plan.fields import Fields
from gpuherd.models.plan.layout import Layout
from gpuherd.models.plan.parts import Parts, attention, gated, norm, within


def _llama(c: Fields, _: int) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from within("mlp", gated(c, c.size("intermediate_size"), c.flag("mlp_bias")))
    yield from norm("input_layernorm", c.hidden)
    yield from norm("post_attention_layernorm", c.hidden)


FAMILIES: Mapping[str, Layout] = {
    "llama": Layout(_llama),
}
