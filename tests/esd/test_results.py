"""All files of a model: what is written reads back, comes whole or not at all, and the stats file comes last."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest

from gpuherd.errors import BadModel, CannotWrite
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import ModelPaths, ModelResultFiles
from gpuherd.esd.pipeline import with_figures
from gpuherd.esd.results import fragment_rows, read_alphas, read_sketches
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.spectra.pooled import LayerSpectrum
from gpuherd.esd.spectrum_files import GROUP_BYTES, read_eigs, read_spectra
from gpuherd.esd.views import Origin, read_hdf5, read_table, stored_text

SETTINGS = AnalysisOptions()
ORIGIN = Origin("org/a", "org/b", "finetune", SETTINGS.convention_columns, "0.1.0")
# Another convention, of which nothing but the name is needed.
OTHER = replace(ORIGIN, convention=AnalysisOptions(bins=7).convention_columns)
HOSTILE = "=1+1\x1b[31m\n.0.</script>.'x"
NAMES = ["model.layers.0.mlp.up", "model.layers.1.mlp.up", HOSTILE, "model.layers.10.mlp.up", "lm_head", "bad"]


def analysed(n: int = 40) -> tuple[list[LayerRow], list[LayerSpectrum]]:
    """Rows with real figures, one of them of a matrix that can't be analysed and one that was left out."""
    rng = np.random.default_rng(1)
    rows, spectra = [], []
    for name in NAMES:
        evals = np.sort(rng.pareto(2.0, n) + 0.1)
        spectrum = LayerSpectrum(np.empty(0), "all weights are zero") if name == "bad" else LayerSpectrum(evals)
        row = LayerRow(longname=name, M=n, N=n, params=n * n)
        rows.append(with_figures(row, spectrum, SETTINGS))
        spectra.append(spectrum)
    rows[4] = replace(rows[4], alpha=None, fit_status="not analysed: embedding")
    return rows, spectra


def write(
    root: Path,
    rows: Sequence[LayerRow],
    spectra: Sequence[LayerSpectrum],
    *,
    save_eigs: bool = True,
    origin: Origin = ORIGIN,
) -> ModelPaths:
    names = [row.longname for row in rows]
    with ModelResultFiles(ESDDirectory(root), "org/a", names, evals_thresh=1e-5, save_eigs=save_eigs) as files:
        for index, spectrum in enumerate(spectra):
            files.keep_spectrum(index, spectrum)
        files.write(origin, rows, "tensor\n")
    return files.paths


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*.tmp")]


def test_every_file_reads_back(tmp_path: Path) -> None:
    rows, spectra = analysed()
    paths = write(tmp_path, rows, spectra)
    stats, typed = read_table(paths.stats), pq.read_table(paths.parquet).drop_columns("spectrum").to_pylist()
    assert [row["longname"] for row in stats] == [stored_text(name) for name in NAMES]
    assert list(stats[0]) == list(typed[0])
    for text, value in zip(stats, typed, strict=True):
        for name, cell in text.items():
            assert cell == "" if value[name] in (None, "") else cell == str(value[name]), name
    assert [row["alpha"] for row in typed] == [row.alpha for row in rows]
    assert {name: type(typed[0][name]) for name in ("M", "alpha", "embeddings", "fit_status", "bins")} == {
        "M": int,
        "alpha": float,
        "embeddings": bool,
        "fit_status": str,
        "bins": int,
    }
    stored = read_alphas(ESDDirectory(tmp_path), "org/a")
    assert stored == read_hdf5(paths.hdf5)
    assert stored.matrix.layers[:3] == ("model.layers.0", "model.layers.1", "model.layers.10")
    assert [row[0] for row in stored.matrix.values[:3]] == [rows[0].alpha, rows[1].alpha, rows[3].alpha]
    assert stored.about["full_name"] == "org/a"
    assert stored.about["base_model_relation"] == "finetune"
    assert stored.about["fix_fingers"] == "xmin_mid"
    assert stored.about.keys() >= {"ks", "evals_thresh", "gpuherd_version", "source_model"}
    drawn = read_sketches(ESDDirectory(tmp_path), "org/a")
    assert [layer.longname for layer in drawn.layers] == [stored_text(name) for name in NAMES[:5]]
    assert [layer.alpha for layer in drawn.layers] == [row.alpha for row in rows[:5]]
    assert [layer.sketch.count for layer in drawn.layers] == [row.num_evals for row in rows[:5]]
    assert drawn.convention == SETTINGS.convention_columns
    kept = list(read_eigs(paths.eigs))
    assert [each.longname for each in kept] == [stored_text(name) for name in NAMES[:5]]
    assert all(each.evals.tobytes() == spectra[each.index].evals.tobytes() for each in kept)
    assert not leftovers(tmp_path)


