"""What a GPU does for spectra: Gram matrices and eigenvalues by size, form, streams and batch, and whole models.

The routes are timed by what the esd worker itself calls, so that the tables of ``gpuherd.esd.spectra.batching`` (which
sides are solved together, how many lanes) and of ``device_solver`` (which cards get which arithmetic) can be read off
the figures. A Llama-shaped model of random bfloat16 weights is written to disk and analysed by the worker, and some of
its layers are compared with the CPU's results. With ``--quick``, and where there is no GPU, all is done in small sizes
on the CPU: that shows that it works and measures nothing.

GPUHERD_BENCH_FOLDER says where the model goes (13.5 GB for all 32 layers; default: the folder for temporary files),
GPUHERD_BENCH_LAYERS how many layers it has.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.worker_memory import llama_shapes, write_model

if TYPE_CHECKING:
    import torch

    from gpuherd.esd.spectra.device import Solver

SIZES = (1024, 2048, 4096, 8192)
BATCHED = ((256, 64), (512, 32), (768, 16), (1023, 8), (2048, 4))
STREAMS = (1, 2, 4, 8, 16)
GRAMS = ((1024, 4096), (4096, 4096), (4096, 11008), (8192, 8192))
LLAMA_LAYERS, HIDDEN, INNER = 32, 4096, 11008
COMPARED_LAYERS = 20
MB = 2**20


def run(*, quick: bool) -> dict[str, Any]:
    """All figures: seconds by the wall, memory in MB."""
    import torch

    cuda = torch.cuda.is_available() and not quick
    device = "cuda:0" if cuda else "cpu:0"
    sizes = SIZES if cuda else (64, 128)
    return {
        "device": card() if cuda else "torch on the CPU: these figures measure nothing",
        "eigenvalues": [eigenvalues(n, device) for n in sizes],
        "batched": [batched(n, count, device) for n, count in (BATCHED if cuda else ((32, 4), (64, 2)))],
        "svdvals_drivers": [svdvals(n, device) for n in sizes[: 3 if cuda else 1]],
        "gram": [grams(n, m, device) for n, m in (GRAMS if cuda else ((64, 300),))],
        "upload": uploads(device, (256 if cuda else 4) * MB),
        "precision": precision(1024 if cuda else 64, device),
        "model": whole_model(cuda),
    }


def card() -> dict[str, Any]:
    """The GPU, and what we take it to be good at."""
    import torch

    from gpuherd.esd.spectra.device import device_arithmetic

    properties = torch.cuda.get_device_properties(0)
    arithmetic = device_arithmetic("cuda:0", "float64")
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_mb": properties.total_memory // MB,
        "cuda": torch.version.cuda,
        "gram": arithmetic.gram,
        "solver": arithmetic.solver,
    }


def seconds(work: Callable[[], object], device: str, *, budget: float = 5.0) -> float:
    """The least wall time of up to 5 runs after one that warms up, fewer once ``budget`` seconds are spent."""
    import torch

    def once() -> float:
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    times: list[float] = []
    while len(times) < 5 and sum(times) < budget:
        times.append(once())
    return min(times)


@contextmanager
def peak_memory(device: str, into: dict[str, Any]) -> Iterator[None]:
    """Notes the most GPU memory that torch held while it lasted, over what it held before."""
    import torch

    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    into["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / MB, 1)


def gram_of(n: int, m: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A Gram matrix of random numbers."""
    import torch

    W = torch.randn((n, m), dtype=torch.float64, device=device, generator=torch.Generator(device).manual_seed(n))
    return (W @ W.T).to(dtype)


def eigenvalues(n: int, device: str) -> dict[str, Any]:
    """Values-only solver in both precisions: one at a time, and several streams side by side (seconds a matrix)."""
    import torch

    figures: dict[str, Any] = {"n": n}
    for dtype in (torch.float64, torch.float32):
        G = gram_of(n, 2 * n, device, dtype)
        name = str(dtype).removeprefix("torch.")
        one: dict[str, Any] = {}
        counts = [count for count in STREAMS if fits(n, count, device)]
        with peak_memory(device, one):
            one["streams"] = {
                str(count): in_streams(lambda G=G: torch.linalg.eigvalsh(G).cpu(), count, device)  # type: ignore[misc]
                for count in counts
            }
        figures[name] = one
        if dtype == torch.float64:
            figures["to_band"] = bands(G, counts, device)
        del G
    return figures


def bands(G: torch.Tensor, counts: list[int], device: str) -> dict[str, Any]:
    """The other way: a band by the GPU (seconds a matrix, by streams), and its eigenvalues by a core of the CPU."""
    from gpuherd.esd.spectra.device import to_band

    figures: dict[str, Any] = {}
    with peak_memory(device, figures):
        figures["streams"] = {str(count): in_streams(lambda: to_band(G.clone()), count, device) for count in counts}
    band = to_band(G.clone())
    band.eigenvalues()
    started = time.process_time()
    values = band.eigenvalues()
    figures["cpu_seconds"] = time.process_time() - started
    exact = np.linalg.eigvalsh(G.cpu().numpy())
    figures["difference"] = float(np.abs(values - exact).max() / exact[-1])
    return figures


