"""What all judgings share, whatever kind of judge it is: which answers, the name, the description, the files.

A judging by a rule, at once and in this process, is here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.qa.judging.config import Judge, JudgeConfig, judging_name
from gpuherd.qa.judging.files import JudgingMeta, Kind, existing, write_judging
from gpuherd.qa.judging.items import Item, items_of, unasked
from gpuherd.qa.judging.rules import RULES, Rule
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.runs import Run
from gpuherd.runs.console import track
from gpuherd.runs.shards import ShardedDirectory
from gpuherd.runs.spec import digest_of, now, versions
from gpuherd.runs.stage import Stage, StageOutcome

RULES_VERSION = 2  # of all that lies between a reply or a probability and a verdict; a change makes other judgings


@dataclass(frozen=True)
class JudgingOutcome(StageOutcome):
    """How a judging ended.

    Attributes:
        meta: the judging; None where it isn't whole (a dry run, a job that failed, Ctrl-C).
        asked: how many cases a model was asked about; 0 for rules.
    """

    meta: JudgingMeta | None = None
    asked: int = 0


class JudgingStage(Stage[JudgingOutcome]):
    """A judging of a run's answers.

    Attributes:
        items: the answers to judge, and ``answers`` which these are.
        name: of the judging's files; it depends on all that the verdicts depend on.
    """

    kind = "judge"
    name: str

    def __init__(self, judge: Judge, run: Run, config: JudgeConfig, console: Console) -> None:
        self.judge, self.source, self.config = judge, run, config
        self.items, self.answers = items_of(run.answers(), config.answers)
        super().__init__(config, run.folder, console, dry_run=config.dry_run, enqueue_only=config.enqueue_only)

    def existing(self) -> JudgingOutcome | None:
        found = existing(self.source.folder, self.name)
        return None if found is None else JudgingOutcome(meta=found, already=True)

    def prepare(self) -> None:
        """Nothing: all was known before the name was."""

    def planned(self) -> JudgingOutcome:
        return JudgingOutcome(never=() if self.outlook is None else self.outlook.never)

    def begin(self) -> None:
        """Nothing: a judging without jobs has nobody to write for."""

    def jobs(self) -> Sequence[Job]:
        return ()

    def named(self, identity: object) -> str:
        """The name of what depends on ``identity``, plain JSON values."""
        return judging_name(self.judge, digest_of(json.dumps(identity)))

    def work_folder(self, measured: str) -> ShardedDirectory:
        """Where jobs or requests keep what they measure; it depends on ``measured`` alone, not on thresholds."""
        return self.source.folder.work_of(judging_name(self.judge, digest_of(measured)))

    def written(
        self,
        judgments: Iterable[Judgment],
        settings: Mapping[str, Any],
        made_by: Mapping[str, str],
        *,
        threshold: float | None,
        prompt_sha256: str | None = None,
        jobs: Outcome | None = None,
        asked: int = 0,
    ) -> JudgingOutcome:
        """Writes the judging with its description. ``made_by``: versions of what took part."""
        meta = JudgingMeta(
            name=self.name,
            judge=self.judge.said,
            kind=self.judge.kind,
            model=self.judge.model,
            threshold=threshold,
            prompt_sha256=prompt_sha256,
            answers=self.answers,
            answers_sha256=self.source.answers_sha256,
            counts=dict.fromkeys(Verdict, 0),
            sha256="",
            settings=settings,
            versions=made_by,
            made=now(),
        )
        return JudgingOutcome(jobs, meta=write_judging(self.source.folder, meta, judgments), asked=asked)


class JudgingByRule(JudgingStage):
    """A judging by a rule. Running it raises CannotWrite, and MissingExtra where the rule needs a library."""

    def __init__(self, judge: Judge, run: Run, config: JudgeConfig, console: Console) -> None:
        super().__init__(judge, run, config, console)
        self._threshold = config.threshold if config.threshold is not None else own_threshold(judge.kind)
        self.name = self.named([RULES_VERSION, judge.kind.value, self._threshold, self.answers, run.answers_sha256])

    def finish(self, jobs: Outcome | None) -> JudgingOutcome:
        verdicts = judge_by_rule(self.judge.kind, track(self.console, self.items, "judging"), self._threshold)
        libraries = ("math-verify",) if self.judge.kind is Kind.MATH else ()
        return self.written(
            verdicts, {"rules_version": RULES_VERSION}, versions(*libraries), threshold=self._threshold, jobs=jobs
        )


# --- Judges that follow a rule: in this process, without a model ------------------------------------------------------


@contextmanager
def rule_of(kind: Kind) -> Iterator[Rule]:
    """The rule of this kind of judge, with what it needs to work for as long as the block lasts.

    Applying ``math`` raises MissingExtra where formulas are to be compared and math-verify is not there.
    """
    if kind is not Kind.MATH:
        yield RULES[kind.value]
        return
    from gpuherd.qa.judging.formula_process import FormulaProcess
    from gpuherd.qa.judging.math_answers import math_judge

    with FormulaProcess() as process:
        yield Rule("math", None, lambda answer, question, _: math_judge(answer, question, process.equal))


def judge_by_rule(kind: Kind, items: Iterable[Item], threshold: float | None = None) -> Iterator[Judgment]:
    """What the rule says of each answer; ``threshold`` None is the rule's own."""
    with rule_of(kind) as rule:
        for item in items:
            if item.no_answer is not None:
                yield unasked(item)
                continue
            ruling = rule(item.text, item.question, threshold)
            yield Judgment(item.question.id, item.which, ruling.verdict, score=ruling.score, note=ruling.note)


def own_threshold(kind: Kind) -> float | None:
    """The score from which an answer is correct where no other is asked for; None: the rule has no score."""
    return None if kind is Kind.MATH else RULES[kind.value].threshold
