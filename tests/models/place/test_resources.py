"""What a job asks its queue for: the plan that it rests on fits on any GPUs that the queue may give for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.gpus.state import Gpu
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import MIB, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec, parse_gpus
from gpuherd.models.place.inventory import idle_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.resources import resources_for, resources_of
from gpuherd.models.place.result import MemoryPlan

SMALL = read_architecture("llama-3.2-1b")
LARGE = read_architecture("llama-3.1-70b")
USUAL = Workload(batch=8)


def gpu(label: str, total_mb: int, used_mb: int = 0, **more: object) -> Gpu:
    known = {
        "index": int(label),
        "uuid": f"GPU-{label}",
        "name": "A100",
        "free_mb": total_mb - used_mb,
        "used_mb": used_mb,
    }
    return Gpu(total_mb=total_mb, **{**known, **more})  # type: ignore[arg-type]


def test_a_small_and_a_large_model_in_one_list_each_get_what_they_need() -> None:
    cards = parse_gpus("4x40GB")
    small = resources_of(SMALL, Precision.BF16, USUAL, cards)
    large = resources_of(LARGE, Precision.BF16, USUAL, cards)
    assert small.gpus == 1 and small.memory_mb < 8_000
    assert large.gpus == 4 and 36_000 < large.memory_mb <= 40_960
    assert large.sentence == (
        "llama-3.1-70b in bf16, 8 sequences of 576 tokens: asks for 4 GPUs with 37.5 GiB free on each"
    )


def test_the_smallest_memory_is_asked_for_so_that_the_most_gpus_will_do() -> None:
    mixed = resources_of(SMALL, Precision.BF16, USUAL, parse_gpus("2x80GB+4x24GB"))
    assert mixed.memory_mb == resources_of(SMALL, Precision.BF16, USUAL, parse_gpus("24GB")).memory_mb


def test_fewest_gpus_even_where_more_smaller_ones_would_do() -> None:
    found = resources_of(LARGE, Precision.NF4, USUAL, parse_gpus("1x80GB+4x24GB"))
    assert found.gpus == 1 and found.memory_mb > 24_576


SIZES = st.lists(st.sampled_from([8, 16, 24, 40, 48, 80]), min_size=1, max_size=6)


@given(sizes=SIZES, precision=st.sampled_from([Precision.BF16, Precision.INT8, Precision.NF4]), pick=st.randoms())
def test_whatever_gpus_the_queue_gives_the_model_fits_on_them(
    sizes: list[int], precision: Precision, pick: object
) -> None:
    architecture = read_architecture("llama-2-13b")
    cards = [GpuSpec(str(place), f"{size}GB", size << 30, size << 30) for place, size in enumerate(sizes)]
    try:
        asked = resources_of(architecture, precision, USUAL, cards)
    except JobCannotFit:
        assert not isinstance(make_plan(architecture, cards, precision, USUAL), MemoryPlan) or len(set(sizes)) > 1
        return
    able = [card for card in cards if card.free >= asked.memory_mb * MIB]
    assert len(able) >= asked.gpus
    pick.shuffle(able)  # type: ignore[attr-defined]
    # As the queue guarantees it: so much is free on each, and no more than that.
    given_cards = [GpuSpec(card.label, card.name, asked.memory_mb * MIB, asked.memory_mb * MIB) for card in able]
    assert isinstance(make_plan(architecture, given_cards[: asked.gpus], precision, USUAL), MemoryPlan)


def test_more_than_the_machine_has_is_refused_with_what_would_fit() -> None:
    told = r"lacks 30\.0 GiB\. What would fit: --dtype int8 \(in int8 it fits on 2"
    with pytest.raises(JobCannotFit, match=told) as no:
        resources_of(LARGE, Precision.BF16, USUAL, parse_gpus("2x40GB"))
    assert "4 GPUs of this kind can hold it" in str(no.value)


def test_no_more_gpus_than_a_run_ever_has() -> None:
    cards = parse_gpus("4x40GB")
    with pytest.raises(JobCannotFit):
        resources_of(LARGE, Precision.BF16, USUAL, cards, most=2)
    assert resources_of(LARGE, Precision.INT8, USUAL, cards, most=2).gpus == 2


def test_so_many_gpus_as_were_said() -> None:
    cards = parse_gpus("4x80GB")
    assert resources_of(LARGE, Precision.BF16, USUAL, cards).gpus == 2
    assert resources_of(LARGE, Precision.BF16, USUAL, cards, gpu_range=(3, 3)).gpus == 3
    assert resources_of(LARGE, Precision.BF16, USUAL, cards, gpu_range=(1, 4)).gpus == 2
    with pytest.raises(JobCannotFit, match="5 GPUs are asked for, and there are 4"):
        resources_of(LARGE, Precision.BF16, USUAL, cards, gpu_range=(5, 5))
    with pytest.raises(UsageError, match="on 1 GPU or more, not on 0"):
        resources_of(LARGE, Precision.BF16, USUAL, cards, gpu_range=(0, 0))


def test_tensor_parallel_and_replica() -> None:
    cards = parse_gpus("4x80GB")
    assert resources_of(LARGE, Precision.BF16, USUAL, cards, parallel="tensor").gpus == 4
    assert resources_of(SMALL, Precision.BF16, USUAL, cards, parallel="replica").gpus == 1


def test_a_dtype_that_no_card_can_do_is_refused() -> None:
    old = [GpuSpec("0", "P100", 16 << 30, 16 << 30, (6, 0))]
    with pytest.raises(JobCannotFit, match="bf16 needs compute capability"):
        resources_of(SMALL, Precision.BF16, USUAL, old)


def test_mig_instances_hold_a_model_alone_but_never_together() -> None:
    slices = [GpuSpec(f"0:{place}", "MIG", 20 << 30, 20 << 30, mig=True) for place in range(4)]
    assert resources_of(SMALL, Precision.BF16, USUAL, slices).gpus == 1
    with pytest.raises(JobCannotFit):
        resources_of(read_architecture("llama-2-13b"), Precision.BF16, USUAL, slices)


def test_without_gpus_a_job_asks_for_one_that_would_hold_it_and_runs_on_the_cpu() -> None:
    found = resources_of(SMALL, Precision.BF16, USUAL, ())
    assert found.gpus == 1 and found.plan is None
    size = found.memory_mb * MIB
    assert isinstance(make_plan(SMALL, [GpuSpec("0", "", size, size)], Precision.BF16, USUAL), MemoryPlan)
    assert "without GPUs jobs run on the CPU" in found.sentence


def test_what_was_said_of_gpus_counts_without_any_too() -> None:
    one, two = (resources_of(SMALL, Precision.BF16, USUAL, (), gpu_range=(count, 4)) for count in (1, 2))
    assert (one.gpus, two.gpus) == (1, 2)
    assert one.memory_mb / 2 < two.memory_mb < one.memory_mb
    with pytest.raises(JobCannotFit, match="3 GPUs don't divide the heads"):
        resources_of(SMALL, Precision.BF16, USUAL, (), parallel="tensor", gpu_range=(3, 3))
    with pytest.raises(UsageError, match="replica means one GPU each"):
        resources_of(SMALL, Precision.BF16, USUAL, (), parallel="replica", gpu_range=(2, 2))


def test_what_fits_on_gpus_of_unequal_size_alone_is_refused_with_that_reason() -> None:
    cards = parse_gpus("1x40GB+1x24GB")
    fourteen = read_architecture("qwen2.5-14b")
    told = r"; it fits on 2 GPUs of 24\.0 to 40\.0 GiB, .* on each .*: --num-gpus 2 without naming the model is given"
    with pytest.raises(JobCannotFit, match=told):
        resources_of(fourteen, Precision.FP32, Workload(), cards)
    # Of three GPUs a job for two may be given the small ones.
    with pytest.raises(JobCannotFit, match="it fits on 2 GPUs") as no:
        resources_of(LARGE, Precision.INT8, Workload(), parse_gpus("1x60GB+2x24GB"))
    assert "without naming" not in str(no.value)
    for others, most in (("2x24GB", None), ("1x40GB+1x24GB", 1)):
        with pytest.raises(JobCannotFit) as no:
            resources_of(fourteen, Precision.FP32, Workload(), parse_gpus(others), most=most)
        assert "; it fits on 2" not in str(no.value)


def test_gpus_in_use_are_planned_as_they_will_be_when_they_are_free() -> None:
    cards = idle_gpus([gpu("0", 40_960, 30_000), gpu("1", 40_960, 450), gpu("2", 24_576, 24_000)])
    assert [card.free // MIB for card in cards] == [40_960 - 450, 40_960 - 450, 24_576 - 491]


def test_a_gpu_that_is_split_or_broken_is_none() -> None:
    cards = idle_gpus([gpu("0", 40_960, mig_instances=("MIG-a",)), gpu("1", 0, problem="lost"), gpu("2", 40_960)])
    assert [card.label for card in cards] == ["2"]


def test_a_suffix_of_the_name_is_a_dtype_and_contradicts_another() -> None:
    cards = parse_gpus("4x40GB")
    assert " in nf4, " in resources_for("Llama-3.1-70B-4bit", cards).sentence
    assert " in nf4-dq, " in resources_for("Llama-3.1-70B-4bit", cards, dtype="nf4-dq").sentence
    with pytest.raises(UsageError, match="leave one of them out"):
        resources_for("Llama-3.1-70B-8bit", cards, dtype="bf16")


@pytest.mark.parametrize(
    ("said", "message"),
    [({"dtype": "int3"}, "'int3' is no dtype"), ({"parallel": "all"}, "parallel='all'; it is one of auto")],
)
def test_words_that_mean_nothing_are_refused(said: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resources_for("llama-3.1-8b", parse_gpus("4x40GB"), **said)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["batch", "prompt_tokens", "new_tokens"])
def test_no_sequences_or_tokens_are_refused_and_not_taken_for_the_usual(said: str) -> None:
    with pytest.raises(UsageError, match=f"{said}=0: it must be a whole number, at least 1"):
        resources_for("llama-3.1-8b", parse_gpus("40GB"), **{said: 0})  # type: ignore[arg-type]


def test_the_checkpoints_own_precision_where_none_is_said() -> None:
    def read(_: str) -> Architecture:
        return replace(SMALL, stored="fp16")

    assert " in fp16, " in resources_for("anything", parse_gpus("40GB"), read=read).sentence


def test_what_was_assumed_is_said() -> None:
    def read(_: str) -> Architecture:
        return replace(SMALL, stored=None, assumptions=("its layers are guessed.",))

    told = resources_for("anything", parse_gpus("40GB"), read=read).sentence
    assert "; its layers are guessed; " in told and told.endswith("bf16 is assumed; --dtype says another")


def test_a_checkpoint_that_is_quantised_already_is_planned_as_it_is() -> None:
    def read(_: str) -> Architecture:
        return replace(SMALL, stored="as-stored")

    assert " in as-stored, " in resources_for("anything", parse_gpus("40GB"), read=read).sentence
    with pytest.raises(UsageError, match="quantised already and loaded as it is; leave int8 out"):
        resources_for("anything", parse_gpus("40GB"), dtype="int8", read=read)
