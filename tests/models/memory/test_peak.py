"""What layers need of which nothing is known but their shapes, against a measurement of transformers' own code.

Measured descriptions are held against it in ``tests/models/describe/test_peaks.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.peak import SAMPLING, Line
from gpuherd.models.memory.weights import Precision

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.describe.formulas.from_config import architecture_of  # noqa: E402
from tests.models.memory.configs import CONFIGS, LLAMA_8B, TWO, needs  # noqa: E402
from tests.models.memory.measured_peak import measured  # noqa: E402

LIKE_LLAMA = ["llama-3.1-8b", "llama-2-7b", "qwen3-0.6b", "phi-4", "qwen3-30b-a3b"]


def described(config: Any) -> Architecture:
    """The architecture of a config without any peaks, as headers tell it."""
    return architecture_of(config.to_dict(), "test")


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_never_below_what_transformers_asks_for_and_at_most_a_tenth_above(name: str) -> None:
    config = CONFIGS[name]
    real = measured(config, batch=4, prompt=512, dtype=torch.bfloat16)
    for_prompt, for_token = needs(described(config), Workload(4, 512, 1), Precision.BF16)
    # Where the head needs most, the formula has what sampling takes, which this measurement leaves out.
    sampling = 4 * config.vocab_size * (SAMPLING - 4)
    assert real.prompt <= for_prompt <= 1.1 * (real.prompt + sampling), for_prompt / real.prompt
    assert for_token >= real.token, for_token / real.token


def test_depth_does_not_count() -> None:
    deep = transformers.LlamaConfig(**LLAMA_8B, vocab_size=128256, num_hidden_layers=4)
    shallow = CONFIGS["llama-3.1-8b"]
    peaks = [measured(config, batch=2, prompt=256, dtype=torch.bfloat16).prompt for config in (shallow, deep)]
    assert peaks[0] == peaks[1]


def test_the_figures_of_the_reference() -> None:
    # Section 4.1: 8 x 512 tokens 0.455 GiB in bf16, 32 x 512 1.821 GiB; 70B 239 KB a token.
    eight = described(CONFIGS["llama-3.1-8b"])
    for batch, expected in ((8, 0.455), (32, 1.821)):
        assert needs(eight, Workload(batch, 512, 1), Precision.BF16)[0] / 2**30 == pytest.approx(expected, rel=0.02)
    seventy = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        **TWO,
    )
    each = needs(described(seventy), Workload(8, 512, 1), Precision.BF16)[0] / (8 * 512)
    assert each / 1000 == pytest.approx(239, rel=0.02)


def test_what_quantised_products_take_beside() -> None:
    eight, workload = described(CONFIGS["llama-3.1-8b"]), Workload(4, 512, 1)
    plain = needs(eight, workload, Precision.FP16)[0]
    # bitsandbytes: the product of 8-bit numbers is one of 32-bit integers, then of 16 bits.
    assert needs(eight, workload, Precision.INT8)[0] - plain == 4 * 512 * (2 * 14336 + 4096)
    # The largest matrix in 16 bits stands there instead of one copy of the MLP's middle, where it is larger.
    one_token = Workload(1, 1, 1)
    unpacked = needs(eight, one_token, Precision.NF4)[0]
    assert 4096 * 14336 * 2 <= unpacked <= 4096 * 14336 * 2 + 200_000
    scales = needs(eight, one_token, Precision.NF4_DQ)[0] - unpacked
    assert scales == 8 * 4096 * 14336 // 64


@given(
    batch=st.integers(1, 64), tokens=st.integers(1, 4096), more=st.integers(1, 64), precision=st.sampled_from(Precision)
)
def test_more_is_never_less(batch: int, tokens: int, more: int, precision: Precision) -> None:
    few = needs(TINY, Workload(batch, tokens, 1), precision)
    assert all(a <= b for a, b in zip(few, needs(TINY, Workload(batch + more, tokens, 1), precision), strict=True))
    assert all(a <= b for a, b in zip(few, needs(TINY, Workload(batch, tokens + more, 1), precision), strict=True))


def test_a_line() -> None:
    assert Line(10, 3).at(4) == 22


TINY = described(transformers.Gemma3TextConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, head_dim=16))
