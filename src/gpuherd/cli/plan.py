"""``gpuherd plan``: whether a model fits on GPUs, where its layers go, and what would fit if it does not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_json, plan_window, print_json, print_lines, print_note
from gpuherd.errors import ExitCode, GpuherdError, UsageError, naming_extras, printable
from gpuherd.models.place.request import AUTO, PlanOptions, PlanRequest, TrainingOptions
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from gpuherd.models.describe.description import Architecture
    from gpuherd.models.memory.weights import Precision
    from gpuherd.models.place.gpus import GpuSpec
    from gpuherd.models.place.page import Line, Window
    from gpuherd.models.place.result import AnswerRefusal, MemoryPlan

PLAN = """\
Computes before anything is loaded whether a model fits on GPUs: the memory of each GPU to the byte, how many answers at
once, and what would fit if the model does not. MODEL is a folder, a safetensors or GGUF file (only headers are read), a
Hugging Face id, or a known name. Append -8bit or -4bit for that data type.

examples:
  gpuherd plan llama-3.1-70b --gpus 4x40GB
  gpuherd plan llama-3.1-70b-8bit --gpus 4xRTX4090 --batch 8 --prompt-tokens 2000 --new-tokens 256
  gpuherd plan ./my-model --gpus auto                     this machine's GPUs, with the memory that is free now
  gpuherd plan qwen2.5-7b                                 on a machine without GPUs: the need on common ones
  gpuherd plan llama-3.2-1b llama-3.1-8b llama-3.1-70b --gpus 2x80GB
  gpuherd plan llama-3.1-70b --gpus 4x40GB --device-map > map.json
  gpuherd plan ./my-model --gpus auto --check             load it as planned, and compare
  gpuherd plan llama-3.1-8b --gpus 8x40GB --train sft --strategy fsdp

Exit codes: 0 it fits, 1 it doesn't, 2 wrong usage, 65 bad model, 66 no such model.
"""


def add_plan(parser: Parser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a folder, a file, a Hugging Face id or a known name"
    )
    add_options(parser, PlanOptions)
    add_options(parser, TrainingOptions)
    parser.add_argument(
        "--device-map", "--device_map", action="store_true", help="print only the device map, for from_pretrained"
    )
    parser.add_argument(
        "--check", action="store_true", help="load the model as planned, and compare its memory with the plan"
    )
    add_json(parser, "the plan")


@dataclass(frozen=True)
class Gpus:
    """The GPUs to plan for (none: common ones), whether they are this machine's, and remarks on them."""

    specs: tuple[GpuSpec, ...]
    here: bool = False
    remarks: tuple[str, ...] = ()


def run_plan(args: argparse.Namespace) -> int:
    """Plans and prints. Returns 0 if everything fits, 1 if not."""
    options, training = build(PlanOptions, args), build(TrainingOptions, args)
    training.refuse_without_train()
    gpus = _gpus(options)
    request = PlanRequest(
        models=tuple(args.models),
        options=options,
        training=training,
        simulate=args.simulate,
        here=gpus.here,
    )
    if args.check and (len(request.models) > 1 or training.train is not None or args.device_map or not gpus.specs):
        raise UsageError(
            "--check loads one model for answers, on GPUs; name one model, and GPUs if there are none here"
        )
    if args.device_map:
        return _print_device_map(request, gpus)
    if training.train is not None:
        return _plan_training(request, gpus, args.json)
    if not gpus.specs:
        return _plan_on_common_gpus(request, args.json)
    if len(request.models) > 1:
        return _plan_several(request, gpus, args.json)
    return _plan_one(request, gpus, args.json, args.check)


def _gpus(options: PlanOptions) -> Gpus:
    """The GPUs to plan for. Raises UsageError for a wrong description, and for auto if this machine has none."""
    from gpuherd.models.place.gpus import parse_gpus

    if options.gpus is not None and options.gpus.strip().lower() != AUTO:
        if options.busy_too:
            raise UsageError("--busy-too is about this machine's GPUs; it goes with --gpus auto")
        return Gpus(parse_gpus(options.gpus))
    from gpuherd.models.place.inventory import gpus_now

    now = gpus_now(busy_too=options.busy_too)
    if options.gpus is None and (now.problem is not None or not (now.gpus or now.left_out)):
        return Gpus(())
    if not now.gpus:
        why = now.problem or "; ".join(now.left_out) or "this machine has no GPU"
        busy = "" if now.problem is not None else "; --busy-too plans with the memory they have left"
        raise UsageError(f"--gpus auto: {why}{busy}. Name GPUs to plan for, like --gpus 4x40GB")
    return Gpus(now.gpus, here=True, remarks=now.left_out)


