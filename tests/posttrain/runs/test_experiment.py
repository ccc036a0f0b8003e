"""Before anything starts: what is looked at, what it asks for, where it would go; a run that goes on."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console
from tests.lm.vllm_stand_in import python_with_vllm
from tests.posttrain import tiny
from tests.posttrain.runs.conftest import MakeSettings

from gpuherd.errors import BadModel, ExitCode, JobCannotFit, MissingExtra, MissingModel, UsageError
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.records import Failure, Outcome
from gpuherd.lm.vllm import PYTHON
from gpuherd.posttrain.runs.experiment import RoundsExperiment, without_webhook
from gpuherd.posttrain.runs.folder import (
    BadRun,
    RoundsDirectory,
    RunRecord,
    begin,
    new_folder,
    read_record,
    resumed,
    unfinished,
)
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import Phase, StepRequest, combinations_of
from gpuherd.posttrain.runs.prepare import prepare, refuse_others, vocabulary
from gpuherd.posttrain.runs.render import end_lines
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.standin.machine import SimulatedMachine

DRY = RoundsOptions(dry_run=True)


def dry(settings: Settings, options: RoundsOptions = DRY) -> RoundsExperiment:
    experiment = RoundsExperiment(settings, options, console=Console(quiet=True), simulate=True)
    experiment.run()
    return experiment


def test_each_job_asks_for_one_gpu_and_its_memory(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("4x40GB")
    experiment = dry(make_settings(algos={"QSharp": {}, "GRPO": {}}))
    asked = {each.step.name: each.asked for each in experiment.plan}
    assert all(each.gpus == 1 and 2000 < each.memory_mb < 4000 for each in asked.values())
    # One that collects with a guided policy holds two models; the reserve is there once.
    first, later = (asked[f"QSharp_sums_tiny_r{number}_collect_0"].memory_mb for number in (0, 1))
    assert 0 < later - first < 100
    assert asked["GRPO_sums_tiny_r0_evaluate"].memory_mb >= asked["reference_sums_tiny_evaluate"].memory_mb
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_plan_is_printed_whole_in_any_window(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], terminal: bool
) -> None:
    standin("4x40GB")
    printed = io.StringIO()
    console = Console(file=printed, width=60, force_terminal=terminal, color_system=None)
    experiment = RoundsExperiment(make_settings(algos={"GRPO": {}}), DRY, console=console, simulate=True)
    experiment.run()
    lines = [line for line in printed.getvalue().splitlines() if line[:1] in "├│└ "]
    asked = sorted(f"priority {each.priority}" for each in experiment.plan)
    assert sorted(re.findall(r"priority -?\d+", " ".join(re.sub(r"[├│└─\s]+", " ", "".join(lines)).split()))) == asked
    assert max(map(len, lines)) <= 60 if terminal else all("priority" in line for line in lines if "GPU" in line)


def test_a_model_that_fits_nowhere_is_refused(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("2x700MB")
    with pytest.raises(JobCannotFit):
        dry(make_settings())


def llama_3b(folder: Path, like: str) -> str:
    """A folder with the config of a llama of 3 billion numbers in bfloat16, and the tokenizer of another model."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(like) / name).read_bytes())
    shape = {"hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192, "vocab_size": 128256}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": True} | shape | heads)
    )
    return str(folder)


