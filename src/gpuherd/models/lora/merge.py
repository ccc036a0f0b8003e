"""An adapter merged into its base as a model of its own on disk, tensor by tensor, durable and resumable.

Everything is written into a folder next to the requested one, each file whole or not at all, the index last; then that
folder gets its final name. A merge that is killed at any instant leaves nothing under the final name, and the next one
of the same files goes on where it was. In memory are one tensor and the adapter's update of it; what the adapter leaves
alone is copied from file to file by the kernel.

What is written is decided by ``merge_plan``; the sums, as PEFT rounds them, are ``merge_tensors``. The folder is known
by a record of what is merged in it, so that an interrupted merge can go on, and so that a folder of another owner is
never cleared.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd import __version__
from gpuherd.atomic import atomic_write, replacing, sync_folder
from gpuherd.errors import BadModel, CannotWrite, QueueBusy, UsageError, naming_extras
from gpuherd.models.checkpoints.hub import check_space
from gpuherd.models.checkpoints.open import ADAPTER_CONFIG, Checkpoint, open_checkpoint, read_json
from gpuherd.models.checkpoints.quantized import quantised_as
from gpuherd.models.checkpoints.safetensors import header, in_order, index
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, opened
from gpuherd.models.lora import merge_plan
from gpuherd.models.lora.adapter import WEIGHT_FILES, is_adapter, merge
from gpuherd.models.lora.merge_plan import MergePlan
from gpuherd.models.lora.update import Merged
from gpuherd.models.names import quoted
from gpuherd.models.tensors.source import HeadersOnly, TensorInfo

# ---- the folder ------------------------------------------------------------------------------------------------------

# A merged model is written in a folder next to the final one, by one process at a time, until it is whole.

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
        path: in the folder of the result, so that it can take its name.
    """

    def __init__(self, folder: Path) -> None:
        self._final = folder
        self.path = folder.parent / f".{folder.name}.merging"
        # A file of its own, since network file systems lock no folders.
        self._lock = folder.parent / f".{folder.name}.merging.lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes this result meanwhile. Raises QueueBusy while another process does, and OSError."""
        self._final.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._lock_file()
        try:
            yield
        finally:
            # Removed while it is held: who has it open already sees that it is no longer the file of this name.
            with suppress(OSError):
                self._lock.unlink()
            os.close(descriptor)

    def _lock_file(self) -> int:
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
            record: what the result says of it.
            parts: the files that are worth keeping.

        Raises UsageError when the folder has another owner.
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


# ---- the merge -------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
_RECORD_VERSION = 2
# By path: size and time of change, None for what is not there.
Inputs = dict[str, tuple[int, int] | None]

# Bytes of the result that are written, of all, and what is written now.
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What a merge has written, or would write.

    Attributes:
        output: the folder.
        plan: its tensors, and their main format.
        files: its weight files; empty where they are not known yet.
        kept_bytes: of the weights, bytes that an earlier, interrupted merge had written.
        was_there: whether the folder held this very result already.
    """

    output: Path
    plan: MergePlan
    files: tuple[str, ...]
    kept_bytes: int = 0
    was_there: bool = False


@dataclass(frozen=True)
class Merge:
    """A merge that has been looked over: both sides' headers are read, and everything fits together."""

    base: Checkpoint
    adapter: Path
    merged: Merged
    plan: MergePlan
    inputs: Inputs
    fingerprint: str

    @property
    def folder(self) -> Path:
        """The base's folder."""
        return _folder(self.base.path)

    def result(self, output: Path, *, kept_bytes: int = 0, was_there: bool = False) -> MergeResult:
        """The facts of it."""
        return MergeResult(output, self.plan, tuple(self.plan.files), kept_bytes, was_there)


