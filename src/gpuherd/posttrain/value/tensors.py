"""Lessons as tensors: one by one, perhaps by other processes ahead of time, and padded together for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuherd.posttrain.value.labels import Example, Lesson

if TYPE_CHECKING:
    import torch


class Tensors(NamedTuple):
    """An example: ids (tokens,) int64, labelled (tokens,) bool, and its target."""

    ids: torch.Tensor
    labelled: torch.Tensor
    target: float


Material = tuple[Tensors, ...]  # a lesson as tensors


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


def tensors_of(example: Example) -> Tensors:
    """The tensors of one example, on the CPU."""
    import torch

    return Tensors(torch.tensor(example.ids), torch.tensor(example.labelled), example.target)


def labelled_tokens(materials: Sequence[Material]) -> float:
    """How many tokens of them are labelled."""
    return float(sum(int(each.labelled.sum()) for material in materials for each in material))


def padded(materials: Sequence[Material], device: str) -> Padded:
    """All examples of some lessons in one block: of the first lesson, then of the second."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    examples = [each for material in materials for each in material]
    return Padded(
        ids=pad_sequence([each.ids for each in examples], batch_first=True).to(device),
        mask=pad_sequence([torch.ones_like(each.ids) for each in examples], batch_first=True).to(device),
        labelled=pad_sequence([each.labelled for each in examples], batch_first=True).to(device),
        target=torch.tensor([each.target for each in examples], dtype=torch.float32, device=device),
    )


def loaded(lessons: Sequence[Lesson], batches: Sequence[Sequence[int]], workers: int) -> Iterator[list[Material]]:
    """The batches as tensors, in their order; with ``workers`` that many processes make them ahead of time."""
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
    return tuple(map(tensors_of, lesson))
