"""The plan of rounds: nothing twice, nothing before what it needs, whatever is combined; which jobs go first."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job
from gpuherd.posttrain.eval.results import REFERENCE
from gpuherd.posttrain.runs.folder import RoundsDirectory
from gpuherd.posttrain.runs.plan import (
    Combination,
    JobDescription,
    Phase,
    Step,
    StepRequest,
    description_of,
    earlier_rounds_first,
    make_jobs,
    plan_steps,
    planned,
    priority_named,
)

names = st.sampled_from(["PITA", "QSharp", "GRPO", "DPO"])


@st.composite
def combinations(draw: st.DrawFn) -> list[Combination]:
    found = []
    for algorithm in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        for dataset in draw(st.lists(st.sampled_from(["gsm8k", "math", "sums"]), min_size=1, max_size=2, unique=True)):
            collects = draw(st.booleans())
            found.append(
                Combination(
                    algorithm,
                    dataset,
                    "llama",
                    collects,
                    off_policy=draw(st.booleans()),
                    shards=draw(st.integers(1, 3)),
                    evaluated_on=tuple(draw(st.lists(st.sampled_from(["gsm8k", "aime"]), unique=True))),
                )
            )
    return found


def jobs_of(steps: Sequence[Step]) -> list[Job]:
    return [Job(name=step.name, argv=("x",), needs=step.needs) for step in steps]


@settings(max_examples=40)
@given(combinations(), st.integers(1, 4), st.booleans(), st.booleans(), st.randoms())
def test_any_order_of_ends_keeps_the_rounds(
    combined: list[Combination], rounds: int, asynchronous: bool, references: bool, chance: object
) -> None:
    """Jobs that end in any order: each runs once, after all that it reads."""
    steps = plan_steps(combined, rounds, asynchronous=asynchronous, references=references)
    by_name = {step.name: step for step in steps}
    assert len(by_name) == len(steps)
    order = TopologicalSorter({job.name: job.needs for job in jobs_of(steps)})
    order.prepare()
    ready, ended = list(order.get_ready()), []
    while ready:
        name = ready.pop(chance.randrange(len(ready)))  # type: ignore[attr-defined]
        step = by_name[name]
        for other in steps:
            same = (other.algorithm, other.dataset, other.family) == (step.algorithm, step.dataset, step.family)
            if not same or other is step:
                continue
            if step.policy_round is not None and other.phase is Phase.TRAIN and other.round == step.policy_round:
                assert other.name in ended
            if step.phase is Phase.TRAIN and step.round is not None and other.round is not None:
                if other.phase is Phase.COLLECT and other.round <= step.round:
                    assert other.name in ended
                if other.phase is Phase.TRAIN and other.round < step.round:
                    assert other.name in ended
        ended.append(name)
        order.done(name)
        ready += order.get_ready()
    assert sorted(ended) == sorted(by_name)


@given(combinations(), st.integers(1, 3))
@settings(max_examples=30)
def test_each_combination_has_its_jobs(combined: list[Combination], rounds: int) -> None:
    steps = plan_steps(combined, rounds, references=False)
    for each in combined:
        mine = [s for s in steps if (s.algorithm, s.dataset, s.family) == (each.algorithm, each.dataset, each.family)]
        for number in range(rounds):
            of_round = [step.phase for step in mine if step.round == number]
            assert of_round.count(Phase.COLLECT) == (each.shards if each.collects else 0)
            assert of_round.count(Phase.TRAIN) == 1
            assert of_round.count(Phase.EVALUATE) == len(each.evaluated_on)


def one(algorithm: str = "PITA", **changed: object) -> Combination:
    values: dict[str, object] = {
        "algorithm": algorithm,
        "dataset": "gsm8k",
        "family": "llama32",
        "collects": True,
        "off_policy": True,
        "shards": 1,
        "evaluated_on": ("gsm8k",),
    }
    return Combination(**(values | changed))  # type: ignore[arg-type]


def test_names_and_needs_as_written() -> None:
    steps = plan_steps([one(shards=2, evaluated_on=("gsm8k", "aime"))], 2)
    assert [step.name for step in steps] == [
        "reference_gsm8k_llama32_evaluate",
        "reference_aime_llama32_evaluate",
        "PITA_gsm8k_llama32_r0_collect_0",
        "PITA_gsm8k_llama32_r0_collect_1",
        "PITA_gsm8k_llama32_r0_train",
        "PITA_gsm8k_llama32_r0_evaluate",
        "PITA_gsm8k_llama32_r0_evaluate_aime",
        "PITA_gsm8k_llama32_r1_collect_0",
        "PITA_gsm8k_llama32_r1_collect_1",
        "PITA_gsm8k_llama32_r1_train",
        "PITA_gsm8k_llama32_r1_evaluate",
        "PITA_gsm8k_llama32_r1_evaluate_aime",
    ]
    needs = {step.name: step.needs for step in steps}
    assert needs["PITA_gsm8k_llama32_r0_collect_0"] == ()
    assert needs["PITA_gsm8k_llama32_r1_collect_1"] == ("PITA_gsm8k_llama32_r0_train",)
    assert needs["PITA_gsm8k_llama32_r1_train"] == (
        "PITA_gsm8k_llama32_r0_train",
        "PITA_gsm8k_llama32_r1_collect_0",
        "PITA_gsm8k_llama32_r1_collect_1",
    )
    assert needs["PITA_gsm8k_llama32_r1_evaluate_aime"] == ("PITA_gsm8k_llama32_r1_train",)
    assert steps[0].algorithm == REFERENCE and steps[0].round is None and steps[0].needs == ()


def test_an_evaluation_in_shards_has_a_job_that_joins_them(tmp_path: Path) -> None:
    divided = one(evaluated_on=("gsm8k", "aime"), evaluation_shards={"gsm8k": 2})
    steps = plan_steps([divided], 1)
    names = [step.name for step in steps]
    assert names == [
        "reference_gsm8k_llama32_evaluate_0",
        "reference_gsm8k_llama32_evaluate_1",
        "reference_gsm8k_llama32_evaluate",
        "reference_aime_llama32_evaluate",
        "PITA_gsm8k_llama32_r0_collect",
        "PITA_gsm8k_llama32_r0_train",
        "PITA_gsm8k_llama32_r0_evaluate_0",
        "PITA_gsm8k_llama32_r0_evaluate_1",
        "PITA_gsm8k_llama32_r0_evaluate",
        "PITA_gsm8k_llama32_r0_evaluate_aime",
    ]
    by_name = {step.name: step for step in steps}
    assert by_name["PITA_gsm8k_llama32_r0_evaluate_1"].needs == ("PITA_gsm8k_llama32_r0_train",)
    assert by_name["PITA_gsm8k_llama32_r0_evaluate"].needs == (
        "PITA_gsm8k_llama32_r0_evaluate_0",
        "PITA_gsm8k_llama32_r0_evaluate_1",
    )
    asked = [StepRequest(0, 0, "") if step.joins else StepRequest(1, 100, "") for step in steps]
    folder = RoundsDirectory(tmp_path)
    jobs = make_jobs(planned(steps, asked, earlier_rounds_first, 1), folder, identity="x", cwd="/", share=True)
    results = {job.name: Path(str(job.result)).relative_to(folder.results) for job in jobs if "evaluate" in job.name}
    place = Path("PITA/llama32/gsm8k/r0")
    assert results["PITA_gsm8k_llama32_r0_evaluate_1"] == place / "shards" / "00001.json"
    assert results["PITA_gsm8k_llama32_r0_evaluate"] == place / "result.json"
    assert results["PITA_gsm8k_llama32_r0_evaluate_aime"] == place / "on_aime" / "result.json"
    assert len(set(results.values())) == len(results)
    shard, joining = (jobs[names.index(f"PITA_gsm8k_llama32_r0_evaluate{end}")] for end in ("_1", ""))
    assert (shard.gpus, shard.memory_mb, shard.share) == (1, 100, True)
    assert (joining.gpus, joining.memory_mb, joining.share) == (0, None, False)
    assert shard.family != joining.family  # what a shard takes says nothing of the other


def test_asynchronous_rounds_collect_while_the_one_before_trains() -> None:
    steps = {step.name: step for step in plan_steps([one()], 4, asynchronous=True, references=False)}
    asked = {number: steps[f"PITA_gsm8k_llama32_r{number}_collect"] for number in range(4)}
    assert [asked[number].policy_round for number in range(4)] == [None, None, 0, 1]
    assert asked[1].needs == ()
    assert asked[3].needs == ("PITA_gsm8k_llama32_r1_train",)
    # The training still goes on from the newest policy.
    assert steps["PITA_gsm8k_llama32_r3_train"].policy_round == 2
    # On-policy algorithms are not touched by it.
    on_policy = plan_steps([one("GRPO", off_policy=False)], 2, asynchronous=True, references=False)
    assert on_policy == plan_steps([one("GRPO", off_policy=False)], 2, references=False)


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"two jobs would be named PITA_a_b_c_r0_collect: .* rename one"):
        plan_steps([one(dataset="a_b", family="c"), one(dataset="a", family="b_c")], 1, references=False)


def test_earlier_rounds_go_first_where_the_guides_would_run_later_ones() -> None:
    steps = plan_steps([one(), one("GRPO")], 3, references=False)
    found = [description_of(step, 3) for step in steps]
    ours = sorted(found, key=earlier_rounds_first, reverse=True)
    assert [each.round_idx for each in ours] == sorted(each.round_idx for each in found)
    literal = sorted(found, key=lambda each: each.round_idx * 100, reverse=True)  # "higher priority jobs run first"
    assert literal[0].round_idx == 2
    # What others wait for goes before what nobody needs.
    of_round = [each for each in ours if each.round_idx == 0 and each.algorithm == "PITA"]
    assert [each.phase for each in of_round] == [Phase.COLLECT, Phase.TRAIN, Phase.EVALUATE]


JOB = JobDescription("x", "train", "PITA", "gsm8k", "llama", 1, 2)


def test_a_users_function_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_order.py").write_text(
        "def later(job): return job.round_idx * 100\n"
        "def wrong(job): return 'high'\n"
        "def broken(job): return job.nothing\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert priority_named(None) is earlier_rounds_first
    assert priority_named("my_order.later")(JOB) == 100
    with pytest.raises(UsageError, match="gave 'high' for x; it gives a whole number"):
        priority_named("my_order.wrong")(JOB)
    with pytest.raises(UsageError, match="AttributeError for x"):
        priority_named("my_order.broken")(JOB)
    with pytest.raises(UsageError, match="my_order has no function number"):
        priority_named("my_order.number")
    with pytest.raises(UsageError, match="can't be imported"):
        priority_named("no_such_module_anywhere.f")
    (tmp_path / "my_mistake.py").write_text("x = (")
    with pytest.raises(UsageError, match=r"my_mistake can't be imported: SyntaxError"):
        priority_named("my_mistake.f")
    with pytest.raises(UsageError, match="a dotted name"):
        priority_named("later")
