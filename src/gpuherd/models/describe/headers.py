"""The architecture of a model from the headers of its weights: what transformers builds of the config, against which
every tensor is checked; where nothing describes the model, what its tensors are called and shaped like. Pure.

Headers alone assume, and say so: that numbered modules are layers that follow each other, that matrices are Linear
modules, that names in the checkpoint are those of the loaded model, and that each layer keeps keys and values of all
tokens.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.quantized import method_of
from gpuherd.models.describe.config import (
    assumptions_of,
    images_of,
    model_type_of,
    number_of,
    stored_precision,
    text_part,
)
from gpuherd.models.describe.description import Architecture, Block, Kind, LayerCache, Role, Tensor
from gpuherd.models.names import quoted
from gpuherd.models.tensors.fused import EXPERTS_APART
from gpuherd.models.tensors.kinds import Ties, classify, ties_of
from gpuherd.models.tensors.source import TensorInfo

# Numbers of at most nine digits, as layers have: Python reads none of thousands.
_NUMBERED = re.compile(r"(?P<list>.*?\D)\.(?P<number>[0-9]{1,9})\.(?P<rest>.+)|(?P<bare>[0-9]{1,9})\.(?P<bare_rest>.+)")
_KEYS = re.compile(r"(?:.+\.)?(?:k_proj|key|k_lin|wk|k|attn_k)\.weight")
_VALUES = re.compile(r"(?:.+\.)?(?:v_proj|value|v_lin|wv|v|attn_v)\.weight")
_QUERIES = re.compile(r"(?:.+\.)?(?:q_proj|query|q_lin|wq|q|attn_q)\.weight")
_NORM = re.compile(r"(?:.*\.)?[\w]*(?:norm|ln|layernorm)[\w]*", re.IGNORECASE)
_NO_TIES = Ties({}, frozenset())
_USUAL_HEAD = 128


def of_headers(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str) -> Architecture:
    """The architecture of a checkpoint, as far as headers and the usual fields of a config tell.

    Raises BadModel when there are no numbered layers, or when neither the config nor the shapes tell how large the KV
    cache is; the message names what is missing.
    """
    stored = Stored(tensors)
    weights = {
        name: replace(info, nbytes=_code_bytes([info], stored)) if info.dequantized else info
        for name, info in tensors.items()
        if info.scales_of is None and info.shares is None
    }
    quantised = _quantised_as(tensors)
    text = {**config, **(text_part(config) or {})}
    ties = ties_of(weights, config)
    layers, rest = _sorted_out(weights)
    main = _main_list(layers, model)
    assumptions = [_assumed_shapes(model_type_of(config), main, len(layers[main]))]
    per_token, heads = _cache(text, layers[main], model, assumptions)
    outside = _blocks_outside(rest, ties)
    blocks = [block for block in outside if block.kind in ("embedding", "other")]
    for name in sorted(layers, key=lambda name: name == main):
        for number in sorted(layers[name]):
            blocks.append(_layer(f"{name}.{number}".lstrip("."), layers[name][number], name == main, per_token))
    blocks += [block for kind in ("norm", "head") for block in outside if block.kind == kind]
    embedding = next((info for info in rest if _role(info, ties) is Role.EMBEDDING), None)
    hidden = number_of(text, "hidden") or (embedding.shape[-1] if embedding is not None else _width(layers[main]))
    return Architecture(
        model=model,
        model_type=model_type_of(config) or "unknown",
        class_name=_class_name(config),
        blocks=tuple(blocks),
        hidden_size=hidden,
        intermediate_size=number_of(text, "intermediate") or 4 * hidden,
        vocab_size=embedding.shape[0] if embedding is not None else hidden,
        heads=heads,
        stored=_AS_STORED if quantised else precision_of(tensors) or stored_precision(config),
        stored_method=method_of(config) if quantised else None,
        source="weights",
        assumptions=(*assumptions, *assumptions_of(config), *quantised),
        max_tokens=number_of(text, "tokens"),
    )


def _assumed_shapes(model_type: str, main: str, count: int) -> str:
    what = (
        f"The architecture {quoted(model_type)} is not known here" if model_type else "There is no config with a type"
    )
    return (
        f"{what}: shapes are those of the weights, the {count} modules {quoted(main)} are taken for its layers, "
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
            f"{quoted(model)}: its architecture is not known here, and its tensors are not in numbered layers either"
        )
    return max(layers, key=lambda name: sum(info.nbytes for members in layers[name].values() for info in members))


def _cache(
    text: Mapping[str, Any], layers: Mapping[int, Sequence[TensorInfo]], model: str, assumptions: list[str]
) -> tuple[int, int]:
    """Numbers that a layer keeps of each token, and query heads."""
    heads, hidden = number_of(text, "heads"), number_of(text, "hidden")
    size = number_of(text, "head_dim") or (hidden // heads if heads and hidden else 0)
    first = layers[min(layers)]
    if heads is not None and size:
        return 2 * (number_of(text, "key_heads") or heads) * size, heads
    keys = next((info for info in first if _KEYS.fullmatch(info.name)), None)
    values = next((info for info in first if _VALUES.fullmatch(info.name)), None)
    if keys is None or values is None:
        missing = "num_attention_heads" if heads is None else "hidden_size"
        raise BadModel(
            f"{quoted(model)}: how large its KV cache is can't be told: its config has no {missing}, and its weights "
            "no key and value projections of their own. Put its config.json beside the weights"
        )
    queries = next((info for info in first if _QUERIES.fullmatch(info.name)), keys)
    assumptions.append(
        f"There is no config that says how many heads there are: the KV cache is taken from the shapes of "
        f"{quoted(keys.name)} and {quoted(values.name)}, heads of {_USUAL_HEAD} numbers are assumed."
    )
    return keys.shape[0] + values.shape[0], max(1, queries.shape[0] // _USUAL_HEAD)


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
    return Tensor(info.name, info.shape, role, same, stored_bytes=info.nbytes if info.dequantized else None)


def _layer(name: str, members: Sequence[TensorInfo], is_main: bool, per_token: int) -> Block:
    tensors = tuple(_tensor(info, _NO_TIES) for info in members)
    return Block(name, "layer", tensors, LayerCache(per_token)) if is_main else Block(name, "other", tensors)


def _blocks_outside(rest: Sequence[TensorInfo], ties: Ties) -> list[Block]:
    """The modules outside of numbered ones, each as a whole."""
    modules: dict[str, list[Tensor]] = defaultdict(list)
    for info in rest:
        module, _, last = info.name.rpartition(".")
        modules[module or last].append(_tensor(info, ties))
    blocks = []
    for name, tensors in modules.items():
        roles = {tensor.role for tensor in tensors}
        kind: Kind = "embedding" if Role.EMBEDDING in roles else "head" if Role.HEAD in roles else "other"
        blocks.append(Block(name, "norm" if kind == "other" and _NORM.fullmatch(name) else kind, tuple(tensors)))
    return blocks


def _class_name(config: Mapping[str, Any]) -> str | None:
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else None


# Finds for each tensor of the loaded model the tensors of a checkpoint that it is made of. Pure.
#
# Checkpoints differ from the loaded model by wrapping modules (``transformer.h.0...`` and ``h.0...``), by names of
# older releases, and by experts that are stored one by one and loaded as one tensor.

# Modules around a model's own, which a checkpoint may have or not.
_WRAPPERS = frozenset(
    {"model", "transformer", "language_model", "gpt_neox", "backbone", "bert", "roberta", "distilbert", "vision_model"}
)
# Older names -> names in the loaded model, in this order.
_RENAMED: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^embed_out\.", "lm_head."),
        (r"^embedding\.weight$", "embeddings.weight"),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.router\.layer\.weight$", ".router.weight"),
    )
]
_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
# Names of the matrices of one expert, by the parameter that they are fused to.
_FUSED = {name: {part for *_, parts in forms for part in parts} for name, forms in EXPERTS_APART.items()}
# Where a module of the loaded model has another name than the one it is stored under: loaded -> stored.
_ELSEWHERE = ((".mlp.", ".block_sparse_moe."), (".mlp.router.", ".block_sparse_moe.gate."))


class Stored:
    """A checkpoint's tensors, to be looked up by the names of the loaded model."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._by_name: dict[str, TensorInfo] = {}
        self._experts: dict[str, list[TensorInfo]] = defaultdict(list)
        self._scales: dict[str, list[TensorInfo]] = defaultdict(list)
        for name, info in tensors.items():
            if info.scales_of is not None:
                self._scales[info.scales_of].append(info)
                continue
            plain = _unwrapped(name)
            self._by_name.setdefault(plain, info)
            match = _EXPERT.fullmatch(plain)
            if match is not None:
                self._experts[match["module"]].append(info)

    def of(self, name: str) -> Sequence[TensorInfo]:
        """The tensors that are loaded into this one: one, or those of all experts; none if there are none."""
        for candidate in _names(_unwrapped(name)):
            if candidate in self._by_name:
                return [self._by_name[candidate]]
            module, _, last = candidate.rpartition(".")
            if last in _FUSED and module in self._experts:
                return [info for info in self._experts[module] if info.name.split(".")[-2] in _FUSED[last]]
        return []

    def scales_of(self, info: TensorInfo) -> Sequence[TensorInfo]:
        """The scales, zeros and tables that belong to a tensor of codes."""
        return self._scales.get(info.name, [])


