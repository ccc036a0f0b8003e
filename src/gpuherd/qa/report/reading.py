"""What the page of a run shows, read from its folder: answers, judgings, scores, relevance, and the evaluation.

Judgings, scores and statistics of other answers than the run's are left out; so are damaged ones, and a log line says
so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.jobs.queue.reader import notes_on_gpus
from gpuherd.qa.evaluation.result import BadEvaluation, RunEvaluation, read_evaluation
from gpuherd.qa.generate.config import BACKEND_IN_RECORDS
from gpuherd.qa.grading.audit import Audit, audits
from gpuherd.qa.grading.files import JudgingMeta, judgings_of
from gpuherd.qa.grading.verdicts import Judgment
from gpuherd.qa.measures.evidence import EvidenceNeed, answers_of
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.files import ScoredMeasure, ScoringMeta, scores, scoring_named, scorings_of
from gpuherd.qa.span import Span
from gpuherd.qa.statistics.equivalence import BY_TEXT, ClusterRule, MeaningRule, clusters_in
from gpuherd.qa.statistics.files import BadStatistic, StatisticMeta, rows, statistics_of
from gpuherd.qa.statistics.registry import Row
from gpuherd.qa.statistics.similarity import RELEVANCE

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Judged:
    """A judging, with its judgments by question and answer: ``(id, which)``."""

    meta: JudgingMeta
    judgments: Mapping[tuple[str, str], Judgment]


@dataclass(frozen=True, slots=True)
class MeasureScores:
    """A measure with a value a question, in the order of the questions; None where it is not defined.

    Attributes:
        source: where its formula is from.
        summary: what it is, in a line.
        undefined: how many questions have none, by reason.
    """

    name: str
    values: Sequence[float | None]
    source: str = ""
    summary: str = ""
    undefined: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as its page shows it.

    Attributes:
        title: the run's name.
        facts: what stands at the head: (what, value).
        settings: how the answers were made: (name, value), in order.
        answers: all of them, in the order of the questions.
        judgings: the evaluation's judge first.
        scores: of each measure, the evaluation's order.
        relevance: of each token of the main answer, by question id; what is not there was not measured.
        clusters: of each sample, by question id.
        audits: of the judgings, in their order.
        span: which part of the generations scores are of.
        evaluation: what came out, where the run was evaluated.
        notes: what a reader must know first.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]
    answers: Sequence[Answered]
    judgings: Sequence[Judged] = ()
    scores: Sequence[MeasureScores] = ()
    relevance: Mapping[str, Sequence[float]] = field(default_factory=dict)
    clusters: Mapping[str, Sequence[int]] = field(default_factory=dict)
    audits: Sequence[Audit] = ()
    span: Span = "answer"
    evaluation: RunEvaluation | None = None
    notes: Sequence[str] = ()


logger = logging.getLogger(__name__)

MOST_OF_A_SETTING = 2_000  # characters; run.json has all


def reported_run(run: Run, evaluation: RunEvaluation | None, console: Console | None = None) -> ReportedRun:
    """All that the page of a run shows.

    Args:
        evaluation: its judges come first, and its scoring is shown; without it the latest scoring.
        console: shows how far it is, where it takes long.

    Raises:
        DamagedRun, BadJudging, BadScoring: a file that the evaluation was made of is damaged.
    """
    answers = list(run.answers())
    scoring = _scoring(run, evaluation)
    audited = audits(run, _judgings(run, evaluation), console)
    return ReportedRun(
        title=run.run_id,
        facts=_facts(run, answers, scoring, evaluation),
        settings=_settings(run, scoring, evaluation),
        answers=answers,
        judgings=[Judged(each.meta, {(one.id, one.which): one for one in each.judged.judgments}) for each in audited],
        scores=[] if scoring is None else _scores(run, scoring, evaluation),
        relevance=_relevance(run, answers, scoring),
        clusters={} if scoring is None else _clusters(run, answers, scoring),
        audits=[each.audit for each in audited],
        span="answer" if scoring is None else scoring.span,
        evaluation=evaluation,
        notes=_notes(run),
    )


def evaluation_of(run: Run, name: str | None) -> RunEvaluation | None:
    """The run's evaluation of this name; the latest where none is named, None where there is none.

    Raises:
        UsageError: there is none of this name; it lists those that there are.
        BadEvaluation: it is damaged, of a newer gpuherd, or of other answers.
    """
    there = {path.stem: path for path in run.folder.evaluations.glob("*.json") if not path.name.startswith(".")}
    if name is None:
        if not there:
            return None
        name = max(there, key=lambda each: (there[each].stat().st_mtime_ns, each))
    if name not in there:
        hint = f"there is {', '.join(sorted(there))}" if there else f"gpuherd evaluate {run.run_id} makes one"
        raise UsageError(f"run {run.run_id} has no evaluation {name!r}; {hint}")
    found = read_evaluation(there[name])
    if found.answers_sha256 != run.answers_sha256:
        raise BadEvaluation(f"evaluation {name} is of other answers than those of run {run.run_id}; evaluate again")
    return found


def _judgings(run: Run, evaluation: RunEvaluation | None) -> list[JudgingMeta]:
    """Those of these answers; the evaluation's first, in its order."""
    there = [meta for meta in judgings_of(run.folder) if meta.answers_sha256 == run.answers_sha256]
    first = [] if evaluation is None else [judge.judging for judge in evaluation.judges]
    return sorted(there, key=lambda meta: first.index(meta.name) if meta.name in first else len(first))


