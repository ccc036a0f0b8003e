"""A run that was moved while something in it was half done goes on where it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.algos.training_work import curves, same, work
from tests.posttrain.eval.first_letter import FirstLetter

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.eval.answers import read_answers
from gpuherd.posttrain.eval.evaluation import Evaluating, OtherEvaluation, evaluate
from gpuherd.posttrain.eval.results import ASKED, About, EvaluationOptions
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Policy, Rollout, Sampling, Training


def in_run(root: Path, model: Path, **change: Any) -> Training:
    """The training of a run's second round, on the policy of its first."""
    if not (root / "models" / "r0").exists():
        shutil.copytree(model, root / "models" / "r0" / "model")
    words = work(model, root / "models" / "r1", root=root, **change)
    return replace(words, policy=Policy(str(root / "models" / "r0" / "model")), reference=Policy(str(model)))


def demonstrations(number: int) -> list[list[Rollout]]:
    told = [
        Rollout(str(n), 0, (3, 4), (5 + n, 0), (True,) * 2, (None,) * 2, "x", 1.0, None, True) for n in range(number)
    ]
    return [told]


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("name", ["GRPO", "SFT"])
def test_a_training_goes_on(tmp_path: Path, policy_model: Path, name: str) -> None:
    kind = algorithm_class(name)
    rest: dict[str, Any] = {"batch_size": 2} if name == "GRPO" else {"batch_size": 4}
    algorithm = kind(kind.Options(lr=1e-3, **rest))
    rows = {} if name == "GRPO" else {"rows": demonstrations(16)}
    asked = iter([False, True])
    stopping = Hooks(stopping=lambda: next(asked, False))
    with pytest.raises(Stopped):
        algorithm.train(in_run(tmp_path / "begun", policy_model, hooks=stopping, **rows))
    (tmp_path / "begun").rename(tmp_path / "moved")
    algorithm.train(in_run(tmp_path / "moved", policy_model, hooks=Hooks(), **rows))
    algorithm.train(in_run(tmp_path / "whole", policy_model, hooks=Hooks(), **rows))
    moved, whole = (tmp_path / each / "models" / "r1" for each in ("moved", "whole"))
    assert curves(moved) == curves(whole) and len(curves(whole)) == 4
    assert same(moved / "model", whole / "model")


def test_an_evaluation_goes_on(tmp_path: Path, policy_model: Path) -> None:
    def asked(root: Path, policy: str = "r0") -> Evaluating:
        return Evaluating(
            About("GRPO", "letters", "letters", "tiny", 0),
            Policy(str(root / "models" / policy)),
            Policy(str(policy_model)),
            FirstLetter(),
            root / "results",
            root=root,
            options=EvaluationOptions(problems=4, samples=2, resamples=100),
            sampling=Sampling(max_new_tokens=3, batch_size=2),
        )

    for policy in ("r0", "r1"):
        shutil.copytree(policy_model, tmp_path / "begun" / "models" / policy)
    evaluate(asked(tmp_path / "begun"))
    answers = tmp_path / "begun" / "results" / "answers.jsonl"
    first = list(read_answers(answers))
    answers.write_bytes(b"".join(answers.read_bytes().splitlines(keepends=True)[:2]))  # half of them are there
    (tmp_path / "begun").rename(tmp_path / "moved")
    evaluate(asked(tmp_path / "moved"))
    again = list(read_answers(tmp_path / "moved" / "results" / "answers.jsonl"))
    assert [replace(each, seconds=0.0) for each in again] == [replace(each, seconds=0.0) for each in first]
    assert json.loads((tmp_path / "moved" / "results" / ASKED).read_bytes())["policy"]["model"] == {
        "inside": "models/r0"
    }
    with pytest.raises(OtherEvaluation, match="policy"):
        evaluate(asked(tmp_path / "moved", "r1"))
    # The same place, and other weights in it. What versions before have begun goes on without a digest of theirs.
    begun = tmp_path / "moved" / "results" / ASKED
    told = json.loads(begun.read_bytes())
    begun.write_text(json.dumps({name: value for name, value in told.items() if name != "models_sha256"}))
    (tmp_path / "moved" / "results" / "result.json").unlink()
    evaluate(asked(tmp_path / "moved"))
    begun.write_text(json.dumps(told))
    change_a_bit(tmp_path / "moved" / "models" / "r0")
    evaluate(asked(tmp_path / "moved"))  # nothing is left to be answered
    (tmp_path / "moved" / "results" / "result.json").unlink()
    with pytest.raises(OtherEvaluation, match="another models_sha256"):
        evaluate(asked(tmp_path / "moved"))


def change_a_bit(model: Path) -> None:
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("name", ["GRPO", "SFT"])
def test_a_training_is_of_the_models_that_it_began_with(tmp_path: Path, policy_model: Path, name: str) -> None:
    model = shutil.copytree(policy_model, tmp_path / "model")
    policy = Policy(str(model))
    kind = algorithm_class(name)
    algorithm = kind(kind.Options(lr=1e-3, **({"batch_size": 2} if name == "GRPO" else {"batch_size": 4})))
    rows = {} if name == "GRPO" else {"rows": demonstrations(16)}

    def train(digests: dict[str, str], *stops: bool) -> None:
        asked = iter(stops)
        hooks = Hooks(stopping=lambda: next(asked, False))
        algorithm.train(replace(in_run(tmp_path / "run", policy_model, hooks=hooks, **rows), digests=digests))

    with pytest.raises(Stopped):
        train({"policy": policy.sha256}, True)
    change_a_bit(model)
    with pytest.raises(UsageError, match=r"is (of|a checkpoint of) another training: its models_sha256"):
        train({"policy": policy.sha256})
    train({})  # as of a version that records none
