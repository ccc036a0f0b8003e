"""The settings files: what they give, and that no slip in them passes in silence."""

from __future__ import annotations

import argparse
import grp
import os
from pathlib import Path

import pytest

from gpuherd.batch import user_queue
from gpuherd.checks import Status
from gpuherd.cli import main
from gpuherd.doctor.checks import find_leases, find_settings
from gpuherd.errors import UsageError
from gpuherd.gpus import policy_file
from gpuherd.gpus.turns import TurnRules
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions, GpuOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.settings import NO_SETTINGS, TurnPolicy, load, user_file
from gpuherd.options import add_options, build

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of others")


def write(text: str) -> Path:
    path = user_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return path


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy of one's own, as GPUHERD_POLICY allows where the machine has none."""
    folder = tmp_path / "policy"
    folder.mkdir(mode=0o755)
    path = folder / "policy.toml"
    path.write_text("")
    path.chmod(0o644)
    monkeypatch.setenv("GPUHERD_POLICY", str(path))
    return path


def test_without_files_there_are_no_settings() -> None:
    assert load() == NO_SETTINGS


def test_defaults_are_for_what_the_command_line_leaves_open() -> None:
    write(
        "[defaults]\nmax-checks = 3\ngpus = [4, '5,6']\nyield = 'pause'\ntimeout = '2h'\nshare = true\n"
        "check_interval = 0.5\nmin_disk = '2GB'\n[notify]\ncommand = 'mail me'\nwebhook = 'https://example.org/x'\n"
    )
    settings = load()
    parser = argparse.ArgumentParser()
    add_options(parser, DispatchOptions)
    args = parser.parse_args(["--max-checks", "7"])
    settings.fill(args, DispatchOptions)
    assert build(DispatchOptions, args) == DispatchOptions(
        max_checks=7,
        gpu_list=("4", "5,6"),
        yield_to_others="pause",
        timeout=7200.0,
        share=True,
        check_interval=0.5,
        min_disk=2048,
        notify_command="mail me",
        webhook="https://example.org/x",
    )
    plain = argparse.Namespace()
    settings.fill(plain, GpuOptions)  # a command that knows fewer options gets only those
    assert build(GpuOptions, plain) == GpuOptions(max_checks=3, gpu_list=("4", "5,6"), check_interval=0.5)


def test_defaults_of_another_engine_are_left_out() -> None:
    """Who has a cluster in the file can still say ``--engine local``, and GPUs of this machine are none of SLURM's."""
    write(
        "[defaults]\nengine = 'slurm'\npartition = 'gpu'\nhost-mem = '2GB'\ngpu-list = [0]\nray-address = 'h:1'\n"
        "setup = ['module load cuda']\nmax-gpus = 2\n"
    )
    settings = load()
    assert settings.engine == "slurm" and NO_SETTINGS.engine == "local"
    parser = argparse.ArgumentParser()
    add_options(parser, DispatchOptions)
    for words, expected in (
        ([], {"engine": "slurm", "partition": "gpu", "host_mem": 2048, "setup": ("module load cuda",)}),
        (["--engine=slurm", "--partition=cpu"], {"partition": "cpu", "host_mem": 2048, "setup": ("module load cuda",)}),
        (["--engine=local"], {"gpu_list": ("0",)}),
        (["--engine=ray"], {"ray_address": "h:1", "host_mem": 2048}),
    ):
        args = parser.parse_args(words)
        settings.fill(args, DispatchOptions)
        options = build(DispatchOptions, args)
        assert options == DispatchOptions(**{"engine": args.engine, "max_gpus": 2, **expected})
    plain = argparse.Namespace()
    settings.fill(plain, GpuOptions)  # a command that knows no engines runs here
    assert build(GpuOptions, plain) == GpuOptions(max_gpus=2, gpu_list=("0",))


def test_the_disk_guard_can_be_switched_off() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, DispatchOptions)
    assert build(DispatchOptions, parser.parse_args(["--min-disk", "0"])).min_disk == 0
    for written in ("0", "'0'", "'0GB'"):
        write(f"[defaults]\nmin_disk = {written}\n")
        assert load().defaults["min_disk"] == 0


def test_the_users_own_limits() -> None:
    write("[limits]\nmax_gpus = 2\nquiet_hours = ['Mon-Fri 09:00-18:00', 'Sat']\nquiet_max_gpus = 1\n")
    settings = load()
    assert settings.max_gpus == 2
    assert [hours.text for hours in settings.hours.quiet] == ["Mon-Fri 09:00-18:00", "Sat"]
    assert settings.hours.max_gpus == 1
    assert settings.path == user_file()