def test_a_training_asks_for_what_its_options_take(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("1x80GB")
    large = llama_3b(tmp_path / "large", make_settings().models["tiny"].reference)
    models = {"large": {"reference": large, "value": large}}

    def memory_gb(algorithm: str, **options: object) -> float:
        settings = make_settings(
            models=models, system={"dtype": "bf16"}, algos={algorithm: options}, rounds_of_training=1
        )
        (train,) = (each for each in dry(settings).plan if each.step.phase is Phase.TRAIN)
        return train.asked.memory_mb / 1024

    plain = memory_gb("GRPO", kl_coef=0.0)
    assert 20 < plain < 60  # 6.4 GB of weights, as much of gradients, twice as much of the optimiser
    assert memory_gb("GRPO", kl_coef=0.1) - plain == pytest.approx(6, abs=0.5)  # the reference
    assert memory_gb("GRPO", kl_coef=0.0, lora={"r": 8}) < plain / 2
    # Of packed rows a mask of each sequence: prompt and answer squared, and 6 bytes for each.
    sft, packed = (memory_gb("SFT", packing=packing) for packing in (False, True))
    assert sft < packed < sft + 0.1
    assert memory_gb("GRPO-HF") > plain + 5  # the proxy
    assert memory_gb("QSharp") > plain + 20  # its weights are float32 while it learns
    # A head of kind Q is as wide as the vocabulary: weights, gradients twice, two states, 4 bytes each.
    head = 128256 * 3073 * 20 / 1024**3
    assert head < memory_gb("QSharp", classifier_type="q") - memory_gb("QSharp") < head + 1
    with pytest.raises(JobCannotFit, match="and the classifier's head together take"):
        memory_gb("QSharp", classifier_type="q", loss_type="mle")  # and for each of 11 atoms
    # All weights of a proxy learn in float32, before the policy's adapter does.
    assert memory_gb("GRPO-HF", lora={"r": 8}) > 16 * 3.2
    assert memory_gb("QSharp-HF") > memory_gb("QSharp") - 1
    with pytest.raises(JobCannotFit, match=r"GRPO_sums_large_r0_train: .* are missing; what would fit"):
        dry(make_settings(models=models, training={"micro_batch_size": 400}, algos={"GRPO": {}}))


def test_draws_that_are_cut_are_warned_about_where_it_matters(make_settings: MakeSettings) -> None:
    def told(top_p: float, **algos: object) -> str:
        generation = {"max_new_tokens": 4, "batch_size": 3, "top_p": top_p}
        console = Console(file=io.StringIO(), width=200)
        settings = make_settings(algos=algos, generation=generation, rounds_of_training=1)
        RoundsExperiment(settings, DRY, console=console, simulate=True).run()
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    both = told(0.9, GRPO={}, PPO={}, QSharp={})
    assert "warning: GRPO, PPO: draws by generation.top_p=0.9 are not of the law" in both
    assert "set generation.top_p=1 and generation.top_k=0" in both
    assert "warning" not in told(1.0, GRPO={})
    assert "warning" not in told(0.9, QSharp={}, REINFORCE={"greedy": True})


def test_options_that_are_seldom_meant_are_warned_about_with_their_keys(make_settings: MakeSettings) -> None:
    def told(**options: object) -> str:
        settings = make_settings(algos={"mine": {"algorithm": "GRPO", **options}}, rounds_of_training=1)
        console = Console(file=io.StringIO(), width=200)
        RoundsExperiment(settings, DRY, console=console, simulate=True).run()
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    warned = told(loss_type="gspo", clip_range=0.2)
    assert warned.count("warning: algos.mine.clip_range=0.2, 0.2 above 1, with loss_type=gspo") == 1
    assert "warning" not in told(loss_type="gspo")
    with pytest.raises(UsageError, match=r"^algos.mine.overlong_buffer=5000; an answer has \d+ tokens at most$"):
        told(overlong_buffer=5000)


def test_a_run_that_can_not_go_on_says_so() -> None:
    """What a job was given may be at fault: the same command would fail for ever."""

    def told(*classes: FailureClass, stopped: ExitCode | None = None) -> str:
        failures = tuple(Failure(each, each, each, "why", 1, None) for each in classes)
        outcome = Outcome(1, len(failures), 0, 1, failures, stopped)
        return end_lines(outcome, Path("outputs/x"))[-1]

    stuck = told(FailureClass.CRASH, FailureClass.BAD_INPUT)
    assert stuck.startswith(
        "this run can't go on to its end: bad input would fail in the same way again; begin another"
    )
    assert "goes on from here" not in stuck
    for passing in (FailureClass.CRASH, FailureClass.CANNOT_WRITE, FailureClass.MISSING):
        assert told(passing) == "not all is done: the same command, or --resume outputs/x, goes on from here"
    assert told(FailureClass.BAD_INPUT, stopped=ExitCode.INTERRUPTED).startswith("stopped: the same command goes on")
    assert end_lines(Outcome(3, 0, 0, 0), Path("x")) == []


def test_the_splits_of_a_file_are_told(make_settings: MakeSettings, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(100)))
    console = Console(file=io.StringIO(), width=200)
    settings = make_settings(datasets={"own": {"task": str(file)}})
    RoundsExperiment(settings, DRY, console=console, simulate=True).run()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "own: 81 problems to train on, 9 problems held out, 10 problems in the test\n" in printed