def _scoring(run: Run, evaluation: RunEvaluation | None) -> ScoringMeta | None:
    if evaluation is not None:
        return scoring_named(run.folder, evaluation.scoring)
    there = [meta for meta in scorings_of(run.folder) if meta.answers_sha256 == run.answers_sha256]
    return there[-1] if there else None


def _scores(run: Run, scoring: ScoringMeta, evaluation: RunEvaluation | None) -> list[MeasureScores]:
    """The evaluated measures in the evaluation's order, then the others; without it all, in the scoring's."""
    columns = scores(run.folder, scoring).columns
    first = [] if evaluation is None or not evaluation.judges else [each.name for each in evaluation.judges[0].measures]
    unknown = ScoredMeasure("", "", (), 0, {})  # a column that the description doesn't name
    about = dict.fromkeys(columns, unknown) | {each.name: each for each in scoring.measures}
    order = [name for name in first if name in columns] + [name for name in columns if name not in first]
    said = {} if evaluation is None else evaluation.measured
    return [
        MeasureScores(
            name,
            columns[name],
            source=about[name].source,
            summary=said.get(name, {}).get("summary", ""),
            undefined=about[name].undefined,
        )
        for name in order
    ]


def _relevance(run: Run, answers: Sequence[Answered], scoring: ScoringMeta | None) -> Mapping[str, Sequence[float]]:
    """Of each token of the span: as the scoring used it, else as measured last; empty where it was not."""
    which = "greedy" if any(each.greedy is not None for each in answers) else "samples"
    there = [
        meta
        for meta in statistics_of(run.folder, run.answers_sha256)
        if meta.spec.kind == RELEVANCE.kind and meta.spec.settings.get("answers") == which
    ]
    if scoring is not None:
        there = [meta for meta in there if meta.spec.span == scoring.span]
    used = " ".join(scoring.statistics.values()) if scoring is not None else ""
    there.sort(key=lambda meta: meta.name in used)  # stable: the latest stays behind
    return _relevance_in(run, answers, there[-1]) if there else {}


def _relevance_in(run: Run, answers: Sequence[Answered], meta: StatisticMeta) -> dict[str, Sequence[float]]:
    try:
        found = {str(row["id"]): row["relevance"] for row in rows(run.folder, meta)}
    except BadStatistic as problem:
        logger.warning("%s", problem)
        return {}
    lists = {each.question.id: found.get(each.question.id) for each in answers}
    return {name: values[0] for name, values in lists.items() if values}