def _unwrapped(name: str) -> str:
    """A name without wrapping modules, as newer releases have it."""
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    for pattern, replacement in _RENAMED:
        plain = pattern.sub(replacement, plain)
    return plain


def _names(plain: str) -> Sequence[str]:
    """The names that a tensor may be stored under."""
    return [plain, *(plain.replace(loaded, stored) for loaded, stored in reversed(_ELSEWHERE) if loaded in plain)]


# --- a description held against the headers ------------------------------------------------------------------------

_AS_STORED = "as-stored"  # the word of the precision that plans give such weights
_PRECISIONS = {"F32": "fp32", "F64": "fp32", "F16": "fp16", "BF16": "bf16"}
# Tables and codes of so little that only what is left over and above it is worth a sentence.
_LEFT_OVER = 0.01


def of_weights(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str, described: Architecture
) -> Architecture:
    """What is described, with the sizes that a checkpoint stores.

    Args:
        config: its config.json.
        tensors: what its headers list (``Checkpoint.tensors``).
        model: how the user named it, for messages.
        described: what transformers builds of the config.

    Raises:
        BadModel: a tensor has another shape than the config asks for, tensors are missing, or what the plan needs can
            be known from neither.
    """
    stored = Stored(tensors)
    for tensor in described.tensors():
        _check_shape(tensor, stored.of(tensor.name), described, model)
    try:
        return _checked(described, config, tensors, stored, model)
    except BadModel:
        # transformers renames some models' tensors while it loads them: as many numbers are the same model.
        used = {info.name for tensor in described.tensors() for info in stored.of(tensor.name)}
        if not _unused(tensors, used):
            raise
        held = sum(prod(info.shape) for info in tensors.values() if info.scales_of is None and info.shares is None)
        quantised = any(info.dequantized for info in tensors.values())
        if quantised or abs(held - described.parameters) > _LEFT_OVER * described.parameters:
            return of_headers(config, tensors, model)
    remark = "Its weights have other names than transformers' modules: their shapes are taken from the config."
    stored_in = precision_of(tensors) or described.stored
    return replace(described, stored=stored_in).with_remarks(remark)