def test_the_hdf5_file_has_the_published_form(tmp_path: Path) -> None:
    rows, spectra = analysed()
    paths = write(tmp_path, rows, spectra)
    with h5py.File(paths.hdf5) as file:
        table = file["alpha"]
        assert table.dtype == np.float64
        assert table.shape == (table.attrs["num_layers"], table.attrs["num_modules"])
        assert table.attrs["missing_value"] == "NaN"
        assert np.isnan(table[...]).sum() == table.size - 4
        assert file.attrs["format_version"] == "1.0"
    names = pq.read_schema(paths.matrix).names
    assert names[:3] == ["layer", "number", "mlp.up"]
    assert pq.read_schema(paths.matrix).metadata[b"full_name"] == b"org/a"


def test_a_file_of_the_model_zoo_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "zoo.h5"
    with h5py.File(path, "w") as file:
        table = file.create_dataset("alpha", data=np.array([[2.5, np.nan], [3.5, 4.5]]))
        table.attrs["num_layers"], table.attrs["num_modules"] = 2, 2
        table.attrs["module_names_json"] = '["mlp.up", "q"]'
        file.attrs["format_version"] = "1.0"
        file.attrs["full_name"] = "org/zoo"
    stored = read_hdf5(path)
    assert stored.matrix.layers == ("0", "1")
    assert stored.matrix.values == ((2.5, None), (3.5, 4.5))
    assert stored.about == {"full_name": "org/zoo"}


def test_the_same_analysis_gives_the_same_bytes(tmp_path: Path) -> None:
    rows, spectra = analysed()
    first, again = write(tmp_path / "a", rows, spectra), write(tmp_path / "b", rows, spectra)
    for one, other in zip(first.results, again.results, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_no_eigenvalues_unless_asked_for_and_none_of_an_earlier_analysis(tmp_path: Path) -> None:
    rows, spectra = analysed()
    assert write(tmp_path, rows, spectra).eigs.exists()
    paths = write(tmp_path, rows, spectra, save_eigs=False)
    assert not paths.eigs.exists()
    assert paths.stats.exists()
    assert not write(tmp_path / "other", rows, spectra, save_eigs=False).eigs.parent.exists()


def test_what_is_not_written_leaves_no_trace(tmp_path: Path) -> None:
    rows, spectra = analysed()
    files = ModelResultFiles(ESDDirectory(tmp_path), "org/a", NAMES, evals_thresh=1e-5, save_eigs=True)
    with pytest.raises(RuntimeError, match="stop"), files:
        files.keep_spectrum(0, spectra[0])
        raise RuntimeError("stop")
    with files:
        files.keep_spectrum(0, spectra[0])
    assert not leftovers(tmp_path)
    assert not any(path.exists() for path in files.paths.results)
    paths = write(tmp_path, rows, spectra)
    files.remove()
    assert not any(path.exists() for path in paths.results)


def test_a_folder_that_cant_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("in the way")
    with pytest.raises(CannotWrite, match="metrics"):
        ModelResultFiles(ESDDirectory(tmp_path), "org/a", NAMES, evals_thresh=1e-5, save_eigs=False)


def test_many_matrices_are_written_in_groups_and_each_is_found(tmp_path: Path) -> None:
    n, number = 60_000, 20
    rng = np.random.default_rng(0)
    evals = [np.sort(rng.random(n)) for _ in range(number)]
    assert n * number * 8 > GROUP_BYTES
    names = [f"h.{index}" for index in range(number)]
    rows = [LayerRow(longname=name, M=n, N=n, params=n * n) for name in names]
    order = [3, *(index for index in range(number) if index != 3)]
    with ModelResultFiles(ESDDirectory(tmp_path), "m", names, evals_thresh=1e-5, save_eigs=True) as files:
        for index in order:
            files.keep_spectrum(index, LayerSpectrum(evals[index]))
        files.write(ORIGIN, rows, "tensor\n")
    assert pq.ParquetFile(files.paths.eigs).num_row_groups > 1
    assert [each.index for each in read_eigs(files.paths.eigs)] == order
    assert all(each.evals.tobytes() == evals[each.index].tobytes() for each in read_eigs(files.paths.eigs))
    assert files.paths.eigs.stat().st_size < 0.9 * 8 * n * number


def test_a_model_of_many_experts(tmp_path: Path) -> None:
    """Names of thousands of columns are more than an HDF5 object header holds."""
    names = [f"model.layers.0.mlp.experts.{index}.gate_proj" for index in range(3000)]
    rows = [LayerRow(longname=name, M=2, N=2, params=4, alpha=2.0, fit_status="ok") for name in names]
    paths = write(tmp_path, rows, [], save_eigs=False)
    assert len(read_hdf5(paths.hdf5).matrix.modules) == 3000


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"PAR1", b"\x89HDF\r\n\x1a\n"])
def test_damaged_files_are_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(BadModel, match="x"):
        list(fragment_rows(path, {"x"}))
    for read in (read_hdf5, read_spectra, lambda path: list(read_eigs(path))):
        with pytest.raises(BadModel, match="x"):
            read(path)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "absent")