def test_contexts_longer_than_a_model_are_told_or_refused(make_settings: MakeSettings, tmp_path: Path) -> None:
    def told(new_tokens: int, prompt: int) -> str:
        file = tmp_path / f"own{prompt}.jsonl"
        rows = [{"prompt": f"{n}".rjust(prompt, "0"), "answer": "1"} for n in range(20)]
        file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        console = Console(file=io.StringIO(), width=300)
        generation = {"max_new_tokens": new_tokens, "batch_size": 3}
        settings = make_settings(datasets={"own": {"task": str(file)}}, generation=generation)
        RoundsExperiment(settings, DRY, console=console, simulate=True).run()
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "places" not in told(56, 200)
    assert "warning: datasets.own with models.tiny: a prompt of 200 tokens and 57 new ones are more" in told(57, 200)
    with pytest.raises(UsageError, match=r"datasets\.own with models\.tiny: a prompt has 300 tokens"):
        told(1, 300)
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": "1" * 300} for n in range(20)]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    datasets = {"long": {"task": str(file)}}
    dry(make_settings(datasets=datasets))
    with pytest.raises(UsageError, match=r"datasets\.long with models\.tiny: a row has 30[45] tokens"):
        dry(make_settings(datasets=datasets, algos={"SFT": {}}))


def test_answers_to_imitate_are_counted_as_long_as_they_are(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    """Rows that are drawn later are counted with ``max_new_tokens``, and the plan says so."""
    standin("1x200GB")
    large = llama_3b(tmp_path / "large", make_settings().models["tiny"].reference)

    def asked(algorithm: str, length: int, **options: object) -> StepRequest:
        data = tmp_path / f"{length}.jsonl"
        rows = [{"id": f"p{each}", "question": f"{each}?", "answer": "7" * length} for each in range(20)]
        data.write_text("".join(json.dumps(each) + "\n" for each in rows))
        settings = make_settings(
            models={"large": {"reference": large, "value": large}},
            datasets={"mine": {"task": str(data)}},
            algos={algorithm: options},
            generation={"max_new_tokens": 100, "batch_size": 3},
            rounds_of_training=1,
        )
        return next(each.asked for each in dry(settings).plan if each.step.phase is Phase.TRAIN)

    short, long = asked("SFT", 4), asked("SFT", 1000)
    assert (
        "SFT of " in short.sentence and "and answers of 6: " in short.sentence and "answers of 1002: " in long.sentence
    )
    drawn = asked("SFT", 4, source="samples")
    assert drawn == asked("SFT", 1000, source="samples")
    assert short.memory_mb < drawn.memory_mb < long.memory_mb
    assert "answers of max_new_tokens=100, which are drawn before it: " in drawn.sentence
    assert "answers of max_new_tokens=100, which are drawn: " in asked("GRPO", 4).sentence
    guided = asked("QSharp", 4).sentence
    assert guided.startswith("QSharp's classifier of ") and "which are drawn before it: " in guided


def test_a_classifier_decodes_with_its_head_and_in_its_own_numbers(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("1x200GB")
    large = llama_3b(tmp_path / "large", make_settings().models["tiny"].reference)
    models = {"large": {"reference": large, "value": large}}

    def memory_gb(dtype: str | None, **options: object) -> float:
        system, algos = {"dtype": dtype}, {"QSharp": options}
        settings = make_settings(models=models, system=system, algos=algos, rounds_of_training=1)
        found = {each.step.name: each.asked.memory_mb / 1024 for each in dry(settings).plan}
        return found["QSharp_sums_large_r0_evaluate"]

    half = memory_gb("bf16")
    head = 128256 * 3073 * 2 / 1024**3
    assert memory_gb("bf16", classifier_type="q") - half == pytest.approx(head, rel=0.05)  # sums are right or wrong
    assert memory_gb("bf16", classifier_type="q", loss_type="mle") - half == pytest.approx(11 * head, rel=0.05)
    assert memory_gb(None) - half == pytest.approx(6, abs=0.5)  # a classifier is float32 where nothing is said


def test_a_reward_model_lies_beside_what_decodes(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("1x80GB")
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"id": f"p{each}", "prompt": f"{each}?"}) + "\n" for each in range(20)))
    scorer = llama_3b(tmp_path / "scorer", make_settings().models["tiny"].reference)

    def memory_gb(**changed: object) -> dict[str, float]:
        dataset = {"task": str(data), "reward_model": scorer} | changed
        plan = dry(make_settings(datasets={"mine": dataset}, algos={"GRPO": {}}, rounds_of_training=1)).plan
        return {each.step.phase.value: each.asked.memory_mb / 1024 for each in plan}

    found = memory_gb()
    assert all(found[phase] > 8 for phase in ("train", "evaluate"))
    with pytest.raises(MissingModel):
        memory_gb(reward_model="./no-such-scorer")


