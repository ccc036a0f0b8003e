"""How a row becomes a job: its name, and the GPU memory it asks for."""

from __future__ import annotations

from dataclasses import replace

from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_list import ModelRow
from gpuherd.esd.plan import (
    CUDA_CONTEXT_MB,
    HEARTBEAT_S,
    PlannedModel,
    gpu_memory_mb,
    job_name,
    make_job,
    worker_command,
)
from gpuherd.models.preflight import Preflight

FACTS = Preflight("adapter", "local", base="org/base", largest_side=4096)
PLANNED = PlannedModel(ModelRow(line=2, model_id="org/a"), FACTS)
CONFIG = ExperimentConfig(single_model="org/a")


def test_a_job_is_the_same_only_for_the_same_model_base_and_convention() -> None:
    name = job_name(CONFIG, PLANNED)
    assert name.startswith("org--a.")
    assert job_name(replace(CONFIG, max_gpus=2, device_map="cpu"), PLANNED) == name
    others = {
        job_name(CONFIG, replace(PLANNED, facts=replace(FACTS, base="org/other"))),
        job_name(CONFIG, replace(PLANNED, row=replace(PLANNED.row, model_id="org/b"))),
        job_name(replace(CONFIG, bins=50), PLANNED),
        job_name(replace(CONFIG, embeddings=True), PLANNED),
    }
    assert len(others | {name}) == 5


def test_memory_is_that_of_the_gram_matrices_at_a_time() -> None:
    lane_mb = 3 * 4096 * 4096 * 8 // 2**20 + 128
    assert gpu_memory_mb(FACTS, parallel=False) == CUDA_CONTEXT_MB + lane_mb
    assert gpu_memory_mb(FACTS, parallel=True) == CUDA_CONTEXT_MB + 8 * lane_mb
    wide = replace(FACTS, largest_side=16384)
    assert gpu_memory_mb(wide, parallel=True) == CUDA_CONTEXT_MB + 2 * (3 * 2048 + 128)
    assert gpu_memory_mb(replace(FACTS, largest_side=None), parallel=True) is None


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
