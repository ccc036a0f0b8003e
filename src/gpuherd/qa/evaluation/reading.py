"""Reads what an evaluation is made of from a run's folder, and checks that its parts belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.evaluation.evaluating import Asked, Judging, Scored
from gpuherd.qa.evaluation.result import AGAINST, Settings
from gpuherd.qa.judging.audit import audits
from gpuherd.qa.judging.files import BadJudging, JudgingMeta, judging_named, judgings_of, judgments
from gpuherd.qa.judging.label_quality import Judged
from gpuherd.qa.measures.registry import measures
from gpuherd.qa.numbers import rule_for
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.evidences import answer_of
from gpuherd.qa.scoring.files import ScoreTable, scores, scoring_named
from gpuherd.qa.scoring.meta import BadScoring, ScoringMeta

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
