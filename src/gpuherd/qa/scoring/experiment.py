"""A scoring from the run's answers to its table: what is meant, what must be measured first, what is computed then.

Knows the order of things. What measures need is decided in ``choosing``, how it is measured in ``measuring``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rich.console import Console

from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs.feasibility import Outlook, of_like
from gpuherd.jobs.records import Outcome
from gpuherd.qa.encoders.entailment import Rule
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.judging.files import JudgingMeta, judging_named, judgments
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.measures.compute import Scores, compute
from gpuherd.qa.measures.evidence import Evidence, Need
from gpuherd.qa.measures.registry import FORMULAS_VERSION, Measure, measures
from gpuherd.qa.numbers import mostly_numbers
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run, open_run
from gpuherd.qa.scoring.choosing import Choice, Has, choose, meant, sources, wanted_needs
from gpuherd.qa.scoring.evidences import Measured, Row, Rules, evidence_of
from gpuherd.qa.scoring.files import ScoreTable, scoring_named, write_scoring
from gpuherd.qa.scoring.measuring import Work, carry_out, plan_work, versions
from gpuherd.qa.scoring.meta import BadScoring, ScoredMeasure, ScoringMeta
from gpuherd.qa.scoring.options import Equivalence, ScoreOptions
from gpuherd.qa.scoring.planned import planned_specs
from gpuherd.qa.scoring.probing import probe
from gpuherd.qa.scoring.statistic import Kind, Meta, Spec
from gpuherd.qa.scoring.statistic_files import is_there, rows, statistic_named, statistics_of
from gpuherd.qa.span import Span, has_thought, span_setting
from gpuherd.runs.console import track
from gpuherd.runs.stage import failure_lines

_NEEDS = {
    "relevance": Need.RELEVANCE,
    "sample_relevance": Need.SAMPLE_RELEVANCE,
    "similarity": Need.SIMILARITY,
    "equivalence": Need.EQUIVALENCE,
    "affinity": Need.AFFINITY,
    "p_true": Need.P_TRUE,
}


@dataclass(frozen=True)
class ScoreOutcome:
    """How a scoring ended.

    Attributes:
        meta: what was written, None where nothing was.
        scores: the figures.
        left_out: measures that were meant and can't be computed, with the reason.
        remarks: what people should know of the statistics.
        stopped: how the jobs ended that did not all succeed.
        never: why jobs of a dry run could never run.
    """

    meta: ScoringMeta | None = None
    scores: ScoreTable | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    stopped: Outcome | None = None
    never: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """0 where the table is there, or nothing was to be started and all could be."""
        if self.stopped is not None:
            return self.stopped.exit_code
        return ExitCode.FAILED if self.never else ExitCode.OK


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
        by_text: Equivalence = "math" if mostly_numbers(each.question for each in self.answers) else "exact"
        self.options = replace(options, span=self._span(options.span), equivalence=options.equivalence or by_text)

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
        needs = wanted_needs(self.options, meant_ones)
        has = Has(
            greedy=any(each.greedy is not None for each in self.answers),
            samples=max((len(each.samples) for each in self.answers), default=0),
            measured=tuple(statistics_of(self.folder, self.source.answers_sha256)),
        )
        planned = planned_specs(self.options, needs, self.source, self.labels)
        options = self.options
        if self.judging is not None:
            options = replace(options, judge=self.judging.name)  # not as somebody shortened it
        return choose(meant_ones, sources(options, has, planned), must=must)

    @cached_property
    def missing(self) -> tuple[Work, ...]:
        """The statistics that must be measured first. Raises what planning raises."""
        return tuple(
            plan_work(spec, self.options, self.source, self.answers)
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
            outcome = carry_out(work, self.source, self.console, simulate=self.simulate)
            if outcome is not None and not outcome.complete:
                return ScoreOutcome(left_out=self.choice.left_out, stopped=outcome)
        return self._computed()

    def to_dict(self, outcome: ScoreOutcome) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        told: dict[str, Any] = {
            "run_id": self.source.run_id,
            "exit_code": int(outcome.exit_code),
            "measures": [each.name for each in self.choice.measures],
            "left_out": [{"measure": name, "reason": why} for name, why in outcome.left_out],
            "remarks": list(outcome.remarks),
        }
        if self.options.dry_run:
            return (
                told
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
                    "sources": {need.value: source.said for need, source in sorted(self.choice.sources.items())},
                }
            )
        if outcome.stopped is not None:
            told["failures"] = [{"job": job, "reason": why} for job, why in failure_lines(outcome.stopped)]
        if outcome.meta is not None and outcome.scores is not None:
            from gpuherd.qa.scoring.meta import meta_values

            told |= {"scoring": meta_values(outcome.meta), "file": str(self.folder.scoring(outcome.meta.name, ".csv"))}
        return told

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
        p_ik, remarks = self._p_ik(metas)
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
            evidences = track(self.console, list(self._evidences(metas, p_ik)), "measures")
            scores = compute([each.name for each in self.choice.measures], evidences)
            there = write_scoring(self.folder, self._with_counts(meta, scores), ScoreTable(scores.ids, scores.columns))
            self._check_same(there, meta)  # another command may have been first to take the name
        meta = there
        from gpuherd.qa.scoring.files import scores as read_scores

        return ScoreOutcome(meta, read_scores(self.folder, meta), self.choice.left_out, tuple(remarks))

    def _evidences(self, metas: Mapping[str, Meta], p_ik: Sequence[float | None]) -> Iterator[Evidence]:
        chosen = self.choice.sources
        specs = {name: _spec(chosen, need) for name, need in _NEEDS.items()}
        tables: dict[str, list[Row]] = {}
        for spec in specs.values():
            if spec is not None and spec.name not in tables:
                tables[spec.name] = list(rows(self.folder, metas[spec.name]))
                if len(tables[spec.name]) != len(self.answers):
                    raise BadScoring(f"{spec.name} has {len(tables[spec.name])} questions, the run {len(self.answers)}")
        rules = self.rules
        for number, answered in enumerate(self.answers):
            found = {name: tables[spec.name][number] for name, spec in specs.items() if spec is not None}
            yield evidence_of(answered, Measured(**found, p_ik=p_ik[number]), rules)

    @property
    def rules(self) -> Rules:
        """The conventions, for evidence."""
        options, chosen = self.options, self.choice.sources
        equivalence, affinity = chosen.get(Need.EQUIVALENCE), chosen.get(Need.AFFINITY)
        return Rules(
            with_end=options.eos == "include",
            equivalence=None
            if equivalence is None
            else _by(equivalence.spec, "math" if options.equivalence == "math" else "exact"),
            rule=Rule(options.equivalence_rule),
            threshold=options.equivalence_threshold,
            affinity=None if affinity is None else _by(affinity.spec, "jaccard"),
            span=options.span,
        )

    def _p_ik(self, metas: Mapping[str, Meta]) -> tuple[Sequence[float | None], list[str]]:
        source = self.choice.sources.get(Need.P_IK)
        if source is None or source.spec is None:
            return [None] * len(self.answers), []
        from gpuherd.qa.scoring.tasks import state_of

        read = [row["state"] for row in rows(self.folder, metas[source.spec.name])]
        states = [None if state is None else state_of(state) for state in read]
        found = probe(states, [self._label(each) for each in self.answers], self.options.seed)
        return found.values, [] if found.why is None else [f"p-ik: {found.why}"]

    def _label(self, answered: Answered) -> bool | None:
        judgment = (self.labels or {}).get(answered.question.id)
        if judgment is None or judgment.verdict not in (Verdict.CORRECT, Verdict.INCORRECT):
            return None
        return judgment.verdict is Verdict.CORRECT

    def _meta(self, chosen: Sequence[Measure]) -> ScoringMeta:
        options = self.options
        statistics = {need.value: source.said for need, source in sorted(self.choice.sources.items())}
        settings: dict[str, Any] = {"formulas": FORMULAS_VERSION, **span_setting(options.span)}
        if Need.EQUIVALENCE in self.choice.sources:
            rules = self.rules
            by = {"by": rules.equivalence, "rule": rules.rule.value, "threshold": rules.threshold}
            settings |= {"equivalence": by}
        if Need.P_IK in self.choice.sources and self.judging is not None:
            settings |= {"judging": self.judging.name, "seed": options.seed}
        text = json.dumps([options.eos, statistics, settings, [each.name for each in chosen]], sort_keys=True)
        return ScoringMeta(
            name=options.name or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8],
            eos=options.eos,
            statistics=statistics,
            settings=settings,
            measures=tuple(ScoredMeasure(each.name, each.source, tuple(sorted(each.needs)), 0, {}) for each in chosen),
            questions=len(self.answers),
            answers_sha256=self.source.answers_sha256,
            versions=versions(("numpy", "scikit-learn")),
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


def _spec(chosen: Mapping[Need, Any], need: Need) -> Spec | None:
    source = chosen.get(need)
    return None if source is None else source.spec


def _by(spec: Spec | None, otherwise: str) -> str:
    """What clusters or edges are made of."""
    if spec is None:
        return otherwise
    return "relations" if spec.kind is Kind.ENTAILMENT else "similarity"
