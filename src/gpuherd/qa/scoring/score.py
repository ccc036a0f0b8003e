"""A scoring from the run's answers to its table: what is meant, what must be measured first, what is computed then.

Knows the order of things. Which measures are computed is decided in ``options``, what they need is measured by the jobs
of ``measuring``, and what they get of it is made by each statistic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rich.console import Console

from gpuherd.errors import UsageError
from gpuherd.jobs.feasibility import Outlook, of_like
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.judging.files import JudgingMeta, judging_named, judgments
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import Evidence, Need, answers_of
from gpuherd.qa.measures.registry import FORMULAS_VERSION, Measure, Scores, compute, measures
from gpuherd.qa.numbers import mostly_numbers
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run, open_run
from gpuherd.qa.scoring.files import (
    BadScoring,
    ScoredMeasure,
    ScoreTable,
    ScoringMeta,
    meta_values,
    scoring_named,
    write_scoring,
)
from gpuherd.qa.scoring.files import scores as read_scores
from gpuherd.qa.scoring.measuring import Measuring
from gpuherd.qa.scoring.options import Choice, ScoreOptions, choose, meant, planned_specs, requested_needs, sources
from gpuherd.qa.span import Span, has_thought, span_setting
from gpuherd.qa.statistics.files import Meta, is_there, rows, statistic_named, statistics_of
from gpuherd.qa.statistics.registry import Has, Planning, Row, ValueInputs, Values, statistics
from gpuherd.runs.console import track
from gpuherd.runs.spec import digest_of, versions
from gpuherd.runs.stage import StageOutcome

# What measures get of tokens: it goes to the answers that they are of.
_OF_TOKENS = (Need.RELEVANCE, Need.SAMPLE_RELEVANCE)


@dataclass(frozen=True)
class ScoreOutcome(StageOutcome):
    """How a scoring ended; ``jobs``: those of a statistic that did not all succeed, else None.

    Attributes:
        meta: what was written, None where nothing was.
        scores: the figures.
        left_out: measures that were meant and can't be computed, with the reason.
        remarks: what people should know of the statistics.
    """

    meta: ScoringMeta | None = None
    scores: ScoreTable | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()


class Scoring:
    """Scores the answers of a run.

    Args:
        run_id: its name in the options' folder of runs, or its path.
        options: which measures, and how.
        console: where progress goes.
        simulate: the GPUs are pretended.

    Raises what ``open_run`` raises.
    """

    def __init__(self, run_id: str, options: ScoreOptions, *, console: Console, simulate: bool = False) -> None:
        self.console = console
        self.simulate = simulate
        self.source: Run = open_run(run_id, options.runs_dir)
        self.options = replace(options, span=self._span(options.span))
        if options.equivalence is None:
            by_value = mostly_numbers(each.question for each in self.answers)
            self.options = replace(self.options, equivalence="math" if by_value else "exact")

    @property
    def folder(self) -> QADirectory:
        """The run's folder."""
        return self.source.folder

    @cached_property
    def answers(self) -> list[Answered]:
        """All answers."""
        return list(self.source.answers())

    @cached_property
    def judging(self) -> JudgingMeta | None:
        """The judging that has the labels. Raises UsageError where there is none such, or it is of other answers."""
        if self.options.judge is None:
            return None
        found = judging_named(self.folder, self.options.judge)
        if found.answers_sha256 != self.source.answers_sha256:
            raise UsageError(f"judging {found.name} judged other answers than those that are there; judge again")
        return found

    @cached_property
    def labels(self) -> dict[str, Judgment] | None:
        """The judgment of each question's main answer, by the question's id."""
        if self.judging is None:
            return None
        main = "greedy" if any(each.greedy is not None for each in self.answers) else "sample-0"
        found = {each.id: each for each in judgments(self.folder, self.judging) if each.which == main}
        if not found:
            raise UsageError(f"judging {self.judging.name} has not judged the {main} answers, whose labels are needed")
        return found

    @cached_property
    def choice(self) -> Choice:
        """What will be computed. Raises UsageError, MissingModel, BadModel."""
        meant_ones, must = meant(self.options.measures, measures())
        planning = Planning(requested_needs(self.options, meant_ones), self.source, self.labels)
        has = Has(
            greedy=any(each.greedy is not None for each in self.answers),
            samples=max((len(each.samples) for each in self.answers), default=0),
            measured=tuple(statistics_of(self.folder, self.source.answers_sha256)),
        )
        planned = planned_specs(self.options, planning)
        return choose(meant_ones, sources(self.resolved_options, has, planned), must=must)

    @property
    def resolved_options(self) -> ScoreOptions:
        """The options with the judging by its whole name, not as somebody shortened it."""
        return self.options if self.judging is None else replace(self.options, judge=self.judging.name)

    @cached_property
    def missing(self) -> tuple[Measuring, ...]:
        """The statistics that must be measured first. Raises what planning raises."""
        return tuple(
            Measuring(spec, self.options, self.source, self.answers, self.console, simulate=self.simulate)
            for spec in self.choice.statistics
            if not is_there(self.folder, spec.name)
        )

    @cached_property
    def outlook(self) -> Outlook:
        """What becomes of the jobs that measure, with the engine that was named. Raises as its ``check``."""
        run = self.missing[0].folder if self.missing else None
        return of_like([work.asks.gpus for work in self.missing for _ in work.shards], self.options, run)

    def run(self) -> ScoreOutcome:
        """Measures what is missing, computes and writes. With ``dry_run`` it only decides.

        Raises what choosing and jobs raise, BadStatistic, CannotWrite, UsageError for a name that another scoring has.
        """
        self._there(self._meta(self.choice.measures))  # a name that is taken is told before anything is measured
        if self.options.dry_run:
            return ScoreOutcome(left_out=self.choice.left_out, never=self.outlook.never)
        for work in self.missing:
            jobs = work.run().jobs
            if jobs is not None and not jobs.complete:
                return ScoreOutcome(jobs, left_out=self.choice.left_out)
        return self._computed()

    def to_dict(self, outcome: ScoreOutcome) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        values: dict[str, Any] = {
            "run_id": self.source.run_id,
            "exit_code": int(outcome.exit_code),
            "measures": [each.name for each in self.choice.measures],
            "left_out": [{"measure": name, "reason": why} for name, why in outcome.left_out],
            "remarks": list(outcome.remarks),
        }
        if self.options.dry_run:
            return (
                values
                | self.outlook.to_dict()
                | {
                    "to_measure": [
                        {
                            "statistic": work.spec.name,
                            "model": work.model,
                            "jobs": len(work.shards),
                            "asks": asdict(work.asks),
                            "engine_asks": self.outlook.asks.get(work.asks.gpus),
                        }
                        for work in self.missing
                    ],
                    "sources": {str(need): source.said for need, source in sorted(self.choice.sources.items())},
                }
            )
        if outcome.jobs is not None:
            values["failures"] = outcome.failure_values()
        if outcome.meta is not None and outcome.scores is not None:
            values |= {
                "scoring": meta_values(outcome.meta),
                "file": str(self.folder.scoring(outcome.meta.name, ".csv")),
            }
        return values

    def _span(self, wanted: Span) -> Span:
        """The span that is measured: of answers without a thought everything is the answer. Raises UsageError where
        thoughts are to be measured and there are none."""
        if wanted == "both" or any(has_thought(each) for row in self.answers for each in row.which.values()):
            return wanted
        if wanted == "thought":
            raise UsageError(f"--span thought: no answer of run {self.source.run_id} has a thought")
        return "both"

    # --- steps --------------------------------------------------------------------------------------------------

    def _computed(self) -> ScoreOutcome:
        metas = {
            spec.name: statistic_named(self.folder, spec.name, self.source.answers_sha256)
            for spec in self.choice.statistics
        }
        evidences, remarks = self._evidences(metas)
        remarks += [f"{name}: {remark}" for name, meta in metas.items() for remark in meta.remarks]
        remarks += [
            f"{name}: {number} of {meta.items} questions have no value: {why}"
            for name, meta in metas.items()
            for why, number in meta.undefined.items()
        ]
        meta = self._meta(self.choice.measures)
        there = self._there(meta)
        if there is None:
            # Each question's measures are computed in turn; what takes long are long answers and many samples.
            scores = compute([each.name for each in self.choice.measures], track(self.console, evidences, "measures"))
            there = write_scoring(self.folder, self._with_counts(meta, scores), ScoreTable(scores.ids, scores.columns))
            self._check_same(there, meta)  # another command may have been first to take the name
        return ScoreOutcome(
            meta=there,
            scores=read_scores(self.folder, there),
            left_out=self.choice.left_out,
            remarks=tuple(remarks),
        )

    def _evidences(self, metas: Mapping[str, Meta]) -> tuple[list[Evidence], list[str]]:
        """What measures look at of each question, and what people should know of it."""
        tables: dict[str, Sequence[Row]] = {}
        for spec in self.choice.statistics:
            tables[spec.name] = list(rows(self.folder, metas[spec.name]))
            if len(tables[spec.name]) != len(self.answers):
                raise BadScoring(f"{spec.name} has {len(tables[spec.name])} questions, the run {len(self.answers)}")
        labels = [self._label(each) for each in self.answers]
        owners = {need: each for each in statistics() for need in each.needs}

        def values(need: str, texts: Sequence[Sequence[str]]) -> Values:
            source = self.choice.sources[need]
            table = None if source.spec is None else tables[source.spec.name]
            return owners[need].values(ValueInputs(need, source, table, texts, labels, self.resolved_options))

        used = [need for need in owners if need in self.choice.sources]
        of_tokens = {need: values(need, ()) for need in used if need in _OF_TOKENS}
        nothing = Values([None] * len(self.answers))
        greedy, drawn = (of_tokens.get(need, nothing).column for need in _OF_TOKENS)
        with_end, span = self.options.eos == "include", self.options.span
        found = [
            answers_of(each, with_end, span, relevance, sample_relevance)
            for each, relevance, sample_relevance in zip(self.answers, greedy, drawn, strict=True)
        ]
        texts = [[sample.text for sample in each.samples] for each in found]
        others = {need: values(need, texts) for need in used if need not in _OF_TOKENS}
        evidences = [
            each.with_values({need: column.column[number] for need, column in others.items()})
            for number, each in enumerate(found)
        ]
        return evidences, [remark for each in (of_tokens | others).values() for remark in each.remarks]

    def _label(self, answered: Answered) -> bool | None:
        judgment = (self.labels or {}).get(answered.question.id)
        if judgment is None or judgment.verdict not in (Verdict.CORRECT, Verdict.INCORRECT):
            return None
        return judgment.verdict is Verdict.CORRECT

    def _meta(self, chosen: Sequence[Measure]) -> ScoringMeta:
        options, used = self.options, self.choice.sources
        said = {str(need): source.said for need, source in sorted(used.items())}
        settings: dict[str, Any] = {"formulas": FORMULAS_VERSION, **span_setting(options.span)}
        for each in statistics():
            settings |= each.settings(self.resolved_options, used)
        text = json.dumps([options.eos, said, settings, [each.name for each in chosen]], sort_keys=True)
        return ScoringMeta(
            name=options.name or digest_of(text)[:8],
            eos=options.eos,
            statistics=said,
            settings=settings,
            measures=tuple(ScoredMeasure(each.name, each.source, tuple(sorted(each.needs)), 0, {}) for each in chosen),
            questions=len(self.answers),
            answers_sha256=self.source.answers_sha256,
            versions=versions("numpy", "scikit-learn"),
            made=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    def _there(self, meta: ScoringMeta) -> ScoringMeta | None:
        """The same scoring, made before. Raises UsageError where the name is taken by another one."""
        if not self.folder.scoring(meta.name, ".json").is_file():
            return None
        there = scoring_named(self.folder, meta.name)
        self._check_same(there, meta)
        return there

    def _check_same(self, there: ScoringMeta, meta: ScoringMeta) -> None:
        if _depends_on(there) != _depends_on(meta):
            raise UsageError(f"there is a scoring {meta.name!r} with other measures or settings; give another --name")

    def _with_counts(self, meta: ScoringMeta, scores: Scores) -> ScoringMeta:
        counted = tuple(
            replace(each, defined=scores.defined(each.name), undefined=dict(scores.undefined[each.name]))
            for each in meta.measures
        )
        return replace(meta, measures=counted)


def _depends_on(meta: ScoringMeta) -> tuple[Any, ...]:
    """All that the values of a scoring depend on."""
    names = [each.name for each in meta.measures]
    return meta.answers_sha256, meta.eos, meta.statistics, meta.settings, names
