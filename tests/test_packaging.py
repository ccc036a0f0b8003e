"""What a user gets who installs only the core: commands that start, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_core_installs_and_starts_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(ROOT)]
    subprocess.run(install, check=True, timeout=500)
    present = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    names = {entry["name"].lower() for entry in json.loads(present.stdout)}
    assert not names & {"torch", "numpy", "scipy", "transformers"}
    gpuherd = tmp_path / "env" / "bin" / "gpuherd"
    for words in (["--help"], ["gpus"], ["esd", "--help"], ["completion", "bash"]):
        subprocess.run([gpuherd, *words], check=True, capture_output=True, timeout=60)
    program = "from gpuherd.gpus import get_available_gpus, select_gpus; assert get_available_gpus() == []"
    subprocess.run([python, "-c", program], check=True, timeout=60)
    # Without the extra, the experiment says which one to install.
    shown = subprocess.run([gpuherd, "esd", "--single-model", str(ROOT)], capture_output=True, text=True, timeout=60)
    assert shown.returncode != 0
    assert "gpuherd[esd]" in shown.stderr
    shown = subprocess.run([gpuherd, "web"], capture_output=True, text=True, timeout=60)
    assert shown.returncode != 0
    assert "gpuherd[web]" in shown.stderr
    # What is no Python is in the package too.
    (assets,) = (tmp_path / "env").glob("lib/python3*/site-packages/gpuherd/web/assets")
    ours = {path.name for path in (ROOT / "src/gpuherd/web/assets").iterdir()}
    assert {path.name for path in assets.iterdir()} == ours
    assert (assets.parent / "templates" / "base.html").exists()


def test_the_version_is_written_once() -> None:
    program = "import gpuherd, importlib.metadata as m; print(gpuherd.__version__, m.version('gpuherd'))"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    package, installed = shown.stdout.split()
    assert package == installed
