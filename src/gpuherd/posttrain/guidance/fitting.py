"""Trains a classifier on lessons, in one process or several, and goes on exactly where it was killed.

The batches of all epochs are fixed before the first (``batches.planned``), so the number of a step says which lessons
come next. After each epoch the classifier is checked on problems that it does not learn from.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines import progress
from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import FILE, Head, read_form
from gpuherd.posttrain.engine.checkpoints import DIGESTS, differing
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Stopped, Watching
from gpuherd.posttrain.guidance import tensors
from gpuherd.posttrain.guidance.batches import planned
from gpuherd.posttrain.guidance.checking import checked
from gpuherd.posttrain.guidance.data import Data, digest
from gpuherd.posttrain.guidance.objective import Objective
from gpuherd.posttrain.guidance.options import ValueOptions
from gpuherd.posttrain.guidance.watching import watching
from gpuherd.posttrain.types import Training

if TYPE_CHECKING:
    from gpuherd.lm.guidance.classifier import Classifier
    from gpuherd.posttrain.engine.checkpoints import Checkpoints
    from gpuherd.posttrain.engine.curves import Curves
    from gpuherd.posttrain.engine.trainee import Trainee

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Course:
    """A training from its first step to its last.

    Attributes:
        batches: of all epochs, places in ``data.lessons``.
        ends: steps with which an epoch ends.
    """

    data: Data
    options: ValueOptions
    work: Training
    batches: tuple[tuple[int, ...], ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, data: Data, options: ValueOptions, work: Training) -> Course:
        """All of it follows from these three."""
        epochs = planned(
            data.lessons,
            rows=options.batch_size,
            most_tokens=options.max_batch_num_tokens,
            epochs=options.epochs,
            seed=work.seed,
        )
        batches = tuple(batch for epoch in epochs for batch in epoch)
        return cls(data, options, work, batches, frozenset(accumulate(map(len, epochs))))

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this training."""
        chosen = self.options
        return {
            "algorithm": "value classifier",
            "value_model": self.work.value_model,
            DIGESTS: dict(self.work.digests),
            "warm_start": chosen.warm_start and self.work.policy.guide is not None,
            "round": self.work.round,
            "seed": self.work.seed,
            "loss": str(self.data.loss),
            "classifier_type": str(chosen.classifier_type),
            "atoms": list(self.data.atoms),
            "lr": chosen.lr,
            "weight_decay": chosen.weight_decay,
            "grad_clip": chosen.grad_clip,
            "scheduler": str(chosen.scheduler),
            "warmup_steps": chosen.warmup_steps,
            "optimizer": _other_optimizer(chosen),
            "batch_size": chosen.batch_size,
            "max_batch_num_tokens": chosen.max_batch_num_tokens,
            "epochs": chosen.epochs,
            "steps": len(self.batches),
            "amp_dtype": self.work.precision.amp_dtype,
            "data": digest((*self.data.lessons, *self.data.held_out)),
        }


def _other_optimizer(chosen: ValueOptions) -> list[Any] | None:
    """None of AdamW with its usual numbers: so say also those that were trained when there was no other."""
    said, usual = chosen.optimiser, OptimiserOptions()
    if (said.optimizer, said.betas, said.eps) == (usual.optimizer, usual.betas, usual.eps):
        return None
    return [str(said.optimizer), list(said.betas), said.eps]


def trained_classifier(folder: Path) -> Path | None:
    """The classifier that a finished training in a folder has left, None where it is not finished."""
    model = folder / "model"
    return model if (model / FILE).exists() else None


def fit(data: Data, work: Training, options: ValueOptions, begin: Callable[[str], Classifier]) -> None:
    """Trains and writes ``work.folder/model``; does nothing where it is there already.

    Args:
        begin: makes or loads the classifier that the training starts from, on a device.

    Raises UsageError where the classifier can't read the lessons or the folder is that of another training, Stopped
    where it was asked to stop, and what Trainee and Checkpoints raise.
    """
    course = Course.of(data, options, work)
    if (done := trained_classifier(work.folder)) is not None:
        _refuse_another(done, course)
        _forget(work.folder)  # a kill between both leaves them
        return
    from gpuherd.posttrain.engine.checkpoints import Checkpoints
    from gpuherd.posttrain.engine.curves import Curves
    from gpuherd.posttrain.engine.trainee import Trainee
    from gpuherd.posttrain.engine.world import World

    with World.from_environment(work.device) as world:
        _seed(work.seed, world.rank)
        classifier = begin(world.device)
        _refuse_unreadable(data, classifier, options)
        trainee = Trainee(
            classifier.module,
            options.optimiser,
            work.steps or StepOptions(),
            world,
            total_steps=len(course.batches),
            amp_dtype=work.precision.amp_dtype,
        )
        watched = watching(work, options.save_every)
        checkpoints = Checkpoints(work.folder / "checkpoints", world, identity=course.identity(), keep=watched.keep)
        if checkpoints.restore(trainee) is not None:
            logger.info("going on behind step %d of %d", trainee.steps_done, len(course.batches))
        with Curves(
            work.folder,
            world,
            watched.report_to,
            step=trainee.steps_done,
            name=watched.run_name,
            project=watched.project,
        ) as curves:
            _train(course, trainee, checkpoints, curves, watched)
        _save(course, classifier, trainee)


