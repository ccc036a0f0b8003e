"""Losses and gradients of SFT, DPO, RPO and reward models equal those made by hand in float64, token by token;
micro-batches change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.preference import by_hand
from tests.posttrain.preference.vowels import comparisons, episodes, training

from gpuherd.posttrain.algos.dpo import DPO, Preferring, row_of
from gpuherd.posttrain.algos.sft import SFT, Imitated, Imitation, Weights
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.options import StepOptions
from gpuherd.posttrain.preference.reward_model import RewardTraining, train_reward_model

ONE_STEP: dict[str, Any] = {"lr": 1.0, "grad_clip": None, "optimizer": "sgd", "max_steps": 1}
STEPS = StepOptions(micro_batch_size=8)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def gradients_of(before: Path, after: Path) -> dict[str, torch.Tensor]:
    """What one step of plain gradient descent with learning rate 1 has taken off the weights."""
    from safetensors.torch import load_file

    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return {name: old[name].double() - new[name].double() for name in old}


def assert_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Alike but for the rounding of float32 weights."""
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=3e-6)


@pytest.fixture(scope="module")
def reference(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy a little changed: DPO's margin is not 0 then."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("reference")
    model = AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy_model).save_pretrained(folder)
    return folder


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({"beta": 0.5}, marks=SLOW, id="sigmoid"),
        pytest.param({"beta": 0.5, "label_smoothing": 0.2}, marks=SLOW, id="smoothed"),
        pytest.param({"beta": 0.5, "loss_type": "hinge"}, marks=SLOW, id="hinge"),
        pytest.param({"beta": 0.5, "loss_type": "ipo"}, marks=SLOW, id="ipo"),
        pytest.param({"beta": 0.5, "rpo_weight": 0.7, "label_smoothing": 0.1}, id="rpo"),
        pytest.param({"beta": 0.5, "rpo_weight": 0.7, "loss_type": "ipo"}, marks=SLOW, id="rpo of ipo"),
        pytest.param({"beta": 0.5, "reference_free": True}, marks=SLOW, id="without a reference"),
    ],
)
def test_dpo(words: dict[str, Any], policy_model: Path, reference: Path, tmp_path: Path) -> None:
    """In micro-batches; a completion may be empty."""
    rows = comparisons()
    rows[2], rows[5] = replace(rows[2], chosen_ids=()), replace(rows[5], rejected_ids=())
    options = DPO.Options(batch_size=len(rows), **ONE_STEP, **words)
    from gpuherd.posttrain.types import Policy

    work = training(
        policy_model, rows, tmp_path, reference=Policy(str(reference)), steps=StepOptions(micro_batch_size=2)
    )
    trained = DPO(options).train(work)
    other = None if options.reference_free else by_hand.doubled(reference)
    loss, wanted = by_hand.gradients(
        by_hand.doubled(policy_model), lambda model: by_hand.dpo(model, other, rows, options)
    )
    (logged,) = read_curves(tmp_path)
    assert logged["loss"] == pytest.approx(loss, rel=2e-5)
    assert_alike(gradients_of(policy_model, Path(trained.model)), wanted)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        pytest.param("behavioral_cloning", (1.0, 0.0), marks=SLOW),
        pytest.param("world_model", (0.0, 1.0), marks=SLOW),
        ("combined", (0.3, 2.0)),
    ],
)
def test_sft(mode: str, weights: tuple[float, float], policy_model: Path, tmp_path: Path) -> None:
    """Prompts are never trained on; with ``combined`` the two kinds have means of their own."""
    rows = episodes()
    words: dict[str, Any] = {"bc_weight": 0.3, "world_model_weight": 2.0} if mode == "combined" else {}
    learnt = [each for each in rows if mode != "world_model" or not all(each.by_policy)]
    options = SFT.Options(mode=Imitated(mode), batch_size=len(learnt), **ONE_STEP, **words)
    trained = SFT(options).train(training(policy_model, rows, tmp_path, steps=StepOptions(micro_batch_size=2)))
    loss, wanted = by_hand.gradients(by_hand.doubled(policy_model), lambda model: by_hand.sft(model, learnt, *weights))
    (logged,) = read_curves(tmp_path)
    assert logged["loss"] == pytest.approx(loss, rel=2e-5)
    assert_alike(gradients_of(policy_model, Path(trained.model)), wanted)


@SLOW
def test_a_reward_model(value_model: Path, tmp_path: Path) -> None:
    rows = comparisons()
    start = RewardTraining(batch_size=8, max_steps=1, lr=1e-30)  # a step that changes nothing: the head is random
    first = train_reward_model(rows, str(value_model), tmp_path / "first", start)
    options = RewardTraining(batch_size=8, max_steps=1, lr=1e-3, grad_clip=None)
    second = train_reward_model(rows, str(first), tmp_path / "second", options, steps=STEPS)
    kind = "AutoModelForSequenceClassification"
    loss, wanted = by_hand.gradients(by_hand.doubled(first, kind), lambda model: by_hand.bradley_terry(model, rows))
    (logged,) = read_curves(tmp_path / "second")
    assert logged["loss"] == pytest.approx(loss, rel=2e-5)
    found = gradients_of(first, second)  # AdamW's first step goes by its rate along the sign of each gradient
    for name, gradient in wanted.items():
        counts = gradient.abs() > 1e-5
        torch.testing.assert_close(found[name][counts], 1e-3 * gradient[counts].sign(), rtol=0.01, atol=1e-6)


@pytest.mark.slow
def test_micro_batches_change_nothing(policy_model: Path, reference: Path, tmp_path: Path) -> None:
    """Three steps of 4 of 8 rows, at once and one by one."""
    from gpuherd.posttrain.types import Policy

    for algorithm, rows in (
        (DPO(DPO.Options(batch_size=4, max_steps=3, lr=1e-2, epochs=2, rpo_weight=1.0)), comparisons()),
        (SFT(SFT.Options(batch_size=4, max_steps=3, lr=1e-2, epochs=4, mode=Imitated.COMBINED)), episodes()),
    ):
        losses = []
        for size in (1, 4):
            folder = tmp_path / f"{algorithm.name}-{size}"
            steps = StepOptions(micro_batch_size=size)
            work = training(policy_model, rows, folder, reference=Policy(str(reference)), steps=steps)
            algorithm.train(work)
            losses.append([line["loss"] for line in read_curves(folder)])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_items_have_our_tokens_and_the_weights_of_their_step() -> None:
    """Token for token what was handed over; the weights of a kind add up to the rows, whatever their lengths."""
    rows = episodes()
    items = Imitation(Weights(0.3, 2.0), "cpu").items(rows)
    of_kind = {True: 0.0, False: 0.0}
    for each, item in zip(rows, items, strict=True):
        before = len(each.prompt_ids)
        assert item.ids == (*each.prompt_ids, *each.ids)
        assert item.weights[:before] == (0.0,) * before
        for own, weight in zip(each.by_policy, item.weights[before:], strict=True):
            of_kind[own] += weight
    assert of_kind[True] == pytest.approx(0.3 * len(rows))
    assert of_kind[False] == pytest.approx(2.0 * len(rows))
    pairs = [row_of(each) for each in comparisons()]
    found = Preferring(DPO.Options(rpo_weight=0.5), None, "cpu").items(pairs)
    assert [(each.before, each.chosen, each.rejected) for each in found] == [
        (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in pairs
    ]
    tokens = sum(len(row["chosen_ids"]) for row in pairs)
    assert {each.rpo_weight for each in found} == {0.5 * len(pairs) / tokens}
