"""An evaluation in shards: any number of them give the files of one process, to the byte, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.posttrain.eval.first_letter import FirstLetter
from tests.posttrain.eval.test_evaluation import classifier, other_model

from gpuherd.lm.guidance.guide import Guide, Mode
from gpuherd.posttrain.eval import evaluation
from gpuherd.posttrain.eval.answers import read_answers
from gpuherd.posttrain.eval.evaluation import (
    Evaluating,
    LackingShards,
    OtherEvaluation,
    evaluate,
    evaluate_shard,
    join_shards,
)
from gpuherd.posttrain.eval.results import About, Divergence, EvaluationOptions, number_of_parts, parts_of, shard_done
from gpuherd.posttrain.types import Policy, Precision, Sampling
from gpuherd.runs.shard_file import ShardBusy, ShardFile

__all__ = ["classifier", "other_model"]  # fixtures

PROBLEMS = 17
SAMPLING = Sampling(max_new_tokens=5, batch_size=6)
OPTIONS = EvaluationOptions(problems=PROBLEMS, samples=3, pass_at=(2,), resamples=100)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time, so that files that record seconds can be compared."""
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: 0.0))


def work(folder: Path, policy: Policy, reference: Policy, **more: Any) -> Evaluating:
    words: dict[str, Any] = {"options": OPTIONS, "sampling": SAMPLING, **more}
    return Evaluating(About("GRPO", "letters", "letters", "tiny", 0), policy, reference, FirstLetter(), folder, **words)


