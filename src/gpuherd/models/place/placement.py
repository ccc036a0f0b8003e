"""Where a model that generates answers goes on given GPUs, or that it fits nowhere: decisions without advice. Pure.

- ``auto``: the fewest GPUs that hold it, one after the other; the other GPUs take further replicas.
- ``replica``: one GPU each.
- ``layers``: one after the other over all GPUs, or over as many as ``count`` says.
- ``tensor``: each layer over all GPUs, or over as many as ``count`` says; the number must divide the heads.

Fewest first, because layers on several GPUs are still computed one after the other: more GPUs make nothing
faster, and others may have work for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture, Role, Tensor
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.usage import CostTable, Usage
from gpuherd.models.memory.weights import Precision, quantises, weight_bytes
from gpuherd.models.place.gpus import GpuSpec, able_to_cooperate, gpus_with_memory, split_by_capability
from gpuherd.models.place.request import ParallelOption, parallel_option
from gpuherd.models.place.result import AnswerRefusal, GpuLoad, MemoryPlan, format_blocks
from gpuherd.models.place.split import BlockSizes, LayerSplit, cuts_allowed, ties_together
from gpuherd.units import gib

# GPUs whose room differs by less are as good as each other: links then count, not a few MB of an idle driver.
_ABOUT = 0.98
# Of so many unequal GPUs every order is tried, which takes milliseconds; of more only simple ones.
_FEW = 6
# Codes for less than this part of the weights: not what people expect of a quantised model.
_MOST_IN_CODES = 0.5


class AnswerTask:
    """A model, its precision, and the answers it is to generate; with tables that are made when first needed, once."""

    def __init__(self, architecture: Architecture, precision: Precision, workload: Workload, reserve: Reserve) -> None:
        self.architecture, self.precision, self.workload, self.reserve = architecture, precision, workload, reserve
        names = ("architecture", "precision", "workload", "reserve")
        self._facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        self._sizes: dict[int, BlockSizes] = {}

    def changed(self, *, precision: Precision | None = None, workload: Workload | None = None) -> AnswerTask:
        """Other answers of the same model, or in another precision."""
        return AnswerTask(self.architecture, precision or self.precision, workload or self.workload, self.reserve)

    def sizes(self, tensor_parallel_size: int = 1) -> BlockSizes:
        """The sizes of its blocks, each split over so many GPUs."""
        if tensor_parallel_size not in self._sizes:
            table = CostTable(**self._facts, ways=tensor_parallel_size)
            self._sizes[tensor_parallel_size] = BlockSizes(
                table, cuts_allowed(self.architecture), self.workload.batch, self.reserve
            )
        return self._sizes[tensor_parallel_size]

    @cached_property
    def layouts(self) -> tuple[AnswerTask, ...]:
        """This, and the same with tied blocks side by side where they aren't: the ways to cut it into runs."""
        together = ties_together(self.architecture)
        if together is None:
            return (self,)
        other = AnswerTask(together, self.precision, self.workload, self.reserve)
        other.layouts = (other, self)
        return other.layouts

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of this model, in this precision, for these tokens."""
        return remarks_on(self.architecture, self.precision, self.workload)

    def plan(
        self,
        groups: Sequence[tuple[GpuSpec, ...]],
        loads: tuple[GpuLoad[Usage], ...],
        largest_batch: int,
        warnings: Sequence[str],
        *,
        tensor: bool = False,
    ) -> MemoryPlan:
        """The plan with these replicas."""
        return MemoryPlan(
            **self._facts,
            parallel="one" if len(loads) == 1 else "tensor" if tensor else "layers",
            loads=loads,
            replicas=len(groups),
            replica_gpus=tuple(groups),
            largest_batch=largest_batch,
            warnings=tuple(warnings),
        )

    def refusal(self, reason: str, *, incapable: bool = False) -> AnswerRefusal:
        """A refusal for another reason than memory: there is no best placement."""
        needed = self.sizes().on_one_gpu()
        return AnswerRefusal(**self._facts, reason=reason, needed=needed, incapable=incapable)

    def too_large(self, loads: tuple[GpuLoad[Usage], ...]) -> AnswerRefusal:
        """A refusal with the figures of the best placement."""
        architecture = self.architecture
        needed = sum(load.usage.total for load in loads)
        worst = max(loads, key=lambda load: load.fullness)
        where = f"GPU {worst.gpu.label}"
        if len(loads) > 1 and worst.after_last - worst.first < len(architecture.blocks):
            where += f" ({format_blocks(architecture, worst.first, worst.after_last)})"
        fullest = "it" if len(loads) == 1 else f"the fullest, {where},"
        on = gpus_with_memory([load.gpu for load in loads])
        reason = (
            f"{architecture.model} in {self.precision} needs {gib(needed)} on {on}: {fullest} lacks {gib(-worst.left)}"
        )
        if little := saves_little(architecture, self.precision):
            reason += f" ({little})"
        return replace(self.refusal(reason), needed=needed, missing=-worst.left, loads=loads)


def place(
    task: AnswerTask, gpus: Sequence[GpuSpec], parallel: ParallelOption = "auto", count: int | None = None
) -> MemoryPlan | AnswerRefusal:
    """The plan, or a refusal without alternatives. ``count``: GPUs of one replica.

    Raises UsageError: no GPUs, a count below 1 or above the number of GPUs, an unknown option.
    """
    if not gpus:
        raise UsageError("there is no GPU to plan for; name some, such as --gpus 4x40GB")
    parallel_option(parallel)
    if count is not None and not 1 <= count <= len(gpus):
        raise UsageError(f"{count} GPUs a replica: there are {len(gpus)} to plan with, and the least is 1")
    if parallel == "replica" and count not in (None, 1):
        raise UsageError(f"{count} GPUs a replica, and parallel=replica means one GPU each; ask for layers or tensor")
    able, remarks = split_by_capability(task.precision, gpus, task.architecture.stored_method)
    if not able:
        return task.refusal(f"no GPU can compute in {task.precision}: {remarks[0]}", incapable=True)
    if count is not None and count > len(able):
        return task.refusal(
            f"{count} GPUs are asked for, and only {len(able)} can compute in {task.precision}: {remarks[0]}",
            incapable=True,
        )
    if parallel == "tensor":
        return _tensor(task, able, count, remarks)
    return _by_layers(task, able, parallel, count, remarks)


# ---- whole layers: one GPU, or one after the other -------------------------------------------------------------------


def _by_layers(
    task: AnswerTask, gpus: Sequence[GpuSpec], parallel: ParallelOption, count: int | None, remarks: tuple[str, ...]
) -> MemoryPlan | AnswerRefusal:
    sizes = task.sizes()
    cooperating = len(able_to_cooperate(gpus))
    most = 1 if parallel == "replica" else count or max(1, cooperating)
    counts: Sequence[int] = (most,)
    if parallel == "auto" and count is None:
        # More GPUs than pieces would stay empty; fewer than the memory of the roomiest allows can't hold it.
        most = min(most, max(len(each.sizes().cuts) - 1 for each in task.layouts))
        counts = range(min(_fewest(gpus, sizes), most), most + 1)
    for number in counts:
        choices = [
            (each, found, each.sizes().best(found))
            for each in (task.layouts if number > 1 else (task,))
            if (found := _fitting(gpus, number, each.sizes())) is not None
        ]
        if choices:
            return _plan(*min(choices, key=_fullness), gpus, remarks)
    roomiest = _roomiest(gpus, counts[-1], sizes)
    if not roomiest:
        return task.refusal(
            f"{counts[-1]} GPUs are asked for: MIG instances can't work together, and only {cooperating} are none"
        )
    best, order, split = min(
        (
            (each, order, each.sizes().best(order))
            for each in (task.layouts if len(roomiest) > 1 else (task,))
            for order in _simple_orders(roomiest, sizes)
        ),
        key=_fullness,
    )
    return best.too_large(best.sizes().loads(order, split))


def _fewest(gpus: Sequence[GpuSpec], sizes: BlockSizes) -> int:
    """How many of the roomiest GPUs have the memory that the model takes on one; fewer can't hold it."""
    rooms = sorted((max(0, sizes.available(gpu)) for gpu in gpus), reverse=True)
    needed, held = sizes.on_one_gpu(), 0
    for number, room in enumerate(rooms, 1):
        held += room
        if held >= needed:
            return number
    return len(rooms)


