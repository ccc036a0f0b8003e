"""What a person is told beside the figures."""

from __future__ import annotations

import pytest

from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.placement import remarks_on, saves_little
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("mixtral-8x7b", "experts fused into one parameter"),
        ("qwen3-30b-a3b", "experts fused into one parameter"),
        ("falcon-7b", "matrices of a class of their own"),
        ("gemma-3-270m", "embedding and head"),
    ],
)
def test_where_quantisation_saves_little(model: str, why: str) -> None:
    architecture = read_architecture(model)
    assert why in saves_little(architecture, Precision.NF4)
    assert saves_little(architecture, Precision.BF16) == ""


def test_it_is_told_where_it_fits_and_where_it_does_not() -> None:
    mixtral = read_architecture("mixtral-8x7b")
    plan = make_plan(mixtral, parse_gpus("2x80GB"), Precision.INT8, Workload())
    assert isinstance(plan, MemoryPlan)
    assert any("int8 saves little" in warning and "GiB" in warning for warning in plan.warnings)
    refused = make_plan(mixtral, parse_gpus("40GB"), Precision.NF4, Workload())
    assert isinstance(refused, AnswerRefusal)
    assert "nf4 saves little" in refused.reason


def test_nothing_is_told_of_what_is_as_expected() -> None:
    for precision in (Precision.INT8, Precision.NF4, Precision.BF16):
        assert remarks_on(read_architecture("llama-3.1-8b"), precision, Workload()) == ()


def test_as_stored_of_what_is_stored_plainly_is_told() -> None:
    assert "planned in 16 bits" in remarks_on(read_architecture("gpt2"), Precision.AS_STORED, Workload())[0]


def test_images_are_not_counted_and_that_is_said() -> None:
    assert any("images" in sentence for sentence in read_architecture("gemma-3-4b").assumptions)
    assert not any("images" in sentence for sentence in read_architecture("gemma-3-1b").assumptions)
