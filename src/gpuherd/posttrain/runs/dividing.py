"""Which combinations an experiment has, and by how many jobs each collects. Pure."""

from __future__ import annotations

from gpuherd.posttrain.runs.plan import Combination
from gpuherd.posttrain.runs.prepared import Prepared
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.runs.shards import number_of_shards


def combinations_of(settings: Settings, prepared: Prepared, places: int) -> tuple[Combination, ...]:
    """Every algorithm on every data set with every pair of models.

    The places of the machine are divided among those that collect: so many jobs each as fill it together.

    Args:
        places: how many jobs can run side by side.
    """
    data, models = settings.trained_on(), tuple(settings.families())
    collecting = sum(choice.collects for choice in prepared.choices) * len(data) * len(models)
    each = max(1, places // max(1, collecting)) if settings.parallel_generation else 1
    return tuple(
        Combination(
            algorithm=choice.name,
            dataset=name,
            family=family,
            collects=choice.collects,
            off_policy=choice.make().off_policy,
            shards=number_of_shards(prepared.problems[name], each, settings.data_collection.shards),
            evaluated_on=settings.evaluated_on(name),
        )
        for choice in prepared.choices
        for name in data
        for family in models
    )
