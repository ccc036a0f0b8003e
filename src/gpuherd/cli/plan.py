"""``gpuherd plan``: whether a model fits on these GPUs, where its layers go, and what would fit if not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_command, plan_window, print_lines
from gpuherd.errors import ExitCode, GpuherdError, UsageError, naming_extras, printable
from gpuherd.models.plan.drawing import Line, Span, Window, wrapped
from gpuherd.models.plan.options import AUTO, PlanOptions, TrainingOptions
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from gpuherd.models.plan.architecture import Architecture
    from gpuherd.models.plan.card import Card
    from gpuherd.models.plan.next_steps import Asked
    from gpuherd.models.plan.placing import Wish
    from gpuherd.models.plan.precision import Precision
    from gpuherd.models.plan.result import MemoryPlan, Refusal
    from gpuherd.models.plan.training_job import TrainingJob

PLAN = """\
Says before anything is loaded whether a model fits: what lies on which GPU to the byte, how many answers at once, and
what would fit if it doesn't. MODEL is a folder, a safetensors or GGUF file (headers only are read), a Hugging Face id,
or a known name. -8bit or -4bit behind it asks for that dtype.

examples:
  gpuherd plan llama-3.1-70b --gpus 4x40GB
  gpuherd plan llama-3.1-70b-8bit --gpus 4xRTX4090 --batch 8 --prompt-tokens 2000 --new-tokens 256
  gpuherd plan ./my-model --gpus auto                     this machine's GPUs, as free as they are now
  gpuherd plan qwen2.5-7b                                 without GPUs: what it takes on usual ones
  gpuherd plan llama-3.2-1b llama-3.1-8b llama-3.1-70b --gpus 2x80GB
  gpuherd plan llama-3.1-70b --gpus 4x40GB --device-map > map.json
  gpuherd plan ./my-model --gpus auto --check             load it as planned, and compare
  gpuherd plan llama-3.1-8b --gpus 8x40GB --train sft --strategy fsdp

Exit codes: 0 it fits, 1 it doesn't, 2 wrong usage, 65 bad model, 66 no such model.
"""


def add_plan(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "plan", PLAN)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a folder, a file, a Hugging Face id or a known name"
    )
    add_options(parser, PlanOptions)
    add_options(parser, TrainingOptions)
    parser.add_argument(
        "--device-map", "--device_map", action="store_true", help="print the device map alone, for from_pretrained"
    )
    parser.add_argument(
        "--check", action="store_true", help="load the model as planned, and lay what it takes beside the plan"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.set_defaults(run=run_plan)


@dataclass(frozen=True)
class Gpus:
    """What is planned for: cards (none: usual ones), whether they are this machine's, and remarks on them."""

    cards: tuple[Card, ...]
    here: bool = False
    remarks: tuple[str, ...] = ()


def run_plan(args: argparse.Namespace) -> int:
    """Plans and prints. Returns 0 when all fits, 1 when something doesn't."""
    from gpuherd.models.plan.naming import split_precision
    from gpuherd.models.plan.next_steps import Asked

    options, training = build(PlanOptions, args), build(TrainingOptions, args)
    training.refuse_without_train()
    gpus = _gpus(options)
    asked = Asked(
        models=tuple(args.models),
        without_dtype=tuple(split_precision(model)[0] for model in args.models),
        options=options,
        training=training,
        simulate=args.simulate,
        here=gpus.here,
    )
    if args.check and (len(asked.models) > 1 or training.train is not None or args.device_map or not gpus.cards):
        raise UsageError(
            "--check loads one model for answers, on GPUs; name one model, and GPUs if there are none here"
        )
    if args.device_map:
        return _device_map(asked, gpus)
    if training.train is not None:
        return _train(asked, gpus, args.json)
    if not gpus.cards:
        return _usual(asked, args.json)
    if len(asked.models) > 1:
        return _many(asked, gpus, args.json)
    return _one(asked, gpus, args.json, args.check)


def _gpus(options: PlanOptions) -> Gpus:
    """The GPUs to plan for. Raises UsageError for words that describe none, and for auto where there are none."""
    from gpuherd.models.plan.cards import parse_cards

    if options.gpus is not None and options.gpus.strip().lower() != AUTO:
        if options.busy_too:
            raise UsageError("--busy-too is about this machine's GPUs; it goes with --gpus auto")
        return Gpus(parse_cards(options.gpus))
    from gpuherd.models.plan.cards_now import cards_now

    now = cards_now(busy_too=options.busy_too)
    if options.gpus is None and (now.problem is not None or not (now.cards or now.left_out)):
        return Gpus(())
    if not now.cards:
        why = now.problem or "; ".join(now.left_out) or "this machine has no GPU"
        busy = "" if now.problem is not None else "; --busy-too plans with what they have left"
        raise UsageError(f"--gpus auto: {why}{busy}. Name GPUs to plan for, like --gpus 4x40GB")
    return Gpus(now.cards, here=True, remarks=now.left_out)


