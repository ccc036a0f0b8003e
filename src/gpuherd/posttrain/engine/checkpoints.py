"""Checkpoints of a training: complete or absent, of which another start goes on exactly.

A checkpoint is a folder ``step-00000120``, written by torch.distributed.checkpoint: each process's tensors as
safetensors (one file where all processes hold the same), each process's random state, and ``checkpoint.json``, written
last. It is written aside and renamed when all of it is synced. No process holds more than its own part, and another
number of processes, or another strategy, can go on: each reads the rows that are its own then.

No pickle: a checkpoint of a stranger can't run code. (torch's own storage would keep its index as a pickle; its storage
for safetensors keeps offsets in their headers.)
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import atomic
from gpuherd.errors import CannotWrite, GpuherdError, UsageError, printable
from gpuherd.posttrain.engine import state
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.train_engine import TrainEngine

if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

FORMAT = 2
_FORMER = 1  # safetensors with a file of row offsets for each: still read
DIGESTS = "models_sha256"  # in an identity: of the files of the models that a training begins with
FILE_BYTES = 1 << 30  # of a file of tensors; while it is written, a process holds it twice
_NAME = re.compile(r"step-(\d{8,})")


class DamagedCheckpoint(GpuherdError):
    """A checkpoint is there whose files are not what they were when it was written."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a training goes on from.

    Attributes:
        step: optimiser steps that were done.
        extra: as it was given to ``save``.
        folder: the checkpoint.
    """

    step: int
    extra: dict[str, Any]
    folder: Path


class Checkpoints:
    """The checkpoints of one training.

    Args:
        folder: theirs; made with the first one.
        identity: what a training must have in common with the one that a checkpoint is of (model, algorithm, options
            that change results): plain values for JSON.
        keep: so many newest ones stay.
    """

    def __init__(self, folder: Path, world: DistEnv, *, identity: Mapping[str, Any] | None = None, keep: int = 2):
        if keep < 1:
            raise UsageError(f"keep={keep}; the least is 1 checkpoint")
        self.folder, self.world, self.keep = folder, world, keep
        self.identity: dict[str, Any] = json.loads(json.dumps({} if identity is None else dict(identity)))

    def save(self, step: int, trainee: TrainEngine, extra: Mapping[str, Any]) -> Path:
        """Writes one, all processes together. Returns its folder. Raises CannotWrite in all of them if one can't.

        Args:
            extra: of the main process, for JSON: where in its data the training is, and so on.
        """
        target = self.folder / f"step-{step:08d}"
        temporary = atomic.aside(target)
        self._together(lambda: self._begin(temporary), only_main=True)
        self._together(lambda: self._write_random(temporary))
        self._together(lambda: self._write_tensors(temporary, trainee))
        about = {
            "format": FORMAT,
            "step": step,
            "world_size": self.world.size,
            "identity": self.identity,
            "counters": trainee.counters(),
            "numbers": state.state_numbers(trainee),
            "extra": dict(extra),
        }
        self._together(lambda: self._complete(target, temporary, about), only_main=True)
        return target

    def latest(self) -> Restored | None:
        """The newest complete one, looked at but not loaded. Raises UsageError for that of another training,
        DamagedCheckpoint."""
        for path in reversed(self._complete_ones()):
            about = _about(path)
            self._refuse_another(path, about)
            return Restored(int(about["step"]), dict(about["extra"]), path)
        return None

    def load(self, restored: Restored, trainee: TrainEngine) -> None:
        """Puts weights, optimiser, counters and random states back; each process reads its own part.

        In as many processes as wrote it each gets its random state back. In another number each is seeded by the
        checkpoint's first state and its rank: the same at each start, and different in each process.

        Raises UsageError where the trainee's weights are not the checkpoint's, DamagedCheckpoint.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        about = _about(restored.folder)
        try:
            reader = _reader(restored.folder, about["format"])
            tensors: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
            kept = {name: (tuple(each.size), each.properties.dtype) for name, each in tensors.items()}
            _refuse_other_weights(restored.folder, trainee, {name: shape for name, (shape, _) in kept.items()})
            tensors_here = state.empty_state(trainee, kept)
            with _quietly():
                load(tensors_here, storage_reader=reader, no_dist=self.world.size == 1)
            state.set_optimizer_state(trainee, tensors_here, _numbers(restored.folder, about))
            trainee.set_counters(about["counters"])
            self._restore_random(restored.folder, int(about["world_size"]))
        except CheckpointException as problem:
            raise _unreadable(restored.folder, _cause(problem)) from None
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as problem:
            raise _unreadable(restored.folder, problem) from None

    def restore(self, trainee: TrainEngine) -> Restored | None:
        """``latest`` and ``load`` in one; None where there is nothing to go on from."""
        # The main process looks, so that all go on from the same one.
        found = self.world.broadcast(self._looked() if self.world.is_main else None)
        if isinstance(found, GpuherdError):
            raise found
        if found is not None:
            self.load(found, trainee)
        return found

    # --- writing ------------------------------------------------------------------------------------------------------

    def _looked(self) -> Restored | GpuherdError | None:
        try:
            # A kill while a checkpoint took the place of that of the same step.
            for old in self.folder.glob(".step-*.old") if self.folder.is_dir() else ():
                atomic.settle(old.with_name(old.name[1 : -len(".old")]))
            return self.latest()
        except GpuherdError as problem:
            return problem

    def _begin(self, temporary: Path) -> None:
        for stray in self.folder.glob(".step-*") if self.folder.is_dir() else ():
            shutil.rmtree(stray)
        temporary.mkdir(parents=True)

    def _write_random(self, temporary: Path) -> None:
        random = capture_random(self.world.device)
        (temporary / _random_file(self.world.rank)).write_text(json.dumps(random), encoding="utf-8")

    def _write_tensors(self, temporary: Path, trainee: TrainEngine) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        # What all processes hold whole, the main one writes.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        tensors = state.unshared(state.state_of(trainee))
        files = state.file_numbers(tensors, FILE_BYTES)
        writer = HuggingFaceStorageWriter(str(temporary), fqn_to_index_mapping=files, save_distributed=True)
        try:
            with _quietly():
                save(tensors, storage_writer=writer, planner=planner, no_dist=self.world.size == 1)
        except CheckpointException as problem:
            raise _cause(problem) from None

    def _complete(self, target: Path, temporary: Path, about: Mapping[str, Any]) -> None:
        files = {path.name: path.stat().st_size for path in temporary.iterdir()}
        text = json.dumps({**about, "files": files}, allow_nan=False)
        (temporary / "checkpoint.json").write_text(text, encoding="utf-8")
        atomic.publish(target)
        for old in self._complete_ones()[: -self.keep]:
            shutil.rmtree(old)

    def _together(self, work: Callable[[], object], *, only_main: bool = False) -> None:
        """Does it in all processes (or the main one) and waits for all. Raises CannotWrite in all if one can't."""
        problem: str | None = None
        if self.world.is_main or not only_main:
            try:
                work()
            except OSError as trouble:
                problem = f"can't write the checkpoint in {self.folder}: {trouble.strerror or trouble}"
            except ValueError as trouble:  # of json: a value that is none
                problem = f"the checkpoint's extra values can't be written as JSON: {trouble}"
        for each in self.world.gather(problem):
            if each is not None:
                raise CannotWrite(each)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _restore_random(self, folder: Path, written_by: int) -> None:
        if written_by == self.world.size:
            own = folder / _random_file(self.world.rank)
            restore_random(json.loads(own.read_text(encoding="utf-8")), self.world.device)
            return
        first = (folder / _random_file(0)).read_bytes()
        drawn = hashlib.blake2b(first + f" {self.world.rank}".encode(), digest_size=8).digest()
        seed_all(int.from_bytes(drawn, "big") >> 1)

    def _complete_ones(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [
            (int(match[1]), path)
            for path in (self.folder.iterdir() if self.folder.is_dir() else ())
            if (match := _NAME.fullmatch(path.name)) and (path / "checkpoint.json").exists()
        ]
        return [path for _, path in sorted(found)]

    def _refuse_another(self, path: Path, about: Mapping[str, Any]) -> None:
        kept = about["identity"]
        for key in differing(self.identity, kept):
            raise UsageError(
                f"{path} is a checkpoint of another training: its {printable(key)} is {kept.get(key)!r}, here it "
                f"is {self.identity.get(key)!r}; choose another output folder, or the old options"
            )


def differing(identity: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """The names in which two identities of trainings differ. Digests of models are compared where both have them:
    earlier versions recorded none. An option that is None is as one that an earlier version did not have."""
    known = bool(identity.get(DIGESTS) and kept.get(DIGESTS))
    return [
        name
        for name in sorted({*identity, *kept})
        if _given(identity.get(name)) != _given(kept.get(name)) and (known or name != DIGESTS)
    ]


def _given(value: Any) -> Any:
    """Without the entries of mappings that are None."""
    if not isinstance(value, Mapping):
        return value
    return {name: _given(each) for name, each in value.items() if each is not None}


def _reader(folder: Path, version: int) -> HuggingFaceStorageReader:
    """What reads a checkpoint's tensors, of this format or of the former one."""
    import torch
    from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    if version == FORMAT:
        return HuggingFaceStorageReader(str(folder))

    class Former(HuggingFaceStorageReader):
        """Reads format 1, in which the rows of the tensors of ``part-N.safetensors`` stand in ``part-N.json``."""

        def read_metadata(self) -> Metadata:
            from safetensors import safe_open
            from safetensors.torch import _getdtype

            tensors: dict[str, Any] = {}
            storage: dict[MetadataIndex, _HFStorageInfo] = {}
            for path in sorted(folder.glob("part-*.json")):
                file = str(path.with_suffix(".safetensors"))
                with safe_open(file, framework="pt") as opened:
                    for name, (shape, start, stop) in json.loads(path.read_text(encoding="utf-8"))["places"].items():
                        offset = torch.Size([start or 0, *[0] * (len(shape) - 1)][: len(shape)])
                        index = MetadataIndex(name, offset)
                        if index in storage or (start is not None and start == stop):
                            continue
                        size = torch.Size(opened.get_slice(name).get_shape())
                        dtype = _getdtype(opened.get_slice(name).get_dtype())
                        about = tensors.setdefault(
                            name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
                        )
                        about.chunks.append(ChunkStorageMetadata(offset, size))
                        storage[index] = _HFStorageInfo(file, size, dtype)
            return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))

    return Former(str(folder))


