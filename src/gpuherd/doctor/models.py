"""Loads and runs a small model on each GPU, or on the CPU, in child processes, and judges their answers.

This module is also the child, which prints one line of JSON:
python -m gpuherd.doctor.models build    which torch is installed, and does it see a GPU?
python -m gpuherd.doctor.models cuda     writes a small transformer to a file, loads it on the device (or cpu), runs it,
                                         and compares its numbers with the CPU's

A GPU is tried only when it is free, and under a lease, so that the doctor never disturbs a running job. The child gets
it as any job does, by CUDA_VISIBLE_DEVICES in its own environment; its UUID shows that it is the right one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.checks import Answer, CheckResult, Status, ask
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus import visible
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.leases import Lease, LeaseFolder, LeaseNote
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import VARIABLES

if TYPE_CHECKING:
    import torch

_MODULE = "gpuherd.doctor.models"
_TIMEOUT_S = 180.0  # a first start of CUDA on a slow disk takes long
_MOST_ERROR = 1e-2  # float32 on any GPU (TF32 included) stays well below; another function of the weights doesn't
_LATER = "run gpuherd doctor again when it is free"
_REPAIR = "look at the torch and driver lines above; gpuherd esd --device-map cpu works without the GPU"


def on_gpus(gpus: Sequence[Gpu], *, simulated: bool) -> list[CheckResult]:
    """A small model on each of these GPUs that is free, several at once, in their order."""
    workers = max(1, min(len(gpus), 8, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda gpu: _on_gpu(gpu, simulated=simulated), gpus))


def on_cpu() -> CheckResult:
    """A small model on the CPU."""
    # An empty list, not none: should there be a GPU after all, this child must not touch it.
    return judge_cpu(_ask("cpu"))


def _on_gpu(gpu: Gpu, *, simulated: bool) -> CheckResult:
    name = f"model on GPU {gpu.label}"
    found = check(gpu, IdleRule())
    if not found.free:
        return CheckResult(name, Status.SKIP, f"not tried: {found.reason}", _LATER)
    try:
        lease = LeaseFolder.default().acquire(gpu.uuid, LeaseNote(job="doctor"))
    except (CannotWrite, UsageError) as problem:
        return CheckResult(name, Status.SKIP, f"not tried: {problem}", "repair the lease folder first")
    if lease is None:
        return CheckResult(name, Status.SKIP, "not tried: another gpuherd holds it", _LATER)
    with lease:
        answer = _ask("cpu" if simulated else "cuda", gpus=(gpu,), lease=lease)
    return judge_simulated(gpu, answer) if simulated else judge_gpu(gpu, answer)


def _ask(device: str, *, gpus: Sequence[Gpu] = (), lease: Lease | None = None) -> Answer:
    environment = {**dict.fromkeys(VARIABLES), **visible.environment(gpus), "OMP_NUM_THREADS": "1"}
    fds: Iterable[int] = () if lease is None else (lease.fd,)
    return ask(_MODULE, [device], environment=environment, timeout_s=_TIMEOUT_S, pass_fds=tuple(fds))


def judge_gpu(gpu: Gpu, answer: Answer) -> CheckResult:
    """Judges a run on a real GPU: it must be this one and the only visible one, and compute what the CPU computes."""
    name = f"model on GPU {gpu.label}"
    if answer.error is not None:
        return CheckResult(name, Status.FAIL, f"could not load and run it: {answer.error}", _REPAIR)
    report, shown = answer.values, visible.setting(visible.environment((gpu,)))
    if report["devices"] != 1:
        detail = f"with {shown} torch sees {report['devices']} GPUs in place of one"
        return CheckResult(name, Status.FAIL, detail, _REPAIR)
    uuid: str | None = report["uuid"]
    if uuid is not None and not _same_gpu(gpu, uuid):
        detail = f"with {shown} torch met another GPU ({uuid}, not {gpu.uuid})"
        remedy = "report this, with the output of gpuherd gpus --json: jobs would run on the wrong GPU"
        return CheckResult(name, Status.FAIL, detail, remedy)
    if not report["relative_error"] <= _MOST_ERROR:
        detail = f"it computes wrong numbers there: {report['relative_error']:.2g} relative to the CPU's"
        return CheckResult(name, Status.FAIL, detail, "have the GPU's memory tested; use the other GPUs till then")
    where = f"as {report['device']} on {report['name']}"
    which = "UUID is right" if uuid is not None else "this torch does not tell the UUID"
    return CheckResult(name, Status.OK, f"loaded and run {where} in a process of its own; {which}")


def _same_gpu(gpu: Gpu, uuid: str) -> bool:
    """Whether torch's UUID is this GPU's: it comes without its prefix, and for a MIG instance, depending on CUDA, it is
    that of the whole GPU."""

    def bare(text: str) -> str:
        return text.removeprefix("GPU-").removeprefix("MIG-").lower()

    return bare(uuid) in {bare(known) for known in (gpu.uuid, gpu.mig_parent) if known is not None}


def judge_simulated(gpu: Gpu, answer: Answer) -> CheckResult:
    """Judges a run on the CPU in place of one on a simulated GPU."""
    name = f"model on GPU {gpu.label}"
    if answer.error is None and answer.values["cuda_available"]:
        detail = "torch sees a real GPU though the GPUs are simulated: jobs could take one that others use"
        remedy = "find what loads another libcuda.so.1 than the one in LD_LIBRARY_PATH (LD_PRELOAD, an RPATH of torch)"
        return CheckResult(name, Status.FAIL, detail, remedy)
    return _judge_on_cpu(name, answer, f"on the CPU with {answer.values.get('visible')}")


def judge_cpu(answer: Answer) -> CheckResult:
    """Judges a run on the CPU."""
    return _judge_on_cpu("model on CPU", answer, "on the CPU")


def _judge_on_cpu(name: str, answer: Answer, where: str) -> CheckResult:
    reinstall = "pip install --force-reinstall torch"
    if answer.error is not None:
        return CheckResult(name, Status.FAIL, f"could not load and run it: {answer.error}", reinstall)
    if not answer.values["relative_error"] <= _MOST_ERROR:
        detail = f"a loaded model differs from the saved one by {answer.values['relative_error']:.2g}"
        return CheckResult(name, Status.FAIL, detail, reinstall)
    return CheckResult(name, Status.OK, f"loaded and run {where} in a process of its own")


# --- the child --------------------------------------------------------------------------------------------------------

_TOKENS, _WIDTH, _BATCH, _LENGTH = 256, 64, 2, 16


def build() -> dict[str, Any]:
    """Version, CUDA and ROCm version of the build (None for none), whether CUDA starts, and how many GPUs it shows."""
    import torch

    available = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "available": available,
        "devices": torch.cuda.device_count() if available else 0,
    }


def small_model(device_name: str) -> dict[str, Any]:
    """What was seen of the device, and how far its numbers are from the CPU's. ``device_name``: cuda or cpu."""
    import torch

    torch.manual_seed(0)
    device = torch.device("cuda:0" if device_name == "cuda" else "cpu")
    original = _build()
    tokens = torch.randint(_TOKENS, (_BATCH, _LENGTH))  # (batch, token)
    loaded = _save_and_load(original, device)
    with torch.no_grad():
        wanted = original(tokens)  # (batch, token, token of the vocabulary)
        found = loaded(tokens.to(device)).cpu()
    answer: dict[str, Any] = {
        "device": str(next(loaded.parameters()).device),
        "visible": visible.setting(os.environ),
        "cuda_available": torch.cuda.is_available(),
        "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
        "relative_error": float((found - wanted).abs().max() / wanted.abs().max()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        answer |= {
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")) or None,
            "devices": torch.cuda.device_count(),
        }
    return answer


def _build() -> torch.nn.Module:
    """Embedding, two layers of attention and MLP, and a head, as in a language model."""
    from torch import nn

    layers = [
        nn.TransformerEncoderLayer(_WIDTH, nhead=4, dim_feedforward=4 * _WIDTH, dropout=0.0, batch_first=True)
        for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(_TOKENS, _WIDTH), *layers, nn.Linear(_WIDTH, _TOKENS)).eval()


def _save_and_load(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A second model on the device, with the first one's weights loaded from a file."""
    import torch

    with tempfile.TemporaryDirectory(prefix="gpuherd-doctor-") as folder:
        path = Path(folder) / "weights.pt"
        torch.save(model.state_dict(), path)
        copy = _build()
        copy.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return copy.to(device)


if __name__ == "__main__":
    found = build() if sys.argv[1] == "build" else small_model(sys.argv[1])
    sys.stdout.write(json.dumps(found) + "\n")