# ---- plans -----------------------------------------------------------------------------------------------------------


def _read(model: str, options: PlanOptions) -> tuple[Architecture, Precision | None]:
    """The architecture, and the dtype that was asked for, by option or by the name's ending; None if neither.

    Raises UsageError when both ask for something else.
    """
    from gpuherd.models.plan.naming import split_precision
    from gpuherd.models.plan.reading import read_architecture
    from gpuherd.models.plan.wanted import wanted_precision

    name, ending = split_precision(model)
    wanted = wanted_precision(model, ending, options.dtype)
    architecture = read_architecture(name)
    if options.adapter is not None:
        from gpuherd.models.plan.reading import EXTRAS

        with naming_extras(EXTRAS, "plans of adapters need"):
            from gpuherd.models.locate import locate
            from gpuherd.models.names import parse_model
            from gpuherd.models.plan.adapters import with_adapter

            architecture = with_adapter(architecture, locate(parse_model(options.adapter)))
    return architecture, wanted


def _plan(model: str, asked: Asked, cards: Sequence[Card], *, advise: bool = True) -> MemoryPlan | Refusal:
    from gpuherd.models.plan.planner import make_plan
    from gpuherd.models.plan.wanted import planned_in

    architecture, precision = planned_in(*_read(model, asked.options))
    return make_plan(
        architecture,
        cards,
        precision,
        asked.options.workload(),
        asked.options.kept(),
        parallel=_wish(asked.options),
        gpus=asked.options.gpus_per_job,
        advise=advise,
    )


def _wish(options: PlanOptions) -> Wish:
    from gpuherd.models.plan.placing import WISHES

    return next((wish for wish in WISHES if wish == options.parallel), "auto")


def _one(asked: Asked, gpus: Gpus, as_json: bool, check: bool) -> int:
    from gpuherd.models.plan.result import MemoryPlan

    told = _plan(asked.models[0], asked, gpus.cards)
    report: dict[str, Any] | None = None
    if as_json:
        from gpuherd.models.plan.as_json import plan_as_json

        if check and isinstance(told, MemoryPlan):
            report = _checked(told, asked, quiet=True)
        plan = plan_as_json(told, asked)
        _print_json([{**plan, "check": report} if check else plan], gpus)
    else:
        from gpuherd.models.plan.telling import Scene, tell

        print_lines(tell(told, Scene(gpus.cards, asked, gpus.remarks), plan_window()))
        if check and isinstance(told, MemoryPlan):
            report = _checked(told, asked, quiet=False)
    good = isinstance(told, MemoryPlan) and (report is None or _agrees(report))
    return ExitCode.OK if good else ExitCode.FAILED


def _checked(plan: MemoryPlan, asked: Asked, *, quiet: bool) -> dict[str, Any]:
    """Loads as planned, and tells how it went unless ``quiet``."""

    report = check(plan, asked, quiet=quiet)
    if not quiet:
        print_lines(tell_check(report, plan_window()))
    return report


def _agrees(report: dict[str, Any]) -> bool:

    return agrees(report)


def _many(asked: Asked, gpus: Gpus, as_json: bool) -> int:
    """A line a model. One that can't be planned harms no other; then the exit code is that of the first such."""
    from gpuherd.models.plan.as_json import plan_as_json
    from gpuherd.models.plan.result import MemoryPlan
    from gpuherd.models.plan.telling_tables import Row, tell_many

    rows: list[Row] = []
    problems: list[GpuherdError] = []
    for model in asked.models:
        try:
            rows.append(Row(model, _plan(model, asked, gpus.cards, advise=as_json)))
        except GpuherdError as problem:
            problems.append(problem)
            rows.append(Row(model, None, str(problem)))
    if as_json:
        alone = [_alone(asked, number) for number in range(len(rows))]
        _print_json(
            [
                {"model": {"name": row.model}, "fits": None, "error": row.problem}
                if row.told is None
                else plan_as_json(row.told, each)
                for row, each in zip(rows, alone, strict=True)
            ],
            gpus,
        )
    else:
        print_lines(tell_many(rows, gpus.cards, gpus.remarks, plan_window()))
    if problems:
        return problems[0].exit_code
    return ExitCode.OK if all(isinstance(row.told, MemoryPlan) for row in rows) else ExitCode.FAILED


def _alone(asked: Asked, number: int) -> Asked:
    """The question about one of its models."""
    return replace(asked, models=(asked.models[number],), without_dtype=(asked.without_dtype[number],))


