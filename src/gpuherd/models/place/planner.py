"""Whether a model fits, where, and what else would fit if it doesn't. Pure, no torch, a few milliseconds.

``placement`` decides; here are the alternatives to a refusal, and plans for common GPUs. ``training`` is the same for
trainings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import (
    MOST_COMMON_GPUS,
    UNPACKED,
    GpuKind,
    GpuSpec,
    common_kinds,
    gpus_of_kind,
    gpus_option,
)
from gpuherd.models.place.placement import AnswerTask, place
from gpuherd.models.place.request import ParallelOption
from gpuherd.models.place.result import Alternative, AnswerRefusal, MemoryPlan
from gpuherd.models.place.split import largest


def make_plan(
    architecture: Architecture,
    gpus: Sequence[GpuSpec],
    precision: Precision,
    workload: Workload,
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    parallel: ParallelOption = "auto",
    count: int | None = None,
    advise: bool = True,
) -> MemoryPlan | AnswerRefusal:
    """Where the model goes on these GPUs, or why it doesn't fit and what would.

    The split is the contiguous one that leaves the fullest GPU as empty as can be; ``largest_batch`` is exact. Of
    several sets of GPUs the roomiest is taken, or neighbours in the order given where these are about as roomy.

    Args:
        gpus: those that may be used, linked neighbours side by side (``gpus_now``).
        parallel: ``auto``: fewest GPUs that hold it, replicas over the rest; ``replica``: one GPU each; ``layers``: one
            after the other over all (or ``count``); ``tensor``: each layer over all (or ``count``) that divide its
            heads.
        count: exactly so many GPUs a replica.
        advise: look for alternatives when it doesn't fit, each of which is planned itself.

    Raises:
        UsageError: no GPUs, or a ``count`` that there are not.
    """
    task = AnswerTask(architecture, precision, workload, reserve)
    result = place(task, gpus, parallel, count)
    if isinstance(result, AnswerRefusal) and advise:
        return replace(result, alternatives=_Alternatives(task, gpus, parallel, count).all())
    return result


# ---- what would fit when a model doesn't: smaller answers, another layout, other weights, other GPUs -----------------
#
# Nothing is suggested that was not planned and found to fit. The smallest change comes first: what leaves the answers
# as they are (their number at once, the layout), then their length, then the weights' precision, then more or other
# GPUs.

# What to try in place of each, the smallest change first: fp16 takes what bf16 takes, but more GPUs can compute in it.
_QUANTISED = (Precision.INT8, Precision.NF4, Precision.NF4_DQ)
_IN_PLACE_OF: dict[Precision, tuple[Precision, ...]] = {
    Precision.FP32: (Precision.BF16, Precision.FP16, *_QUANTISED),
    Precision.BF16: (Precision.FP16, *_QUANTISED),
    Precision.FP16: _QUANTISED,
    Precision.INT8: _QUANTISED[1:],
    Precision.NF4: _QUANTISED[2:],
}
_MOST_PRECISIONS = 2
_MOST_GPUS = 16
_IN_A_MACHINE = 8
_SHORTEST_PROMPT = 16


class _Alternatives:
    """Changes to one task that doesn't fit on these GPUs with these options."""

    def __init__(self, task: AnswerTask, gpus: Sequence[GpuSpec], parallel: ParallelOption, count: int | None) -> None:
        self.task, self.workload, self.gpus = task, task.workload, gpus
        self.parallel, self.count = parallel, count

    def all(self) -> tuple[Alternative, ...]:
        """Single changes; where none is enough, several at once."""
        single = (
            self._layout(),
            self._fewer_answers(),
            self._shorter_prompts(),
            self._precisions(),
            self._more_gpus(),
            self._larger_gpus(),
        )
        return tuple(each for found in single for each in found) or tuple(self._together())

    def _plan(
        self,
        gpus: Sequence[GpuSpec] | None = None,
        *,
        precision: Precision | None = None,
        workload: Workload | None = None,
    ) -> MemoryPlan | None:
        """The plan with the same options after a change, None where it doesn't fit."""
        task = self.task.changed(precision=precision, workload=workload) if precision or workload else self.task
        result = place(task, self.gpus if gpus is None else gpus, self.parallel, self.count)
        return result if isinstance(result, MemoryPlan) else None

    def _layout(self) -> Iterator[Alternative]:
        """Another number of GPUs, or one after the other in place of the requested layout."""
        if self.parallel == "auto" and self.count is None:
            return
        plan = place(self.task, self.gpus)
        if isinstance(plan, MemoryPlan):
            how = "it fits on one GPU" if plan.gpus == 1 else f"layer after layer over {plan.gpus} GPUs it fits"
            yield Alternative(("--parallel", "auto"), how)

    def _fewer_answers(self) -> Iterator[Alternative]:
        """The largest batch that fits."""

        def fits(batch: int) -> bool:
            return self._plan(workload=replace(self.workload, batch=batch)) is not None

        batch = largest(fits, 0, self.workload.batch - 1)
        if batch:
            sentence = f"{batch} sequences at once in place of {self.workload.batch} fit"
            yield Alternative(("--batch", str(batch)), sentence)

    def _shorter_prompts(self) -> Iterator[Alternative]:
        """The longest prompt that fits with one sequence at a time, where not even one of the requested length does."""

        def fits(tokens: int) -> bool:
            return self._plan(workload=replace(self.workload, batch=1, prompt_tokens=tokens)) is not None

        asked = self.workload.prompt_tokens
        if asked <= _SHORTEST_PROMPT or fits(asked) or not fits(_SHORTEST_PROMPT):
            return
        tokens = largest(fits, _SHORTEST_PROMPT, asked - 1)
        words = ("--batch", "1", "--prompt-tokens", str(tokens))
        yield Alternative(words, f"one sequence at a time fits, with prompts of at most {tokens} tokens")

    def _precisions(self) -> Iterator[Alternative]:
        """The next precisions in which it fits, two at most."""
        others = _IN_PLACE_OF.get(self.task.precision, ())
        if self.task.precision is Precision.AS_STORED and self.task.architecture.stored_method in UNPACKED:
            others = (Precision.BF16,)
        plans = ((each, self._plan(precision=each)) for each in others)
        fitting = ((precision, plan) for precision, plan in plans if plan is not None)
        for precision, plan in islice(fitting, _MOST_PRECISIONS):
            on = f"{_count(plan.gpus)}, with at most {plan.largest_batch} sequences at once"
            yield Alternative(("--dtype", str(precision)), f"in {precision} it fits on {on}")

    def _more_gpus(self) -> Iterator[Alternative]:
        """The fewest GPUs of this kind that hold it: those that there are and more of the largest."""
        if self.parallel == "replica" or self.count is not None:
            return
        roomiest = max(self.gpus, key=lambda gpu: gpu.total)
        # Others use a part of it now: one more of its kind would be free.
        another = replace(roomiest, free=roomiest.total, uuid=None)
        for number in range(len(self.gpus) + 1, _MOST_GPUS + 1):
            more = (*self.gpus, *[replace(another, label=str(at)) for at in range(len(self.gpus), number)])
            if self._plan(more) is not None:
                yield Alternative(("--gpus", gpus_option(more)), f"{_count(number)} of this kind can hold it")
                return

    def _larger_gpus(self) -> Iterator[Alternative]:
        """The smallest common kind of which no more than there are now hold it, and the fewest of those."""
        most = max(gpu.total for gpu in self.gpus)
        for kind in common_kinds():
            if kind.memory <= most:
                continue
            many = gpus_of_kind(kind, len(self.gpus))
            plan = self._plan(many)
            if plan is not None:
                sentence = f"{_count(plan.gpus)} of kind {kind.name} can hold it"
                yield Alternative(("--gpus", gpus_option(many[: plan.gpus])), sentence)
                return

    def _together(self) -> Iterator[Alternative]:
        """Several changes at once, where none alone is enough: one sequence at a time, on common GPUs, as few as a
        machine has if possible, in this precision or else in the next."""
        for precision in (self.task.precision, *_IN_PLACE_OF.get(self.task.precision, ())):
            task = self.task.changed(precision=precision, workload=replace(self.workload, batch=1))
            found = ((kind, place(task, gpus_of_kind(kind, _MOST_GPUS))) for kind in common_kinds())
            plans = [(kind, plan.gpus) for kind, plan in found if isinstance(plan, MemoryPlan)]
            if not plans:
                continue
            kind, number = next((each for each in plans if each[1] <= _IN_A_MACHINE), plans[0])
            changed = precision is not self.task.precision
            words = ["--batch", "1", *(["--dtype", str(precision)] if changed else [])]
            words += ["--gpus", gpus_option(gpus_of_kind(kind, number))]
            words += ["--parallel", "auto"] if self.parallel != "auto" or self.count is not None else []
            how = f"one sequence at a time{f' in {precision}' if changed else ''}"
            yield Alternative(tuple(words), f"{how} fits on {_count(number)} of kind {kind.name}")
            return


