"""submit, run and batch with --model: the plan's GPUs and memory, told, and refused where it fits nowhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.cli.job_start import AvailableGpus, planner
from gpuherd.cli.main import run
from gpuherd.errors import BadModel, ExitCode, JobCannotFit, UsageError
from gpuherd.jobs import Queue
from gpuherd.jobs.job import ModelUse
from gpuherd.jobs.options import DispatchOptions
from gpuherd.models.load.jobs import job_request, resources_for
from gpuherd.models.load.options import WorkOptions
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[[str], SimulatedMachine]


@pytest.fixture
def own_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    monkeypatch.setenv("GPUHERD_QUEUE", str(folder))
    return folder


def test_submit_asks_for_what_the_plan_needs(
    standin: Standin, own_queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standin("4x40GB")
    assert run(["submit", "--model", "llama-3.1-70b", "--batch", "8", "--name", "large", "--", "true"]) == 0
    assert run(["submit", "--model", "llama-3.2-1b", "--name", "small", "--", "true"]) == 0
    told = capsys.readouterr()
    assert told.out == "large\nsmall\n"
    assert "asks for 4 GPUs with 37.5 GiB free on each" in told.err
    with Queue(own_queue / "queue.sqlite") as queue:
        jobs = {job.name: job for job in queue.jobs()}
    assert (jobs["large"].gpus, jobs["small"].gpus) == (4, 1)
    assert jobs["large"].memory_mb is not None and jobs["large"].memory_mb > 36_000
    assert jobs["large"].family != jobs["small"].family and jobs["large"].family is not None


def test_the_same_use_of_a_model_is_one_family(
    standin: Standin, own_queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standin("4x40GB")
    for name, more in (("a", []), ("b", []), ("c", ["--batch", "2"]), ("d", ["--family", "mine"])):
        assert run(["submit", "--model", "llama-3.2-1b", *more, "--name", name, "--", "true", name]) == 0
    with Queue(own_queue / "queue.sqlite") as queue:
        family = {job.name: job.family for job in queue.jobs()}
    assert family["a"] == family["b"] != family["c"]
    assert family["d"] == "mine"


def test_another_model_of_the_same_words_is_another_family(
    standin: Standin, own_queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("1x40GB")
    shape = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    for folder, words in (("a", 100), ("b", 4_000_000)):
        (tmp_path / folder / "mine").mkdir(parents=True)
        config = {**shape, "num_hidden_layers": 2, "vocab_size": words, "dtype": "bfloat16"}
        (tmp_path / folder / "mine" / "config.json").write_text(json.dumps(config))
        monkeypatch.chdir(tmp_path / folder)
        assert run(["submit", "--model", "./mine", "--name", folder, "--", "true"]) == 0
    with Queue(own_queue / "queue.sqlite") as queue:
        families = [job.family for job in queue.jobs()]
    assert None not in families and families[0] != families[1]


def test_memory_that_was_said_counts_and_is_told(
    standin: Standin, own_queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standin("1x40GB")
    assert run(["submit", "--model", "llama-3.1-8b", "--mem", "20GB", "--dry-run", "--json", "--", "true"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["memory_mb"] == 20_480
    assert "17.8 GiB free; 20480 MB are used instead, as given for the job" in told.err
    assert run(["run", "--model", "llama-3.1-8b", "--mem", "20GB", "--dry-run", "--", "true"]) == 0
    assert "20480 MB are used instead" in capsys.readouterr().err


def test_what_a_folder_is_called_moves_no_cursor(tmp_path: Path) -> None:
    folder = tmp_path / "m\u202e"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 100}))
    told: list[str] = []
    assert planner(lambda: AvailableGpus(()), told.append)(ModelUse(model=str(folder))).gpus == 1
    assert len(told) == 1 and "\u202e" not in told[0]


def test_submit_refuses_what_fits_nowhere_and_adds_nothing(
    standin: Standin, own_queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standin("2x40GB")
    with pytest.raises(JobCannotFit, match=r"lacks .* What would fit: --dtype int8"):
        run(["submit", "--model", "llama-3.1-70b", "--", "true"])
    assert not (own_queue / "queue.sqlite").exists()


def test_words_of_a_model_need_one(standin: Standin, own_queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    standin("1x40GB")
    with pytest.raises(UsageError, match="batch is said of a model, and no model is named"):
        run(["submit", "--batch", "8", "--", "true"])
    with pytest.raises(UsageError, match="dtype is said of a model, and no model is named"):
        run(["run", "--dtype", "int8", "--", "true"])


def test_an_unknown_model_names_near_ones(
    standin: Standin, own_queue: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    standin("1x40GB")
    with pytest.raises(BadModel, match=r"(?i)llama-3\.1-70b"):
        run(["submit", "--model", "llama-3.1-71b", "--", "true"])


def test_run_takes_as_many_gpus_as_the_plan_needs(standin: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    standin("4x40GB")
    assert run(["run", "--model", "llama-3.1-70b-8bit", "--batch", "8", "--dry-run", "--json", "--", "true"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) == 2
    with pytest.raises(JobCannotFit, match="What would fit"):
        run(["run", "--model", "llama-3.1-70b-8bit", "--gpu-list", "3", "--dry-run", "--", "true"])


def test_each_job_of_a_list_gets_what_it_needs(
    standin: Standin, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    standin("4x40GB")
    (tmp_path / "jobs.yaml").write_text(
        f"defaults: {{dtype: bf16, batch: 8}}\n"
        f"jobs:\n  - command: [{sys.executable}, -c, pass, '{{m}}']\n    model: '{{m}}'\n"
        "    matrix: {m: [llama-3.2-1b, llama-3.1-8b, llama-3.1-70b]}\n"
    )
    assert run(["batch", "jobs.yaml", "--dry-run", "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["gpus"] for job in jobs] == [1, 1, 4]
    assert jobs[0]["memory_mb"] < jobs[1]["memory_mb"] < jobs[2]["memory_mb"]
    # A run that may use two GPUs at once can't hold the large one, and runs the others.
    assert run(["batch", "jobs.yaml", "--max-gpus", "2"]) == ExitCode.FAILED
    assert ": bad input: llama-3.1-70b in bf16 needs" in capsys.readouterr().out
    with Queue(tmp_path / "jobs_results" / "queue.sqlite") as queue:
        assert sorted(queue.states().values()) == ["done", "done", "failed"]


def test_on_a_machine_without_gpus_it_is_said_that_jobs_run_on_the_cpu(
    own_queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", "--model", "llama-3.2-1b", "--dry-run", "--json", "--", "true"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["gpus"] == 1
    assert "without GPUs jobs run on the CPU" in told.err


def test_a_long_list_of_models_tells_of_the_first_ones_alone(
    standin: Standin, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    standin("4x40GB")
    lines = [f"#gpuherd model=llama-3.2-1b batch={batch}\ntrue {batch}" for batch in range(1, 31)]
    (tmp_path / "jobs.txt").write_text("\n".join(lines))
    assert run(["batch", "jobs.txt", "--dry-run", "--json"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)["jobs"]) == 30
    assert told.err.count("tokens: asks for") == 20 and told.err.count("further plans are not shown") == 1


def test_a_model_that_fits_nowhere_costs_its_line_and_not_the_file(
    standin: Standin, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    standin("1x40GB")
    (tmp_path / "jobs.txt").write_text(
        "#gpuherd name=large model=llama-3.1-70b\ntrue\n#gpuherd name=after needs=large\ntrue\n"
        "#gpuherd name=small model=llama-3.2-1b\ntrue small\n"
    )
    assert run(["batch", "jobs.txt", "--dry-run", "--json"]) == ExitCode.FAILED
    states = {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert [states[name]["state"] for name in ("large", "after", "small")] == ["refused", "refused", "to do"]
    assert "What would fit" in states["large"]["reason"] and "--" not in states["large"]["reason"]
    for _ in range(2):  # the same command again finds them as they are
        assert run(["batch", "jobs.txt", "--json", "--max-checks", "1"]) == ExitCode.FAILED
        told = json.loads(capsys.readouterr().out)
        assert told["counts"] == {"done": 1, "failed": 1, "waiting": 0, "cancelled": 1}
        (failure,) = told["failures"]
        assert (failure["job"], failure["failure"]) == ("large", "bad input") and "What would fit" in failure["reason"]
    with Queue(tmp_path / "jobs_results" / "queue.sqlite") as queue:
        assert queue.states() == {"large": "failed", "after": "cancelled", "small": "done"}
    (tmp_path / "jobs.txt").write_text("#gpuherd name=large model=llama-3.1-70b\ntrue\n")
    assert run(["batch", "jobs.txt", "--json"]) == ExitCode.BAD_INPUT, "nothing of the file can run"
    assert "line 2: " in json.loads(capsys.readouterr().out)["error"]


def test_a_remedy_is_spelled_as_whoever_asks_can_write_it(
    standin: Standin, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    standin("2x40GB")
    with pytest.raises(JobCannotFit, match="--dtype int8"):
        run(["submit", "--model", "llama-3.1-70b", "--", "true"])
    (tmp_path / "jobs.txt").write_text("#gpuherd model=llama-3.1-70b batch=8\ntrue\n")
    assert run(["batch", "jobs.txt"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "dtype=int8" in told and "--dtype" not in told
    with pytest.raises(JobCannotFit) as refused:
        job_request(
            "llama-3.1-8b",
            WorkOptions(max_gpus=1),
            Workload(batch=2000),
            resources_for(DispatchOptions(gpu_list=("0",))),
        )
    assert "--batch-size " in str(refused.value) and "--batch " not in str(refused.value)
