"""``gpuherd esd compare`` and ``export``: on real files of results, as users meet them."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import BadModel, ExitCode, MissingModel, UsageError
from gpuherd.esd.comparison import NOT_OF_ALPHA
from gpuherd.esd.config import CONVENTION, AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.results import find, read_model
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.views import Origin, stats_rows, table_text

OTHER = AnalysisOptions(fix_fingers="DKS")


def put(
    root: Path,
    model: str,
    alphas: dict[str, float | None],
    options: AnalysisOptions = AnalysisOptions(),  # noqa: B008 - frozen
) -> Path:
    """A stats file with these alphas."""
    rows = [
        LayerRow(
            longname=name,
            M=8,
            N=8,
            params=64,
            num_evals=100,
            alpha=alpha,
            fit_status="ok" if alpha is not None else "all weights are zero",
        )
        for name, alpha in alphas.items()
    ]
    path = ESDDirectory(root).stats_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = Origin(model, None, "", options.convention_columns, "0.3.0")
    path.write_text(table_text(stats_rows(origin, rows)), encoding="utf-8")
    return path


def layers(*alphas: float | None) -> dict[str, float | None]:
    return {f"h.{index}.q": alpha for index, alpha in enumerate(alphas)}


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([*words, "--json"]) == ExitCode.OK
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_two_models_layer_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = put(tmp_path / "a", "org/a", layers(2.0, 3.0, None, 4.0) | {"only.0.a": 2.0})
    put(tmp_path / "b", "org/b", layers(2.5, 2.0, 3.0, 4.0) | {"only.0.b": 2.0, "only.1.b": 2.0})
    told = as_json(capsys, "esd", "compare", str(a), f"{tmp_path / 'b'}:org/b")
    (model,) = told["models"]
    assert (model["a"], model["b"], model["conventions"]) == ("org/a", "org/b", None)
    assert [pair["delta"] for pair in model["pairs"]] == [0.5, -1.0, None, 0.0]
    assert (model["layers"], model["median_abs_delta"], model["max_abs_delta"]) == (3, 0.5, 1.0)
    assert model["max_at"] == "h.1.q"
    assert (model["only_a"], model["only_b"]) == (["only.0.a"], ["only.0.b", "only.1.b"])
    assert run(["esd", "compare", str(a), str(tmp_path / "b")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "h.1.q" in text
    assert "-1.0000" in text
    assert "only in B: 2 (only.0.b, only.1.b)" in text
    assert "3 matrices with a fit in both: median |delta| 0.5, largest -1.0000 at h.1.q" in text


def test_all_models_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for root, shift in (("a", 0.0), ("b", 0.25)):
        put(tmp_path / root, "org/x", layers(2.0 + shift, 3.0 + shift))
        put(tmp_path / root, "org/y", layers(2.0, 3.0))
    put(tmp_path / "a", "org/mine", layers(2.0))
    told = as_json(capsys, "esd", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert {model["a"]: model["median_abs_delta"] for model in told["models"]} == {"org/x": 0.25, "org/y": 0.0}
    assert (told["only_a"], told["only_b"]) == (["org/mine"], [])
    assert run(["esd", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == ExitCode.OK
    assert "2 models in both, 1 only in A, 0 only in B" in capsys.readouterr().out


def test_two_conventions_are_refused_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = put(tmp_path / "a", "m", layers(2.0)), put(tmp_path / "b", "m", layers(3.0), OTHER)
    with pytest.raises(UsageError, match=r"fix_fingers=xmin_mid.*fix_fingers=DKS.*--across-conventions"):
        run(["esd", "compare", str(a), str(b)])
    assert run(["esd", "compare", str(a), str(b), "--across-conventions"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "two conventions" in text.splitlines()[2]
    assert "A fix_fingers=xmin_mid; B fix_fingers=DKS" in text
    (model,) = as_json(capsys, "esd", "compare", str(a), str(b), "--across-conventions")["models"]
    assert model["conventions"] == ["fix_fingers=xmin_mid", "fix_fingers=DKS"]


def test_what_alpha_does_not_depend_on_is_no_other_convention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = AnalysisOptions(mp_fit=True, layers=("h.*",), embeddings=True, seed=3)
    a, b = put(tmp_path / "a", "m", layers(2.0)), put(tmp_path / "b", "m", layers(3.0), more)
    (model,) = as_json(capsys, "esd", "compare", str(a), str(b))["models"]
    assert (model["conventions"], model["median_abs_delta"]) == (None, 1.0)
    with pytest.raises(UsageError, match=r"with precision=float64, m with precision=float32:"):
        run(["esd", "compare", str(a), str(put(tmp_path / "c", "m", layers(3.0), replace(more, precision="float32")))])


def test_every_option_is_known_to_change_alpha_or_not() -> None:
    assert set(CONVENTION) > NOT_OF_ALPHA
    assert set(CONVENTION) - NOT_OF_ALPHA == {
        "fix_fingers", "evals_thresh", "bins", "ks", "xmin_pos", "clip_xmax", "precision", "spectra_of",
    }  # fmt: skip


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "a", "m", {"x.0.a": 2.0})
    put(tmp_path / "b", "m", {"y.0.a": 2.0})
    assert run(["esd", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == ExitCode.FAILED
    assert "no matrix with a valid fit in both" in capsys.readouterr().out
    put(tmp_path / "c", "m1", layers(2.0))
    put(tmp_path / "c", "m2", layers(2.0))
    with pytest.raises(UsageError, match="no model in common"):
        run(["esd", "compare", str(tmp_path / "a"), str(tmp_path / "c")])


def test_names_drive_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil: dict[str, float | None] = {"h.0.\x1b]0;owned\x07": 2.0, "=1+1": 3.0}
    a, b = put(tmp_path / "a", "m", evil), put(tmp_path / "b", "m", evil)
    assert run(["esd", "compare", str(a), str(b)]) == ExitCode.OK
    assert run(["esd", "export", str(a), "--tempbalance"]) == ExitCode.OK
    assert "\x1b" not in capsys.readouterr().out
    assert run(["esd", "export", str(a), "--tempbalance", "--csv"]) == ExitCode.OK
    assert "'=1+1" in capsys.readouterr().out


def test_how_results_are_named(tmp_path: Path) -> None:
    path = put(tmp_path / "run:1", "org/a", layers(2.0))
    assert find(str(path)) == find(f"{tmp_path / 'run:1'}:org/a") == find(str(tmp_path / "run:1")) == [path]
    assert find(f"{tmp_path / 'run:1'}:org--a") == [path]
    local = put(tmp_path / "run:1", "/data/models/tuned", layers(2.0))
    assert find(f"{tmp_path / 'run:1'}:/data/models/tuned") == find(f"{tmp_path / 'run:1'}:tuned") == [local]
    with pytest.raises(MissingModel, match=r"no model 'org/b' in .*; did you mean org/a\?"):
        find(f"{tmp_path / 'run:1'}:org/b")
    with pytest.raises(UsageError, match="no stats file, no folder of a run"):
        find("absent")
    with pytest.raises(UsageError, match=r"no results in"):
        find(str(tmp_path))
    tuned = put(tmp_path / "run:1", "/data/models/tuned-lora", layers(2.0))
    assert find(f"{tmp_path / 'run:1'}:tuned") == [local]
    assert find(f"{tmp_path / 'run:1'}:lora") == [tuned]
    with pytest.raises(MissingModel, match=r"several models of .* match 'tune': /data/models/tuned.*, /data/models/"):
        find(f"{tmp_path / 'run:1'}:tune")
    with pytest.raises(MissingModel, match=r"did you mean /data/models/tuned\?"):
        find(f"{tmp_path / 'run:1'}:/data/model/tuned")
    tuned.write_text("a,b\n")
    with pytest.raises(MissingModel, match=r"no model .none. in .*; for example org/a, /data/models/tuned, tuned-lo"):
        find(f"{tmp_path / 'run:1'}:none")
    tuned.unlink()
    models = [read_model(path).model_id for path in find(str(tmp_path / "run:1"))]
    assert models == ["org/a", "/data/models/tuned"]


@pytest.mark.parametrize(
    "content", ["", "a,b\n1,2\n", "model_id\n", '"', "model_id,longname,M\nx,y,z\n", "\udcff", "a,b\n1\n"]
)
def test_a_file_of_another_kind(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadModel, match=r"x\.csv"):
        read_model(path)


def test_export_in_all_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path / "a", "org/a", layers(2.0, 3.0, 5.0, 4.0, 2.0))
    told = as_json(capsys, "esd", "export", str(path), "--tempbalance", "--lr", "0.01")
    assert (told["model"], told["method"], told["mapping"], told["lr"]) == ("org/a", "tempbalance", "linear", 0.01)
    assert [layer["lr"] for layer in told["layers"]] == [0.01, 0.005, 0.015, 0.01, 0.01]
    assert told["convention"]["fix_fingers"] == "xmin_mid"
    words = ["esd", "export", str(tmp_path / "a"), "--model", "org/a", "--alphapruning", "--sparsity", "0.5"]
    told = as_json(capsys, *words, "--by", "layer", "--epsilon", "0.2")
    assert (told["sparsity"], told["by"], told["epsilon"]) == (0.5, "layer", 0.2)
    assert sum(layer["sparsity"] for layer in told["layers"]) / 5 == pytest.approx(0.5, abs=1e-15)
    assert run([*words, "--csv"]) == ExitCode.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == ["longname", "params", "alpha", "sparsity"]
    assert run(words) == ExitCode.OK
    assert "org/a: alphapruning, sparsity 0.5, by block, epsilon 0.3" in capsys.readouterr().out
    assert run(["esd", "export", str(path), "--tempbalance", "--mapping", "step"]) == ExitCode.OK


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tempbalance", "--sparsity", "0.5"], "--sparsity does not go with --tempbalance"),
        (["--alphapruning", "--lr", "0.5"], "--lr does not go with --alphapruning"),
        (["--tempbalance", "--lr", "-1"], "positive"),
        (["--tempbalance", "--lr", "nan"], "positive"),
        (["--alphapruning", "--sparsity", "1"], "less than 1"),
        (["--tempbalance"], "has 2 models"),
        (["--tempbalance", "--model", "org/c"], "did you mean org/a?"),
    ],
)
def test_what_export_refuses(tmp_path: Path, words: list[str], told: str) -> None:
    put(tmp_path, "org/a", layers(2.0, 3.0))
    put(tmp_path, "other", layers(2.0, 3.0))
    where = str(tmp_path) if "models" in told or "mean" in told else f"{tmp_path}:org/a"
    with pytest.raises((UsageError, MissingModel)) as refused:
        run(["esd", "export", where, *words])
    assert told in str(refused.value)


def test_export_needs_a_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["esd", "export", str(tmp_path)])
    assert ended.value.code == ExitCode.USAGE
    assert "--tempbalance" in capsys.readouterr().err
