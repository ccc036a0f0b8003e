"""Architectures read off transformers' own models, module by module, so that the planner's bytes can be held against
them. It knows nothing of the formulas that are tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gpuherd.models.describe.description import Architecture, Block, LayerCache, Role, Tensor


def meta_model(config: Any) -> Any:
    """The causal model of a config, without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def architecture_of(model: Any, caches: Mapping[str, LayerCache] | LayerCache | None = None) -> Architecture:
    """The blocks of a model: what stands in its module lists of layers, and what stands around them."""
    config = model.config.get_text_config() if not model.config.is_encoder_decoder else model.config
    layer_names = _layer_names(model)
    owners: dict[int, str] = {}
    tensors: dict[str, list[Tensor]] = {}
    quantisable = quantisable_weights(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied_to = owners.setdefault(id(parameter), name)
        module = model.get_submodule(name.rpartition(".")[0])
        tensors.setdefault(_block_of(name, layer_names), []).append(
            Tensor(
                name,
                tuple(parameter.shape),
                _role(name, module, model, quantisable),
                tied_to=None if tied_to == name else tied_to,
                transposed=type(module).__name__ == "Conv1D",
            )
        )
    blocks = [_block(name, found, layer_names, caches) for name, found in tensors.items()]
    return Architecture(
        model="test",
        model_type=config.model_type,
        class_name=type(model).__name__,
        blocks=tuple(_in_order(blocks)),
        hidden_size=config.hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        heads=config.num_attention_heads,
        is_encoder_decoder=bool(model.config.is_encoder_decoder),
    )


def quantisable_weights(model: Any) -> set[str]:
    """Names of the weights that bitsandbytes turns into codes: of linear modules, the output head excepted."""
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if module is not head and (type(module) is nn.Linear or type(module).__name__ == "Conv1D")
    }


def _layer_names(model: Any) -> set[str]:
    kinds = set(model._no_split_modules or ())
    return {name for name, module in model.named_modules() if type(module).__name__ in kinds}


def _block_of(name: str, layers: set[str]) -> str:
    module = name.rpartition(".")[0]
    parts = module.split(".")
    for depth in range(len(parts), 0, -1):
        if ".".join(parts[:depth]) in layers:
            return ".".join(parts[:depth])
    return module


def _role(name: str, module: Any, model: Any, quantisable: set[str]) -> Role:
    if module is model.get_output_embeddings() and name.endswith(".weight"):
        return Role.HEAD
    if name in quantisable:
        return Role.LINEAR
    return Role.EMBEDDING if isinstance(module, nn.Embedding) else Role.OTHER


def _block(
    name: str, tensors: list[Tensor], layers: set[str], caches: Mapping[str, LayerCache] | LayerCache | None
) -> Block:
    if name in layers:
        cache = caches if isinstance(caches, LayerCache) or caches is None else caches.get(name)
        return Block(name, "layer", tuple(tensors), cache)
    if any(tensor.role is Role.HEAD for tensor in tensors):
        return Block(name, "head", tuple(tensors))
    embeds = any(tensor.role is Role.EMBEDDING for tensor in tensors)
    return Block(name, "embedding" if embeds else "norm", tuple(tensors))


def _in_order(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.kind == "embedding"] + [
        block for block in blocks if block.kind != "embedding"
    ]
