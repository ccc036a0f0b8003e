"""Trains on rows that are there before training begins: SFT, DPO, reward models. From the newest checkpoint to a model.

Which rows stand in which step is fixed by the seed (``order``): the number of a step determines them. Each process
learns from every ``size``-th row of a step; a loss that depends on the whole step (a mean over its tokens) first gets
all rows of that step (``Objective.items``). Imports torch inside functions only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from gpuherd import atomic
from gpuherd.atomic import atomic_folder, settle
from gpuherd.engines import progress
from gpuherd.errors import CannotWrite, UsageError, naming_extras, usage_named
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.engine.checkpoints import differing, seed_all
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Watching
from gpuherd.posttrain.engine.recorder import Recorder
from gpuherd.posttrain.engine.train_engine import Loss, NotFinite, StepFigures, TrainEngine

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

RowT = TypeVar("RowT")
ItemT = TypeVar("ItemT")
MadeT = TypeVar("MadeT")
RowIn = TypeVar("RowIn", contravariant=True)

EXTRAS = dict.fromkeys(("torch", "transformers", "peft", "accelerate"), "posttrain")
RECORD = "training.json"  # in the trained model's folder: what it is of


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """One training.

    Attributes:
        folder: checkpoints go to ``checkpoints/``, the trained model to ``model/``.
        stage: what progress and messages name it by.
        batch_size: rows of an optimiser step, over all processes.
        total_steps: optimiser steps.
        amp_dtype: of autocast; None: none.
        device: ``cpu``, ``cuda`` or ``cuda:0``.
        num_workers: processes that prepare the rows of steps ahead of time.
        watching: how it is logged, kept and stopped.
        identity: all that a checkpoint must agree in to be gone on from, as JSON values.
    """

    folder: Path
    stage: str
    optimiser: OptimiserOptions
    steps: StepOptions
    batch_size: int
    total_steps: int
    amp_dtype: str | None = None
    device: str = "cpu"
    seed: int = 0
    num_workers: int = 0
    watching: Watching = field(default_factory=Watching)
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with usage_named(f"{self.stage}: "):
            at_least(self, batch_size=1, total_steps=1)
            at_least(self.watching, keep=1, log_every=1, save_every=1)


class Objective(Protocol[RowIn, ItemT]):
    """What a training makes small: the mean over the items of a step."""

    def items(self, rows: Sequence[RowIn]) -> Sequence[ItemT]:
        """The rows of a whole step, one item each, with what each needs to know of the others. Pure."""
        ...

    def loss(self, module: Any, items: Sequence[ItemT]) -> Tensor | Loss:
        """The sum over some of these items, in a forward pass of the module."""
        ...


@dataclass(eq=False, slots=True)
class TrainSetup(Generic[RowT, ItemT]):
    """What is trained, once it is in memory.

    Attributes:
        module: transformers' or PEFT's, what is trained requiring gradients.
        tokenizer: saved with the model.
    """

    module: Any
    tokenizer: Any
    objective: Objective[RowT, ItemT]


def steps_for(rows: int, epochs: int, batch_size: int, max_steps: int | None = None) -> int:
    """Optimiser steps in which every row is learnt from ``epochs`` times, no more than ``max_steps``.

    >>> steps_for(10, 3, 8), steps_for(10, 3, 8, 2)
    (4, 2)
    """
    steps = -(-rows * epochs // batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def save_every_for(total_steps: int, wanted: int | None) -> int:
    """Steps between checkpoints: as wanted, else twenty in all, at least 25 steps apart.

    >>> save_every_for(10, None), save_every_for(10_000, None), save_every_for(10, 3)
    (25, 500, 3)
    """
    return wanted or max(25, -(-total_steps // 20))


def order(rows: int, steps: int, batch_size: int, seed: int) -> list[int]:
    """Which row stands at each place of all steps: one shuffle of all rows after the other, each its own.

    Every batch is full (the last one begins another shuffle), and what is learnt from in a step does not depend on the
    number of processes.

    >>> sorted(order(3, 2, 3, 0)[:3])
    [0, 1, 2]
    """
    places: list[int] = []
    for shuffle in range(-(-steps * batch_size // rows)):
        places += sorted(range(rows), key=partial(_lot, seed, shuffle))
    return places[: steps * batch_size]


def _lot(seed: int, shuffle: int, row: int) -> bytes:
    """What a row draws in a shuffle."""
    return hashlib.blake2b(f"{seed} {shuffle} {row}".encode(), digest_size=8).digest()


def digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first 16 hex digits of the SHA-256 of rows as JSON: other data has another one."""
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps(row, sort_keys=True).encode())
    return found.hexdigest()[:16]


