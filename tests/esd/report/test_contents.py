"""What the page is told of a run."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.esd.report.runs import AddModel, heavy
from tests.jobs.attempts import SIMULATED_GPU, queue_that_ran_on

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.report import contents
from gpuherd.esd.report.contents import Contents
from gpuherd.esd.report.page import make_page
from gpuherd.esd.report.reading import RunResults, read_results
from gpuherd.esd.views import read_table, table_text
from gpuherd.jobs.queue.reader import SIMULATED_GPUS


def test_the_docstrings_examples() -> None:
    assert doctest.testmod(contents).failed == 0


def test_the_index_is_plain_json(small_run: RunResults) -> None:
    index = Contents(small_run).index()
    assert json.loads(json.dumps(index, allow_nan=False)) == index


def test_simulated_gpus_are_told(small_run: RunResults) -> None:
    assert Contents(small_run).warnings == []
    queue_that_ran_on(small_run.directory.queue, SIMULATED_GPU)
    assert SIMULATED_GPUS in Contents(read_results(small_run.directory.root)).warnings


def test_models_of_one_architecture_share_a_layout(small_run: RunResults) -> None:
    index = Contents(small_run).index()
    layout = {model["id"]: model["layout"] for model in index["models"]}
    assert layout["org/tuned"] == layout["org/other"] == layout["org/spoilt"]
    assert layout["org/base"] != layout["org/tuned"]  # it has an embedding
    shared = index["layouts"][layout["org/tuned"]]
    assert shared["layer"] == [0, 0, 1, 1]
    assert shared["module"] == ["self_attn.q_proj", "mlp.up_proj"] * 2


def test_figures_of_a_model_are_those_of_its_rows(small_run: RunResults) -> None:
    by_id = {model["id"]: model for model in Contents(small_run).index()["models"]}
    base, alpha = by_id["org/base"], small_run.models[0].alpha[:4]
    assert base["median"] == float(f"{np.median(alpha):.7g}")
    assert (base["min"], base["max"]) == (float(f"{alpha.min():.7g}"), float(f"{alpha.max():.7g}"))
    assert (base["fitted"], base["skipped"], base["without"]) == (4, 1, 0)
    assert base["params"] == sum(small_run.models[0].params[:4])
    assert (by_id["org/spoilt"]["fitted"], by_id["org/spoilt"]["without"]) == (3, 1)


def test_reasons_of_all_matrices_without_a_fit(small_run: RunResults) -> None:
    index = Contents(small_run).index()
    told = {
        (model["id"], index["reasons"][reason], index["on_purpose"][reason])
        for model in index["models"]
        for _, reason in model["bad"]
    }
    assert told == {
        ("org/base", "not analysed: embedding", True),
        ("org/spoilt", "1 of 1152 weights are NaN or infinite", False),
    }


def test_lineage_is_told_by_index(small_run: RunResults) -> None:
    models = Contents(small_run).index()["models"]
    tuned = models[3]
    assert models[tuned["parent"]]["id"] == "org/base"
    assert tuned["nearest"][0] == tuned["parent"]
    assert tuned["stated"] == tuned["nearest"]
    assert tuned["verdict"] == "as stated"


def test_every_alpha_is_in_the_pooled_histogram(small_run: RunResults) -> None:
    assert sum(Contents(small_run).index()["pooled"]) == sum(model.fitted for model in small_run.models)


def test_two_conventions_are_told(small_run: RunResults, run_folder: Path, add_model: AddModel) -> None:
    assert Contents(small_run).warnings == []
    add_model("org/mid", heavy(5), options=AnalysisOptions(fix_fingers="xmin_mid"))
    mixed = Contents(read_results(run_folder))
    assert "fix_fingers" in mixed.warnings[0]
    assert "fix_fingers" not in mixed.convention


def test_published_results_are_told_as_such(small_run: RunResults, run_folder: Path, add_model: AddModel) -> None:
    add_model("org/published", heavy(5), version="imported")
    told = Contents(read_results(run_folder)).warnings
    assert told == [
        "1 of 5 models are published results that were imported: their fitted xmin and their spectra are not known."
    ]


def test_stacks_of_one_model_stay_apart(run_folder: Path, add_model: AddModel) -> None:
    W = heavy(1)["model.layers.0.self_attn.q_proj"]
    names = ["encoder.block.0.q", "encoder.block.1.q", "decoder.block.0.q", "shared"]
    add_model("org/t5", dict.fromkeys(names, W))
    layout = Contents(read_results(run_folder)).index()["layouts"][0]
    assert layout["module"] == ["encoder.q", "encoder.q", "decoder.q", "shared"]
    assert layout["layer"] == [0, 1, 0, None]


def test_an_outlying_layer_is_listed(run_folder: Path, add_model: AddModel) -> None:
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {f"h.{at}.w": rng.standard_normal((40, 40)).astype(np.float32) for at in range(12)}
    weights["h.5.w"] = (np.eye(40) + 1e-3 * rng.standard_normal((40, 40))).astype(np.float32)
    add_model("org/a", weights)
    outliers = Contents(read_results(run_folder)).index()["outliers"]
    assert outliers["layers"][0][:2] == [0, 5]
    assert outliers["models"] == []


def test_further_fits_that_failed_are_told_with_their_reason(run_folder: Path, add_model: AddModel) -> None:
    W = np.random.default_rng(0).standard_normal((24, 24)).astype(np.float32)
    add_model("org/a", {"h.0.w": W, "h.1.w": 0 * W, "h.2.w": W}, options=AnalysisOptions(mp_fit=True))
    path = run_folder / "stats" / "org--a.csv"
    rows = read_table(path)
    rows[2]["mp_status"] = "the bulk has no edge"
    path.write_text(table_text(rows))
    index = Contents(read_results(run_folder)).index()
    notes = [(at, column, index["reasons"][reason]) for at, column, reason in index["models"][0]["notes"]]
    assert notes == [(2, "mp_status", "the bulk has no edge")]  # not of the layer of zeros, which has no fit at all


def test_every_shown_figure_is_explained(small_run: RunResults) -> None:
    index = Contents(small_run).index()
    assert set(index["figures"]) - {"params"} <= set(index["meanings"])


def test_signs_that_turn_a_line_round_are_written_out(run_folder: Path, add_model: AddModel) -> None:
    add_model("org/\u202eevil", {f"\u2066{name}": W for name, W in heavy(1).items()}, source="\u200bbase")
    (run_folder / "failures.jsonl").write_text(json.dumps({"title": "\u202ex", "reason": "\u202ey"}))
    text = json.dumps({**Contents(read_results(run_folder)).index(), "layouts": []}, ensure_ascii=False)
    assert "\\u202eevil" in json.loads(text)["models"][0]["id"]
    assert not set(text) & {"\u202e", "\u2066", "\u200b"}


def test_no_folder_of_this_machine_is_on_the_page(small_run: RunResults, run_folder: Path) -> None:
    reason = f"{run_folder}/models/x/model.safetensors is truncated" + " and so on" * 100
    (run_folder / "failures.jsonl").write_text(json.dumps({"title": "org/x", "class": "bad input", "reason": reason}))
    results = read_results(run_folder)
    told = Contents(results).index()["failures"]
    assert told[0][2].startswith("model.safetensors is truncated and so on")
    html = make_page(results).html.decode()
    assert str(run_folder) not in html
    assert told[0][2] in html  # for readers without a script the same, as long


def test_a_model_that_is_said_to_come_from_itself_is_a_base(run_folder: Path, add_model: AddModel) -> None:
    add_model("org/a", heavy(1), source="org/a")
    model = Contents(read_results(run_folder)).index()["models"][0]
    assert (model["source"], model["parent"]) == (None, None)


def test_a_model_that_comes_from_another_is_no_base_of_others(run_folder: Path, add_model: AddModel) -> None:
    add_model("org/one", heavy(1), source="org/absent", relation="")
    add_model("org/two", heavy(1, change=0.001), source="org/absent", relation="")
    assert [model["nearest"] for model in Contents(read_results(run_folder)).index()["models"]] == [None, None]


def test_when_it_was_started_is_told_with_its_zone(small_run: RunResults, run_folder: Path) -> None:
    (run_folder / "run.json").write_text('{"started": "2026-11-21T22:14:09+00:00"}')
    assert ("started", "2026-11-21 22:14 UTC", "") in Contents(read_results(run_folder)).facts()
