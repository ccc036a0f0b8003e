"""SLURM's programs are run with the environment that they and the jobs need."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.engines.slurm.commands import Programs


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
    assert Programs().sbatch([], "#!/bin/sh\n") == "7"
    assert (here / "sbatch.path").read_text().strip() == found.format(here=here, above=here.parent)
    Programs().squeue(["a"])
    assert (here / "squeue.path").read_text().strip() == (given or "none")
