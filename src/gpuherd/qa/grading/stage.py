"""The stage ``judge``: which answers are judged, the name, the description and the files; and judging by a rule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rich.console import Console

from gpuherd.errors import UsageError
from gpuherd.jobs.records import Outcome
from gpuherd.lm.backend import Generation
from gpuherd.qa.grading.config import Judge, JudgeConfig, judging_name
from gpuherd.qa.grading.files import JUDGINGS, Answers, JudgeKind, JudgingMeta, write_judging
from gpuherd.qa.grading.rules import RULES, LexicalRule, attempts_nothing
from gpuherd.qa.grading.template import Case
from gpuherd.qa.grading.verdicts import Judgment, Ruling, Verdict
from gpuherd.qa.record import Answered, Question
from gpuherd.qa.runs import Run
from gpuherd.qa.span import is_only_thought, part_of
from gpuherd.runs.console import track
from gpuherd.runs.shards import ShardedDirectory
from gpuherd.runs.spec import digest_of, now, versions
from gpuherd.runs.stage import Stage, StageOutcome


class NoAnswer(StrEnum):
    """Why a generation is no answer."""

    NAN = "the model gave no finite numbers (NaN): this is no answer"
    OPEN_THOUGHT = "its thought was not closed: there is no answer"


@dataclass(frozen=True, slots=True)
class GradingItem:
    """An answer to be judged.

    Attributes:
        which: its name.
        question: that it answers.
        text: the answer without the thought before it, and without white space at both ends.
        no_answer: why there is no answer at all: the model gave no numbers, or its thought was not closed.
    """

    which: str
    question: Question
    text: str
    no_answer: NoAnswer | None = None

    @property
    def case(self) -> Case:
        """As a template shows it."""
        return Case(self.question.question, self.question.answers, self.text, self.question.context)


def items_of(answers: Iterable[Answered], which: Answers | None) -> tuple[list[GradingItem], Answers]:
    """The answers to judge in the order of the run, and which these are: as requested, else greedy ones if there are
    any.

    Raises UsageError where the run has none such.
    """
    rows = list(answers)
    has_greedy = any(row.greedy is not None for row in rows)
    chosen: Answers = which or ("greedy" if has_greedy else "samples")
    items = [
        GradingItem(name, row.question, part_of(generation, "answer").text, _no_answer(generation))
        for row in rows
        for name, generation in row.which.items()
        if chosen == "all" or (name == "greedy") == (chosen == "greedy")
    ]
    if rows and not items:
        there = "greedy" if has_greedy else "samples"
        raise UsageError(f"the run has no {'samples' if chosen == 'samples' else 'greedy answers'}; --answers {there}")
    return items, chosen


@dataclass(frozen=True, slots=True)
class DistinctCases:
    """The cases that a model judges, and for which items.

    Attributes:
        cases: different (question, answer) pairs, in the order of their first item; samples often repeat each other,
            and each case is judged once.
        of_item: for each item the place of its case; None where no judge is needed, since it is no attempt.
    """

    cases: tuple[GradingItem, ...]
    of_item: tuple[int | None, ...]


def distinct_cases(items: Sequence[GradingItem]) -> DistinctCases:
    """The cases among these items."""
    places: dict[tuple[str, str], int] = {}
    cases: list[GradingItem] = []
    of_item: list[int | None] = []
    for item in items:
        if item.no_answer is not None or attempts_nothing(item.text, item.question):
            of_item.append(None)
            continue
        key = (item.question.id, item.text)
        if key not in places:
            places[key] = len(cases)
            cases.append(item)
        of_item.append(places[key])
    return DistinctCases(tuple(cases), tuple(of_item))


def spread(items: Sequence[GradingItem], cases: DistinctCases, rulings: Sequence[Ruling]) -> list[Judgment]:
    """A judgment an item: by the ruling on its case."""
    return [
        judgment(item, without_judge(item) if place is None else rulings[place])
        for item, place in zip(items, cases.of_item, strict=True)
    ]


def judgment(item: GradingItem, ruling: Ruling) -> Judgment:
    """The ruling on an answer, under its name."""
    found = {each.name: getattr(ruling, each.name) for each in fields(ruling)}
    return Judgment(item.question.id, item.which, **found)


def without_judge(item: GradingItem) -> Ruling:
    """The ruling on an answer that is none, or attempts nothing: no judge is needed."""
    if item.no_answer is NoAnswer.NAN:
        return Ruling(Verdict.NAN, note=item.no_answer.value)
    said = "empty" if not item.text else "says only that it doesn't know"
    note = said if item.no_answer is None else item.no_answer.value
    return Ruling(Verdict.NOT_ATTEMPTED, note=f"{note}; the judge was not asked")


def _no_answer(generation: Generation) -> NoAnswer | None:
    if generation.is_nan:
        return NoAnswer.NAN
    return NoAnswer.OPEN_THOUGHT if is_only_thought(generation) else None


# --- the stage --------------------------------------------------------------------------------------------------------

RULES_VERSION = 2  # of all that lies between a reply or a probability and a verdict; a change makes other judgings


@dataclass(frozen=True)
class JudgingOutcome(StageOutcome):
    """How a judging ended.

    Attributes:
        meta: the judging; None where it isn't whole (a dry run, a job that failed, Ctrl-C).
        judged_cases: how many a model has judged; 0 for rules.
    """

    meta: JudgingMeta | None = None
    judged_cases: int = 0


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
        folder = self.source.folder
        if not JUDGINGS.exists(folder, self.name):
            return None
        return JudgingOutcome(meta=JUDGINGS.read(folder, self.name), already=True)

    def planned(self) -> JudgingOutcome:
        return JudgingOutcome(never=self.never)

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
        judged_cases: int = 0,
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
        return JudgingOutcome(jobs, meta=write_judging(self.source.folder, meta, judgments), judged_cases=judged_cases)


class JudgingByRule(JudgingStage):
    """A judging by a rule. Running it raises CannotWrite, and MissingExtra where the rule needs a library."""

    def __init__(self, judge: Judge, run: Run, config: JudgeConfig, console: Console) -> None:
        super().__init__(judge, run, config, console)
        self._threshold = config.threshold if config.threshold is not None else own_threshold(judge.kind)
        self.name = self.named([RULES_VERSION, judge.kind.value, self._threshold, self.answers, run.answers_sha256])

    def finish(self, jobs: Outcome | None) -> JudgingOutcome:
        verdicts = judge_by_rule(self.judge.kind, track(self.console, self.items, "judging"), self._threshold)
        libraries = ("math-verify",) if self.judge.kind is JudgeKind.MATH else ()
        return self.written(
            verdicts, {"rules_version": RULES_VERSION}, versions(*libraries), threshold=self._threshold, jobs=jobs
        )


# --- Judges that follow a rule: in this process, without a model ------------------------------------------------------


@contextmanager
def rule_of(kind: JudgeKind) -> Iterator[LexicalRule]:
    """The rule of this kind of judge, with what it needs to work for as long as the block lasts.

    Applying ``math`` raises MissingExtra where formulas are to be compared and math-verify is not there.
    """
    if kind is not JudgeKind.MATH:
        yield RULES[kind.value]
        return
    from gpuherd.qa.grading.formulas import FormulaProcess, math_judge

    with FormulaProcess() as process:
        yield LexicalRule("math", None, lambda answer, question, _: math_judge(answer, question, process.equal))


def judge_by_rule(kind: JudgeKind, items: Iterable[GradingItem], threshold: float | None = None) -> Iterator[Judgment]:
    """The judgment of each answer by the rule; ``threshold`` None is the rule's own."""
    with rule_of(kind) as rule:
        for item in items:
            none = item.no_answer is not None
            yield judgment(item, without_judge(item) if none else rule(item.text, item.question, threshold))


def own_threshold(kind: JudgeKind) -> float | None:
    """The score from which an answer is correct by default; None: the rule has no score."""
    return None if kind is JudgeKind.MATH else RULES[kind.value].threshold