def _fullness(choice: tuple[AnswerTask, tuple[GpuSpec, ...], LayerSplit]) -> float:
    return choice[2].fullness


def _fitting(gpus: Sequence[GpuSpec], count: int, sizes: BlockSizes) -> tuple[GpuSpec, ...] | None:
    """So many GPUs, in an order in which the blocks fit; None if they don't.

    The roomiest are the measure: what doesn't fit there fits nowhere. Neighbours are taken in their place where they
    have about as much room.
    """
    roomiest = _roomiest(gpus, count, sizes)
    if not roomiest or sum(max(0, sizes.available(gpu)) for gpu in roomiest) < sizes.on_one_gpu():
        return None
    enough = _ABOUT * min(sizes.available(gpu) for gpu in roomiest)
    seen: set[tuple[int, ...]] = set()
    for window in _windows(gpus, count) if count > 1 and enough > 0 else ():
        rooms = tuple(sizes.available(gpu) for gpu in window)
        if rooms not in seen and min(rooms) >= enough and sizes.fits(window):
            return window
        seen.add(rooms)
    return _order_that_fits(roomiest, sizes)


def _windows(gpus: Sequence[GpuSpec], count: int) -> Iterator[tuple[GpuSpec, ...]]:
    """Neighbours: first those that begin at a multiple of ``count``, so that replicas fit side by side."""
    usable = able_to_cooperate(gpus)
    starts = sorted(range(len(usable) - count + 1), key=lambda start: (start % count != 0, start))
    for start in starts:
        yield tuple(usable[start : start + count])


