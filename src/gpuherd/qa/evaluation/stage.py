"""The stage ``evaluate``: reads a run's answers, scores and judgings, labels the answers, computes and writes figures.

Labels and figures are pure functions; the stage reads, checks that the parts belong together, and writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run_dir import safe_name
from gpuherd.options import did_you_mean
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.evaluation.measuring import Scores, differences, measure_result, positions, prefixes
from gpuherd.qa.evaluation.result import (
    AGAINST,
    ByJudge,
    EvaluateSettings,
    RunEvaluation,
    refuse_other_evaluation,
    write_evaluation,
)
from gpuherd.qa.grading.audit import audits
from gpuherd.qa.grading.files import BadJudging, JudgingMeta, judging_named, judgings_of
from gpuherd.qa.grading.label_quality import (
    OF_CLASSES,
    JudgeVerdicts,
    LabelWarning,
    VerdictCounts,
    class_warnings,
    count,
)
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import ScoredText, answer_of
from gpuherd.qa.measures.registry import ScoreTable, measures
from gpuherd.qa.numbers import rule_for
from gpuherd.qa.runs import Run, open_run
from gpuherd.qa.scoring.files import BadScoring, scores, scoring_named
from gpuherd.runs.console import track
from gpuherd.runs.spec import digest_of, versions
from gpuherd.runs.stage import Stage, StageOutcome

# --- labels -----------------------------------------------------------------------------------------------------------

EXCLUDE, INCORRECT = "exclude", "incorrect"  # what is done with answers that are not attempted


@dataclass(frozen=True, slots=True)
class Labels:
    """One judging's labels of the answers that are evaluated.

    Attributes:
        wrong: of each question, in order: whether its answer is wrong; None where it has no label.
        counts: by verdict, of those that were judged.
        unjudged: questions without a judgment.
    """

    wrong: tuple[bool | None, ...]
    counts: VerdictCounts
    unjudged: int

    @property
    def right(self) -> int:
        """How many are right."""
        return sum(each is False for each in self.wrong)

    @property
    def wrong_ones(self) -> int:
        """How many are wrong."""
        return sum(each is True for each in self.wrong)

    @property
    def left_out(self) -> int:
        """How many have no label."""
        return sum(each is None for each in self.wrong)


def labels(ids: Sequence[str], judgments: Sequence[Judgment], which: str, not_attempted: str = EXCLUDE) -> Labels:
    """The labels of the answers named ``which`` to these questions.

    Args:
        not_attempted: ``exclude`` leaves such answers out; ``incorrect`` counts them as wrong. What could not be parsed
            has no label either way: the judge's verdict is unknown. Nor has a NaN, which is no answer.
    """
    meaning: dict[Verdict, bool | None] = {
        Verdict.CORRECT: False,
        Verdict.INCORRECT: True,
        Verdict.NOT_ATTEMPTED: True if not_attempted == INCORRECT else None,
        Verdict.UNPARSED: None,
        Verdict.NAN: None,
    }
    known = set(ids)
    judged = {each.id: each for each in judgments if each.which == which and each.id in known}
    return Labels(
        tuple(meaning[judged[name].verdict] if name in judged else None for name in ids),
        count(list(judged.values())),
        len(known) - len(judged),
    )


# --- figures: every measure under every judging -----------------------------------------------------------------------

Track = Callable[[Sequence[str], str], Iterable[str]]


@dataclass(frozen=True, slots=True)
class AuditedJudging:
    """A judging with what is known against its verdicts on the answers that are evaluated."""

    judged: JudgeVerdicts
    judge: str
    warnings: tuple[LabelWarning, ...]


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """Everything that the figures are computed from.

    Attributes:
        ids: of the questions, in order.
        which: the answer that is evaluated, ``greedy`` or ``sample-0``.
        answers: this answer of each question by the scoring's rule for the end token; None where a log-prob is missing.
        columns: by the measure's name its value for each question, in the order of the questions; None: undefined.
        reasons: by the measure's name why it is undefined, with counts over all questions.
        judgings: whose labels are used, one evaluation each.
    """

    ids: Sequence[str]
    which: str
    answers: Sequence[ScoredText | None]
    columns: Mapping[str, Scores]
    reasons: Mapping[str, Mapping[str, int]]
    judgings: Sequence[AuditedJudging]


def evaluate(inputs: EvaluationInputs, settings: EvaluateSettings, track: Track) -> tuple[ByJudge, ...]:
    """The evaluation under each judging.

    Args:
        track: passes names on and may show progress, under a title.
    """
    return tuple(_by_judge(inputs, judging, settings, track) for judging in inputs.judgings)


def _by_judge(inputs: EvaluationInputs, judging: AuditedJudging, settings: EvaluateSettings, track: Track) -> ByJudge:
    found = labels(inputs.ids, judging.judged.judgments, inputs.which, settings.not_attempted)
    columns = inputs.columns
    return ByJudge(
        judging=judging.judged.name,
        judge=judging.judge,
        which=inputs.which,
        counts=found.counts,
        right=found.right,
        wrong=found.wrong_ones,
        left_out=found.left_out,
        warnings=_warnings(judging.warnings, found, settings.confidence),
        measures=tuple(
            measure_result(
                name,
                columns[name],
                found.wrong,
                undefined(columns[name], found, inputs.reasons.get(name, {})),
                settings,
            )
            for name in track([*columns], "measures")
        ),
        differences=differences(columns, found.wrong, settings, lambda names: track(names, "differences"))
        if settings.against in columns
        else (),
        prefixes=prefixes(inputs.answers, found.wrong, settings),
        positions=positions(inputs.answers, found.wrong, settings),
    )


def _warnings(audited: Sequence[LabelWarning], found: Labels, confidence: float) -> tuple[LabelWarning, ...]:
    """The warnings of the audit; those about classes are made anew for the labels as they are counted here."""
    classes = class_warnings(found.right, found.wrong_ones, len(found.wrong), confidence)
    at = next((place for place, each in enumerate(audited) if each.kind in OF_CLASSES), len(audited))
    before, after = ([each for each in part if each.kind not in OF_CLASSES] for part in (audited[:at], audited[at:]))
    return (*before, *classes, *after)


def undefined(scores: Scores, found: Labels, reasons: Mapping[str, int]) -> dict[str, int]:
    """How many answers with a label have no score, by reason. The scoring counts reasons over all questions: where it
    has several, which one holds for how many of the labelled ones is not known, and they stand together."""
    missing = sum(score is None and label is not None for score, label in zip(scores, found.wrong, strict=True))
    return {"; or ".join(reasons) or "no value": missing} if missing else {}


# --- inputs: which judgings and measures, and the warnings against labels ---------------------------------------------


def chosen_measures(table: ScoreTable, words: Sequence[str], against: str) -> list[str]:
    """The measures that the words name, exactly or by the beginning, in the order of the scoring; all without words.
    ``against``, an exact name, is among them.

    Raises UsageError for a word that names none of its measures; for ``against`` only where it is not the one that is
    meant where nothing is said: a scoring of samples alone has no ``nll``, and then nothing is compared.
    """
    chosen = {name for word in words for name in _named(table, word)} if words else set(table.columns)
    if against not in table.columns and against != AGAINST:
        raise _no_measure(table, against, "; --against names one of its measures")
    chosen.add(against)
    return [name for name in table.columns if name in chosen]


def _named(table: ScoreTable, word: str) -> list[str]:
    """The measure of this name; else those whose names begin so. Raises UsageError where there is none."""
    found = [word] if word in table.columns else [name for name in table.columns if name.startswith(word)]
    if not found:
        raise _no_measure(table, word)
    return found


def _no_measure(table: ScoreTable, word: str, advice: str = "") -> UsageError:
    """The error of a word that names no measure of the scoring, with the nearest."""
    hint = did_you_mean(word, table.columns, f"it has {', '.join(list(table.columns)[:8])}, …", most=3)
    return UsageError(f"the scoring has no measure {word!r}{advice}{hint}")


def _judgings(run: Run, words: Sequence[str]) -> list[JudgingMeta]:
    if words:
        metas = list({meta.name: meta for meta in (judging_named(run.folder, word) for word in words)}.values())
    else:
        metas = judgings_of(run.folder)
        if not metas:
            raise UsageError(
                f"no judging of run {run.run_id} is there yet; 'gpuherd judge {run.run_id} "
                f"{rule_for(each.question for each in run.answers())}' makes one"
            )
        if len(metas) > 1:
            listed = ", ".join(meta.name for meta in metas)
            raise UsageError(f"run {run.run_id} has several judgings: {listed}; choose by --judge, one or more of them")
    for meta in metas:
        _refuse_other_answers(meta.name, meta.answers_sha256, run, BadJudging, "judge again")
    return metas


def _refuse_other_answers(name: str, sha256: str, run: Run, error: type[Exception], remedy: str) -> None:
    if sha256 != run.answers_sha256:
        raise error(f"{name} was made of other answers than those of run {run.run_id}; {remedy}")


def _with_warnings(run: Run, metas: Sequence[JudgingMeta], which: str, console: Console | None) -> list[AuditedJudging]:
    """The judgings of these answers, each with what its audit says against it."""
    found = []
    for audited in audits(run, metas, console, which):
        meta = audited.meta
        if not audited.judged.judgments:
            raise UsageError(
                f"judging {meta.name} is of {meta.answers}, and scores are of {which} answers; "
                f"gpuherd judge {run.run_id} {meta.judge} judges these"
            )
        found.append(AuditedJudging(audited.judged, meta.judge, audited.audit.warnings))
    return found


# --- the stage --------------------------------------------------------------------------------------------------------

# The set of figures of an evaluation: part of its identity, so that older files are not taken for new ones.
_FIGURES = 2


@dataclass(frozen=True, kw_only=True)
class EvaluationOutcome(StageOutcome):
    """How an evaluation ended; a failure where no judging has both right and wrong answers.

    Attributes:
        evaluation: the figures.
        file: they as JSON, and ``table`` as CSV.
    """

    evaluation: RunEvaluation
    file: Path
    table: Path

    @property
    def is_poor(self) -> bool:
        return not any(judge.both_classes for judge in self.evaluation.judges)


class EvaluationStage(Stage[EvaluationOutcome]):
    """Evaluates a run: reads its answers, scores and judgings, computes all figures here, writes them.

    It starts no jobs. It always computes anew, also where its files exist: so files that somebody changed are repaired.

    Args:
        run_id: the run's name in the options' folder of runs, or its path.
        console: shows progress where it takes long.

    Attributes:
        source: the run.

    Raises what ``open_run`` raises. Running it raises:
        UsageError: no such judging, scoring or measure; a judging of other answers than those that are scored; another
            evaluation has this name.
        BadJudging, BadScoring, BadEvaluation, DamagedRun: a file is damaged, or made of other answers.
        CannotWrite.
    """

    kind = "evaluate"

    def __init__(self, run_id: str, options: EvaluateOptions, console: Console) -> None:
        self.source: Run = open_run(run_id, options.runs_dir)
        self.options = options
        super().__init__(DispatchOptions(), self.source.folder, console)

    def prepare(self) -> None:
        """Reads and checks all inputs, before anything is computed."""
        run, options = self.source, self.options
        self.scoring = scoring_named(run.folder, options.scores)
        _refuse_other_answers(self.scoring.name, self.scoring.answers_sha256, run, BadScoring, "score again")
        metas = _judgings(run, options.judge)
        self._read(metas)
        self.identity = self._identity(metas)
        self.name = safe_name(options.name or self.identity[:8])
        refuse_other_evaluation(run.folder, self.name, self.identity)

    def finish(self, jobs: Outcome | None) -> EvaluationOutcome:
        """Computes the figures and writes them; ``jobs`` is None."""
        by_judge = evaluate(self.inputs, self.settings, lambda names, title: track(self.console, names, title))
        evaluation = RunEvaluation(
            name=self.name,
            run_id=self.source.run_id,
            scoring=self.scoring.name,
            eos=self.scoring.eos,
            answers_sha256=self.source.answers_sha256,
            settings=self.settings,
            judges=by_judge,
            measured=self._described_measures(),
            versions=versions("numpy", "scipy"),
            identity=self.identity,
        )
        file, table = write_evaluation(self.source.folder, evaluation)
        return EvaluationOutcome(jobs, evaluation=evaluation, file=file, table=table)

    def _read(self, metas: Sequence[JudgingMeta]) -> None:
        """Sets the inputs of the figures and the settings, in which measures have their exact names."""
        run, options, scoring = self.source, self.options, self.scoring
        answers = list(run.answers())
        if not answers:
            raise UsageError(f"run {run.run_id} has no answers")
        ids = [each.question.id for each in answers]
        table = scores(run.folder, scoring)
        if list(table.ids) != ids:
            raise BadScoring(f"scoring {scoring.name} is not of the questions of run {run.run_id}; score again")
        which = answers[0].main_name
        exact = {alias: each.name for each in measures() for alias in (each.name, *each.aliases)}
        self.settings = replace(options.settings, against=exact.get(options.against, options.against))
        names = chosen_measures(table, [exact.get(word, word) for word in options.measures], self.settings.against)
        self.inputs = EvaluationInputs(
            ids=ids,
            which=which,
            answers=[answer_of(each.main, scoring.eos == "include", span=scoring.span) for each in answers],
            columns={name: table.columns[name] for name in names},
            reasons={each.name: each.undefined for each in scoring.measures if each.name in names},
            judgings=_with_warnings(run, metas, which, self.console),
        )

    def _identity(self, metas: Sequence[JudgingMeta]) -> str:
        """A digest of everything that the evaluation depends on, in hex."""
        values = {
            "figures": _FIGURES,
            "answers": self.source.answers_sha256,
            "scoring": [self.scoring.name, self.scoring.sha256],
            "judgings": [[meta.name, meta.sha256] for meta in metas],
            # Warnings against labels change as judgings are added, and are part of the result.
            "warnings": [[each.text for each in judging.warnings] for judging in self.inputs.judgings],
            "measures": list(self.inputs.columns),
            "settings": asdict(self.settings),
        }
        return digest_of(json.dumps(values, sort_keys=True))

    def _described_measures(self) -> dict[str, dict[str, str]]:
        summaries = {each.name: each.summary for each in measures()}
        return {
            each.name: {"source": each.source, "summary": summaries.get(each.name, "")}
            for each in self.scoring.measures
            if each.name in self.inputs.columns
        }
