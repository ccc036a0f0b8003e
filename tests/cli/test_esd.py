"""``gpuherd esd`` as users meet it: a process with arguments, output and an exit code."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.forking import Forking

from gpuherd.errors import ExitCode
from gpuherd.esd.views import read_table
from gpuherd.jobs.queue.store import Queue

MakeModel = Callable[..., Path]
Row = tuple[str | Path, str, str]
FAST = ("--check-interval", "0.02", "--max-checks", "2")


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gpuherd(forking_gpuherd: Forking) -> Command:
    def call(*words: str | Path, simulate: str | None = None, cwd: Path | None = None) -> Any:
        machine = ["--simulate", simulate] if simulate is not None else []
        env = os.environ | {"COLUMNS": "80"}
        return forking_gpuherd.start(module="gpuherd", words=[*machine, *map(str, words)], env=env, cwd=cwd).end()

    return call


def write_list(
    path: Path, rows: Sequence[Sequence[str | Path]], header: str = "model_id,base_model_relation,source_model"
) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return path


def attempts(out: Path) -> list[str]:
    """The names of the models that were started, with how it ended."""
    if not (out / "queue.sqlite").exists():
        return []
    with closing(Queue(out / "queue.sqlite")) as queue:
        return [f"{row.job.rpartition('.')[0]} {row.state}" for row in queue.attempts()]


def test_a_list_on_simulated_gpus(
    tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel, gpuherd: Command
) -> None:
    base = make_model("base")
    adapter = make_adapter("lora", base=base)
    models = write_list(
        tmp_path / "models.csv",
        [(base, "", "base", "=1+1"), (adapter, base, "lora", "7")],
        "full_name,source_model,base_model_relation,note",
    )
    out = tmp_path / "out"
    ran = gpuherd("esd", "--model_list", models, "--output_dir", out, *FAST, simulate="2x40GB")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 done" in ran.stdout
    assert max(len(line) for line in ran.stdout.splitlines() if "/" not in line) <= 80
    summary = read_table(out / "esd_results_summary.csv")
    assert [row["model_id"] for row in summary] == [str(base), str(adapter)]
    assert [row["note"] for row in summary] == ["=1+1", "7"]
    assert [row["base_model_relation"] for row in summary] == ["base", "lora"]
    assert summary[1]["source_model"] == str(base)
    assert all(float(row["alpha_mean"]) > 1 for row in summary)
    assert {path.name for path in out.iterdir()} >= {"run.json", "queue.sqlite", "logs", "stats", "gpu_metrics.json"}
    assert len(list((out / "logs").glob("esd_experiment_*_*.log"))) == 1
    logs = [path.read_text() for path in (out / "logs").glob("*.1.log")]
    assert len(logs) == 2
    assert all("CUDA_VISIBLE_DEVICES: " in log and "Model devices: cpu" in log for log in logs)

    again = gpuherd("esd", "--model-list", models, "--output-dir", out, *FAST, simulate="2x40GB")
    assert again.returncode == 0
    assert "2 done (2 before this run)" in again.stdout
    assert len(attempts(out)) == 2

    anew = gpuherd("esd", "--model-list", models, "--output-dir", out, "--overwrite", *FAST, simulate="2x40GB")
    assert anew.returncode == 0
    assert len(attempts(out)) == 4


def bad_models(tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel) -> list[tuple[Row, str]]:
    """A row for each kind of bad model of the issue, with what its message must say."""
    folder = tmp_path / "models"
    (folder / "weightless").mkdir(parents=True)
    (folder / "weightless" / "config.json").write_text("{}")
    cut = make_model("truncated")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    sharded = folder / "sharded"
    sharded.mkdir()
    (sharded / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a.weight": "model-00001-of-00001.safetensors"}})
    )
    pickled = folder / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    quantised = make_model("quantised")
    packed = {"model.layers.0.mlp.up_proj.qweight": np.zeros((4, 32), np.int32)}
    save_file(packed, quantised / "model.safetensors")
    (quantised / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    return [
        ((folder / "weightless", "", ""), "weights"),
        ((cut, "", ""), "truncated"),
        ((sharded, "", ""), "model-00001-of-00001.safetensors"),
        ((pickled, "", ""), "pickle"),
        ((quantised, "", ""), "gptq"),
        ((make_adapter("baseless", base=None), "adapter", ""), "base"),
        (("org/cousin", "cousin", ""), "unknown relation 'cousin'"),
        (("org/a;touch owned", "", ""), "id"),
        (("$(touch owned)", "", ""), "id"),
        (("org/../../a", "", ""), ".."),
        (("org/a\nb", "", ""), "line break"),
        (("x" * 300, "", ""), "300 characters"),
        (("", "", "org/b"), "empty"),
    ]


def test_every_bad_row_is_told_and_the_rest_runs(
    tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel, gpuherd: Command
) -> None:
    good = make_model("good")
    bad = bad_models(tmp_path, make_model, make_adapter)
    rows: list[Row] = [(good, "base", ""), (good, "base", ""), *(row for row, _ in bad)]
    models = write_list(tmp_path / "models.csv", rows)
    out = tmp_path / "out"
    ran = gpuherd("esd", "--model-list", models, "--output-dir", out, *FAST, simulate="1x40GB", cwd=tmp_path)
    assert ran.returncode == ExitCode.FAILED, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
    told = [line for line in ran.stdout.splitlines() if line.startswith("refused  ")]
    # Row 11 of the file spans two lines, so that later rows start one line further down.
    assert len(told) == len(bad) + 1
    for line, words in zip(told, ["duplicate of row 2", *(words for _, words in bad)], strict=True):
        assert line.startswith(f"refused  {models}: row "), line
        assert words.lower() in line.lower(), line
    assert [int(line.split(": row ")[1].split(":")[0]) for line in told] == [*range(3, 15), 16, 17]
    assert attempts(out) == [f"{next((out / 'stats').iterdir()).stem} done"]
    assert not (tmp_path / "owned").exists()
    records = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    assert [record["class"] for record in records] == ["refused"] * len(told)
    again = gpuherd("esd", "--model-list", models, "--output-dir", out, *FAST, simulate="1x40GB", cwd=tmp_path)
    assert again.returncode == ExitCode.FAILED
    assert len((out / "failures.jsonl").read_text().splitlines()) == len(told)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--model-list", "absent.csv"], ExitCode.BAD_INPUT, "absent.csv: there is no such model list"),
        (["--model-list", "empty.csv"], ExitCode.BAD_INPUT, "empty.csv: the list is empty"),
        (["--model-list", "columns.csv"], ExitCode.BAD_INPUT, "columns.csv: missing column source_model"),
        (["--model-list", "one.csv", "--gpus-per-job", "3"], ExitCode.USAGE, "3"),
        (["--model-list", "one.csv", "--gpu-list", "0", "7"], ExitCode.USAGE, "7"),
        (["--model-list", "one.csv", "--output-dir", "/proc/none"], ExitCode.CANNOT_WRITE, "/proc/none"),
        (["--single-model", "absent/folder/model"], ExitCode.BAD_INPUT, "absent/folder/model"),
        (["--single-model", "./absent"], ExitCode.MISSING, "./absent"),
        ([], ExitCode.USAGE, "nothing to analyse"),
        (["--mode", "custom", "--single-model", "gpt2"], ExitCode.USAGE, "possible: esd"),
        (["--model-list", "one.csv", "--gpu-mem-treshold", "3"], ExitCode.USAGE, "--gpu-mem-threshold"),
        (["--model-list", "one.csv", "--fix-fingers", "mid"], ExitCode.USAGE, "xmin_mid"),
    ],
)
def test_what_is_refused_before_anything_starts(
    tmp_path: Path, make_model: MakeModel, words: list[str], code: ExitCode, told: str, gpuherd: Command
) -> None:
    (tmp_path / "empty.csv").touch()
    write_list(tmp_path / "columns.csv", [("a", "")], "model_id,base_model_relation")
    write_list(tmp_path / "one.csv", [(make_model("a"), "", "")])
    out = tmp_path / "out"
    where = () if "--output-dir" in words else ("--output-dir", out)
    ran = gpuherd("esd", *words, *where, *FAST, simulate="2x40GB", cwd=tmp_path)
    assert ran.returncode == code, ran.stdout + ran.stderr
    message = ran.stderr.splitlines()
    assert any(told in line for line in message), ran.stderr
    assert "Traceback" not in ran.stderr
    assert attempts(out) == []


def test_the_plan_of_a_dry_run(tmp_path: Path, make_model: MakeModel, gpuherd: Command) -> None:
    models = write_list(tmp_path / "models.csv", [(make_model("a"), "base", ""), ("org/b", "cousin", "")])
    out = tmp_path / "out"
    ran = gpuherd("esd", "--model-list", models, "--output-dir", out, "--dry-run")
    assert ran.returncode == ExitCode.FAILED
    assert "1 to do, 0 done, 1 refused; nothing was started" in ran.stdout
    assert not out.exists()
    ran = gpuherd("esd", "--model-list", models, "--output-dir", out, "--dry-run", "--json")
    told = json.loads(ran.stdout)
    assert [line["state"] for line in told["plan"]] == ["to do"]
    assert told["plan"][0]["size_bytes"] > 0
    assert told["plan"][0]["gpus"] == 1
    assert [line["row"] for line in told["refused"]] == [3]


def test_json_has_standard_output_for_itself(tmp_path: Path, make_model: MakeModel, gpuherd: Command) -> None:
    model = make_model("a")
    words = ("esd", "--single-model", model, "--output-dir", tmp_path / "out", "--device-map", "cpu", "--json")
    ran = gpuherd(*words)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["exit_code"] == 0
    assert told["counts"]["done"] == 1
    assert told["models"][0]["model_id"] == str(model)
    assert told["models"][0]["gpus"] == []
    assert Path(told["models"][0]["stats"]).exists()


def test_json_also_tells_what_stopped_it(tmp_path: Path, gpuherd: Command) -> None:
    ran = gpuherd("esd", "--single-model", "./absent", "--output-dir", tmp_path / "out", "--json", cwd=tmp_path)
    assert ran.returncode == ExitCode.MISSING
    told = json.loads(ran.stdout)
    assert told["exit_code"] == ExitCode.MISSING
    assert told["error"] in ran.stderr


def test_a_failed_model_is_told_with_its_reason_and_log(
    tmp_path: Path, make_model: MakeModel, gpuherd: Command
) -> None:
    zero = make_model("zero", fill=0.0)
    models = write_list(tmp_path / "models.csv", [(make_model("a"), "", ""), (zero, "", "")])
    out = tmp_path / "out"
    ran = gpuherd("esd", "--model-list", models, "--output-dir", out, "--device-map", "cpu")
    assert ran.returncode == ExitCode.FAILED
    assert "none of its 4 matrices has a valid fit" in ran.stdout.replace("\n", " ")
    record = json.loads((out / "failures.jsonl").read_text())
    assert record["class"] == "bad input"
    assert record["retried"] is False
    assert len(read_table(out / "esd_results_summary.csv")) == 1


def test_another_convention_in_the_same_folder(tmp_path: Path, make_model: MakeModel, gpuherd: Command) -> None:
    words = ("esd", "--single-model", make_model("a"), "--output-dir", tmp_path / "out", "--device-map", "cpu")
    assert gpuherd(*words).returncode == 0
    refused = gpuherd(*words, "--fix-fingers", "DKS")
    assert refused.returncode == ExitCode.USAGE
    assert "fix_fingers=xmin_mid" in refused.stderr
    assert "--overwrite" in refused.stderr
    # What changes speed and place only is no other convention, and what is done stays done.
    assert gpuherd(*words[:-2], "--no-parallel-gpu").returncode == 0
    assert len(attempts(tmp_path / "out")) == 1
    assert gpuherd(*words, "--fix-fingers", "DKS", "--overwrite").returncode == 0
    assert {row["fix_fingers"] for row in read_table(tmp_path / "out" / "esd_results_summary.csv")} == {"DKS"}


def test_two_lists_in_one_folder_share_a_summary(tmp_path: Path, make_model: MakeModel, gpuherd: Command) -> None:
    out = tmp_path / "out"
    header = "model_id,base_model_relation,source_model,note"
    for name in ("a", "b"):
        models = write_list(tmp_path / f"{name}.csv", [(make_model(name), "", "", f"note {name}")], header)
        assert gpuherd("esd", "--model-list", models, "--output-dir", out, "--device-map", "cpu").returncode == 0
    summary = read_table(out / "esd_results_summary.csv")
    assert [row["note"] for row in summary] == ["note b", "note a"]


def test_help_shows_every_option_with_examples(gpuherd: Command) -> None:
    ran = gpuherd("esd", "--help")
    assert ran.returncode == 0
    flags = "--model-list --single-model --output-dir --log-dir --overwrite --limit --fix-fingers --evals-thresh --bins"
    flags += " --no-parallel-gpu --device-map --dry-run --max-gpus --gpu-list --gpu-mem-threshold --max-checks"
    flags += " --check-interval --gpus-per-job --json --embeddings --retries --base-model --mode"
    for flag in flags.split():
        assert flag in ran.stdout
    assert "examples:" in ran.stdout
