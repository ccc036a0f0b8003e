"""DAPO's parts of GRPO: groups of equal rewards are drawn again, overlong answers lose reward or are left out. And the
clip of GSPO, which is of another size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.algos.training_work import SAMPLING, curves, same, weights, work
from tests.posttrain.letters import Letters
from tests.posttrain.policy_gradient.rollouts import MIXED
from tests.posttrain.policy_gradient.test_several import run

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions, overlong
from gpuherd.posttrain.algos.rlcr import RLCR, RLCROptions
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks, LossType, plain_roll
from gpuherd.posttrain.policy_gradient.plan import plan_of
from gpuherd.posttrain.types import Problem, Rollout

DULL = GRPOOptions(lr=5e-3, kl_coef=0.01, epochs=2, batch_size=4, samples_per_prompt=4, max_resample_times=3)


def test_others_take_the_places_of_groups_with_equal_rewards(policy_model: Path, tmp_path: Path) -> None:
    """Half of the problems teach nothing, and there are as many others in the first step as that."""
    asked: list[tuple[str, list[Problem]]] = []
    task = Letters(dull=True)

    def roll(sampler: Any, problems: Any, samples: int, stream: str) -> list[Rollout]:
        asked.append((stream, list(problems)))
        return plain_roll(task, 32)(sampler, problems, samples, stream)

    GRPO(DULL).train(work(policy_model, tmp_path, problems=16, task=task, hooks=Hooks(roll=roll)))
    lines = curves(tmp_path)
    assert len(lines) == 8
    for step, line in enumerate(lines):
        of_step = [each for each in asked if each[0].startswith(f"round 0 step {step}")]
        assert [stream for stream, _ in of_step] == [
            f"round 0 step {step}{f' again {attempt}' if attempt else ''}" for attempt in range(len(of_step))
        ]
        drawn = [problem.id for _, problems in of_step for problem in problems]
        assert len(set(drawn)) == len(drawn)  # no problem twice, as long as there are others
        first, again = 4, len(drawn) - 4
        dull = sum(_is_dull(each) for each in of_step[0][1])
        assert line["constant_groups"] == dull / first
        assert line["resampled"] == again / first and again >= dull
        assert line["rollouts"] == len(drawn) * 4
        assert line["constant_left"] <= line["constant_groups"]
    assert sum(line["constant_left"] for line in lines) < sum(line["constant_groups"] for line in lines) / 2


def _is_dull(problem: Problem) -> bool:
    return int(problem.id.rpartition("-")[2]) % 2 == 0


def test_replacements_are_fixed_by_the_seed_and_the_unit_itself_where_there_is_no_other() -> None:
    plan = plan_of([2] * 6, batch_size=3, epochs=1, max_steps=None, minibatch_size=None, passes=1, seed="0 0")
    units = plan.units(0)
    found = plan.replacements(0, 1, units[:2], set(units))
    assert found == plan.replacements(0, 1, units[:2], set(units)) and not set(found) & set(units)
    orders = {tuple(plan.replacements(0, attempt, units, set(units))) for attempt in range(1, 20)}
    assert len(orders) > 1 and all(set(each) == set(range(6)) - set(units) for each in orders)
    rest = next(iter(set(range(6)) - set(units)))
    assert plan.replacements(0, 1, units, set(range(6)) - {rest}) == [rest, *units[1:]]


def test_what_always_earns_the_same_is_drawn_so_often_and_then_stays(policy_model: Path, tmp_path: Path) -> None:
    options = replace(DULL, epochs=1, max_resample_times=2, kl_coef=0.0)
    task = Letters(dull=True)
    dull = [Problem(f"train-{number}", "q:") for number in (0, 2, 4, 6)]
    GRPO(options).train(replace(work(policy_model, tmp_path, task=task), problems=dull))
    (line,) = curves(tmp_path)
    assert (line["constant_groups"], line["constant_left"], line["resampled"], line["rollouts"]) == (1, 1, 2, 48)
    assert same(tmp_path / "model", policy_model)


def test_it_goes_on_exactly_and_changes_nothing_where_no_group_is_equal(policy_model: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    told: dict[str, Any] = {"problems": 16, "task": Letters(dull=True)}
    GRPO(DULL).train(work(policy_model, straight, **told))
    stopping = iter([False, False, True]).__next__
    with pytest.raises(Stopped):
        GRPO(DULL).train(work(policy_model, broken, hooks=Hooks(stopping=stopping), **told))
    GRPO(DULL).train(work(policy_model, broken, **told))
    assert same(straight / "model", broken / "model") and curves(straight) == curves(broken)

    for name, tries in (("off", 0), ("on", 2)):
        GRPO(replace(DULL, max_resample_times=tries, max_steps=2)).train(work(policy_model, tmp_path / name))
    off, on = curves(tmp_path / "off"), curves(tmp_path / "on")
    assert all(line["constant_groups"] == 0 for line in off)  # else nothing is shown
    assert [{key: line[key] for key in off[0]} for line in on] == off
    assert same(tmp_path / "off/model", tmp_path / "on/model")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_draw_again_what_one_does(policy_model: Path, tmp_path: Path) -> None:
    options = {"lr": 5e-3, "kl_coef": 0.0, "batch_size": 3, "samples_per_prompt": 3, "eps": 1e-3}

    def told(name: str, strategy: str) -> dict[str, Any]:
        return {"algorithm": "GRPO", "options": {**options, "max_resample_times": 2}, "model": str(policy_model),
                "folder": str(tmp_path / name), "strategy": strategy, "stop_after": 0, "dull": True}  # fmt: skip

    run(1, [told("one", "single")])
    run(2, [told("ddp", "ddp"), told("fsdp", "fsdp")])
    one = curves(tmp_path / "one")
    assert sum(line["resampled"] for line in one) > 0
    for name in ("ddp", "fsdp"):
        for mine, theirs in zip(one, curves(tmp_path / name), strict=True):
            assert mine.keys() == theirs.keys()
            for figure, value in mine.items():
                if figure != "micro_batch":
                    assert theirs[figure] == pytest.approx(value, rel=1e-3, abs=1e-4), (name, figure)
        expected, found = weights(tmp_path / "one/model"), weights(tmp_path / name / "model")
        assert max(float((expected[each] - found[each]).abs().max()) for each in expected) < 1e-3


def test_the_penalty_of_overlong_answers_is_that_of_dapo() -> None:
    def of(*runs: tuple[int, bool]) -> Rollout:
        own = tuple(mine for length, mine in runs for _ in range(length))
        return replace(MIXED[0], ids=(5,) * len(own), by_policy=own, log_probs=(None,) * len(own))

    assert [overlong(of((length, True)), 10, 4) for length in (0, 6, 7, 8, 10)] == [0, 0, 0.25, 0.5, 1]
    assert overlong(of((10, True)), 10, None) == 0
    # Of an episode its longest turn: what the environment says is none of it.
    assert overlong(of((6, True), (4, False), (7, True)), 10, 4) == 0.25


def test_overlong_answers_lose_reward_and_the_curves_say_the_tasks(policy_model: Path, tmp_path: Path) -> None:
    plain, shaped = tmp_path / "plain", tmp_path / "shaped"
    options = replace(DULL, max_resample_times=0, max_steps=1)
    GRPO(options).train(work(policy_model, plain))
    GRPO(replace(options, overlong_buffer=6, overlong_penalty=0.5)).train(work(policy_model, shaped))
    (before,), (after,) = curves(plain), curves(shaped)
    assert after["reward"] == before["reward"] and "overlong_penalty" not in before
    assert after["overlong_penalty"] == pytest.approx(0.5 * after["length"] / SAMPLING.max_new_tokens)
    assert not same(plain / "model", shaped / "model")
    # A constant penalty is in no difference from a group's mean.
    task = Letters(dull=True)
    dull = [Problem(f"train-{number}", "q:") for number in (0, 2)]
    cut = replace(options, overlong_buffer=1, batch_size=2, kl_coef=0.0)

    def roll(sampler: Any, problems: Any, samples: int, stream: str) -> list[Rollout]:
        made = plain_roll(task, 32)(sampler, problems, samples, stream)
        return [replace(each, ids=(5,) * 6, by_policy=(True,) * 6, log_probs=(-1.0,) * 6) for each in made]

    GRPO(cut).train(replace(work(policy_model, tmp_path / "equal", hooks=Hooks(roll=roll)), problems=dull))
    assert curves(tmp_path / "equal")[0]["overlong_penalty"] == 1
    assert same(tmp_path / "equal/model", policy_model)


def test_answers_that_the_limit_cut_are_left_out_of_the_loss(policy_model: Path, tmp_path: Path) -> None:
    """What is learnt is what their group has learnt, where the cut ones have no token at all."""
    task = Letters()
    options = replace(DULL, max_resample_times=0, max_steps=1, kl_coef=0.0, mask_truncated_completions=True)

    def train(name: str, cut: Any, *, emptied: bool = False) -> dict[str, float]:
        def roll(sampler: Any, problems: Any, samples: int, stream: str) -> list[Rollout]:
            made = plain_roll(task, 32)(sampler, problems, samples, stream)
            found = []
            for number, each in enumerate(made):
                own = (False,) * len(each.ids) if emptied and cut(number) else each.by_policy
                found.append(replace(each, finished=emptied or not cut(number), by_policy=own))
            return found

        GRPO(options).train(work(policy_model, tmp_path / name, hooks=Hooks(roll=roll)))
        return curves(tmp_path / name)[0]

    masked = train("masked", lambda number: number % 2 == 0)
    emptied = train("emptied", lambda number: number % 2 == 0, emptied=True)
    assert masked["loss"] == emptied["loss"] and masked["finished"] == 0.5
    assert same(tmp_path / "masked/model", tmp_path / "emptied/model")
    nothing = train("nothing", lambda _: True)
    assert "loss" not in nothing and same(tmp_path / "nothing/model", policy_model)


def test_gspo_has_a_clip_of_its_own_size() -> None:
    assert GRPOOptions().clip == (0.2, 0.2) and GRPOOptions(clip_range_high=0.28).clip == (0.2, 0.28)
    gspo = GRPOOptions(loss_type=LossType.GSPO)
    assert gspo.clip == (3e-4, 4e-4) == RLCROptions(loss_type=LossType.GSPO).clip
    assert GRPOOptions(loss_type=LossType.GSPO, clip_range=1e-3).clip == (1e-3, 1e-3)
    assert not GRPO(gspo).check(SAMPLING) and not GRPO().check(SAMPLING)
    for options in (
        GRPOOptions(loss_type=LossType.GSPO, clip_range=0.2),
        GRPOOptions(loss_type=LossType.GSPO, clip_range_high=0.2),
    ):
        (warning,) = GRPO(options).check(SAMPLING)
        assert warning.startswith(f"clip_range={options.clip[0]:g}, 0.2 above 1, with loss_type=gspo: ")
    (warning,) = RLCR(RLCROptions(loss_type=LossType.GSPO, clip_range=0.2)).check(SAMPLING)
    assert "1e-4 to 1e-3" in warning


def test_a_buffer_longer_than_an_answer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    options = GRPOOptions(overlong_buffer=7)
    with pytest.raises(UsageError, match="overlong_buffer=7; an answer has 6 tokens at most"):
        GRPO(options).train(work(tmp_path / "no model", tmp_path / "out"))
