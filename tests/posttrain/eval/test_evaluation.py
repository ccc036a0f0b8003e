"""Evaluations by tiny models: what is written is what the models do, at every eta, killed and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.eval.first_letter import FirstLetter

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Guide, Mode
from gpuherd.posttrain.eval.answers import BadAnswers, Scores, read_answers
from gpuherd.posttrain.eval.evaluation import Evaluating, OtherEvaluation, evaluate
from gpuherd.posttrain.eval.results import About, Divergence, Estimator, EvaluationOptions, read_result, read_values
from gpuherd.posttrain.types import Policy, Precision, Sampling

SAMPLING = Sampling(max_new_tokens=5, batch_size=6)
OPTIONS = EvaluationOptions(problems=5, samples=3, pass_at=(2,), resamples=100)


@pytest.fixture(scope="module")
def other_model(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's weights, pushed a little."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(policy_model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        model.lm_head.weight += 0.1 * torch.randn(model.lm_head.weight.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(value_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose head says something at random."""
    import torch

    from gpuherd.lm.guidance.classifier import new_classifier

    folder = tmp_path_factory.mktemp("guide") / "classifier"
    made = new_classifier(str(value_model))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        made.module.head.weight += torch.randn(made.module.head.weight.shape, generator=generator)
    made.save(folder)
    return folder


def work(folder: Path, policy: Policy, reference: Policy, **more: Any) -> Evaluating:
    words: dict[str, Any] = {"options": OPTIONS, "sampling": SAMPLING, **more}
    return Evaluating(About("GRPO", "letters", "letters", "tiny", 0), policy, reference, FirstLetter(), folder, **words)


def chain_kl(models: Sequence[Any], prompt: tuple[int, ...], ids: tuple[int, ...]) -> list[float]:
    """KL of a policy's and a reference's law at each position of an answer, written out in float64."""
    import torch

    found = []
    with torch.inference_mode():
        both = [torch.log_softmax(each(torch.tensor([[*prompt, *ids]])).logits[0].double(), -1) for each in models]
        for place in range(len(prompt) - 1, len(prompt) + len(ids) - 1):
            mine, theirs = both[0][place], both[1][place]
            found.append(float((mine.exp() * (mine - theirs)).sum()))
    return found


def test_exact_divergence_metrics_and_files_of_a_trained_policy(
    policy_model: Path, other_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    evaluation = evaluate(work(tmp_path, policy, reference))
    assert read_result(tmp_path) == evaluation
    (point,) = evaluation.points
    assert point.own and point.eta is None and point.metrics.problems == 5 and point.metrics.samples == 3
    scores = read_values(tmp_path / point.scores, Scores)
    assert scores.estimator is Estimator.EXACT and scores.kl is not None and scores.correct is not None
    answered = list(read_answers(tmp_path / point.answers))
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (other_model, policy_model)]
    assert [each.problem for each in answered] == [f"test-{number}" for number in range(5)]
    for row, kls, rights in zip(answered, scores.kl, scores.correct, strict=True):
        for completion, kl, right in zip(row.completions, kls, rights, strict=True):
            assert right is (completion.text[:1] <= "m" and completion.text != "")
            assert kl == pytest.approx(sum(chain_kl(models, row.prompt_ids, completion.ids)), abs=1e-4)
    assert point.metrics.pass_at_1 is not None
    assert point.metrics.pass_at_1.value == pytest.approx(sum(map(sum, scores.correct)) / 15)
    assert point.cost.tokens == sum(len(each.ids) for row in answered for each in row.completions)
    assert point.cost.seconds > 0 and point.cost.gpu_hours is None and point.cost.tokens_per_second is not None