def _train(course: Course, trainee: Trainee, checkpoints: Checkpoints, curves: Curves, watched: Watching) -> None:
    options, amp_dtype, last = course.options, course.work.precision.amp_dtype, len(course.batches)
    objective = _objective(course.data, trainee.world.device)
    mine = [list(trainee.world.share(batch)) for batch in course.batches[trainee.steps_done :]]
    for materials in tensors.loaded(course.data.lessons, mine, options.num_workers):
        done = trainee.step(materials, lambda some: objective.total(trainee.module, some), objective.weight)
        step = trainee.steps_done
        told: dict[str, float | None] = {
            "value_loss": done.loss,
            "grad_norm": done.grad_norm,
            "learning_rate": done.learning_rate,
        }
        checks = step in course.ends and bool(course.data.held_out)
        if checks:
            told |= checked(trainee, course.data.held_out, objective, options, amp_dtype)
        if checks or step % watched.log_every == 0 or step == last:
            curves.log(step, told)
        progress.report(step, last, "training the classifier")
        stopping = watched.stopping is not None and trainee.world.any(watched.stopping())
        if step < last and (stopping or step % watched.save_every == 0):
            checkpoints.save(step, trainee, {})
        if step < last and stopping:
            raise Stopped.after(step, last)


def _objective(data: Data, device: str) -> Objective:
    import torch

    atoms = torch.tensor(data.atoms, dtype=torch.float32, device=device) if data.atoms else None
    return Objective(data.loss, atoms, device)


def _save(course: Course, classifier: Classifier, trainee: Trainee) -> None:
    """Writes the classifier: the main process does, when all have given their part of the weights."""
    state = trainee.full_state()
    if trainee.world.is_main:
        told = {**course.identity(), **course.data.told}
        classifier.save(course.work.folder / "model", state=state, loss=str(course.data.loss), trained=told)
        _forget(course.work.folder)
    trainee.world.barrier()


def _forget(folder: Path) -> None:
    """Removes what the training needed to go on."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _refuse_another(done: Path, course: Course) -> None:
    told = read_form(done).trained
    mine = course.identity()
    for name in differing(mine, {name: told[name] for name in mine.keys() & told.keys()}):
        raise UsageError(
            f"{done} is a classifier of another training: its {name} is {told.get(name)!r}, here it is "
            f"{mine.get(name)!r}; choose another output folder, or the old options"
        )


def _refuse_unreadable(data: Data, classifier: Classifier, options: ValueOptions) -> None:
    if classifier.form.kind is not options.classifier_type:
        raise UsageError(
            f"classifier {classifier.name} is of type {classifier.form.kind}, and classifier_type is "
            f"{options.classifier_type}; set warm_start=false, or keep the type"
        )
    if (classifier.form.head is Head.ATOMS) != bool(data.atoms) or classifier.form.atoms != data.atoms:
        raise UsageError(
            f"classifier {classifier.name} predicts {classifier.form.head} {list(classifier.form.atoms)}, and what is "
            f"to be learnt is {list(data.atoms) or 'one probability'}; set warm_start=false, or keep the loss and atoms"
        )
    examples = [each for lesson in (*data.lessons, *data.held_out) for each in lesson]
    longest, largest = max(len(each.ids) for each in examples), max(max(each.ids) for each in examples)
    known = classifier.module.vocabulary
    if largest >= known:
        raise UsageError(
            f"value model {classifier.name} knows token ids below {known}, and there is {largest}; take one of the "
            "reference's family"
        )
    room = classifier.most_positions
    if room is not None and longest > room:
        raise UsageError(
            f"value model {classifier.name} reads {room} tokens, and a prompt with its completion has {longest}; lower "
            "generation.max_new_tokens, or take another value model"
        )


def _seed(seed: int, rank: int) -> None:
    """Of dropout, where the body has any: each process draws its own."""
    import torch

    torch.manual_seed(seed * 1009 + rank)
