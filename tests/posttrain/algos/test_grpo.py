"""GRPO learns, goes on exactly, and refuses what it can't learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.posttrain.algos.training_work import SAMPLING, curves, same, weights, work
from tests.posttrain.letters import Letters

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Guide
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.checkpoints import Checkpoints
from gpuherd.posttrain.engine.options import Lora, Scheduler, Stopped
from gpuherd.posttrain.engine.train_engine import NotFinite
from gpuherd.posttrain.policy_gradient.advantages import Normalization
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rollout.sampler import RolloutBackend, Sampler
from gpuherd.posttrain.types import Collecting, Comparison, Policy, Precision, Problem, Reward, Rollout, Split

FAST = GRPOOptions(lr=5e-3, kl_coef=0.01, epochs=3, batch_size=4, samples_per_prompt=8)


def test_it_is_registered() -> None:
    assert algorithm_class("grpo") is GRPO
    assert GRPO.Options is GRPOOptions and not GRPO.guided


def test_it_learns_from_groups_that_share_their_prompt(policy_model: Path, tmp_path: Path) -> None:
    seen: list[Rollout] = []
    task = Letters()

    def roll(sampler: RolloutBackend, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        made = sampler.rollouts(task, problems, samples, stream=stream)
        seen.extend(made)
        return made

    options = replace(FAST, epochs=6)
    policy = GRPO(options).train(work(policy_model, tmp_path, hooks=Hooks(roll=roll)))

    assert policy == Policy(str(tmp_path / "model"))
    lines = curves(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[0]["reward"] < 0.35 < 0.6 < lines[-1]["reward"]
    assert lines[0]["kl"] == 0 < lines[-1]["kl"]
    assert lines[0]["rollouts"] == 32 and lines[0]["approx_kl"] == 0
    for start in range(0, len(seen), 8):
        group = seen[start : start + 8]
        assert len({(each.problem, each.prompt_ids) for each in group}) == 1
        assert [each.sample for each in group] == list(range(8))
    first_step, again = seen[:32], [each for each in seen[64:] if each.problem == seen[0].problem][:8]
    assert [each.ids for each in first_step[:8]] != [each.ids for each in again]  # other draws at another step
    # The trained policy is a model like any other.
    sampler = Sampler(policy, Precision(), "cpu", SAMPLING)
    rewards = [each.reward for each in sampler.rollouts(task, task.problems(Split.TEST, 8, 0), 8)]
    assert sum(rewards) / len(rewards) > 0.6


def test_figures_of_an_evaluation_are_logged_whenever_they_are_made(policy_model: Path, tmp_path: Path) -> None:
    hooks = Hooks(evaluate=lambda _, step: {"test_correct": float(step)}, evaluate_every=2, log_every=3)
    GRPO(replace(FAST, samples_per_prompt=2)).train(work(policy_model, tmp_path, hooks=hooks))
    told = [(line["step"], line.get("test_correct")) for line in curves(tmp_path)]
    assert told == [(2, 2.0), (3, None), (4, 4.0), (6, 6.0)]


def test_a_training_that_was_stopped_goes_on_exactly(policy_model: Path, tmp_path: Path) -> None:
    options = replace(
        FAST,
        reward_normalization=Normalization.RUNNING,
        num_iterations=2,
        minibatch_size=16,
        scheduler=Scheduler.LINEAR,
    )
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    GRPO(options).train(work(policy_model, straight))
    for steps in (1, 3):
        stopping = iter([False] * (steps - 1) + [True]).__next__
        with pytest.raises(Stopped, match=r"stopped after step \d of 6"):
            GRPO(options).train(work(policy_model, broken, hooks=Hooks(stopping=stopping)))
        assert not (broken / "model").exists()
    GRPO(options).train(work(policy_model, broken))

    assert same(straight / "model", broken / "model")
    assert curves(straight) == curves(broken)
    before = (broken / "curves.jsonl").read_bytes()
    assert GRPO(options).train(work(policy_model, broken)) == Policy(str(broken / "model"))  # nothing is left to do
    assert (broken / "curves.jsonl").read_bytes() == before


def test_checkpoints_come_as_often_as_the_options_say(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda _, step, *rest: steps.append(step))
    for every, name in ((4, "by options"), (2, "by the caller")):
        hooks = Hooks(save_every=every) if name == "by the caller" else None
        GRPO(replace(FAST, max_steps=6, epochs=99, save_every=4)).train(
            work(policy_model, tmp_path / name, hooks=hooks)
        )
    assert steps == [4, 6, 2, 4, 6]


def test_a_checkpoint_goes_on_with_other_batches_of_draws_and_saved_less_often(
    policy_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        GRPO(FAST).train(work(policy_model, tmp_path, hooks=Hooks(stopping=lambda: True)))
    told = work(policy_model, tmp_path, sampling=replace(SAMPLING, batch_size=3))
    GRPO(replace(FAST, save_every=3)).train(told)
    assert (tmp_path / "model").exists()


def test_a_checkpoint_of_another_training_is_refused(policy_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        GRPO(FAST).train(work(policy_model, tmp_path, hooks=Hooks(stopping=lambda: True)))
    with pytest.raises(UsageError, match="lr"):
        GRPO(replace(FAST, lr=1e-3)).train(work(policy_model, tmp_path))
    others = [replace(each, id=f"{each.id}'") for each in Letters().problems(Split.TRAIN, 8, 0)]
    with pytest.raises(UsageError, match="data"):  # as many problems, but others
        GRPO(FAST).train(replace(work(policy_model, tmp_path), problems=others))


def collecting(model: Path, problems: Sequence[Problem]) -> Collecting:
    policy = Policy(str(model))
    return Collecting(Letters(), problems, policy, policy, 0, SAMPLING, Precision(), "cpu")


def test_collected_groups_are_learnt_from(policy_model: Path, tmp_path: Path) -> None:
    options = replace(FAST, online=False, epochs=5, num_iterations=2, clip_range=0.3)
    problems = Letters().problems(Split.TRAIN, 8, 0)
    rows = [row for row in GRPO(options).collect(collecting(policy_model, problems)) if isinstance(row, Rollout)]
    apart = [row for each in problems for row in GRPO(options).collect(collecting(policy_model, [each]))]

    assert [row.ids for row in apart if isinstance(row, Rollout)] == [each.ids for each in rows]
    assert [(each.problem, each.sample) for each in rows] == [(p.id, n) for p in problems for n in range(8)]
    assert not list(GRPO(FAST).collect(collecting(policy_model, problems)))  # online: nothing is to be collected
    GRPO(options).train(work(policy_model, tmp_path, task=None, rows=(rows[:4], rows)))
    lines = curves(tmp_path)
    assert lines[0]["reward"] == pytest.approx(
        sum(each.reward for each in rows if each.problem in _first(lines, rows)) / 32
    )
    # The first pass meets the policy that drew: ratios are 1 but for rounding. Later ones do not.
    assert lines[0]["approx_kl"] < lines[-1]["approx_kl"] and lines[-1]["clipped"] > 0
    task = Letters()
    test = task.problems(Split.TEST, 8, 0)
    means = [
        sum(each.reward for each in Sampler(policy, Precision(), "cpu", SAMPLING).rollouts(task, test, 8)) / 64
        for policy in (Policy(str(policy_model)), Policy(str(tmp_path / "model")))
    ]
    assert means[1] > means[0] + 0.1


def _first(lines: object, rows: Sequence[Rollout]) -> set[str]:
    """The problems of the first step of 8 in batches of 4."""
    from gpuherd.posttrain.policy_gradient.plan import plan_of

    plan = plan_of([8] * 8, batch_size=4, epochs=5, max_steps=None, minibatch_size=None, passes=1, seed="0 0")
    names = list(dict.fromkeys(each.problem for each in rows))
    return {names[unit] for unit in plan.units(0)}


def test_what_can_not_be_learnt_from_is_refused(policy_model: Path, tmp_path: Path) -> None:
    comparison = Comparison("p", (5,), (), (6,), (7,), "a", "b")
    offline = replace(FAST, online=False)
    with pytest.raises(UsageError, match="comparisons were collected"):
        GRPO(offline).train(work(policy_model, tmp_path, rows=((comparison,),)))
    with pytest.raises(UsageError, match="nothing to learn from"):
        GRPO(offline).train(work(policy_model, tmp_path))
    with pytest.raises(UsageError, match="was given no task"):
        GRPO(FAST).train(work(policy_model, tmp_path, task=None))
    guided = Policy(str(policy_model), guide=Guide("c"))
    with pytest.raises(UsageError, match="guided policy"):
        GRPO(FAST).train(work(policy_model, tmp_path, policy=guided))
    for wrong in ({"lr": 0.0}, {"kl_coef": -1.0}, {"samples_per_prompt": 0}, {"minibatch_size": 0}):
        with pytest.raises(UsageError):
            GRPOOptions(**wrong)


def test_groups_of_equal_rewards_change_nothing(policy_model: Path, tmp_path: Path) -> None:
    class Flat(Letters):
        def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
            return [Reward(0.1, False) for _ in completions]

    options = replace(FAST, kl_coef=0.0, epochs=1)
    GRPO(options).train(work(policy_model, tmp_path, task=Flat()))
    assert same(tmp_path / "model", policy_model)
    assert [line["constant_groups"] for line in curves(tmp_path)] == [1.0, 1.0]
    assert [line["correct"] for line in curves(tmp_path)] == [0.0, 0.0]


def test_an_adapter_on_a_module_that_is_not_there_is_refused(policy_model: Path, tmp_path: Path) -> None:
    options = replace(FAST, lora=Lora(target_modules=("q_proj", "v_prof")))
    with pytest.raises(
        UsageError, match=r"^lora\.target_modules: the model has no module 'v_prof'; did you mean v_proj"
    ):
        GRPO(options).train(work(policy_model, tmp_path))


@pytest.mark.slow  # PEFT is long in coming
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_is_trained_and_the_reference_is_the_model_without_it(policy_model: Path, tmp_path: Path) -> None:
    options = replace(FAST, lora=Lora(r=4, alpha=16.0, dropout=0.1, target_modules=("q_proj", "v_proj")), lr=2e-2)
    first = GRPO(options).train(work(policy_model, tmp_path / "first"))

    assert first == Policy(str(policy_model), str(tmp_path / "first/model"))
    held = weights(tmp_path / "first/model")
    assert held and all("lora_" in name for name in held)
    lines = curves(tmp_path / "first")
    # At first the adapter is 0: so where it is switched off, the same policy must be met.
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5) and lines[-1]["kl"] > 1e-3

    second = GRPO(options).train(work(policy_model, tmp_path / "second", policy=first, round=1))
    assert second == Policy(str(policy_model), str(tmp_path / "second/model"))
    assert not same(tmp_path / "first/model", tmp_path / "second/model")
    assert curves(tmp_path / "second")[0]["kl"] > 1e-3  # it went on from the first one's adapter


def test_a_loss_that_is_no_number_ends_the_training(policy_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    broken = AutoModelForCausalLM.from_pretrained(policy_model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(policy_model).save_pretrained(tmp_path / "broken")
    with pytest.raises(NotFinite, match="step 1"):
        GRPO(replace(FAST, kl_coef=0.0)).train(work(tmp_path / "broken", tmp_path / "out"))