def _usual(asked: Asked, as_json: bool) -> int:
    """What each model takes on usual GPUs."""
    from gpuherd.models.plan.as_json import model_as_json, usual_as_json
    from gpuherd.models.plan.telling_tables import tell_usual
    from gpuherd.models.plan.usual import on_usual_cards, precisions_beside
    from gpuherd.models.plan.wanted import planned_in

    options, found = asked.options, []
    for number, model in enumerate(asked.models):
        architecture, precision = planned_in(*_read(model, options))
        rows = on_usual_cards(
            architecture,
            precisions_beside(precision) if options.dtype is None else (precision,),
            options.workload(),
            options.kept(),
            parallel=_wish(options),
            gpus=options.gpus_per_job,
        )
        found.append((architecture, rows, _alone(asked, number)))
    if as_json:
        told = [{"model": model_as_json(each), "usual_gpus": usual_as_json(rows)} for each, rows, _ in found]
        print(json.dumps({"fits": None, "plans": told}, indent=2))
        return ExitCode.OK
    for number, (architecture, rows, alone) in enumerate(found):
        print_lines(
            [*([()] if number else []), *tell_usual(architecture, options.workload(), rows, alone, plan_window())]
        )
    return ExitCode.OK


def _train(asked: Asked, gpus: Gpus, as_json: bool) -> int:
    """A training of one model. Raises UsageError for several, and for options that are of answers alone."""
    from gpuherd.models.plan.reading import read_architecture
    from gpuherd.models.plan.telling import Scene
    from gpuherd.models.plan.telling_training import tell_training
    from gpuherd.models.plan.training import TrainingPlan, make_training_plan
    from gpuherd.models.plan.training_as_json import training_as_json

    options, training = asked.options, asked.training
    if len(asked.models) > 1:
        raise UsageError(f"--train plans one model at a time, and {len(asked.models)} are named")
    if options.parallel is not None:
        raise UsageError("--parallel is about answers; of a training say --strategy single, ddp or fsdp")
    if options.adapter is not None:
        raise UsageError("--adapter is loaded for answers; of an adapter that is trained say --lora RANK")
    architecture, dtype = _read(asked.models[0], options)
    job = training.job(options, dtype)
    reward = None if training.reward is None else read_architecture(training.reward)
    if not gpus.cards:
        return _train_usual(architecture, job, reward, asked, as_json)
    told = make_training_plan(architecture, gpus.cards, job, options.kept(), gpus=options.gpus_per_job, reward=reward)
    if as_json:
        _print_json([training_as_json(told, asked)], gpus)
    else:
        print_lines(tell_training(told, Scene(gpus.cards, asked, gpus.remarks), plan_window()))
    return ExitCode.OK if isinstance(told, TrainingPlan) else ExitCode.FAILED


def _train_usual(
    architecture: Architecture, job: TrainingJob, reward: Architecture | None, asked: Asked, as_json: bool
) -> int:
    from gpuherd.models.plan.as_json import model_as_json
    from gpuherd.models.plan.telling_training import tell_training_usual
    from gpuherd.models.plan.training_as_json import training_usual_as_json
    from gpuherd.models.plan.training_usual import training_on_usual_cards

    rows = training_on_usual_cards(architecture, job, asked.options.kept(), reward, gpus=asked.options.gpus_per_job)
    if as_json:
        told = {"model": model_as_json(architecture), "usual_gpus": training_usual_as_json(rows)}
        print(json.dumps({"fits": None, "plans": [told]}, indent=2))
    else:
        print_lines(tell_training_usual(architecture, rows, asked, plan_window()))
    return ExitCode.OK


def _device_map(asked: Asked, gpus: Gpus) -> int:
    """Prints the device map alone. Raises UsageError where there can be none."""
    from gpuherd.models.plan.result import Refusal

    if len(asked.models) > 1 or asked.training.train is not None:
        raise UsageError("--device-map is of one model that is loaded for answers; name one, without --train")
    if not gpus.cards:
        raise UsageError("--device-map: this machine has no GPU; name those that the map is for, like --gpus 4x40GB")
    told = _plan(asked.models[0], asked, gpus.cards)
    if isinstance(told, Refusal):
        print(f"gpuherd: {told.reason}", file=sys.stderr)
        return ExitCode.FAILED
    if told.parallel == "tensor":
        raise UsageError("with --parallel tensor each GPU has a part of every layer: there is no device map")
    print(json.dumps(told.device_map, indent=2))
    return ExitCode.OK


# ---- printing --------------------------------------------------------------------------------------------------------


def _print_json(plans: list[dict[str, Any]], gpus: Gpus) -> None:
    from gpuherd.models.plan.as_json import card_as_json

    told = {
        "fits": all(plan["fits"] for plan in plans),
        "plans": plans,
        "given_gpus": [card_as_json(card) for card in gpus.cards],
        "this_machine": gpus.here,
        "left_out": list(gpus.remarks),
    }
    print(json.dumps(told, indent=2, allow_nan=False))


# ``gpuherd plan --check``: the model is loaded as planned, and what it really takes is laid beside the plan.
#
# Loading is done by ``gpuherd.models.load.worker``, a program of its own: on this machine's GPUs under ``gpuherd
# run``, which takes them as any job does; for GPUs that are not here, pretended, with everything in the CPU's memory.


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
