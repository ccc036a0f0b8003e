"""Where a merged model is written: in a folder beside the final one, by one process at a time, until it is whole.

That folder is known by a record of what is merged in it, so that an interrupted merge can go on, and so that a folder
of anybody else's is never cleared away. Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write, sync_folder
from gpuherd.errors import BadModel, CannotWrite, QueueBusy, UsageError
from gpuherd.models.checkpoint import read_json

RECORD = "gpuherd_merge.json"


def final_folder(output: Path) -> Path:
    """The folder of a result, without links on the way to it. It is not there yet, empty, or holds a merged model.

    Raises UsageError when nothing can take its place, CannotWrite when it can't be looked at.
    """
    folder = Path(os.path.realpath(output))
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{output} is there and is no folder; name another --output-dir")
        # The result is renamed to it, which neither a mount point nor who works in the folder would survive.
        if folder.is_mount() or folder == Path.cwd():
            raise UsageError(f"{output} is a mount point or the current folder; name a folder in it as --output-dir")
        if folder.is_dir() and any(folder.iterdir()) and recorded(folder) is None:
            raise UsageError(f"{output} is not empty, and what is in it is no merge; name another --output-dir")
    except OSError as problem:
        raise CannotWrite(f"{output} can't be looked at: {problem.strerror}") from None
    return folder


def already_there(folder: Path, fingerprint: str) -> bool:
    """Whether a final folder holds this very result. Raises UsageError when it holds another."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if recorded(folder) == fingerprint:
        return True
    raise UsageError(f"{folder} is not empty, and what is in it is no merge of these files; name another --output-dir")


def recorded(folder: Path) -> str | None:
    """The fingerprint of the merge that a folder holds, or that was begun in it; None if there is none."""
    try:
        fingerprint = read_json(folder / RECORD).get("fingerprint")
    except BadModel:
        return None
    return fingerprint if isinstance(fingerprint, str) else None


class Staging:
    """The folder in which one result is written.

    Attributes:
        path: beside the result, so that it can take its name.
    """

    def __init__(self, folder: Path) -> None:
        self._final = folder
        self.path = folder.parent / f".{folder.name}.merging"
        # A file of its own, since network file systems lock no folders.
        self._lock = folder.parent / f".{folder.name}.merging.lock"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes this result meanwhile. Raises QueueBusy while another process does, and OSError."""
        self._final.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._locked()
        try:
            yield
        finally:
            # Removed while it is held: who has it open already sees that it is no longer the file of this name.
            with suppress(OSError):
                self._lock.unlink()
            os.close(descriptor)

    def _locked(self) -> int:
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._lock.lstat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise QueueBusy(f"another merge is writing {self._final}") from None
            except FileNotFoundError:  # another has finished and removed it
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def begin(self, fingerprint: str, record: Mapping[str, Any], parts: Collection[str]) -> list[str]:
        """Makes the folder ready. Returns which of the ``parts`` an earlier try of the same merge has left whole.

        Args:
            fingerprint: of the merge.
            record: what is to be told of it, in the result.
            parts: the files that are worth keeping.

        Raises UsageError when the folder is somebody else's.
        """
        if self.path.is_symlink() or (self.path.exists() and not self._is_ours()):
            raise UsageError(f"{self.path} is in the way, and holds no interrupted merge; move it away")
        self.path.mkdir(exist_ok=True)
        if recorded(self.path) == fingerprint:
            there = [name for name in parts if (self.path / name).exists()]
            self._clear({RECORD, *there})
            return there
        self._clear({RECORD})
        content = {**record, "fingerprint": fingerprint}
        atomic_write(self.path / RECORD, (json.dumps(content, indent=2) + "\n").encode())
        return []

    def _is_ours(self) -> bool:
        """Whether a merge has been begun in it: it has a record, or nothing yet but the beginning of one."""
        if not self.path.is_dir():
            return False
        return recorded(self.path) is not None or all(
            path.name.startswith(f".{RECORD}.") and path.name.endswith(".tmp") for path in self.path.iterdir()
        )

    def _clear(self, kept: Collection[str]) -> None:
        """Removes all but these files."""
        for path in list(self.path.iterdir()):
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def discard(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finish(self) -> None:
        """Gives it the final name."""
        sync_folder(self.path)
        self.path.rename(self._final)
        sync_folder(self._final.parent)
