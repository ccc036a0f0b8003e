"""Statistics that could be measured: by which model, loaded how, and drawn from what."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.qa.encoders.small_encoders import NLI_LABELS, minilm, random_bert
from tests.qa.grading.judgings import some_judgments
from tests.qa.scoring.small_runs import specs_of

from gpuherd.errors import BadModel, UsageError
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.memory.weights import Precision
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.scoring.score import StatisticStage
from gpuherd.qa.statistics.language_model import generator_of
from gpuherd.qa.statistics.self_evaluation import chosen_examples

NEEDS = frozenset(EvidenceNeed)


def test_the_generator_is_loaded_as_it_was_unless_something_else_is_said(run: Run) -> None:
    then = replace(run, record={**run.record, "config": {**run.config, "dtype": "bf16", "adapter": "an/adapter"}})
    found = generator_of(then, ModelOptions())
    assert (found.options.dtype, found.options.adapter) == (Precision.BF16, "an/adapter")
    assert found.sha256 == run.record["model_sha256"]
    said = generator_of(then, ModelOptions(dtype=Precision.FP16))
    assert (said.options.dtype, said.options.adapter) == (Precision.FP16, "an/adapter")


def test_a_model_by_a_path_from_elsewhere_is_found(run: Run, tmp_path: Path) -> None:
    (tmp_path / "there" / "model").mkdir(parents=True)
    moved = replace(run, record={**run.record, "cwd": str(tmp_path / "there"), "config": {"model": "model"}})
    assert generator_of(moved, ModelOptions()).model == str(tmp_path / "there" / "model")
    silent = replace(run, record={**run.record, "model_sha256": None})
    with pytest.raises(UsageError, match="which files"):
        generator_of(silent, ModelOptions())


def test_a_generator_that_has_changed_is_refused(run: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(str(run.config["model"]), tmp_path / "model"))
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    changed = replace(run, record={**run.record, "config": {**run.config, "model": str(model)}})
    options = ScoreOptions(measures=("p-true",))
    spec = specs_of(options, changed)["p-true"]
    with pytest.raises(BadModel, match="not the model any more"):
        StatisticStage(spec, options, changed, list(run.answers()), Console(quiet=True))


def test_only_what_is_needed_is_planned(run: Run) -> None:
    options = ScoreOptions(relevance_model=str(minilm()))
    assert set(specs_of(options, run, needs=frozenset({EvidenceNeed.GREEDY}))) == set()
    assert set(specs_of(options, run, needs=frozenset({EvidenceNeed.RELEVANCE}))) == {"relevance"}
    assert set(specs_of(options, run)) == {"relevance", "sample-relevance", "similarity"}
    # The generator is asked only for measures that were named.
    assert "p-true" in specs_of(ScoreOptions(measures=("all",)), run)


def test_the_model_that_answered_is_no_model_of_similarity(run: Run) -> None:
    with pytest.raises(BadModel, match="language model"):
        specs_of(ScoreOptions(relevance_model=str(run.config["model"])), run)


def test_ideas_are_samples_which_a_run_may_not_have(run: Run) -> None:
    lines = [json.loads(line) | {"samples": []} for line in run.folder.answers.read_text().splitlines()]
    run.folder.answers.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    digest = hashlib.sha256(run.folder.answers.read_bytes()).hexdigest()
    greedy = replace(run, done={**run.done, "answers_sha256": digest})
    with pytest.raises(UsageError, match="has none"):
        specs_of(ScoreOptions(measures=("p-true",), p_true_ideas=True), greedy)


def test_every_setting_that_figures_depend_on_makes_another_statistic(run: Run, tmp_path: Path) -> None:
    nli = str(random_bert(tmp_path / "nli", NLI_LABELS))
    asked = ScoreOptions(measures=("all",), judge="x")
    others = [
        replace(asked, p_true="letter"),
        replace(asked, p_true_ideas=True),
        replace(asked, dtype=Precision.BF16),
    ]
    assert len({specs_of(each, run)["p-true"].name for each in (asked, *others)}) == 4
    by_nli = ScoreOptions(equivalence="nli", equivalence_model=nli)
    names = {
        specs_of(each, run)["entailment"].name
        for each in (
            by_nli,
            replace(by_nli, condition_on_question=True),
            replace(by_nli, long_texts="cut"),
            ScoreOptions(equivalence="judge"),
        )
    }
    assert len(names) == 4
    # The rule is no part of it: clusters can be made by another one without the model.
    loose = replace(by_nli, equivalence_rule="not-contradicting")
    assert specs_of(loose, run)["entailment"] == specs_of(by_nli, run)["entailment"]


def test_examples_have_labels_and_are_drawn_by_the_seed(run: Run) -> None:
    answers = list(run.answers())
    labels = {each.id: each for each in some_judgments("+-0?+-0?+-0?", [each.question.id for each in answers])}
    drawn = chosen_examples(answers, labels, 3, seed=1)
    assert drawn == chosen_examples(answers, labels, 3, seed=1) and len(drawn) == 3
    assert all(number % 4 in (0, 1) and label == (number % 4 == 0) for number, label in drawn)
    assert any(chosen_examples(answers, labels, 3, seed=seed) != drawn for seed in range(2, 6))
    with pytest.raises(UsageError, match="6 of 12"):
        chosen_examples(answers, labels, 7, seed=1)


def test_an_encoder_asks_for_one_gpu_or_for_none(run: Run, tmp_path: Path) -> None:
    model = random_bert(tmp_path / "cross", {0: "LABEL_0"})
    options = ScoreOptions(relevance_model=str(model), shards=2)
    spec = specs_of(options, run)["relevance"]
    answers = list(run.answers())
    work = StatisticStage(spec, options, run, answers, Console(quiet=True))
    assert work.asks.gpus == 0 and len(work.shards) == 2
    assert sorted(item for shard in work.shards for item in shard.items) == list(range(len(answers)))
    assert not work.folder.root.exists(), "a plan writes nothing"
