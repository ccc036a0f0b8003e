"""What words of a dtype and of a quantisation mean together, and options as flags."""

from __future__ import annotations

import pytest

from gpuherd.errors import UsageError
from gpuherd.models.load.options import LoadOptions, quantisation_named, requested_precision
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.request import agreed_precision, parse_precision
from gpuherd.options import Parser, add_options, build, words_of


@pytest.mark.parametrize(
    ("dtype", "quantization", "suffix", "expected"),
    [
        (None, None, None, None),
        ("bf16", None, None, Precision.BF16),
        ("torch.float32", None, None, Precision.FP32),
        (None, "8bit", None, Precision.INT8),
        (None, "4bit", None, Precision.NF4),
        ("nf4-dq", None, None, Precision.NF4_DQ),
        ("bf16", "nf4", None, Precision.NF4),
        ("fp16", "int8", None, Precision.INT8),
        (None, None, Precision.INT8, Precision.INT8),
        ("int8", None, Precision.INT8, Precision.INT8),
        (None, "nf4-dq", Precision.NF4, Precision.NF4_DQ),
    ],
)
def test_what_is_wanted(
    dtype: str | None, quantization: str | None, suffix: Precision | None, expected: Precision | None
) -> None:
    assert agreed_precision("m", suffix, requested_precision(dtype, quantization)) is expected


@pytest.mark.parametrize(
    ("dtype", "quantization", "suffix", "word"),
    [
        ("bf16", "int8", None, "computes in fp16"),
        ("int8", "nf4", None, "together"),
        ("fp32", "nf4", None, "computes in bf16"),
        ("bf16", None, Precision.INT8, r"leave one of them out|say one of them"),
        ("fp8", None, None, "there are fp32, bf16"),
        (None, "fp16", None, "one of int8, nf4, nf4-dq"),
        ("as-stored", None, None, "there are"),
    ],
)
def test_what_contradicts_itself(
    dtype: str | None, quantization: str | None, suffix: Precision | None, word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        agreed_precision("m", suffix, requested_precision(dtype, quantization))


def test_options_are_flags_and_come_back() -> None:
    parser = Parser(prog="load")
    add_options(parser, LoadOptions)
    words = "--quantization 4bit --gpus 2x24GB --parallel layers --allow-offload disk --adapter a --merge-adapter"
    options = build(LoadOptions, parser.parse_args(words.split()))
    assert options.quantization is Precision.NF4 and options.allow_offload == "disk" and options.merge_adapter
    again = build(LoadOptions, parser.parse_args(words_of(options, LoadOptions)))
    assert again == options


def test_options_that_contradict_each_other_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="computes in fp16"):
        LoadOptions(dtype=parse_precision("bf16"), quantization=quantisation_named("int8"))
