"""CUDA_VISIBLE_DEVICES as CUDA reads it, and ids as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu, machines, split

from gpuherd.errors import NoSuchGpu
from gpuherd.gpus.state import SIMULATED, Gpu, Maker
from gpuherd.gpus.visible import (
    environment,
    find,
    hide_unless_named,
    hides_all,
    named_in,
    narrowed,
    setting,
    visible,
    visible_in,
)

FOUR = [gpu(0), gpu(1), gpu(2, uuid="GPU-2222-x"), gpu(3, uuid="GPU-2223-x")]
SPLIT = [gpu(0), *split(1, [0, 2]), gpu(2)]


def labels(gpus: tuple[Gpu, ...]) -> list[str]:
    return [each.label for each in gpus]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("1x,2", ["1", "2"]),
        ("+1", ["1"]),
        ("0,-1,2", ["0"]),
        ("0,7,2", ["0"]),
        ("0,,2", ["0"]),
        ("0,0", []),
        ("99999999999999999999999", []),
        ("GPU-2222-x,GPU-2223-x", ["2", "3"]),
        ("GPU-2222", ["2"]),
        ("GPU-222", []),
        ("0,GPU-222,1", ["0"]),
        ("GPU-nothing,0", []),
        ("2,GPU-2222-x", []),
        ("1;rm -rf /,2", ["1", "2"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, shown: list[str]) -> None:
    assert labels(visible(FOUR, value)) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ["0", "1:0", "1:2", "2"]),
        ("MIG-12-bbbb", ["1:2"]),
        ("MIG-12", ["1:2"]),
        ("MIG-12-bbbb,MIG-10-bbbb", ["1:2", "1:0"]),
        ("MIG-1", []),
        ("1", ["1:0"]),
        ("2,1", ["2", "1:0"]),
        ("GPU-00000001-aaaa", ["1:0"]),
    ],
)
def test_mig_instances_are_visible_and_their_parent_is_not(value: str | None, shown: list[str]) -> None:
    assert labels(visible(SPLIT, value)) == shown


def test_a_split_gpu_without_known_instances_ends_the_list() -> None:
    parent = split(1, [0])[0]
    assert visible([gpu(0), parent, gpu(2)], "0,1,2") == (gpu(0),)


@given(machines(), st.text(alphabet="0123456789,-+ GPUMIabx", max_size=30))
def test_any_value_shows_gpus_of_the_machine_each_at_most_once(gpus: list[Gpu], value: str) -> None:
    shown = visible(gpus, value)
    assert all(each in gpus and not each.mig_instances for each in shown)
    assert len(set(shown)) == len(shown)


@given(machines(mig=False), st.data())
def test_the_names_that_we_give_to_cuda_show_the_same_gpus_in_the_same_order(
    gpus: list[Gpu], data: st.DataObject
) -> None:
    chosen = data.draw(st.permutations(gpus)) if gpus else []
    assert list(visible(gpus, ",".join(each.visible_name for each in chosen))) == list(chosen)
    assert list(visible(gpus, ",".join(each.uuid for each in chosen))) == list(chosen)


@given(machines())
def test_names_of_all_usable_gpus_find_them_again_with_mig_too(gpus: list[Gpu]) -> None:
    usable = visible(gpus, None)
    assert visible(gpus, ",".join(each.visible_name for each in usable)) == usable
    assert find(gpus, [each.label for each in usable]) == usable
    assert find(gpus, [each.uuid for each in usable]) == usable


@given(machines(), st.lists(st.one_of(st.integers(-2, 7), st.text(alphabet="0123:GPUMI-ab", max_size=8)), max_size=4))
def test_find_gives_known_gpus_or_names_the_id_that_is_wrong(gpus: list[Gpu], ids: list[str | int]) -> None:
    try:
        found = find(gpus, ids)
    except NoSuchGpu as error:
        assert any(repr(str(wanted).strip()) in str(error) for wanted in ids)
    else:
        assert all(each in gpus and not each.mig_instances for each in found)
        assert len(set(found)) == len(found)


def test_find_takes_indices_uuids_and_beginnings_of_them_in_the_order_given() -> None:
    assert labels(find(FOUR, ["3", 0, "GPU-2222"])) == ["3", "0", "2"]
    assert labels(find(FOUR, [1, "1", 1])) == ["1"]
    assert find(FOUR, []) == ()


@pytest.mark.parametrize("whole", ["1", 1, "GPU-00000001-aaaa", "GPU-00000001"])
def test_a_split_gpu_means_its_instances(whole: str | int) -> None:
    assert labels(find(SPLIT, [whole])) == ["1:0", "1:2"]
    assert labels(find(visible(SPLIT, None), [whole])) == ["1:0", "1:2"]
    assert labels(find(SPLIT, ["1:2"])) == ["1:2"]


@pytest.mark.parametrize("wanted", ["4", "-1", "", "0:1", "GPU-9", "1.0", "0 1", "gpu0"])
def test_an_unknown_id_is_refused_with_those_that_exist(wanted: str) -> None:
    with pytest.raises(NoSuchGpu, match=r"available GPUs: 0, 1, 2, 3") as refusal:
        find(FOUR, ["0", wanted])
    assert repr(wanted) in str(refusal.value)


def test_a_beginning_that_fits_two_gpus_is_refused_with_both() -> None:
    with pytest.raises(NoSuchGpu, match=r"fits several GPUs: 2 .*, 3 "):
        find(FOUR, ["GPU-222"])


def test_a_beginning_that_fits_a_whole_and_a_split_gpu_is_refused_too() -> None:
    machine = [gpu(0, uuid="GPU-00000009-aaaa"), *split(1, [0, 2])]
    for gpus in (machine, visible(machine, None)):
        with pytest.raises(NoSuchGpu, match=r"fits several GPUs: 0 \(GPU-00000009-aaaa\), 1 \(GPU-00000001-aaaa\)"):
            find(gpus, ["GPU-0000000"])


def test_a_whole_uuid_is_meant_though_it_begins_another() -> None:
    instances = [gpu(0, uuid=f"MIG-GPU-a/1/{number}", mig_parent="GPU-a", mig_position=number) for number in (1, 10)]
    assert labels(find(instances, ["MIG-GPU-a/1/1"])) == ["0:1"]
    assert labels(visible(instances, "MIG-GPU-a/1/1")) == ["0:1"]


def test_without_gpus_the_refusal_says_so() -> None:
    with pytest.raises(NoSuchGpu, match="no GPU is available"):
        find([], ["0"])


AMD = [gpu(index, uuid=f"GPU-{index:04x}00000000abcd", maker=Maker.AMD) for index in range(4)]


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "0123"),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, "20"),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "1,9,2"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "1,1,2"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "gpu-000200000000ABCD, 3"}, "23"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0002"}, "2"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-"}, ""),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, "31"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, "31"),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}, "2"),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "3"}, ""),
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ""),
    ],
)
def test_rocm_chooses_gpus_and_hip_picks_among_those(variables: dict[str, str], shown: str) -> None:
    assert labels(visible_in(AMD, variables)) == list(shown)
    assert not hides_all(variables, Maker.AMD) or shown == ""


def test_a_process_is_shown_amd_gpus_by_both_variables() -> None:
    assert environment([AMD[2], AMD[0]]) == {"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "0,1"}
    unsure = gpu(1, uuid="GPU-dead00000000beef", maker=Maker.AMD, index_unsure=True)
    assert environment([unsure])["ROCR_VISIBLE_DEVICES"] == unsure.uuid
    simulated = gpu(1, uuid=f"GPU-0001{SIMULATED}", maker=Maker.AMD)
    assert environment([simulated])["ROCR_VISIBLE_DEVICES"] == simulated.uuid, "no name of a real GPU"


@given(st.permutations(AMD), st.integers(0, 4))
def test_what_shows_amd_gpus_is_read_back(order: list[Gpu], count: int) -> None:
    chosen = order[:count]
    assert list(visible_in(AMD, environment(chosen))) == chosen


def test_no_gpus_are_none_of_any_maker() -> None:
    hidden = environment(())
    assert visible_in(AMD, hidden) == visible_in(FOUR, hidden) == ()
    assert all(hides_all(hidden, maker) for maker in Maker)
    assert named_in(hidden) == ()
    other = {"ROCR_VISIBLE_DEVICES": "1"}
    hide_unless_named(other)
    assert other == {"ROCR_VISIBLE_DEVICES": "1"}
    nothing: dict[str, str] = {}
    hide_unless_named(nothing)
    assert nothing == hidden


def test_amds_variables_mean_nothing_to_cuda() -> None:
    variables = {"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}
    assert len(visible_in(FOUR, variables)) == 4
    assert not hides_all(variables, Maker.NVIDIA)
    assert setting(variables, Maker.NVIDIA) is None


def test_a_child_is_shown_a_part_of_what_its_parent_is_shown() -> None:
    job = environment([AMD[3], AMD[1]])
    assert labels(visible_in(AMD, narrowed(job, ["1"]))) == ["1"]
    assert named_in(narrowed({"CUDA_VISIBLE_DEVICES": "3,1"}, ["1"])) == ("1",)
