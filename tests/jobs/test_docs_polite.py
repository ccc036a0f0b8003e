"""The settings files of docs/sharing-politely.md are read as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuherd.gpus.reservations import ReservationLimits, ReservationRules
from gpuherd.jobs.settings import TurnPolicy, load, user_file

PAGE = Path(__file__).parents[2] / "docs" / "sharing-politely.md"


def test_both_files_are_right_and_every_key_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, machine = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    user_file().parent.mkdir(parents=True)
    user_file().write_text(mine)
    policy = tmp_path / "policy.toml"
    policy.write_text(machine)
    policy.chmod(0o644)
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    settings = load()
    assert settings.defaults["gpu_list"] == ("4", "5", "6", "7")
    assert settings.defaults["webhook"].startswith("https://")
    assert (settings.max_gpus, settings.hours.max_gpus, len(settings.hours.quiet)) == (4, 1, 2)
    assert settings.policy.exclude_gpus == ("0",)
    assert settings.policy.idle_lease_s == 4 * 3600
    assert (settings.policy.max_gpus("alice"), settings.policy.max_gpus("bob")) == (6, 4)
    assert settings.policy.hours.max_gpus == 2
    assert (settings.policy.week_hours("alice"), settings.policy.week_hours("bob")) == (500, 300)
    assert settings.policy.turns == TurnPolicy(weights={"alice": 2.0})
    assert settings.policy.reservation_limits("bob").max_s == 48 * 3600


def test_the_policy_of_the_page_on_reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PAGE.parent / "reservations.md").read_text(encoding="utf-8")
    (machine,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    policy = tmp_path / "policy.toml"
    policy.write_text(machine)
    policy.chmod(0o644)
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    found = load().policy
    assert (found.reservation_limits("alice").max_gpus, found.reservation_limits("bob").max_gpus) == (8, 4)
    # The page names the defaults.
    usual = ReservationRules(
        limits=ReservationLimits(4, 48 * 3600, 14 * 86400), limits_of=found.reservation_rules.limits_of
    )
    assert found.reservation_rules == usual


def test_the_python_of_the_page_on_reservations_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (PAGE.parent / "reservations.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "reservations.md", "exec"), {})
    assert f"# {capsys.readouterr().out}" in code