# ---- plans -----------------------------------------------------------------------------------------------------------


def _read(model: str, options: PlanOptions, *, training: bool = False) -> tuple[Architecture, Precision | None]:
    """The architecture, and the data type that ``--dtype`` or the suffix of the name asks for; None if neither does.

    Raises UsageError if they ask for different ones.
    """
    from gpuherd.models.describe.reading import EXTRAS, read_architecture
    from gpuherd.models.memory.weights import split_precision
    from gpuherd.models.place.request import agreed_precision

    name, suffix = split_precision(model)
    precision = agreed_precision(model, suffix, options.dtype)
    architecture = read_architecture(name, training=training)
    if options.adapter is not None:
        with naming_extras(EXTRAS, "plans of adapters need"):
            from gpuherd.models.checkpoints.hub import locate
            from gpuherd.models.describe.reading import with_adapter
            from gpuherd.models.names import parse_model

            architecture = with_adapter(architecture, locate(parse_model(options.adapter)))
    return architecture, precision


def _plan(
    model: str, options: PlanOptions, gpus: Sequence[GpuSpec], *, advise: bool = True
) -> MemoryPlan | AnswerRefusal:
    from gpuherd.models.place.planner import make_plan
    from gpuherd.models.place.request import resolve_precision

    architecture, precision = resolve_precision(*_read(model, options))
    return make_plan(
        architecture,
        gpus,
        precision,
        options.workload(),
        options.kept(),
        parallel=options.parallel or "auto",
        count=options.gpus_per_job,
        advise=advise,
    )


def _plan_one(request: PlanRequest, gpus: Gpus, as_json: bool, with_check: bool) -> int:
    from gpuherd.models.place.result import MemoryPlan

    result = _plan(request.models[0], request.options, gpus.specs)
    report: dict[str, Any] | None = None
    if not as_json:
        from gpuherd.models.place.answers_page import render_plan
        from gpuherd.models.place.page import RenderContext

        print_lines(render_plan(result, RenderContext(gpus.specs, request, gpus.remarks), plan_window()))
    if with_check and isinstance(result, MemoryPlan):
        report = check(result, request, quiet=as_json)
        if not as_json:
            print_lines(check_lines(report, plan_window()))
    if as_json:
        from gpuherd.models.place.answers_page import plan_to_dict

        plan = plan_to_dict(result, request)
        _print_plans([{**plan, "check": report} if with_check else plan], gpus)
    good = isinstance(result, MemoryPlan) and (report is None or agrees(report))
    return ExitCode.OK if good else ExitCode.FAILED


def _plan_several(request: PlanRequest, gpus: Gpus, as_json: bool) -> int:
    """One line per model. A model that can't be planned does not stop the others; the first one sets the exit code."""
    from gpuherd.models.place.answers_page import PlannedModelRow, plan_to_dict, render_models
    from gpuherd.models.place.result import MemoryPlan

    rows: list[PlannedModelRow] = []
    problems: list[GpuherdError] = []
    for model in request.models:
        try:
            rows.append(PlannedModelRow(model, _plan(model, request.options, gpus.specs, advise=as_json)))
        except GpuherdError as problem:
            problems.append(problem)
            rows.append(PlannedModelRow(model, None, str(problem)))
    if as_json:
        plans = [
            _without_plan(row.model, row.problem)
            if row.result is None
            else plan_to_dict(row.result, _for_model(request, number))
            for number, row in enumerate(rows)
        ]
        _print_plans(plans, gpus)
    else:
        print_lines(render_models(rows, gpus.specs, gpus.remarks, plan_window()))
    if problems:
        return problems[0].exit_code
    return ExitCode.OK if all(isinstance(row.result, MemoryPlan) for row in rows) else ExitCode.FAILED


def _for_model(request: PlanRequest, number: int) -> PlanRequest:
    """The request for one of its models."""
    return replace(request, models=(request.models[number],))


