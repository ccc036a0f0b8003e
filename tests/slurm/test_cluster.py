"""What the test cluster needs is said, and installed by continuous integration, in the same words; without it tests are
skipped with a reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.gridengine import cluster as gridengine
from tests.slurm.cluster import PACKAGES, PROGRAMS, why_not

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", [".ci/run", "docs/slurm.md"])
def test_the_packages_are_named_alike(path: str) -> None:
    assert PACKAGES in (ROOT / path).read_text(encoding="utf-8")


def test_without_them_the_reason_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = why_not()
    assert reason is not None
    assert reason == "a test cluster needs Linux and root" or (PROGRAMS[0] in reason and PACKAGES in reason)


class Machine:
    """Continuous integration's script where there are only these programs: ``apt-get``, ``make``, ``id`` and those of
    SLURM do nothing but write their words down.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("bash", "cat", "dirname", "timeout"):
            found = shutil.which(name)
            assert found is not None
            (folder / "bin" / name).symlink_to(found)
        self.has("make")

    def has(self, name: str, script: str = "") -> None:
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)  # never through a link
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.folder}/told\n{script}\n')
        path.chmod(0o755)

    def run(self, user: int = 0) -> tuple[str, list[str]]:
        """What it says, and what it ran."""
        self.has("id", f"echo {user}")
        words = [str(self.folder / "bin/bash"), str(ROOT / ".ci/run")]
        environment = {"PATH": str(self.folder / "bin")}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        ran = (self.folder / "told").read_text().splitlines()
        (self.folder / "told").write_text("")
        assert ran[-1] == "make test", "the tests run in any case"
        return done.stderr, [line for line in ran[:-1] if not line.startswith("id ")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_installed_where_that_can_not_be(machine: Machine) -> None:
    assert machine.run() == ("", [])
    machine.has("apt-get")
    assert machine.run(user=1000) == ("", [])


def test_nothing_is_installed_where_all_is_there(machine: Machine) -> None:
    machine.has("apt-get")
    of_slurm = ("slurmctld", "slurmd", "slurmdbd", "munged", "sbatch", "mariadbd", "ip")
    of_gridengine = (*gridengine.DAEMONS, "qsub", "qstat")
    for title, names in (("SLURM", of_slurm), ("Grid Engine", of_gridengine), ("Chromium", ("chromium",))):
        for name in names:
            said, ran = machine.run()
            assert f"installing {title}'s packages" in said and ran, f"{name} is missing"
            machine.has(name)
        said, ran = machine.run()
        assert f"installing {title}'s packages" not in said
    assert machine.run() == ("", [])


def test_packages_are_fetched_before_any_is_unpacked(machine: Machine) -> None:
    machine.has("apt-get", "cat")  # and asks nobody
    said, ran = machine.run()
    assert "skipped" not in said
    assert [" update" in line for line in ran] == [True] + 6 * [False]
    assert ["--download-only" in line for line in ran] == [False, True, False, True, False, True, False]
    assert all(line.endswith(PACKAGES) for line in ran[1:3])
    assert all(line.endswith(gridengine.PACKAGES) for line in ran[3:5])
    assert all(line.endswith(" chromium") for line in ran[5:])


@pytest.mark.parametrize("script", ["exit 100", "kill -9 $$"])
def test_without_a_mirror_the_tests_run_all_the_same(machine: Machine, script: str) -> None:
    machine.has("apt-get", script)
    said, ran = machine.run()
    assert said.count("can't be installed here; its tests are skipped") == 3 and len(ran) == 1


def test_an_installation_is_given_up_after_a_while(machine: Machine) -> None:
    machine.has("apt-get")
    machine.has("timeout", "exit 124")  # as it does when the time is up
    said, ran = machine.run()
    assert "can't be installed here" in said
    assert [line.split()[:3] for line in ran] == [["timeout", "--kill-after=5", "60"]]