@pytest.mark.slow
def test_estimators_are_of_the_sampled_tokens_at_the_temperature(
    policy_model: Path, other_model: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    sampling = replace(SAMPLING, temperature=0.7)
    found = {}
    for how in (Divergence.K1, Divergence.K3):
        options = replace(OPTIONS, kl=how, kl_samples=2)
        evaluation = evaluate(work(tmp_path / how, policy, reference, options=options, sampling=sampling))
        point = evaluation.own
        assert point.metrics.kl is not None and point.metrics.kl.completions == 10
        assert any("temperature 0.7" in note for note in evaluation.notes)
        found[how] = read_values(tmp_path / how / point.scores, Scores).kl
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (other_model, policy_model)]
    for number, row in enumerate(read_answers(tmp_path / "k1" / "answers.jsonl")):
        for sample, completion in enumerate(row.completions[:2]):
            whole = torch.tensor([[*row.prompt_ids, *completion.ids]])
            with torch.inference_mode():
                told = [torch.log_softmax(each(whole).logits[0].double() / 0.7, -1) for each in models]
            places = range(len(row.prompt_ids) - 1, whole.shape[1] - 1)
            p, q = ([float(each[at, whole[0, at + 1]]) for at in places] for each in told)
            k1 = sum(a - b for a, b in zip(p, q, strict=True))
            k3 = sum(math.exp(b - a) - 1 - (b - a) for a, b in zip(p, q, strict=True))
            assert found[Divergence.K1][number][sample] == pytest.approx(k1, abs=1e-4)  # type: ignore[index]
            assert found[Divergence.K3][number][sample] == pytest.approx(k3, abs=1e-4)  # type: ignore[index]
        assert found[Divergence.K1][number][2] is None  # type: ignore[index]


@pytest.mark.slow
def test_a_guided_policy_at_every_eta(policy_model: Path, classifier: Path, tmp_path: Path) -> None:
    from gpuherd.posttrain.rollout.sampler import Sampler

    reference = Policy(str(policy_model))
    policy = replace(reference, guide=Guide(str(classifier), 0.5, Mode.BERNOULLI, top_k=1000))
    made = []

    def sampler_of(asked: Policy) -> Sampler:
        made.append(asked)
        return Sampler(asked, todo.precision, "cpu", todo.sampling)

    todo = work(tmp_path, policy, reference, options=replace(OPTIONS, etas=(0.05, math.inf)))
    evaluation = evaluate(todo, sampler_of)
    assert len(made) == 1  # loaded once for all three, its own eta among them
    assert [point.eta for point in evaluation.points] == [None, 0.5, 0.05]
    assert evaluation.own.eta == 0.5
    kls = [point.metrics.kl.sequence.value for point in evaluation.points if point.metrics.kl is not None]
    assert kls[0] == pytest.approx(0, abs=1e-5)  # an infinite eta is the reference, where all tokens are candidates
    assert None not in kls and kls[0] < kls[1] < kls[2]  # type: ignore[operator]
    assert read_result(tmp_path).policy["guide"]["eta"] == 0.5
    # The same at one eta, alone.
    alone = evaluate(work(tmp_path / "alone", policy.at(0.05), reference))
    assert alone.own.metrics == evaluation.points[2].metrics


