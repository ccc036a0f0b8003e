"""The folder of a run: this class owns every path in it; no other code builds one by hand.

It knows names and makes folders; the contents of a file belong to the module that writes it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write, private_write
from gpuherd.engines.base import output_file
from gpuherd.errors import CannotWrite

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=@-]+")
_ATTEMPT_LOG = re.compile(r"\.\d+\.log$")
_LONGEST_NAME = 120
ATTEMPTS_A_FILE = 1000  # that share a status file


class RunDirectory:
    """Paths of one run. Nothing is touched before ``create``.

    Args:
        root: the output folder, made if it is not there.
        log_dir: where logs go instead of ``<root>/logs``.
    """

    def __init__(self, root: str | Path, log_dir: str | Path | None = None):
        # Absolute, because jobs may run in another working folder than we do.
        self.root = Path(root).absolute()
        self.logs = Path(log_dir).absolute() if log_dir is not None else self.root / "logs"
        self.run_json = self.root / "run.json"
        self.queue = self.root / "queue.sqlite"
        self.lock = self.root / "queue.lock"
        self.control_fifo = self.root / "control.fifo"
        self.gpu_metrics = self.root / "gpu_metrics.json"
        self.failures = self.root / "failures.jsonl"
        self.attempts = self.root / "attempts"
        self.state_file = self.root / "standing.json"
        self.handover = self.root / "handover"
        self.engine_options = self.handover / "engine.json"
        self.gone = self.handover / "gone.json"

    def has_run(self) -> bool:
        """Whether a dispatcher has worked in this folder before, by the files that it leaves next to the queue."""
        if any(path.exists() for path in (self.run_json, self.gpu_metrics, self.failures)):
            return True
        with suppress(OSError):
            return any(_ATTEMPT_LOG.search(path.name) for path in self.logs.iterdir())
        return False

    def create(self) -> None:
        """Makes the folders and tries a file in each. Raises CannotWrite, naming the folder and the cause."""
        for folder in (self.root, self.logs, self.attempts):
            try:
                str(folder).encode()
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / ".gpuherd-probe"
                probe.touch()
                probe.unlink(missing_ok=True)
            except OSError as problem:
                raise CannotWrite(f"can't write in {folder}: {problem.strerror}; choose another folder") from problem
            except UnicodeEncodeError as problem:
                raise CannotWrite(
                    f"the folder name {str(folder)!r} is no UTF-8 text; choose another folder"
                ) from problem

    def write_run_record(self, record: Mapping[str, Any]) -> None:
        """Writes run.json, the options of the run; for its owner alone where there are --setup lines, which may hold
        secrets. Raises CannotWrite.

        Call it with the queue's lock held (``before`` of ``run_jobs``): else it can describe another run than the one
        at work.
        """
        text = _without_webhook(json.dumps(record, indent=2, sort_keys=True, default=str), record)
        config = record.get("config")
        write = private_write if isinstance(config, Mapping) and config.get("setup") else atomic_write
        try:
            write(self.run_json, text.encode() + b"\n")
        except OSError as problem:
            raise CannotWrite(f"can't write {self.run_json}: {problem.strerror}") from problem

    def attempt_status(self, attempt: int) -> Path:
        """Where a running attempt's shell writes its exit status: one file for a block of attempts, a line each.

        (A file each would cost the file system more than the queue costs us: see ``engines.local.process``.)
        """
        return self.attempts / f"{attempt // ATTEMPTS_A_FILE:06d}.status"

    def attempt_progress(self, attempt: int) -> Path:
        """Where a running attempt reports its progress."""
        return self.attempts / f"{attempt:08d}.progress"

    def manifest(self, batch: str) -> Path:
        """The manifest of a batch submitted to an engine: what its nodes need to run it."""
        return self.handover / f"{batch}.json"

    def engine_output(self, batch: str, index: int) -> Path:
        """The engine's own output for a submitted attempt."""
        return output_file(self.handover, batch, index)

    def attempt_claim(self, attempt: int) -> Path:
        """The claim of a submitted attempt: taken once, by its node or by us."""
        return self.handover / f"{attempt:08d}.claim"

    def attempt_ended(self, attempt: int) -> Path:
        """The node's report on the end of a submitted attempt."""
        return self.handover / f"{attempt:08d}.ended"

    def attempt_recalled(self, attempt: int) -> Path:
        """A mark: we have cancelled a submitted attempt in the engine, to put its job back in the queue."""
        return self.handover / f"{attempt:08d}.recalled"

    def attempt_log(self, job: str, number: int) -> Path:
        """The log of a job's ``number``-th attempt, counted from 1."""
        return self.logs / f"{safe_name(job)}.{number}.log"

    def remove_attempt_files(self, attempt: int) -> None:
        """Removes what lies in ``attempts`` of an attempt alone whose end is in the queue."""
        # Most have none, and this is done for every attempt: no Path is made for it.
        with suppress(OSError):
            os.unlink(f"{self.attempts}/{attempt:08d}.progress")  # noqa: PTH108

    def remove_stray_attempt_files(self, running: Collection[int]) -> None:
        """Removes the files of all attempts but those that run: what a kill at the wrong instant left behind."""
        keep = {f"{attempt:08d}" for attempt in running} | {f"{attempt // ATTEMPTS_A_FILE:06d}" for attempt in running}
        for path in self.attempts.iterdir():
            if path.name.partition(".")[0] not in keep:
                with suppress(OSError):
                    path.unlink()


def safe_name(name: str) -> str:
    """A job's name as a file name: never a path, never hidden, never two jobs on one name, at most 120 characters.

    >>> safe_name("gpt2"), safe_name("openai-community/gpt2")
    ('gpt2', 'openai-community-gpt2-198df6d6')
    """
    plain = _UNSAFE.sub("-", name).lstrip(".-")[:_LONGEST_NAME]
    if plain and plain == name:
        return plain
    import hashlib  # slow to import, and seldom needed

    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{(plain or 'job')[: _LONGEST_NAME - 9]}-{digest[:8]}"


def _without_webhook(text: str, record: Mapping[str, Any]) -> str:
    """The text without the webhook's address but for its host: who knows the rest may post there."""
    config = record.get("config")
    address = config.get("webhook") if isinstance(config, Mapping) else None
    if not isinstance(address, str) or not address:
        return text
    scheme, _, rest = address.partition("://")
    return text.replace(json.dumps(address)[1:-1], f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}/...")