def fits(n: int, count: int, device: str) -> bool:
    """Whether so many matrices can be at work at a time; on the CPU two are enough to see that it works."""
    import torch

    if not device.startswith("cuda"):
        return count <= 2
    return 3 * 8 * n * n * count < 0.8 * torch.cuda.mem_get_info()[0]


def in_streams(solve: Callable[[], object], count: int, device: str) -> float:
    """Seconds a matrix when ``count`` threads, each with a stream of its own, solve 2 each."""
    from gpuherd.esd.on_device import own_stream

    def lane() -> None:
        with own_stream(device):
            for _ in range(2):
                solve()

    def work() -> None:
        threads = [threading.Thread(target=lane) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return seconds(work, device) / (2 * count)


def batched(n: int, count: int, device: str) -> dict[str, Any]:
    """``count`` matrices in one call of the solver against 8 streams of them one by one: seconds a matrix."""
    import torch

    G = gram_of(n, 2 * n, device, torch.float64)
    stack = torch.stack([G] * count)
    figures: dict[str, Any] = {"n": n, "count": count}
    with peak_memory(device, figures):
        figures["batch"] = seconds(lambda: torch.linalg.eigvalsh(stack).cpu(), device) / count
    figures["eight_streams"] = in_streams(
        lambda: torch.linalg.eigvalsh(G).cpu(), 8 if device.startswith("cuda") else 2, device
    )
    figures["cpu"] = seconds(lambda: np.linalg.eigvalsh(G.cpu().numpy()), "cpu")
    return figures


def svdvals(n: int, device: str) -> dict[str, Any]:
    """Singular values of a square matrix by each driver that cuSOLVER has: the way that others take, in float32."""
    import torch

    figures: dict[str, Any] = {"n": n}
    drivers = ("gesvd", "gesvdj", "gesvda") if device.startswith("cuda") else (None,)
    for dtype in (torch.float32, torch.float64):
        W = torch.randn((n, n), dtype=dtype, device=device)
        for driver in drivers:
            name = f"{driver or 'default'}_{str(dtype).removeprefix('torch.')}"
            figures[name] = seconds(lambda W=W, driver=driver: torch.linalg.svdvals(W, driver=driver).cpu(), device)  # type: ignore[misc]
    return figures


def grams(n: int, m: int, device: str) -> dict[str, Any]:
    """The three forms of the Gram matrix from bfloat16 and float32 panels that are on the device already."""
    import torch

    from gpuherd.esd.spectra.batching import panel_length
    from gpuherd.esd.spectra.device import DeviceGramSum, ieee_float32

    figures: dict[str, Any] = {"shape": [n, m]}
    for dtype in (torch.bfloat16, torch.float32):
        W = torch.randn((n, m), device=device).to(dtype)
        step = panel_length(n, W.itemsize)
        panels = [W[:, start : start + step] for start in range(0, m, step)]
        for form in ("float64", "split", "float32"):

            def work(form: Any = form, panels: list[torch.Tensor] = panels) -> None:
                total = DeviceGramSum(n, device, form)
                for panel in panels:
                    total.add(panel)
                total.result()

            one: dict[str, Any] = {}
            with ieee_float32(), peak_memory(device, one):
                one["seconds"] = seconds(work, device)
            one["tflops"] = 2 * n * n * m / one["seconds"] / 1e12
            figures[f"{form}_from_{str(dtype).removeprefix('torch.')}"] = one
    return figures


def uploads(device: str, nbytes: int) -> dict[str, Any]:
    """GB a second from the host: from pinned memory, and from memory that is not."""
    import torch

    rates: dict[str, Any] = {}
    for pinned in (True, False):
        host = torch.zeros(nbytes // 2, dtype=torch.int16, pin_memory=pinned and device.startswith("cuda"))
        spent = seconds(lambda host=host: host.to(device, non_blocking=True, copy=True), device)  # type: ignore[misc]
        rates["pinned" if pinned else "pageable"] = nbytes / spent / 1e9
    return rates


def precision(n: int, device: str) -> list[dict[str, Any]]:
    """How far each form's eigenvalues are from float64 singular values, in units of n λ_max, by condition number."""
    import torch

    from gpuherd.esd.spectra.device import Form, gram_on_device, ieee_float32

    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((n, n)))[0] for _ in range(2))
    found = []
    for decades in (1, 3, 6):
        W = (left * np.logspace(0, -decades, n)) @ right
        exact = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
        figures: dict[str, Any] = {"n": n, "condition": 10.0**decades}
        forms: tuple[Form, ...] = ("float64", "split", "float32")
        for form in forms:
            with ieee_float32():
                gram = gram_on_device([torch.from_numpy(W)], (n, n), device, form)
            assert gram is not None
            values = torch.linalg.eigvalsh(gram).double().cpu().numpy()
            figures[form] = float(np.abs(values - exact).max() / (n * exact[-1]))
        found.append(figures)
    return found