@pytest.mark.parametrize("library", ["pyarrow", "h5py"])
def test_a_missing_library_is_told_at_the_beginning(tmp_path: Path, library: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from gpuherd.esd.folder import ESDDirectory\n"
        "from gpuherd.esd.model_files import ModelResultFiles\n"
        "ModelResultFiles(ESDDirectory(sys.argv[1]), 'm', [], evals_thresh=0.0, save_eigs=False)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert f"MissingExtra: {library} is not installed; pip install 'gpuherd[esd]'" in done.stderr
    assert not any(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_results import OTHER, analysed, write
from gpuherd import atomic as durable
left = int(sys.argv[3])
def dying(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return sync(*args)
sync = os.fsync
rows, spectra = analysed()
if sys.argv[4] == "anew":
    write(Path(sys.argv[2]), rows, spectra)
os.fsync = dying
write(Path(sys.argv[2]), rows, spectra, origin=OTHER)
"""


@pytest.mark.parametrize("before", ["empty", "anew"])
@pytest.mark.parametrize("at", [1, 4, 9, 11, 12])
def test_a_kill_at_any_write_leaves_no_stats_file_without_the_others(tmp_path: Path, at: int, before: str) -> None:
    """SIGKILL at a sync to disk: the stats file is there only where all others are, and are of the same analysis."""
    words = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), str(at), before]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    paths = ModelPaths(ESDDirectory(tmp_path), "org/a")
    bins = {}
    if paths.hdf5.exists():
        bins["hdf5"] = read_hdf5(paths.hdf5).about["bins"]
    if paths.spectra.exists():
        bins["spectra"] = str(read_spectra(paths.spectra).convention["bins"])
    if paths.parquet.exists():
        bins["parquet"] = str(pq.read_table(paths.parquet)["bins"][0])
    if paths.stats.exists():
        assert all(path.exists() for path in paths.results)
        assert set(bins.values()) == {read_table(paths.stats)[0]["bins"]}


def test_what_cant_be_written_leaves_the_earlier_analysis_as_it_was(tmp_path: Path) -> None:
    rows, spectra = analysed()
    paths = write(tmp_path, rows, spectra)
    before = {path: path.read_bytes() for path in paths.results}
    largest = max(before, key=lambda path: len(before[path]))
    assert largest != paths.stats, "the limit is to stop one of several"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[largest]) - 1, limits[1]))
    try:
        with pytest.raises(CannotWrite, match=str(largest.relative_to(tmp_path))):
            write(tmp_path, rows, spectra, origin=OTHER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in paths.results} == before
    assert not leftovers(tmp_path)
