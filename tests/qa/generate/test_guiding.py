"""Runs of answers that a classifier guides: their records, what they depend on, what is refused, and their memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain import tiny
from tests.qa.conftest import made_once
from tests.qa.generate.conftest import Begin, answers_of
from tests.qa.small_models import seeded

from gpuherd.cli.main import run as in_process
from gpuherd.errors import BadModel, ExitCode, MissingModel, UsageError
from gpuherd.lm.backend import Generation
from gpuherd.lm.guidance.guide import Guide, Mode
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.qa.generate.experiment import done_lines
from gpuherd.qa.generate.finish import count_answers
from gpuherd.qa.generate.prepared import guide_bytes, refuse_other_settings
from gpuherd.qa.record import answered_of, line_of
from gpuherd.standin.machine import SimulatedMachine

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """A random one over the trained model's tokenizer. Read only."""

    def make(folder: Path) -> None:
        from gpuherd.lm.guidance.classifier import new_classifier

        made = new_classifier(trained)
        with seeded(2):
            torch.nn.init.normal_(made.module.head.weight, std=0.3)
        made.save(folder, loss="bce")

    return made_once(tmp_path_factory, "classifier", make)


def test_a_guided_run_keeps_what_the_guide_did_and_its_log_probs_are_the_models(begin: Begin, classifier: Path) -> None:
    plain = begin(samples=1, limit=6, run_id="plain")
    guided = begin(samples=1, limit=6, run_id="guided", guide=str(classifier), eta=0.05)
    for run in (plain, guided):
        run.answer()
    done = guided.finish()
    answers, before = answers_of(done), answers_of(plain.finish())
    assert all(each.samples[0].guided is None for each in before)
    assert [each.samples[0].token_ids for each in answers] != [each.samples[0].token_ids for each in before]
    total = 0.0
    for each in answers:
        sample = each.samples[0]
        assert sample.guided is not None
        assert len(sample.guided.kl) == len(sample.guided.log_probs) == len(sample.token_ids)
        assert (sample.guided.end_kl is None) == (sample.end_id is None)
        told = [*sample.guided.kl, sample.guided.end_kl]
        total += sum(kl for kl in told if kl is not None)
        assert all(kl >= -1e-6 for kl in told if kl is not None)
        assert answered_of(line_of(each)) == each
    assert done.done["counts"]["kl_per_answer"] == pytest.approx(total / 6)
    assert total > 0.1
    rows = pq.read_table(done.folder.answers_table).to_pylist()
    for row, each in zip(rows, answers, strict=True):
        kept = each.samples[0].guided
        assert row["which"] == "sample-0" and kept is not None
        assert (row["guided_log_probs"], row["guided_kl"]) == (list(kept.log_probs), list(kept.kl))
        assert (row["guided_end_log_prob"], row["guided_end_kl"]) == (kept.end_log_prob, kept.end_kl)
    assert not any("guided" in name for name in pq.read_schema(plain.folder.answers_table).names)
    assert done.record["guide"] == {
        "classifier": str(classifier), "eta": 0.05, "mode": "bernoulli", "top_k": 20
    }  # fmt: skip
    from tests.lm.test_decoding import module_of, tokenizer_of

    from gpuherd.lm.backend import PromptTokens
    from gpuherd.lm.model import LanguageModel

    folder = Path(guided.config.model)
    lm = LanguageModel(module_of(folder), tokenizer_of(folder))
    lines = (guided.folder.prompts).read_text().splitlines()
    for each, line in zip(answers, lines, strict=True):
        prompt = PromptTokens(each.question.id, tuple(json.loads(line)["token_ids"]))
        assert each.samples[0].log_probs == pytest.approx(
            lm.log_probs([prompt], [each.samples[0].token_ids])[0], abs=1e-4
        )


@pytest.mark.parametrize("lost", ["token", "end"])
def test_a_divergence_that_is_not_finite_is_counted_and_left_out_of_the_mean(
    begin: Begin, classifier: Path, lost: str
) -> None:
    run = begin(samples=1, limit=3, run_id="few", guide=str(classifier))
    run.answer()
    answers = [each for each in answers_of(run.finish()) if each.samples[0].end_id is not None]
    assert answers
    damaged = [replace(each, samples=(_without(each.samples[0], lost),)) for each in answers[:1]]
    alone, both = count_answers(damaged), count_answers([*answers, *damaged])
    assert (alone["kl_per_answer"], alone["kl_not_finite"]) == (None, 1)
    assert (both["kl_per_answer"], both["kl_not_finite"]) == (count_answers(answers)["kl_per_answer"], 1)
    assert count_answers(answers)["kl_not_finite"] == 0
    done = {"questions": 2, "shards": [], "counts": {**both, "refused": 0, "prompts_cut": 0}}
    told = "\n".join(done_lines(run.folder, done))
    assert "1 guided answers whose KL divergence is not finite: the mean is without them" in told
    done["counts"] = {**alone, "refused": 0, "prompts_cut": 0}
    assert "on average (KL)" not in "\n".join(done_lines(run.folder, done))


