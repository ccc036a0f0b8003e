"""Q# on a task that can be enumerated: its values come near the exact ones, and guidance by them near the optimum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from tests.posttrain.guidance import exact
from tests.posttrain.guidance.letters import SAMPLING, Letters, collecting, training

from gpuherd.lm.guidance.guide import Mode, read_form
from gpuherd.posttrain.algos.qsharp import QSharp, QSharpOptions
from gpuherd.posttrain.engine.options import Scheduler
from gpuherd.posttrain.rollout.sampler import Prefix, Sampler
from gpuherd.posttrain.types import Policy, Precision, Rollout, Split

OPTIONS = QSharpOptions(
    samples_per_example=32,
    epochs=8,
    batch_size=16,
    lr=5e-3,
    scheduler=Scheduler.LINEAR,
    warmup_steps=10,
    validation_share=0.0,
)


@pytest.fixture(scope="module")
def trees(reference: Path) -> dict[str, exact.Tree]:
    return exact.trees(reference, Letters())


@pytest.fixture(scope="module")
def begun(reference: Path, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy that was trained a little: better than the reference, and far from exact."""
    algorithm = QSharp(replace(OPTIONS, samples_per_example=12, epochs=4))
    rows = list(algorithm.collect(collecting(reference, Letters())))
    return algorithm.train(training(reference, small, tmp_path_factory.mktemp("begun"), [rows], task=Letters()))


