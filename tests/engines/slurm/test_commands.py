"""SLURM's programs are run with the environment that they and the jobs need."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpuherd.engines.base import Batch, Parcel, Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.registry import find
from gpuherd.engines.slurm.commands import SLURM
from gpuherd.engines.slurm.engine import SlurmEngine


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, and programs of SLURM that write down what they find in their environment."""
    for name in ("sbatch", "squeue"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "${{PYTHONPATH-none}}" >{tmp_path}/{name}.path\necho 7\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "found"), [("src:/opt/lib::..", "{here}/src:/opt/lib:{above}"), ("/opt/lib", "/opt/lib"), (None, "none")]
)
def test_jobs_find_modules_from_the_folder_that_they_are_handed_over_in(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    assert SLURM.submit([], "#!/bin/sh\n") == "7"
    assert (here / "sbatch.path").read_text().strip() == found.format(here=here, above=here.parent)
    list(SLURM.squeue(["a"]))
    assert (here / "squeue.path").read_text().strip() == (given or "none")


def test_the_script_that_is_kept_is_for_its_owner_alone(here: Path) -> None:
    """Lines of --setup may hold secrets; also where an earlier gpuherd has left a script of that name."""
    program = here / "bin" / "scontrol"
    program.write_text("#!/bin/sh\necho MaxArraySize = 1001\n")
    program.chmod(0o755)
    parcels = (Parcel(attempt=1, title="a"),)
    batch = Batch(name="b-1", placement=Placement(gpus=1), parcels=parcels, command=("run", "x"), folder=here)
    mask = os.umask(0)
    try:
        for old in (False, True):
            if old:
                (here / "b-1.sh").chmod(0o644)
            engine = SlurmEngine(EngineOptions(engine="slurm", setup=("export TOKEN=secret",)))
            assert engine.submit(batch) == ["7"]
            assert "TOKEN=secret" in (here / "b-1.sh").read_text()
            assert stat.S_IMODE((here / "b-1.sh").stat().st_mode) == 0o600
    finally:
        os.umask(mask)


def test_the_gpus_of_a_partitions_nodes_are_counted_by_type(here: Path) -> None:
    nodes = "n1|gpu|idle|16|8000|gpu:l40s:2,gpu:v100:4\\nn1|all|idle|16|8000|gpu:l40s:2\\nn2|all|idle|16|8000|(null)\\n"
    program = here / "bin" / "sinfo"
    partitions = "gpu*|up|infinite\\nall|up|infinite\\n"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--Node*) printf "{nodes}";; *) printf "{partitions}";; esac\n')
    program.chmod(0o755)
    inventory = find("slurm").inventory
    assert inventory(EngineOptions(engine="slurm")) == ({"l40s": 2, "v100": 4},)
    assert inventory(EngineOptions(engine="slurm", gpu_type="l40s")) == ({"l40s": 2},)
    assert inventory(EngineOptions(engine="slurm", partition="all")) == ({"l40s": 2}, {})
    assert find("ray").inventory(EngineOptions(engine="ray")) is None
