"""A 70B model on four GPUs of 40 GB, without any of them: planned, queued, and loaded as planned in a reduced copy.

    python demo/large_model.py [FOLDER]

1. The plan of Llama-3.1-70B in bf16 for 8 sequences on 4 x 40 GB: which block goes to which GPU.
2. A reduced copy is made: the same blocks, each tiny, random weights.
3. A job list with a 1B and the 70B model; neither says how many GPUs it needs. ``gpuherd batch`` asks the planner.
4. The large job's worker loads the reduced copy with the very map of the plan, and checks each block.

GPUs are simulated, so that it runs on any machine: "GPU 2" is a part of the computer's memory.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpuherd.jobs import Queue
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan, format_blocks
from gpuherd.units import gib

MODEL, GPUS, BATCH = "llama-3.1-70b", "4x40GB", 8


def main(folder: Path) -> int:
    """Runs all four steps and prints what came of them. Returns 0 when all came out as planned."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = planned()
    for load in plan.loads:
        blocks = format_blocks(plan.architecture, load.first, load.after_last)
        print(f"GPU {load.gpu.label}: {blocks}: {gib(load.usage.total)} of {gib(load.gpu.free)}")
    (folder / "map.json").write_text(json.dumps(plan.device_map), encoding="utf-8")
    reduced_copy(plan.architecture.layers, folder / "reduced")
    (folder / "jobs.txt").write_text(job_list(), encoding="utf-8")
    run = [sys.executable, "-m", "gpuherd", "--simulate", GPUS, "batch", "jobs.txt", "--output-dir", "run"]
    fast = ["--max-checks", "1", "--check-interval", "0.1"]
    done = subprocess.run([*run, *fast], cwd=folder, check=False)
    found = outcome(folder)
    print(f"GPUs that the jobs got: {found['gpus']}")
    as_planned = found["device_map"] == plan.device_map
    print(f"{len(plan.device_map)} blocks, each where the plan says: {'yes' if as_planned else 'NO'}")
    return 0 if as_planned and done.returncode == 0 and found["gpus"] == {"small": 1, "large": plan.gpus} else 1


def planned() -> MemoryPlan:
    """The plan of the large model on the simulated GPUs."""
    told = make_plan(read_architecture(MODEL), parse_gpus(GPUS), Precision.BF16, Workload(batch=BATCH))
    assert isinstance(told, MemoryPlan), told.reason
    return told


def reduced_copy(layers: int, folder: Path) -> None:
    """A Llama with as many layers, each of a few thousand numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def job_list() -> str:
    """Two jobs that say which model they load, and nothing of GPUs."""
    load = [sys.executable, "-m", "gpuherd.models.load.worker", "reduced", "--device-map", "map.json", "--simulate"]
    load += ["--prompt-tokens", "16", "--json", "report.json"]
    return "\n".join(
        [
            "#gpuherd model=llama-3.2-1b dtype=bf16 name=small",
            "true",
            f"#gpuherd model={MODEL} dtype=bf16 batch={BATCH} name=large",
            shlex.join(load),
            "",
        ]
    )


def outcome(folder: Path) -> dict[str, Any]:
    """How many GPUs each job got, and the device map that the worker found."""
    with Queue(folder / "run" / "queue.sqlite") as queue:
        gpus = {attempt.job: len(attempt.gpus) for attempt in queue.attempts()}
    report = folder / "report.json"
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"device_map": None}
    return {"gpus": gpus, "device_map": found["device_map"]}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory(prefix="gpuherd-large-") as chosen:
        sys.exit(main(Path(chosen)))