def _unused(tensors: Mapping[str, TensorInfo], used: set[str]) -> list[TensorInfo]:
    """The tensors of a checkpoint that are loaded under no name of the described model."""
    others = (info for info in tensors.values() if info.name not in used)
    return [info for info in others if info.scales_of is None and info.shares is None]


def _checked(
    described: Architecture, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], stored: Stored, model: str
) -> Architecture:
    """What the config says, held against the headers. Raises BadModel where they disagree."""
    used: set[str] = set()
    blocks = [_found(block, stored, used, described, model) for block in described.blocks]
    kept = tuple(block for block in blocks if block is not None)
    assumptions = [*assumptions_of(config), *images_of(kept)]
    if len(kept) < len(blocks):
        absent = [block for block, found in zip(described.blocks, blocks, strict=True) if found is None]
        what = "output head" if absent[0].kind == "head" else absent[0].name
        assumptions.append(f"The weights hold no {what}: planned without one.")
    quantised = _quantised_as(tensors)
    assumptions += [*quantised, *_left_over(tensors, used)]
    return replace(
        described,
        blocks=kept,
        stored_method=method_of(config) if quantised else None,
        stored=_AS_STORED if quantised else precision_of(tensors) or described.stored,
        source="weights",
        assumptions=tuple(assumptions),
    )