def _roomiest(gpus: Sequence[GpuSpec], count: int, sizes: BlockSizes) -> tuple[GpuSpec, ...]:
    """The GPUs with the most room, in the order given; () where there are too few that work together."""
    usable = gpus if count == 1 else able_to_cooperate(gpus)
    if len(usable) < count:
        return ()
    taken = sorted(range(len(usable)), key=lambda number: (-sizes.available(usable[number]), number))[:count]
    return tuple(usable[number] for number in sorted(taken))


def _simple_orders(gpus: tuple[GpuSpec, ...], sizes: BlockSizes) -> list[tuple[GpuSpec, ...]]:
    """As given, roomiest first, roomiest last; one where all are alike."""
    if len({(gpu.free, gpu.total) for gpu in gpus}) < 2:
        return [gpus]
    ascending = tuple(sorted(gpus, key=sizes.available))
    descending = tuple(sorted(gpus, key=sizes.available, reverse=True))
    return list(dict.fromkeys((gpus, descending, ascending)))


def _order_that_fits(gpus: tuple[GpuSpec, ...], sizes: BlockSizes) -> tuple[GpuSpec, ...] | None:
    """The order of these GPUs with the emptiest fullest GPU among the simple orders, if it fits in one of those; of a
    few GPUs else the first that fits among all orders that differ."""
    simple = [order for order in _simple_orders(gpus, sizes) if sizes.fits(order)]
    if simple:
        return simple[0] if len(simple) == 1 else min(simple, key=lambda order: sizes.best(order).fullness)
    if len(gpus) > _FEW or len({(gpu.free, gpu.total) for gpu in gpus}) < 2:
        return None
    orders = {tuple((gpu.free, gpu.total) for gpu in order): order for order in permutations(gpus)}
    return next((order for order in orders.values() if sizes.fits(order)), None)


