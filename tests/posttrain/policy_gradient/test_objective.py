"""The losses of GRPO, PPO and REINFORCE on a model, and their gradients, equal those of plain loops in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.policy_gradient.rollouts import MIXED, rollout
from torch import Tensor

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine import log_probs
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.policy_gradient.algorithm import LossType
from gpuherd.posttrain.policy_gradient.forward import batch_of, forward
from gpuherd.posttrain.policy_gradient.objective import Item, Objective
from gpuherd.posttrain.policy_gradient.policy import ValuedPolicy
from gpuherd.posttrain.rollout.mismatch import Correction, MismatchMeter

TEMPERATURE = 0.8


@pytest.fixture
def model(policy_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.float64)


def told(item: Item, module: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Log-probs, entropies and values of a rollout's tokens, one token after the other, nothing padded."""
    log_probs, entropies, values = [], [], []
    whole = [*item.rollout.prompt_ids, *item.rollout.ids]
    made = module(input_ids=torch.tensor([whole]))
    logits, guesses = made if isinstance(made, tuple) else (made.logits, None)
    for place, token in enumerate(item.rollout.ids):
        row = logits[0, len(item.rollout.prompt_ids) + place - 1] / TEMPERATURE
        law = row.exp() / row.exp().sum()
        log_probs.append(law[token].log())
        entropies.append(-(law * law.log()).sum())
        values.append(None if guesses is None else guesses[0, len(item.rollout.prompt_ids) + place - 1])
    return log_probs, entropies, values


