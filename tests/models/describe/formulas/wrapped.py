"""Models that see images: a language model of a known family, an image encoder, and what joins the two. Pure.

The image parts lie on a GPU as a whole each; they keep nothing and count as part of no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.models.describe.formulas.fields import Fields, family_defaults
from tests.models.describe.formulas.layout import (
    Layout,
    Parts,
    block,
    gated,
    linear,
    norm,
    other,
    plain,
    table,
    within,
)
from tests.models.describe.formulas.llama import LLAMA_LIKE
from tests.models.describe.formulas.mixtures import MIXTURES

from gpuherd.models.describe.description import Block, Role, Tensor

# Families of image encoders, which ``family_defaults.json`` has too.
SIGLIP, PIXTRAL = "siglip_vision_model", "pixtral"
PARTS = (SIGLIP, PIXTRAL)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A family of multimodal models.

    Attributes:
        text_type, vision_type: families of the two configs within, where these don't say.
        vision: the parts of the image encoder, from its config.
        joined: the parts of what joins the two: from the whole config, the encoder's and the text model's.
    """

    text_type: str
    vision_type: str
    vision: Callable[[Fields], Parts]
    joined: Callable[[Fields, Fields, Fields], Parts]
    is_encoder_decoder: bool = False

    def text(self, c: Fields) -> Fields:
        """The config of the language model."""
        return c.part("text_config", self.text_type)

    def widest(self, c: Fields) -> int:
        """Of the language model."""
        return self._layout(c).widest(c)

    def blocks(self, c: Fields, _: Mapping[str, str]) -> tuple[Block, ...]:
        """The image encoder, what joins the two, then the language model."""
        return tuple(self._all(c))

    def _layout(self, text: Fields) -> Layout:
        found = {**LLAMA_LIKE, **MIXTURES}.get(text.model_type)
        if found is None:
            raise text.bad("text_config.model_type", text.model_type, "a family that is known here")
        return found

    def _all(self, c: Fields) -> Iterator[Block]:
        text, vision = self.text(c), c.part("vision_config", self.vision_type)
        if vision.model_type != self.vision_type:
            raise c.bad("vision_config.model_type", vision.model_type, self.vision_type)
        layout = self._layout(text)
        split = family_defaults()[text.model_type]["split"]
        yield block("model.vision_tower", "other", self.vision(vision))
        yield block("model.multi_modal_projector", "other", self.joined(c, vision, text))
        root = "model.language_model"
        yield from layout.body(text, root, split)
        tied = f"{root}.{layout.embedding}" if c.tied else None
        head = Tensor("lm_head.weight", (text.vocabulary, text.hidden), Role.HEAD, tied, split="head" in split)
        yield Block("lm_head", "head", (head,))


def _siglip(v: Fields) -> Parts:
    """SigLIP's image encoder (arXiv 2303.15343)."""
    patch, width = v.size("patch_size"), v.size("intermediate_size")
    yield from other("embeddings.patch_embedding.weight", v.hidden, v.size("num_channels"), patch, patch)
    yield from other("embeddings.patch_embedding.bias", v.hidden)
    yield from table("embeddings.position_embedding", (v.size("image_size") // patch) ** 2, v.hidden)
    for number in range(v.layers):
        layer = f"encoder.layers.{number}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{name}", v.hidden, v.hidden, True)
        for name in ("layer_norm1", "layer_norm2"):
            yield from norm(f"{layer}.{name}", v.hidden, True)
        yield from linear(f"{layer}.mlp.fc1", width, v.hidden, True)
        yield from linear(f"{layer}.mlp.fc2", v.hidden, width, True)
    yield from norm("post_layernorm", v.hidden, True)
    if v.flag("vision_use_head"):
        yield from other("head.probe", 1, 1, v.hidden)
        yield from other("head.attention.in_proj_weight", 3 * v.hidden, v.hidden)
        yield from other("head.attention.in_proj_bias", 3 * v.hidden)
        yield from plain(linear("head.attention.out_proj", v.hidden, v.hidden, True))
        yield from norm("head.layernorm", v.hidden, True)
        yield from linear("head.mlp.fc1", width, v.hidden, True)
        yield from linear("head.mlp.fc2", v.hidden, width, True)


def _gemma3_joined(_: Fields, vision: Fields, text: Fields) -> Parts:
    yield from other("mm_input_projection_weight", vision.hidden, text.hidden)
    yield from norm("mm_soft_emb_norm", vision.hidden)


def _pixtral(v: Fields) -> Parts:
    """Pixtral's image encoder (arXiv 2410.07073)."""
    patch = v.size("patch_size")
    yield from other("patch_conv.weight", v.hidden, v.size("num_channels"), patch, patch)
    yield from norm("ln_pre", v.hidden)
    for number in range(v.layers):
        layer = f"transformer.layers.{number}"
        for name in ("k_proj", "v_proj", "q_proj", "o_proj"):
            yield from linear(f"{layer}.attention.{name}", v.hidden, v.hidden)
        yield from within(f"{layer}.feed_forward", gated(v, v.size("intermediate_size")))
        yield from norm(f"{layer}.attention_norm", v.hidden)
        yield from norm(f"{layer}.ffn_norm", v.hidden)


def _mistral3_joined(c: Fields, vision: Fields, text: Fields) -> Parts:
    bias, merged = c.flag("multimodal_projector_bias"), c.size("spatial_merge_size") ** 2
    yield from norm("norm", vision.hidden)
    yield from linear("patch_merger.merging_layer", vision.hidden, merged * vision.hidden)
    yield from linear("linear_1", text.hidden, vision.hidden, bias)
    yield from linear("linear_2", text.hidden, text.hidden, bias)


WRAPPED: Mapping[str, Wrapped] = {
    "gemma3": Wrapped("gemma3_text", SIGLIP, _siglip, _gemma3_joined),
    "mistral3": Wrapped("mistral", PIXTRAL, _pixtral, _mistral3_joined),
}
