"""Training of classifiers: its batches are fixed, it goes on exactly, and it refuses what it can't read."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain import tiny
from tests.posttrain.guidance.letters import training
from tests.posttrain.guidance.rows import comparison, rollout

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Kind, read_form
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.options import Optimizer, Stopped, Watching, hooks_of
from gpuherd.posttrain.guidance.data import Example, LabelledSequence, of_comparisons, of_rollouts
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.guidance.training import planned, train_guide
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Policy, Rollout


def example(*lengths: int) -> Example:
    return tuple(LabelledSequence("p", (1,) * length, (True,) * length, 1.0) for length in lengths)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), max_size=60),
    st.integers(1, 9),
    st.integers(1, 200),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_each_lesson_once_an_epoch_within_both_bounds(
    lengths: list[list[int]], rows: int, most: int, epochs: int, seed: int
) -> None:
    examples = [example(*each) for each in lengths]
    batches = planned(examples, rows=rows, most_tokens=most, epochs=epochs, seed=seed)
    assert batches == planned(examples, rows=rows, most_tokens=most, epochs=epochs, seed=seed)
    assert len(batches) == epochs
    for epoch in batches:
        assert sorted(place for batch in epoch for place in batch) == list(range(len(examples)))
    for batch in (batch for epoch in batches for batch in epoch):
        assert 1 <= len(batch) <= rows
        widest = max(max(lengths[place]) for place in batch)
        sequences = sum(len(lengths[place]) for place in batch)
        assert widest * sequences <= most or len(batch) == 1


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    examples = [example(5)] * 32
    batches = planned(examples, rows=4, most_tokens=100, epochs=2, seed=0)
    assert batches[0] != batches[1]
    assert batches != planned(examples, rows=4, most_tokens=100, epochs=2, seed=1)


def test_batches_of_like_lengths_are_still_mixed() -> None:
    examples = [example(length) for length in range(1, 65)]
    (batches,) = planned(examples, rows=4, most_tokens=10_000, epochs=1, seed=0)
    waste = sum(max(batch) - place for batch in batches for place in batch)
    assert waste <= 64 * 2  # a window holds all of them: batches are neighbours
    assert batches != sorted(batches)


def test_bounds_that_hold_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="max_batch_num_tokens=0"):
        planned([], rows=1, most_tokens=0, epochs=1, seed=0)


OPTIONS = ValueOptions(
    epochs=4, batch_size=4, max_batch_num_tokens=40, lr=1e-2, weight_decay=0.1, save_every=2, validation_share=0.3
)


def rollouts(count: int = 24) -> list[Rollout]:
    """Answers of several lengths; right are those that begin with 3."""
    return [
        rollout(
            f"p{number % 6}",
            (3, 4),
            ((number // 6) % 3 + 3,) + (5,) * (number % 4),
            reward=float((number // 6) % 3 == 0),
            correct=(number // 6) % 3 == 0,
        )
        for number in range(count)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for name in ("model.safetensors", "value_head.safetensors"):
        found |= load_file(folder / "model" / name)
    return found


@contextmanager
def stopped_at_checkpoint(folder: Path, step: int) -> Iterator[None]:
    """Raises KeyboardInterrupt wherever the block is soon after the checkpoint of this step or a later one."""

    def stop(number: int, frame: Any) -> None:
        if any(int(each.name[5:]) >= step for each in (folder / "checkpoints").glob("step-*")):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.007, 0.007)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)  # it may have been on its way out of a block without gradients


@pytest.mark.slow
def test_a_training_that_is_interrupted_anywhere_goes_on_exactly(reference: Path, small: Path, tmp_path: Path) -> None:
    data = of_rollouts([rollouts()], OPTIONS)
    whole = train_guide(data, training(reference, small, tmp_path / "whole", []), OPTIONS)
    pieces = training(reference, small, tmp_path / "pieces", [])
    for step in (2, 6):
        with pytest.raises(KeyboardInterrupt), stopped_at_checkpoint(pieces.folder, step):
            train_guide(data, pieces, OPTIONS)
    assert not (pieces.folder / "model").exists()
    policy = train_guide(data, pieces, OPTIONS)
    assert policy.guide is not None and whole.guide is not None
    assert policy.guide.classifier == str(tmp_path / "pieces" / "model")
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "pieces")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_curves(tmp_path / "pieces") == read_curves(tmp_path / "whole")
    (tmp_path / "pieces" / "checkpoints").mkdir()  # as of a kill behind the classifier's last file
    assert train_guide(data, pieces, OPTIONS) == policy
    assert not (tmp_path / "pieces" / "checkpoints").exists()


def test_a_training_that_is_asked_to_stop_keeps_a_checkpoint_and_goes_on_exactly(
    reference: Path, small: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, epochs=2)
    data = of_rollouts([rollouts()], options)
    whole = training(reference, small, tmp_path / "whole", [])
    train_guide(data, whole, options)
    asked = iter([False, False, True])
    hooks = Hooks(save_every=1, keep=1, log_every=2, stopping=lambda: next(asked))
    pieces = replace(whole, folder=tmp_path / "pieces", extra={"hooks": hooks})
    with pytest.raises(Stopped, match=r"stopped after step 3 of \d+; the same command goes on"):
        train_guide(data, pieces, options)
    assert [each.name for each in (pieces.folder / "checkpoints").iterdir()] == ["step-00000003"]
    assert [each["step"] for each in read_curves(pieces.folder)] == [2]
    train_guide(data, replace(pieces, extra={}), options)
    one, other = weights(whole.folder), weights(pieces.folder)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_curves(pieces.folder)[1:] == read_curves(whole.folder)[3:]


def test_what_was_trained_is_said_and_not_trained_again(reference: Path, small: Path, tmp_path: Path) -> None:
    data = of_rollouts([rollouts()], OPTIONS)
    work = training(reference, small, tmp_path, [])
    policy = train_guide(data, work, OPTIONS)
    form = read_form(tmp_path / "model")
    assert form.loss == "bce"
    assert form.trained["learnt_from"] == len(data.examples)
    before = (tmp_path / "model" / "classifier.json").stat()
    assert train_guide(data, work, OPTIONS) == policy
    assert (tmp_path / "model" / "classifier.json").stat() == before
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(UsageError, match=r"another training: its lr is 0\.01, here it is 0\.02"):
        train_guide(data, work, replace(OPTIONS, lr=0.02))
    with pytest.raises(UsageError, match=r"another training: its optimizer is None, here it is \['sgd', "):
        train_guide(data, work, replace(OPTIONS, optimizer=Optimizer.SGD))
    with pytest.raises(UsageError, match=r"its amp_dtype is None, here it is 'bfloat16'"):
        train_guide(data, replace(work, precision=replace(work.precision, amp_dtype="bfloat16")), OPTIONS)
    lines = read_curves(tmp_path)
    assert [each["step"] for each in lines] == list(range(1, len(lines) + 1))
    assert sum("validation_loss" in each for each in lines) == OPTIONS.epochs


def test_micro_batches_change_nothing_but_rounding(reference: Path, small: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=1, validation_share=0.0)
    data = of_rollouts([rollouts()], options)
    train_guide(data, training(reference, small, tmp_path / "whole", []), options)
    train_guide(data, training(reference, small, tmp_path / "micro", [], micro=1), options)
    one, other = (read_curves(tmp_path / name) for name in ("whole", "micro"))
    assert [each["value_loss"] for each in one] == pytest.approx([each["value_loss"] for each in other], abs=1e-4)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (Loss.MLE, Kind.Q),
        pytest.param(Loss.BCE, Kind.Q, marks=pytest.mark.slow),
        pytest.param(Loss.MSE, Kind.V, marks=pytest.mark.slow),
        pytest.param(Loss.MLE, Kind.V, marks=pytest.mark.slow),
    ],
)
def test_each_loss_and_kind_learns(loss: Loss, kind: Kind, reference: Path, small: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, loss_type=loss, classifier_type=kind, num_atoms=3, validation_share=0.0, epochs=4)
    data = of_rollouts([rollouts()], options)
    policy = train_guide(data, training(reference, small, tmp_path, []), options)
    lines = read_curves(tmp_path)
    assert lines[-1]["value_loss"] < 0.6 * lines[0]["value_loss"]
    form = read_form(tmp_path / "model")
    assert (form.kind, form.atoms) == (kind, (0.0, 0.5, 1.0) if loss is Loss.MLE else ())
    assert policy.guide is not None
    assert policy.guide.mode == ("distributional" if loss is Loss.MLE else "bernoulli")


@pytest.mark.slow
def test_bradley_terry_puts_comparisons_in_order(reference: Path, small: Path, tmp_path: Path) -> None:
    rows = [replace(comparison(f"p{number}", (3,), (4, 5), (5,)), prompt_ids=(3,)) for number in range(12)]
    options = replace(OPTIONS, loss_type=Loss.BRADLEY_TERRY)
    data = of_comparisons([rows], options)
    assert data.held_out
    train_guide(data, training(reference, small, tmp_path, []), options)
    checked = [each for each in read_curves(tmp_path) if "validation_pair_accuracy" in each]
    assert checked[-1]["validation_pair_accuracy"] == 1.0
    assert checked[-1]["validation_loss"] < 0.5


def test_a_warm_start_goes_on_with_the_classifier_before(reference: Path, small: Path, tmp_path: Path) -> None:
    data = of_rollouts([rollouts()], OPTIONS)
    first = train_guide(data, training(reference, small, tmp_path / "0", []), OPTIONS)
    losses = {}
    for warm in (True, False):
        work = training(reference, small, tmp_path / f"1{warm}", [], policy=first, number=1)
        train_guide(data, work, replace(OPTIONS, warm_start=warm, epochs=1))
        losses[warm] = read_curves(work.folder)[0]["value_loss"]
    assert losses[False] == pytest.approx(0.6931, abs=1e-3)  # a head of 0
    assert losses[True] < 0.5
    with pytest.raises(UsageError, match=r"is of type v, and classifier_type is q; set warm_start=false"):
        other = replace(OPTIONS, warm_start=True, classifier_type=Kind.Q)
        train_guide(data, training(reference, small, tmp_path / "q", [], policy=first, number=1), other)
    atoms = replace(OPTIONS, warm_start=True, loss_type=Loss.MLE)
    with pytest.raises(UsageError, match="warm_start=false"):
        train_guide(
            of_rollouts([rollouts()], atoms),
            training(reference, small, tmp_path / "2", [], policy=first, number=1),
            atoms,
        )


def test_a_checkpoint_of_another_data_is_refused(reference: Path, small: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=50)
    with pytest.raises(KeyboardInterrupt), stopped_at_checkpoint(tmp_path, 2):
        train_guide(of_rollouts([rollouts()], options), training(reference, small, tmp_path, []), options)
    assert list((tmp_path / "checkpoints").glob("step-*/checkpoint.json"))
    with pytest.raises(UsageError, match=r"another training: its (data|steps)"):
        train_guide(of_rollouts([rollouts(18)], options), training(reference, small, tmp_path, []), options)


def test_models_that_do_not_fit_are_refused(reference: Path, small: Path, tmp_path: Path) -> None:
    data = of_rollouts([rollouts()], OPTIONS)
    other = tiny.tiny_llama(tmp_path / "other", characters="abd")
    with pytest.raises(UsageError, match=r"other tokenizers: id 5 is 'c'.*'d'"):
        train_guide(data, training(reference, other, tmp_path / "a", []), OPTIONS)
    with pytest.raises(UsageError, match="takes a value model"):
        train_guide(data, training(reference, None, tmp_path / "b", []), OPTIONS)
    short = tiny.tiny_llama(tmp_path / "short", characters="abc", positions=4)
    with pytest.raises(UsageError, match="reads 4 tokens, and a prompt with its completion has 6"):
        train_guide(data, training(reference, short, tmp_path / "c", []), OPTIONS)
    strange = of_rollouts([[replace(each, prompt_ids=(3, 6)) for each in rollouts()]], OPTIONS)
    with pytest.raises(UsageError, match="knows token ids below 6, and there is 6"):
        train_guide(strange, training(reference, small, tmp_path / "d", []), OPTIONS)
    assert not any((tmp_path / name / "model").exists() for name in "abcd")


def test_an_unfinished_training_has_no_policy(reference: Path, small: Path, tmp_path: Path) -> None:
    from gpuherd.errors import GpuherdError
    from gpuherd.posttrain.guidance.training import guided_policy

    with pytest.raises(GpuherdError, match="not finished"):
        guided_policy(training(reference, small, tmp_path, []), OPTIONS)


def test_the_form_says_how_it_was_trained_in_plain_json(reference: Path, small: Path, tmp_path: Path) -> None:
    rows = [replace(each, correct=None, reward=float(len(each.ids))) for each in rollouts()]
    options = replace(OPTIONS, loss_type=None, epochs=1)
    data = of_rollouts([rows], options)
    policy = train_guide(data, training(reference, small, tmp_path, []), options)
    told = json.loads((tmp_path / "model" / "classifier.json").read_text())["trained"]
    assert told["scale"] == {"low": 1.0, "high": 4.0, "v_min": 0.0, "v_max": 1.0, "known_from": "data"}
    assert policy == Policy(str(reference), guide=policy.guide)


def test_hooks_come_through_and_without_them_the_options_say_how_often(tmp_path: Path) -> None:
    work = training("m", "v", tmp_path, [])
    assert hooks_of(work, Watching(7)) == Watching(7)

    def stopping() -> bool:
        return False

    hooks = Hooks(
        save_every=3, keep=1, log_every=2, report_to=("tensorboard",), run_name="n", project="p", stopping=stopping
    )
    asked = replace(work, extra={"hooks": hooks})
    assert hooks_of(asked, Watching(7)) == hooks
    unsaid = replace(asked, extra={"hooks": replace(hooks, save_every=None)})
    assert hooks_of(unsaid, Watching(7)) == replace(hooks, save_every=7)
    assert [Watching(2).saves(step) for step in (1, 2)] == [False, True] and Watching().saves(10)
