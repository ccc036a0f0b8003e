"""What --simulate understands, and how it refuses the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.gpus.state import Maker
from gpuherd.standin.state import MAX_GPUS, Busy, Spec, parse


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("8x40GB", Spec((40960,) * 8)),
        ("80gb", Spec((81920,))),
        ("4x24GB+2x80GB", Spec((24576,) * 4 + (81920,) * 2)),
        ("2x1.5GB+500MB", Spec((1536, 1536, 500))),
        ("4x24GB,busy=1@20s", Spec((24576,) * 4, busy=(Busy((0,), 20.0),))),
        ("4x24GB,busy=2", Spec((24576,) * 4, busy=(Busy((0, 1), None),))),
        (
            "4x24GB,busy=gpu1+gpu3@0.5,busy=gpu0",
            Spec((24576,) * 4, busy=(Busy((1, 3), 0.5), Busy((0,), None))),
        ),
        ("2x40GB,nvlink=4,mig=gpu1:20GB+2x10GB", Spec((40960,) * 2, nvlinks=4, mig=((1, (20480, 10240, 10240)),))),
    ],
)
def test_reads_what_the_guide_shows(text: str, spec: Spec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "''"),
        ("0x40GB", "0 GPUs"),
        ("40", "'40'"),
        ("33x40GB", "33 GPUs"),
        ("99999999999x1MB", "GPUs"),
        ("4x0GB", "'4x0GB'"),
        ("-1x40GB", "-1x40GB"),
        ("4x40GB,", "''"),
        ("4x40GB,buzy=1", "buzy=1"),
        ("4x40GB,busy=5", "gpu0 to gpu3"),
        ("4x40GB,busy=gpu4", "gpu0 to gpu3"),
        ("4x40GB,busy=0+1", "0+1"),
        ("4x40GB,nvlink=19", "19"),
        ("4x40GB,mig=gpu0:30GB+30GB", "40960 MB"),
        ("4x40GB,mig=gpu4:10GB", "gpu0 to gpu3"),
        ("4x40GB,mig=gpu0:8x1GB", "at most 7"),
        ("４x40GB", "４x40GB"),
    ],
)
def test_refuses_by_naming_the_word(text: str, word: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(text)
    assert word in str(refusal.value)


def test_kinds_of_gpu_are_known_by_name() -> None:
    spec = parse("2xMI300X+MI210,busy=1")
    assert (spec.maker, len(spec.memory_mb), spec.busy) == (Maker.AMD, 3, (Busy((0,), None),))
    assert spec.memory_mb[0] > 190_000 and 60_000 < spec.memory_mb[2] < 65_536
    assert spec.names == ("AMD Simulated MI300X",) * 2 + ("AMD Simulated MI210",)
    nvidia = parse("8xH100")
    assert (nvidia.maker, nvidia.names[7]) == (Maker.NVIDIA, "NVIDIA Simulated H100")


def test_gpus_of_two_makers_are_refused() -> None:
    with pytest.raises(UsageError, match="one maker"):
        parse("2xMI300X+2x40GB")


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 200)), min_size=1, max_size=4))
def test_groups_add_up(groups: list[tuple[int, int]]) -> None:
    text = "+".join(f"{count}x{size}GB" for count, size in groups)
    assert parse(text).memory_mb == tuple(size * 1024 for count, size in groups for _ in range(count))


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse(text)
    except UsageError:
        return
    assert 1 <= len(spec.memory_mb) <= MAX_GPUS
