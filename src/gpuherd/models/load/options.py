"""What a command that loads a model can be told about it: options, and what they mean together. Pure, and light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuherd.errors import UsageError
from gpuherd.models.plan.placing import WISHES, Wish
from gpuherd.models.plan.precision import Precision
from gpuherd.options import option

Offload = Literal["cpu", "disk"]
OFFLOADS: tuple[Offload, ...] = ("cpu", "disk")

_SPELLINGS = {
    "float32": Precision.FP32,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "bfloat16": Precision.BF16,
    "8bit": Precision.INT8,
    "4bit": Precision.NF4,
    "nf4dq": Precision.NF4_DQ,
}
DTYPES = tuple(each.value for each in Precision if each is not Precision.AS_STORED)
QUANTISATIONS = tuple(each.value for each in Precision if each.is_quantised)


def precision_of(word: str) -> Precision:
    """The precision that a word means. Raises UsageError, which names those that there are.

    >>> [precision_of(word).value for word in ("bf16", "torch.float16", "8bit", "nf4-dq")]
    ['bf16', 'fp16', 'int8', 'nf4-dq']
    """
    bare = word.strip().lower().removeprefix("torch.")
    found = _SPELLINGS.get(bare, bare)
    if found not in DTYPES:
        raise UsageError(f"dtype {word!r}: it is one of {', '.join(DTYPES)}")
    return Precision(found)


def quantisation_of(word: str) -> Precision:
    """The same of a way to quantise."""
    found = precision_of(word)
    if not found.is_quantised:
        raise UsageError(f"quantization {word!r}: it is one of {', '.join(QUANTISATIONS)}")
    return found


def wanted_precision(dtype: str | None, quantization: str | None, suffix: Precision | None = None) -> Precision | None:
    """The precision that was asked for; None where nothing was.

    Args:
        dtype, quantization: words, as options or keywords have them. ``quantization`` may stand beside the dtype that
            it computes in.
        suffix: what the model's name asks for (``-8bit``, ``-4bit``).

    Raises UsageError: they contradict each other.
    """
    plain = None if dtype is None else precision_of(dtype)
    found = None if quantization is None else quantisation_of(quantization)
    if found is not None and plain is not None and plain not in (found, found.computes_in):
        raise UsageError(f"dtype {plain} and quantization {found} together: {found} computes in {found.computes_in}")
    found = found or plain
    if suffix is None or found is None or found is suffix:
        return found or suffix
    if suffix is Precision.NF4 and found is Precision.NF4_DQ:
        return found
    raise UsageError(f"the model's name asks for {suffix}, the options for {found}: leave one of them out")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded. Raises UsageError for options that contradict each other."""

    dtype: Precision | None = option(
        None,
        help="precision of the weights in memory; the checkpoint's own by default",
        parse=precision_of,
        choices=DTYPES,
        group="model",
    )
    quantization: Precision | None = option(
        None,
        help="quantise by bitsandbytes while loading; the same as --dtype int8, nf4 or nf4-dq",
        aliases=("quantisation", "quantize"),
        parse=quantisation_of,
        choices=QUANTISATIONS,
        group="model",
    )
    device_map: str | None = option(
        None,
        help="where the blocks go: auto (planned), cpu, or a JSON file as 'gpuherd plan --device-map' prints it",
        metavar="auto|cpu|FILE",
        group="model",
    )
    gpus: str = option(
        "auto",
        help="the GPUs to plan for: those that are free here, or GPUs to pretend, such as 4x40GB: where there is no "
        "CUDA their blocks lie in the CPU's memory",
        metavar="auto|4x40GB",
        group="model",
    )
    parallel: Wish | None = option(
        None,
        help="fewest GPUs that hold it (auto), layers over all GPUs, each layer over all GPUs, or one GPU",
        choices=WISHES,
        group="model",
    )
    allow_offload: Offload | None = option(
        None,
        help="what fits on no GPU goes to the computer's memory or its disk, which is slow; refused otherwise",
        choices=OFFLOADS,
        group="model",
    )
    adapter: str | None = option(None, help="a LoRA adapter on top of the model", metavar="ADAPTER", group="model")
    merge_adapter: bool = option(False, help="merge the adapter into the weights", group="model")
    trust_remote_code: bool = option(False, help="run the code that a model brings; read it before", group="model")

    def __post_init__(self) -> None:
        wanted_precision(self.dtype, self.quantization)
