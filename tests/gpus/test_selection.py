"""The guide's Python questions, on simulated machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

import gpuherd.gpus as api
from gpuherd.errors import JobCannotFit, NoSuchGpu
from gpuherd.gpus.query import PAUSES_S
from gpuherd.gpus.state import Proximity
from gpuherd.standin.machine import SimulatedMachine as Simulated

Standin = Callable[..., Simulated]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Starts us with this CUDA_VISIBLE_DEVICES, as it were."""
    return lambda value: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)


@pytest.mark.parametrize(
    ("value", "ids"), [("2,3", [2, 3]), ("3,1", [3, 1]), ("", []), ("-1", []), ("9", []), ("1,9,2", [1]), ("2,2", [])]
)
def test_available_are_those_that_the_inherited_variable_shows(
    standin: Standin, show: Callable[[str], None], value: str, ids: list[int]
) -> None:
    standin("4x40GB")
    assert api.get_available_gpus() == [0, 1, 2, 3]
    show(value)
    assert api.get_available_gpus() == ids
    assert [info["id"] for info in api.get_gpu_info()] == ids


def test_inherited_uuids_are_mapped_to_ids(standin: Standin, show: Callable[[str], None]) -> None:
    simulated = standin("4x40GB")
    show(f"{simulated.uuids[3]},{simulated.uuids[1][:12]}")
    assert api.get_available_gpus() == [3, 1]


def test_mig_instances_are_available_in_place_of_their_parent(standin: Standin, show: Callable[[str], None]) -> None:
    simulated = standin("2x40GB")
    uuids = simulated.split_mig(1, [20_000, 10_000])
    assert api.get_available_gpus() == [0, "1:0", "1:1"]
    assert api.select_gpus(gpu_ids=[1]) == ["1:0", "1:1"]
    assert api.get_gpu_memory_usage("1:1") == (0, 10_000, 0.0)
    show(uuids[1])
    assert api.get_available_gpus() == ["1:1"]


def test_info_has_the_guides_keys_and_the_whole_devices_memory(standin: Standin) -> None:
    simulated = standin("2x40GB")
    simulated.occupy(1, 1234)
    info = api.get_gpu_info()[1]
    assert (info["id"], info["memory_total"], info["memory_used"], info["memory_free"]) == (1, 40_960, 1234, 39_726)
    assert info["compute_capability"] == "8.0"
    assert info["multi_processor_count"] is not None
    assert info["uuid"] == simulated.uuids[1]


def test_memory_usage_is_that_of_others_too(standin: Standin) -> None:
    standin("2x40GB").occupy(1, 4096)
    assert api.get_gpu_memory_usage() == (0, 40_960, 0.0)
    assert api.get_gpu_memory_usage(1) == api.get_gpu_memory_usage(gpu_id=1) == (4096, 40_960, 10.0)
    with pytest.raises(ValueError, match="GPU IDs"):
        api.get_gpu_memory_usage(2)