def whole_model(cuda: bool) -> dict[str, Any]:
    """The worker on a Llama-7B-shaped model of random weights: in lanes, one by one, and on the CPU for some layers."""
    layers = int(os.environ.get("GPUHERD_BENCH_LAYERS", LLAMA_LAYERS)) if cuda else 1
    hidden, inner = (HIDDEN, INNER) if cuda else (288, 320)
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPUHERD_BENCH_FOLDER")) as name:
        folder = Path(name)
        stored_mb = write_model(folder / "model", llama_shapes(layers=layers, hidden=hidden, inner=inner))
        read_all(folder / "model" / "model.safetensors")  # what is measured is not the disk
        figures: dict[str, Any] = {"layers": layers, "matrices": 7 * layers, "stored_mb": stored_mb}
        where = "cuda" if cuda else "cpu"
        figures["lanes"] = worker(folder, "lanes", "--device-map", where)
        figures["one_by_one"] = worker(folder, "one", "--device-map", where, "--no-parallel-gpu")
        some = [f"model.layers.{layer}.*" for layer in range(max(1, min(COMPARED_LAYERS // 7 + 1, layers)))]
        figures["cpu"] = worker(folder, "cpu", "--device-map", "cpu", "--layers", *some)
        figures["largest_difference"] = {
            "lanes_to_cpu": difference(folder / "lanes", folder / "cpu"),
            "one_by_one_to_lanes": difference(folder / "one", folder / "lanes"),
        }
        solvers: tuple[Solver, ...] = ("device", "band")
        for solver in solvers:
            figures[f"lanes_of_this_process_{solver}"] = lanes_here(
                folder / "model", "cuda:0" if cuda else "cpu:0", solver
            )
    return figures


def read_all(path: Path) -> None:
    """Brings a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(64 * MB):
            pass


def worker(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """Runs the worker: seconds in all, and of these from the first matrix to the last."""
    command = [sys.executable, "-P", "-m", "gpuherd.esd.worker", "--model-id", str(folder / "model")]
    command += ["--output-dir", str(folder / name), "--fix-fingers", "DKS", *words]
    started = time.perf_counter()
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    spent = time.perf_counter() - started
    if shown.returncode != 0:
        raise RuntimeError(f"the worker failed: {shown.stderr[-2000:]}")
    saved = next(line for line in shown.stdout.splitlines() if line.startswith("Saved:"))
    return {"wall_s": spent, "analysis_s": float(saved.rsplit("after ", 1)[1].split()[0])}


def difference(one: Path, other: Path) -> dict[str, float]:
    """The largest relative difference of some columns over the layers that are in both."""
    first, second = rows(one), rows(other)
    shared = first.keys() & second.keys()
    if not shared:
        raise RuntimeError(f"{one} and {other} have no layer in common")
    columns = ("alpha", "D", "xmin", "norm", "spectral_norm", "entropy")
    return {
        column: max(
            abs(float(first[name][column]) / float(second[name][column]) - 1)
            for name in shared
            if first[name][column] and second[name][column]
        )
        for column in columns
    }


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """The one stats file of a run, by layer; only rows with a fit."""
    (path,) = (folder / "stats").glob("*.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return {row["longname"]: row for row in csv.DictReader(file) if row["fit_status"] == "ok"}


def lanes_here(model: Path, device: str, solver: Solver) -> dict[str, Any]:
    """The lanes without the worker around them, with float64 Gram matrices: eigenvalues on the device, or bands."""
    from gpuherd.esd import FitSettings
    from gpuherd.esd.fits.power_law import fit_power_law
    from gpuherd.esd.lanes import Lanes
    from gpuherd.esd.on_device import MatrixResult
    from gpuherd.esd.spectra.device import GramArithmetic
    from gpuherd.esd.spectra.pooled import spectrum_of
    from gpuherd.models.checkpoints.open import open_checkpoint
    from gpuherd.models.tensors.matrices import matrices

    found = [matrix for matrix in matrices(open_checkpoint(model)) if matrix.skip is None]
    settings, alphas = FitSettings("DKS"), {}

    def finish(result: MatrixResult) -> None:
        assert result.spectrum is not None
        evals = result.spectrum.evals
        alphas[result.index] = fit_power_law(evals[evals > settings.evals_thresh], "DKS").alpha

    def on_cpu(index: int) -> MatrixResult:
        return MatrixResult(index, spectrum_of(found[index]), None, "cpu")

    started = time.perf_counter()
    left = Lanes(found, range(len(found)), False, [device], [GramArithmetic("float64", solver)], finish, on_cpu).run()
    return {"wall_s": time.perf_counter() - started, "done": len(alphas), "left": len(left.alone) + len(left.on_cpu)}