def _plan(
    task: AnswerTask, chosen: tuple[GpuSpec, ...], split: LayerSplit, gpus: Sequence[GpuSpec], remarks: tuple[str, ...]
) -> MemoryPlan:
    sizes = task.sizes()
    loads = sizes.loads(chosen, split)
    needs = [sizes.of_blocks(load.first, load.after_last) for load in loads]
    usable = gpus if len(loads) == 1 else able_to_cooperate(gpus)
    groups = find_replicas(usable, [load.gpu for load in loads], needs, sizes)
    first = groups[0]
    if first != tuple(load.gpu for load in loads):
        loads = tuple(sizes.load(gpu, load.first, load.after_last) for gpu, load in zip(first, loads, strict=True))
    here = sizes.fit_batch_size(loads)
    elsewhere = here if len(first) == 1 else max(each.sizes().fit_batch_size_over(first, here) for each in task.layouts)
    warnings = [*remarks, *task.remarks]
    if here < elsewhere:
        warnings.append(
            f"with this device map at most {here} sequences at once; a plan for --batch {elsewhere} splits otherwise"
        )
    return task.plan(groups, loads, elsewhere, warnings)


# ---- tensor parallel: each layer over all ----------------------------------------------------------------------------


def _tensor(
    task: AnswerTask, gpus: Sequence[GpuSpec], count: int | None, remarks: tuple[str, ...]
) -> MemoryPlan | AnswerRefusal:
    size, reason = _tensor_parallel_size(task, len(able_to_cooperate(gpus)), count)
    if reason is not None:
        return task.refusal(reason)
    sizes = task.sizes(size)
    usable = gpus if size == 1 else able_to_cooperate(gpus)

    def loads(some: Sequence[GpuSpec]) -> tuple[GpuLoad[Usage], ...]:
        return tuple(sizes.load(gpu, 0, len(task.architecture.blocks)) for gpu in some)

    def roomy(some: Sequence[GpuSpec]) -> bool:
        return all(sizes.available(gpu) >= sizes.on_one_gpu() for gpu in some)

    chosen = next(filter(roomy, _windows(usable, size)), None) or _roomiest(usable, size, sizes)
    if not roomy(chosen):
        return task.too_large(loads(chosen))
    groups = find_replicas(usable, chosen, [sizes.on_one_gpu()] * size, sizes)
    largest_batch = sizes.fit_batch_size(loads([min(groups[0], key=sizes.available)]))
    warnings = (*remarks, *task.remarks)
    return task.plan(groups, loads(groups[0]), largest_batch, warnings, tensor=True)


def _tensor_parallel_size(task: AnswerTask, cooperating: int, count: int | None) -> tuple[int, str | None]:
    """Over how many GPUs each layer goes, and why it can't, if so. ``cooperating``: GPUs that can work together."""
    architecture, limit = task.architecture, task.architecture.tensor_parallel_limit or 1
    size = count or max(number for number in range(1, max(1, cooperating) + 1) if limit % number == 0)
    if not architecture.tensor_parallel:
        return size, f"transformers can't split the layers of {architecture.model_type} over GPUs"
    if limit % size:
        return size, f"{size} GPUs don't divide the heads of {architecture.model}; {_divisors(limit)} do"
    if size > max(1, cooperating):
        return size, f"{size} GPUs are asked for: MIG instances can't work together, and only {cooperating} are none"
    if size > 1 and task.precision.is_quantised:
        return size, f"bitsandbytes' {task.precision} can't be split by transformers' tensor parallelism"
    return size, None


def _divisors(limit: int) -> str:
    """The numbers above 1 that divide it, as words: ``2, 4 and 8``."""
    numbers = [str(number) for number in range(2, limit + 1) if limit % number == 0]
    return " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers) or "none"


# ---- replicas --------------------------------------------------------------------------------------------------------
#
# A replica takes the same device map as the first one, so that one map serves them all; the GPUs may differ as long as
# what each must hold fits there.


def find_replicas(
    gpus: Sequence[GpuSpec], first: Sequence[GpuSpec], needs: Sequence[int], sizes: BlockSizes
) -> list[tuple[GpuSpec, ...]]:
    """The GPUs of each replica, in the order of the map; those of ``first`` come first if that costs no replica.

    Args:
        gpus: all that there are, linked neighbours side by side.
        first: GPUs on which the first replica was planned.
        needs: bytes for the blocks on each GPU of a replica, nothing reserved.
    """
    rest = [gpu for gpu in gpus if gpu not in first]
    groups = max(_in_order(rest, needs, sizes), _matched(rest, needs, sizes), key=len)
    anew = _matched(gpus, needs, sizes)
    return anew if len(anew) > 1 + len(groups) else [tuple(first), *groups]