def test_vllm_lies_beside_what_trains(
    make_settings: MakeSettings,
    standin: Callable[..., SimulatedMachine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standin("1x80GB")
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    large = llama_3b(tmp_path / "large", make_settings().models["tiny"].reference)
    models = {"large": {"reference": large}}

    def asked(backend: str, **options: object) -> tuple[float, str]:
        generation = {"max_new_tokens": 4, "batch_size": 3, "backend": backend}
        settings = make_settings(
            models=models,
            system={"dtype": "bf16"},
            algos={"GRPO": options},
            generation=generation,
            rounds_of_training=1,
        )
        (train,) = (each for each in dry(settings).plan if each.step.phase is Phase.TRAIN)
        return train.asked.memory_mb / 1024, train.asked.sentence

    (plain, _), (both, told) = asked("hf"), asked("vllm")
    # While answers are drawn there are no gradients and activations, of 6 GiB and more; while the policy learns vLLM
    # sleeps. Of 6 GiB of weights in bfloat16 and what its own process takes the plan has what is more.
    assert 2 <= both - plain < 5 and "vLLM for 3 answers in turns with it" in told
    # Where the rows of the round are learnt from it has ended before.
    assert asked("vllm", online=False) == asked("hf", online=False)


def test_places_are_divided_among_those_that_collect(make_settings: MakeSettings) -> None:
    datasets = {"sums": {"task": "arithmetic", "settings": {"digits": 2, "train": 400, "test": 4}}}
    settings = make_settings(datasets=datasets, algos={"QSharp": {}, "CD": {}, "GRPO": {}})
    settings = replace(settings, data_collection=replace(settings.data_collection, shards=None))
    prepared = prepare(settings)
    assert [each.shards for each in combinations_of(settings, prepared, 8)][:2] == [4, 4]
    alone = replace(settings, parallel_generation=False)
    assert [each.shards for each in combinations_of(alone, prepared, 8)][:2] == [1, 1]
    three = replace(settings, data_collection=replace(settings.data_collection, shards=3))
    assert {each.shards for each in combinations_of(three, prepared, 8)} == {3}


def test_places_are_divided_among_evaluations(make_settings: MakeSettings) -> None:
    datasets = {"sums": {"task": "arithmetic", "settings": {"digits": 2, "train": 12, "test": 100}}}
    evaluation = {"num_samples": 2, "resamples": 100}
    settings = make_settings(
        datasets=datasets, evaluation=evaluation, algos={"QSharp": {}, "GRPO": {}}, data_collection={}
    )
    prepared = prepare(settings)

    def shards(settings: Settings, places: int) -> set[int]:
        return {each.evaluation_shards["sums"] for each in combinations_of(settings, prepared, places)}

    assert shards(settings, 8) == {4} and shards(settings, 1) == {1}
    assert shards(replace(settings, parallel_generation=False), 8) == {1}
    five = replace(settings, evaluation=replace(settings.evaluation, shards=5))
    assert shards(five, 1) == {5}
    # A problem is a batch here (3 rows of 2 samples): so many shards at most.
    assert shards(replace(settings, evaluation=replace(settings.evaluation, shards=1000)), 8) == {100}
    plan = dry(five).plan
    joins = [each for each in plan if each.step.joins]
    assert [(each.asked.gpus, each.asked.memory_mb) for each in joins] == [(0, 0)] * (2 * 2 + 1)
    assert sum(each.step.phase is Phase.EVALUATE for each in plan) == 6 * (2 * 2 + 1)


def test_the_plan_says_how_an_evaluation_is_divided(make_settings: MakeSettings) -> None:
    printed = io.StringIO()
    settings = make_settings(evaluation={"num_samples": 2, "shards": 2}, rounds_of_training=1)
    RoundsExperiment(settings, DRY, console=Console(file=printed, width=300), simulate=True).run()
    assert printed.getvalue().count("evaluate on sums: 4 problems, 2 jobs, each 1 GPU with ") == 2
    assert printed.getvalue().count(", and one that joins them") == 2


def test_a_run_of_a_version_without_shards_of_evaluations_goes_on(make_settings: MakeSettings) -> None:
    settings = make_settings()
    folder = begun(settings, datetime(2026, 1, 1))
    values = json.loads(folder.run_json.read_bytes())
    del values["settings"]["evaluation"]["shards"]
    for each in values["combinations"]:
        del each["evaluation_shards"]
    folder.run_json.write_text(json.dumps(values))
    record = read_record(folder)
    assert record.settings == settings and record.identity == settings.identity()
    evaluations = [step for step in record.steps() if step.phase is Phase.EVALUATE]
    assert len(evaluations) == 3 and all(step.shards == 1 and not step.joins for step in evaluations)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data_collection": {"max_examples": 99}}, "data_collection.max_examples, sums"),
        ({"evaluation": {"max_examples": 5, "num_samples": 1}}, "evaluation.max_examples, sums"),
        ({"datasets": {"sums": {"task": "arithmetick"}}}, r"datasets.sums: .*did you mean arithmetic\?"),
        ({"datasets": {"sums": {"task": "arithmetic", "settings": {"digit": 1}}}}, "datasets.sums: .*digit"),
    ],
)
def test_bad_data_is_refused(make_settings: MakeSettings, changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dry(make_settings(**changed))


def test_models_that_are_not_there_or_speak_other_tokens(make_settings: MakeSettings, tmp_path: Path) -> None:
    with pytest.raises(MissingModel):
        dry(make_settings(models={"tiny": {"reference": "./no-such-model", "value": "./no-such-model"}}))
    other = tmp_path / "other"
    tiny.character_tokenizer(other, characters="abc")
    (other / "config.json").write_text('{"model_type": "llama"}')
    settings = make_settings()
    reference = settings.models["tiny"].reference
    with pytest.raises(UsageError, match=r"models\.tiny: "):
        dry(make_settings(models={"tiny": {"reference": reference, "value": str(other)}}))
    assert (vocabulary(reference) or {})["</s>"] == 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("block", ["generation", "evaluation"])
def test_a_backend_that_is_not_installed_is_missed_before_rounds_begin(make_settings: MakeSettings, block: str) -> None:
    with pytest.raises(MissingExtra, match=rf"{block}\.backend=vllm: vLLM can't be imported \(it is not installed\)"):
        prepare(make_settings(**{block: {"backend": "vllm"}}))


@pytest.mark.parametrize("algorithm", ["QSharp-HF", "GRPO-HF"])
def test_a_proxy_is_looked_at_before_rounds_begin(make_settings: MakeSettings, tmp_path: Path, algorithm: str) -> None:
    reference = Path(make_settings().models["tiny"].reference)

    def proxy(name: str, **config: object) -> str:
        """The reference's tokens with another config."""
        folder = tmp_path / name
        shutil.copytree(reference, folder)
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | config))
        return str(folder)

    def look(model: str) -> None:
        prepare(make_settings(algos={algorithm: {"proxy_model": model}}))

    look(proxy("fine"))
    with pytest.raises(MissingModel):
        look("./no-such-proxy")
    tiny.tiny_llama(tmp_path / "other", characters="abc")
    with pytest.raises(UsageError, match=rf"algos\.{algorithm}, models\.tiny: the proxy's tokenizer is another than"):
        look(str(tmp_path / "other"))
    with pytest.raises(UsageError, match=r"models\.tiny: .* classifies into 3 kinds; a reward model has one output"):
        labels = {str(number): str(number) for number in range(3)}
        look(proxy("kinds", architectures=["LlamaForSequenceClassification"], id2label=labels))
    look(proxy("scorer", architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"}))
    with pytest.raises(BadModel, match="is of the architecture mamba, which scores no sequences"):
        look(proxy("mamba", model_type="mamba", architectures=["MambaForCausalLM"]))
    with pytest.raises(UsageError, match="is a classifier that guides"):
        (Path(proxy("guide")) / "classifier.json").touch()
        look(str(tmp_path / "guide"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(reference)}))
    with pytest.raises(UsageError, match="is an adapter"):
        look(str(tmp_path / "adapter"))


def test_a_teacher_is_looked_at_before_rounds_begin(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("1x80GB")
    reference = make_settings().models["tiny"].reference

    def settings(teacher: str) -> Settings:
        return make_settings(algos={"Distill": {"teacher": teacher}}, rounds_of_training=1)

    inputs = prepare(settings(reference)).inputs
    assert inputs[f"algos.Distill: {reference}"] == inputs["models.tiny.reference"]
    tiny.tiny_llama(tmp_path / "other", characters="abc")
    with pytest.raises(UsageError, match=r"algos\.Distill, models\.tiny: .*other has another tokenizer than"):
        prepare(settings(str(tmp_path / "other")))
    with pytest.raises(MissingModel):
        prepare(settings("./no-such-teacher"))

    def memory_gb(teacher: str, phase: Phase = Phase.TRAIN) -> float:
        share = {"teacher": teacher, "on_policy": 0.5}
        plan = dry(make_settings(algos={"Distill": share}, rounds_of_training=1)).plan
        return next(each.asked.memory_mb for each in plan if each.step.phase is phase) / 1024

    large = llama_3b(tmp_path / "large", reference)
    # It is the teacher that answers before; here everything that decodes is float32.
    assert memory_gb(large, Phase.COLLECT) - memory_gb(reference, Phase.COLLECT) == pytest.approx(12.8, abs=1.5)
    # The answers are scored by no model: the policy is tiny, and 3.2 billion numbers lie beside it in bfloat16.
    assert memory_gb(large) - memory_gb(reference) == pytest.approx(6.4, abs=1)


def test_a_teacher_of_its_own_gpu_is_counted_there(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("4x80GB")
    large = llama_3b(tmp_path / "large", make_settings().models["tiny"].reference)

    def training(gpus: int = 1, **options: object) -> StepRequest:
        algos = {"Distill": {"teacher": large, "gpus": gpus, "batch_size": 4, **options}}
        plan = dry(make_settings(algos=algos, rounds_of_training=1)).plan
        return next(each.asked for each in plan if each.step.phase is Phase.TRAIN)

    beside, apart = training(), training(teacher_device="own")
    assert (beside.gpus, apart.gpus, training(2, teacher_device="own").gpus) == (1, 2, 4)
    assert apart.memory_mb < beside.memory_mb  # the policy and what it computes are on the other one
    assert apart.memory_mb > 6.4 * 1000
    assert apart.sentence.startswith("Distill of ") and f", teacher {large} on another" in apart.sentence
    assert f", with teacher {large}, " in beside.sentence
    standin("1x80GB")
    with pytest.raises(JobCannotFit, match="it trains on 2 GPUs together, and there are 1"):
        training(teacher_device="own")


def test_a_data_set_without_right_and_wrong_is_no_ground_for_rlcr(make_settings: MakeSettings) -> None:
    datasets = {"texts": {"task": "sentiment"}}
    with pytest.raises(UsageError, match="knows no right and wrong"):
        prepare(make_settings(algos={"RLCR": {}}, datasets=datasets))


def begun(settings: Settings, now: datetime) -> RoundsDirectory:
    folder = new_folder(settings, now)
    record = RunRecord(settings, combinations_of(settings, prepare(settings), 1), settings.identity(), "/", {})
    begin(folder, record)
    return folder


def test_the_same_experiment_goes_on_with_its_newest_unfinished_run(make_settings: MakeSettings) -> None:
    settings = make_settings()
    assert unfinished(settings) is None
    first, second = (begun(settings, datetime(2026, 1, 1, 12, 0, second)) for second in (0, 1))
    other = make_settings(rounds_of_training=1)
    third = begun(other, datetime(2026, 1, 1, 12, 0, 2))
    assert first.root.name == "2026-01-01_12-00-00"
    found = unfinished(settings)
    assert found is not None and found.root == second.root
    second.done.touch()
    found = unfinished(settings)
    assert found is not None and found.root == first.root
    found = unfinished(other)
    assert found is not None and found.root == third.root
    # Two that begin in one second have folders of their own.
    assert new_folder(settings, datetime(2026, 1, 1, 12, 0, 0)).root.name == "2026-01-01_12-00-00_1"
    assert dry(settings).folder.root == first.root


def test_a_run_goes_on_with_its_own_settings(make_settings: MakeSettings) -> None:
    settings = make_settings()
    folder = begun(settings, datetime(2026, 1, 1))
    assert resumed(folder, {"resume_from": "x"}).settings == settings
    assert resumed(folder, {"job_priority": "a.b"}).settings.job_priority == "a.b"
    assert resumed(folder, {"rounds_of_training": 2}).settings == settings
    with pytest.raises(UsageError, match=r"begun with rounds_of_training=2; with another it is another run"):
        resumed(folder, {"rounds_of_training": 3})
    with pytest.raises(UsageError, match="no such key"):
        resumed(folder, {"nothing.here": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "no run of gpuherd posttrain"),
        ('{"kind": "qa", "format": 1}', "no run of gpuherd posttrain"),
        ('{"kind": "posttrain", "format": 99}', "newer gpuherd"),
        ('{"kind": "posttrain", "format": 1}', "damaged or of another gpuherd"),
        ('{"kind": "posttrain", "format": 1, "settings": {"x": 1}}', "there is no key x"),
    ],
)
def test_records_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    folder = RoundsDirectory(tmp_path)
    with pytest.raises(BadRun, match="no run of gpuherd posttrain"):
        read_record(folder)
    folder.run_json.write_text(text)
    with pytest.raises(BadRun, match=message):
        read_record(folder)


def test_a_plan_is_json(make_settings: MakeSettings) -> None:
    told = json.loads(json.dumps(dry(make_settings()).to_dict(), allow_nan=False))
    assert told["experiment"] == "small" and not told["goes_on"]
    assert {"name", "phase", "round", "needs", "priority", "gpus", "memory_mb", "done"} <= told["jobs"][0].keys()


def test_one_job_at_a_time_where_asked(make_settings: MakeSettings) -> None:
    settings = make_settings(system={"use_parallel_execution": False})
    assert RoundsExperiment(settings, DRY, console=Console(quiet=True)).options.max_concurrent == 1
    with pytest.raises(UsageError, match="--gpus-per-job"):
        RoundsOptions(gpus_per_job=2)


def test_a_run_does_not_go_on_with_other_problems_or_models(make_settings: MakeSettings, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    rows = [{"id": f"p{number}", "prompt": f"{number}+1=", "answers": [str(number + 1)]} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = make_settings(datasets={"mine": {"task": str(data)}}, data_collection={"max_examples": 4})
    before = prepare(settings).inputs
    refuse_others(before, prepare(settings).inputs, tmp_path)
    data.write_text(data.read_text().replace("+1=", "+2="))
    told = r"other problems, rewards or model files .*: datasets\.mine, training, datasets\.mine"
    with pytest.raises(UsageError, match=told):
        refuse_others(before, prepare(settings).inputs, tmp_path)


def test_a_reward_of_ones_own_is_looked_at_first_and_is_part_of_the_run(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"

    def dataset(function: str, **more: object) -> Settings:
        return make_settings(datasets={"sums": {"task": "arithmetic", "reward": f"{file}:{function}", **more}})

    file.write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    with pytest.raises(UsageError, match=r"datasets\.sums: reward .*own\.py:scor: .*no function scor; it has score"):
        dry(dataset("scor"))
    with pytest.raises(UsageError, match=r"datasets\.sums: reward_timeout=-1; seconds above 0"):
        dry(dataset("score", reward_timeout=-1))
    settings = dataset("score")
    found = prepare(settings)
    assert "datasets.sums, reward" in found.inputs and not found.right_or_wrong and not found.splits
    folder = RoundsDirectory(tmp_path / "run")
    folder.create()
    made = {"inputs": found.inputs}
    begin(folder, RunRecord(settings, combinations_of(settings, found, 1), settings.identity(), "/", made))
    slower = resumed(folder, {"datasets.sums.reward_timeout": 600.0}).settings
    assert slower.dataset("sums").reward_timeout == 600 and slower.identity() == settings.identity()
    with pytest.raises(UsageError, match=r'was begun with datasets\.sums\.reward="/'):
        resumed(folder, {"datasets.sums.reward": "other:score"})
    file.write_text(file.read_text().replace("0.0", "1.0"))
    with pytest.raises(
        UsageError, match=r"begun with other problems, rewards or model files .*: datasets\.sums, reward;"
    ):
        refuse_others(found.inputs, prepare(settings).inputs, tmp_path)


def test_a_record_keeps_no_webhook() -> None:
    words = ["gpuherd", "posttrain", "--webhook", "https://x/secret", "--webhook=https://x/secret", "a=1"]
    assert without_webhook(words) == ["gpuherd", "posttrain", "--webhook", "...", "--webhook=...", "a=1"]
