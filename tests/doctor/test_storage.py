"""What the doctor says of options, disks, leases and the compiler."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuherd.checks import CheckResult, Status, all_well
from gpuherd.doctor import checks
from gpuherd.esd.config import ExperimentConfig


def test_the_real_config_survives_json() -> None:
    config = ExperimentConfig(single_model="org/model", gpu_list=("1,0", 3), limit=7, evals_thresh=1e-7)
    assert checks.config_round_trip(config).status is Status.OK


def test_a_config_that_changes_or_breaks_on_the_way_is_wrong() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Rounding(ExperimentConfig):
        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "check_interval": round(self.check_interval)}

    changed = checks.config_round_trip(Rounding(single_model="m", check_interval=0.25))
    assert (changed.status, "come back changed" in changed.detail) == (Status.FAIL, True)

    @dataclass(frozen=True, kw_only=True)
    class Unspeakable(ExperimentConfig):
        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "limit": {1}}

    assert checks.config_round_trip(Unspeakable(single_model="m")).status is Status.FAIL


def test_free_space_is_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    folder, free_gb = checks.find_free_gb(tmp_path / "not" / "yet")
    assert folder == tmp_path
    assert free_gb > 0


@pytest.mark.parametrize(
    ("free_gb", "writable", "status"), [(10.0, True, Status.OK), (9.9, True, Status.WARN), (99.0, False, Status.WARN)]
)
def test_little_or_closed_disks_are_a_warning(free_gb: float, writable: bool, status: Status) -> None:
    result = checks.disk("models", Path("/data"), free_gb, writable=writable)
    assert result.status is status
    assert "/data" in result.detail
    assert result.remedy is None or "HF_HOME" in result.remedy


def test_the_hub_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert checks.hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert checks.hub_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/h")
    assert checks.hub_cache() == Path("/h/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert checks.hub_cache() == Path("/c")


def test_a_lease_folder_that_works_and_one_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.find_leases().detail == f"GPUs are leased in {os.environ['GPUHERD_LEASE_DIR']}"
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(tmp_path / "link"))
    assert checks.find_leases().status is Status.FAIL


def test_the_compiler_is_needed_for_simulation_only() -> None:
    assert checks.simulation(["/usr/bin/cc"]).status is Status.OK
    assert checks.simulation(None).status is Status.SKIP


def test_every_complaint_has_a_remedy_and_only_failures_count() -> None:
    with pytest.raises(ValueError, match="remedy None"):
        CheckResult("x", Status.WARN, "bad")
    with pytest.raises(ValueError, match="remedy 'do'"):
        CheckResult("x", Status.OK, "good", "do")
    warned = [CheckResult("x", Status.WARN, "bad", "do"), CheckResult("y", Status.SKIP, "not tried", "do")]
    assert all_well(warned)
    assert not all_well([*warned, CheckResult("z", Status.FAIL, "bad", "do")])
