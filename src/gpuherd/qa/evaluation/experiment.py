"""One evaluation from a run's name to its result: reads what it is made of, labels answers, calculates.

Checks that the parts belong together. Writes nothing and prints nothing; labels and figures are pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from gpuherd.errors import UsageError
from gpuherd.jobs.run_dir import safe_name
from gpuherd.options import did_you_mean
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.evaluation.measuring import Scores, differences, measure_result, positions, prefixes
from gpuherd.qa.evaluation.result import AGAINST, ByJudge, Evaluation, Settings
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.judging.audit import audits
from gpuherd.qa.judging.files import BadJudging, JudgingMeta, judging_named, judgings_of, judgments
from gpuherd.qa.judging.label_quality import OF_CLASSES, Counts, Judged, Warned, count, doubts_of_classes
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import Answer, answer_of
from gpuherd.qa.measures.registry import measures
from gpuherd.qa.numbers import rule_for
from gpuherd.qa.runs import Run, open_run
from gpuherd.qa.scoring.files import BadScoring, ScoreTable, ScoringMeta, scores, scoring_named
from gpuherd.runs.spec import versions

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
    counts: Counts
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
            has no label either way: nobody knows what the judge meant. Nor has a NaN, which is no answer.
    """
    meaning: dict[Verdict, bool | None] = {
        Verdict.CORRECT: False,
        Verdict.INCORRECT: True,
        Verdict.NOT_ATTEMPTED: True if not_attempted == INCORRECT else None,
        Verdict.UNPARSED: None,
        Verdict.NAN: None,
    }
    asked = set(ids)
    judged = {each.id: each for each in judgments if each.which == which and each.id in asked}
    return Labels(
        tuple(meaning[judged[name].verdict] if name in judged else None for name in ids),
        count(list(judged.values())),
        len(asked) - len(judged),
    )


# --- figures: every measure under every judging -----------------------------------------------------------------------

