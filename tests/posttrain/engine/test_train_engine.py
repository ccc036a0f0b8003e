"""Optimiser steps: exact however items are divided, honest where something goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.memory.training_groups import lonely_group
from tests.posttrain.engine.nets import Item, items, loss_of, net, trained, trainee, weight
from torch import Tensor, nn

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Strategy
from gpuherd.posttrain.engine.strategies import transformer_layers
from gpuherd.posttrain.engine.train_engine import Loss, MicroBatch, NotFinite, cuts, passes, pieces_needed

ADAMW = OptimiserOptions(0.05, weight_decay=0.1, max_grad_norm=0.5)


def test_a_step_is_torch_s_own() -> None:
    ours, theirs = trainee(optimiser=ADAMW), net()
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in theirs.parameters() if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in theirs.parameters() if each.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.05,
    )
    for step in range(3):
        batch = items(8, seed=step)
        loss = loss_of(theirs)(batch) / weight(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures = ours.step(batch, loss_of(ours.module), weight)
        assert figures.loss == pytest.approx(loss.item(), rel=1e-6)
        assert figures.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert (figures.items, figures.learning_rate) == (8, 0.05)
    for mine, other in zip(ours.plain.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_micro_batches_change_rounding_alone() -> None:
    at_once = trained(trainee(steps=StepOptions(micro_batch_size=99)), range(4))
    for size in (1, 3):
        assert trained(trainee(steps=StepOptions(micro_batch_size=size)), range(4)) == pytest.approx(at_once, rel=1e-5)


def test_the_first_moments_of_a_schedule_are_used() -> None:
    one = trainee(optimiser=OptimiserOptions(0.4, warmup_steps=2))
    rates = [one.step(items(4), loss_of(one.module), weight).learning_rate for _ in range(3)]
    assert rates == [0.2, 0.4, 0.4]


def test_where_nothing_weighs_anything_nothing_is_changed() -> None:
    one = trainee()
    before = [each.clone() for each in one.plain.parameters()]
    figures = one.step(items(4), loss_of(one.module), lambda batch: 0.0)
    assert figures.skipped and figures.loss is None and figures.grad_norm is None
    assert one.step([], loss_of(one.module), weight).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, one.plain.parameters(), strict=True))
    assert one.steps_done == 2


def test_a_loss_that_is_no_number_leaves_the_weights() -> None:
    one = trainee()
    before = [each.clone() for each in one.plain.parameters()]
    with pytest.raises(NotFinite, match="step 1: the loss is nan"):
        one.step(items(4), lambda batch: loss_of(one.module)(batch) * float("nan"), weight)
    with pytest.raises(NotFinite, match="norm"):
        one.step(items(4), lambda batch: (loss_of(one.module)(batch) * 0).sqrt(), weight)
    with pytest.raises(NotFinite, match="weight is nan"):
        one.step(items(4), loss_of(one.module), lambda batch: float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, one.plain.parameters(), strict=True))


class Full:
    """A loss for which so many items at once are too many: the memory of a machine that we have not. It runs out in the
    backward pass below the second layer, when the layers above have their gradients already."""

    def __init__(self, module: Any, most: int) -> None:
        self.loss, self.most, self.seen = loss_of(module), most, list[int]()
        module.layers[1].register_forward_hook(self._watch)

    def __call__(self, batch: Sequence[Item]) -> Tensor:
        self.seen.append(len(batch))
        return self.loss(batch)  # type: ignore[no-any-return]

    def _watch(self, module: Any, inputs: Any, output: Tensor) -> None:
        if len(output) > self.most:
            output.register_hook(_run_out)  # type: ignore[no-untyped-call]


def _run_out(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_where_memory_runs_out_the_step_is_done_with_half(caplog: pytest.LogCaptureFixture) -> None:
    plain, tight = trainee(), trainee(steps=StepOptions(micro_batch_size=8, dynamic_batch_size=True))
    limited, batch = Full(tight.plain, most=3), items(8)
    wanted = plain.step(batch, loss_of(plain.module), weight)
    with caplog.at_level(logging.WARNING):
        figures = tight.step(batch, limited, weight)
    assert figures.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert figures.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert figures.micro_batch == 2 and limited.seen == [8, 4, 2, 2, 2, 2]
    assert "memory ran out with 8 items at once; going on with 4" in caplog.text


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_figures_are_means_over_the_step_however_it_is_cut(micro: int) -> None:
    """Where memory runs out in the midst of a step, what was added up before does not count."""
    one = trainee(steps=StepOptions(micro_batch_size=micro, dynamic_batch_size=True))
    limited, batch = Full(one.plain, most=2), items(8)
    second = [each for each in batch if each.label]  # a figure of some items alone

    def loss(some: Sequence[Item]) -> Loss:
        counted = [each for each in some if each.label]
        figures: dict[str, Any] = {
            "weight": (torch.tensor(weight(some)), len(some)),
            "label": (sum(each.label for each in counted), len(counted)),
            "never": (0.0, 0),
        }
        return Loss(limited(some), figures)

    means = one.step(batch, loss, weight).means
    assert means == {
        "weight": pytest.approx(weight(batch) / 8),
        "label": pytest.approx(sum(each.label for each in second) / len(second)),
    }
    assert one.step(batch, limited, weight).means == {}


def test_without_dynamic_batch_size_it_is_told() -> None:
    one = trainee(steps=StepOptions(micro_batch_size=8))
    with pytest.raises(torch.OutOfMemoryError):
        one.step(items(8), Full(one.plain, most=3), weight)


def test_one_item_too_much_is_told() -> None:
    one = trainee(steps=StepOptions(micro_batch_size=2, dynamic_batch_size=True))
    with pytest.raises(torch.OutOfMemoryError):
        one.step(items(8), Full(one.plain, most=0), weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns_with_weights_in_float32(dtype: str) -> None:
    one = trainee(amp_dtype=dtype)
    losses = [one.step(items(8), loss_of(one.module), weight).loss for _ in range(8)]
    assert losses[0] is not None and losses[-1] is not None and losses[-1] < 0.8 * losses[0]
    assert all(each.dtype == torch.float32 for each in one.plain.parameters())


def test_float16_that_overflows_lowers_its_scale_and_goes_on() -> None:
    one = trainee(amp_dtype="float16")
    scale = one.scaler.get_scale()
    figures = one.step(items(8), lambda batch: loss_of(one.module)(batch) * 1e34, weight)
    assert figures.skipped and figures.grad_norm is None and one.scaler.get_scale() == scale / 2


def test_frozen_weights_stay_and_nothing_to_train_is_refused() -> None:
    module = net()
    module.layers.requires_grad_(False)
    one = trainee(module)
    assert set(one.weights) == {"head.weight", "head.bias"}
    module.requires_grad_(False)
    with pytest.raises(UsageError, match="no weight that is to be trained"):
        trainee(module)


def test_strategies_that_do_not_go_with_the_world_are_refused() -> None:
    with pytest.raises(UsageError, match="strategy fsdp in one process"):
        trainee(steps=StepOptions(strategy=Strategy.FSDP))
    with pytest.raises(UsageError, match="4 processes with strategy single"):
        trainee(world=DistEnv(0, 4, 0, "cpu", "gloo"))
    with pytest.raises(UsageError, match="gradient_checkpointing: Net"):
        trainee(steps=StepOptions(gradient_checkpointing=True))


def test_the_layers_of_a_transformer_are_found() -> None:
    module = net()
    assert transformer_layers(module) == list(module.layers)
    assert transformer_layers(nn.Sequential(nn.Linear(2, 2))) == []


def test_sgd_is_plain() -> None:
    one = trainee(optimiser=OptimiserOptions(0.1, optimizer="sgd", max_grad_norm=None))  # type: ignore[arg-type]
    before = {name: each.detach().clone() for name, each in one.plain.named_parameters()}
    batch = items(4)
    (loss_of(one.plain)(batch) / weight(batch)).backward()
    wanted = {name: before[name] - 0.1 * each.grad for name, each in one.plain.named_parameters()}
    one.step(batch, loss_of(one.module), weight)
    assert all(torch.allclose(each, wanted[name], atol=1e-7) for name, each in one.plain.named_parameters())


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_cuts_keep_all_in_order_and_even(items: list[int], pieces: int) -> None:
    cut = cuts(items, pieces)
    assert [each for piece in cut for each in piece] == items
    assert len(cut) == pieces and max(map(len, cut)) - min(map(len, cut)) <= 1


@given(st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(any), st.integers(1, 8))
def test_processes_that_go_together_do_equally_many_passes(counts: list[int], size: int) -> None:
    most = max(pieces_needed(count, size) for count in counts)
    for count in counts:
        done = passes(list(range(count)), size, most, -1, together=True)
        assert len(done) == most and [each.last for each in done] == [False] * (most - 1) + [True]
        assert [item for each in done if each.counts for item in each.items] == list(range(count))
        assert all(0 < len(each.items) <= size for each in done)


@given(st.integers(0, 30), st.integers(1, 8))
def test_a_process_on_its_own_ends_with_a_pass_for_the_others(count: int, size: int) -> None:
    done = passes(list(range(count)), size, 99, -1, together=False)
    assert [each.last for each in done] == [False] * (len(done) - 1) + [True]
    assert not done[-1].counts and [item for each in done[:-1] for item in each.items] == list(range(count))


def test_one_process_does_its_own_passes_alone() -> None:
    assert [list(each.items) for each in passes("abc", 2, 2, None, together=True)] == [["a", "b"], ["c"]]


def test_the_size_is_halved_and_grows_back() -> None:
    smaller = MicroBatch.of(8).halved(items=100)
    assert smaller is not None and (smaller.size, smaller.halvings) == (4, 1)
    for _ in range(19):
        smaller = smaller.after_step()
    assert smaller.size == 4
    assert smaller.after_step().size == 8


def test_a_size_that_never_fits_is_tried_ever_more_seldom() -> None:
    grown = MicroBatch(8, 8, grown=True).halved(8)
    assert grown is not None and grown.patience == 40


def test_one_item_can_not_be_halved() -> None:
    assert MicroBatch.of(8).halved(items=1) is None
    assert MicroBatch(8, 1).halved(items=5) is None
    halved = MicroBatch.of(64).halved(items=6)
    assert halved is not None and halved.size == 3


def test_whole_weights_of_a_sharded_module_lie_on_the_disk(tmp_path: Path) -> None:
    """In files without a name, as they are; where they can't, that is said once all processes have done their part."""
    with lonely_group():
        one = trainee(net(), world=DistEnv(0, 1, 0, "cpu", "gloo"), steps=StepOptions(strategy=Strategy.FSDP))
        trained(one, range(2))
        in_memory, on_disk = one.full_state(), one.full_state(spill=tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []
        assert in_memory.keys() == on_disk.keys() and len(in_memory) == 9
        assert all(torch.equal(each, on_disk[name]) for name, each in in_memory.items())
        assert one.full_state(lambda name: name == "head.bias", spill=tmp_path).keys() == {"head.bias"}
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            one.full_state(spill=tmp_path / "file")
