"""On what kind of file system a folder lies: one that other machines may see too, or one of this machine alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")
# Those that only one machine has mounted. Any other may be shared, as far as we know.
_OF_ONE_MACHINE = frozenset(
    [
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "jfs",
        "reiserfs",
        "nilfs2",
        "tmpfs",
        "ramfs",
        "rootfs",
        "devtmpfs",
        "overlay",
        "aufs",
        "squashfs",
        "erofs",
        "vfat",
        "exfat",
        "msdos",
        "ntfs",
        "ntfs3",
        "fuseblk",
        "fuse.fuse-overlayfs",
    ]
)


def kind_of(path: str | Path) -> str:
    """The kind of file system that a path lies on or would lie on, as the kernel calls it (``nfs4``); "" if unknown."""
    wanted = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = _TABLE.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) < 5 or not after:
            continue
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), words[4])
        # A later mount on the same point hides the earlier.
        if len(point) >= len(best) and (wanted == point or wanted.startswith(point.rstrip("/") + "/")):
            best, kind = point, after.split(" ")[0]
    return kind


def may_be_shared(kind: str) -> bool:
    """Whether other machines may see a file system of this kind.

    >>> may_be_shared("nfs4"), may_be_shared("fuse.sshfs"), may_be_shared("ext4")
    (True, True, False)
    """
    return kind not in _OF_ONE_MACHINE
