"""What the planner relies on in real models' needs, and the search for the largest batch."""

from __future__ import annotations

import pytest
from tests.models.memory.toy import NOTHING, gpus_of

from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.usage import CostTable, Usage
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.split import MOST_SEQUENCES, BlockSizes, ties_together

WORKLOAD = Workload(8, 512, 64)


@pytest.mark.parametrize("precision", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b", "gpt2", "gemma-2-9b", "mixtral-8x7b"])
def test_a_run_never_needs_less_than_a_part_of_it_nor_more_than_its_parts(model: str, precision: str) -> None:
    architecture = read_architecture(model)
    for layout in (architecture, ties_together(architecture) or architecture):
        costs = CostTable(layout, Precision(precision), WORKLOAD, Reserve())
        count = len(layout.blocks)
        sizes = BlockSizes(costs, range(count + 1), WORKLOAD.batch, Reserve())
        for first in range(count):
            for after in range(first + 1, count):
                run = sizes.of_blocks(first, after)
                assert run <= sizes.of_blocks(first, after + 1)
                assert first == 0 or run <= sizes.of_blocks(first - 1, after)
            assert sizes.of_blocks(0, first) + sizes.of_blocks(first, count) >= sizes.on_one_gpu() or first == 0


def test_needs_are_those_of_the_table_on_any_card() -> None:
    reserve = Reserve()
    costs = CostTable(read_architecture("llama-3.1-8b"), Precision.BF16, WORKLOAD, reserve)
    sizes = BlockSizes(costs, (0, 3, 35), WORKLOAD.batch, reserve)
    for card in gpus_of(40_960, 81_920):
        need = sizes.need([card])
        for run, blocks in (((0, 1), (0, 3)), ((1, 2), (3, 35)), ((0, 2), (0, 35))):
            assert need(0, *run) == costs.usage(*blocks, card).total
        assert need(0, 1, 1) == 0


class Growing:
    """A hundred bytes, and so many for each sequence."""

    def __init__(self, each: int) -> None:
        self.each = each

    def usage(self, first: int, after_last: int, card: GpuSpec, batch: int | None = None) -> Usage:
        return Usage(weights=100, cache=self.each * (batch or 0))


@pytest.mark.parametrize("asked", [1, 7, 900, 5_000])
@pytest.mark.parametrize(("each", "most"), [(1, 924), (10, 92), (924, 1), (925, 0), (0, MOST_SEQUENCES)])
def test_the_largest_batch(asked: int, each: int, most: int) -> None:
    sizes = BlockSizes(Growing(each), (0, 1), asked, NOTHING)
    cards = [GpuSpec("0", "", 1024, 1024)]
    loads = sizes.loads(cards, sizes.best(cards))
    assert sizes.fit_batch_size(loads) == most
    assert sizes.fit_batch_size_over(cards, 0) == most
