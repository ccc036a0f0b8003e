"""Q#-HF: a proxy reward model, its scores, and a histogram of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from tests.posttrain.guidance import exact
from tests.posttrain.guidance.letters import Letters, collecting, training

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode, read_form
from gpuherd.posttrain.algos.pita import PITA, PITAOptions
from gpuherd.posttrain.algos.qsharp_hf import QSharpFromHumanFeedback, QSharpHFOptions
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.engine.options import Scheduler
from gpuherd.posttrain.guidance.options import Loss

OPTIONS = QSharpHFOptions(
    samples_per_example=64,
    epochs=6,
    batch_size=32,
    lr=5e-3,
    scheduler=Scheduler.LINEAR,
    warmup_steps=5,
    validation_share=0.0,
    bradley_terry_sampling=False,
    proxy_epochs=4,
    proxy_lr=3e-3,
    proxy_batch_size=32,
)


def test_its_options_are_read_and_checked() -> None:
    told = {"proxy_epochs": 5, "proxy_lr": 1e-5, "proxy_loss_type": "bradley_terry", "loss_type": "mle"}
    options = read(QSharpHFOptions, {**told, "guidance": {"mode": "expectation"}}, "algos.QSharp-HF")
    assert options.guide("c", Loss.MLE).mode is Mode.EXPECTATION
    assert QSharpHFOptions().guide("c", Loss.MLE).mode is Mode.EXPECTATION
    for key, value in (
        ("proxy_epochs", 0),
        ("proxy_lr", 0.0),
        ("proxy_batch_size", 0),
        ("loss_type", "bradley_terry"),
        ("proxy_loss_type", "hinge"),
    ):
        with pytest.raises(UsageError, match=key):
            read(QSharpHFOptions, {key: value}, "algos.QSharp-HF")


def test_comparisons_are_collected_as_pitas_unless_a_file_has_them(reference: Path) -> None:
    work = collecting(reference, Letters())
    same = PITA(PITAOptions(samples_per_example=4, bradley_terry_sampling=False))
    ours = QSharpFromHumanFeedback(replace(OPTIONS, samples_per_example=4))
    assert list(ours.collect(work)) == list(same.collect(work)) != []
    of_a_file = QSharpFromHumanFeedback(replace(OPTIONS, preferences="somewhere.jsonl"))
    assert list(of_a_file.collect(work)) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # TRL's and its libraries', of which there are many kinds
def test_it_guides_by_what_the_proxy_makes_of_preferences(reference: Path, small: Path, tmp_path: Path) -> None:
    task = Letters()
    algorithm = QSharpFromHumanFeedback(OPTIONS)
    rows = list(algorithm.collect(collecting(reference, task)))
    work = training(reference, small, tmp_path, [rows])
    policy = algorithm.train(work)
    assert policy.guide is not None
    assert policy.guide.mode is Mode.EXPECTATION
    form = read_form(tmp_path / "model")
    assert form.loss == "mle" and len(form.atoms) == 11
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert len(scores) == 2 * len(rows)
    assert form.trained["scale"]["low"] == pytest.approx(min(scores))
    assert fmean(chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)) > 0.9
    trees = exact.trees(reference, task)
    plain = fmean(tree.worth(()) for tree in trees.values())
    assert fmean(exact.guided_reward(policy.guide, tree, form.atoms) for tree in trees.values()) > plain + 0.1
    before = (tmp_path / "model" / "classifier.json").stat()
    assert algorithm.train(work) == policy
    assert (tmp_path / "model" / "classifier.json").stat() == before
    with pytest.raises(UsageError, match="another training"):
        QSharpFromHumanFeedback(replace(OPTIONS, lr=1e-3)).train(work)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_preferences_of_a_file(reference: Path, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "preferences.jsonl"
    rows = [
        {"id": f"{one}{other}", "prompt": one + other, "chosen": one, "rejected": other}
        for one in "abc"
        for other in "abc"
        if one != other
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    algorithm = QSharpFromHumanFeedback(replace(OPTIONS, preferences=str(path), epochs=2))
    policy = algorithm.train(training(reference, small, tmp_path / "out", []))
    assert policy.guide is not None
    assert read_form(Path(policy.guide.classifier)).trained["comparisons"] == 6
