"""Which prompts go together: batches of like lengths, longest first, and smaller ones where memory runs out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuherd.errors import UsageError


def plan_batches(lengths: Sequence[int], *, rows: int, most_tokens: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Places in ``lengths``, divided into batches: longest first, so that what does not fit shows at once.

    Equal lengths keep their order, so that equal inputs give equal batches.

    Args:
        lengths: tokens of each prompt.
        rows: the most prompts of a batch.
        most_tokens: the most tokens of a batch, padding counted; a prompt that is longer goes alone. No bound if None.

    >>> plan_batches([3, 9, 3, 8], rows=2)
    ((1, 3), (0, 2))
    >>> plan_batches([3, 9, 3, 8], rows=4, most_tokens=12)
    ((1,), (3,), (0, 2))
    """
    if rows < 1 or (most_tokens is not None and most_tokens < 1):
        raise UsageError("a batch has one row and one token at least")
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        wide = lengths[batch[0]] if batch else 0  # the first is the longest
        if batch and (len(batch) == rows or (most_tokens is not None and wide * (len(batch) + 1) > most_tokens)):
            batches.append(tuple(batch))
            batch = []
        batch.append(place)
    return (*batches, tuple(batch)) if batch else tuple(batches)


def halved(batch: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two halves of a batch that was too large, the first the larger where they differ.

    >>> halved((4, 1, 7))
    ((4, 1), (7,))
    """
    middle = (len(batch) + 1) // 2
    return tuple(batch[:middle]), tuple(batch[middle:])


def pieces(count: int, most: int | None) -> Iterator[range]:
    """``count`` places in a row, so many at a time.

    >>> [list(each) for each in pieces(5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    step = max(1, count if most is None else most)
    for start in range(0, count, step):
        yield range(start, min(count, start + step))


def common_prefix(token_ids: Sequence[Sequence[int]]) -> int:
    """How many tokens all of these begin with; at least one is left to each for its own.

    >>> common_prefix([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3)])
    2
    """
    first = token_ids[0]
    same = min(len(each) for each in token_ids) - 1
    for other in token_ids[1:]:
        same = next((place for place in range(same) if other[place] != first[place]), same)
    return same