def model_folder(folder: Path) -> Path:
    """Where the trained model of a training in ``folder`` is."""
    return folder / "model"


def is_finished(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the training in this folder has ended. Raises UsageError where it was another training."""
    record = model_folder(folder) / RECORD
    if not record.exists():
        return False
    refuse_another(record.parent, json.loads(record.read_text(encoding="utf-8")).get("identity"), identity)
    return True


def refuse_another(path: Path, there: Any, identity: Mapping[str, Any]) -> None:
    """Raises UsageError where what lies at ``path`` is of a training of another identity, which it names."""
    other = there if isinstance(there, Mapping) else {}
    wanted = json.loads(json.dumps(identity))
    for name in differing(wanted, other):
        raise UsageError(
            f"{path} is of another training: its {name} is {_short(other.get(name))}, and here it is "
            f"{_short(wanted.get(name))}; choose another folder, or remove that one"
        )


def fit(
    plan: TrainPlan,
    rows: Sequence[RowT],
    build: Callable[[DistEnv], TrainSetup[RowT, ItemT]],
    extra_files: Mapping[str, str] | None = None,
) -> Path:
    """Trains as planned; nothing is done where that has been done. Returns the folder of the model.

    Args:
        build: loads what is trained, once there is something to do; where FSDP will divide it, this process's rows.
        extra_files: texts of further files in the model's folder, by name.

    Raises:
        UsageError: the folder is that of another training; options that don't go together.
        NotFinite: the loss or a gradient is no finite number; nothing of that step is kept.
        Stopped: it was asked to stop, and has saved a checkpoint.
        MissingExtra, CannotWrite.
    """
    with naming_extras(EXTRAS, "training takes"):
        import transformers  # noqa: F401
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _without_progress_bars(), DistEnv.from_environment(plan.device) as world:
        if world.is_main:
            atomic.settle(model_folder(plan.folder))
        world.barrier()
        if is_finished(plan.folder, plan.identity):
            return model_folder(plan.folder)
        _refuse_earlier_version(plan.folder / "checkpoints")
        seed_all(plan.seed)
        setup = build(world)
        trainee = TrainEngine(
            setup.module,
            plan.optimiser,
            plan.steps,
            world,
            total_steps=plan.total_steps,
            amp_dtype=plan.amp_dtype,
        )
        if world.size > 1:
            seed_all(plan.seed + world.rank)  # each process drops out for itself
        recorder = Recorder(plan.folder, trainee, plan.watching, identity=plan.identity, total_steps=plan.total_steps)
        with closing(recorder):
            _train(plan, rows, setup, trainee, recorder)
        record = {"identity": plan.identity, "steps": plan.total_steps, "batch_size": plan.batch_size}
        files = {**(extra_files or {}), RECORD: json.dumps(record) + "\n"}
        save_model(trainee, model_folder(plan.folder), setup.tokenizer, extra_files=files)
        if world.is_main:
            shutil.rmtree(plan.folder / "checkpoints", ignore_errors=True)
        recorder.end(model_folder(plan.folder))
        world.barrier()
    return model_folder(plan.folder)


def _train(
    plan: TrainPlan, rows: Sequence[RowT], setup: TrainSetup[RowT, ItemT], trainee: TrainEngine, recorder: Recorder
) -> None:
    begun, last = trainee.steps_done, plan.total_steps
    progress.report(begun, last, plan.stage)
    for items in _batches(plan, rows, setup.objective, trainee.world, begun):
        figures = _step(plan, setup.objective, trainee, items)
        if trainee.world.is_main:
            progress.report(trainee.steps_done, last, plan.stage)
        recorder.step(trainee.steps_done, figures)


def _step(
    plan: TrainPlan, objective: Objective[RowT, ItemT], trainee: TrainEngine, items: Sequence[ItemT]
) -> dict[str, float | None]:
    """The figures of one optimiser step. Raises NotFinite, which names the stage."""
    step = trainee.steps_done + 1
    try:
        done: StepFigures = trainee.step(items, partial(objective.loss, trainee.module), len)
    except NotFinite as problem:
        raise NotFinite(
            f"{plan.stage}: {problem}; lower the learning rate, or train in float32; the checkpoint before is whole"
        ) from None
    figures: dict[str, float | None] = {
        "loss": done.loss,
        "grad_norm": done.grad_norm,
        "learning_rate": done.learning_rate,
        **done.means,
    }
    for name, value in figures.items():
        if value is not None and not math.isfinite(value):
            raise NotFinite(
                f"{plan.stage}: the {name} of step {step} is {value}; lower the learning rate, or train in float32; "
                "the checkpoint before is whole"
            )
    return figures


class _Steps(Generic[RowT, ItemT]):
    """The items that a process learns from, by the step."""

    def __init__(
        self,
        plan: TrainPlan,
        rows: Sequence[RowT],
        items: Callable[[Sequence[RowT]], Sequence[ItemT]],
        rank: int,
        size: int,
    ):
        self._places = order(len(rows), plan.total_steps, plan.batch_size, plan.seed)
        self._batch_size, self._rows, self._items, self._rank, self._size = plan.batch_size, rows, items, rank, size

    def of(self, step: int) -> list[ItemT]:
        """Of a step, counted from 0."""
        places = self._places[step * self._batch_size : (step + 1) * self._batch_size]
        return list(self._items([self._rows[place] for place in places]))[self._rank :: self._size]


def _batches(
    plan: TrainPlan, rows: Sequence[RowT], objective: Objective[RowT, ItemT], world: DistEnv, begun: int
) -> Iterator[list[ItemT]]:
    """This process's items of each step from ``begun`` on; with ``num_workers`` so many processes make them."""
    steps = _Steps(plan, rows, objective.items, world.rank, world.size)
    return made_ahead(steps.of, range(begun, plan.total_steps), plan.num_workers)


class _Made(Generic[MadeT]):
    """A function of a number as a map-style dataset for a DataLoader."""

    def __init__(self, make: Callable[[int], MadeT]):
        self._make = make

    def __getitem__(self, number: int) -> MadeT:
        return self._make(number)


def made_ahead(make: Callable[[int], MadeT], numbers: Sequence[int], workers: int) -> Iterator[MadeT]:
    """The results of a function for these numbers, in their order; with ``workers`` so many processes compute them
    ahead of time."""
    if not workers:
        yield from map(make, numbers)
        return
    import torch
    from torch.utils.data import DataLoader

    dataset: Any = _Made(make)
    # A generator of its own: a DataLoader takes a seed from torch's otherwise, and a resumed training would differ.
    generator = torch.Generator()
    yield from DataLoader(
        dataset, batch_size=None, sampler=numbers, num_workers=workers, collate_fn=_unchanged, generator=generator
    )


def _unchanged(value: MadeT) -> MadeT:
    return value


def _refuse_earlier_version(checkpoints: Path) -> None:
    """Raises UsageError for checkpoints of transformers' Trainer, which earlier versions trained by."""
    if next(checkpoints.glob("checkpoint-*"), None) is not None:
        raise UsageError(f"{checkpoints}: begun by an earlier version; remove {checkpoints} and start again")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Without transformers' bars of files that are loaded."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"


def save_model(
    trainee: TrainEngine,
    folder: Path,
    tokenizer: Any = None,
    *,
    part: str = "",
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Writes the trainee's model; all processes call it together, the main one writes. Raises CannotWrite in all.

    Args:
        folder: takes the place of what lies there when all is written and synced. Of a PEFT model it is an adapter.
        tokenizer: is saved in the same folder.
        part: the submodule that is the transformers model, by its name in the trainee's module (``policy`` of a module
            that has a value head too); the module itself by default.
        extra_files: texts of further files in the folder, by name.
    """
    start = f"{part}." if part else ""
    model = trainee.plain.get_submodule(part) if part else trainee.plain
    wanted = _saved_of_adapted(model, start) if hasattr(model, "peft_type") else (lambda name: name.startswith(start))
    problem: str | None = None
    try:
        weights = trainee.full_state(wanted, spill=folder.parent)
        if trainee.world.is_main:
            settle(folder)
            with atomic_folder(folder) as aside:
                own = {name.removeprefix(start): tensor for name, tensor in weights.items()}
                model.save_pretrained(aside, state_dict=own)
                if tokenizer is not None:
                    tokenizer.save_pretrained(aside)
                for name, text in (extra_files or {}).items():
                    (aside / name).write_text(text, encoding="utf-8")
    except OSError as trouble:
        problem = f"can't write the model in {folder}: {trouble.strerror or trouble}"
    for each in trainee.world.gather(problem):
        if each is not None:
            raise CannotWrite(each)


def _saved_of_adapted(model: Any, start: str) -> Callable[[str], bool]:
    """Which weights are needed to save a PEFT model whose names begin with ``start``: the trained ones, and embeddings,
    which PEFT may save too; not those that the adapter is put on."""
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    trained = {f"{start}{name}" for name, weight in model.named_parameters() if weight.requires_grad}
    further = (*EMBEDDING_LAYER_NAMES, "modules_to_save")
    return lambda name: name in trained or (name.startswith(start) and any(each in name for each in further))
