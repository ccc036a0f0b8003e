"""What jobs ask for on this machine or that, and the words that their workers get."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.gpus.query import machine
from gpuherd.jobs.job import Job
from gpuherd.models.load.jobs import JobRequest, Resources, job_request, resources_for, shard_jobs
from gpuherd.models.load.options import ShardOptions, WorkOptions
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.options import Parser, add_options, build
from gpuherd.runs.records import jsonable
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedDirectory, ShardedWork, kept_plan

WORK = Workload(8, 500, 64)


def on(spec: str, standin: Callable[..., Any]) -> Resources:
    standin(spec)
    return Resources(tuple(machine().gpus), cores=16)


def test_a_small_model_takes_a_gpu_and_as_many_jobs_as_there_are(trained: Path, standin: Callable[..., Any]) -> None:
    have = on("4x40GB", standin)
    asks = job_request(str(trained), WorkOptions(), WORK, have)
    assert (asks.gpus, asks.at_once) == (1, 4)
    assert asks.memory_mb is not None and 500 < asks.memory_mb < 4000
    assert job_request(str(trained), WorkOptions(max_gpus=3), WORK, have).at_once == 3
    assert job_request(str(trained), WorkOptions(max_concurrent=2), WORK, have).at_once == 2
    two = job_request(str(trained), WorkOptions(gpus_per_job=2), WORK, have)
    assert (two.gpus, two.at_once) == (2, 2)


def test_a_large_model_takes_several(standin: Callable[..., Any]) -> None:
    have = on("8x40GB", standin)
    asks = job_request("llama-3.1-70b", WorkOptions(max_gpus=8), WORK, have)
    assert (asks.gpus, asks.at_once) == (4, 2)
    quantised = job_request("llama-3.1-70b-4bit", WorkOptions(max_gpus=8), WORK, have)
    assert quantised.gpus == 2 and "nf4" in quantised.sentence
    with pytest.raises(JobCannotFit):
        job_request("llama-3.1-70b", WorkOptions(max_gpus=2), WORK, have)
    offloaded = job_request("llama-3.1-70b", WorkOptions(max_gpus=2, allow_offload="cpu"), WORK, have)
    assert (offloaded.gpus, offloaded.memory_mb, offloaded.at_once) == (2, None, 1)


def test_a_cluster_is_planned_for_by_its_own_gpus(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver is asked on the machine where the command is typed."""

    def nobody(*_: object, **__: object) -> None:
        raise AssertionError("a driver was asked")

    monkeypatch.setattr("gpuherd.jobs.gpu.watch.GpuWatch.__init__", nobody)
    options = WorkOptions(engine="slurm", node_gpus="8xA100-80GB", max_gpus=8)
    have = resources_for(options)
    assert (job_request("llama-3.1-70b", options, WORK, have).gpus, have.gpus) == (2, ())
    # max_gpus says how wide the work is to be, not how many GPUs a node has.
    wide = WorkOptions(engine="slurm", node_gpus="2x24GB", max_gpus=16)
    assert job_request(str(trained), wide, WORK, resources_for(wide)).at_once == 16
    unsaid = WorkOptions(engine="ray", device_map="cpu", max_gpus=3)
    assert job_request(str(trained), unsaid, WORK, resources_for(unsaid)) == JobRequest(
        0, None, 3, "on the CPU, as asked"
    )
    with pytest.raises(UsageError, match="say what a node has by --node-gpus"):
        job_request(str(trained), WorkOptions(engine="ray"), WORK, resources_for(WorkOptions(engine="ray")))


def test_a_device_map_says_how_many(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": "cpu", "lm_head": 0}))
    have = Resources((), cores=4)
    assert job_request(str(trained), WorkOptions(device_map=str(path)), WORK, have).gpus == 2
    assert job_request(str(trained), WorkOptions(device_map="cpu", cpu_jobs=3), WORK, have) == JobRequest(
        0, None, 3, "on the CPU, as asked"
    )


def test_a_job_a_shard(tmp_path: Path) -> None:
    folder = ShardedDirectory(tmp_path)
    options = WorkOptions(dtype="nf4", adapter="lora", retries=3, share=True)  # type: ignore[arg-type]
    kept_plan(folder, "x", lambda: [Shard(((0, 1),)), Shard(()), Shard(((2,),))])

    def made(asks: JobRequest, options: WorkOptions, identity: str = "x") -> list[Job]:
        work = ShardedWork(folder, identity, (), lambda lengths: ())
        module = "gpuherd.qa.generate.worker"
        return shard_jobs(module, "org/a model", work, asks, WORK, options, title="a model", simulate=True)

    jobs = made(JobRequest(1, 2000, 4, ""), options)
    assert [job.name for job in jobs] == ["shard-00000", "shard-00002"]
    assert [job.result for job in jobs] == [str(folder.shard_done(0)), str(folder.shard_done(2))]
    assert all((job.gpus, job.memory_mb, job.retries, job.share) == (1, 2000, 3, True) for job in jobs)
    # The worker reads back what was asked for.
    parser = Parser()
    add_options(parser, ShardOptions)
    told = build(ShardOptions, parser.parse_args(list(jobs[1].argv[4:])))
    assert (told.model, told.folder, told.shard, told.simulate) == ("org/a model", str(folder.root), 2, True)
    assert (told.dtype, told.adapter, told.prompt_tokens, told.new_tokens) == ("nf4", "lora", 500, 64)
    # Another identity, or another division, is another job; where it runs changes nothing.
    again = made(JobRequest(1, 2000, 4, ""), options, "y")
    moved = made(JobRequest(2, 9000, 4, ""), replace(options, device_map="cpu", share=False))
    assert again[0].identity != jobs[0].identity == moved[0].identity


def test_options_as_plain_values() -> None:
    values = jsonable(WorkOptions(gpu_list=("0", "1"), dtype="bf16"))  # type: ignore[arg-type]
    assert json.loads(json.dumps(values)) == values
    assert values["gpu_list"] == ["0", "1"] and values["dtype"] == "bf16"