@pytest.fixture(scope="module")
def first(reference: Path, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The policy of the first round."""
    algorithm = QSharp(OPTIONS)
    rows = list(algorithm.collect(collecting(reference, Letters())))
    return algorithm.train(training(reference, small, tmp_path_factory.mktemp("first"), [rows], task=Letters()))


def test_the_trees_are_whole(trees: dict[str, exact.Tree]) -> None:
    for tree in trees.values():
        assert sum(tree.chances.values()) == pytest.approx(1.0, abs=1e-5)
        assert 0.05 < tree.worth(()) < 0.6
        assert tree.optimum(1e6) == pytest.approx(tree.worth(()), abs=1e-5)


@pytest.mark.slow
def test_values_come_near_the_exact_expectation(first: Policy, trees: dict[str, exact.Tree]) -> None:
    assert first.guide is not None and first.guide.mode is Mode.BERNOULLI
    nothing = fmean(
        sum(tree.mass(each) * abs(tree.worth(each) - 0.5) for each in tree.prefixes())
        / sum(map(tree.mass, tree.prefixes()))
        for tree in trees.values()
    )
    error = fmean(exact.error(first.guide.classifier, tree) for tree in trees.values())
    assert error < 0.2 < nothing


@pytest.mark.slow
def test_the_guided_policy_beats_the_reference(reference: Path, first: Policy, trees: dict[str, exact.Tree]) -> None:
    assert first.guide is not None
    plain = fmean(tree.worth(()) for tree in trees.values())
    guided = fmean(exact.guided_reward(first.guide, tree) for tree in trees.values())
    assert guided > plain + 0.25
    assert fmean(exact.guided_reward(first.at(1e6).guide, tree) for tree in trees.values()) == pytest.approx(  # type: ignore[arg-type]
        plain, abs=1e-4
    )
    task = Letters()
    sampler = Sampler(first, Precision("float32"), "cpu", SAMPLING)
    drawn = [each.reward for each in sampler.rollouts(task, task.problems(Split.TRAIN, None, 0), 16)]
    assert abs(fmean(drawn) - guided) < 4 * stdev(drawn) / len(drawn) ** 0.5


def test_a_little_training_guides_to_more_reward(reference: Path, begun: Policy, trees: dict[str, exact.Tree]) -> None:
    assert begun.guide is not None and begun.guide.mode is Mode.BERNOULLI
    plain = fmean(tree.worth(()) for tree in trees.values())
    assert fmean(exact.guided_reward(begun.guide, tree) for tree in trees.values()) > plain + 0.05


def test_the_second_round_rolls_in_with_the_first_rounds_policy(
    reference: Path, small: Path, begun: Policy, tmp_path: Path
) -> None:
    task = Letters()
    algorithm = QSharp(replace(OPTIONS, samples_per_example=4, epochs=1))
    work = collecting(reference, task, policy=begun, number=1)
    rows = list(algorithm.collect(work))
    assert len(rows) == 36
    assert all(isinstance(each, Rollout) for each in rows)
    assert {each.rolled_in for each in rows} == {0, 1, 2}  # type: ignore[union-attr]
    guided = Sampler(begun, Precision("float32"), "cpu", SAMPLING)
    names = {each.id: guided.prompt_ids(each) for each in work.problems}
    answered = guided.continuations([Prefix(f"{name}\nroll-in 1", ids) for name, ids in names.items()], 4)
    kept = {name: [each.ids for each in answers] for name, answers in zip(names, answered, strict=True)}
    for row in rows:
        assert isinstance(row, Rollout)
        assert row.ids[: row.rolled_in] == kept[row.problem][row.sample][: row.rolled_in]
        assert row.by_policy == (False,) * row.rolled_in + (True,) * (len(row.ids) - row.rolled_in)
        assert all(each is None for each in row.log_probs[: row.rolled_in])
        assert row.reward == task.reward(row.text).value
    parts = [
        row
        for shard in (work.problems[:4], work.problems[4:])
        for row in algorithm.collect(replace(work, problems=shard, sampling=replace(SAMPLING, batch_size=5)))
    ]
    assert [each.ids for each in parts] == [each.ids for each in rows]  # type: ignore[union-attr]
    earlier = list(algorithm.collect(collecting(reference, task)))
    again = training(reference, small, tmp_path, [earlier, rows], policy=begun, number=1)
    policy = algorithm.train(again)
    assert policy == algorithm.policy(again)
    told = read_form(tmp_path / "model").trained
    assert told["rollouts"] == len(earlier) + len(rows)
    assert told["warm_start"] is False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rewards_of_a_range_are_learnt_as_a_histogram(
    reference: Path, small: Path, tmp_path: Path, trees: dict[str, exact.Tree]
) -> None:
    task = Letters(graded=True)
    algorithm = QSharp(replace(OPTIONS, samples_per_example=32, epochs=6, num_atoms=4))
    rows = list(algorithm.collect(collecting(reference, task)))
    policy = algorithm.train(training(reference, small, tmp_path, [rows], task=task))
    assert policy.guide is not None and policy.guide.mode is Mode.DISTRIBUTIONAL
    form = read_form(Path(policy.guide.classifier))
    assert form.atoms == pytest.approx((0.0, 1 / 3, 2 / 3, 1.0))
    graded = {name: _graded(tree, task, reference) for name, tree in trees.items()}
    plain = fmean(tree.worth(()) for tree in graded.values())
    guided = fmean(exact.guided_reward(policy.guide, tree, form.atoms) for tree in graded.values())
    assert guided > plain + 0.5  # of 0 to 3 times "a"


def _graded(tree: exact.Tree, task: Letters, reference: Path) -> exact.Tree:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference)
    rewards = {each: task.reward(tokenizer.decode(each, skip_special_tokens=True)).value for each in tree.rewards}
    return replace(tree, rewards=rewards)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_enough_data_values_and_guidance_are_near_exact(
    reference: Path, small: Path, tmp_path: Path, trees: dict[str, exact.Tree]
) -> None:
    algorithm = QSharp(replace(OPTIONS, samples_per_example=1024, epochs=10, batch_size=128))
    rows = list(algorithm.collect(collecting(reference, Letters())))
    policy = algorithm.train(training(reference, small, tmp_path, [rows], micro=128))
    assert policy.guide is not None
    assert fmean(exact.error(policy.guide.classifier, tree) for tree in trees.values()) < 0.05
    best = fmean(tree.optimum(0.1) for tree in trees.values())
    assert fmean(exact.guided_reward(policy.guide, tree) for tree in trees.values()) > 0.95 * best
