"""What a GPU's capability allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models.memory.toy import NOTHING, gpus_of, toy

from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import capability_verdict
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan


@pytest.mark.parametrize(
    ("precision", "capability", "possible", "slow"),
    [
        ("bf16", (8, 0), True, False),
        ("bf16", (7, 5), True, True),
        ("bf16", (6, 1), False, True),
        ("fp16", (7, 0), True, False),
        ("fp16", (6, 0), True, True),
        ("fp16", (5, 2), False, True),
        ("int8", (7, 5), True, False),
        ("int8", (7, 0), True, True),
        ("int8", (5, 2), False, True),
        ("nf4", (9, 0), True, False),
        ("nf4-dq", (5, 0), False, True),
        ("fp32", (5, 0), True, False),
        ("bf16", None, True, False),
        ("as-stored", (8, 0), True, False),
    ],
)
def test_precisions(precision: str, capability: tuple[int, int] | None, possible: bool, slow: bool) -> None:
    told = capability_verdict(Precision(precision), capability)
    assert told.possible == possible
    assert bool(told.sentence) == slow


@pytest.mark.parametrize(
    ("method", "capability", "possible"),
    [
        ("fp8", (8, 9), True),
        ("fp8", (8, 0), False),
        ("fbgemm_fp8", (8, 9), False),
        ("mxfp4", (7, 5), True),
        ("mxfp4", (7, 0), False),
        ("gptq", (7, 0), True),
        (None, (6, 0), True),
    ],
)
def test_weights_that_are_quantised_already(method: str | None, capability: tuple[int, int], possible: bool) -> None:
    told = capability_verdict(Precision.AS_STORED, capability, method)
    assert told.possible == possible
    assert ("need compute capability" in told.sentence) != possible
    assert capability_verdict(Precision.BF16, (8, 0), method).sentence == "", "unpacked they are plain numbers"


def test_fp8_on_an_a100_is_refused_and_planned_in_bf16() -> None:
    whole = toy((100, 100))
    blocks = tuple(
        replace(block, tensors=tuple(replace(tensor, stored_bytes=tensor.numel) for tensor in block.tensors))
        if block.kind == "layer"
        else block
        for block in whole.blocks
    )
    stored = replace(whole, blocks=blocks, stored_method="fp8")
    old, new = (replace(card, capability=each) for card, each in zip(gpus_of(300, 150), [(8, 0), (9, 0)], strict=True))
    refused = make_plan(stored, [old], Precision.AS_STORED, Workload(1, 8, 8), NOTHING)
    assert isinstance(refused, AnswerRefusal)
    assert "need compute capability 8.9" in refused.reason
    assert ("--dtype", "bf16") in [each.words for each in refused.alternatives]
    kept = make_plan(stored, [new], Precision.AS_STORED, Workload(1, 8, 8), NOTHING)
    assert isinstance(kept, MemoryPlan), "100 MiB of codes"