def _count(number: int) -> str:
    return "one GPU" if number == 1 else f"{number} GPUs"


# ---- common kinds of GPUs, for users who have none yet ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommonGpuPlans:
    """A kind of GPU, and the plan on the fewest of them in each precision; None where even 16 are too few."""

    kind: GpuKind
    plans: dict[Precision, MemoryPlan | None]


def precisions_to_compare(precision: Precision) -> tuple[Precision, ...]:
    """This one, and smaller ones that the model could be loaded in instead."""
    if precision.is_quantised or precision is Precision.AS_STORED:
        return (precision,)
    return (precision, Precision.INT8, Precision.NF4)


def plan_on_common_gpus(
    architecture: Architecture,
    precisions: Sequence[Precision],
    workload: Workload,
    reserve: Reserve,
    *,
    parallel: ParallelOption = "auto",
    count: int | None = None,
) -> list[CommonGpuPlans]:
    """The model on each common kind, in each of these precisions."""
    tasks = {precision: AnswerTask(architecture, precision, workload, reserve) for precision in precisions}
    rows = []
    for kind in common_kinds():
        gpus = gpus_of_kind(kind, MOST_COMMON_GPUS)
        results = {precision: place(task, gpus, parallel, count) for precision, task in tasks.items()}
        plans = {each: result if isinstance(result, MemoryPlan) else None for each, result in results.items()}
        rows.append(CommonGpuPlans(kind, plans))
    return rows
