"""How a row becomes a job: its name, and the GPU memory it asks for."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.models.local_hub import play, running

from gpuherd.errors import UsageError
from gpuherd.esd.config import ExperimentConfig, SpectraOf
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_list import ModelRow, RefusedRow
from gpuherd.esd.plan import (
    CUDA_CONTEXT_MB,
    HEARTBEAT_S,
    PlannedModel,
    gpu_memory_mb,
    gpus_needed,
    job_name,
    make_job,
    make_plan,
    single_row,
    worker_command,
)
from gpuherd.jobs.job import Job
from gpuherd.models.subject import Preflight

MakeModel = Callable[..., Path]

FACTS = Preflight("adapter", "local", base="org/base", largest_side=4096)
PLANNED = PlannedModel(ModelRow(line=2, model_id="org/a"), FACTS)
CONFIG = ExperimentConfig(single_model="org/a")


def test_a_model_has_one_job_whose_identity_tells_model_base_and_convention() -> None:
    def job_of(config: ExperimentConfig, planned: PlannedModel) -> Job:
        run = ESDDirectory("out")
        return make_job(config, planned, worker_command(config, planned.row, run), run)

    job = job_of(CONFIG, PLANNED)
    assert job.name == job_name("org/a")
    assert job.name.startswith("org--a.")
    assert job_of(replace(CONFIG, max_gpus=2, device_map="cpu"), PLANNED).identity == job.identity
    assert job_of(CONFIG, replace(PLANNED, row=replace(PLANNED.row, model_id="org/b"))).name != job.name
    others = [
        job_of(CONFIG, replace(PLANNED, facts=replace(FACTS, base="org/other"))),
        job_of(replace(CONFIG, bins=50), PLANNED),
        job_of(replace(CONFIG, embeddings=True), PLANNED),
    ]
    assert {other.name for other in others} == {job.name}
    assert len({other.identity for other in (job, *others)}) == 4


def test_memory_is_that_of_the_gram_matrices_at_a_time() -> None:
    lane_mb = 3 * 4096 * 4096 * 8 // 2**20 + 128
    assert gpu_memory_mb(FACTS, parallel=False) == CUDA_CONTEXT_MB + lane_mb
    assert gpu_memory_mb(FACTS, parallel=True) == CUDA_CONTEXT_MB + 8 * lane_mb
    wide = replace(FACTS, largest_side=16384)
    assert gpu_memory_mb(wide, parallel=True) == CUDA_CONTEXT_MB + 2 * (3 * 2048 + 128)
    assert gpu_memory_mb(replace(FACTS, largest_side=None), parallel=True) is None


def test_models_of_the_hub_ask_for_what_their_headers_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the same models here, before anything is downloaded."""
    weights = save({"model.layers.0.mlp.up_proj.weight": torch.zeros(600, 500)})
    here = tmp_path / "model"
    here.mkdir()
    (here / "model.safetensors").write_bytes(weights)
    (here / "config.json").write_text('{"model_type": "llama"}')
    models = tmp_path / "models.csv"
    rows = ("org/whole,,", "org/lora,lora,org/whole", "org/none,,", f"{here},,", f"org/lora2,lora,{here}")
    models.write_text("\n".join(("model_id,base_model_relation,source_model", *rows)))
    config = ExperimentConfig(model_list=str(models))
    with running() as hub:
        files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": weights}
        hub.repos |= {"org/whole": files, "org/lora": {"adapter_config.json": b"{}"}}
        play(monkeypatch, hub.url, tmp_path)
        plan = make_plan(config, lambda rows, title: rows)
    run = ESDDirectory("out")
    asked = [make_job(config, each, ["x"], run).memory_mb for each in plan.models]
    known = gpu_memory_mb(replace(FACTS, largest_side=500), parallel=True)
    assert asked == [known, known, None, known, known]
    assert not plan.refused


