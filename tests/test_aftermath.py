"""Of a test run that is killed nothing stays behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.aftermath import Aftermath
from tests.patience import wait_until

ROOT = Path(__file__).parents[1]


def test_swept_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    aftermath = Aftermath(folder)
    assert folder.exists()
    aftermath.sweep()
    assert not folder.exists()
    aftermath.sweep()


def test_swept_when_its_maker_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / "below").mkdir(parents=True)
    script = (
        "import pathlib, sys, time; from tests.aftermath import Aftermath;"
        "made = Aftermath(pathlib.Path(sys.argv[1])); print(); sys.stdout.flush(); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    ) as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        assert folder.exists()
        maker.kill()
    wait_until(lambda: not folder.exists())
