"""The folder of a cluster of our own, and of those whose processes were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from gpuherd.engines.ray.engine import OwnFolder

_HOLDER = """
import sys, time
from pathlib import Path
from gpuherd.engines.ray.engine import OwnFolder
folder = OwnFolder(Path(sys.argv[1]))
(folder.path / "session").mkdir()
print(folder.path, flush=True)
time.sleep(600)
"""


def test_what_killed_ones_left_goes_with_the_next_and_what_is_held_stays(tmp_path: Path) -> None:
    stranger, link = tmp_path / "gpuherd-ray.file", tmp_path / "gpuherd-ray.link"
    stranger.touch()
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        first = OwnFolder(tmp_path)
        assert (held / "session").is_dir()
        holder.send_signal(signal.SIGKILL)
    second = OwnFolder(tmp_path)
    assert not held.exists() and first.path.is_dir() and second.path.is_dir()
    assert stranger.exists() and link.is_symlink() and (tmp_path / "elsewhere").is_dir()
    for each in (first, second):
        each.remove()
        assert not each.path.exists()


def test_a_process_that_inherits_it_holds_it_too(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path)
    with subprocess.Popen(["sleep", "600"], pass_fds=(folder.hold,)) as heir:
        os.close(folder.hold)
        OwnFolder(tmp_path).remove()
        assert folder.path.is_dir()
        heir.kill()
    OwnFolder(tmp_path).remove()
    assert not folder.path.exists()