def prepare_merge(base: Path, adapter: Path, *, shard_bytes: int | None = None, dtype: str | None = None) -> Merge:
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
    inputs = _inputs(_folder(base), adapter) if base.exists() else {}
    checkpoint = open_checkpoint(base)
    foreign = next((name for name, tensor in checkpoint.stored.items() if not isinstance(tensor, StoredTensor)), None)
    if foreign is not None and not checkpoint.tensors[foreign].dequantized:
        raise BadModel(f"{base} is a GGUF file; give the base as safetensors or PyTorch files")
    stored = {name: tensor for name, tensor in checkpoint.stored.items() if isinstance(tensor, StoredTensor)}
    merged = merge_plan.with_head(merge(checkpoint, adapter), read_json(adapter / ADAPTER_CONFIG), stored)
    files = {name: tensor.file.path.name for name, tensor in checkpoint.stored.items()}
    plan = merge_plan.plan_merge(merged, files, dtype=dtype, shard_bytes=shard_bytes)
    return Merge(checkpoint, adapter, merged, plan, inputs, _fingerprint(checkpoint, inputs, merged, plan))


def _folder(base: Path) -> Path:
    return base if base.is_dir() else base.parent


def prepare_merge_of_headers(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    adapter: Path,
    output: Path,
    *,
    shard_bytes: int | None = None,
    dtype: str | None = None,
) -> MergeResult:
    """What a merge into a base would write of which only config and headers are known. See ``prepare_merge``.

    Without ``shard_bytes`` the number of files is not known: it is the base's.
    """
    if not tensors:
        raise BadModel("the base has no safetensors files, so that its headers can't be looked at; download it first")
    form = quantised_as(config, tensors.values())
    if form is not None:
        raise merge_plan.quantised_base(form)
    nowhere = FileStamp(Path("not-here"), 0, 0, 0)
    stored = {name: StoredTensor(info, nowhere, 0) for name, info in tensors.items()}
    merged = merge(HeadersOnly(config, tensors), adapter)
    merged = merge_plan.with_head(merged, read_json(adapter / ADAPTER_CONFIG), stored)
    plan = merge_plan.plan_merge(merged, {}, dtype=dtype, shard_bytes=shard_bytes)
    return MergeResult(output, plan, tuple(plan.files) if shard_bytes else ())


def _inputs(base: Path, adapter: Path) -> Inputs:
    """Size and time of change of the files next to the base's weights that a result is made of, by their real paths."""
    weights = (adapter / name for name in WEIGHT_FILES)
    files = {base / "config.json", adapter / ADAPTER_CONFIG, *weights, *merge_plan.companions(base, adapter).values()}
    found: Inputs = {}
    for path in sorted(files):
        try:
            status = path.stat()
        except OSError:  # one that is not there may be there later
            found[str(path)] = None
        else:
            found[os.path.realpath(path)] = (status.st_size, status.st_mtime_ns)
    return found


