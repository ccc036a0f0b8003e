"""What tests make outside their own folders goes when they end, also when they are killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

# $1 the folder, then network devices. Whoever holds the other end of the pipe has ended when there is no more.
_SWEEP = """
trap '' HUP INT QUIT TERM
cat >/dev/null
folder=$1
shift
for device; do ip link del "$device" 2>/dev/null; done
for again in 1 2 3 4 5 6 7 8 9; do
    rm -rf "$folder" 2>/dev/null && break
    sleep 1
done
"""


class Aftermath:
    """A shell that waits until ``sweep`` is called or this process has ended, however that ends. Then it removes the
    folder and the network devices. (A network whose processes were killed lives on for minutes, while its connections
    wait for an answer, and with it the devices that lead there.)
    """

    def __init__(self, folder: Path, *devices: str):
        self._shell = subprocess.Popen(
            ["sh", "-c", _SWEEP, "aftermath", str(folder), *devices],
            cwd="/",
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def hold(self) -> int:
        """The descriptor of the pipe: a process that it is passed to is waited for too."""
        assert self._shell.stdin is not None
        return self._shell.stdin.fileno()

    def sweep(self) -> None:
        """Removes them now. Safe to call twice."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()
