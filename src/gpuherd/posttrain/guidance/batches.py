"""Which examples are learnt from together, of all epochs, before the first is begun. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gpuherd.errors import UsageError
from gpuherd.posttrain.guidance.labels import Lesson

_WINDOW = 16  # batches whose lessons are sorted by length among themselves: less padding, and still mixed


def planned(
    lessons: Sequence[Lesson], *, rows: int, most_tokens: int, epochs: int, seed: int
) -> list[list[tuple[int, ...]]]:
    """The batches of each epoch, places in ``lessons``; each lesson once an epoch, in an order of the epoch's own.

    Depends on nothing else, so that a training that was stopped goes on with the batch that it had come to.

    Args:
        lessons: their lengths count.
        rows: the most lessons of a batch.
        most_tokens: the most tokens of a batch, padding counted; a lesson that is longer goes alone.
        epochs: how many.
        seed: of the orders.
    """
    if rows < 1 or most_tokens < 1 or epochs < 1:
        raise UsageError(
            f"batch_size={rows}, max_batch_num_tokens={most_tokens}, epochs={epochs}; each is 1 at the least"
        )
    widths = [max((len(each.ids) for each in lesson), default=0) for lesson in lessons]
    return [
        _epoch(lessons, widths, rows, most_tokens, random.Random(f"{seed} {epoch}"))  # noqa: S311
        for epoch in range(epochs)
    ]


def _epoch(
    lessons: Sequence[Lesson], widths: Sequence[int], rows: int, most_tokens: int, order: random.Random
) -> list[tuple[int, ...]]:
    places = list(range(len(lessons)))
    order.shuffle(places)
    batches: list[tuple[int, ...]] = []
    for start in range(0, len(places), rows * _WINDOW):
        window = sorted(places[start : start + rows * _WINDOW], key=lambda place: widths[place])
        batches += _packed(window, lessons, widths, rows, most_tokens)
    order.shuffle(batches)
    return batches


def _packed(
    window: Sequence[int], lessons: Sequence[Lesson], widths: Sequence[int], rows: int, most_tokens: int
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    held = 0
    for place in window:  # the last is the widest
        sequences = held + len(lessons[place])
        if batch and (len(batch) == rows or widths[place] * sequences > most_tokens):
            batches.append(tuple(batch))
            batch, sequences = [], len(lessons[place])
        batch.append(place)
        held = sequences
    return [*batches, tuple(batch)] if batch else batches
