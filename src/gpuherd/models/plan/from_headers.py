"""The architecture of a model whose family is not known, from what its tensors are called and shaped like. Pure.

Assumes, and says so: that numbered modules are layers that follow each other, that matrices are Linear modules, that
names in the checkpoint are those of the loaded model, and that each layer keeps keys and values of all tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.names import shown
from gpuherd.models.plan.architecture import Architecture, Block, LayerCache, Role, Tensor
from gpuherd.models.plan.fields import text_part
from gpuherd.models.plan.from_config import assumptions_of, model_type_of, stored_precision
from gpuherd.models.tensors.kinds import Ties, classify, ties_of
from gpuherd.models.tensors.source import TensorInfo

_NUMBERED = re.compile(r"(?P<list>.*?\D)\.(?P<number>\d+)\.(?P<rest>.+)|(?P<bare>\d+)\.(?P<bare_rest>.+)")
_KEYS = re.compile(r"(?:.+\.)?(?:k_proj|key|k_lin|wk|k|attn_k)\.weight")
_VALUES = re.compile(r"(?:.+\.)?(?:v_proj|value|v_lin|wv|v|attn_v)\.weight")
_QUERIES = re.compile(r"(?:.+\.)?(?:q_proj|query|q_lin|wq|q|attn_q)\.weight")
_NORM = re.compile(r"(?:.*\.)?[\w]*(?:norm|ln|layernorm)[\w]*", re.IGNORECASE)
_NO_TIES = Ties({}, frozenset())
# The names that configs have for the same field.
_NAMES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "key_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_dim": ("head_dim", "kv_channels", "d_kv", "head_size"),
    "intermediate": ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "hidden_dim"),
    "tokens": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_USUAL_HEAD = 128


def architecture_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str) -> Architecture:
    """The architecture of a checkpoint, as far as headers and the usual fields of a config tell.

    Raises BadModel when there are no numbered layers, or when neither the config nor the shapes tell how large the KV
    cache is; the message names what is missing.
    """
    weights = {name: info for name, info in tensors.items() if info.scales_of is None and info.shares is None}
    text = {**config, **(text_part(config) or {})}
    ties = ties_of(weights, config)
    layers, rest = _sorted_out(weights)
    main = _main_list(layers, model)
    assumptions = [_told(model_type_of(config), main, len(layers[main]))]
    per_token, heads = _cache(text, layers[main], model, assumptions)
    blocks = [*_blocks_before(rest, ties)]
    for name in sorted(layers, key=lambda name: name == main):
        for number in sorted(layers[name]):
            blocks.append(_layer(f"{name}.{number}".lstrip("."), layers[name][number], name == main, per_token))
    blocks += _blocks_after(rest, ties)
    embedding = next((info for info in rest if _role(info, ties) is Role.EMBEDDING), None)
    hidden = _number(text, "hidden") or (embedding.shape[-1] if embedding is not None else _width(layers[main]))
    return Architecture(
        model=model,
        model_type=model_type_of(config) or "unknown",
        class_name=_class_name(config),
        blocks=tuple(blocks),
        hidden_size=hidden,
        intermediate_size=_number(text, "intermediate") or 4 * hidden,
        vocab_size=embedding.shape[0] if embedding is not None else hidden,
        heads=heads,
        stored=stored_precision(config),
        source="weights",
        assumptions=(*assumptions, *assumptions_of(config)),
        max_tokens=_number(text, "tokens"),
    )


def _told(model_type: str, main: str, count: int) -> str:
    what = f"The architecture {shown(model_type)} is not known here" if model_type else "There is no config with a type"
    return (
        f"{what}: shapes are those of the weights, the {count} modules {shown(main)} are taken for its layers, "
        "matrices for Linear modules, every layer is taken to keep the keys and values of all tokens, and to compute "
        "as Llama's do, with a fused kernel for its attention: without one long prompts need far more."
    )


Layers = dict[str, dict[int, list[TensorInfo]]]


def _sorted_out(weights: Mapping[str, TensorInfo]) -> tuple[Layers, list[TensorInfo]]:
    """Tensors by list and number of the outermost numbered module, and those outside of any."""
    layers: Layers = defaultdict(lambda: defaultdict(list))
    rest = []
    for name, info in weights.items():
        match = _NUMBERED.fullmatch(name)
        if match is None:
            rest.append(info)
        elif match["bare"] is not None:
            layers[""][int(match["bare"])].append(info)
        else:
            layers[match["list"]][int(match["number"])].append(info)
    return layers, rest


def _main_list(layers: Layers, model: str) -> str:
    """The list of modules with the most bytes: the layers."""
    if not layers:
        raise BadModel(
            f"{shown(model)}: its architecture is not known here, and its tensors are not in numbered layers either"
        )
    return max(layers, key=lambda name: sum(info.nbytes for members in layers[name].values() for info in members))


def _cache(
    text: Mapping[str, Any], layers: Mapping[int, Sequence[TensorInfo]], model: str, assumptions: list[str]
) -> tuple[int, int]:
    """Numbers that a layer keeps of each token, and query heads."""
    heads, hidden = _number(text, "heads"), _number(text, "hidden")
    size = _number(text, "head_dim") or (hidden // heads if heads and hidden else None)
    first = layers[min(layers)]
    if heads is not None and size is not None:
        return 2 * (_number(text, "key_heads") or heads) * size, heads
    keys = next((info for info in first if _KEYS.fullmatch(info.name)), None)
    values = next((info for info in first if _VALUES.fullmatch(info.name)), None)
    if keys is None or values is None:
        missing = "num_attention_heads" if heads is None else "hidden_size"
        raise BadModel(
            f"{shown(model)}: how large its KV cache is can't be told: its config has no {missing}, and its weights no "
            "key and value projections of their own. Put its config.json beside the weights"
        )
    queries = next((info for info in first if _QUERIES.fullmatch(info.name)), keys)
    assumptions.append(
        f"There is no config that says how many heads there are: the KV cache is taken from the shapes of "
        f"{shown(keys.name)} and {shown(values.name)}, heads of {_USUAL_HEAD} numbers are assumed."
    )
    return keys.shape[0] + values.shape[0], max(1, queries.shape[0] // _USUAL_HEAD)


def _number(text: Mapping[str, Any], what: str) -> int | None:
    """A whole number above 0 from the first field that has one."""
    values = (text.get(name) for name in _NAMES[what])
    return next((value for value in values if type(value) is int and 0 < value < 1 << 40), None)


def _width(layers: Mapping[int, Sequence[TensorInfo]]) -> int:
    """The common divisor of all matrix sides in a layer: at least that wide is the stream."""
    sides = [side for info in layers[min(layers)] if len(info.shape) == 2 for side in info.shape]
    return max(1, gcd(*sides))


def _role(info: TensorInfo, ties: Ties) -> Role:
    """By the rules that the analysis of spectra has for the same question."""
    kind, _ = classify(info, ties, embeddings=True)
    tied = info.name in ties.counted_in
    if _is_head(info.name) and (tied or kind in ("linear", "embedding")):
        return Role.HEAD
    if kind == "embedding" or tied:
        return Role.EMBEDDING
    return Role.LINEAR if kind == "linear" else Role.OTHER


def _is_head(name: str) -> bool:
    return name.split(".")[-2:-1] in (["lm_head"], ["embed_out"], ["output_layer"], ["output"]) and name.count(".") <= 2


def _tensor(info: TensorInfo, ties: Ties) -> Tensor:
    role = _role(info, ties) if len(info.shape) >= 2 else Role.OTHER
    same = ties.counted_in.get(info.name)
    return Tensor(info.name, info.shape, role, same, stored_bytes=info.nbytes if info.decoded else None)


def _layer(name: str, members: Sequence[TensorInfo], is_main: bool, per_token: int) -> Block:
    tensors = tuple(_tensor(info, _NO_TIES) for info in members)
    return Block(name, "layer", tensors, LayerCache(per_token)) if is_main else Block(name, "other", tensors)


def _modules(members: Sequence[TensorInfo]) -> Mapping[str, list[TensorInfo]]:
    """Tensors by the module that they are in."""
    found: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in members:
        module, _, last = info.name.rpartition(".")
        found[module if module else last].append(info)
    return found


def _blocks_before(rest: Sequence[TensorInfo], ties: Ties) -> list[Block]:
    """Embeddings, and what is neither norm nor head."""
    blocks = []
    for name, members in _modules(rest).items():
        tensors = tuple(_tensor(info, ties) for info in members)
        if any(tensor.role is Role.EMBEDDING for tensor in tensors):
            blocks.append(Block(name, "embedding", tensors))
        elif not _NORM.fullmatch(name) and not any(tensor.role is Role.HEAD for tensor in tensors):
            blocks.append(Block(name, "other", tensors))
    return blocks


def _blocks_after(rest: Sequence[TensorInfo], ties: Ties) -> list[Block]:
    """Norms, then the head."""
    norms, heads = [], []
    for name, members in _modules(rest).items():
        tensors = tuple(_tensor(info, ties) for info in members)
        if any(tensor.role is Role.HEAD for tensor in tensors):
            heads.append(Block(name, "head", tensors))
        elif _NORM.fullmatch(name) and not any(tensor.role is Role.EMBEDDING for tensor in tensors):
            norms.append(Block(name, "norm", tensors))
    return [*norms, *heads]


def _class_name(config: Mapping[str, Any]) -> str | None:
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else None
