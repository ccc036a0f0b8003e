"""Batches that other processes make."""

from __future__ import annotations

import resource

import pytest
import torch

from gpuherd.posttrain.guidance import tensors
from gpuherd.posttrain.guidance.labels import Example


def example(length: int) -> Example:
    return Example("p", tuple(range(length)), (False,) + (True,) * (length - 1), 0.5)


def test_examples_are_padded_at_the_right() -> None:
    ((first, second),) = tensors.loaded([(example(2),), (example(4),)], [(0, 1)], 0)
    batch = tensors.padded([first, second], "cpu")
    assert batch.ids.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.labelled.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert (batch.ids.dtype, batch.target.dtype, batch.target.tolist()) == (torch.int64, torch.float32, [0.5, 0.5])
    assert tensors.labelled_tokens([first, second]) == 4


@pytest.mark.timeout(60)
def test_other_processes_make_large_batches_too() -> None:
    """A tensor of another process holds a file open: more of them than may be open would be waited for for ever."""
    lessons = [(example(2 + number % 3),) for number in range(1200)]
    batches = [range(start, start + 400) for start in range(0, 1200, 400)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        made = list(tensors.loaded(lessons, batches, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for one, other in zip(tensors.loaded(lessons, batches, 0), made, strict=True):
        assert torch.equal(tensors.padded(one, "cpu").ids, tensors.padded(other, "cpu").ids)
        assert len(one) == 400