def test_what_is_known_of_a_model_goes_into_its_job() -> None:
    run = ESDDirectory("out")
    known = replace(PLANNED, facts=replace(FACTS, total_bytes=5_000_000))
    job = make_job(CONFIG, known, worker_command(CONFIG, known.row, run), run)
    assert (job.cost, job.share, job.heartbeat_s) == (5e6, False, HEARTBEAT_S)
    assert make_job(replace(CONFIG, share=True), known, ["x"], run).share
    assert not make_job(replace(CONFIG, share=True, gpus_per_job=2), known, ["x"], run).share
    unknown = replace(PLANNED, facts=replace(FACTS, largest_side=None))
    assert make_job(replace(CONFIG, share=True), unknown, ["x"], run).share is False
    assert make_job(CONFIG, unknown, ["x"], run).cost is None


def test_only_our_own_worker_is_expected_to_tell_its_progress() -> None:
    run = ESDDirectory("out")
    assert make_job(CONFIG, PLANNED, ["/bin/other", "--model", "a"], run).heartbeat_s is None
    asked = replace(CONFIG, heartbeat=60.0)
    assert make_job(asked, PLANNED, ["/bin/other", "--model", "a"], run).heartbeat_s == 60.0
    assert make_job(asked, PLANNED, worker_command(asked, PLANNED.row, run), run).heartbeat_s == 60.0


# What is refused before a GPU is taken, and what the headers tell.


def planned(row: ModelRow, **options: Any) -> PlannedModel | RefusedRow:
    """What the plan of a list with this one row says."""
    path: Path = options.pop("path")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model_id", "base_model_relation", "source_model"])
        writer.writerow([row.model_id, row.relation, row.source_model or ""])
    plan = make_plan(ExperimentConfig(model_list=path, **options), lambda rows, _: rows)
    found: list[PlannedModel | RefusedRow] = [*plan.models, *plan.refused]
    (only,) = found
    return only


def test_spectra_that_a_model_has_not_are_refused(
    tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel
) -> None:
    base, tuned = str(make_model("base")), str(make_model("tuned", seed=1))
    adapter = str(make_adapter("lora", base=base))
    cases: list[tuple[str, str, str | None, str, str]] = [
        (tuned, "finetune", base, "ba", "only an adapter has a BA"),
        (tuned, "", None, "delta", "no base to compare it with"),
        ("org/a", "finetune", "org/b", "ba", "only an adapter has a BA"),
        ("org/a", "finetune", None, "delta", "no base to compare it with"),
        ("org/a", "base", None, "ba", "only an adapter has a BA"),
        (tuned, "finetune", "not a/model/id", "delta", "id"),
        (tuned, "finetune", adapter, "delta", "is itself an adapter"),
    ]
    for model, relation, source, spectra_of, told in cases:
        row = ModelRow(line=2, model_id=model, source_model=source, relation=relation)
        refused = planned(row, path=tmp_path / "l.csv", spectra_of=spectra_of)
        assert isinstance(refused, RefusedRow), (model, spectra_of)
        assert told in refused.reason
    possible: list[tuple[str, str, str | None, str]] = [
        (adapter, "lora", None, "ba"),
        (adapter, "", None, "delta"),
        (tuned, "finetune", base, "delta"),
        ("org/a", "", None, "ba"),  # a model of the Hub of which the list says nothing: the worker will see
        ("org/a", "unknown", None, "delta"),
        ("org/a", "lora", None, "delta"),
        ("org/a", "finetune", "org/b", "delta"),
    ]
    for model, relation, source, spectra_of in possible:
        row = ModelRow(line=2, model_id=model, source_model=source, relation=relation)
        assert isinstance(planned(row, path=tmp_path / "l.csv", spectra_of=spectra_of), PlannedModel), model


def test_a_pattern_that_matches_nothing_refuses_the_row(tmp_path: Path, make_model: MakeModel) -> None:
    row = ModelRow(line=2, model_id=str(make_model("a")))
    refused = planned(row, path=tmp_path / "l.csv", layers=("q_prj",))
    assert isinstance(refused, RefusedRow)
    assert "--layers 'q_prj' matches no tensor" in refused.reason and "q_proj" in refused.reason
    kept = planned(row, path=tmp_path / "l.csv", layers=("*q_proj",), exclude=("*.layers.0.*",))
    assert isinstance(kept, PlannedModel)
    total = 50 * 32 + 2 * (32 * 32 + 64 * 32)
    assert (kept.facts.num_matrices, kept.facts.params_analysed, kept.facts.params) == (1, 32 * 32, total)
    assert kept.facts.share == 1024 / total


