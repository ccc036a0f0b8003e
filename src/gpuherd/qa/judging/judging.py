"""A judging from the judge's name to its files, whatever kind of judge it is; and what it would take, beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gpuherd.errors import ExitCode
from gpuherd.qa.judging.config import Judge, JudgeConfig, refuse_idle
from gpuherd.qa.judging.files import Answers, Kind
from gpuherd.qa.judging.items import asking, items_of
from gpuherd.qa.judging.stage import JudgingByRule, JudgingOutcome
from gpuherd.qa.judging.template import filled, template_for
from gpuherd.qa.runs import Run

if TYPE_CHECKING:
    from gpuherd.jobs.feasibility import Outlook

# Characters of a token in English, roughly: a plan fetches no tokenizer.
CHARACTERS_A_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Planned:
    """What a judging would do.

    Attributes:
        answers: which answers, and ``count`` how many of them.
        cases: different ones that a model would be asked about; 0 for rules.
        longest: about how many tokens the longest form has; None for rules.
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
    outlook: Outlook | None = None

    @property
    def exit_code(self) -> ExitCode:
        """1 where a job can never be had."""
        return ExitCode.OK if self.outlook is None else self.outlook.exit_code

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        told: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("gpus", "outlook")
        }
        if self.outlook is not None:
            told |= self.outlook.to_dict() | {"engine_asks": self.outlook.asks.get(self.gpus)}
        return told


def judge_run(
    judge: Judge,
    run: Run,
    config: JudgeConfig,
    console: Console,
    *,
    given: Mapping[str, Any] | None = None,
    simulate: bool = False,
) -> JudgingOutcome:
    """Judges a run. The same again finds what is there, or goes on where it was stopped.

    Args:
        given: the options that the user gave, by field: one that this judge would not look at is refused.
        simulate: the GPUs are pretended.

    Raises:
        UsageError, MissingExtra, MissingModel, BadModel, JobCannotFit: before anything is started.
        JudgeRefused, JudgeUnavailable: by an address.
        CannotWrite, QueueBusy, ShardBusy, DamagedRun.
    """
    refuse_idle(judge, config, given or {})
    if judge.kind is Kind.MODEL:
        from gpuherd.qa.judging.by_model import JudgingByModel

        return JudgingByModel(judge, run, config, console, given=given, simulate=simulate).run()
    if judge.kind is Kind.URL:
        from gpuherd.qa.judging.by_url import JudgingByUrl

        return JudgingByUrl(judge, run, config, console).run()
    return JudgingByRule(judge, run, config, console).run()


def plan_judging(judge: Judge, run: Run, config: JudgeConfig, *, given: Mapping[str, Any] | None = None) -> Planned:
    """What judging the run would take. Fetches nothing, starts nothing. Raises as ``judge_run`` before its start."""
    refuse_idle(judge, config, given or {})
    items, answers = items_of(run.answers(), config.answers)
    if judge.kind not in (Kind.MODEL, Kind.URL):
        return Planned(answers, len(items))
    form = template_for(config.prompt, config.way, config.mode)
    cases = asking(items).cases
    longest = max((len(filled(form, each.case)) for each in cases), default=0) // CHARACTERS_A_TOKEN + 1
    if judge.kind is Kind.URL or not cases:
        return Planned(answers, len(items), len(cases), longest)
    from gpuherd.jobs.feasibility import of_like
    from gpuherd.models.load.jobs import resources_for
    from gpuherd.qa.judging.by_model import with_room
    from gpuherd.runs.shards import number_of_shards

    assert judge.model is not None  # noqa: S101 - judge_named gives every model judge one
    new_tokens = 1 if config.mode == "tokens" else config.most_reply_tokens
    config, asks = with_room(
        judge.model, config, resources_for(config), prompt_tokens=longest, new_tokens=new_tokens, given=given or {}
    )
    jobs = number_of_shards(len(cases), asks.at_once, config.shards)
    outlook = of_like([asks.gpus] * jobs, config)
    return Planned(answers, len(items), len(cases), longest, jobs, asks.sentence, asks.gpus, outlook)
