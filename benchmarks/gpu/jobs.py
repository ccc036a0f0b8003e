"""Leases, ``run`` and ``batch`` on a real GPU, and the class of failure of each way in which CUDA runs out of memory.

The jobs that run out of memory fill a GPU for an instant. It is one that gpuherd found free and holds a lease on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import Measurement, device, gpuherd

FAST = ("--max-checks", "2", "--check-interval", "0.2")
JOBS = 40

# Each program runs out of GPU memory in another way, so in other words of CUDA's.
OUT_OF_MEMORY = {
    "tensor": "import torch\ntorch.empty(1 << 50, dtype=torch.uint8, device='cuda')\n",
    "fraction": """
import torch
torch.cuda.set_per_process_memory_fraction(0.01)
torch.empty(torch.cuda.mem_get_info()[1] // 20, dtype=torch.uint8, device="cuda")
""",
    "cublas": """
import torch
one, product = torch.ones(1024, 1024, device="cuda"), torch.empty(1024, 1024, device="cuda")
kept, size = [], torch.cuda.mem_get_info()[0]
while size > 1 << 19:
    try:
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
torch.mm(one, one, out=product)  # there is no room for the library's handle
torch.linalg.eigvalsh(product)
""",
    "driver": """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
pointer, name = ctypes.c_void_p(), ctypes.c_char_p()
code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 50))
cuda.cuGetErrorName(code, ctypes.byref(name))
raise SystemExit(name.value.decode())
""",
}


def measure(quick: bool) -> Iterator[Measurement]:
    """One command, two that want the same GPU, a batch, and each way of running out of memory."""
    device(quick=False)
    yield Measurement("run", one_command)
    yield Measurement("lease", held)
    yield Measurement("batch", partial(batch, 4 if quick else JOBS))
    yield Measurement("out_of_memory", out_of_memory)


def one_command() -> dict[str, Any]:
    """A command sees one GPU, its exit code is passed on; seconds from the start to the first line of the command."""
    code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); raise SystemExit(7)"
    started = time.time()
    done = gpuherd("run", "--quiet", *FAST, "--", sys.executable, "-c", code, check=False)
    if done.returncode != 7:
        raise RuntimeError(f"exit code {done.returncode} in place of 7: {done.stderr[-500:]}")
    visible, began = done.stdout.split()
    if "," in visible:
        raise ValueError(f"one GPU was asked for, CUDA_VISIBLE_DEVICES is {visible}")
    return {"visible": visible, "start_s": float(began) - started}


def held() -> dict[str, Any]:
    """While commands hold every GPU, the table shows their leases and another command is refused with code 75."""
    count = len(json.loads(gpuherd("gpus", "--json").stdout)["gpus"])
    sleeper = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    command = [sys.executable, "-m", "gpuherd", "run", "--quiet", *FAST, "--num-gpus", str(count), "--", *sleeper]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise RuntimeError("the command that was to hold all GPUs ended before it began")
            gpus = json.loads(gpuherd("gpus", "--json").stdout)["gpus"]
            unleased = [gpu["label"] for gpu in gpus if gpu["lease"] is None]
            refused = gpuherd("run", "--quiet", "--no-wait", *FAST, "--", "true", check=False).returncode
        finally:
            holder.terminate()
    after = [gpu["label"] for gpu in json.loads(gpuherd("gpus", "--json").stdout)["gpus"] if gpu["lease"] is not None]
    if unleased or after or refused != 75:
        raise ValueError(f"without a lease: {unleased}; leased afterwards: {after}; exit code {refused} in place of 75")
    return {"gpus": count, "refused_with": refused}


def batch(count: int) -> dict[str, Any]:
    """``count`` jobs that each compute on the GPU; raises ValueError unless each is done once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = (
            "import sys, torch\nones = torch.ones(1000, 1000, device='cuda')\n"
            "open(sys.argv[1], 'a').write(f'{(ones @ ones)[0, 0].item()}\\n')\n"
        )
        program = folder / "work.py"
        program.write_text(work)
        lines = [f"{sys.executable} {program} {folder / f'{number}.txt'}" for number in range(count)]
        (folder / "commands.txt").write_text("\n".join(lines) + "\n")
        started = time.perf_counter()
        gpuherd("batch", str(folder / "commands.txt"), "--output-dir", str(folder / "out"), *FAST)
        seconds = time.perf_counter() - started
        results = [(folder / f"{number}.txt").read_text() for number in range(count)]
        wrong = [number for number, text in enumerate(results) if text != "1000.0\n"]
        if wrong:
            raise ValueError(f"jobs whose result is missing, wrong or there twice: {wrong}")
        return {"jobs": count, "seconds": seconds}


def out_of_memory() -> dict[str, Any]:
    """The class and reason that each of ``OUT_OF_MEMORY`` gets. Raises ValueError where it is another class."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = []
        for case, code in OUT_OF_MEMORY.items():
            (folder / f"{case}.py").write_text(code)
            lines.append(f"#gpuherd name={case}\n{sys.executable} {folder / f'{case}.py'}")
        (folder / "commands.txt").write_text("\n".join(lines) + "\n")
        words = ("--output-dir", str(folder / "out"), "--retries", "0", *FAST)
        done = gpuherd("batch", str(folder / "commands.txt"), *words, check=False)
        if not (folder / "out/failures.jsonl").exists():
            raise RuntimeError(f"no job failed: {done.stdout[-500:]}{done.stderr[-500:]}")
        failures = [json.loads(line) for line in (folder / "out/failures.jsonl").read_text().splitlines()]
        found = {each["job"]: {"class": each["class"], "reason": each["reason"]} for each in failures}
    others = {case: found.get(case) for case in OUT_OF_MEMORY if found.get(case, {}).get("class") != "out of memory"}
    if others:
        raise ValueError(f"not classed as out of memory: {others}")
    return found
