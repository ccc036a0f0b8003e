"""From collected data to a guided policy: trains a classifier, in one process or several, and goes on exactly where it
was killed. Shared by the ``train`` and ``policy`` of all guided algorithms.

The batches of all epochs are fixed before the first step (``planned``), so the number of a step says which examples
come next. After each epoch the classifier is validated on problems that it does not learn from.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.engines import progress
from gpuherd.errors import GpuherdError, UsageError
from gpuherd.lm.guidance.guide import FILE, Head, read_form
from gpuherd.posttrain.engine.checkpoints import DIGESTS, differing
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Watching, hooks_of
from gpuherd.posttrain.guidance.checking import validate
from gpuherd.posttrain.guidance.data import Data, Example, digest, of_rollouts
from gpuherd.posttrain.guidance.losses import Objective, batches_of
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.types import Algorithm, Policy, Training

if TYPE_CHECKING:
    from gpuherd.lm.guidance.classifier import Classifier
    from gpuherd.posttrain.engine.recorder import Recorder
    from gpuherd.posttrain.engine.train_engine import TrainEngine

logger = logging.getLogger(__name__)


_WINDOW = 16  # batches whose examples are sorted by length among themselves: less padding, and still mixed


class GuidedAlgorithm(Algorithm):
    """Collects data, fits a classifier on that of all rounds, and guides the reference by it."""

    guided: ClassVar[bool] = True
    off_policy: ClassVar[bool] = True
    Options: ClassVar[type[ValueOptions]]
    options: Any

    def __init__(self, options: Any = None):
        self.options = self.Options() if options is None else options

    def train(self, work: Training) -> Policy:
        """See ``Algorithm.train``; of rollouts."""
        reward_range = None if work.task is None else work.task.reward_range
        return train_guide(of_rollouts(work.rows, self.options, reward_range), work, self.options)

    def policy(self, work: Training) -> Policy:
        """The reference, guided by the classifier."""
        return guided_policy(work, self.options)


def train_guide(data: Data, work: Training, options: ValueOptions) -> Policy:
    """Trains the classifier of a round, and returns the policy that it guides.

    It starts from the value model with a head of 0, or, with ``warm_start``, from the classifier of the round before.
    Raises UsageError where no value model is named or its tokenizer is another than the reference's, where the
    classifier can't read the examples, or where the folder is that of another training; Stopped at the caller's
    request; and what TrainEngine and Checkpoints raise.
    """
    _fit(data, work, options)
    return guided_policy(work, options)


def guided_policy(work: Training, options: ValueOptions) -> Policy:
    """The reference, guided by the classifier that a finished training has left. Raises GpuherdError where none is."""
    model = _trained_classifier(work.folder)
    if model is None:
        raise GpuherdError(f"{work.folder} has no trained classifier; the training there is not finished")
    loss = Loss(read_form(model).loss or "")
    return replace(work.reference, guide=options.guide(str(model), loss))


def refuse_value_model(reference: str, value_model: str | None) -> str:
    """The value model's name. Raises UsageError where there is none, or where it reads other tokens than the reference
    writes: to be checked before anything is collected."""
    from gpuherd.lm.guidance.guide import refuse_other_tokens

    if value_model is None:
        raise UsageError("a guided algorithm takes a value model: name a small one that has the reference's tokenizer")
    refuse_other_tokens(_tokens(reference), _tokens(value_model), value_model)
    return value_model


def _begin(data: Data, work: Training, options: ValueOptions, device: str) -> Classifier:
    from gpuherd.lm.guidance.classifier import load_classifier, new_classifier

    attention = "eager" if work.precision.attention == "eager" else "sdpa"
    # Weights in training are float32 whatever the policy's: steps of 1e-5 would be lost in bfloat16.
    before = work.policy.guide
    if options.warm_start and before is not None:
        return load_classifier(before.classifier, device, "float32", attention)
    value_model = refuse_value_model(work.reference.model, work.value_model)
    head = Head.ATOMS if data.atoms else Head.BERNOULLI
    return new_classifier(
        value_model, options.classifier_type, head, data.atoms, device=device, dtype="float32", attention=attention
    )


def _tokens(model: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.names import parse_model

    folder = locate(parse_model(model), for_loading=True)
    found: dict[str, int] = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    return found


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """A training from its first step to its last.

    Attributes:
        batches: of all epochs, places in ``data.examples``.
        ends: steps with which an epoch ends.
    """

    data: Data
    options: ValueOptions
    work: Training
    batches: tuple[tuple[int, ...], ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, data: Data, options: ValueOptions, work: Training) -> TrainPlan:
        """The plan, which depends on these three alone."""
        epochs = planned(
            data.examples,
            rows=options.batch_size,
            most_tokens=options.max_batch_num_tokens,
            epochs=options.epochs,
            seed=work.seed,
        )
        batches = tuple(batch for epoch in epochs for batch in epoch)
        return cls(data, options, work, batches, frozenset(accumulate(map(len, epochs))))

    def identity(self) -> dict[str, Any]:
        """What a checkpoint, or a finished classifier, must have in common with this training."""
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
            "data": digest((*self.data.examples, *self.data.held_out)),
        }


def _other_optimizer(chosen: ValueOptions) -> list[Any] | None:
    """None of AdamW with its default numbers, as in files of versions that had no other."""
    mine, usual = chosen.optimiser, OptimiserOptions()
    if (mine.optimizer, mine.betas, mine.eps) == (usual.optimizer, usual.betas, usual.eps):
        return None
    return [str(mine.optimizer), list(mine.betas), mine.eps]


def _trained_classifier(folder: Path) -> Path | None:
    """The classifier of a finished training in this folder, None where it is not finished."""
    model = folder / "model"
    return model if (model / FILE).exists() else None


def _fit(data: Data, work: Training, options: ValueOptions) -> None:
    """Trains and writes ``work.folder/model``; does nothing where that exists."""
    plan = TrainPlan.of(data, options, work)
    if (done := _trained_classifier(work.folder)) is not None:
        _refuse_another(done, plan)
        _forget(work.folder)  # a kill between both leaves them
        return
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.engine.recorder import Recorder
    from gpuherd.posttrain.engine.train_engine import TrainEngine

    with DistEnv.from_environment(work.device) as world:
        _seed(work.seed, world.rank)
        classifier = _begin(data, work, options, world.device)
        _refuse_unreadable(data, classifier, options)
        trainee = TrainEngine(
            classifier.module,
            options.optimiser,
            work.steps or StepOptions(),
            world,
            total_steps=len(plan.batches),
            amp_dtype=work.precision.amp_dtype,
        )
        watching = hooks_of(work, Watching(options.save_every))
        recorder = Recorder(work.folder, trainee, watching, identity=plan.identity(), total_steps=len(plan.batches))
        if recorder.restored is not None:
            logger.info("going on behind step %d of %d", trainee.steps_done, len(plan.batches))
        with closing(recorder):
            _train(plan, trainee, recorder)
        _save(plan, classifier, trainee)
        recorder.end(work.folder / "model")


def _train(plan: TrainPlan, trainee: TrainEngine, recorder: Recorder) -> None:
    options, amp_dtype, last = plan.options, plan.work.precision.amp_dtype, len(plan.batches)
    objective = _objective(plan.data, trainee.world.device)
    mine = [list(trainee.world.share(batch)) for batch in plan.batches[trainee.steps_done :]]
    for examples in batches_of(plan.data.examples, mine, options.num_workers):
        done = trainee.step(examples, lambda some: objective.total(trainee.module, some), objective.weight)
        step = trainee.steps_done
        figures: dict[str, float | None] = {
            "value_loss": done.loss,
            "grad_norm": done.grad_norm,
            "learning_rate": done.learning_rate,
        }
        validates = step in plan.ends and bool(plan.data.held_out)
        found = validate(trainee, plan.data.held_out, objective, options, amp_dtype) if validates else {}
        progress.report(step, last, "training the classifier")
        recorder.step(step, figures, evaluated=found)


def _objective(data: Data, device: str) -> Objective:
    import torch

    atoms = torch.tensor(data.atoms, dtype=torch.float32, device=device) if data.atoms else None
    return Objective(data.loss, atoms, device)


def _save(plan: TrainPlan, classifier: Classifier, trainee: TrainEngine) -> None:
    """Writes the classifier: the main process does, when all have given their part of the weights."""
    state = trainee.full_state()
    if trainee.world.is_main:
        record = {**plan.identity(), **plan.data.summary}
        classifier.save(plan.work.folder / "model", state=state, loss=str(plan.data.loss), trained=record)
        _forget(plan.work.folder)
    trainee.world.barrier()


def _forget(folder: Path) -> None:
    """Removes what the training needed to go on."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _refuse_another(done: Path, plan: TrainPlan) -> None:
    record = read_form(done).trained
    mine = plan.identity()
    for name in differing(mine, {name: record[name] for name in mine.keys() & record.keys()}):
        raise UsageError(
            f"{done} is a classifier of another training: its {name} is {record.get(name)!r}, here it is "
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
    sequences = [each for example in (*data.examples, *data.held_out) for each in example]
    longest, largest = max(len(each.ids) for each in sequences), max(max(each.ids) for each in sequences)
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


def planned(
    examples: Sequence[Example], *, rows: int, most_tokens: int, epochs: int, seed: int
) -> list[list[tuple[int, ...]]]:
    """The batches of each epoch, places in ``examples``; each example once an epoch, in an order of the epoch's own.

    Depends on the arguments alone, so that a stopped training goes on with its next batch.

    Args:
        examples: their lengths count.
        rows: the most examples of a batch.
        most_tokens: the most tokens of a batch, padding counted; an example that is longer goes alone.
        epochs: how many.
        seed: of the orders.
    """
    if rows < 1 or most_tokens < 1 or epochs < 1:
        raise UsageError(
            f"batch_size={rows}, max_batch_num_tokens={most_tokens}, epochs={epochs}; each is 1 at the least"
        )
    widths = [max((len(each.ids) for each in example), default=0) for example in examples]
    return [
        _epoch(examples, widths, rows, most_tokens, random.Random(f"{seed} {epoch}"))  # noqa: S311
        for epoch in range(epochs)
    ]


def _epoch(
    examples: Sequence[Example], widths: Sequence[int], rows: int, most_tokens: int, order: random.Random
) -> list[tuple[int, ...]]:
    places = list(range(len(examples)))
    order.shuffle(places)
    batches: list[tuple[int, ...]] = []
    for start in range(0, len(places), rows * _WINDOW):
        window = sorted(places[start : start + rows * _WINDOW], key=lambda place: widths[place])
        batches += _packed(window, examples, widths, rows, most_tokens)
    order.shuffle(batches)
    return batches


def _packed(
    window: Sequence[int], examples: Sequence[Example], widths: Sequence[int], rows: int, most_tokens: int
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    held = 0
    for place in window:  # the last is the widest
        sequences = held + len(examples[place])
        if batch and (len(batch) == rows or widths[place] * sequences > most_tokens):
            batches.append(tuple(batch))
            batch, sequences = [], len(examples[place])
        batch.append(place)
        held = sequences
    return [*batches, tuple(batch)] if batch else batches