def keeping(policy: Policy, reference: Policy) -> Callable[[Policy], Any]:
    """Loads each of the two models once for a whole test."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    made = {each: Sampler(each, Precision(), "cpu", SAMPLING) for each in (policy, reference)}
    return lambda asked: made[asked]


def in_shards(todo: Evaluating, shards: int, sampler_of: Callable[[Policy], Any] | None = None) -> None:
    for number in reversed(range(shards)):
        evaluate_shard(todo, number, shards, sampler_of)
    join_shards(todo, shards)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a reader of the result reads."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "asked.json"}


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize(
    ("how", "most"), [(Divergence.EXACT, None), (Divergence.EXACT, 1), (Divergence.K3, 2), (Divergence.NONE, None)]
)
def test_any_number_of_shards_gives_the_same_files(
    policy_model: Path, other_model: Path, tmp_path: Path, how: Divergence, most: int | None
) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    options = replace(OPTIONS, kl=how, kl_samples=most)
    sampler_of = keeping(policy, reference)
    evaluate(work(tmp_path / "whole", policy, reference, options=options), sampler_of)
    whole = files_of(tmp_path / "whole")
    assert set(whole) == {"answers.jsonl", "scores.json", "result.json"} | ({"kl.jsonl"} if how != "none" else set())
    for shards in (1, 2, 3, 8):
        folder = tmp_path / str(shards)
        in_shards(work(folder, policy, reference, options=options), shards, sampler_of)
        assert files_of(folder) == whole
        assert sorted(each.name for each in (folder / "shards").iterdir()) == [
            f"{number:05d}.json" for number in range(shards)
        ]


@pytest.mark.slow
@pytest.mark.usefixtures("no_time")
def test_shards_of_a_guided_policy_at_every_eta(policy_model: Path, classifier: Path, tmp_path: Path) -> None:
    reference = Policy(str(policy_model))
    policy = replace(reference, guide=Guide(str(classifier), 0.5, Mode.BERNOULLI, top_k=1000))
    options = replace(OPTIONS, etas=(0.05,))
    evaluate(work(tmp_path / "whole", policy, reference, options=options))
    in_shards(work(tmp_path / "3", policy, reference, options=options), 3)
    assert files_of(tmp_path / "3") == files_of(tmp_path / "whole")
    assert len(list(read_answers(tmp_path / "3" / "answers-eta0.05.jsonl"))) == PROBLEMS


class Killed(BaseException):
    """What a kill is to a process: no handler of an error sees it."""


@contextmanager
def killed_at(effect: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process ends at the n-th time that it writes, syncs, or puts a file into its place: before it, or after the
    half of what it writes. Gives the number of times that it did so."""
    count = [0]

    def ending(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def effect_of(*args: Any, **words: Any) -> Any:
            count[0] += 1
            if count[0] == effect:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            return real(*args, **words)

        return effect_of

    with monkeypatch.context() as patched:
        for name in ("write", "fsync", "replace", "link", "ftruncate"):
            patched.setattr(os, name, ending(name))
        try:
            yield count
        except Killed:
            count[0] = -1


@pytest.mark.usefixtures("no_time")
def test_a_kill_at_any_instant_loses_nothing_and_does_nothing_twice(
    policy_model: Path, other_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    sampler_of, options = keeping(policy, reference), replace(OPTIONS, problems=8)
    evaluate(work(tmp_path / "whole", policy, reference, options=options), sampler_of)
    todo = work(tmp_path / "killed", policy, reference, options=options)
    shards = 2
    steps: list[Callable[[], object]] = [
        lambda: evaluate_shard(todo, 0, shards, sampler_of),
        lambda: evaluate_shard(todo, 1, shards, sampler_of),
        lambda: join_shards(todo, shards),
    ]
    kills = 0
    for step in steps:
        effect, most = 1, 0
        while True:
            with killed_at(effect, monkeypatch) as count:
                step()
            if count[0] >= 0:
                break
            kills += 1
            # One effect farther, until more is there than ever: so each is the last one of some start.
            now = whole_lines(todo.folder)
            effect, most = (1, now) if now > most else (effect + 1, most)
    assert kills > 100
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def whole_lines(folder: Path) -> int:
    """How many whole lines the files have."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in paths)


def test_a_shard_that_is_done_loads_no_model_and_asks_nothing(
    policy_model: Path, other_model: Path, tmp_path: Path
) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))

    def never(_: Policy) -> Any:
        raise AssertionError("nothing is left to ask")

    sampler_of = keeping(policy, reference)
    assert evaluate_shard(work(tmp_path, policy, reference), 0, 2, sampler_of) == {
        "problems": 9, "answers_last_start": 9, "gpus": 0
    }  # fmt: skip
    again = work(tmp_path, policy, reference)
    assert evaluate_shard(again, 0, 2, never)["answers_last_start"] == 0
    # What shards were killed at is named, and what they wrote does not count as done.
    with pytest.raises(LackingShards, match="lines of shards 1 are missing"):
        join_shards(again, 2)
    assert shard_done(tmp_path, 0).exists() and not (tmp_path / "result.json").exists()
    evaluate_shard(again, 1, 2, sampler_of)
    first = join_shards(again, 2)
    assert isinstance(again.task, FirstLetter) and set(again.task.asked) == {
        f"test-{number}" for number in range(PROBLEMS) if number // 2 % 2 == 1
    }
    # The result can be made again of what is there.
    (tmp_path / "result.json").unlink()
    assert join_shards(again, 2) == first


def test_a_changed_line_of_a_shard_is_made_again(policy_model: Path, other_model: Path, tmp_path: Path) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    sampler_of, todo = keeping(policy, reference), work(tmp_path, policy, reference)
    for number in range(3):
        evaluate_shard(todo, number, 3, sampler_of)
    for name, at in (("answers.jsonl", 40), ("kl.jsonl", 10)):
        path = tmp_path / "shards" / "00001" / name
        kept = path.read_bytes()
        path.write_bytes(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
        with pytest.raises(LackingShards, match="lines of shards 1 are missing or have changed"):
            join_shards(todo, 3)
        assert not shard_done(tmp_path, 1).exists() and shard_done(tmp_path, 2).exists()
        evaluate_shard(todo, 1, 3, sampler_of)
    join_shards(todo, 3)
    # So are all, where the joined file is damaged and the shards' own lines are gone.
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LackingShards, match="lines of shards 0, 1, 2 are missing"):
        join_shards(todo, 3)


def test_shards_are_of_one_evaluation_and_one_process_each(
    policy_model: Path, other_model: Path, tmp_path: Path
) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    sampler_of, todo = keeping(policy, reference), work(tmp_path, policy, reference)
    evaluate_shard(todo, 0, 2, sampler_of)
    with pytest.raises(OtherEvaluation, match="sampling"):
        evaluate_shard(replace(todo, sampling=replace(SAMPLING, seed=1)), 1, 2, sampler_of)
    part = parts_of(tmp_path, PROBLEMS, OPTIONS, SAMPLING.batch_size, 2)[1]
    with ShardFile(part.folder / "answers.jsonl", part.answers, sealed=True), pytest.raises(ShardBusy):
        evaluate_shard(todo, 1, 2, sampler_of)


def test_the_gpus_of_the_shards_are_counted(policy_model: Path, other_model: Path, tmp_path: Path) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    todo = work(tmp_path, policy, reference, gpus=1)
    for number in range(2):
        evaluate_shard(todo, number, 2, keeping(policy, reference))
    cost = join_shards(replace(todo, gpus=0), 2).own.cost  # joined on a CPU
    assert cost.gpus == 1 and cost.gpu_hours is not None and cost.gpu_hours == pytest.approx(cost.seconds / 3600)


def test_how_many_shards() -> None:
    eight = EvaluationOptions(samples=8)
    assert number_of_parts(400, eight, 8, at_once=8) == 8
    assert number_of_parts(400, eight, 8, at_once=8, wanted=3) == 3
    assert number_of_parts(20, eight, 8, at_once=8) == 2  # a job loads a model first
    assert number_of_parts(20, eight, 80, at_once=8, wanted=8) == 2  # ten problems share a batch
    assert number_of_parts(20, replace(eight, kl_samples=1), 8, at_once=8, wanted=8) == 3  # eight are read together


WORKER = """
import sys, time
import torch
from dataclasses import replace
from pathlib import Path
from tests.posttrain.eval.first_letter import FirstLetter
from tests.posttrain.eval.test_shards import work
from gpuherd.posttrain.eval.evaluation import evaluate_shard
from gpuherd.posttrain.types import Policy

class Slow(FirstLetter):
    def rewards(self, problems, completions):
        time.sleep(0.5)  # so that it is killed between batches
        return super().rewards(problems, completions)

folder, policy, reference, threads = sys.argv[1:]
torch.set_num_threads(int(threads))  # sums of another number of threads differ in their last bits
evaluate_shard(replace(work(Path(folder), Policy(policy), Policy(reference)), task=Slow()), 0, 2)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_that_is_killed(policy_model: Path, other_model: Path, tmp_path: Path) -> None:
    """By SIGKILL, twice, as soon as anything new is in its files."""
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    evaluate(work(tmp_path / "whole", policy, reference))
    folder = tmp_path / "killed"
    shard = folder / "shards" / "00000"
    killed = 0
    while not shard_done(folder, 0).exists():
        before = sum(path.stat().st_size for path in shard.glob("*.jsonl"))
        words = [str(folder), str(other_model), str(policy_model), str(torch.get_num_threads())]
        with subprocess.Popen([sys.executable, "-c", WORKER, *words]) as process:
            try:
                while process.poll() is None:
                    if killed < 2 and sum(path.stat().st_size for path in shard.glob("*.jsonl")) > before:
                        break
                    time.sleep(0.002)
            finally:
                process.kill()
        assert process.returncode in (0, -signal.SIGKILL)
        killed += process.returncode != 0
    assert killed == 2
    evaluate_shard(work(folder, policy, reference), 1, 2)
    join_shards(work(folder, policy, reference), 2)
    whole, again = (
        [replace(each, seconds=0) for each in read_answers(tmp_path / name / "answers.jsonl")]
        for name in ("whole", "killed")
    )
    assert whole == again
    for name in ("kl.jsonl", "scores.json"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")]
    for each in results:
        del each["points"][0]["cost"]["seconds"]
    assert results[0] == results[1]