def _clusters(run: Run, answers: Sequence[Answered], scoring: ScoringMeta) -> dict[str, Sequence[int]]:
    """Which samples mean the same, as the scoring took it; empty where it did not ask."""
    how = scoring.settings.get("equivalence")
    if not isinstance(how, Mapping):
        return {}
    texts = [[sample.text for sample in answers_of(each, True, scoring.span).samples] for each in answers]
    try:
        rule = ClusterRule(how["by"], MeaningRule(how["rule"]), how["threshold"])
        found = [None] * len(answers) if how["by"] in BY_TEXT else _equivalence_rows(run, scoring)
        clusters = [clusters_in(each, row, rule) for each, row in zip(texts, found, strict=True)]
    except (BadStatistic, ValueError, KeyError, TypeError) as problem:
        logger.warning("the clusters of scoring %s can't be shown: %s", scoring.name, problem)
        return {}
    return {each.question.id: known for each, known in zip(answers, clusters, strict=True) if known is not None}


def _equivalence_rows(run: Run, scoring: ScoringMeta) -> Sequence[Row | None]:
    """The rows of the statistic that the scoring names for it. Raises BadStatistic where it is not there."""
    said = scoring.statistics[EvidenceNeed.EQUIVALENCE]
    for meta in statistics_of(run.folder, run.answers_sha256):
        if meta.name in said:
            return rows(run.folder, meta)
    raise BadStatistic(f"{said} is not there any more")


def _facts(
    run: Run, answers: Sequence[Answered], scoring: ScoringMeta | None, evaluation: RunEvaluation | None
) -> list[tuple[str, str]]:
    samples = max((len(each.samples) for each in answers), default=0)
    facts = [("answers", f"{len(answers):,}")]
    named = (("model", "model"), ("dataset", "data set"))
    facts += [(word, str(run.config[name])) for name, word in named if name in run.config]
    facts += [("samples each", str(samples))] if samples else []
    facts += [("scoring", scoring.name)] if scoring is not None else []
    return facts + ([("evaluation", evaluation.name)] if evaluation is not None else [])


def _settings(run: Run, scoring: ScoringMeta | None, evaluation: RunEvaluation | None) -> list[tuple[str, str]]:
    """What the answers depend on, how they were scored and evaluated, by which versions; nothing of the machine."""
    found: dict[str, Any] = dict(run.record["identity"])
    found["backend"] = found.pop(BACKEND_IN_RECORDS, None)
    found |= {name: run.record[name] for name in ("started", "prompts_sha256") if name in run.record}
    found |= {name: run.done[name] for name in ("dtype", "batch_size", "answers_sha256") if name in run.done}
    versions = dict(_mapping(run.done.get("versions")))
    if scoring is not None:
        found["end token in scores"] = scoring.eos
        found |= {f"scores: {need}": said for need, said in scoring.statistics.items()}
        versions |= scoring.versions
    if evaluation is not None:
        found |= {f"evaluation: {name}": value for name, value in asdict(evaluation.settings).items()}
        versions |= evaluation.versions
    found |= {f"version of {library}": version for library, version in sorted(versions.items())}
    return [(name, _shortened(str(value))) for name, value in found.items() if value not in (None, "", [], (), {})]


def _mapping(value: Any) -> Mapping[str, Any]:
    """A table of done.json; an empty one where something else stands there."""
    return value if isinstance(value, Mapping) else {}


def _shortened(text: str) -> str:
    out = len(text) - MOST_OF_A_SETTING
    return text if out <= 0 else f"{text[:MOST_OF_A_SETTING]} … {out} more characters are in run.json"


def _notes(run: Run) -> list[str]:
    counts = _mapping(run.done.get("counts"))
    # Judgings and scorings have queues of their own.
    queues = sorted(run.folder.root.rglob(run.folder.queue.name))
    notes = [*dict.fromkeys(note for queue in queues for note in notes_on_gpus(queue))]
    if refused := counts.get("refused"):
        notes.append(f"{refused} rows of the data set were not asked; refused.jsonl says why.")
    if cut := counts.get("prompts_cut"):
        notes.append(f"{cut} contexts were cut to fit the model.")
    if nan := _mapping(counts.get("finish")).get("nan"):
        notes.append(f"{nan} of {counts.get('answers', 'all')} answers are NaN: the model gave no finite numbers.")
    if only_thought := counts.get("only_thought"):
        notes.append(f"{only_thought} answers ended within a thought, and so are none.")
    return notes
