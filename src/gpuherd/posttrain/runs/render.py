"""An experiment in words: its plan as a tree, its end. Rich draws."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gpuherd.columns import window
from gpuherd.errors import ExitCode, printable
from gpuherd.jobs.records import Outcome
from gpuherd.models.memory.kv_cache import MIB
from gpuherd.posttrain.eval.results import REFERENCE
from gpuherd.posttrain.eval.summary import clear_differences, summary_table, unmoved_lines
from gpuherd.posttrain.eval.summary import headline as summary_headline
from gpuherd.posttrain.runs.plan import Phase, PlannedStep
from gpuherd.posttrain.runs.prepare import Prepared
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.posttrain.types import Split, cut_draws
from gpuherd.runs.stage import failure_lines
from gpuherd.units import gib

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.tree import Tree

    from gpuherd.posttrain.eval.tables import Gathered

_FILE_WIDTH = 1000


def headline(settings: Settings, prepared: Prepared, plan: Sequence[PlannedStep], done: Collection[str]) -> str:
    """The experiment in one line."""
    counts = [
        (len(prepared.choices), "algorithm", "algorithms"),
        (len(settings.trained_on()), "data set", "data sets"),
        (len(settings.families()), "pair of models", "pairs of models"),
        (settings.rounds_of_training, "round", "rounds"),
    ]
    words = " x ".join(f"{number} {one if number == 1 else more}" for number, one, more in counts)
    finished = f", {len(done)} of them done" if done else ""
    return f"{settings.experiment.name}: {words}: {len(plan)} jobs{finished}"


def notices(settings: Settings, prepared: Prepared) -> list[str]:
    """How data sets are split, and warnings of settings with surprising effects."""
    words = {Split.TRAIN: "to train on", Split.HELDOUT: "held out", Split.TEST: "in the test"}
    lines = []
    for name, sizes in prepared.splits.items():
        parts = [f"{sizes[split]} problems {said}" for split, said in words.items() if split in sizes]
        lines.append(printable(f"{name}: {', '.join(parts)}"))
    drawing = [each.name for each in prepared.choices if each.draws]
    found = cut_draws(settings.generation.sampling(0), ", ".join(drawing), "generation") if drawing else None
    warnings = [*([] if found is None else [found]), *prepared.warnings]
    return [*lines, *(f"warning: {each}" for each in warnings)]


def plan_tree(title: str, plan: Sequence[PlannedStep], done: Collection[str], prepared: Prepared) -> Tree:
    """The plan as a tree: combination, round, jobs with what they ask for."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(title))
    by_combination = sorted(plan, key=lambda each: (each.step.algorithm == REFERENCE, _combination(each)))
    for combination, steps in groupby(by_combination, _combination):
        branch = tree.add(Text(printable(" / ".join(combination))))
        for number, of_round in groupby(sorted(steps, key=_round), _round):
            place = branch if number is None or number < 0 else branch.add(f"round {number}")
            for phase, of_phase in groupby(of_round, lambda each: each.step.phase):
                for line in _lines(phase, list(of_phase), done, prepared):
                    place.add(Text(line))
    return tree


def _combination(each: PlannedStep) -> tuple[str, str, str]:
    return each.step.algorithm, each.step.dataset, each.step.family


def _round(each: PlannedStep) -> int:
    return -1 if each.step.round is None else each.step.round


def _lines(phase: Phase, steps: Sequence[PlannedStep], done: Collection[str], prepared: Prepared) -> list[str]:
    """The jobs of one phase of a round: shards together, trainings and whole evaluations each."""
    if phase is Phase.COLLECT:
        many = "1 job" if len(steps) == 1 else f"{len(steps)} jobs"
        problems = prepared.problems.get(steps[0].step.dataset)
        return [f"collect: {problems} problems, {many}, each {_asks(steps[0])}{_state(steps, done)}"]
    if phase is Phase.TRAIN:
        return [f"train: {_asks(each)}{_state([each], done)}" for each in steps]
    lines = []
    for name, group in groupby(steps, lambda each: str(each.step.evaluated_on)):
        jobs = list(group)
        asks = _asks(jobs[0])
        if len(jobs) > 1:
            asks = f"{len(jobs) - 1} jobs, each {asks}, and one that joins them"
        lines.append(
            f"evaluate on {printable(name)}: {prepared.evaluated.get(name)} problems, {asks}{_state(jobs, done)}"
        )
    return lines


def _asks(each: PlannedStep) -> str:
    gpus, memory = each.asked.gpus, gib(each.asked.memory_mb * MIB)
    room = f"1 GPU with {memory}" if gpus == 1 else f"{gpus} GPUs with {memory} each"
    return f"{room}, priority {each.priority}"


def _state(steps: Sequence[PlannedStep], done: Collection[str]) -> str:
    finished = sum(each.step.name in done for each in steps)
    return "" if not finished else ", done" if finished == len(steps) else f", {finished} done"


def end_lines(outcome: Outcome, folder: Path) -> list[str]:
    """Which jobs have failed, and whether the run can go on."""
    lines = [f"failed  {job}: {reason}" for job, reason in failure_lines(outcome)]
    stuck = [each.title for each in outcome.unsolvable]
    if outcome.interrupted:
        lines.append("stopped: the same command goes on from here")
    elif stuck:
        lines.append(
            f"this run can't go on to its end: {', '.join(stuck)} would fail in the same way again; begin another run "
            f"with other settings (what is done stays in {folder})"
        )
    elif outcome.exit_code is not ExitCode.OK:
        lines.append(f"not all is done: the same command, or --resume {folder}, goes on from here")
    return lines


def print_tree(console: Console, tree: Tree) -> None:
    """Prints it: what a window has no room for goes on below, where a file's line is as long as it must be. (Rich cuts
    the lines of trees that are not to be wrapped.)"""
    width = window(console) or _FILE_WIDTH
    for line in console.render_lines(tree, console.options.update(width=width), pad=False):
        text = "".join(segment.text for segment in line).rstrip()
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def result_lines(found: Gathered, width: int | None) -> list[str]:
    """The table of what the policies came to, each at its own eta, with intervals; what is clear, what damaged."""
    if not found.rows:
        return [f"damaged: {each}" for each in found.damaged]
    table = summary_table(found, width)
    left_out = [f"no room for {', '.join(table.left_out)}: a wider window shows them"] if table.left_out else []
    damaged = [f"damaged: {printable(each)}" for each in found.damaged]
    return [
        *table.lines,
        summary_headline(found),
        *left_out,
        *clear_differences(found),
        *unmoved_lines(found),
        *damaged,
    ]