def _without(answer: Generation, lost: str) -> Generation:
    """With a divergence that is not finite."""
    assert answer.guided is not None
    if lost == "end":
        return replace(answer, guided=replace(answer.guided, end_kl=None))
    return replace(answer, guided=replace(answer.guided, kl=(None, *answer.guided.kl[1:])))


def test_another_classifier_under_the_same_name_is_refused(begin: Begin, classifier: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(classifier, mine)
    begun = begin(limit=4, guide=str(mine), run_id="changed")
    with pytest.raises(UsageError, match=r"--eta 0\.1, not 0\.2"):
        refuse_other_settings(begun.prepared.record, replace(begun.config, eta=0.2))
    (mine / "classifier.json").write_text((mine / "classifier.json").read_text().replace('"bce"', '"mle"'))
    with pytest.raises(UsageError, match="has changed since run changed was begun"):
        begin(limit=4, guide=str(mine), run_id="changed")
    with pytest.raises(AssertionError):
        begun.answer()  # the worker looks too


def test_what_can_not_guide_is_refused_before_a_run_begins(
    begin: Begin, classifier: Path, trained: Path, tmp_path: Path
) -> None:
    from gpuherd.lm.guidance.classifier import new_classifier

    with pytest.raises(MissingModel, match="is no classifier"):
        begin(guide=str(trained))
    with pytest.raises(BadModel, match="can't be read"):
        begin(guide=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="use bernoulli"):
        begin(guide=str(classifier), guide_mode=Mode.DISTRIBUTIONAL)
    tiny.tiny_llama(tmp_path / "llama")
    new_classifier(tmp_path / "llama").save(tmp_path / "other")
    with pytest.raises(UsageError, match="other tokenizers: id 0 is"):
        begin(guide=str(tmp_path / "other"))
    assert not (tmp_path / "runs").exists()


def test_memory_is_planned_for_both(classifier: Path, trained: Path, tmp_path: Path) -> None:
    """Weights, what is kept of each row, and the candidates; none where nothing guides."""
    assert guide_bytes(None, Workload()) == 0
    few, many = (guide_bytes(Guide(str(classifier)), Workload(rows, 400, 100)) for rows in (8, 512))
    weights = sum(path.stat().st_size for path in classifier.glob("*.safetensors"))
    assert weights * 0.9 < few < many
    wide = tmp_path / "wide"
    shutil.copytree(classifier, wide)
    with (wide / "value_head.safetensors").open("ab") as file:
        file.truncate(50 << 20)  # as of kind Q: the vocabulary's width for each atom
    assert guide_bytes(Guide(str(wide)), Workload(8, 400, 100)) - few > 49 << 20
    short = Workload(512, 10, 100)
    assert guide_bytes(Guide(str(classifier), top_k=400), short) > guide_bytes(Guide(str(classifier)), short)


def test_the_plan_asks_for_both(begin: Begin, classifier: Path) -> None:
    words: dict[str, Any] = {"limit": 4, "samples": 60, "batch_size": 2048, "max_new_tokens": 400}
    asked = [
        begin(**words, run_id=f"run-{number}", **more).plan.asks.memory_mb
        for number, more in enumerate(({}, {"guide": str(classifier)}))
    ]
    assert asked[0] is not None and asked[1] is not None and asked[1] > asked[0]


@pytest.mark.slow
def test_the_command(
    trained: Path, questions: Path, classifier: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command = [
        "--simulate", str(standin("2x40GB").path), "generate", f"--model={trained}", f"--dataset={questions}",
        f"--runs-dir={tmp_path / 'runs'}", "--limit=6", "--max-new-tokens=12", f"--guide={classifier}", "--eta=0.1",
        "--guide-top-k=10", "--check-interval=0.02", "--max-checks=1",
    ]  # fmt: skip
    assert in_process([*command, "--dry-run"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "guided by" in told and "eta 0.1 (bernoulli), among the 10 most probable tokens" in told
    assert in_process(command) == ExitCode.OK
    assert "nats an answer on average (KL)" in capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    answers = [answered_of(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert all(each.greedy is not None and each.greedy.guided is not None for each in answers)
    assert in_process([*command[:3], f"--runs-dir={tmp_path / 'runs'}", "--resume", run.name]) == ExitCode.OK
    assert "is complete" in capsys.readouterr().out