def _in_order(gpus: Sequence[GpuSpec], needs: Sequence[int], sizes: BlockSizes) -> list[tuple[GpuSpec, ...]]:
    """One group after the other of GPUs as they come: neighbours stay together."""
    groups: list[tuple[GpuSpec, ...]] = []
    group: list[GpuSpec] = []
    for gpu in gpus:
        if sizes.available(gpu) >= needs[len(group)]:
            group.append(gpu)
        if len(group) == len(needs):
            groups.append(tuple(group))
            group = []
    return groups


def _matched(gpus: Sequence[GpuSpec], needs: Sequence[int], sizes: BlockSizes) -> list[tuple[GpuSpec, ...]]:
    """As many groups as there can be: the roomiest GPUs for the largest needs."""
    by_room = sorted(gpus, key=sizes.available, reverse=True)
    places = sorted(range(len(needs)), key=lambda place: needs[place], reverse=True)
    for count in range(len(gpus) // len(needs), 0, -1):
        # Every GPU of the largest need, then every one of the second largest, ...
        taken = [by_room[position * count : (position + 1) * count] for position in range(len(needs))]
        if all(sizes.available(gpu) >= needs[place] for place, some in zip(places, taken, strict=True) for gpu in some):
            of_place = dict(zip(places, taken, strict=True))
            return [tuple(of_place[place][number] for place in range(len(needs))) for number in range(count)]
    return []


# ---- remarks on a plan -----------------------------------------------------------------------------------------------


def remarks_on(architecture: Architecture, precision: Precision, workload: Workload) -> tuple[str, ...]:
    """All that is to be said of this model, in this precision, for these tokens."""
    most = architecture.max_tokens
    tokens = workload.tokens if architecture.writes_answers else workload.prompt_tokens
    found = []
    if most is not None and tokens > most:
        found.append(f"{tokens} tokens a sequence; {architecture.model} was made for at most {most}")
    found += [
        sentence for sentence in (saves_little(architecture, precision), _stored(architecture, precision)) if sentence
    ]
    return tuple(found)


def saves_little(architecture: Architecture, precision: Precision) -> str:
    """Where quantisation leaves most of the model as it is, and why; "" where it doesn't.

    bitsandbytes knows modules of class Linear and Conv1D. transformers 5 fuses the experts of a mixture into one
    parameter, Falcon's matrices are a class of its own, and embeddings and head are never quantised.
    """
    if not precision.is_quantised:
        return ""
    own = [tensor for tensor in architecture.tensors() if tensor.tied_to is None and not tensor.buffer]
    rest = [tensor for tensor in own if not quantises(tensor, precision)]
    coded = 1 - sum(tensor.numel for tensor in rest) / max(1, sum(tensor.numel for tensor in own))
    if coded >= _MOST_IN_CODES:
        return ""
    left = sum(weight_bytes(tensor, precision)[0] for tensor in rest)
    kinds: Counter[str] = Counter()
    for tensor in rest:
        kinds[_kind(tensor)] += tensor.numel
    why = kinds.most_common(1)[0][0]
    return f"{precision} saves little: bitsandbytes turns {coded:.0%} of it into codes and leaves {gib(left)} ({why})"


def _kind(tensor: Tensor) -> str:
    """What a tensor that stays as it is belongs to, in words."""
    if len(tensor.shape) > 2:
        return "experts fused into one parameter"
    if tensor.role in (Role.EMBEDDING, Role.HEAD):
        return "embedding and head"
    return "matrices of a class of their own"


def _stored(architecture: Architecture, precision: Precision) -> str:
    """What as-stored means here, where it doesn't mean what it says; "" where it does."""
    if precision is not Precision.AS_STORED:
        return ""
    if not any(tensor.stored_bytes is not None for tensor in architecture.tensors()):
        return f"none of {architecture.model}'s weights are known to be stored as codes; planned in 16 bits"
    if architecture.stored_method == "mxfp4":
        return "without the packages triton and kernels transformers unpacks MXFP4 weights to bf16, four times as much"
    return ""