def _quantised_as(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """A sentence where the checkpoint stores codes."""
    formats = dict.fromkeys(info.dtype for info in tensors.values() if info.dequantized)
    if not formats:
        return ()
    return (f"Stored quantised ({', '.join(formats)}): as-stored is the size of its codes and scales.",)


def precision_of(tensors: Mapping[str, TensorInfo]) -> str | None:
    """The precision that most bytes are stored in; None where it is none that weights lie in."""
    counted: Counter[str] = Counter()
    for info in tensors.values():
        counted[info.dtype] += info.nbytes
    most = counted.most_common(1)
    return _PRECISIONS.get(most[0][0]) if most else None


def _found(block: Block, stored: Stored, used: set[str], described: Architecture, model: str) -> Block | None:
    """The block with the sizes that the checkpoint stores; None for a head or pooler that it hasn't."""
    tensors = []
    for tensor in block.tensors:
        infos = stored.of(tensor.name)
        if not infos:
            if tensor.tied_to is not None or tensor.buffer or stored_elsewhere(tensor, described, stored):
                tensors.append(tensor)
                continue
            # Encoders that were saved with a head for labels or masked words have no pooler.
            if block.kind == "head" or block.name.rpartition(".")[2] == "pooler":
                return None
            raise BadModel(
                f"{quoted(model)}: config and weights disagree: the config ({described.model_type}) asks for "
                f"{quoted(tensor.name)} of shape {tensor.shape}, which the weights don't have"
            )
        used.update(info.name for info in infos)
        tensors.append(_as_stored(tensor, infos, stored))
    return replace(block, tensors=tuple(tensors))


def stored_elsewhere(tensor: Tensor, described: Architecture, stored: Stored) -> bool:
    """Whether only another name of the same storage is in the file, such as the head for the embedding."""
    return any(stored.of(other.name) for other in described.tensors() if other.tied_to == tensor.name)


def _check_shape(tensor: Tensor, infos: Sequence[TensorInfo], described: Architecture, model: str) -> None:
    """One tensor of the very shape, or experts that are as many numbers, each of the two last axes; nothing of one that
    isn't stored. Raises BadModel."""
    if not infos:
        return
    form = infos[0].shape
    if len(infos) > 1:
        fits = sum(prod(info.shape) for info in infos) == tensor.numel
    else:
        fits = form == tensor.shape or (infos[0].dequantized and sorted(form) == sorted(tensor.shape))
    if fits:
        return
    each = infos[0]
    what = quoted(each.name) if len(infos) == 1 else f"{quoted(each.name)} and {len(infos) - 1} more experts"
    raise BadModel(
        f"{quoted(model)}: config and weights disagree: {what} has the shape {each.shape} in the weights; the config "
        f"({described.model_type}) asks for {tensor.shape}"
    )


def _as_stored(tensor: Tensor, infos: Sequence[TensorInfo], stored: Stored) -> Tensor:
    """The tensor with the bytes of its codes, where it is stored as such."""
    if not any(info.dequantized for info in infos):
        return tensor
    return replace(tensor, stored_bytes=_code_bytes(infos, stored))


def _code_bytes(infos: Sequence[TensorInfo], stored: Stored) -> int:
    """What codes take in memory, with their scales, zeros and tables."""
    parts = [part for info in infos for part in (info, *stored.scales_of(info))]
    return sum(part.nbytes for part in parts if "quant_state." not in part.name)


def _left_over(tensors: Mapping[str, TensorInfo], used: set[str]) -> list[str]:
    """A sentence on what the checkpoint holds and the loaded model does not, if that is much."""
    left = _unused(tensors, used)
    size, whole = sum(info.nbytes for info in left), sum(info.nbytes for info in tensors.values())
    if size <= _LEFT_OVER * whole:
        return []
    return [
        f"{len(left)} tensors of the checkpoint ({size / 1e9:.2f} GB, such as {quoted(left[0].name)}) are no part of "
        "the model that is planned."
    ]
