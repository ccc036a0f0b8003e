"""``gpuherd setup-machine`` in the root folder of an image."""

from __future__ import annotations

import grp
import json
import os
import stat
import tomllib
from pathlib import Path

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus import machine_dir as shared
from gpuherd.gpus.machine_dir import MachineDir, machine_dir
from gpuherd.gpus.policy_file import why_not_believed
from gpuherd.gpus.setup import TEMPLATE
from gpuherd.jobs.settings import Policy, _policy

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set a machine up")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "image"
    for name in ("var/lib", "etc"):
        (root / name).mkdir(parents=True)
    return root


def setup(image: Path, *words: str) -> int:
    return run(["setup-machine", "--root", str(image), *words])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_makes_what_is_needed_and_a_second_call_changes_nothing(
    image: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setup(image, "--dry-run") == 0
    assert "would be made" in capsys.readouterr().out
    assert not (image / "var/lib/gpuherd").exists()
    assert setup(image) == 0
    place = image / "var/lib/gpuherd"
    assert mode(place) == mode(place / "ledger") == mode(place / "reservations") == 0o1777
    policy = image / "etc/gpuherd/policy.toml"
    assert mode(policy) == 0o644
    assert why_not_believed(policy.stat(), policy.parent.stat(), {0}) is None
    capsys.readouterr()
    assert setup(image, "--json") == 0
    assert not [step for step in json.loads(capsys.readouterr().out)["steps"] if step["changed"]]
    # And users' gpuherds use it.
    monkeypatch.delenv("GPUHERD_MACHINE_DIR")
    monkeypatch.setattr(shared, "PLACE", place)
    assert machine_dir() == MachineDir(place, shared=True)


def test_for_a_group(image: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    assert setup(image, "--group", group) == 0
    assert mode(image / "var/lib/gpuherd/ledger") == 0o3770
    assert (image / "var/lib/gpuherd").stat().st_gid == os.getgid()
    assert setup(image) == 0  # for all again
    assert mode(image / "var/lib/gpuherd") == 0o1777


def test_an_unknown_group_is_refused(image: Path) -> None:
    with pytest.raises(UsageError, match="groupadd"):
        setup(image, "--group", "no-such-group")


def test_a_policy_that_is_there_stays(image: Path) -> None:
    policy = image / "etc/gpuherd/policy.toml"
    policy.parent.mkdir()
    policy.write_text("exclude_gpus = ['0']\n")
    assert setup(image) == 0
    assert policy.read_text() == "exclude_gpus = ['0']\n"


def refused(image: Path, match: str) -> None:
    with pytest.raises(CannotWrite, match=match):
        setup(image)


def test_what_cannot_be_relied_on_is_refused(image: Path) -> None:
    place = image / "var/lib/gpuherd"
    place.symlink_to("/tmp")
    refused(image, "symbolic link")
    place.unlink()
    place.mkdir()
    os.chown(place, 4242, 4242)
    refused(image, "chown root")
    place.rmdir()
    place.write_text("")
    refused(image, "no folder")
    place.unlink()
    (image / "var/lib").chmod(0o777)
    refused(image, "go-w")
    (image / "var/lib").chmod(0o755)
    (image / "etc/gpuherd").symlink_to("/tmp")
    refused(image, "symbolic link")
    assert not place.exists()


def test_the_policy_to_fill_in_is_a_valid_one(tmp_path: Path) -> None:
    assert tomllib.loads(TEMPLATE) == {}
    filled = "".join(line[2:] if line.startswith("# ") else line for line in TEMPLATE.splitlines(True)[3:])
    policy = _policy(tomllib.loads(filled), tmp_path / "policy.toml")
    assert policy != Policy()
    assert policy.max_gpus("alice") == 8