Track = Callable[[Sequence[str], str], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores that are evaluated.

    Attributes:
        columns: by the measure's name its value for each question, in the order of the questions; None: undefined.
        reasons: by the measure's name why it is undefined, with counts over all questions.
    """

    columns: Mapping[str, Scores]
    reasons: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Judging:
    """A judging with what is known against its verdicts on the answers that are evaluated."""

    judged: Judged
    judge: str
    warnings: tuple[Warned, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """All that an evaluation is made of.

    Attributes:
        ids: of the questions, in order.
        which: the answer that is evaluated, ``greedy`` or ``sample-0``.
        answers: this answer of each question by the scoring's rule for the end token; None where a log-prob is missing.
    """

    ids: Sequence[str]
    which: str
    answers: Sequence[Answer | None]
    scored: Scored
    judgings: Sequence[Judging]


def evaluate(asked: Asked, settings: Settings, track: Track) -> tuple[ByJudge, ...]:
    """The evaluation under each judging.

    Args:
        track: passes names on and may show how far it is, under a title.
    """
    return tuple(_by_judge(asked, judging, settings, track) for judging in asked.judgings)


def _by_judge(asked: Asked, judging: Judging, settings: Settings, track: Track) -> ByJudge:
    found = labels(asked.ids, judging.judged.judgments, asked.which, settings.not_attempted)
    columns = asked.scored.columns
    return ByJudge(
        judging=judging.judged.name,
        judge=judging.judge,
        which=asked.which,
        counts=found.counts,
        right=found.right,
        wrong=found.wrong_ones,
        left_out=found.left_out,
        warnings=_warnings(judging.warnings, found, settings.confidence),
        measures=tuple(
            measure_result(
                name, columns[name], found.wrong, undefined(columns[name], found, asked.scored.reasons[name]), settings
            )
            for name in track([*columns], "measures")
        ),
        differences=differences(columns, found.wrong, settings, lambda names: track(names, "differences"))
        if settings.against in columns
        else (),
        prefixes=prefixes(asked.answers, found.wrong, settings),
        positions=positions(asked.answers, found.wrong, settings),
    )


def _warnings(audited: Sequence[Warned], found: Labels, confidence: float) -> tuple[Warned, ...]:
    """What the audit says; of classes what holds for the labels as they are counted here, in its place."""
    classes = doubts_of_classes(found.right, found.wrong_ones, len(found.wrong), confidence)
    at = next((place for place, each in enumerate(audited) if each.kind in OF_CLASSES), len(audited))
    before, after = ([each for each in part if each.kind not in OF_CLASSES] for part in (audited[:at], audited[at:]))
    return (*before, *classes, *after)


def undefined(scores: Scores, found: Labels, reasons: Mapping[str, int]) -> dict[str, int]:
    """How many answers with a label have no score, by reason. The scoring counts reasons over all questions: where it
    has several, which one holds for how many of the labelled ones is not known, and they stand together."""
    missing = sum(score is None and label is not None for score, label in zip(scores, found.wrong, strict=True))
    return {"; or ".join(reasons) or "no value": missing} if missing else {}


# --- reading ----------------------------------------------------------------------------------------------------------

_FIGURES = 2  # what an evaluation holds: where that changes, one made before is not taken for a new one


@dataclass(frozen=True, slots=True)
class Read:
    """What was read.

    Attributes:
        asked: all that the figures are made of.
        identity: a digest of all that the evaluation depends on, in hex.
        scoring: the scoring's description.
        settings: as asked for, measures by their exact names.
    """

    asked: Asked
    identity: str
    scoring: ScoringMeta
    settings: Settings


def read(run: Run, options: EvaluateOptions, console: Console | None = None) -> Read:
    """Reads a run's answers, scores and judgings; ``console`` shows how far the audit of the labels is, where it takes
    long.

    Raises:
        UsageError: no such judging, scoring or measure; a judging of other answers than those that are scored.
        BadJudging, BadScoring, DamagedRun: a file is damaged, or made of other answers.
    """
    scoring = scoring_named(run.folder, options.scores)
    _refuse_other_answers(scoring.name, scoring.answers_sha256, run, BadScoring, "score again")
    metas = _judgings(run, options.judge)
    answers = list(run.answers())
    if not answers:
        raise UsageError(f"run {run.run_id} has no answers")
    ids = [each.question.id for each in answers]
    table = scores(run.folder, scoring)
    if list(table.ids) != ids:
        raise BadScoring(f"scoring {scoring.name} is not of the questions of run {run.run_id}; score again")
    which = "greedy" if answers[0].greedy is not None else "sample-0"
    exact = {alias: each.name for each in measures() for alias in (each.name, *each.aliases)}
    settings = replace(options.settings, against=exact.get(options.against, options.against))
    names = chosen_measures(table, [exact.get(word, word) for word in options.measures], settings.against)
    judged = _with_warnings(run, metas, which, console)
    asked = Asked(
        ids,
        which,
        [answer_of(each.main, scoring.eos == "include", span=scoring.span) for each in answers],
        Scored(
            {name: table.columns[name] for name in names},
            {each.name: each.undefined for each in scoring.measures if each.name in names},
        ),
        judged,
    )
    identity = _identity(run, scoring, metas, judged, names, settings)
    return Read(asked, identity, scoring, settings)


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


def _no_measure(table: ScoreTable, word: str, told: str = "") -> UsageError:
    """The error of a word that names no measure of the scoring, with the nearest."""
    hint = did_you_mean(word, table.columns, f"it has {', '.join(list(table.columns)[:8])}, …", most=3)
    return UsageError(f"the scoring has no measure {word!r}{told}{hint}")


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


def _with_warnings(run: Run, metas: Sequence[JudgingMeta], which: str, console: Console | None) -> list[Judging]:
    """The judgings of these answers, each with what its audit says against it."""
    found = []
    for audited in audits(run, metas, console, which):
        meta = audited.meta
        said = [each for each in judgments(run.folder, meta) if each.which == which]
        if not said:
            raise UsageError(
                f"judging {meta.name} is of {meta.answers}, and scores are of {which} answers; "
                f"gpuherd judge {run.run_id} {meta.judge} judges these"
            )
        found.append(Judging(Judged(meta.name, meta.kind.value, said), meta.judge, audited.audit.warnings))
    return found


def _identity(
    run: Run,
    scoring: ScoringMeta,
    metas: Sequence[JudgingMeta],
    judged: Sequence[Judging],
    names: Sequence[str],
    settings: Settings,
) -> str:
    values = {
        "figures": _FIGURES,
        "answers": run.answers_sha256,
        "scoring": [scoring.name, scoring.sha256],
        "judgings": [[meta.name, meta.sha256] for meta in metas],
        # What is known against labels changes as judgings are added, and stands in the result.
        "warnings": [[each.text for each in judging.warnings] for judging in judged],
        "measures": list(names),
        "settings": asdict(settings),
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# --- from a name to a result ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A result, and the folder of the run that it is of."""

    folder: QADirectory
    run: Run
    result: Evaluation


def evaluated(run_id: str, options: EvaluateOptions) -> Evaluated:
    """Evaluates a run. Shows a bar on standard error when that takes long. Raises as ``open_run`` and ``read``."""
    from rich.console import Console

    from gpuherd.runs.console import track

    console = Console(stderr=True)

    def tracked(names: Sequence[str], title: str) -> Iterable[str]:
        return track(console, names, title)

    run = open_run(run_id, options.runs_dir)
    found = read(run, options, console)
    result = Evaluation(
        name=safe_name(options.name or found.identity[:8]),
        run_id=run.run_id,
        scoring=found.scoring.name,
        eos=found.scoring.eos,
        answers_sha256=run.answers_sha256,
        settings=found.settings,
        judges=evaluate(found.asked, found.settings, tracked),
        measured=_measured(found),
        versions=versions("numpy", "scipy"),
        identity=found.identity,
    )
    return Evaluated(run.folder, run, result)


def _measured(found: Read) -> dict[str, dict[str, str]]:
    summaries = {each.name: each.summary for each in measures()}
    return {
        each.name: {"source": each.source, "summary": summaries.get(each.name, "")}
        for each in found.scoring.measures
        if each.name in found.asked.scored.columns
    }
