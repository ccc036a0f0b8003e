"""Brings together who knows jobs and who knows models: a planner for the commands that start jobs (``--model``).

Nothing is looked at before the first job that names a model is there: GPUs take a moment to be asked.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuherd.batch.job_options import ModelUse, Need, Planner
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import printable

if TYPE_CHECKING:
    from gpuherd.engines.options import EngineOptions
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.options import DispatchOptions
    from gpuherd.models.plan.card import Card

_LONGEST_STEM = 60
# A list may name thousands of models; the plan of each is in the table of a dry run.
_MOST_TOLD = 20
# The flags of gpuherd plan as keys of a job file.
JOB_FILE: Mapping[str, str | None] = {
    "--dtype": "dtype={}",
    "--batch": "batch={}",
    "--prompt-tokens": "prompt-tokens={}",
    "--parallel": "parallel={}",
    "--num-gpus": "gpus={}",
}


@dataclass(frozen=True, slots=True)
class Having:
    """GPUs that jobs may get, as free as when nobody uses them, and how many a run has at once (None: all)."""

    cards: Sequence[Card]
    most: int | None = None


def on_stderr(sentence: str) -> None:
    """Tells people, and leaves standard output to what the command is for."""
    print(f"gpuherd: {sentence}", file=sys.stderr, flush=True)


def planner(
    look: Callable[[], Having],
    tell: Callable[[str], None] = on_stderr,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> Planner:
    """Says what jobs need that name a model.

    Args:
        look: gives the GPUs; called once, when the first model is planned.
        tell: is given the sentences of the first plans, safe to print.
        spelling: as in ``demand_of``: ``JOB_FILE`` where jobs come from a file.
    """
    seen: list[Having] = []
    told = 0

    def plan(use: ModelUse) -> Need:
        nonlocal told
        from gpuherd.models.plan.asking import demand_for

        if not seen:
            seen.append(look())
        words = asdict(use)
        said_mb = words.pop("memory_mb")
        demand = demand_for(**words, cards=seen[0].cards, most=seen[0].most, spelling=spelling)
        sentence = (
            demand.sentence if said_mb is None else f"{demand.sentence}; {said_mb} MB in place of that, as was said"
        )
        told += 1
        if told <= _MOST_TOLD:
            tell(printable(sentence))
        elif told == _MOST_TOLD + 1:
            tell("more models are planned; --dry-run shows what each job asks for")
        return Need(demand.gpus, demand.memory_mb, family_of(use, demand.gpus, demand.memory_mb), sentence)

    return plan


def family_of(use: ModelUse, gpus: int, memory_mb: int) -> str:
    """One name for all jobs that use a model in the same way on as many GPUs: they need the same memory on each. By
    its plan too, since the same words may name another model in another folder."""
    key = repr((sorted(asdict(use).items(), key=str), gpus, memory_mb))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", use.model).strip("-")[-_LONGEST_STEM:].lstrip("-") or "model"
    return f"{stem}.{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def of_gpus(gpus: Sequence[Gpu], most: int | None = None) -> Having:
    """These GPUs, ``most`` of them at once."""
    from gpuherd.models.plan.demand import idle_cards

    return Having(idle_cards(gpus), most)


def of_a_run(options: DispatchOptions, most: int | None) -> Having:
    """The GPUs that a run with these options may use, ``most`` of them at once; those of a node of its cluster."""
    if options.engine != LOCAL:
        return of_a_cluster(options)
    from gpuherd.jobs.gpu.watch import watch_for_plan
    from gpuherd.jobs.settings import load

    return of_gpus(watch_for_plan(options, load()).gpus, most)


def of_a_cluster(options: EngineOptions) -> Having:
    """The GPUs of one of its nodes. No driver is asked on this machine."""
    from gpuherd.models.plan.cluster import node_cards

    return Having(node_cards(options))


def of_the_queue() -> Having:
    """The GPUs of the dispatcher that works the user's own queue off; those of this machine where nobody does."""
    from gpuherd.batch.feasibility import dispatchers_machine
    from gpuherd.batch.user_queue import folder
    from gpuherd.gpus.driver import machine
    from gpuherd.jobs.run_dir import RunDirectory

    here = machine().gpus
    told = dispatchers_machine(RunDirectory(folder()))
    if told is None:
        return of_gpus(here)
    now = {gpu.uuid: gpu for gpu in here}
    return of_gpus([now.get(gpu.uuid, gpu) for gpu in told.gpus], told.max_gpus)
