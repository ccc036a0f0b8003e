"""What a person should know of a plan beside its figures, as sentences. Pure."""

from __future__ import annotations

from collections import Counter

from gpuherd.models.plan.architecture import Architecture, Role, Tensor
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.weights import quantises, weight_bytes
from gpuherd.models.plan.wording import gib
from gpuherd.models.plan.workload import Workload

# Codes for less than this part of the weights: not what people expect of a quantised model.
_MOST = 0.5


def remarks_on(architecture: Architecture, precision: Precision, workload: Workload) -> tuple[str, ...]:
    """All that is to be said of this model, in this precision, for these tokens."""
    most = architecture.max_tokens
    # A model that keeps nothing of a sequence is an encoder: it writes no answers.
    answers = any(block.cache is not None for block in architecture.blocks)
    tokens = workload.tokens if answers else workload.prompt_tokens
    found = []
    if most is not None and tokens > most:
        found.append(f"{tokens} tokens a sequence; {architecture.model} was made for at most {most}")
    found += [
        sentence for sentence in (saves_little(architecture, precision), _stored(architecture, precision)) if sentence
    ]
    return tuple(found)


def saves_little(architecture: Architecture, precision: Precision) -> str:
    """Where quantisation leaves most of the model as it is, and why; "" where it doesn't.

    bitsandbytes knows modules of class Linear and Conv1D. transformers 5 fuses the experts of a mixture into one
    parameter, Falcon's matrices are a class of its own, and embeddings and head are never quantised.
    """
    if not precision.is_quantised:
        return ""
    own = [tensor for tensor in architecture.tensors() if tensor.tied_to is None and not tensor.buffer]
    rest = [tensor for tensor in own if not quantises(tensor, precision)]
    coded = 1 - sum(tensor.numel for tensor in rest) / max(1, sum(tensor.numel for tensor in own))
    if coded >= _MOST:
        return ""
    left = sum(weight_bytes(tensor, precision)[0] for tensor in rest)
    kinds: Counter[str] = Counter()
    for tensor in rest:
        kinds[_kind(tensor)] += tensor.numel
    why = kinds.most_common(1)[0][0]
    return f"{precision} saves little: bitsandbytes turns {coded:.0%} of it into codes and leaves {gib(left)} ({why})"


def _kind(tensor: Tensor) -> str:
    """What a tensor that stays as it is belongs to, in words."""
    if len(tensor.shape) > 2:
        return "experts fused into one parameter"
    if tensor.role in (Role.EMBEDDING, Role.HEAD):
        return "embedding and head"
    return "matrices of a class of their own"


def _stored(architecture: Architecture, precision: Precision) -> str:
    """What as-stored means here, where it doesn't mean what it says; "" where it does."""
    if precision is not Precision.AS_STORED:
        return ""
    if not any(tensor.stored_bytes is not None for tensor in architecture.tensors()):
        return f"none of {architecture.model}'s weights are known to be stored as codes; planned in 16 bits"
    if architecture.stored_method == "mxfp4":
        return "without the packages triton and kernels transformers unpacks MXFP4 weights to bf16, four times as much"
    return ""
