"""The worker as a program: what it prints, what it writes, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpuherd.errors import ExitCode
from gpuherd.esd.tables.stats import read_table
from gpuherd.models.names import safe_filename

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def _simulated_gpu(standin: Callable[..., object]) -> None:
    """The stand-in's CUDA library says that there is no device, so that a worker stays on the CPU on any machine."""
    standin("1x40GB")


def work(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuherd.esd.worker", *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def stats_of(folder: Path, model: str | Path) -> Path:
    return folder / "stats" / f"{safe_filename(str(model))}.csv"


def test_it_prints_what_the_guide_shows_and_writes_its_file(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    done = work("--model-id", model, "--output-dir", tmp_path / "out", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "CUDA_VISIBLE_DEVICES: 0" in lines
    assert "Device map: auto" in lines
    assert any(line.startswith("CUDA available: No (") for line in lines)
    assert "Model devices: cpu" in lines
    rows = read_table(stats_of(tmp_path / "out", model))
    assert {row["model_id"] for row in rows} == {str(model)}
    by_name = {row["longname"]: row for row in rows}
    assert by_name["model.layers.0.self_attn.q_proj"]["fit_status"] == "ok"
    assert by_name["model.embed_tokens"]["fit_status"].startswith("not analysed: embedding")
    assert by_name["model.embed_tokens"]["alpha"] == ""


def test_underscore_spellings_of_the_first_guide(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    words = ("--model_id", model, "--output_dir", tmp_path / "out", "--fix_fingers", "DKS", "--device_map", "cpu")
    done = work(*words)
    assert done.returncode == 0, done.stderr
    assert "Device map: cpu" in done.stdout
    assert {row["fix_fingers"] for row in read_table(stats_of(tmp_path / "out", model))} == {"DKS"}


def test_the_figures_are_those_of_the_matrices(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a", width=24)
    work("--model-id", model, "--output-dir", tmp_path)
    weights = load_file(model / "model.safetensors")
    for row in read_table(stats_of(tmp_path, model)):
        if row["fit_status"] == "ok":
            singular = np.linalg.svd(weights[row["longname"] + ".weight"].astype(np.float64), compute_uv=False)
            assert float(row["spectral_norm"]) == pytest.approx(singular[0] ** 2, rel=1e-12)
            assert float(row["norm"]) == pytest.approx((singular**2).sum(), rel=1e-12)


def test_embeddings_are_analysed_when_asked(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    work("--model-id", model, "--output-dir", tmp_path, "--embeddings")
    rows = {row["longname"]: row for row in read_table(stats_of(tmp_path, model))}
    assert rows["model.embed_tokens"]["fit_status"] == "ok"


def test_a_second_run_gives_the_same_bytes(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    for folder in ("one", "two"):
        work("--model-id", model, "--output-dir", tmp_path / folder)
    assert stats_of(tmp_path / "one", model).read_bytes() == stats_of(tmp_path / "two", model).read_bytes()


def test_an_adapter_changes_its_layers_and_no_others(
    tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel
) -> None:
    base = make_model("base")
    adapter = make_adapter("lora", base=base)
    assert work("--model-id", base, "--output-dir", tmp_path).returncode == 0
    done = work("--model-id", adapter, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Adapter of: {base}" in done.stdout
    plain = {row["longname"]: row for row in read_table(stats_of(tmp_path, base))}
    for row in read_table(stats_of(tmp_path, adapter)):
        assert row["source_model"] == str(base)
        assert (row["norm"] == plain[row["longname"]]["norm"]) == ("q_proj" not in row["longname"])


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_a_model_without_any_valid_layer_fails_and_leaves_no_file(
    tmp_path: Path, make_model: MakeModel, fill: float
) -> None:
    model = make_model("bad", fill=fill)
    stale = stats_of(tmp_path, model)
    stale.parent.mkdir()
    stale.write_text("an older result")
    done = work("--model-id", model, "--output-dir", tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "none of its 4 matrices has a valid fit" in done.stderr
    assert not stale.exists()


def test_one_bad_layer_is_a_row_with_a_reason(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("half")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: np.zeros_like(weights[name])}, model / "model.safetensors")
    assert work("--model-id", model, "--output-dir", tmp_path).returncode == 0
    rows = {row["longname"]: row for row in read_table(stats_of(tmp_path, model))}
    assert rows["model.layers.0.mlp.up_proj"]["fit_status"] == "all weights are zero"
    assert rows["model.layers.0.mlp.up_proj"]["alpha"] == ""
    assert rows["model.layers.1.mlp.up_proj"]["fit_status"] == "ok"


def test_endings(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    cases: list[tuple[list[str | Path], ExitCode, str]] = [
        (["--model-id", tmp_path / "absent", "--output-dir", tmp_path], ExitCode.MISSING, "no such folder"),
        (["--model-id", "a;b", "--output-dir", tmp_path], ExitCode.BAD_INPUT, "id"),
        (["--model-id", model, "--output-dir", tmp_path, "--device-map", "cuda"], ExitCode.MISSING, "no usable GPU"),
        (["--model-id", model, "--output-dir", tmp_path, "--relation", "lora"], ExitCode.BAD_INPUT, "adapter_config"),
        (["--model-id", model, "--output-dir", tmp_path, "--custom-arg", "1"], ExitCode.USAGE, "--custom-arg"),
        (["--model-id", model], ExitCode.USAGE, "--output-dir is missing"),
        (["--model-id", model, "--output-dir", "/proc/none"], ExitCode.CANNOT_WRITE, "/proc/none"),
    ]
    for words, code, told in cases:
        done = work(*words)
        assert done.returncode == code, (words, done.stderr)
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_out_of_memory_has_its_own_code(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("wide", width=3000, layers=1)
    limited = (
        "import resource, sys; import numpy, scipy.linalg; from gpuherd.esd import worker, layer;"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, resource.RLIM_INFINITY));"
        "sys.exit(worker.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "--model-id", str(model), "--output-dir", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stderr
    assert not stats_of(tmp_path, model).exists()


def test_log_level_debug_works(tmp_path: Path, make_model: MakeModel) -> None:
    done = work("--model-id", make_model("a"), "--output-dir", tmp_path, LOG_LEVEL="DEBUG")
    assert done.returncode == 0
    assert "model.layers.1.mlp.up_proj" in done.stderr
    assert work("--model-id", "x", "--output-dir", tmp_path, LOG_LEVEL="LOUD").returncode == ExitCode.USAGE


def test_torch_stays_out_of_a_safetensors_run_on_the_cpu(tmp_path: Path, make_model: MakeModel) -> None:
    code = (
        "import sys; from gpuherd.esd import worker; code = worker.main(sys.argv[1:]);"
        "sys.exit(code or ('torch' in sys.modules and 99))"
    )
    command = [sys.executable, "-c", code, "--model-id", str(make_model("a")), "--output-dir", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_progress_is_reported(tmp_path: Path, make_model: MakeModel) -> None:
    from gpuherd.engines import progress

    told = tmp_path / "progress.json"
    work("--model-id", make_model("a"), "--output-dir", tmp_path, GPUHERD_PROGRESS=str(told))
    last = progress.read(told)
    assert last is not None
    assert (last.done, last.total, last.stage) == (5, 5, "save")


@pytest.mark.slow
def test_peak_memory_on_a_model_of_a_gigabyte(tmp_path: Path) -> None:
    """At most what the largest matrix needs (itself, its Gram matrix, a panel of each in float64) and 600 MB."""
    rows, columns, number = 1024, 16384, 17
    rng = np.random.default_rng(0)
    model = tmp_path / "large"
    model.mkdir()
    tensors = {f"h.{n}.up.weight": rng.standard_normal((rows, columns), dtype=np.float32) for n in range(number)}
    save_file(tensors, model / "model.safetensors")
    assert (model / "model.safetensors").stat().st_size > 2**30
    code = (
        "import sys; from gpuherd.esd import worker; assert worker.main(sys.argv[1:]) == 0;"
        # Not getrusage: that begins with what the parent held when it forked.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    command = [sys.executable, "-c", code, "--model-id", str(model), "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    needs = rows * columns * 4 + 2 * rows * rows * 8 + 2 * 32 * 2**20
    assert int(done.stdout.split()[-1]) * 1024 <= needs + 600 * 2**20
