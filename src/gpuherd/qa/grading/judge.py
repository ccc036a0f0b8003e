"""A judging from the judge's name to its files, whatever kind of judge it is; what it would take; both as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console

from gpuherd.errors import ExitCode, printable
from gpuherd.jobs.feasibility import Feasibility, of_like
from gpuherd.qa.grading.config import Judge, JudgeConfig, refuse_idle
from gpuherd.qa.grading.files import Answers, JudgeKind
from gpuherd.qa.grading.stage import JudgingByRule, JudgingOutcome, distinct_cases, items_of
from gpuherd.qa.grading.template import filled, template_for
from gpuherd.qa.runs import Run
from gpuherd.runs.shards import number_of_shards
from gpuherd.units import counted

# Characters of a token in English, roughly: a plan fetches no tokenizer.
CHARACTERS_A_TOKEN = 3


@dataclass(frozen=True, slots=True)
class JudgingPlan:
    """The plan of a judging: the result of a dry run.

    Attributes:
        answers: which answers, and ``count`` how many of them.
        cases: different ones that a model would judge; 0 for rules.
        longest: about how many tokens the longest prompt has; None for rules.
        jobs: how many, and ``asks`` what each asks for; None where there are none.
        gpus: how many each gets, and ``outlook`` what becomes of them with the engine that was named.
    """

    answers: Answers
    count: int
    cases: int = 0
    longest: int | None = None
    jobs: int = 0
    asks: str | None = None
    gpus: int = 0
    outlook: Feasibility | None = None

    @property
    def exit_code(self) -> ExitCode:
        """1 where a job can never be had."""
        return ExitCode.OK if self.outlook is None else self.outlook.exit_code

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        values: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("gpus", "outlook")
        }
        if self.outlook is not None:
            values |= self.outlook.to_dict() | {"engine_asks": self.outlook.asks.get(self.gpus)}
        return values


def judge_run(
    judge: Judge,
    run: Run,
    config: JudgeConfig,
    console: Console,
    *,
    given: Mapping[str, Any] | None = None,
    simulate: bool = False,
) -> JudgingOutcome:
    """Judges a run. The same call again returns the existing judging, or continues where it was stopped.

    Args:
        given: the options that the user gave, by field: one that this judge would not look at is refused.
        simulate: the GPUs are pretended.

    Raises:
        UsageError, MissingExtra, MissingModel, BadModel, JobCannotFit: before anything is started.
        JudgeRefused, JudgeUnavailable: by an address.
        CannotWrite, QueueBusy, ShardBusy, DamagedRun.
    """
    refuse_idle(judge, config, given or {})
    if judge.kind is JudgeKind.MODEL:
        from gpuherd.qa.grading.by_model import JudgingByModel

        return JudgingByModel(judge, run, config, console, given=given, simulate=simulate).run()
    if judge.kind is JudgeKind.URL:
        from gpuherd.qa.grading.by_url import JudgingByUrl

        return JudgingByUrl(judge, run, config, console).run()
    return JudgingByRule(judge, run, config, console).run()


def plan_judging(judge: Judge, run: Run, config: JudgeConfig, *, given: Mapping[str, Any] | None = None) -> JudgingPlan:
    """The plan of judging the run. Fetches nothing, starts nothing. Raises as ``judge_run`` before its start."""
    refuse_idle(judge, config, given or {})
    items, answers = items_of(run.answers(), config.answers)
    if judge.kind not in (JudgeKind.MODEL, JudgeKind.URL):
        return JudgingPlan(answers, len(items))
    template = template_for(config.prompt, config.way, config.mode)
    cases = distinct_cases(items).cases
    longest = max((len(filled(template, each.case)) for each in cases), default=0) // CHARACTERS_A_TOKEN + 1
    if judge.kind is JudgeKind.URL or not cases:
        return JudgingPlan(answers, len(items), len(cases), longest)
    from gpuherd.models.load.jobs import resources_for
    from gpuherd.qa.grading.by_model import fit_batch_size

    assert judge.model is not None  # noqa: S101 - judge_named gives every model judge one
    new_tokens = 1 if config.mode == "tokens" else config.most_reply_tokens
    config, asks = fit_batch_size(
        judge.model, config, resources_for(config), prompt_tokens=longest, new_tokens=new_tokens, given=given or {}
    )
    jobs = number_of_shards(len(cases), asks.at_once, config.shards)
    outlook = of_like([asks.gpus] * jobs, config)
    return JudgingPlan(answers, len(items), len(cases), longest, jobs, asks.sentence, asks.gpus, outlook)


# --- as lines for a terminal ------------------------------------------------------------------------------------------


def plan_lines(judge: Judge, planned: JudgingPlan) -> list[str]:
    """The plan of a judging."""
    lines = [f"{planned.count} answers ({planned.answers}) by {printable(judge.said)}"]
    if planned.longest is not None:
        what = "requests" if judge.url is not None else "cases"
        lines.append(f"{planned.cases} different {what}, the longest of about {planned.longest} tokens")
    if planned.asks is not None:
        lines.append(f"{counted(planned.jobs, 'job')}; each: {printable(planned.asks)}")
    engine = [] if planned.outlook is None else planned.outlook.lines
    return [*lines, *map(printable, engine), "nothing was started"]


def outcome_lines(run: Run, outcome: JudgingOutcome) -> list[str]:
    """How a judging ended."""
    if outcome.meta is None:
        lines = [f"failed  {printable(job)}: {printable(reason)}" for job, reason in outcome.failures]
        if outcome.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) or not lines:
            lines.append("stopped: the same command goes on from here")
        return lines
    there = ", as it was there already" if outcome.already else ""
    return [f"{outcome.meta.name}{there}: {run.folder.judging(outcome.meta.name)}"]