def test_the_reference_is_at_no_distance_and_nobody_needs_to_ask(policy_model: Path, tmp_path: Path) -> None:
    reference = Policy(str(policy_model))
    own = evaluate(work(tmp_path / "own", reference, reference)).own
    assert own.metrics.kl is not None and own.metrics.kl.sequence.value == 0
    asked = replace(OPTIONS, kl=Divergence.NONE, greedy=True, samples=1, pass_at=())
    none = evaluate(work(tmp_path / "none", reference, reference, options=asked))
    assert none.own.metrics.kl is None and none.own.metrics.majority == ()
    assert any("greedy" in note for note in none.notes)
    assert not list(tmp_path.glob("*/kl*.jsonl"))


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_result(policy_model: Path, other_model: Path, tmp_path: Path) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    whole = evaluate(work(tmp_path / "whole", policy, reference))
    folder = tmp_path / "killed"
    evaluate(work(folder, policy, reference))
    # As a kill at two places leaves it: a batch and a half of answers; then all answers and a part of the divergences.
    (folder / "kl.jsonl").write_text('{"kl": [1, 2, "x"]}\n' * 5)
    with pytest.raises(BadAnswers, match="damaged"):
        evaluate(work(folder, policy, reference))
    (folder / "kl.jsonl").write_text('{"kl": [1, 2]}\n' * 5)
    with pytest.raises(BadAnswers, match="not of these completions"):
        evaluate(work(folder, policy, reference))
    (folder / "kl.jsonl").unlink()
    for name, lines in (("answers.jsonl", 3), ("kl.jsonl", 2)):
        path = folder / name
        evaluate(work(folder, policy, reference))
        (folder / "result.json").unlink()
        kept = path.read_text().splitlines(keepends=True)
        path.write_text("".join(kept[:lines]) + kept[lines][: len(kept[lines]) // 2])
        todo = work(folder, policy, reference)
        again = evaluate(todo)
        assert again.points[0].metrics == whole.points[0].metrics
        assert read_values(folder / "scores.json", Scores) == read_values(tmp_path / "whole" / "scores.json", Scores)
        assert isinstance(todo.task, FirstLetter)
        asked = todo.task.asked
        assert set(asked) == ({"test-2", "test-3", "test-4"} if name == "answers.jsonl" else set())


def test_what_is_done_loads_no_model(policy_model: Path, other_model: Path, tmp_path: Path) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    first = evaluate(work(tmp_path, policy, reference))

    def never(_: Policy) -> Any:
        raise AssertionError("nothing is left to ask")

    assert evaluate(work(tmp_path, policy, reference), never).points == first.points


@pytest.mark.slow
def test_a_folder_of_another_evaluation_is_refused(policy_model: Path, other_model: Path, tmp_path: Path) -> None:
    policy, reference = Policy(str(other_model)), Policy(str(policy_model))
    evaluate(work(tmp_path, policy, reference))
    for other, name in (
        (work(tmp_path, reference, reference), "policy"),
        (work(tmp_path, policy, reference, options=replace(OPTIONS, problem_seed=1)), "problems_sha256"),
        (work(tmp_path, policy, reference, sampling=replace(SAMPLING, seed=1)), "sampling"),
        (work(tmp_path, policy, reference, precision=Precision("bfloat16")), "dtype"),
        (replace(work(tmp_path, policy, reference), task=FirstLetter(answer="b")), "problems_sha256"),
    ):
        with pytest.raises(OtherEvaluation, match=name):
            evaluate(other)
    # Other batches are no other evaluation.
    evaluate(work(tmp_path, policy, reference, sampling=replace(SAMPLING, batch_size=2)))
    path = tmp_path / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(BadAnswers, match="move it away"):
        evaluate(work(tmp_path, policy, reference))


@pytest.mark.slow
def test_a_divergence_that_is_not_finite_is_left_out_and_told(policy_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A reference that never says one of the tokens that the policy may.
    model = AutoModelForCausalLM.from_pretrained(policy_model)
    with torch.no_grad():
        model.lm_head.weight[7] = math.inf
    model.save_pretrained(tmp_path / "reference")
    AutoTokenizer.from_pretrained(policy_model).save_pretrained(tmp_path / "reference")
    for how in (Divergence.EXACT, Divergence.K3):
        options = replace(OPTIONS, problems=1, kl=how)
        policy, reference = Policy(str(policy_model)), Policy(str(tmp_path / "reference"))
        evaluation = evaluate(work(tmp_path / how, policy, reference, options=options))
        assert read_result(tmp_path / how) == evaluation
        kl = evaluation.own.metrics.kl
        assert kl is not None and kl.completions == 0 and kl.sequence.value is None and kl.token.value is None
        assert any("of 3 of 3 completions is not finite" in note for note in evaluation.notes)


@pytest.mark.slow
def test_a_reference_with_another_tokenizer_is_refused(policy_model: Path, tmp_path: Path) -> None:
    from tests.posttrain.tiny import tiny_llama

    strange = tiny_llama(tmp_path / "strange", characters="abc:q")
    with pytest.raises(UsageError, match="tokenizer"):
        evaluate(work(tmp_path / "out", Policy(str(policy_model)), Policy(str(strange))))


def test_options_that_contradict_each_other_are_refused() -> None:
    for wrong in (
        {"samples": 0},
        {"samples": 4, "pass_at": (8,)},
        {"samples": 4, "majority_at": (5,)},
        {"samples": 4, "majority_at": (2, 2)},
        {"greedy": True, "samples": 2},
        {"etas": (0.1, 0.1)},
        {"etas": (0.0,)},
        {"etas": (math.nan,)},
        {"kl_samples": 9},
        {"problems": 0},
        {"resamples": 10},
    ):
        with pytest.raises(UsageError, match=r"evaluation\."):
            EvaluationOptions(**wrong)


@pytest.mark.slow
def test_json_of_an_infinite_eta_is_json(policy_model: Path, classifier: Path, tmp_path: Path) -> None:
    reference = Policy(str(policy_model))
    policy = replace(reference, guide=Guide(str(classifier), math.inf, Mode.EXPECTATION, top_k=5))
    evaluate(work(tmp_path, policy, reference, options=replace(OPTIONS, problems=2)))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for name in ("result.json", "asked.json"):
        values = json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        assert values["policy"]["guide"]["eta"] == "inf"
    again = evaluate(work(tmp_path, policy, reference, options=replace(OPTIONS, problems=2)))
    assert again.own.metrics.kl is not None
