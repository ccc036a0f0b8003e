"""Evaluations by vLLM's face, with our own decoding in its place; ``rollout/test_vllm_real`` runs vLLM."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.eval.test_evaluation import classifier, other_model, work
from tests.posttrain.rollout.test_vllm import Engine

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Guide
from gpuherd.posttrain.eval import evaluation
from gpuherd.posttrain.eval.answers import read_answers
from gpuherd.posttrain.eval.evaluation import OtherEvaluation, evaluate, evaluate_shard, join_shards
from gpuherd.posttrain.rollout import vllm
from gpuherd.posttrain.rollout.sampler import Sampler
from gpuherd.posttrain.types import BackendName, Policy, Precision, Sampling

__all__ = ["classifier", "other_model"]  # fixtures

VLLM = {"backend": BackendName.VLLM}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Engine]]:
    """The engines that are started in vLLM's place."""
    started: list[weakref.ref[Engine]] = []

    def start(sampler: Any, model: str, _options: Any, precision: Precision, device: str, positions: int) -> Engine:
        engine = Engine(Sampler(Policy(model), precision, device, sampler.sampling))
        started.append(weakref.ref(engine))
        return engine.start(positions)

    monkeypatch.setattr(vllm.VllmSampler, "_started", start)
    monkeypatch.setattr(vllm, "require_vllm", lambda *_: None)
    return started


def completions(folder: Path) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(each.ids for each in row.completions) for row in read_answers(folder / "answers.jsonl")]


def test_vllm_answers_and_ends_before_models_are_read(
    engines: list[weakref.ref[Engine]],
    policy_model: Path,
    other_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    ours = evaluate(work(tmp_path / "hf", policy, reference))
    load, loaded = evaluation._Loaded.fresh, []

    def fresh(self: Any, asked: Policy) -> Sampler:
        gc.collect()
        assert len(engines) == 1 and engines[0]() is None  # its memory is free
        loaded.append(asked)
        return load(self, asked)

    monkeypatch.setattr(evaluation._Loaded, "fresh", fresh)
    theirs = evaluate(work(tmp_path / "vllm", policy, reference, **VLLM))
    assert loaded == [policy, reference]
    assert completions(tmp_path / "vllm") == completions(tmp_path / "hf")
    assert theirs.own.metrics.reward == ours.own.metrics.reward
    one, other = theirs.own.metrics.kl, ours.own.metrics.kl
    assert one is not None and other is not None and one.sequence.value == pytest.approx(other.sequence.value)
    assert any("vLLM" in note for note in theirs.notes) and not any("vLLM" in note for note in ours.notes)
    # What is missing alone is made again: divergences need no engine.
    (tmp_path / "vllm" / "kl.jsonl").unlink()
    assert evaluate(work(tmp_path / "vllm", policy, reference, **VLLM)).own.metrics == theirs.own.metrics
    assert len(engines) == 1


def test_a_folder_is_of_one_backend(engines: list[weakref.ref[Engine]], policy_model: Path, tmp_path: Path) -> None:
    policy = Policy(str(policy_model))
    for name, how, other in (("hf", {}, VLLM), ("vllm", VLLM, {})):
        evaluate(work(tmp_path / name, policy, policy, **how))
        asked = json.loads((tmp_path / name / "asked.json").read_text())
        assert asked.get("backend") == (None if name == "hf" else "vllm")
        (tmp_path / name / "result.json").unlink()
        with pytest.raises(OtherEvaluation, match="another backend"):
            evaluate(work(tmp_path / name, policy, policy, **other))
    assert len(engines) == 1  # of the reference nothing is read again


def test_shards_that_were_killed_go_on(
    engines: list[weakref.ref[Engine]], policy_model: Path, other_model: Path, tmp_path: Path
) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    whole = evaluate(work(tmp_path / "whole", policy, reference, **VLLM))
    todo = work(tmp_path / "shards", policy, reference, **VLLM)
    evaluate_shard(todo, 0, 2)
    path = tmp_path / "shards" / "shards" / "00000" / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:9])
    (tmp_path / "shards" / "shards" / "00000.json").unlink()
    for number in (0, 1):
        evaluate_shard(todo, number, 2)
    joined = join_shards(todo, 2)
    assert completions(tmp_path / "shards") == completions(tmp_path / "whole")
    assert joined.own.metrics.reward == whole.own.metrics.reward
    assert len(engines) == 4


def test_guided_policies_are_refused(
    engines: list[weakref.ref[Engine]], policy_model: Path, classifier: Path, tmp_path: Path
) -> None:
    reference = Policy(str(policy_model))
    policy = replace(reference, guide=Guide(str(classifier), 0.1))
    todo = work(tmp_path / "guided", policy, reference, **VLLM)
    with pytest.raises(UsageError, match=r"set evaluation\.backend=hf"):
        evaluation._Loaded(todo, None).at(policy)
    assert engines == []


@pytest.mark.parametrize(
    ("how", "greedy", "known"),
    [
        (Sampling(), True, True),
        (Sampling(temperature=0.7), False, True),
        (Sampling(temperature=0.7), True, False),
        (Sampling(temperature=0.7, top_k=5), False, False),
        (Sampling(top_p=0.9), False, True),
    ],
)
def test_log_probs_that_vllm_reports(how: Sampling, greedy: bool, known: bool) -> None:
    assert vllm.reports_log_probs(how, greedy=greedy) is known
