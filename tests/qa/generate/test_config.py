"""What a run is asked for with, and which options make it another run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.gpus.query import machine
from gpuherd.lm.guidance.guide import Mode
from gpuherd.models.load.jobs import Resources
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generate.config import BACKENDS, GUIDING, NEUTRAL, GenerateConfig, with_escapes
from gpuherd.qa.generate.experiment import plan_jobs, work_of
from gpuherd.qa.generate.prepared import PreparedRun


def config(**options: Any) -> GenerateConfig:
    return GenerateConfig(**({"model": "org/a-model", "dataset": "trivia_qa"} | options))


def parsed(*words: str) -> GenerateConfig:
    parser = Parser()
    add_options(parser, GenerateConfig)
    return build(GenerateConfig, parser.parse_args(["--model=org/a-model", "--dataset=trivia_qa", *words]))


def test_without_a_word_answers_are_greedy() -> None:
    assert (config().decoding().greedy, config().decoding().samples) == (True, 0)
    assert (config(samples=3).decoding().greedy, config(samples=3).decoding().samples) == (False, 3)
    assert (config(samples=3, greedy=True).decoding().greedy, config().identity()["greedy"]) == (True, True)
    assert config().name() == config(greedy=True).name()


def test_the_name_says_what_the_answers_depend_on() -> None:
    name = config().name()
    assert name.startswith("a-model-trivia_qa-") and len(name) == len("a-model-trivia_qa-") + 8
    # Where and how it runs changes nothing.
    neutral: list[dict[str, Any]] = [
        {"max_gpus": 2},
        {"shards": 3},
        {"device_map": "cpu"},
        {"parallel": "layers"},
        {"retries": 4},
        {"share": True},
        {"runs_dir": "/elsewhere"},
        {"dry_run": True},
    ]
    for option in neutral:
        assert config(**option).name() == name, option
    telling: list[dict[str, Any]] = [
        {"model": "org/another"},
        {"dataset": "svamp"},
        {"seed": 1},
        {"samples": 1},
        {"temperature": 0.5},
        {"max_new_tokens": 65},
        {"stop": ("x",)},
        {"batch_size": 8},
        {"dtype": "bf16"},
        {"exact": True},
        {"few_shot": 2},
        {"limit": 4},
        {"prompt": "sentence"},
        {"chat": "no"},
        {"backend": "vllm"},
        {"guide": "classifier"},
    ]
    for option in telling:
        assert config(**option).name() != name, option
    assert config(exact=True).name() == config(exact=True, batch_size=8).name()
    guided = config(guide="classifier")
    assert guided.name() == config(guide="classifier", eta=0.1, guide_top_k=20).name()
    for option in ({"guide": "other"}, {"eta": 0.2}, {"guide_top_k": 5}, {"guide_mode": Mode.EXPECTATION}):
        assert config(**{"guide": "classifier"} | option).name() != guided.name(), option


def test_every_option_is_either_neutral_or_part_of_the_identity() -> None:
    # The backend stands in it by the name that it had first; as an engine it is where jobs run, and neutral.
    names = {each.name for each in fields(GenerateConfig)} - {"backend"}
    assert names == NEUTRAL | config(guide="x").identity().keys()
    assert names - {*GUIDING} == NEUTRAL | config().identity().keys()


def test_where_jobs_run_is_not_what_computes_the_answers() -> None:
    assert config(engine="slurm", partition="gpu").name() == config().name()
    assert config().identity()["engine"] == "transformers" and config(backend="vllm").identity()["engine"] == "vllm"
    assert config(backend="vllm", engine="ray").to_dict()["engine"] == "ray"
    for word in BACKENDS:
        with pytest.raises(UsageError, match=f"--backend {word}; --engine is where"):
            config(engine=word)


@pytest.mark.parametrize("word", BACKENDS)
def test_the_backend_is_no_engine_on_the_command_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--engine={word}")
    assert f"--backend {word}" in capsys.readouterr().err


def test_a_run_that_nothing_guides_is_called_as_before_there_were_guides() -> None:
    assert config().name() == "a-model-trivia_qa-77309b6e"


def test_a_name_is_safe(tmp_path: Path) -> None:
    data = tmp_path / "my questions (1).jsonl"
    data.write_text("{}")
    assert config(dataset=str(data)).name().startswith("a-model-my-questions-1-")
    assert config(dataset="org/name:config", model="../../x").name().startswith("x-name-")
    for name in ("", "..", "a/b", ".hidden", "-x", "a" * 121, "a b", "a\0"):
        with pytest.raises(UsageError, match="run-id"):
            config(run_id=name)


def test_a_local_path_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    absolute = config(model=str(tmp_path / "model")).identity()
    for said in ("./model", "model", "model/../model", "./model/.", "model/../../" + tmp_path.name + "/model"):
        assert config(model=said).identity() == absolute, said
    # A link is called as it is: the files that links of a snapshot point to have no ending that says what they are.
    (tmp_path / "facts.jsonl").symlink_to(tmp_path / "model")
    assert config(dataset="facts.jsonl").identity()["dataset"] == str(tmp_path / "facts.jsonl")


@pytest.mark.parametrize(
    "words",
    [
        ["--samples=-1"],
        ["--temperature=0"],
        ["--temperature=nan"],
        ["--top-p=1.5"],
        ["--max-new-tokens=0"],
        ["--eta=0.2"],
        ["--guide-top-k=5"],
        ["--guide=x", "--eta=0"],
        ["--guide=x", "--eta=inf"],
        ["--guide=x", "--eta=nan"],
        ["--guide=x", "--guide-top-k=0"],
        ["--guide=x", "--backend=vllm"],
        ["--guide=x", "--parallel=tensor"],
        ["--guide="],
        ["--stop", ""],
        ["--few-shot=-1"],
        ["--limit=0"],
        ["--engine=other"],
        ["--backend=other"],
        ["--batch-size=0"],
        ["--shards=0"],
        ["--dtype=fp32", "--quantization=4bit"],
        ["--backend=vllm", "--share"],
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    with pytest.raises((UsageError, SystemExit)):
        parsed(*words)


def test_stop_strings_as_they_are_typed() -> None:
    assert parsed("--stop", r"\n\n", "Q:", r"a\\nb").stop == ("\n\n", "Q:", r"a\nb")
    # Those that are given hold in place of the style's.
    assert parsed("--stop", "Q:").decoding(stop=("\n",)).stop == ("Q:",)
    assert parsed().decoding(stop=("\n",)).stop == ("\n",)


@given(st.text("ntb\\\n ü", max_size=20))
def test_any_stop_string_can_be_typed(text: str) -> None:
    assert with_escapes(text.replace("\\", "\\\\")) == text
    assert with_escapes(text.replace("\\", "")) == text.replace("\\", "")


def test_a_backslash_before_another_letter_is_itself() -> None:
    assert with_escapes(r"\boxed \d") == r"\boxed \d"


def test_a_name_is_a_name_though_a_file_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config(dataset="svamp", prompt="short").name()
    (tmp_path / "svamp").mkdir()
    (tmp_path / "short").write_text("{question}")
    monkeypatch.chdir(tmp_path)
    assert config(dataset="svamp", prompt="short").name() == before
    assert config(dataset="svamp", prompt="./short").name() != before


def test_sequences_at_once_are_answers_not_questions() -> None:
    assert config(batch_size=32).rows == 32
    assert config(batch_size=32, samples=10).rows == 3
    assert config(batch_size=32, samples=10, greedy=True).rows == 2
    assert config(batch_size=4, samples=10).rows == 1
    assert config(batch_size=32, exact=True).rows == 1


def test_the_plan_of_a_machine_without_gpus(trained: Path, tmp_path: Path) -> None:
    said = config(model=str(trained), batch_size=6, samples=2)
    record = dict.fromkeys(("identity", "questions_sha256", "prompts_sha256", "model_sha256", "end_tokens", "stop"), "")
    prepared = PreparedRun(record, tuple(range(5, 55)), (), 0)
    plan = plan_jobs(said, prepared, Resources((), cores=8))
    shards = work_of(said, prepared, QADirectory(tmp_path)).shards(plan.asks.at_once)
    assert plan.asks.at_once == 4 == len(shards)
    assert (plan.workload.batch, plan.workload.prompt_tokens, plan.workload.new_tokens) == (6, 54, 64)
    assert max(len(batch) for shard in shards for batch in shard.batches) == 3
    on_cpu = plan_jobs(config(model=str(trained), device_map="cpu", cpu_jobs=3), prepared, Resources((), cores=8))
    assert (on_cpu.asks.gpus, on_cpu.asks.memory_mb, on_cpu.asks.at_once) == (0, None, 3)


def test_vllm_divides_each_layer(standin: Callable[..., Any]) -> None:
    """So it is planned for a number of GPUs that its layers can be divided among; a model that fits one has one."""
    standin("4x60GB")
    have, prepared = Resources(tuple(machine().gpus), cores=8), PreparedRun({}, (50,) * 40, (), 0)
    layers, tensor = (
        plan_jobs(config(model="llama-3.1-70b", backend=backend), prepared, have).asks
        for backend in ("transformers", "vllm")
    )
    assert (layers.gpus, tensor.gpus) == (3, 4)
    assert plan_jobs(config(model="llama-3.1-8b", backend="vllm"), prepared, have).asks.gpus == 1
