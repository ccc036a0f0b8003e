"""Which GPUs a model should be loaded on now, from Python: the GPU guide's question, answered by the model's plan.

``gpuherd.gpus.auto_select_gpus_for_model`` answers it for a mere size, which has no layers; it knows no models.
"""

from __future__ import annotations

import logging

from gpuherd.errors import JobCannotFit
from gpuherd.models.plan.asking import in_precision
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards_now import cards_now
from gpuherd.models.plan.placing import Wish
from gpuherd.models.plan.planner import make_plan
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.workload import Workload

logger = logging.getLogger(__name__)

GpuId = int | str


def auto_select_gpus_for_model(
    model: str,
    *,
    dtype: str | None = None,
    workload: Workload = Workload(),  # noqa: B008 - frozen
    parallel: Wish = "auto",
) -> list[GpuId]:
    """The fewest GPUs on which this model fits now, in the order of its blocks.

    GPUs that are free by gpuherd's rule are taken before those that others use, if as few of them do; memory that
    others use is taken off. Ids are physical, as those of ``gpuherd.gpus``.

    Args:
        model: a known name, a Hugging Face id, a folder or a file; with ``-8bit`` or ``-4bit`` behind it if wanted.
        dtype: of the weights in memory; the checkpoint's own by default.
        workload: what it is to do at once.
        parallel: as in ``make_plan``.

    Returns:
        GPU ids; [] with a warning on a machine without GPUs.

    Raises:
        JobCannotFit: a ValueError; it fits nowhere now, with the figures and what would fit.
        UsageError, MissingModel, BadModel: a dtype that means nothing, or no such model.
    """
    architecture, precision = in_precision(model, dtype)
    for assumed in architecture.assumptions:
        logger.warning("%s: %s", model, assumed)
    idle, all_cards = cards_now(), cards_now(busy_too=True)
    if not all_cards.cards:
        logger.warning("no GPU is available: %s", all_cards.problem or "; ".join(all_cards.left_out))
        return []

    def told(cards: tuple[Card, ...]) -> MemoryPlan | Refusal | None:
        return None if not cards else make_plan(architecture, cards, precision, workload, parallel=parallel)

    on_idle, on_any = told(idle.cards), told(all_cards.cards)
    if isinstance(on_idle, MemoryPlan) and not (isinstance(on_any, MemoryPlan) and on_any.gpus < on_idle.gpus):
        return _ids(on_idle)
    if isinstance(on_any, MemoryPlan):
        return _ids(on_any)
    assert on_any is not None  # noqa: S101 - there are cards
    advice = "; ".join(each.sentence for each in on_any.alternatives)
    raise JobCannotFit(on_any.reason + (f". What would fit: {advice}" if advice else ""))


def _ids(plan: MemoryPlan) -> list[GpuId]:
    labels = [load.card.label for load in plan.loads]
    return [int(label) if label.isdigit() else label for label in labels]
