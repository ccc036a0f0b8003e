"""``gpuherd plan --check``: the model is loaded as planned, and what it really takes is laid beside the plan.

Loading is done by ``gpuherd.models.load.worker``, a program of its own: on this machine's GPUs under ``gpuherd run``,
which takes them as any job does; for GPUs that are not here, pretended, with everything in the CPU's memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import ExitCode, GpuherdError, UsageError, printable
from gpuherd.models.plan.drawing import Line, Span, Window, wrapped

if TYPE_CHECKING:
    from gpuherd.models.plan.next_steps import Asked
    from gpuherd.models.plan.result import MemoryPlan


class CheckFailed(GpuherdError):
    """The model could not be loaded as planned; the worker's own lines say why. Its exit code is the worker's."""


def check(plan: MemoryPlan, asked: Asked, *, quiet: bool) -> dict[str, Any]:
    """Loads the model as the plan says, computes one prompt, and returns the worker's report.

    Args:
        quiet: what the worker tells goes to standard error, because standard output is for something else.

    Raises:
        UsageError: with tensor parallelism there is no device map to load by.
        CheckFailed: the worker did not come to its end.
    """
    if plan.parallel == "tensor":
        raise UsageError("--check loads by a device map, and with --parallel tensor there is none")
    with tempfile.TemporaryDirectory(prefix="gpuherd-check-") as folder:
        device_map, report = Path(folder) / "map.json", Path(folder) / "report.json"
        device_map.write_text(json.dumps(plan.device_map), encoding="utf-8")
        words = worker_words(plan, asked, device_map, report)
        sys.stdout.flush()
        code = subprocess.run(words, stdout=sys.stderr if quiet else None, check=False).returncode
        if code or not report.exists():
            failure = CheckFailed(f"the model was not loaded as planned: its worker ended with exit code {code}")
            failure.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
            raise failure
        read: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return read


def worker_words(plan: MemoryPlan, asked: Asked, device_map: Path, report: Path) -> list[str]:
    """The command that loads a plan's model by its map and writes the report; behind ``gpuherd run`` where the GPUs are
    this machine's."""
    from gpuherd.models.plan.precision import Precision

    pretended = not asked.here or asked.simulate is not None
    worker = [sys.executable, "-m", "gpuherd.models.load.worker", asked.without_dtype[0]]
    worker += ["--device-map", str(device_map), "--json", str(report)]
    worker += ["--simulate"] if pretended else []
    worker += [] if plan.precision is Precision.AS_STORED else ["--dtype", str(plan.precision)]
    worker += [] if asked.options.adapter is None else ["--adapter", asked.options.adapter]
    workload = plan.workload
    for flag, number in (
        ("--batch", workload.batch),
        ("--prompt-tokens", workload.prompt_tokens),
        ("--new-tokens", workload.new_tokens),
    ):
        worker += [flag, str(number)]
    if pretended:
        return worker
    gpus = ["--num-gpus", str(plan.gpus), "--mem", f"{plan.memory_mb}MB"]
    return [sys.executable, "-m", "gpuherd", "run", "--no-wait", *gpus, "--", *worker]


def agrees(report: dict[str, Any]) -> bool:
    """Whether memory is as predicted, and the trial came out well."""
    trial = report.get("trial")
    return bool(report["within_tolerance"]) and (trial is None or bool(trial["finite"] and trial["within_plan"]))


def tell_check(report: dict[str, Any], window: Window) -> list[Line]:
    """Predicted and real memory side by side."""
    from gpuherd.columns import Column
    from gpuherd.models.plan.drawing import table

    columns = (
        Column("on", 0),
        Column("predicted bytes", 1, right=True),
        Column("real bytes", 2, right=True),
        Column("difference", 3, right=True),
        Column("blocks", 4, least=10),
    )
    rows = [_row(each) for each in report["devices"]]
    head, body = table(columns, rows, window)
    good = agrees(report)
    how = "pretended GPUs, in the CPU's memory" if report["simulated"] else "its GPUs"
    verdict = f"Loaded as {report['class']} on {how} in {report['seconds']:.1f} s: " + (
        "weights lie where the plan says, and take what it says." if good else "it is NOT as planned."
    )
    return [
        (),
        *wrapped(verdict, window, "good" if good else "bad"),
        (Span(head, "head"),),
        *body,
        *[line for note in report["notes"] for line in wrapped(note, window, "note", first="note: ")],
    ]


def _row(each: dict[str, Any]) -> Sequence[str]:
    device, predicted, real = each["device"], each["predicted_bytes"], each["real_bytes"]
    where = f"GPU {device}" if isinstance(device, int) else printable(str(device))
    difference = "-" if real is None or not predicted else f"{100 * (real / predicted - 1):+.3f} %"
    return [where, f"{predicted:,}", "-" if real is None else f"{real:,}", difference, printable(each["blocks"])]
