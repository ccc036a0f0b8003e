"""The worker as a program: what it prints, what it writes, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.esd.coverage_files import read_coverage
from tests.forking import Forking

from gpuherd.errors import ExitCode
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import ModelPaths
from gpuherd.esd.views import read_table
from gpuherd.models.names import safe_filename

MakeModel = Callable[..., Path]
Work = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _simulated_gpu(standin: Callable[..., object]) -> None:
    """The stand-in's CUDA library says that there is no device, so that a worker stays on the CPU on any machine."""
    standin("1x40GB")


@pytest.fixture(scope="module")
def forking() -> Iterator[Forking]:
    modules = ("gpuherd.esd.pipeline", "gpuherd.esd.lanes", "gpuherd.esd.spectrum_files", "scipy.linalg.lapack")
    with Forking(*modules, OMP_NUM_THREADS="1") as made:
        yield made


@pytest.fixture
def work(forking: Forking) -> Work:
    """The worker in a process of its own."""

    def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        return forking.start(module="gpuherd.esd.worker", words=list(map(str, words)), env=env).end()

    return run


def stats_of(folder: Path, model: str | Path) -> Path:
    return folder / "stats" / f"{safe_filename(str(model))}.csv"


def test_it_prints_what_the_guide_shows_and_writes_its_file(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
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


def test_underscore_spellings_of_the_first_guide(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    words = ("--model_id", model, "--output_dir", tmp_path / "out", "--fix_fingers", "DKS", "--device_map", "cpu")
    done = work(*words)
    assert done.returncode == 0, done.stderr
    assert "Device map: cpu" in done.stdout
    assert {row["fix_fingers"] for row in read_table(stats_of(tmp_path / "out", model))} == {"DKS"}


def test_the_figures_are_those_of_the_matrices(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a", width=24)
    work("--model-id", model, "--output-dir", tmp_path)
    weights = load_file(model / "model.safetensors")
    for row in read_table(stats_of(tmp_path, model)):
        if row["fit_status"] == "ok":
            singular = np.linalg.svd(weights[row["longname"] + ".weight"].astype(np.float64), compute_uv=False)
            assert float(row["spectral_norm"]) == pytest.approx(singular[0] ** 2, rel=1e-12)
            assert float(row["norm"]) == pytest.approx((singular**2).sum(), rel=1e-12)


def test_embeddings_are_analysed_when_asked(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    work("--model-id", model, "--output-dir", tmp_path, "--embeddings")
    rows = {row["longname"]: row for row in read_table(stats_of(tmp_path, model))}
    assert rows["model.embed_tokens"]["fit_status"] == "ok"


def test_a_second_run_gives_the_same_bytes(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    for folder in ("one", "two"):
        work("--model-id", model, "--output-dir", tmp_path / folder)
    assert stats_of(tmp_path / "one", model).read_bytes() == stats_of(tmp_path / "two", model).read_bytes()


def test_an_adapter_changes_its_layers_and_no_others(
    work: Work, tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel
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


def spectra(work: Work, tmp_path: Path, name: str, *words: str | Path) -> dict[str, dict[str, str]]:
    """Runs the worker into a folder of its own. Its rows by name."""
    done = work(*words, "--output-dir", tmp_path / name, "--evals-thresh", "0", "--fix-fingers", "DKS")
    assert done.returncode == 0, done.stderr
    model = words[words.index("--model-id") + 1]
    return {row["longname"]: row for row in read_table(stats_of(tmp_path / name, model))}


def test_the_base_that_an_adapter_names_cant_write_to_the_terminal(
    work: Work, tmp_path: Path, make_adapter: MakeModel
) -> None:
    adapter = make_adapter("lora", base="org/\x1b[2Jbase")
    done = work("--model-id", adapter, "--output-dir", tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT and r"Adapter of: org/\x1b[2Jbase" in done.stdout
    assert done.stdout.replace("\n", "").isprintable() and "control character" in done.stderr


def test_the_spectra_of_an_adapter(work: Work, tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel) -> None:
    """BA has r eigenvalues, the same for merged minus base; rows have the names of the merged ones."""
    base = make_model("base")
    adapter = make_adapter("lora", base=base)
    factors = load_file(adapter / "adapter_model.safetensors")
    merged = spectra(work, tmp_path, "weights", "--model-id", adapter)
    ba = spectra(work, tmp_path, "ba", "--model-id", adapter, "--spectra-of", "ba")
    delta = spectra(work, tmp_path, "delta", "--model-id", adapter, "--spectra-of", "delta")
    assert merged.keys() == ba.keys() == delta.keys()
    for name, row in ba.items():
        if "q_proj" not in name:
            assert row["fit_status"].startswith("not analysed: ") and row["alpha"] == "" == delta[name]["alpha"]
            continue
        a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        values = np.sort(np.linalg.svd(2.0 * b @ a, compute_uv=False) ** 2)
        for each in (row, delta[name]):
            assert (each["M"], each["N"], each["num_evals"], each["matrix_rank"]) == ("32", "32", "4", "4")
            assert float(each["norm"]) == pytest.approx(values.sum(), rel=1e-12)
            assert float(each["spectral_norm"]) == pytest.approx(values[-1], rel=1e-12)
        assert row["spectra_of"] == "ba" and delta[name]["spectra_of"] == "delta"
        assert {k: v for k, v in row.items() if k != "spectra_of"} == {
            k: v for k, v in delta[name].items() if k != "spectra_of"
        }
    told = work("--model-id", adapter, "--spectra-of", "ba", "--output-dir", tmp_path / "told")
    assert "Update: s B A of rank 4 in 2 tensors" in told.stdout


def test_a_fine_tune_minus_its_base(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    base, tuned = make_model("base"), make_model("tuned", seed=1)
    before, after = load_file(base / "model.safetensors"), load_file(tuned / "model.safetensors")
    frozen = "model.layers.0.mlp.up_proj.weight"
    save_file(after | {frozen: before[frozen]}, tuned / "model.safetensors")
    words = ("--model-id", tuned, "--source-model", base, "--relation", "finetune", "--spectra-of", "delta")
    rows = spectra(work, tmp_path, "delta", *words)
    assert rows["model.layers.0.mlp.up_proj"]["fit_status"] == "not analysed: the same as in the base"
    name = "model.layers.1.mlp.up_proj"
    singular = np.linalg.svd(
        after[f"{name}.weight"].astype(np.float64) - before[f"{name}.weight"].astype(np.float64), compute_uv=False
    )
    assert float(rows[name]["norm"]) == pytest.approx((singular**2).sum(), rel=1e-12)
    assert rows[name]["source_model"] == str(base)
    told = work(*words, "--output-dir", tmp_path / "again")
    assert f"Compared with: {base}" in told.stdout


def test_a_fine_tune_that_changed_nothing(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    base, same = make_model("base"), make_model("same")
    done = work("--model-id", same, "--source-model", base, "--spectra-of", "delta", "--output-dir", tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "no weight matrix that can be analysed" in done.stderr and "the same as in the base" in done.stderr


def test_layers_and_exclude(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    rows = spectra(
        work, tmp_path, "o", "--model-id", model, "--layers", "*.q_proj", "*.up_proj", "--exclude", "*.layers.1.*"
    )
    assert {name for name, row in rows.items() if row["fit_status"] == "ok"} == {
        "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj",
    }  # fmt: skip
    assert {row["layers"] for row in rows.values()} == {"*.q_proj *.up_proj"}
    wrong = work("--model-id", model, "--output-dir", tmp_path / "w", "--layers", "up_prj")
    assert wrong.returncode == ExitCode.BAD_INPUT
    assert "nearest: model.layers.0.mlp.up_proj" in wrong.stderr


def test_the_coverage_table_is_there_and_told(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    weights = load_file(model / "model.safetensors")
    extra = {"model.norm.weight": np.ones(32, np.float32), "model.layers.0.mlp.up_proj.weight": np.zeros((64, 32), "f")}
    save_file(weights | extra, model / "model.safetensors")
    done = work("--model-id", model, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Layers: 3 with a fit, 1 without, 1 not analysed" in done.stdout
    lines = {line.tensor: line for line in read_coverage(ModelPaths(ESDDirectory(tmp_path), str(model)).coverage)}
    assert lines.keys() == weights.keys() | extra.keys()
    assert (lines["model.norm.weight"].status, lines["model.norm.weight"].reason) == ("skipped", "one axis: no matrix")
    assert lines["model.layers.0.mlp.up_proj.weight"].status == "failed"
    total = 50 * 32 + 2 * (32 * 32 + 64 * 32) + 32
    assert f"Coverage: 3 of 6 tensors analysed (2 skipped, 1 failed), {4096 / total:.1%} of {total:,} weights" in (
        done.stdout
    )


def test_a_model_that_fails_has_a_coverage_table_that_says_why(
    work: Work, tmp_path: Path, make_model: MakeModel
) -> None:
    model = make_model("bad", fill=float("nan"))
    assert work("--model-id", model, "--output-dir", tmp_path).returncode == ExitCode.BAD_INPUT
    lines = read_coverage(ModelPaths(ESDDirectory(tmp_path), str(model)).coverage)
    assert [line.status for line in lines].count("failed") == 4


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_a_model_without_any_valid_layer_fails_and_leaves_no_file(
    work: Work, tmp_path: Path, make_model: MakeModel, fill: float
) -> None:
    model = make_model("bad", fill=fill)
    stale = stats_of(tmp_path, model)
    stale.parent.mkdir()
    stale.write_text("an older result")
    done = work("--model-id", model, "--output-dir", tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "none of its 4 matrices has a valid fit" in done.stderr
    assert not stale.exists()


def test_one_bad_layer_is_a_row_with_a_reason(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("half")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: np.zeros_like(weights[name])}, model / "model.safetensors")
    assert work("--model-id", model, "--output-dir", tmp_path).returncode == 0
    rows = {row["longname"]: row for row in read_table(stats_of(tmp_path, model))}
    assert rows["model.layers.0.mlp.up_proj"]["fit_status"] == "all weights are zero"
    assert rows["model.layers.0.mlp.up_proj"]["alpha"] == ""
    assert rows["model.layers.1.mlp.up_proj"]["fit_status"] == "ok"


def test_endings(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    cases: list[tuple[list[str | Path], ExitCode, str]] = [
        (["--model-id", tmp_path / "absent", "--output-dir", tmp_path], ExitCode.MISSING, "no such folder"),
        (["--model-id", "a;b", "--output-dir", tmp_path], ExitCode.BAD_INPUT, "id"),
        (["--model-id", model, "--output-dir", tmp_path, "--device-map", "cuda"], ExitCode.MISSING, "no usable GPU"),
        (["--model-id", model, "--output-dir", tmp_path, "--relation", "lora"], ExitCode.BAD_INPUT, "adapter_config"),
        (["--model-id", model, "--output-dir", tmp_path, "--custom-arg", "1"], ExitCode.USAGE, "--custom-arg"),
        (["--model-id", model], ExitCode.USAGE, "--output-dir is missing"),
        (["--model-id", model, "--output-dir", tmp_path, "--spectra-of", "ba"], ExitCode.BAD_INPUT, "only an adapter"),
        (["--model-id", model, "--output-dir", tmp_path, "--spectra-of", "delta"], ExitCode.BAD_INPUT, "no base to"),
        (["--model-id", model, "--output-dir", "/proc/none"], ExitCode.CANNOT_WRITE, "/proc/none"),
    ]
    for words, code, told in cases:
        done = work(*words)
        assert done.returncode == code, (words, done.stderr)
        assert told in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("most", [0, 1000, 3000, 8000])
def test_a_disk_that_fills_up(tmp_path: Path, make_model: MakeModel, most: int) -> None:
    """A limit of the size of files: writing fails where a full disk would fail, in the middle or at the end."""
    model = make_model("a")
    words = ["--model-id", str(model), "--output-dir", str(tmp_path / "r"), "--save-eigs"]
    full = (
        f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}));"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", full, sys.executable, "-m", "gpuherd.esd.worker", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.CANNOT_WRITE, done.stderr
    assert "can't write" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not stats_of(tmp_path / "r", model).exists()
    assert not list((tmp_path / "r").rglob("*.tmp"))


KILLED = """
import os, signal, sys
from gpuherd.esd import worker

left = int(sys.argv.pop(1))


def watch(event, args):
    global left
    if event in ("os.rename", "os.remove", "tempfile.mkstemp"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(watch)
sys.exit(worker.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_old_results_or_the_new_or_none(
    work: Work, tmp_path: Path, make_model: MakeModel
) -> None:
    """A model is analysed again after it has changed, and the process is killed before each change of a file."""
    model, other, results = make_model("a"), make_model("b", seed=5), tmp_path / "results"
    words = ["--model-id", str(model), "--output-dir", str(results), "--save-eigs", "--device-map", "cpu"]

    def files() -> dict[str, bytes]:
        return {path.name + path.parent.name: path.read_bytes() for path in results.rglob("*[!p]") if path.is_file()}

    assert work(*words).returncode == 0
    old = files()
    (other / "model.safetensors").replace(model / "model.safetensors")
    seen = set()
    for instant in range(40):
        command = [sys.executable, "-c", KILLED, str(instant), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        there = stats_of(results, model).exists()
        assert files() == old or not there, instant
        seen.add(there)
    assert seen == {True, False} and stats_of(results, model).exists()
    new = files()
    assert new.keys() == old.keys() and all(new[name] != old[name] for name in old if "coverage" not in name)


def test_out_of_memory_has_its_own_code(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("wide", width=3000, layers=1)
    limited = (
        "import resource, sys; import numpy, scipy.linalg; from gpuherd.esd import pipeline, worker;"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, resource.RLIM_INFINITY));"
        "sys.exit(worker.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "--model-id", str(model), "--output-dir", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stderr
    assert not stats_of(tmp_path, model).exists()


def test_log_level_debug_works(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
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


def test_progress_is_reported(work: Work, tmp_path: Path, make_model: MakeModel) -> None:
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


def test_the_worker_begins_without_numpy() -> None:
    """The number of BLAS threads is settled before numpy's libraries read it."""
    code = "import sys; from gpuherd.esd import worker; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_worker_settles_its_threads_before_numpy_comes() -> None:
    program = "import sys, gpuherd.esd.worker; print('numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
