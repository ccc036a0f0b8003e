"""Checkpoints of a training: complete or absent, of which another start goes on exactly.

A checkpoint is a folder ``step-00000120``: each process's tensors as safetensors (one file where all processes hold the
same), each process's random state, and ``checkpoint.json``, written last. It is written aside and renamed when all of
it is synced. Tensors know their rows, so that another number of processes, or another strategy, can go on with it.
No pickle: a checkpoint of a stranger can't run code.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import atomic
from gpuherd.errors import CannotWrite, GpuherdError, UsageError, printable
from gpuherd.posttrain.engine import strategies
from gpuherd.posttrain.engine.strategies import Place
from gpuherd.posttrain.engine.trainee import Trainee
from gpuherd.posttrain.engine.world import World

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
DIGESTS = "models_sha256"  # in an identity: of the files of the models that a training begins with
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

    def __init__(self, folder: Path, world: World, *, identity: Mapping[str, Any] | None = None, keep: int = 2):
        if keep < 1:
            raise UsageError(f"keep={keep}; the least is 1 checkpoint")
        self.folder, self.world, self.keep = folder, world, keep
        self.identity: dict[str, Any] = json.loads(json.dumps({} if identity is None else dict(identity)))

    def save(self, step: int, trainee: Trainee, extra: Mapping[str, Any]) -> Path:
        """Writes one, all processes together. Returns its folder. Raises CannotWrite in all of them if one can't.

        Args:
            extra: of the main process, for JSON: where in its data the training is, and so on.
        """
        target = self.folder / f"step-{step:08d}"
        temporary = atomic.aside(target)
        self._together(lambda: self._begin(temporary), only_main=True)
        self._together(lambda: self._write_part(temporary, trainee))
        parts = self.world.gather({name: (temporary / name).stat().st_size for name in self._parts_of(trainee)})
        about = {
            "format": FORMAT,
            "step": step,
            "world_size": self.world.size,
            "identity": self.identity,
            "counters": trainee.counters(),
            "extra": dict(extra),
            "files": {name: size for part in parts for name, size in part.items()},
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

    def load(self, restored: Restored, trainee: Trainee) -> None:
        """Puts weights, optimiser, counters and random states back. Raises UsageError where the trainee's weights are
        not the checkpoint's, DamagedCheckpoint."""
        from safetensors import SafetensorError

        about = _about(restored.folder)
        try:
            parts = _Parts(restored.folder)
            _refuse_other_weights(restored.folder, trainee, parts.shapes)
            numbers = {name: plain for each in parts.numbers for name, plain in each.items()}
            strategies.load_state(trainee, iter(parts.shapes.items()), parts.read, numbers)
            trainee.set_counters(about["counters"])
            own = restored.folder / f"random-{self.world.rank:05d}.json"
            # Processes that were not there then keep the state that they were seeded with.
            if own.exists():
                restore_random(json.loads(own.read_text(encoding="utf-8")), self.world.device)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as problem:
            raise _unreadable(restored.folder, problem) from None

    def restore(self, trainee: Trainee) -> Restored | None:
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

    def _parts_of(self, trainee: Trainee) -> list[str]:
        """The files of this process."""
        random = f"random-{self.world.rank:05d}.json"
        if not (trainee.steps.shards or self.world.is_main):
            return [random]
        return [random, f"part-{self.world.rank:05d}.safetensors", f"part-{self.world.rank:05d}.json"]

    def _write_part(self, temporary: Path, trainee: Trainee) -> None:
        from safetensors.torch import save_file

        random, *part = self._parts_of(trainee)
        state = capture_random(self.world.device)
        (temporary / random).write_text(json.dumps(state), encoding="utf-8")
        if not part:
            return
        held: dict[str, Tensor] = {}
        places: dict[str, Any] = {}
        for name, place, tensor in strategies.state_tensors(trainee):
            held[name] = tensor
            places[name] = [list(place.shape), place.start, place.stop]
        save_file(held, temporary / part[0])
        text = json.dumps({"places": places, "numbers": strategies.state_numbers(trainee)})
        (temporary / part[1]).write_text(text, encoding="utf-8")

    def _complete(self, target: Path, temporary: Path, about: Mapping[str, Any]) -> None:
        (temporary / "checkpoint.json").write_text(json.dumps(about, allow_nan=False), encoding="utf-8")
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
    earlier versions recorded none."""
    known = bool(identity.get(DIGESTS) and kept.get(DIGESTS))
    return [
        name
        for name in sorted({*identity, *kept})
        if identity.get(name) != kept.get(name) and (known or name != DIGESTS)
    ]


class _Parts:
    """The files of tensors of a checkpoint, read piece by piece.

    Attributes:
        shapes: of every tensor, whole.
        numbers: of ``strategies.state_numbers``, a file each.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.numbers: list[dict[str, dict[str, float]]] = []
        self._where: dict[str, list[tuple[Path, Place]]] = {}
        for path in sorted(folder.glob("part-*.json")):
            told = json.loads(path.read_text(encoding="utf-8"))
            self.numbers.append(told["numbers"])
            for name, (shape, start, stop) in told["places"].items():
                self.shapes[name] = tuple(shape)
                place = Place(tuple(shape), start, stop)
                self._where.setdefault(name, []).append((path.with_suffix(".safetensors"), place))

    def read(self, name: str, wanted: Place) -> Tensor:
        """The rows of a tensor that the place asks for, from as many files as hold some."""
        import torch
        from safetensors import safe_open

        pieces = []
        for path, held in self._where[name]:
            with safe_open(path, framework="pt") as file:
                if held.start is None or held.stop is None or wanted.start is None or wanted.stop is None:
                    return file.get_tensor(name)  # type: ignore[no-any-return]
                begin, end = max(held.start, wanted.start), min(held.stop, wanted.stop)
                if begin < end:
                    pieces.append(file.get_slice(name)[begin - held.start : end - held.start])
                elif not pieces and path == self._where[name][-1][0]:
                    pieces.append(file.get_slice(name)[0:0])  # a process may have no rows of it
        return torch.cat(pieces)


def _about(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises DamagedCheckpoint where its files are not those that it names."""
    try:
        about: dict[str, Any] = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise UsageError(f"{path} is of format {about['format']}; this gpuherd reads format {FORMAT}")
        for name, size in about["files"].items():
            if (path / Path(name).name).stat().st_size != size:
                raise DamagedCheckpoint(f"{path / name} is not as long as it was; remove {path} to go on without it")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise _unreadable(path, problem) from None
    return about


def _unreadable(path: Path, problem: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} can't be read ({printable(str(problem))}); remove it to go on without it")


def _refuse_other_weights(path: Path, trainee: Trainee, kept: Mapping[str, tuple[int, ...]]) -> None:
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
