"""Whole runs of ``gpuherd generate`` by each backend, on the same questions: answers a second, and what the rest costs.

    python -m benchmarks generate_backends            all (6 minutes on 2 cores, after `make vllm`)

The model is the Llama of ``benchmarks.generate`` (88 million random weights on a CPU). Seconds of the answers are those
that the job records; the rest of a run is its start. vLLM runs in the environment that `make vllm` builds (or
``GPUHERD_VLLM_PYTHON``); without it the benchmark is ``Absent``.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._peers import Absent
from benchmarks.generate import device, words, write_model

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
PYTHON = Path(os.environ.get("GPUHERD_VLLM_PYTHON", _CACHE / "gpuherd-vllm" / "bin" / "python"))
BACKENDS = ("transformers", "vllm")
CASES = {"greedy": ["--greedy"], "samples": ["--samples", "10"]}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def run(*, quick: bool) -> dict[str, Any]:
    """Per dtype and case: answers a second of each backend, seconds of the rest, how alike their greedy answers are.

    :raises Absent: vLLM's environment is not there.
    """
    if not PYTHON.exists():
        raise Absent(f"no vLLM: make vllm, or GPUHERD_VLLM_PYTHON ({PYTHON})")
    found: dict[str, Any] = {"device": device()}
    with tempfile.TemporaryDirectory() as name:
        for dtype in ["fp32"] if quick else DTYPES:
            folder = Path(name, dtype)
            model = folder / "model"
            cases = CASES if dtype == "fp32" else ["greedy"]
            write_model(model, DTYPES[dtype], quick=False, large=device() != "cpu")
            found[dtype] = {case: compared(folder / case, model, dtype, case, quick=quick) for case in cases}
    return found


def compared(folder: Path, model: Path, dtype: str, case: str, *, quick: bool) -> dict[str, Any]:
    """One case: each backend on the same questions."""
    many = 6 if quick else 256 if case == "greedy" else 34
    draw = random.Random(0)
    folder.mkdir(parents=True)
    questions = folder / "questions.jsonl"
    rows = [
        (f"q{number}", " ".join(f"w{word}" for word in words(draw, draw.randrange(20, 61)))) for number in range(many)
    ]
    questions.write_text(
        "".join(json.dumps({"id": row, "question": text, "answers": ["w2"]}) + "\n" for row, text in rows)
    )
    found: dict[str, Any] = {"questions": many, "new_tokens": 50}
    lines: dict[str, list[dict[str, Any]]] = {}
    for backend in BACKENDS:
        common = ["--model", str(model), "--dataset", str(questions), "--dtype", dtype, "--backend", backend]
        common += ["--max-new-tokens", "50", "--shards", "1", "--batch-size", "64", *CASES[case]]
        whole, made, lines[backend] = generated(backend, common, folder / backend)
        answers = many * (1 if case == "greedy" else int(CASES[case][1]))
        found[backend] = {
            "answers_a_second": round(answers / made["seconds"], 2),
            "tokens_a_second": round(made["tokens"] / made["seconds"], 1),
            "seconds_of_all": round(whole, 1),
            "seconds_of_the_rest": round(whole - made["seconds"], 1),
        }
        print(dtype, case, backend, found[backend], file=sys.stderr, flush=True)
    if case == "greedy":
        found |= agreement(lines["transformers"], lines["vllm"])
    return found


def generated(backend: str, options: list[str], runs: Path) -> tuple[float, dict[str, Any], list[dict[str, Any]]]:
    """Seconds of the clock of one run, what its job recorded, and the lines of its answers.

    :raises RuntimeError: the run failed; with the end of its job's log.
    """
    environment = {
        **os.environ,
        "GPUHERD_VLLM_PYTHON": str(PYTHON),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    where = ["--device-map", "cpu"] if device() == "cpu" else []
    begun = time.perf_counter()
    command = [sys.executable, "-P", "-m", "gpuherd", "generate", *options, *where, "--runs-dir", str(runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode:
        logs = [path.read_text(encoding="utf-8", errors="replace")[-4000:] for path in runs.glob("*/logs/shard-*.log")]
        raise RuntimeError("\n".join([f"{backend} failed", done.stdout[-2000:], done.stderr[-2000:], *logs]))
    (answers,), (record,) = runs.glob("*/answers.jsonl"), runs.glob("*/shards/00000.json")
    made: dict[str, Any] = json.loads(record.read_bytes())
    return seconds, made, [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many greedy answers are the same, and how far the log-probs of these lie apart."""
    pairs = [(one["greedy"], other["greedy"]) for one, other in zip(ours, theirs, strict=True)]
    same = [(one, other) for one, other in pairs if one["token_ids"] == other["token_ids"]]
    apart = [
        abs(a - b)
        for one, other in same
        for a, b in zip(one["log_probs"], other["log_probs"], strict=True)
    ]  # fmt: skip
    return {
        "same_greedy_answers": f"{len(same)} of {len(pairs)}",
        "log_probs_apart": {"median": statistics.median(apart), "most": max(apart)} if apart else None,
    }