def _plan_on_common_gpus(request: PlanRequest, as_json: bool) -> int:
    """The need of each model on common GPUs. Of several, one that can't be planned does not stop the others; the first
    such one sets the exit code."""
    from gpuherd.models.place.answers_page import common_gpus_to_dict, render_common_gpus
    from gpuherd.models.place.page import model_to_dict, wrapped
    from gpuherd.models.place.planner import plan_on_common_gpus, precisions_to_compare
    from gpuherd.models.place.request import resolve_precision

    options, window = request.options, plan_window()
    plans: list[dict[str, Any]] = []
    sections: list[list[Line]] = []
    problems: list[GpuherdError] = []
    for number, model in enumerate(request.models):
        try:
            architecture, precision = resolve_precision(*_read(model, options))
            rows = plan_on_common_gpus(
                architecture,
                precisions_to_compare(precision) if options.dtype is None else (precision,),
                options.workload(),
                options.kept(),
                parallel=options.parallel or "auto",
                count=options.gpus_per_job,
            )
        except GpuherdError as problem:
            if len(request.models) == 1:
                raise
            problems.append(problem)
            plans.append(_without_plan(model, str(problem)))
            sections.append(wrapped(f"{model}: no plan: {problem}", window, "bad"))
            continue
        plans.append({"model": model_to_dict(architecture), "usual_gpus": common_gpus_to_dict(rows)})
        sections.append(render_common_gpus(architecture, options.workload(), rows, _for_model(request, number), window))
    if as_json:
        _print_plans(plans)
    else:
        for number, lines in enumerate(sections):
            print_lines([*([()] if number else []), *lines])
    return problems[0].exit_code if problems else ExitCode.OK


def _without_plan(model: str, problem: str) -> dict[str, Any]:
    """What JSON says of one of several models that can't be planned."""
    return {"model": {"name": model}, "fits": None, "error": problem}


def _plan_training(request: PlanRequest, gpus: Gpus, as_json: bool) -> int:
    """A training of one model. Raises UsageError for several models, and for options that apply only to answers."""
    from gpuherd.models.describe.reading import read_architecture
    from gpuherd.models.place.page import RenderContext, model_to_dict
    from gpuherd.models.place.training import TrainingPlan, make_training_plan, train_on_common_gpus
    from gpuherd.models.place.training_page import (
        render_training_on_common_gpus,
        render_training_plan,
        training_on_common_gpus_to_dict,
        training_plan_to_dict,
    )

    options, training = request.options, request.training
    if len(request.models) > 1:
        raise UsageError(f"--train plans one model at a time, and {len(request.models)} are named")
    if options.parallel is not None:
        raise UsageError("--parallel applies to answers; for a training use --strategy single, ddp or fsdp")
    if options.adapter is not None:
        raise UsageError("--adapter is loaded for answers; to train an adapter use --lora RANK")
    architecture, dtype = _read(request.models[0], options, training=True)
    job = training.job(options, dtype)
    reward = None if training.reward is None else read_architecture(training.reward)
    if not gpus.specs:
        rows = train_on_common_gpus(architecture, job, options.kept(), reward, count=options.gpus_per_job)
        if as_json:
            _print_plans([{"model": model_to_dict(architecture), "usual_gpus": training_on_common_gpus_to_dict(rows)}])
        else:
            print_lines(render_training_on_common_gpus(architecture, rows, request, plan_window()))
        return ExitCode.OK
    result = make_training_plan(
        architecture, gpus.specs, job, options.kept(), count=options.gpus_per_job, reward=reward
    )
    if as_json:
        _print_plans([training_plan_to_dict(result, request)], gpus)
    else:
        print_lines(render_training_plan(result, RenderContext(gpus.specs, request, gpus.remarks), plan_window()))
    return ExitCode.OK if isinstance(result, TrainingPlan) else ExitCode.FAILED


def _print_device_map(request: PlanRequest, gpus: Gpus) -> int:
    """Prints only the device map. Raises UsageError if there can be none."""
    from gpuherd.models.place.result import AnswerRefusal

    if len(request.models) > 1 or request.training.train is not None:
        raise UsageError("--device-map is for one model that is loaded for answers; name one, without --train")
    if not gpus.specs:
        raise UsageError("--device-map: this machine has no GPU; name those that the map is for, like --gpus 4x40GB")
    result = _plan(request.models[0], request.options, gpus.specs)
    if isinstance(result, AnswerRefusal):
        print_note(result.reason)
        return ExitCode.FAILED
    if result.parallel == "tensor":
        raise UsageError("with --parallel tensor each GPU has a part of every layer: there is no device map")
    print_json(result.device_map)
    return ExitCode.OK


def _print_plans(plans: list[dict[str, Any]], gpus: Gpus | None = None) -> None:
    """Prints the JSON of plans; without ``gpus`` they are for common ones, and whether they fit is not known."""
    if gpus is None:
        print_json({"fits": None, "plans": plans})
        return
    from gpuherd.models.place.page import gpu_to_dict

    print_json(
        {
            "fits": all(plan["fits"] for plan in plans),
            "plans": plans,
            "given_gpus": [gpu_to_dict(gpu) for gpu in gpus.specs],
            "this_machine": gpus.here,
            "left_out": list(gpus.remarks),
        }
    )


