"""What a run of answers would start: its shards, what each job asks for, and the jobs. Starts nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuherd.jobs.job import Job
from gpuherd.lm.batching import plan_batches
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.generation.guiding import guide_bytes
from gpuherd.qa.generation.prepared import Prepared
from gpuherd.qa.working.model_jobs import Asks, Having, WorkerCall, having, shard_jobs, what_it_takes
from gpuherd.qa.working.sharding import Shard, number_of_shards, plan_shards

WORKER = "gpuherd.qa.generation.worker"


@dataclass(frozen=True, slots=True)
class Plan:
    """What would run.

    Attributes:
        asks: what each job asks for.
        shards: how the questions are divided, where the run has not begun yet.
        workload: what a job does at once.
    """

    asks: Asks
    shards: tuple[Shard, ...]
    workload: Workload


def make_plan(config: GenerateConfig, prepared: Prepared, have: Having | None = None) -> Plan:
    """The plan for this machine (``have``: for another). Raises what ``what_it_takes`` raises, NoSuchGpu."""
    how = config.decoding()
    workload = Workload(config.rows * (how.samples + how.greedy), max(1, prepared.longest), config.max_new_tokens)
    asks = _asks(config, workload, having(config) if have is None else have, guide_bytes(prepared.guide, workload))
    many = number_of_shards(len(prepared.lengths), asks.at_once, config.shards)
    return Plan(asks, plan_shards(prepared.lengths, many, partial(plan_batches, rows=config.rows)), workload)


def _asks(config: GenerateConfig, workload: Workload, have: Having, beside: int) -> Asks:
    asks = what_it_takes(config.model, config, workload, have, beside)
    if config.backend == "vllm" and asks.gpus > 1:
        # It divides each layer, which not every number of GPUs can.
        return what_it_takes(config.model, replace(config, parallel="tensor"), workload, have)
    return asks


def identity_of(record: Mapping[str, Any]) -> str:
    """All that a run's answers depend on, as one digest."""
    names = ("identity", "questions_sha256", "prompts_sha256", "model_sha256", "end_tokens", "stop")
    values = [record[name] for name in names]
    if record.get("guide") is not None:
        values += [record["guide"], record["guide_sha256"]]
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def make_jobs(
    config: GenerateConfig,
    prepared: Prepared,
    plan: Plan,
    shards: Sequence[Shard],
    folder: QADirectory,
    *,
    simulate: bool,
) -> list[Job]:
    """A job for each shard; how answers are decoded its worker reads in run.json."""
    call = WorkerCall(
        module=WORKER,
        model=config.model,
        words=(),
        workload=plan.workload,
        simulate=simulate,
        identity=identity_of(prepared.record),
        title=Path(config.model).name or config.model,
    )
    return shard_jobs(call, shards, folder, plan.asks, config)