WRONG = [
    ("[defaults]\nmax_chekcs = 3", r"\[defaults\] max_chekcs is no setting; did you mean max_checks\?"),
    ("[defualts]\nmax_checks = 3", r"defualts is no setting; did you mean defaults\?"),
    ("[limits]\nzzz = 3", r"\[limits\] zzz is no setting; there are max_gpus, quiet_hours, quiet_max_gpus"),
    ("[defaults]\nmax_checks = 0", r"\[defaults\] max_checks is wrong: '0' is not a whole number above 0"),
    ("[defaults]\nmax_checks = true", r"\[defaults\] max_checks = True should be a number or a text"),
    ("[defaults]\nmax_checks = [3]", r"should be a number or a text"),
    ("[defaults]\nmax_checks = 2020-01-01", r"should be a number or a text"),
    ("[defaults]\nshare = 'yes'", r"\[defaults\] share = 'yes' should be true or false"),
    ("[defaults]\norder = 'longst'", r"possible: age, longest \(did you mean longest\?\)"),
    ("[defaults]\ngpus = [1]\ngpu_list = [2]", r"says the same as another setting"),
    ("[defaults]\ncheck_interval = nan", r"check_interval is wrong"),
    ("[defaults]\nwebhook = 3", r"should be a text in quotes"),
    ("defaults = 3", r"defaults should be a table; write \[defaults\]"),
    ("[limits]\nmax_gpus = -1", r"\[limits\] max_gpus is wrong"),
    ("[limits]\nquiet_hours = 'Mon-Frx'", r"\[limits\] quiet_hours is wrong: .* no day of the week"),
    ("[notify]\ncommand = ''", r"\[notify\] command = '' should be a text in quotes"),
    ("[defaults", r"is no valid TOML: .*; you should correct it"),
    ("[" * 20_000, r"is no valid TOML"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_setting_is_refused_with_file_and_key(text: str, words: str) -> None:
    path = write(text)
    with pytest.raises(UsageError, match=words) as refused:
        load()
    assert str(path) in str(refused.value)


def test_a_file_that_is_no_text_or_no_file() -> None:
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no UTF-8 text; save it in UTF-8"):
        load()
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="can't be read"):
        load()


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_users_file_that_others_can_write_is_refused(mode: int) -> None:
    path = write("[notify]\ncommand = 'x'\n")
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod go-w"):
        load()


@ROOT
@pytest.mark.parametrize("mode", [0o664, 0o620])
def test_a_users_file_that_a_group_can_write_is_refused_unless_the_group_is_the_user_alone(mode: int) -> None:
    path = write("[notify]\ncommand = 'x'\n")
    os.chown(path, 0, grp.getgrnam("daemon").gr_gid)
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod go-w"):
        load()
    os.chown(path, 0, 61_001)  # a group without a name
    with pytest.raises(UsageError, match="chmod go-w"):
        load()
    os.chown(path, 0, grp.getgrnam("root").gr_gid)
    assert load().path == path


def test_a_fifo_is_no_file_and_nobody_waits_for_one_who_writes_into_it(policy: Path) -> None:
    path = write("")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="no plain file"):
        load()
    path.unlink()
    policy.unlink()
    os.mkfifo(policy)
    assert "no plain file" in load().warnings[0]


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "--json"],
        ["logs", "a"],
        ["pause", "a"],
        ["resume", "a"],
        ["retry", "a"],
        ["cancel", "a"],
        ["cancel", "--all"],
        ["drain"],
        ["down"],
    ],
    ids=" ".join,
)
def test_a_slip_keeps_nobody_from_looking_at_their_queue_or_ending_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = user_queue.open_folder()
    with Queue(run.queue) as queue:
        queue.add([Job(name="a", argv=("true",), gpus=0)])
    path = write("[defaults]\nmax_chekcs = 3")
    try:
        main.run(words)
    except UsageError as problem:
        assert str(path) not in str(problem), "refused for the slip"
    told = capsys.readouterr().err
    assert f"warning: {path}: [defaults] max_chekcs is no setting" in told
    for start in (["submit", "--", "true"], ["up"]):
        with pytest.raises(UsageError, match="did you mean max_checks"):
            main.run(start)


