"""An adapter merged into its base as a model of its own on disk, tensor by tensor, durable and resumable.

Everything is written into a folder beside the one that was asked for, each file whole or not at all, the index last;
then that folder gets its final name. A merge that is killed at any instant leaves nothing under the final name, and
the next one of the same files goes on where it was. In memory are one tensor and the adapter's update of it; what the
adapter leaves alone is copied from file to file by the kernel.

What is written is decided by ``merge_plan`` and ``merge_companions``; the sums, as PEFT rounds them, are
``merge_arithmetic``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.errors import BadModel, CannotWrite, QueueBusy, UsageError, naming_extras
from gpuherd.jobs.durable import atomic_write, remove_strays, replacing, sync_folder
from gpuherd.models.adapter import is_adapter, merge
from gpuherd.models.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint, read_json
from gpuherd.models.diskspace import check_space
from gpuherd.models.dtypes import FloatArray
from gpuherd.models.merge_companions import companions, config_text, merged_config
from gpuherd.models.merge_plan import MergePlan, Written, plan_merge
from gpuherd.models.merged import Merged
from gpuherd.models.names import shown
from gpuherd.models.safetensors_writing import header, in_order, index
from gpuherd.models.source import TensorInfo
from gpuherd.models.stored import StoredTensor

if TYPE_CHECKING:
    from gpuherd.models.merge_writing import TensorWriter

_log = logging.getLogger(__name__)

RECORD = "gpuherd_merge.json"
INDEX = "model.safetensors.index.json"
_RECORD_VERSION = 1

# Bytes of the result that are written, of all, and what is written now.
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What a merge has written, or would write.

    Attributes:
        output: the folder.
        files: its weight files; empty where they are not known yet.
        tensors: how many tensors there are.
        changed: names of those that the adapter changes or brings.
        params: numbers in all of them.
        nbytes: bytes of the weights.
        dtype: their main format, by safetensors' name.
        kept_bytes: of these, bytes that an earlier, interrupted merge had written.
        was_there: whether the folder held this very result already.
    """

    output: Path
    files: tuple[str, ...]
    tensors: int
    changed: tuple[str, ...]
    params: int
    nbytes: int
    dtype: str
    kept_bytes: int = 0
    was_there: bool = False


@dataclass(frozen=True)
class Merge:
    """A merge that has been looked over: both sides' headers are read, and everything fits together."""

    base: Checkpoint
    adapter: Path
    merged: Merged
    plan: MergePlan
    fingerprint: str

    def result(self, output: Path, *, kept_bytes: int = 0, was_there: bool = False) -> MergeResult:
        """The facts of it."""
        plan = self.plan
        return MergeResult(
            output, tuple(plan.files), len(plan.tensors), tuple(plan.changed), plan.params, plan.nbytes, plan.dtype,
            kept_bytes, was_there,
        )  # fmt: skip


def look_over(base: Path, adapter: Path, *, shard_bytes: int | None = None, dtype: str | None = None) -> Merge:
    """Reads the headers of both and decides what will be written.

    Args:
        base: the base model, a folder or a single file; not quantised.
        adapter: the adapter's folder.
        shard_bytes: the largest file of the result; None for the base's own division.
        dtype: format of the weights (F32, F16, BF16); None for the one that transformers would load them in.

    Raises:
        BadModel, MissingModel: one of them can't be used, or they don't belong together.
    """
    if not is_adapter(adapter):
        raise BadModel(f"{adapter} is no adapter: it has no {ADAPTER_CONFIG}, or the weights of a whole model")
    if is_adapter(base):
        raise BadModel(f"the base {base} is itself an adapter; merge that one first")
    opened = open_checkpoint(base)
    foreign = next((name for name, tensor in opened.stored.items() if not isinstance(tensor, StoredTensor)), None)
    if foreign is not None and not opened.tensors[foreign].decoded:
        raise BadModel(f"{base} is a GGUF file; give the base as safetensors or PyTorch files")
    merged = merge(opened, adapter)
    files = {name: tensor.file.path.name for name, tensor in opened.stored.items()}
    plan = plan_merge(merged, files, dtype=dtype, shard_bytes=shard_bytes)
    return Merge(opened, adapter, merged, plan, _fingerprint(opened, adapter, merged, plan))