def by_hand(how: Objective, items: Sequence[Item], module: Any) -> Tensor:
    """The loss as its formula says it."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for item in items:
        log_probs, entropies, values = told(item, module)
        losses = []
        gaps = [
            now - (now.detach() if item.old is None else before)
            for place, now in enumerate(log_probs)
            if item.rollout.by_policy[place]
            for before in [now.detach() if item.old is None else item.old[place]]
            if before is not None
        ]
        for place, chosen in enumerate(item.rollout.by_policy):
            old = None if item.old is None else item.old[place]
            if not chosen or (item.old is not None and old is None):
                continue
            now, advantage = log_probs[place], item.advantages[place]
            ratio = (now - (now.detach() if old is None else old)).exp()
            if how.loss_type == LossType.GSPO:
                ratio = (torch.stack(gaps).sum() / len(gaps)).exp()
            if how.clip is None:
                loss = -advantage * now
            else:
                low, high = 1 - how.clip[0], 1 + how.clip[1]
                loss = -min(ratio * advantage, ratio.clamp(low, high) * advantage)
                if how.clip_most is not None and advantage < 0:
                    loss = min(loss, torch.tensor(-how.clip_most * advantage, dtype=torch.float64))
            if how.kl_coef:
                gap = item.reference[place] - now
                loss = loss + how.kl_coef * (gap.exp() - gap - 1) * (ratio if how.kl_correction else 1)
            loss = loss - how.entropy_coef * entropies[place]
            value = values[place]
            if how.value_coef and value is not None:
                before, wanted = item.old_values[place], item.returns[place]
                assert how.value_clip is not None
                held = before + (value - before).clamp(-how.value_clip, how.value_clip)
                loss = loss + how.value_coef * 0.5 * max((value - wanted) ** 2, (held - wanted) ** 2)
            losses.append(loss)
        if losses:
            added = torch.stack(losses).sum()
            total = total + (added / len(losses) if how.loss_type in (LossType.GRPO, LossType.GSPO) else added)
        each_has = {LossType.DAPO: len(losses), LossType.DR_GRPO: how.most_tokens}
        weight += each_has.get(how.loss_type, 1)
    return total / weight


def items(module: Any, *, valued: bool = False) -> list[Item]:
    """The mixed rollouts with advantages of both signs, near and far from the policy that drew them."""
    drawn = torch.Generator().manual_seed(1)

    def numbers(near: Sequence[float], spread: float) -> list[float]:
        # What float32 holds exactly, as the objective gets it.
        noise = torch.randn(len(near), generator=drawn) * spread
        return [float(each) for each in (torch.tensor(list(near)) + noise).float()]

    found = []
    for number, each in enumerate(MIXED):
        with torch.no_grad():
            log_probs = [float(value) for value in told(Item(each, ()), module)[0]]
        zeros = [0.0] * len(each.ids)
        advantages = [float(torch.tensor((-1.0) ** number * (0.5 + number)))] * len(each.ids)
        old: list[float | None] = [*numbers(log_probs, 0.3)]
        if number == 0:
            old[1] = None  # what had no finite log-prob is not learnt from
        reference = numbers(log_probs, 0.5)
        found.append(
            Item(each, advantages, old, reference, numbers(zeros, 1.0), numbers(zeros, 1.0))
            if valued
            else Item(each, advantages, old, reference)
        )
    return found


def gradients(loss: Tensor, module: Any) -> Iterator[tuple[str, Tensor]]:
    module.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            yield name, weight.grad.clone()


def check(how: Objective, some: Sequence[Item]) -> None:
    ours = how.loss(some).total / how.weight(some)
    hand = by_hand(how, some, how.module)
    assert float(ours.detach()) == pytest.approx(float(hand.detach()), rel=1e-6)
    wanted = dict(gradients(hand, how.module))
    found = dict(gradients(ours, how.module))
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert largest > 1e-3
    for name, each in found.items():
        assert float((each - wanted[name]).abs().max()) < 1e-6 * largest, name


@pytest.mark.parametrize("kind", list(LossType))
def test_the_loss_of_grpo_and_its_gradient(model: Any, kind: LossType) -> None:
    how = Objective(model, "cpu", TEMPERATURE, kind, 7, (0.2, 0.28), kl_coef=0.05, entropy_coef=0.01)
    check(how, items(model))
    check(replace(how, kl_correction=True), items(model))
    far = [replace(each, old=[None if old is None else old - 0.5 for old in each.old or ()]) for each in items(model)]
    check(replace(how, clip_most=1.4), far)
    bounded, free = (float(each.loss(far).total.detach()) for each in (replace(how, clip_most=1.4), how))
    assert bounded < free


def test_the_loss_of_reinforce_and_its_gradient(model: Any) -> None:
    some = [Item(each, [0.5 - number] * len(each.ids)) for number, each in enumerate(MIXED)]
    check(Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, None), some)


def test_the_loss_of_ppo_and_its_gradient(model: Any) -> None:
    valued = ValuedPolicy(model)
    torch.manual_seed(2)
    torch.nn.init.normal_(valued.value_head.weight)
    valued.value_head.double()
    how = Objective(
        valued, "cpu", TEMPERATURE, LossType.DAPO, 7, (0.2, 0.2), entropy_coef=0.02, value_coef=0.5, value_clip=0.3
    )
    check(how, items(valued, valued=True))


def test_micro_batches_make_the_same_sum(model: Any) -> None:
    some = items(model)
    for kind in LossType:
        how = Objective(model, "cpu", TEMPERATURE, kind, 7, (0.2, 0.2), kl_coef=0.1)
        apart = math.fsum(float(how.loss([each]).total.detach()) for each in some)
        assert apart == pytest.approx(float(how.loss(some).total.detach()), rel=1e-9)
        assert math.fsum(how.weight([each]) for each in some) == how.weight(some)


def test_figures_are_means_over_the_tokens_that_count(model: Any) -> None:
    some = items(model)
    how = Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, (0.2, 0.2), kl_coef=0.1)
    parts = [how.loss(some[:1]).figures, how.loss(some[1:]).figures]
    figures = {name: sum(float(each[name][0]) for each in parts) for name in parts[0]}
    tokens = sum(float(each["entropy"][1]) for each in parts)

    rows = [(item, told(item, model)) for item in some]
    entropies = [
        float(entropies[place].detach())
        for item, (_, entropies, _) in rows
        for place, counts in enumerate(item.counts)
        if counts
    ]
    assert tokens == len(entropies)
    assert figures["entropy"] == pytest.approx(math.fsum(entropies), rel=1e-6)
    assert figures.keys() == {"entropy", "approx_kl", "clipped", "kl"}
    assert 0 < figures["clipped"] < tokens and figures["approx_kl"] > 0 and figures["kl"] > 0


def test_a_pass_is_that_over_whole_logits(policy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To float32 rounding, with the logits of a few positions at a time, and with all of them kept."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.float32)
    batch = batch_of(MIXED, "cpu")

    def slopes(log_probs: Tensor, entropies: Tensor) -> dict[str, Tensor]:
        kept = batch.by_policy
        return dict(gradients((log_probs[kept].exp() - 0.1 * entropies[kept]).sum(), module))

    logits = module(**log_probs.model_inputs(module, batch.ids, batch.mask)).logits
    laws = torch.log_softmax(logits[:, -batch.answers.shape[1] - 1 : -1] / TEMPERATURE, dim=-1)
    whole = laws.gather(2, batch.answers[..., None])[..., 0], -(laws.exp() * laws).sum(dim=-1)
    wanted = slopes(*whole)
    vocabulary = laws.shape[-1]
    for positions in (3, 1000):
        monkeypatch.setattr(log_probs, "CHUNK_NUMBERS", positions * vocabulary)
        made = forward(module, batch, TEMPERATURE, batch.by_policy, entropy_gradient=True)
        for mine, theirs in zip((made.log_probs, made.entropies), whole, strict=True):
            assert torch.allclose(mine[batch.by_policy], theirs[batch.by_policy], rtol=1e-5, atol=1e-6)
            assert not mine[~batch.by_policy].any()
        found = slopes(made.log_probs, made.entropies)
        assert found.keys() == wanted.keys()
        for name, each in found.items():
            assert torch.allclose(each, wanted[name], rtol=1e-4, atol=1e-6), name


def test_what_is_impossible_for_the_reference_outside_of_the_mask_harms_nothing(model: Any) -> None:
    far = rollout((5, 6), (7, 8), by_policy=(True, False))
    item = Item(far, [1.0, 1.0], [-2.0, -1e9], [-2.0, 1e9])
    how = Objective(model, "cpu", 1.0, LossType.DAPO, 2, (0.2, 0.2), kl_coef=1.0)
    loss = how.loss([item, Item(MIXED[0], [1.0] * 4)]).total
    assert math.isfinite(float(loss.detach()))
    assert all(bool(each.isfinite().all()) for _, each in gradients(loss, model))


def test_a_value_loss_is_for_a_policy_with_a_value_head(model: Any) -> None:
    how = Objective(model, "cpu", 1.0, LossType.DAPO, 2, (0.2, 0.2), value_coef=0.5)
    with pytest.raises(UsageError, match="value head"):
        how.loss([Item(MIXED[0], [1.0] * 4)])


# ---- a sampler whose log-probs are off


def sampled(module: Any, shifts: Sequence[float], some: Sequence[Item]) -> list[Item]:
    """The same items, drawn by a sampler that gives each token of an answer ``e^-shift`` of its probability."""
    found = []
    for item, shift in zip(some, shifts, strict=True):
        with torch.no_grad():
            log_probs = [float(value) - shift for value in told(item, module)[0]]
        found.append(replace(item, rollout=replace(item.rollout, log_probs=tuple(log_probs))))
    return found


SHIFTS = (0.3, -0.4, 0.6, 1.0)  # w of each answer's tokens is e^shift; of these 4, 1, 3 and 2 are the policy's
CORRECTED = {
    Correction.NONE: (1.0, 1.0, 1.0, 1.0),
    Correction.TOKEN: (math.exp(0.3), math.exp(-0.4), math.exp(0.6), 2.0),
    Correction.MASKED_TOKEN: (math.exp(0.3), math.exp(-0.4), math.exp(0.6), 0.0),
    Correction.SEQUENCE: (2.0, math.exp(-0.4), 2.0, 2.0),  # of the products e^1.2, e^-.4, e^1.8 and e^2
    Correction.MASKED_SEQUENCE: (0.0, math.exp(-0.4), 0.0, 0.0),
}


@pytest.mark.parametrize("correction", list(Correction))
def test_the_loss_of_each_token_is_weighed_by_trainer_over_sampler(model: Any, correction: Correction) -> None:
    plain = Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, None, entropy_coef=0.01)
    some = sampled(model, SHIFTS, [Item(each, [0.5 - number] * len(each.ids)) for number, each in enumerate(MIXED)])
    how = replace(plain, correction=correction)
    factors = CORRECTED[correction]

    apart = [factor * plain.loss([each]).total for factor, each in zip(factors, some, strict=True)]
    wanted = dict(gradients(torch.stack(apart).sum(), model))
    loss = how.loss(some).total
    assert float(loss.detach()) == pytest.approx(sum(float(each.detach()) for each in apart), rel=1e-6)
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert largest > 1e-3
    for name, each in gradients(loss, model):
        assert float((each - wanted[name]).abs().max()) < 1e-6 * largest, name
    assert how.weight(some) == plain.weight(some)  # what is left out still counts in the divisor


def test_weights_of_one_change_nothing_to_the_bit(model: Any) -> None:
    some = [replace(each, rollout=replace(each.rollout, log_probs=tuple(each.old or ()))) for each in items(model)]
    plain = Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, (0.2, 0.2), kl_coef=0.05, entropy_coef=0.01)
    wanted = plain.loss(some).total
    expected = dict(gradients(wanted, model))
    for correction in Correction:
        meter = MismatchMeter(model)
        how = replace(plain, correction=correction, correction_cap=1.0, meter=meter)
        found = how.loss(some).total
        assert torch.equal(found, wanted)
        assert all(torch.equal(each, expected[name]) for name, each in gradients(found, model))
        assert meter.figures(DistEnv.single()) == {}


def test_figures_of_the_mismatch_are_of_the_tokens_as_they_are_first_seen(model: Any) -> None:
    some = sampled(model, SHIFTS, [Item(each, [1.0] * len(each.ids)) for each in MIXED])
    meter = MismatchMeter(model)
    how = Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, (0.2, 0.2), meter=meter)
    how.loss(some[:1])
    how.loss(some[1:])
    wanted = {
        "sampler_weight": (4 * math.exp(0.3) + math.exp(-0.4) + 3 * math.exp(0.6) + 2 * math.exp(1.0)) / 10,
        "sampler_weight_max": math.exp(1.0),
        "sampler_kl": -(4 * 0.3 - 0.4 + 3 * 0.6 + 2 * 1.0) / 10,
    }
    with torch.no_grad():
        model.lm_head.weight += 0.3 * torch.randn(model.lm_head.weight.shape, dtype=torch.float64)
    how.loss(some)  # a second pass: the policy has moved, and the figures are of before
    assert meter.figures(DistEnv.single()) == pytest.approx(wanted, rel=1e-5)
    how.loss(some)
    moved = meter.figures(DistEnv.single())
    assert moved["sampler_kl"] != pytest.approx(wanted["sampler_kl"], rel=1e-2)
    assert meter.figures(DistEnv.single()) == {}


def test_recorded_log_probs_are_not_taken_for_the_trainers(model: Any) -> None:
    """Of collected rows the old log-probs are the sampler's own: they say nothing of the mismatch."""
    some = sampled(model, SHIFTS, [Item(each, [1.0] * len(each.ids)) for each in MIXED])
    some = [replace(each, old=each.rollout.log_probs) for each in some]
    figures = []
    for recorded in (True, False):
        meter = MismatchMeter(model)
        how = Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, (0.2, 0.2), recorded=recorded, meter=meter)
        how.loss(some)
        figures.append(meter.figures(DistEnv.single()))
    assert figures[0]["sampler_weight_max"] == pytest.approx(math.e, rel=1e-5) and figures[1] == {}


def test_noise_of_dropout_is_not_taken_for_a_mismatch(model: Any) -> None:
    some = sampled(model, SHIFTS, [Item(each, [1.0] * len(each.ids)) for each in MIXED])
    model.add_module("drops", torch.nn.Dropout(0.1))
    meter = MismatchMeter(model)
    how = Objective(model, "cpu", TEMPERATURE, LossType.DAPO, 7, (0.2, 0.2), meter=meter)
    how.loss(some)
    assert meter.figures(DistEnv.single()) == {}
    how.loss([replace(each, old=[value + 0.5 for value in each.rollout.log_probs if value]) for each in some])
    assert meter.figures(DistEnv.single())["sampler_kl"] == pytest.approx(-0.5, abs=1e-6)  # asked for apart
