"""Statistics of a run of the trained model, measured by the workers: every figure as a plain computation has it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.qa.encoders.small_encoders import NLI_LABELS, minilm, random_bert
from tests.qa.scoring.small_runs import QUESTIONS, SAMPLES, begin, measured, specs_of

from gpuherd.errors import ExitCode
from gpuherd.lm.model import LanguageModel
from gpuherd.models.load.loading import load_model
from gpuherd.qa.encoders.files import encoder_files
from gpuherd.qa.encoders.models import BiEncoder, CrossEncoder, EntailmentQuery, NliModel
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring import worker
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.statistics.files import BadStatistic, rows, statistics_of
from gpuherd.qa.statistics.language_model import Weigher
from gpuherd.qa.statistics.self_evaluation import PTruePrompts, measure_hidden, prompts_of, state_of


def test_relevance_of_greedy_answers_and_samples(run: Run) -> None:
    planned = specs_of(ScoreOptions(relevance_model=str(minilm())), run)
    greedy, drawn = planned["relevance"], planned["sample-relevance"]
    meta, found = measured(run, greedy)
    assert meta.items == QUESTIONS and meta.undefined == {} and meta.remarks == ()
    encoder = BiEncoder(encoder_files(str(minilm())))
    answers = list(run.answers())
    for answered, row in zip(answers, found, strict=True):
        assert answered.greedy is not None
        pieces = answered.greedy.pieces
        assert row["id"] == answered.question.id and len(row["relevance"]) == 1
        question = answered.question.question
        for place, value in enumerate(row["relevance"][0]):
            rest = "".join((*pieces[:place], *pieces[place + 1 :])).strip()
            (g,) = encoder.of_pairs([(f"{question} {answered.greedy.text.strip()}", f"{question} {rest}".strip())])
            assert g is not None and value == pytest.approx(1 - g, abs=1e-5)
    _, samples = measured(run, drawn)
    for answered, row in zip(answers, samples, strict=True):
        assert [len(each) for each in row["relevance"]] == [len(each.token_ids) for each in answered.samples]


def test_similarity_by_a_cross_encoder_is_the_mean_of_both_orders(run: Run, tmp_path: Path) -> None:
    model = random_bert(tmp_path / "cross", {0: "LABEL_0"})
    options = ScoreOptions(similarity_model=str(model))
    meta, found = measured(run, specs_of(options, run)["similarity"])
    assert "similar to itself" in meta.remarks[0], "a random model is no model of similarity"
    encoder = CrossEncoder(encoder_files(str(model)))
    for answered, row in list(zip(run.answers(), found, strict=True))[:3]:
        texts = [f"{answered.question.question} {each.text.strip()}" for each in answered.samples]
        for one in range(SAMPLES):
            for other in range(SAMPLES):
                there, back = encoder.of_pairs([(texts[one], texts[other]), (texts[other], texts[one])])
                assert there is not None and back is not None
                assert row["matrix"][one][other] == pytest.approx((there + back) / 2, abs=1e-5)


def test_entailment_by_an_nli_model(run: Run, tmp_path: Path) -> None:
    model = random_bert(tmp_path / "nli", NLI_LABELS)
    options = ScoreOptions(equivalence="nli", equivalence_model=str(model), condition_on_question=True)
    _, found = measured(run, specs_of(options, run)["entailment"])
    nli = NliModel(encoder_files(str(model)), condition_on_question=True)
    for answered, row in list(zip(run.answers(), found, strict=True))[:4]:
        texts = [each.text.strip() for each in answered.samples]
        different = list(dict.fromkeys(texts))
        assert [different[place] for place in row["texts"]] == texts
        for one, premise in enumerate(different):
            for other, hypothesis in enumerate(different):
                if one == other:
                    assert row["relations"][one][other] is None
                    continue
                (relation,) = nli.relations([EntailmentQuery(answered.question.question, premise, hypothesis)])
                assert relation is not None
                expected = [relation.entailment, relation.neutral, relation.contradiction]
                assert row["relations"][one][other] == pytest.approx(expected, abs=1e-5)


def test_what_the_generator_says_and_thinks(run: Run, trained: Path) -> None:
    options = ScoreOptions(measures=("p-true", "p-ik"), judge="x")
    planned = specs_of(options, run)
    _, p_true = measured(run, planned["p-true"])
    _, hidden = measured(run, planned["hidden"])
    model = LanguageModel.of(load_model(str(trained), device_map="cpu"))
    prompts = PTruePrompts(model.tokenizer, "true")
    for answered, row in list(zip(run.answers(), p_true, strict=True))[:4]:
        (weighed,) = Weigher(model, 1).weigh([prompts.tokens(answered)], prompts.words)
        assert weighed is not None and weighed[0] is not None
        assert row["log_p"] == pytest.approx(weighed[0], abs=1e-5) and 0 <= row["mass"] <= 1
    for prompt, row in list(zip(prompts_of(run), hidden, strict=True))[:4]:
        assert prompt.id == row["id"]
        assert np.allclose(state_of(row["state"]), model.hidden([prompt])[0], atol=1e-5)


def test_a_state_that_is_not_finite_is_none(run: Run) -> None:
    answers = list(run.answers())[:2]
    states = np.array([[1.0, np.inf], [1.5, -2.0]], dtype=np.float32)
    first, second = map(json.loads, measure_hidden(lambda prompts: states, prompts_of(run), answers))
    assert first["state"] is None and "finite" in first["why"]
    assert state_of(second["state"]).tolist() == [1.5, -2.0] and "why" not in second


def test_examples_of_p_true_are_not_asked_about(run: Run) -> None:
    from tests.qa.grading.judgings import some_judgments

    ids = [each.question.id for each in run.answers()]
    labels = {each.id: each for each in some_judgments("+-" * (QUESTIONS // 2), ids)}
    options = ScoreOptions(measures=("p-true",), p_true="letter", p_true_examples=2, judge="x", p_true_ideas=True)
    spec = specs_of(options, run, labels=labels)["p-true"]
    examples = dict(spec.settings["examples"])
    assert len(examples) == 2 and all(label == (number % 2 == 0) for number, label in examples.items())
    meta, found = measured(run, spec)
    assert meta.undefined == {"the question is one of the examples": 2}
    assert [row["number"] for row in found if row["log_p"] is None] == sorted(examples)


def test_answers_too_long_for_the_encoder_are_counted(run: Run, tmp_path: Path) -> None:
    from tests.qa.encoders.small_encoders import change_config

    model = random_bert(tmp_path / "short", {0: "LABEL_0"})
    change_config(model, max_position_embeddings=17)
    options = ScoreOptions(relevance_model=str(model))
    import safetensors.torch

    weights = safetensors.torch.load_file(model / "model.safetensors")
    name = "bert.embeddings.position_embeddings.weight"
    weights[name] = weights[name][:17].clone()
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    meta, found = measured(run, specs_of(options, run)["relevance"])
    long = meta.undefined["a text is too long for the model"]
    assert 0 < long < QUESTIONS and sum(row["relevance"] is None for row in found) == long


def test_a_killed_worker_s_half_line_is_done_again_to_the_byte(run: Run, tmp_path: Path) -> None:
    model = random_bert(tmp_path / "cross", {0: "LABEL_0"})
    spec = specs_of(ScoreOptions(relevance_model=str(model)), run)["relevance"]
    work, (words,) = begin(run, spec)
    assert worker.main(words) == ExitCode.OK
    shard = work.folder.shard(0)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    work.folder.shard_done(0).unlink()
    assert worker.main(words) == ExitCode.OK
    assert shard.read_bytes() == whole


def test_any_division_gives_the_same_figures(run: Run, tmp_path: Path) -> None:
    model = random_bert(tmp_path / "cross", {0: "LABEL_0"})
    spec = specs_of(ScoreOptions(relevance_model=str(model)), run)["relevance"]
    _, one = measured(run, spec)
    run.folder.statistic(spec.name, ".json").unlink()
    import shutil

    shutil.rmtree(run.folder.work)
    _, three = measured(run, spec, shards=3, batch_size=2)
    for left, right in zip(one, three, strict=True):
        assert left["relevance"][0] == pytest.approx(right["relevance"][0], abs=1e-5)


def test_files_of_statistics_are_checked(run: Run, tmp_path: Path) -> None:
    model = random_bert(tmp_path / "cross", {0: "LABEL_0"})
    spec = specs_of(ScoreOptions(relevance_model=str(model)), run)["relevance"]
    meta, _ = measured(run, spec)
    assert statistics_of(run.folder, run.answers_sha256) == [meta]
    assert statistics_of(run.folder, "other answers") == []
    path = run.folder.statistic(spec.name)
    path.write_bytes(path.read_bytes().replace(b"fact-0", b"fact-X"))
    with pytest.raises(BadStatistic, match="changed"):
        list(rows(run.folder, meta))


def test_a_worker_refuses_another_model_and_other_answers(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.qa.encoders.small_encoders import change_config

    model = random_bert(tmp_path / "cross", {0: "LABEL_0"})
    spec = specs_of(ScoreOptions(relevance_model=str(model)), run)["relevance"]
    _, (words,) = begin(run, spec)
    change_config(model, hidden_dropout_prob=0.2)
    assert worker.main(words) == ExitCode.BAD_INPUT
    assert "has changed" in capsys.readouterr().err
