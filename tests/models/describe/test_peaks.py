"""Peaks as descriptions have them, extrapolated from small sizes, against a run of the very size that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models.memory.configs import CONFIGS, GROUPED, LIKE_CUDA, RECURRENT, WITH_ENCODER, needs  # noqa: E402
from tests.models.memory.measured_peak import Peaks, measured, measured_with_encoder, on_cuda  # noqa: E402

from gpuherd.models.describe.description import Architecture, Block, Curve  # noqa: E402
from gpuherd.models.describe.description import Peaks as Curves  # noqa: E402
from gpuherd.models.describe.meta import describe_config  # noqa: E402
from gpuherd.models.describe.peaks import _curves, _Event  # noqa: E402
from gpuherd.models.memory.kv_cache import Reserve, Workload  # noqa: E402
from gpuherd.models.memory.peak import SAMPLING  # noqa: E402
from gpuherd.models.memory.usage import CostTable  # noqa: E402
from gpuherd.models.memory.weights import Precision  # noqa: E402

# Those want their cache under another name than the judge's: it counts among what they need, and a token has none.
OWN_CACHE = frozenset({"mamba2-1.3b", "mamba-1.4b", "falcon-mamba"})
OFTEN = frozenset({"llama-3.1-8b", "mixtral-8x7b"})


def _real(name: str, config: Any, batch: int, prompt: int, precision: Precision) -> Peaks:
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    if name in WITH_ENCODER:
        return measured_with_encoder(config, batch=batch, prompt=prompt, dtype=dtype)
    by = on_cuda() if name in LIKE_CUDA else None
    return measured(config, batch=batch, prompt=prompt, dtype=dtype, attention=by)


def _agree(name: str, config: Any, sizes: list[tuple[int, int, Precision]], above: float) -> None:
    found = describe_config(config.to_dict(), name)
    for batch, prompt, precision in sizes:
        if precision is Precision.FP32 and config.model_type in GROUPED:
            continue  # the judge's grouped product is one of bfloat16 alone
        longest = getattr(config, "max_position_embeddings", None) or prompt
        tokens = min(prompt, longest - 1)
        real = _real(name, config, batch, tokens, precision)
        workload = Workload(batch, tokens, 1)
        for_prompt, for_token = needs(found, workload, precision)
        if name in OWN_CACHE:
            for_prompt += CostTable(found, precision, workload, Reserve()).cache(0, len(found.blocks)).after_prompt
        # Where the head needs most, the plan has what sampling takes, which the judge leaves out.
        sampling = batch * config.vocab_size * (SAMPLING - 4)
        assert real.prompt <= for_prompt <= above * (real.prompt + sampling), (
            tokens,
            precision,
            for_prompt / real.prompt,
        )
        if name not in OWN_CACHE:
            assert for_token >= real.token, (tokens, precision, for_token / real.token)
        if name not in (OWN_CACHE | {*WITH_ENCODER}):  # a decoder is measured with as many tokens as its encoder read
            assert for_token <= 1.1 * (real.token + sampling), (tokens, precision, for_token / real.token)


EVERY = {**CONFIGS, **WITH_ENCODER}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in EVERY]
)
def test_never_below_and_at_most_a_tenth_above(name: str) -> None:
    config = EVERY[name]
    sizes = [(4, 512, Precision.BF16), (1, 97, Precision.BF16), (4, 2048, Precision.BF16), (5, 700, Precision.FP32)]
    _agree(name, config, sizes, 1.1)


@pytest.mark.slow
@pytest.mark.timeout(300)  # falcon-mamba takes 40 s on a quiet machine
@pytest.mark.parametrize("name", list(RECURRENT))
def test_states_at_most_a_quarter_above(name: str) -> None:
    _agree(name, RECURRENT[name], [(2, 512, Precision.BF16)], 1.25)


def _one(curves: tuple[Curve, ...], fill: int = 1) -> Architecture:
    peaks = Curves({"16": curves, "4bit": curves}, {"16": curves, "4bit": curves}, fill)
    block = Block("layers.0", "layer", (), None, "layers.0")
    return Architecture("m", "m", None, (block,), 8, 8, 8, 1, peaks={"layers.0": peaks})


def test_a_need_is_the_largest_curve_at_the_tokens_of_the_prompt() -> None:
    found = _one((Curve((100, 0, 0), (0, 10, 0)), Curve((0, 0, 0), (0, 0, 1))))
    assert needs(found, Workload(2, 3, 1), Precision.BF16)[0] == 100 + 2 * 30
    assert needs(found, Workload(2, 100, 1), Precision.BF16)[0] == 2 * 100 * 100


def test_prompts_are_filled_up_to_whole_chunks() -> None:
    found = _one((Curve((0, 0, 0), (0, 1, 0)),), fill=64)
    assert [needs(found, Workload(1, tokens, 1), Precision.BF16)[0] for tokens in (1, 64, 65)] == [64, 64, 128]


def test_what_only_some_lengths_do_makes_no_curve() -> None:
    """Such as a state that a layer makes in its first run alone: through nothing at the other lengths goes no
    polynomial."""
    sizes = [(batch, tokens) for batch in (2, 3) for tokens in (32, 64, 96)]
    traces = [[_Event("h.0", "h.0", "mul", 10 * batch * tokens)] for batch, tokens in sizes]
    traces[0].append(_Event("h.0", "h.0", "zeros", 1 << 20))
    assert _curves(sizes, traces, lambda each: each.alive, matrices=False) == (Curve((0, 0, 0), (0, 10, 0)),)


def test_4_bit_weights_are_unpacked_for_a_product() -> None:
    found = _one((Curve((0, 0, 0), (0, 1, 0), matrix=640),))
    plain, unpacked, scales = (
        needs(found, Workload(1, 1, 1), precision)[0] for precision in (Precision.BF16, Precision.NF4, Precision.NF4_DQ)
    )
    assert (unpacked - plain, scales - unpacked) == (0, 2 * 4 * 640 // 64)


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 64))
def test_more_is_never_less(batch: int, tokens: int, more: int) -> None:
    found = _one((Curve((100, 1, 0), (7, 10, 0.5)), Curve((0, 0, 0), (0, 0, 1))))
    few = needs(found, Workload(batch, tokens, 1), Precision.BF16)
    for bigger in (Workload(batch + more, tokens, 1), Workload(batch, tokens + more, 1)):
        assert all(a <= b for a, b in zip(few, needs(found, bigger, Precision.BF16), strict=True))