def test_the_size_of_a_comparison_counts_both_sides(tmp_path: Path, make_model: MakeModel) -> None:
    base, tuned = str(make_model("base")), str(make_model("tuned", seed=1))
    row = ModelRow(line=2, model_id=tuned, source_model=base, relation="finetune")
    plain = planned(row, path=tmp_path / "l.csv")
    delta = planned(row, path=tmp_path / "l.csv", spectra_of="delta")
    assert isinstance(plain, PlannedModel) and isinstance(delta, PlannedModel)
    assert plain.facts.base is None and delta.facts.base == base
    assert delta.facts.total_bytes == 2 * (plain.facts.total_bytes or 0)
    assert delta.facts.num_matrices == plain.facts.num_matrices == 4


def test_a_single_model_with_a_base(make_model: MakeModel, make_adapter: MakeModel) -> None:
    base, tuned = str(make_model("base")), str(make_model("tuned", seed=1))
    adapter = str(make_adapter("lora", base=None))

    def relation(model: str, spectra_of: SpectraOf) -> tuple[str, str | None]:
        row = single_row(ExperimentConfig(single_model=model, base_model=base, spectra_of=spectra_of))
        return row.relation, row.source_model

    assert relation(tuned, "delta") == relation(tuned, "weights") == ("finetune", base)
    assert relation(adapter, "delta") == ("adapter", base)
    assert relation(adapter, "ba") == relation("org/a", "ba") == ("adapter", base)
    assert relation("org/a", "delta") == ("", base)
    assert single_row(ExperimentConfig(single_model=tuned)).relation == ""
    # A whole model is analysed as what it is: where it comes from is told, and wanted for nothing else.
    plan = make_plan(ExperimentConfig(single_model=tuned, base_model="org/gone"), lambda rows, _: rows)
    assert (plan.models[0].row.source_model, plan.models[0].facts.base) == ("org/gone", None)


def test_patterns_reach_the_worker_as_they_are(tmp_path: Path) -> None:
    from gpuherd.esd.worker import ESDWorkerOptions
    from gpuherd.options import Parser, add_options, build

    patterns = ("*.q_proj", "a b'c", "[!x]?")
    config = ExperimentConfig(single_model="org/a", layers=patterns, exclude=("*",), spectra_of="delta")
    words = worker_command(config, PLANNED.row, ESDDirectory(tmp_path))
    parser = Parser(prog="worker")
    add_options(parser, ESDWorkerOptions)
    options = build(ESDWorkerOptions, parser.parse_args(words[4:]))
    assert (options.layers, options.exclude, options.spectra_of) == (patterns, ("*",), "delta")
    assert repr(options.convention_columns) == repr(config.convention_columns)


@pytest.mark.parametrize("bad", ["", "--odd", "-x", "a\0b", "\ud800"])
def test_a_pattern_that_no_worker_could_be_given(bad: str) -> None:
    with pytest.raises(UsageError, match=r"layers=.*a pattern is"):
        ExperimentConfig(single_model="org/a", layers=(bad,))
    with pytest.raises(UsageError, match=r"exclude=.*a pattern is"):
        ExperimentConfig(single_model="org/a", exclude=("*", bad))


def test_the_spectra_of_ba_take_no_gpu() -> None:
    two = replace(CONFIG, gpus_per_job=2)
    ba = replace(two, spectra_of="ba")
    run = ESDDirectory("out")
    job = make_job(ba, PLANNED, ["x"], run)
    assert (gpus_needed(two), gpus_needed(ba), job.gpus, job.memory_mb) == (2, 0, 0, None)
    assert gpus_needed(replace(ba, device_map="cuda")) == gpus_needed(replace(ba, randomize=True)) == 2
    assert gpus_needed(replace(two, spectra_of="delta")) == 2
    assert gpus_needed(replace(two, device_map="cpu")) == 0
