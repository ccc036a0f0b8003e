"""PITA: from preferences alone the classifier learns what guides to right answers; rounds go on from each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from tests.posttrain.guidance import exact
from tests.posttrain.guidance.letters import SAMPLING, Letters, collecting, training

from gpuherd.lm.guidance.guide import Mode, read_form
from gpuherd.posttrain.algos.pita import PITA, PITAOptions
from gpuherd.posttrain.engine.options import Scheduler
from gpuherd.posttrain.guidance.options import Loss
from gpuherd.posttrain.rollout.sampler import Prefix, Sampler
from gpuherd.posttrain.types import Comparison, Policy, Precision, Row

OPTIONS = PITAOptions(
    samples_per_example=24,
    epochs=4,
    batch_size=32,
    lr=5e-3,
    scheduler=Scheduler.LINEAR,
    warmup_steps=5,
    validation_share=0.0,
    bradley_terry_sampling=False,
)
LONG = replace(SAMPLING, max_new_tokens=6)


def test_a_second_round_begins_answers_with_the_first_rounds_policy_and_learns_on(
    reference: Path, small: Path, tmp_path: Path
) -> None:
    task = Letters()
    algorithm = PITA(replace(OPTIONS, samples_per_example=4, epochs=1))
    rows = list(algorithm.collect(collecting(reference, task, sampling=LONG)))
    first = algorithm.train(training(reference, small, tmp_path / "0", [rows]))
    assert first.guide is not None and first.guide.mode is Mode.BERNOULLI
    work = collecting(reference, task, policy=first, number=1, sampling=LONG)
    more = list(algorithm.collect(work))
    assert more
    guided, plain = (Sampler(each, Precision("float32"), "cpu", LONG) for each in (first, Policy(str(reference))))
    prefixes = [Prefix(each.id, guided.prompt_ids(each)) for each in work.problems]
    begun = {
        each.id: only.ids for each, (only,) in zip(prefixes, guided.continuations(prefixes, greedy=True), strict=True)
    }
    for row in more:
        assert isinstance(row, Comparison)
        assert row.context_ids == begun[row.problem][: len(row.context_ids)]
        ((ended,),) = plain.continuations([Prefix("any", row.prompt_ids, row.context_ids)], greedy=True)
        assert ended.ids in (row.chosen_ids, row.rejected_ids)
    halves = [
        row
        for some in (work.problems[::2], work.problems[1::2])
        for row in algorithm.collect(replace(work, problems=some))
    ]
    assert sorted(map(str, halves)) == sorted(map(str, more))
    second = algorithm.train(training(reference, None, tmp_path / "1", [rows, more], policy=first, number=1))
    assert second.guide is not None
    told = read_form(Path(second.guide.classifier)).trained
    assert told["warm_start"] is True
    assert told["comparisons"] == len(rows) + len(more)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("loss", "first_cut"), [(Loss.BCE, 1), (Loss.BRADLEY_TERRY, 1), (Loss.BCE, 0)])
def test_guidance_by_preferences_beats_the_reference(
    loss: Loss, first_cut: int, reference: Path, small: Path, tmp_path: Path
) -> None:
    task = Letters()
    trees = exact.trees(reference, task)
    algorithm = PITA(replace(OPTIONS, samples_per_example=128, epochs=12, loss_type=loss, first_cut=first_cut))
    rows: list[list[Row]] = []
    policy = Policy(str(reference))
    plain = fmean(tree.worth(()) for tree in trees.values())
    earned = [plain]
    for number in range(2):
        work = collecting(reference, task, policy=policy, number=number)
        rows.append(list(algorithm.collect(work)))
        policy = algorithm.train(training(reference, small, tmp_path / str(number), rows, policy=policy, number=number))
        assert policy.guide is not None
        earned.append(fmean(exact.guided_reward(policy.guide, tree) for tree in trees.values()))
    assert plain + 0.02 < earned[1] and plain + 0.05 < earned[2], earned