def test_printed_lines_are_the_guides(standin: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    simulated = standin("2x40GB")
    simulated.occupy(0, 1234)
    simulated.set_name(0, "NVIDIA A100-SXM4-40GB")
    simulated.set_name(1, "NVIDIA A100-SXM4-40GB")
    first = "GPU 0: NVIDIA A100-SXM4-40GB (40960 MB total, 1234 MB used (3.0%), Compute 8.0)\n"
    second = "GPU 1: NVIDIA A100-SXM4-40GB (40960 MB total, 0 MB used (0.0%), Compute 8.0)\n"
    api.print_gpu_info()
    assert capsys.readouterr().out == "Available GPUs: 2\n" + first + second
    api.print_gpu_info([1])
    assert capsys.readouterr().out == "Available GPUs: 2\n" + second


def test_a_lost_gpu_is_not_available_and_asking_for_it_says_why(standin: Standin) -> None:
    standin("3x40GB").lose(1)
    assert api.get_available_gpus() == [0, 2]
    assert api.select_gpus() == [0, 2]
    with pytest.raises(NoSuchGpu, match="GPU 1 can't be used: it has fallen off the bus"):
        api.select_gpus(gpu_ids=[0, 1])


def test_selection_by_ids_count_and_memory(standin: Standin, caplog: pytest.LogCaptureFixture) -> None:
    standin("2x24GB+2x40GB")
    assert api.select_gpus() == [0, 1, 2, 3]
    assert api.select_gpus(num_gpus=3) == [0, 1, 2]
    assert api.select_gpus(min_memory_mb=32_000) == [2, 3]
    assert api.select_gpus(num_gpus=1, min_memory_mb=32_000) == [2]
    assert api.select_gpus(gpu_ids=[3, 0], num_gpus=1, min_memory_mb=999_999) == [3, 0]
    assert api.select_gpus(gpu_ids=[1, 1]) == [1]
    assert api.select_gpus(gpu_ids=[]) == []
    assert caplog.records == []
    assert api.select_gpus(num_gpus=5) == [0, 1, 2, 3]
    assert "5 GPUs were asked for and 4 are available" in caplog.text


def test_a_late_driver_is_waited_for_where_that_is_wanted(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulated = standin("2x40GB")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.extend([seconds] * (seconds > max(PAUSES_S)))
        if len(pauses) > 2:
            simulated.fail(None)

    monkeypatch.setattr("gpuherd.gpus.query.time.sleep", pause)
    simulated.fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert api.select_gpus() == [] and pauses == []
    assert api.select_gpus(num_gpus=1, driver_wait_s=60) == [0]
    assert pauses == [2.0, 2.0, 2.0]
    assert "waiting up to 60 s for the NVIDIA driver: the NVIDIA driver is installed but not loaded" in caplog.text
    simulated.fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert api.auto_select_gpus_for_model(1, driver_wait_s=60) == [0]
    assert api.auto_select_gpus_for_model(1, driver_wait_s=1e-9) == [0]


def test_what_is_not_there_is_a_value_error_with_what_is(standin: Standin, show: Callable[[str], None]) -> None:
    standin("4x40GB")
    show("2,3")
    with pytest.raises(ValueError, match=r"Requested GPU IDs \[0, 7\] are not available. Available GPUs: \[2, 3\]"):
        api.select_gpus(gpu_ids=[0, 2, 7])
    with pytest.raises(ValueError, match="largest available has 40960 MB"):
        api.select_gpus(min_memory_mb=41_000)
    with pytest.raises(ValueError, match="the least is 0"):
        api.select_gpus(num_gpus=-1)


def test_automatic_choice_takes_the_fewest_that_hold_the_model(standin: Standin) -> None:
    simulated = standin("8x40GB")
    assert api.auto_select_gpus_for_model(14) == [0]
    assert len(api.auto_select_gpus_for_model(140)) == 6  # 210 GB with the margin
    assert len(api.auto_select_gpus_for_model(140, safety_margin=1)) == 4
    simulated.occupy(0, 30_000)
    assert api.auto_select_gpus_for_model(14) == [1]


def test_automatic_choice_prefers_linked_and_idle_gpus(standin: Standin) -> None:
    standin("4x40GB").link(1, 3, 4)
    assert api.auto_select_gpus_for_model(50) == [1, 3]
    simulated = standin("4x40GB")
    simulated.link(1, 3, 4)
    simulated.set_proximity(0, 1, Proximity.SYSTEM)
    simulated.set_proximity(1, 2, Proximity.ONE_SWITCH)
    simulated.occupy(3, 1000)
    assert api.auto_select_gpus_for_model(50) == [1, 2]


def test_automatic_choice_by_free_memory_uses_a_busy_gpu_rather_than_one_more(standin: Standin) -> None:
    simulated = standin("1x24GB+1x80GB")
    simulated.occupy(1, 10_000)
    assert api.auto_select_gpus_for_model(40) == [1]


def test_a_model_that_fits_nowhere_gets_all_gpus_and_a_warning_with_figures(
    standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    standin("4x40GB").occupy(0, 40_000)
    assert api.auto_select_gpus_for_model(140) == [0, 1, 2, 3]
    assert "needs 215040 MB" in caplog.text
    assert "all 4 GPUs together have 123840 MB free" in caplog.text


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_size_that_is_none_is_refused(standin: Standin, size: float) -> None:
    standin("1x40GB")
    with pytest.raises(JobCannotFit):
        api.auto_select_gpus_for_model(size)


def test_without_gpus_everything_goes_on(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert api.get_available_gpus() == []
    assert api.get_gpu_info() == []
    assert api.get_gpu_memory_usage(3) == (0, 0, 0.0)
    assert api.select_gpus() == api.select_gpus(gpu_ids=[0]) == api.select_gpus(num_gpus=2) == []
    assert api.auto_select_gpus_for_model(7) == []
    assert all("no GPU is available" in record.message for record in caplog.records)
    assert len(caplog.records) == 4
    api.print_gpu_info()
    api.print_gpu_info([0])
    assert capsys.readouterr().out.startswith("Available GPUs: 0\nNo GPU can be used: ")


def test_indices_in_another_order_than_ours_are_warned_of(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    standin("2x40GB")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    api.get_available_gpus()
    assert caplog.records == []
    standin("1x40GB+1x80GB")
    api.get_available_gpus()
    assert "PCI order" in caplog.text


def test_all_public_names_load_and_unknown_ones_do_not() -> None:
    assert set(api.__all__) <= set(dir(api))
    assert all(getattr(api, name).__name__ for name in api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = api.nothing


def test_the_state_of_the_machine_is_public_too(standin: Standin, tmp_path: Path) -> None:
    simulated = standin("2x40GB")
    assert [gpu.uuid for gpu in api.machine().gpus] == list(simulated.uuids)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None
