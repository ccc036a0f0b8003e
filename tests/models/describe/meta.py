"""What transformers builds of a config, on the meta device: the judge of all formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.models.describe.description import Architecture, Role


@dataclass(frozen=True)
class Built:
    """A model on the meta device, and the config.json that transformers saves for it."""

    model: Any
    config: Mapping[str, Any]


def built(model_type: str, fields: Mapping[str, Any]) -> Built:
    """The model of the class that the architecture names, from a config with these fields and defaults for the rest."""
    import transformers
    from tests.models.describe.formulas.fields import family_defaults
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**fields)
    kind = getattr(transformers, family_defaults()[model_type]["class_name"])
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16)
    return Built(model, {"model_type": model_type, **fields})


def compare(ours: Architecture, model: Any) -> None:
    """Asserts that names, shapes, ties, roles, blocks and splits are those of the model."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    saved = set(model.state_dict())
    shapes |= {name: tuple(b.shape) for name, b in model.named_buffers() if name in saved}
    found = {tensor.name: tensor.shape for tensor in ours.tensors()}
    assert found == shapes
    assert len(found) == len(list(ours.tensors())), "a name twice"
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    _compare_ties(ours, model)
    _compare_roles(ours, model)
    _compare_blocks(ours, model)
    _compare_splits(ours, model)


def _compare_ties(ours: Architecture, model: Any) -> None:
    first: dict[int, str] = {}
    theirs = {}
    for tensor in ours.tensors():
        p = model.get_parameter_or_buffer(tensor.name)
        if id(p) in first:
            theirs[tensor.name] = first[id(p)]
        else:
            first[id(p)] = tensor.name
    assert {tensor.name: tensor.tied_to for tensor in ours.tensors() if tensor.tied_to} == theirs


def _compare_roles(ours: Architecture, model: Any) -> None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(
        model, None, [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    )
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    for tensor in ours.tensors():
        path, _, last = tensor.name.rpartition(".")
        module = modules[path]
        quantised = (
            (type(module) is nn.Linear or isinstance(module, Conv1D))
            and last == "weight"
            and should_convert_module(path, kept)
        )
        counted = tensor.role is Role.LINEAR and not tensor.fp32_in_fp16 and not tensor.keeps_fp32
        assert counted == quantised, tensor
        assert tensor.transposed == (isinstance(module, Conv1D) and last == "weight"), tensor
        assert (tensor.role is Role.HEAD) == (module is head and last == "weight"), tensor
        assert (tensor.role is Role.EMBEDDING) == isinstance(module, nn.Embedding), tensor
        _compare_precision(tensor, model)


def _compare_precision(tensor: Any, model: Any) -> None:
    """What is made in float32 though the model is asked for in bfloat16 stays so; else by transformers' lists, whose
    entries are searched for anywhere in a name."""

    def named(modules: Any) -> bool:
        return any(name in tensor.name for name in modules or ())

    made = model.get_parameter_or_buffer(tensor.name)
    strict = named(model._keep_in_fp32_modules_strict)
    assert tensor.keeps_fp32 == (strict or made.dtype == torch.float32), tensor
    assert tensor.fp32_in_fp16 == named(model._keep_in_fp32_modules), tensor
    assert tensor.buffer == (tensor.name in dict(model.named_buffers())), tensor


def _compare_blocks(ours: Architecture, model: Any) -> None:
    modules = dict(model.named_modules())
    names = [block.name for block in ours.blocks]
    assert len(set(names)) == len(names)
    for block in ours.blocks:
        assert block.name in modules or hasattr(model, block.name), block.name
        for tensor in block.tensors:
            assert f"{tensor.name}.".startswith(f"{block.name}."), (block.name, tensor.name)
    whole = {name for name, module in modules.items() if type(module).__name__ in model._no_split_modules}
    for name in whole:
        assert any(name == block or name.startswith(f"{block}.") for block in names), f"{name} is split"
    layers = {block.name for block in ours.blocks if block.kind == "layer"}
    assert not whole or layers <= whole, layers - whole


def _compare_splits(ours: Architecture, model: Any) -> None:
    import re

    plan = {} if not ours.tensor_parallel else dict(model.tp_plan)
    for tensor in ours.tensors():
        path, _, last = tensor.name.rpartition(".")
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", tensor.name)) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        kind = (style or "").removeprefix("packed_")
        expected = kind.startswith(("colwise", "embedding")) or (kind.startswith("rowwise") and last != "bias")
        assert tensor.split == expected, (tensor, style)


def check(model_type: str, fields: Mapping[str, Any]) -> Architecture:
    """Builds both, compares them, and returns ours."""
    theirs = built(model_type, fields)
    ours = architecture_of(theirs.config, f"a {model_type}")
    compare(ours, theirs.model)
    return ours