def _numbers(folder: Path, about: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of ``state.state_numbers``."""
    if about["format"] == FORMAT:
        return dict(about["numbers"])
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("part-*.json"))]
    return {name: plain for part in parts for name, plain in part["numbers"].items()}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that there is one process alone, and its records of what fails, which is raised too."""
    said = logging.getLogger("c10d-NullHandler-dcp_logger")
    before = said.level
    said.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    finally:
        said.setLevel(before)


def _cause(problem: BaseException) -> Exception:
    """What went wrong in the first process in which something did, of torch's CheckpointException, which is none of
    Exception's kind. Raises it where it is no error of files or values."""
    failures: Mapping[int, tuple[BaseException, object]] = getattr(problem, "failures", {})
    for cause, _ in failures.values():
        if isinstance(cause, Exception):
            return cause
    raise problem


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


def _about(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises DamagedCheckpoint where its files are not those that it names."""
    try:
        about: dict[str, Any] = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        if about["format"] not in (FORMAT, _FORMER):
            raise UsageError(f"{path} is of format {about['format']}; this gpuherd reads format {FORMAT}")
        for name, size in about["files"].items():
            if (path / Path(name).name).stat().st_size != size:
                raise DamagedCheckpoint(f"{path / name} is not as long as it was; remove {path} to go on without it")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise _unreadable(path, problem) from None
    return about


def _unreadable(path: Path, problem: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} can't be read ({printable(str(problem))}); remove it to go on without it")


def _refuse_other_weights(path: Path, trainee: TrainEngine, kept: Mapping[str, tuple[int, ...]]) -> None:
    here = {f"weights/{name}": tuple(weight.shape) for name, weight in trainee.weights.items()}
    there = {name: shape for name, shape in kept.items() if name.startswith("weights/")}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise UsageError(
                f"{path} is a checkpoint of another model: {printable(name.partition('/')[2])} is "
                f"{_shape(there.get(name))} there and {_shape(here.get(name))} here; choose another output folder"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(str(each) for each in shape) or "a number"


def seed_all(seed: int) -> None:
    """Seeds all of them. Draws that results depend on have keys of their own; dropout has not."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_random(device: str) -> dict[str, Any]:
    """Their states, for JSON. ``device``: the GPU whose generator is kept too."""
    import random

    import numpy
    import torch

    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(each) for each in keys], int(place), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if device.startswith("cuda"):
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def restore_random(states: dict[str, Any], device: str) -> None:
    """Puts them back; CUDA's where both then and now a GPU is used."""
    import random

    import numpy
    import torch

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and device.startswith("cuda"):
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


def _text(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