def _fingerprint(base: Checkpoint, inputs: Inputs, merged: Merged, plan: MergePlan) -> str:
    """A digest of all that the result depends on; files by their real paths, sizes and times of change."""
    stamps = {tensor.file for tensor in base.stored.values()}
    content = [
        _RECORD_VERSION,
        sorted((os.path.realpath(stamp.path), stamp.size, stamp.modified_ns) for stamp in stamps),
        inputs,
        merged.config,
        [(file, [(tensor.name, tensor.dtype, tensor.action) for tensor in plan.files[file]]) for file in plan.files],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def need_torch() -> None:
    """Raises MissingExtra when torch, which does the sums, is not installed."""
    with naming_extras({"torch": "load"}, "merging needs"):
        import torch  # noqa: F401 - known to be there before anything is downloaded or written


def check_disk_space(nbytes: int, output: Path) -> None:
    """Raises CannotWrite when the disk of the result has no room for so many bytes."""
    check_space(
        output.parent,
        nbytes,
        f"the merged model {quoted(output.name)}",
        remedy="make room, or choose another --output-dir",
    )


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
    """Writes the merged model into ``output``, which is not there yet or empty. See ``prepare_merge``.

    ``names``: how base and adapter are called in the record, if not by their paths. A merge of the same files that was
    interrupted goes on; one that is done already is left as it is.

    Raises:
        BadModel, MissingModel: see ``prepare_merge``; or a file has changed while it was read.
        UsageError: the output folder holds something else.
        CannotWrite: there is no room on the disk, or the folder can't be written.
        QueueBusy: another process is writing this result.
        MissingExtra: torch is not installed.
    """
    need_torch()
    output = final_folder(output)
    todo = prepare_merge(base, adapter, shard_bytes=shard_bytes, dtype=dtype)
    if already_there(output, todo.fingerprint):
        return todo.result(output, was_there=True)
    staging = Staging(output)
    try:
        with staging.locked():
            if already_there(output, todo.fingerprint):  # another has finished it meanwhile
                return todo.result(output, was_there=True)
            return _write(todo, output, staging, names or (str(base), str(adapter)), on_progress or _unseen)
    except OSError as problem:
        left = (
            f"; what is written stays in {staging.path}, and the same command goes on" if staging.path.exists() else ""
        )
        raise CannotWrite(f"{output} can't be written: {problem.strerror or problem}{left}") from None


def _unseen(_done: int, _all: int, _what: str) -> None:
    """The progress that is not shown."""


def _write(todo: Merge, output: Path, staging: Staging, names: tuple[str, str], on_progress: OnProgress) -> MergeResult:
    """Writes what no earlier try has written. ``names``: of base and adapter, for the record."""
    from gpuherd.models.lora.merge_tensors import TensorWriter

    plan, folder = todo.plan, staging.path
    made = {"dtype": plan.dtype, "gpuherd": __version__, "changed": len(plan.changed)}
    record = {"base_model": names[0], "adapter": names[1], **made}
    there = staging.begin(todo.fingerprint, record, plan.files.keys())
    if there:
        _log.info("%s: going on after %d of %d files", output, len(there), len(plan.files))
    kept = done = sum(tensor.nbytes for file in there for tensor in plan.files[file])
    check_disk_space(plan.nbytes - kept, output)
    try:
        writer = TensorWriter(todo.base, todo.merged)
        for name, tensors in plan.files.items():
            if name in there:
                continue
            by_name = {tensor.name: tensor for tensor in tensors}
            with replacing(folder / name) as file:
                file.write(header(tensors))
                for tensor in in_order(tensors):
                    on_progress(done, plan.nbytes, tensor)
                    writer.append(file, by_name[tensor])
                    done += by_name[tensor].nbytes
            on_progress(done, plan.nbytes, name)
        _write_companions(todo, folder)
        if len(plan.files) > 1:
            atomic_write(folder / INDEX, index(plan.files, plan.params))
        _check_inputs(todo)
    except BadModel:  # no later try could go on from here
        staging.discard()
        raise
    staging.finish()
    return todo.result(output, kept_bytes=kept)


def _write_companions(todo: Merge, folder: Path) -> None:
    base = todo.base
    for name, source in merge_plan.companions(todo.folder, todo.adapter).items():
        (folder / name).parent.mkdir(exist_ok=True)
        _copy(source, folder / name)
    original = todo.folder / "config.json"
    if base.config and original.exists():
        adapter = read_json(todo.adapter / ADAPTER_CONFIG)
        config = merge_plan.merged_config(base.config, adapter, todo.merged, todo.plan)
        if config == dict(base.config):
            _copy(original, folder / "config.json")
        else:
            atomic_write(folder / "config.json", merge_plan.config_text(config))


def _check_inputs(todo: Merge) -> None:
    """Raises BadModel when a file next to the base's weights is not what it was at the beginning."""
    before, now = todo.inputs, _inputs(todo.folder, todo.adapter)
    changed = [path for path in sorted({*before, *now}) if before.get(path) != now.get(path)]
    if changed:
        raise BadModel(f"{changed[0]} was changed while it was being read")


def _copy(source: Path, target: Path) -> None:
    """A file next to the weights. Raises BadModel when it can't be read."""
    with opened(source) as (descriptor, _), replacing(target) as file, open(descriptor, "rb", closefd=False) as content:
        shutil.copyfileobj(content, file)