def test_the_doctor_looks_at_both_files(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_settings().detail == f"read from {policy}"
    path = write("[limits]\nmax_gpus = 2\n")
    assert find_settings().detail == f"read from {path} and {policy}"
    path.write_text("[limits]\nmax_gpu = 2\n")
    found = find_settings()
    assert (found.status, "did you mean max_gpus" in found.detail) == (Status.FAIL, True)
    path.unlink()
    policy.chmod(0o666)
    assert find_settings().status is Status.WARN
    policy.chmod(0o644)
    policy.write_text("lease_dir = 'here'")
    assert find_settings().status is Status.FAIL
    policy.write_text("[[")
    assert find_leases().status is Status.OK  # the environment names its folder
    monkeypatch.delenv("GPUHERD_LEASE_DIR")
    assert find_leases().status is Status.FAIL


@ROOT
def test_a_users_file_of_somebody_else_is_refused() -> None:
    """As a user meets it whose file was made by another: root's own would be believed."""
    path = write("[notify]\ncommand = 'x'\n")
    os.chown(path, 61_001, 61_001)
    with pytest.raises(UsageError, match="somebody else"):
        load()


# --- the machine's policy ---------------------------------------------------------------------------------------


def test_the_machines_policy(policy: Path) -> None:
    policy.write_text(
        "exclude_gpus = [0, '3:1']\nidle_lease = '90m'\nlease_dir = '/run/lock/elsewhere'\n"
        "[limits]\nmax_gpus_per_user = 4\nquiet_hours = '22:00-06:00'\n[users.alice]\nmax_gpus = 6\n"
        "[users.'bob']\nmax_gpus = 0\n"
    )
    found = load().policy
    assert (found.max_gpus("alice"), found.max_gpus("bob"), found.max_gpus("carol")) == (6, 0, 4)
    assert found.exclude_gpus == ("0", "3:1")
    assert found.idle_lease_s == 5400.0
    assert [hours.text for hours in found.hours.quiet] == ["22:00-06:00"]
    assert found.path == policy


def test_turns_and_weeks_of_a_policy(policy: Path) -> None:
    assert load().policy.turns == TurnPolicy()
    policy.write_text(
        "[turns]\nenabled = false\nhalf_life = '3d'\ngrace = '1m'\nslice = '10s'\nkeep_share = 0.5\n"
        "[limits]\ngpu_hours_per_week_per_user = 100\n"
        "[users.alice]\nweight = 2.5\ngpu_hours_per_week = 0\n"
    )
    found = load().policy
    assert not found.turns.enabled
    assert found.turns.rules == TurnRules(
        half_life_s=3 * 86400.0, grace_s=60.0, slice_s=10.0, quantum_s=50.0, keep_share=0.5
    )
    assert (found.turns.weight("alice"), found.turns.weight("bob")) == (2.5, 1.0)
    assert (found.week_hours("alice"), found.week_hours("bob")) == (0.0, 100.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[turns]\nhalflife = '3d'", "did you mean half_life"),
        ("[turns]\nenabled = 'no'", "should be true or false"),
        ("[turns]\ngrace = 'soon'", "no length of time|not a length of time"),
        ("[turns]\nkeep_share = 1.5", "above 1"),
        ("[users.alice]\nweight = 0", "should be above 0"),
        ("[users.alice]\nweight = -1", "not a number of 0 or more"),
        ("[users.alice]\ngpu_hours_per_week = 'all'", "not a number of 0 or more"),
        ("[limits]\nmax_gpus_per_usr = 4", "did you mean max_gpus_per_user"),
        ("[users.alice]\nmax_gpu = 4", "did you mean max_gpus"),
        ("[users]\nalice = 4", r"\[users\] alice should be a table"),
        ("idle_lease = '5s'", "below 60 s"),
        ("lease_dir = 'here'", "whole path"),
        ("exclude_gpus = 'a,,b'", "no list of GPU ids"),
        ("[defaults]\nmax_checks = 1", "defaults is no setting"),
        ("x", "its administrator should correct it"),
    ],
)
def test_a_slip_in_a_policy_frees_nobody_from_it(policy: Path, text: str, words: str) -> None:
    policy.write_text(text)
    with pytest.raises(UsageError, match=words):
        load()


@pytest.mark.parametrize(("mode", "folder_mode"), [(0o666, 0o755), (0o664, 0o755), (0o644, 0o777)])
def test_a_policy_that_others_can_write_is_left_out_of_account(policy: Path, mode: int, folder_mode: int) -> None:
    policy.write_text("[limits]\nmax_gpus_per_user = 0\n")
    policy.chmod(mode)
    policy.parent.chmod(folder_mode)
    settings = load()
    assert settings.policy.max_gpus("alice") is None
    assert len(settings.warnings) == 1
    assert "left out of account" in settings.warnings[0]
    assert "chmod go-w" in settings.warnings[0]


@ROOT
def test_a_policy_of_another_user_is_left_out_of_account(policy: Path) -> None:
    policy.write_text("[limits]\nmax_gpus_per_user = 0\n")
    os.chown(policy, 61_001, 61_001)
    settings = load()
    assert settings.policy.max_gpus("alice") is None
    assert "does not belong to root" in settings.warnings[0]


def test_a_policy_that_is_named_and_not_there_is_told(policy: Path) -> None:
    policy.unlink()
    assert "can't be read" in load().warnings[0]


@pytest.mark.skipif(policy_file.PLACE.exists(), reason="this machine has a policy of its own")
def test_the_policy_of_the_machine_comes_before_the_users_choice(policy: Path) -> None:
    """Where root's file lies is fixed; here, where there is none, the user's own choice is honoured."""
    assert Path("/etc/gpuherd/policy.toml") == policy_file.PLACE
    policy.write_text("[limits]\nmax_gpus_per_user = 3\n")
    assert policy_file.read_policy().tables == {"limits": {"max_gpus_per_user": 3}}


def test_the_policy_can_name_the_folder_of_leases(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuherd.gpus.leases import LeaseFolder

    policy.write_text(f"lease_dir = '{tmp_path / 'by-policy'}'\n")
    assert LeaseFolder.default().path == tmp_path / "leases"  # the environment names one: simulated GPUs, tests
    monkeypatch.delenv("GPUHERD_LEASE_DIR")
    assert LeaseFolder.default().path == tmp_path / "by-policy"
    assert LeaseFolder.existing() is not None