# ---- --check ---------------------------------------------------------------------------------------------------------
#
# A program of its own, ``gpuherd.models.load.worker``, loads the model as planned. On GPUs of this machine it runs
# under ``gpuherd run``, which takes them as for any job. Other GPUs are simulated, with everything in main memory.


class CheckFailed(GpuherdError):
    """The model could not be loaded as planned; the worker has printed why. Has the exit code of the worker."""


def check(plan: MemoryPlan, request: PlanRequest, *, quiet: bool) -> dict[str, Any]:
    """Loads the model as planned, computes one prompt, and returns the worker's report.

    Args:
        quiet: the worker's output goes to standard error, to keep standard output for JSON.

    Raises:
        UsageError: tensor parallelism has no device map to load by.
        CheckFailed: the worker failed.
    """
    import subprocess
    import tempfile

    if plan.parallel == "tensor":
        raise UsageError("--check loads by a device map, and with --parallel tensor there is none")
    with tempfile.TemporaryDirectory(prefix="gpuherd-check-") as folder:
        device_map, report = Path(folder) / "map.json", Path(folder) / "report.json"
        device_map.write_text(json.dumps(plan.device_map), encoding="utf-8")
        words = worker_words(plan, request, device_map, report)
        sys.stdout.flush()
        code = subprocess.run(words, stdout=sys.stderr if quiet else None, check=False).returncode
        if code or not report.exists():
            failure = CheckFailed(f"the model was not loaded as planned: its worker ended with exit code {code}")
            failure.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
            raise failure
        values: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return values


def worker_words(plan: MemoryPlan, request: PlanRequest, device_map: Path, report: Path) -> list[str]:
    """The command that loads a model by its device map and writes the report; under ``gpuherd run`` for GPUs of this
    machine."""
    from gpuherd.models.memory.weights import Precision

    simulated = not request.here or request.simulate is not None
    worker = [sys.executable, "-m", "gpuherd.models.load.worker", request.without_dtype[0]]
    worker += ["--device-map", str(device_map), "--json", str(report)]
    worker += ["--simulate"] if simulated else []
    worker += [] if plan.precision is Precision.AS_STORED else ["--dtype", str(plan.precision)]
    worker += [] if request.options.adapter is None else ["--adapter", request.options.adapter]
    workload = plan.workload
    worker += ["--batch", str(workload.batch), "--prompt-tokens", str(workload.prompt_tokens)]
    worker += ["--new-tokens", str(workload.new_tokens)]
    if simulated:
        return worker
    gpus = ["--num-gpus", str(plan.gpus), "--mem", f"{plan.memory_mb}MB"]
    return [sys.executable, "-m", "gpuherd", "run", "--no-wait", *gpus, "--", *worker]


def agrees(report: dict[str, Any]) -> bool:
    """Whether the memory is as predicted, and the test prompt gave finite values within the plan."""
    trial = report.get("trial")
    return bool(report["within_tolerance"]) and (trial is None or bool(trial["finite"] and trial["within_plan"]))


def check_lines(report: dict[str, Any], window: Window) -> list[Line]:
    """Predicted and real memory in one table, below the verdict."""
    from gpuherd.columns import Column
    from gpuherd.models.place.page import StyledText, table, wrapped

    columns = (
        Column("on", 0),
        Column("predicted bytes", 1, right=True),
        Column("real bytes", 2, right=True),
        Column("difference", 3, right=True),
        Column("blocks", 4, least=10),
    )
    head, body = table(columns, [_check_row(each) for each in report["devices"]], window)
    good = agrees(report)
    where = "simulated GPUs, in main memory" if report["simulated"] else "its GPUs"
    verdict = f"Loaded as {report['class']} on {where} in {report['seconds']:.1f} s: " + (
        "the weights are where the plan puts them, and take the memory it predicts."
        if good
        else "it is NOT as planned."
    )
    return [
        (),
        *wrapped(verdict, window, "good" if good else "bad"),
        (StyledText(head, "head"),),
        *body,
        *[line for note in report["notes"] for line in wrapped(note, window, "note", first="note: ")],
    ]


def _check_row(each: dict[str, Any]) -> Sequence[str]:
    device, predicted, real = each["device"], each["predicted_bytes"], each["real_bytes"]
    where = f"GPU {device}" if isinstance(device, int) else printable(str(device))
    difference = "-" if real is None or not predicted else f"{100 * (real / predicted - 1):+.3f} %"
    return [where, f"{predicted:,}", "-" if real is None else f"{real:,}", difference, printable(each["blocks"])]
