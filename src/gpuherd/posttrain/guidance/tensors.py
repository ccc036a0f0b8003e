"""Lessons as arrays, perhaps made by other processes ahead of time, and padded together as tensors for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuherd.posttrain.guidance.labels import Example, Lesson

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class Arrays(NamedTuple):
    """An example: ids (tokens,) int64, labelled (tokens,) bool, and its target. Not tensors: each that comes from
    another process holds a file open, and a batch of some hundred would wait for ever."""

    ids: NDArray[np.int64]
    labelled: NDArray[np.bool_]
    target: float


Material = tuple[Arrays, ...]  # a lesson as arrays


@dataclass(frozen=True, slots=True)
class Padded:
    """Examples side by side, padded at the right.

    Attributes:
        ids: (rows, tokens) int64, 0 where nothing is.
        mask: (rows, tokens) int64, 0 where nothing is.
        labelled: (rows, tokens) bool.
        target: (rows,) float32.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    labelled: torch.Tensor
    target: torch.Tensor


def arrays_of(example: Example) -> Arrays:
    """The arrays of one example."""
    import numpy as np

    return Arrays(np.array(example.ids, np.int64), np.array(example.labelled, np.bool_), example.target)


def labelled_tokens(materials: Sequence[Material]) -> float:
    """How many tokens of them are labelled."""
    return float(sum(int(each.labelled.sum()) for material in materials for each in material))


def padded(materials: Sequence[Material], device: str) -> Padded:
    """All examples of some lessons in one block: of the first lesson, then of the second."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    examples = [each for material in materials for each in material]
    ids = [torch.from_numpy(each.ids) for each in examples]
    return Padded(
        ids=pad_sequence(ids, batch_first=True).to(device),
        mask=pad_sequence([torch.ones_like(each) for each in ids], batch_first=True).to(device),
        labelled=pad_sequence([torch.from_numpy(each.labelled) for each in examples], batch_first=True).to(device),
        target=torch.tensor([each.target for each in examples], dtype=torch.float32, device=device),
    )


def loaded(lessons: Sequence[Lesson], batches: Sequence[Sequence[int]], workers: int) -> Iterator[list[Material]]:
    """The batches as arrays, in their order; with ``workers`` that many processes make them ahead of time."""
    if not workers:
        yield from ([_material(lessons[place]) for place in batch] for batch in batches)
        return
    import torch
    from torch.utils.data import DataLoader

    dataset: Any = _Lessons(lessons)
    # A generator of its own: a DataLoader takes a seed from torch's otherwise, and a resumed training would differ.
    yield from DataLoader(
        dataset,
        batch_sampler=[list(batch) for batch in batches],
        num_workers=workers,
        collate_fn=list,
        generator=torch.Generator(),
    )


class _Lessons:
    """What a DataLoader takes lessons from."""

    def __init__(self, lessons: Sequence[Lesson]):
        self._lessons = lessons

    def __len__(self) -> int:
        return len(self._lessons)

    def __getitem__(self, place: int) -> Material:
        return _material(self._lessons[place])


def _material(lesson: Lesson) -> Material:
    return tuple(map(arrays_of, lesson))
