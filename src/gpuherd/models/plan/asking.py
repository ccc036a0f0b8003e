"""From what people say of a model (its name, a dtype, how much at once) to what a job asks its queue for.

Reads headers and configs, and knows which precision is meant where nothing is said; ``demand`` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.demand import Demand, demand_of
from gpuherd.models.plan.naming import split_precision
from gpuherd.models.plan.placing import WISHES, Wish
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.reading import read_architecture
from gpuherd.models.plan.workload import Workload

_NAMES = tuple(each.value for each in Precision if each is not Precision.AS_STORED)


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
    read: Callable[[str], Architecture] = read_architecture,
) -> Demand:
    """What a job that uses a model in this way should ask for on a machine with these GPUs. None is what was not said.

    Args:
        model: as ``read_architecture`` takes it, with ``-8bit`` or ``-4bit`` behind it if wanted.
        cards, gpus, most: as in ``demand_of``.
        dtype: of the weights in memory; the checkpoint's own if None.
        batch, prompt_tokens, new_tokens: as in ``Workload``.
        parallel: as in ``make_plan``.
        read: gives the architecture of a model's name; that of the headers by default.

    Raises:
        UsageError: words that mean nothing, or contradict each other.
        MissingModel, BadModel: the model is not to be had, or can't be planned.
        JobCannotFit: it fits nowhere here.
    """
    name, suffix = split_precision(model)
    asked = None if dtype is None else precision_named(dtype)
    if None not in (asked, suffix) and asked is not suffix and (suffix, asked) != (Precision.NF4, Precision.NF4_DQ):
        raise UsageError(f"the name {model} asks for {suffix}, and --dtype for {asked}: leave one of them out")
    architecture = read(name)
    usual = Workload()
    return demand_of(
        architecture,
        asked or suffix or own_precision(architecture),
        Workload(batch or usual.batch, prompt_tokens or usual.prompt_tokens, new_tokens or usual.new_tokens),
        cards,
        parallel=_wish(parallel),
        gpus=gpus,
        most=most,
    )


def precision_named(word: str) -> Precision:
    """The precision of this name. Raises UsageError, which names those that there are."""
    if word not in _NAMES:
        raise UsageError(f"{word!r} is no dtype that is planned for; there are {', '.join(_NAMES)}")
    return Precision(word)


def own_precision(architecture: Architecture) -> Precision:
    """The precision in which a checkpoint is loaded when nothing is said: as it is stored; bf16 where that is not
    known."""
    stored = architecture.stored
    return Precision(stored) if stored in tuple(Precision) else Precision.BF16


def _wish(word: str | None) -> Wish:
    found = next((wish for wish in WISHES if wish == (word or "auto")), None)
    if found is None:
        raise UsageError(f"parallel={word!r}; it is one of {', '.join(WISHES)}")
    return found
