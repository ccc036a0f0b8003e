"""What a command that loads a model can be told about it: options, and what they mean together. Pure, and light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuherd.errors import UsageError
from gpuherd.models.place.placement import PARALLEL_OPTIONS, ParallelOption
from gpuherd.models.place.request import DTYPES, parse_precision
from gpuherd.models.plan.precision import Precision
from gpuherd.options import option

Offload = Literal["cpu", "disk"]
OFFLOADS: tuple[Offload, ...] = ("cpu", "disk")

QUANTISATIONS = tuple(each.value for each in Precision if each.is_quantised)


def quantisation_named(word: str) -> Precision:
    """The way to quantise of this name. Raises UsageError, which names those that there are.

    >>> [quantisation_named(word).value for word in ("8bit", "nf4-dq")]
    ['int8', 'nf4-dq']
    """
    found = parse_precision(word)
    if not found.is_quantised:
        raise UsageError(f"quantization {word!r}: it is one of {', '.join(QUANTISATIONS)}")
    return found


def said_precision(dtype: str | None, quantization: str | None) -> Precision | None:
    """The precision that two words ask for, None where neither is said.

    ``quantization`` may stand beside the dtype that it computes in. Raises UsageError where they contradict each other.
    """
    plain = None if dtype is None else parse_precision(dtype)
    found = None if quantization is None else quantisation_named(quantization)
    if found is not None and plain is not None and plain not in (found, found.computes_in):
        raise UsageError(f"dtype {plain} and quantization {found} together: {found} computes in {found.computes_in}")
    return found or plain


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded, on whatever GPUs a job has. Raises UsageError for options that contradict each other."""

    dtype: Precision | None = option(
        None,
        help="precision of the weights in memory; the checkpoint's own by default",
        parse=parse_precision,
        choices=DTYPES,
        group="model",
    )
    quantization: Precision | None = option(
        None,
        help="quantise by bitsandbytes while loading; the same as --dtype int8, nf4 or nf4-dq",
        aliases=("quantisation", "quantize"),
        parse=quantisation_named,
        choices=QUANTISATIONS,
        group="model",
    )
    device_map: str | None = option(
        None,
        help="where the blocks go: auto (planned), cpu, or a JSON file as 'gpuherd plan --device-map' prints it",
        metavar="auto|cpu|FILE",
        group="model",
    )
    parallel: ParallelOption | None = option(
        None,
        help="fewest GPUs that hold it (auto), layers over all GPUs, each layer over all GPUs, or one GPU",
        choices=PARALLEL_OPTIONS,
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
        said_precision(self.dtype, self.quantization)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ModelOptions):
    """How a model is loaded by a program that has all of this machine's GPUs before it."""

    gpus: str = option(
        "auto",
        help="the GPUs to plan for: those that are free here, or GPUs to pretend, such as 4x40GB: where there is no "
        "CUDA their blocks lie in the CPU's memory",
        metavar="auto|4x40GB",
        group="model",
    )
