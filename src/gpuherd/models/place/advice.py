"""What would fit when a model doesn't: smaller answers, another way to lay it out, other weights, other GPUs. Pure.

Nothing is suggested that was not planned and found to fit. The smallest change comes first: what leaves the answers as
they are (their number at once, the layout), then their length, then the weights' precision, then more or other GPUs.
``training`` has the same for trainings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gpuherd.models.place.gpus import UNPACKED, GpuSpec, common_kinds, gpus_of_kind, gpus_option
from gpuherd.models.place.placement import AnswerTask, ParallelOption, place
from gpuherd.models.place.result import Alternative, MemoryPlan
from gpuherd.models.place.split import largest
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import Workload

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


def alternatives(
    task: AnswerTask, gpus: Sequence[GpuSpec], parallel: ParallelOption, count: int | None
) -> tuple[Alternative, ...]:
    """What would fit in place of this, the smallest change first; () where nothing was found."""
    return _AnswerAdvice(task, gpus, parallel, count).alternatives()


class _AnswerAdvice:
    """Changes to one task that doesn't fit on these GPUs with these options."""

    def __init__(self, task: AnswerTask, gpus: Sequence[GpuSpec], parallel: ParallelOption, count: int | None) -> None:
        self.task, self.workload, self.gpus = task, task.workload, gpus
        self.parallel, self.count = parallel, count

    def alternatives(self) -> tuple[Alternative, ...]:
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
        """Another number of GPUs, or one after the other in place of the layout that was asked for."""
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
        """The longest prompt that fits with one sequence at a time, where not even one of the length asked for does."""

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
        """The fewest GPUs of this kind that hold it: more of the roomiest, beside those that there are."""
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