@dataclass(frozen=True, slots=True)
class _Headers:
    """A base that is known by its headers only: nothing of it can be read."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> FloatArray:
        raise ValueError(f"{name} is not on this machine")

    def read_part(self, name: str, start: int, stop: int) -> FloatArray:
        raise ValueError(f"{start} to {stop} of {name} are not on this machine")


def look_over_headers(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    adapter: Path,
    output: Path,
    *,
    shard_bytes: int | None = None,
    dtype: str | None = None,
) -> MergeResult:
    """What a merge into a base would write of which only config and headers are known. See ``look_over``.

    Without ``shard_bytes`` the number of files is not known: it is the base's.
    """
    if not tensors:
        raise BadModel("the base has no safetensors files, so that its headers can't be looked at; download it first")
    plan = plan_merge(merge(_Headers(config, tensors), adapter), {}, dtype=dtype, shard_bytes=shard_bytes)
    return MergeResult(
        output, tuple(plan.files) if shard_bytes else (), len(plan.tensors), tuple(plan.changed), plan.params,
        plan.nbytes, plan.dtype,
    )  # fmt: skip


def _fingerprint(base: Checkpoint, adapter: Path, merged: Merged, plan: MergePlan) -> str:
    """A digest of all that the result depends on; files by name, size and time of change."""
    stamps = {tensor.file for tensor in base.stored.values()}
    factors = sorted(path for path in adapter.iterdir() if path.is_file())
    content = [
        _RECORD_VERSION,
        sorted((stamp.path.name, stamp.size, stamp.modified_ns) for stamp in stamps),
        [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in factors],
        merged.config,
        [(file, [(tensor.name, tensor.dtype, tensor.action) for tensor in plan.files[file]]) for file in plan.files],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def merge_to_folder(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    shard_bytes: int | None = None,
    dtype: str | None = None,
    names: tuple[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> MergeResult:
    """Writes the merged model into ``output``, which is not there yet or empty. See ``look_over`` for the arguments.

    ``names``: how base and adapter are called in the record, if not by their paths. A merge of the same files that was
    interrupted goes on; one that is done already is left as it is.

    Raises:
        BadModel, MissingModel: see ``look_over``.
        UsageError: the output folder holds something else.
        CannotWrite: there is no room on the disk, or the folder can't be written.
        QueueBusy: another process is writing this result.
        MissingExtra: torch is not installed.
    """
    with naming_extras({"torch": "load"}, "merging needs"):
        import torch  # noqa: F401 - known to be there before anything is written
    todo = look_over(base, adapter, shard_bytes=shard_bytes, dtype=dtype)
    output = output.absolute()
    if already_there(todo, output):
        return todo.result(output, was_there=True)
    try:
        return _Writing(todo, output, names or (str(base), str(adapter)), on_progress).run()
    except OSError as problem:
        raise CannotWrite(f"{output} can't be written: {problem.strerror or problem}") from None


def already_there(todo: Merge, output: Path) -> bool:
    """Whether the output folder holds this very result. Raises UsageError when it holds something else."""
    if not output.exists() and not output.is_symlink():
        return False
    if not output.is_dir():
        raise UsageError(f"{output} is there and is no folder; name another --output-dir")
    if not any(output.iterdir()):
        return False
    if _recorded(output) == todo.fingerprint:
        return True
    raise UsageError(f"{output} is not empty, and what is in it is no merge of these files; name another --output-dir")


def _recorded(folder: Path) -> str | None:
    """The fingerprint of the merge that a folder holds, or that was begun in it; None if there is none."""
    try:
        content = read_json(folder / RECORD)
    except BadModel:
        return None
    fingerprint = content.get("fingerprint")
    return fingerprint if isinstance(fingerprint, str) else None


class _Writing:
    """One merge on its way to the disk."""

    def __init__(self, todo: Merge, output: Path, names: tuple[str, str], on_progress: OnProgress | None) -> None:
        self._todo = todo
        self._output = output
        self._names = names
        self._on_progress = on_progress or (lambda _done, _all, _what: None)
        # Beside the result, so that it can take its name.
        self._staging = output.parent / f".{output.name}.merging"
        self._done = 0

    def run(self) -> MergeResult:
        from gpuherd.models.merge_writing import TensorWriter

        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if already_there(self._todo, self._output):  # another has finished it meanwhile
                self._staging.rmdir()
                return self._todo.result(self._output, was_there=True)
            kept = self._begin()
            plan = self._todo.plan
            check_space(
                self._staging,
                plan.nbytes - kept,
                f"the merged model {shown(self._output.name)}",
                remedy="make room, or choose another --output-dir",
            )
            self._done = kept
            writer = TensorWriter(self._todo.base, self._todo.merged)
            for file, tensors in plan.files.items():
                if not (self._staging / file).exists():
                    self._write_file(writer, self._staging / file, tensors)
            self._write_companions()
            if len(plan.files) > 1:
                atomic_write(self._staging / INDEX, index(plan.files, plan.params))
            sync_folder(self._staging)
            self._staging.rename(self._output)
            sync_folder(self._output.parent)
        return self._todo.result(self._output, kept_bytes=kept)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The folder that is written in, locked. Raises QueueBusy while another process writes there."""
        while True:
            self._staging.mkdir(exist_ok=True)
            try:
                descriptor = os.open(self._staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # another has finished between the two steps
                continue
            try:
                self._lock(descriptor)
                # Another may have finished just now, so that what is locked is its result.
                if self._is_staging(descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QueueBusy(f"another merge is writing {self._output}") from None

    def _is_staging(self, descriptor: int) -> bool:
        try:
            return self._staging.stat().st_ino == os.fstat(descriptor).st_ino
        except FileNotFoundError:
            return False

    def _begin(self) -> int:
        """Clears away what belongs to another merge. Returns the bytes of weights that an earlier one had written."""
        fingerprint = self._todo.fingerprint
        if _recorded(self._staging) != fingerprint:
            for path in self._staging.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            base, adapter = self._names
            record = {
                "base_model": base, "adapter": adapter, "dtype": self._todo.plan.dtype, "gpuherd": __version__,
                "changed": len(self._todo.plan.changed), "fingerprint": fingerprint,
            }  # fmt: skip
            atomic_write(self._staging / RECORD, (json.dumps(record, indent=2) + "\n").encode())
            return 0
        remove_strays(self._staging, time.time() + 1)
        there = [file for file in self._todo.plan.files if (self._staging / file).exists()]
        if there:
            _log.info("%s: going on after %d of %d files", self._output, len(there), len(self._todo.plan.files))
        return sum(tensor.nbytes for file in there for tensor in self._todo.plan.files[file])

    def _write_file(self, writer: TensorWriter, path: Path, tensors: tuple[Written, ...]) -> None:
        by_name = {tensor.name: tensor for tensor in tensors}
        with replacing(path) as file:
            file.write(header(tensors))
            for name in in_order(tensors):
                self._on_progress(self._done, self._todo.plan.nbytes, name)
                writer.append(file, by_name[name])
                self._done += by_name[name].nbytes
        self._on_progress(self._done, self._todo.plan.nbytes, path.name)

    def _write_companions(self) -> None:
        todo, base = self._todo, self._todo.base
        folder = base.path if base.path.is_dir() else base.path.parent
        for name, source in companions(folder, todo.adapter).items():
            target = self._staging / name
            target.parent.mkdir(exist_ok=True)
            atomic_write(target, source.read_bytes())
        original = folder / "config.json"
        if base.config and original.exists():
            config = merged_config(base.config, read_json(todo.adapter / ADAPTER_CONFIG), todo.merged, todo.plan)
            same = config == dict(base.config)
            atomic_write(self._staging / "config.json", original.read_bytes() if same else config_text(config))
