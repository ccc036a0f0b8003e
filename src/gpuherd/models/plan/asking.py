"""From what people say of a model (its name, a dtype, how much at once) to what a job asks its queue for.

Reads headers and configs, and knows which precision is meant where nothing is said; ``demand`` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.demand import Demand, demand_of
from gpuherd.models.plan.naming import split_precision
from gpuherd.models.plan.placing import WISHES, Wish
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.reading import read_architecture
from gpuherd.models.plan.wanted import planned_in, precision_named, wanted_precision
from gpuherd.models.plan.workload import Reserve, Workload


def demand_for(
    model: str,
    cards: Sequence[Card],
    *,
    dtype: str | None = None,
    batch: int | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    parallel: str | None = None,
    gpus: tuple[int, int] | None = None,
    most: int | None = None,
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    read: Callable[[str], Architecture] = read_architecture,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> Demand:
    """What a job that uses a model in this way should ask for on a machine with these GPUs. None is what was not said.

    Args:
        model: as ``read_architecture`` takes it, with ``-8bit`` or ``-4bit`` behind it if wanted.
        cards, gpus, most, spelling: as in ``demand_of``.
        dtype: of the weights in memory; the checkpoint's own if None.
        batch, prompt_tokens, new_tokens: as in ``Workload``.
        parallel: as in ``make_plan``.
        reserve: what is kept free on each GPU.
        read: gives the architecture of a model's name; that of the headers by default.

    Raises:
        UsageError: words that mean nothing, or contradict each other.
        MissingModel, BadModel: the model is not to be had, or can't be planned.
        JobCannotFit: it fits nowhere here.
    """
    architecture, precision = in_precision(model, dtype, read)
    said = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    demand = demand_of(
        architecture,
        precision,
        Workload(**{name: number for name, number in said.items() if number is not None}),
        cards,
        reserve,
        parallel=_wish(parallel),
        gpus=gpus,
        most=most,
        spelling=spelling,
    )
    warnings = () if demand.plan is None else demand.plan.warnings
    remarks = [*architecture.assumptions, *warnings]
    return replace(demand, sentence="; ".join([demand.sentence, *(each.rstrip(".") for each in remarks)]))


def in_precision(
    model: str, dtype: str | None, read: Callable[[str], Architecture] = read_architecture
) -> tuple[Architecture, Precision]:
    """A model by its name, and how its weights will lie in memory; where that had to be assumed, the architecture says
    so. Raises as ``demand_for``."""
    name, ending = split_precision(model)
    wanted = wanted_precision(model, ending, None if dtype is None else precision_named(dtype))
    return planned_in(read(name), wanted)


def _wish(word: str | None) -> Wish:
    found = next((wish for wish in WISHES if wish == (word or "auto")), None)
    if found is None:
        raise UsageError(f"parallel={word!r}; it is one of {', '.join(WISHES)}")
    return found
