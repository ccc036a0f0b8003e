"""Every alternative fits when it is planned, and says little things before large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.request import ParallelOption
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan


def follow(
    told: AnswerRefusal, words: tuple[str, ...], cards: str, parallel: ParallelOption
) -> MemoryPlan | AnswerRefusal:
    """Plans again with the words of an alternative in place of what was asked."""
    changes = dict(zip(words[::2], words[1::2], strict=True))
    workload = replace(
        told.workload,
        batch=int(changes.get("--batch", told.workload.batch)),
        prompt_tokens=int(changes.get("--prompt-tokens", told.workload.prompt_tokens)),
    )
    return make_plan(
        told.architecture,
        parse_gpus(changes.get("--gpus", cards)),
        Precision(changes.get("--dtype", told.precision)),
        workload,
        told.reserve,
        parallel=changes.get("--parallel", parallel),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("model", "precision", "cards", "workload", "parallel"),
    [
        ("llama-3.1-70b", "bf16", "4x30GB", Workload(8, 512, 64), "auto"),
        ("llama-3.1-70b", "bf16", "4xA100-40", Workload(64, 512, 64), "auto"),
        ("llama-3.1-70b", "bf16", "1xRTX3060", Workload(1, 512, 64), "auto"),
        ("llama-3.1-70b", "bf16", "2x80GB", Workload(8, 512, 64), "replica"),
        ("llama-3.1-8b", "bf16", "RTX4090", Workload(4, 60_000, 64), "auto"),
        ("llama-3.1-8b", "fp32", "RTX4090", Workload(1, 512, 64), "auto"),
        ("llama-3.1-70b", "int8", "2x24GB+1x30GB", Workload(8, 512, 64), "auto"),
        ("llama-3.1-70b", "nf4", "4xT4", Workload(2, 512, 64), "tensor"),
        ("llama-3.1-405b", "bf16", "8x80GB", Workload(1, 512, 64), "auto"),
        ("llama-3.2-1b", "bf16", "4xP100", Workload(1, 512, 64), "auto"),
    ],
)
def test_every_alternative_fits(
    model: str, precision: str, cards: str, workload: Workload, parallel: ParallelOption
) -> None:
    told = make_plan(read_architecture(model), parse_gpus(cards), Precision(precision), workload, parallel=parallel)
    assert isinstance(told, AnswerRefusal)
    assert told.alternatives
    for each in told.alternatives:
        assert isinstance(follow(told, each.words, cards, parallel), MemoryPlan), each


def words(model: str, precision: Precision, cards: str, workload: Workload) -> list[tuple[str, ...]]:
    told = make_plan(read_architecture(model), parse_gpus(cards), precision, workload)
    assert isinstance(told, AnswerRefusal)
    return [each.words for each in told.alternatives]


def test_the_smallest_change_comes_first() -> None:
    told = words("llama-3.1-70b", Precision.BF16, "4xA100-40", Workload(64, 512, 64))
    assert [each[0] for each in told] == ["--batch", "--dtype", "--dtype", "--gpus", "--gpus"]
    assert [each[1] for each in told][1:3] == ["int8", "nf4"]
    assert told[3][1].endswith("xA100-40")


def test_a_prompt_that_is_too_long_for_one_sequence_gets_a_length_that_fits() -> None:
    first, *_ = words("llama-3.1-8b", Precision.BF16, "RTX4090", Workload(4, 120_000, 64))
    assert first[:3] == ("--batch", "1", "--prompt-tokens")
    assert 16 <= int(first[3]) < 120_000


def test_nothing_is_suggested_where_nothing_fits() -> None:
    assert words("llama-3.1-405b", Precision.NF4_DQ, "1x2GB", Workload(1, 10**8, 64)) == []


def test_several_changes_at_once_where_none_alone_is_enough() -> None:
    assert words("llama-3.1-405b", Precision.NF4_DQ, "1x2GB", Workload(1, 512, 64)) == [
        ("--batch", "1", "--gpus", "6xA100-40")
    ]
    assert words("llama-3.1-405b", Precision.FP32, "1x2GB", Workload(8, 512, 64)) == [
        ("--batch", "1", "--gpus", "12xH200")
    ]
