"""The stage ``score``: from a run's answers to the table of their measures.

Which measures are computed is decided in ``options``. Each statistic that they need is a stage of its own, which runs
first; what measures get of a statistic is computed by that statistic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from gpuherd.columns import Column, fitted, window
from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.forward import plan_batches
from gpuherd.models.load.jobs import JobRequest, job_request, resources_for, shard_jobs
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.qa.grading.files import judging_named, judgments
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, answers_of
from gpuherd.qa.measures.registry import FORMULAS_VERSION, ScoreTable, compute, measures
from gpuherd.qa.numbers import mostly_numbers
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run, open_run
from gpuherd.qa.scoring.files import SCORINGS, BadScoring, ScoredMeasure, ScoringMeta, scoring_named, write_scoring
from gpuherd.qa.scoring.files import scores as read_scores
from gpuherd.qa.scoring.options import (
    MeasureSelection,
    ScoreOptions,
    choose,
    planned_specs,
    requested_needs,
    selected_measures,
    sources,
)
from gpuherd.qa.span import Span, has_thought, span_setting
from gpuherd.qa.statistics.files import (
    STATISTICS,
    StatisticMeta,
    StatisticSpec,
    StatisticTask,
    rows,
    statistic_named,
    statistics_of,
)
from gpuherd.qa.statistics.registry import Has, Planning, Row, ValueInputs, Values, statistic_of, statistics
from gpuherd.qa.statistics.similarity import encoder_of
from gpuherd.runs.console import track
from gpuherd.runs.files import single_writer, write_lines, write_values
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedDirectory, ShardedWork, gathered_lines, shard_records, write_task
from gpuherd.runs.spec import digest_of, versions
from gpuherd.runs.stage import Stage, StageOutcome
from gpuherd.units import counted

# --- one statistic ----------------------------------------------------------------------------------------------------

WORKER = "gpuherd.qa.scoring.worker"
# Float32 activations of a batch of 2^15 tokens in a large encoder, with room to spare.
_ENCODER_WORKSPACE_MB = 4096


class StatisticStage(Stage[StageOutcome]):
    """Measures one statistic of a run by jobs, each of which has a part of the questions.

    Making one plans the jobs and writes nothing. Raises what ``job_request`` raises; running it also CannotWrite and
    Damaged.

    Attributes:
        spec: the statistic.
        folder: of its jobs.
        model: what the jobs load.
        asks: what each job requests.
        work: the questions as the jobs share them.
    """

    kind = "score"

    def __init__(
        self,
        spec: StatisticSpec,
        options: ScoreOptions,
        run: Run,
        answers: Sequence[Answered],
        console: Console,
        *,
        simulate: bool = False,
    ) -> None:
        statistic = statistic_of(spec)
        cost = statistic.cost(spec, answers)
        self.spec, self.source, self._simulate = spec, run, simulate
        self.folder = run.folder.work_of(spec.name)
        self._workload = Workload(options.batch_size, cost.prompt_tokens, 1)
        if statistic.by_encoder(spec):
            self.model, self._job_options = spec.model, _encoder_options(options)
            self.asks = _encoder_asks(spec, options)
        else:
            self.model, self._job_options = statistic.language_model(spec, options, run)
            self.asks = job_request(self.model, self._job_options, self._workload, resources_for(options))
        identity = f"{run.answers_sha256} {spec.name}"
        batches = partial(plan_batches, rows=cost.questions or options.batch_size)
        self.work = ShardedWork(self.folder, identity, cost.tokens, batches, options.shards)
        super().__init__(self._job_options, self.folder, console, enqueue_only=options.enqueue_only)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Which questions each job has: as at the first start, or as it would be."""
        return self.work.shards(self.asks.at_once)

    def existing(self) -> StageOutcome | None:
        return StageOutcome(already=True) if STATISTICS.exists(self.source.folder, self.spec.name) else None

    def begin(self) -> None:
        write_task(self.folder, StatisticTask(str(self.source.folder.root), self.source.answers_sha256, self.spec))
        self.work.begin(self.asks.at_once)

    def jobs(self) -> Sequence[Job]:
        return shard_jobs(
            WORKER,
            self.model,
            self.work,
            self.asks,
            self._workload,
            self._job_options,
            title=self.spec.name,
            simulate=self._simulate,
        )

    @property
    def folders_of_results(self) -> Sequence[Path]:
        return (self.folder.shards,)

    def finish(self, jobs: Outcome | None) -> StageOutcome:
        """Makes one file of the shards, and its description, unless another command was first."""
        if jobs is None or jobs.complete:
            with single_writer(self.source.folder.statistics):
                if not STATISTICS.exists(self.source.folder, self.spec.name):
                    _write(self.spec, self.folder, self.shards, self.source)
        return StageOutcome(jobs)


def _write(spec: StatisticSpec, folder: ShardedDirectory, shards: Sequence[Shard], run: Run) -> None:
    undefined: Counter[str] = Counter()
    written = write_lines(run.folder.statistic(spec.name), _counted(gathered_lines(folder, shards), undefined))
    meta = StatisticMeta(
        spec=spec,
        answers_sha256=run.answers_sha256,
        sha256=written.sha256,
        items=written.lines,
        undefined=dict(sorted(undefined.items())),
        remarks=statistic_of(spec).remarks(shard_records(folder, shards)),
        versions=versions("torch", "transformers", "numpy"),
        made=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    write_values(run.folder.statistic(spec.name, ".json"), STATISTICS.values(meta))


def _counted(lines: Iterable[bytes], undefined: Counter[str]) -> Iterable[bytes]:
    for line in lines:
        why = json.loads(line).get("why")
        if why is not None:
            undefined[str(why)] += 1
        yield line


def _encoder_options(options: ScoreOptions) -> ScoreOptions:
    """The options without those of the language model: an encoder is loaded in float32, as it is."""
    plain = ModelOptions()
    return replace(options, **{each.name: getattr(plain, each.name) for each in fields(ModelOptions)})


def _encoder_asks(spec: StatisticSpec, options: ScoreOptions) -> JobRequest:
    """One GPU with room for the weights in float32 and a batch; the CPU where there is none, or by --device-map cpu."""
    have = resources_for(options)
    if options.device_map == "cpu" or (have.cluster is None and not have.gpus):
        return JobRequest(0, None, have.places(0, options), "on the CPU")
    memory_mb = encoder_of(spec.model).float32_bytes // (1 << 20) + _ENCODER_WORKSPACE_MB
    return JobRequest(1, memory_mb, have.places(1, options), f"1 GPU with {memory_mb} MB free")


# --- the scoring ------------------------------------------------------------------------------------------------------

# What measures get of tokens: it goes to the answers that they are of.
_OF_TOKENS = (EvidenceNeed.RELEVANCE, EvidenceNeed.SAMPLE_RELEVANCE)


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


class ScoringStage(Stage[ScoreOutcome]):
    """Scores the answers of a run: the statistics that are not there yet first, then the measures, in this process.

    Args:
        run_id: its name in the options' folder of runs, or its path.
        options: which measures, and how.
        console: where progress goes.
        simulate: the GPUs are simulated.

    Attributes:
        source: the run, and ``answers`` all of its answers.
        options: those that were given, with the span and the rule of equivalence that hold for these answers, and,
            after ``prepare``, with the judging by its whole name.
        labels: the judgment of each question's main answer, by the question's id; None where no judging is named.
        choice: the measures, and where what they need is taken from.
        missing: the stages of the statistics that must be measured first.

    Raises what ``open_run`` raises. Running it raises what choosing and jobs raise, BadStatistic, CannotWrite, and
    UsageError for a name that another scoring has.
    """

    kind = "score"

    def __init__(self, run_id: str, options: ScoreOptions, *, console: Console, simulate: bool = False) -> None:
        self._simulate = simulate
        self.source: Run = open_run(run_id, options.runs_dir)
        self.answers: list[Answered] = list(self.source.answers())
        self.options = replace(options, span=self._span(options.span))
        if options.equivalence is None:
            by_value = mostly_numbers(each.question for each in self.answers)
            self.options = replace(self.options, equivalence="math" if by_value else "exact")
        super().__init__(options, self.source.folder, console, dry_run=options.dry_run)

    def prepare(self) -> None:
        """Decides what is computed and what is measured first. Raises UsageError, MissingModel, BadModel."""
        folder = self.source.folder
        self.labels = self._labels()
        meant_ones, must = selected_measures(self.options.measures, measures())
        has = Has(
            greedy=any(each.greedy is not None for each in self.answers),
            samples=max((len(each.samples) for each in self.answers), default=0),
            measured=tuple(statistics_of(folder, self.source.answers_sha256)),
        )
        planned = planned_specs(
            self.options, Planning(requested_needs(self.options, meant_ones), self.source, self.labels)
        )
        self.choice: MeasureSelection = choose(meant_ones, sources(self.options, has, planned), must=must)
        self._there(self._meta())  # a name that is taken is refused before anything is measured
        self.missing = tuple(
            StatisticStage(spec, self.options, self.source, self.answers, self.console, simulate=self._simulate)
            for spec in self.choice.statistics
            if not STATISTICS.exists(folder, spec.name)
        )

    def needs(self) -> Sequence[StatisticStage]:
        return self.missing

    def planned(self) -> ScoreOutcome:
        return ScoreOutcome(left_out=self.choice.left_out, never=self.never)

    def print_plan(self) -> None:
        """Prints nothing: the command prints ``plan_lines``, or ``to_dict`` as JSON."""

    def plan_lines(self) -> list[str]:
        """Which measures would be computed, and which statistics measured first."""
        families = Counter(each.name.partition(":")[0] for each in self.choice.measures)
        names = [name if number == 1 else f"{name} ({number})" for name, number in families.items()]
        lines = [f"{counted(len(self.choice.measures), 'measure')}: {', '.join(names)}"]
        lines += [
            f"{need}: {source.said}"
            for need, source in sorted(self.choice.sources.items())
            if need not in (EvidenceNeed.GREEDY, EvidenceNeed.SAMPLES)
        ]
        for work in self.missing:
            jobs = counted(len(work.shards), "job")
            lines.append(f"to measure: {work.spec.name} by {work.model}: {jobs}, each {work.asks.sentence}")
        return [*lines, *super().plan_lines()]

    def finish(self, jobs: Outcome | None) -> ScoreOutcome:
        """Computes the measures and writes their table; nothing where ``jobs``, those of a statistic, are not done."""
        if jobs is not None:
            return ScoreOutcome(jobs, left_out=self.choice.left_out)
        folder = self.source.folder
        metas = {
            spec.name: statistic_named(folder, spec.name, self.source.answers_sha256) for spec in self.choice.statistics
        }
        evidences, remarks = self._evidences(metas)
        remarks += [f"{name}: {remark}" for name, meta in metas.items() for remark in meta.remarks]
        remarks += [
            f"{name}: {number} of {meta.items} questions have no value: {why}"
            for name, meta in metas.items()
            for why, number in meta.undefined.items()
        ]
        meta = self._meta()
        there = self._there(meta)
        if there is None:
            # Each question's measures are computed in turn; what takes long are long answers and many samples.
            scores = compute([each.name for each in self.choice.measures], track(self.console, evidences, "measures"))
            there = write_scoring(folder, _with_counts(meta, scores), scores)
            _refuse_other(there, meta)  # another command may have been first to take the name
        return ScoreOutcome(
            meta=there,
            scores=read_scores(folder, there),
            left_out=self.choice.left_out,
            remarks=tuple(remarks),
        )

    def to_dict(self, outcome: ScoreOutcome) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        values: dict[str, Any] = {
            "run_id": self.source.run_id,
            "exit_code": int(outcome.exit_code),
            "measures": [each.name for each in self.choice.measures],
            "left_out": [{"measure": name, "reason": why} for name, why in outcome.left_out],
            "remarks": list(outcome.remarks),
        }
        if self.outlook is not None:
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
                "scoring": SCORINGS.values(outcome.meta),
                "file": str(self.source.folder.scoring(outcome.meta.name, ".csv")),
            }
        return values

    def _span(self, requested: Span) -> Span:
        """The span that is measured: of answers without a thought everything is the answer. Raises UsageError where
        thoughts are to be measured and there are none."""
        if requested == "both" or any(has_thought(each) for row in self.answers for each in row.which.values()):
            return requested
        if requested == "thought":
            raise UsageError(f"--span thought: no answer of run {self.source.run_id} has a thought")
        return "both"

    # --- steps --------------------------------------------------------------------------------------------------

    def _labels(self) -> dict[str, Judgment] | None:
        """The judgments of the main answers by the judging that is named, which ``options`` then have by its whole
        name. Raises UsageError where there is none such, or it is of other answers."""
        if self.options.judge is None:
            return None
        judging = judging_named(self.source.folder, self.options.judge)
        if judging.answers_sha256 != self.source.answers_sha256:
            raise UsageError(f"judging {judging.name} judged other answers than those that are there; judge again")
        main = self.answers[0].main_name
        found = {each.id: each for each in judgments(self.source.folder, judging) if each.which == main}
        if not found:
            raise UsageError(f"judging {judging.name} has not judged the {main} answers, whose labels are needed")
        self.options = replace(self.options, judge=judging.name)
        return found

    def _evidences(self, metas: Mapping[str, StatisticMeta]) -> tuple[list[Evidence], list[str]]:
        """The evidence of each question, and remarks for the user."""
        tables: dict[str, Sequence[Row]] = {}
        for spec in self.choice.statistics:
            tables[spec.name] = rows(self.source.folder, metas[spec.name])
            if len(tables[spec.name]) != len(self.answers):
                raise BadScoring(f"{spec.name} has {len(tables[spec.name])} questions, the run {len(self.answers)}")
        labels = [self._label(each) for each in self.answers]
        owners = {need: each for each in statistics() for need in each.needs}

        def values(need: str, texts: Sequence[Sequence[str]]) -> Values:
            source = self.choice.sources[need]
            table = None if source.spec is None else tables[source.spec.name]
            return owners[need].values(ValueInputs(need, source, table, texts, labels, self.options))

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

    def _meta(self) -> ScoringMeta:
        """The description of the scoring; its counts are not known yet."""
        options, chosen, used = self.options, self.choice.measures, self.choice.sources
        said = {str(need): source.said for need, source in sorted(used.items())}
        settings: dict[str, Any] = {"formulas": FORMULAS_VERSION, **span_setting(options.span)}
        for each in statistics():
            settings |= each.settings(self.options, used)
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
        if not SCORINGS.exists(self.source.folder, meta.name):
            return None
        there = scoring_named(self.source.folder, meta.name)
        _refuse_other(there, meta)
        return there


def _with_counts(meta: ScoringMeta, scores: ScoreTable) -> ScoringMeta:
    counted = tuple(
        replace(each, defined=scores.defined(each.name), undefined=dict(scores.undefined[each.name]))
        for each in meta.measures
    )
    return replace(meta, measures=counted)


def _refuse_other(there: ScoringMeta, meta: ScoringMeta) -> None:
    """Raises UsageError where ``there``, which has the name of ``meta``, is another scoring."""
    if _depends_on(there) != _depends_on(meta):
        raise UsageError(f"there is a scoring {meta.name!r} with other measures or settings; give another --name")


def _depends_on(meta: ScoringMeta) -> tuple[Any, ...]:
    """All that the values of a scoring depend on."""
    names = [each.name for each in meta.measures]
    return meta.answers_sha256, meta.eos, meta.statistics, meta.settings, names


# A scoring as lines for a terminal: the table of measures, and what was left out. Pure.

_COLUMNS = (
    Column("measure", 0),
    Column("questions", 1, right=True),
    Column("lowest", 4, right=True),
    Column("median", 3, right=True),
    Column("highest", 5, right=True),
    Column("undefined", 2, least=12),
)


def score_lines(console: Console, run: Run, outcome: ScoreOutcome) -> list[str]:
    """The measures with their ranges; remarks; where the table is."""
    meta, table = outcome.meta, outcome.scores
    if meta is None or table is None:
        return []
    rows = []
    for each in meta.measures:
        values = sorted(value for value in table.columns[each.name] if value is not None)
        undefined = "; ".join(f"{number}: {why}" for why, number in each.undefined.items())
        rows.append((each.name, str(each.defined), *map(_number, _range(values)), undefined))
    lines = list(fitted(_COLUMNS, rows, window(console)).lines)
    lines += [f"{need}: {said}" for need, said in meta.statistics.items() if said != "answers"]
    if meta.span != "both":
        lines.append(f"span: {meta.span}, of texts and tokens")
    lines.append(f"end token: {'counted' if meta.eos == 'include' else 'left out'}")
    lines += [f"note: {remark}" for remark in outcome.remarks]
    lines.append(f"scoring {meta.name}: {run.folder.scoring(meta.name, '.csv')}")
    return [*lines, f"next: gpuherd evaluate {run.run_id} --judge J --scores {meta.name}{run.folder.runs_dir_option}"]


def left_out_lines(left_out: Sequence[tuple[str, str]]) -> list[str]:
    """The measures that can't be computed, those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out:
        by_reason.setdefault(why, []).append(name)
    return [f"left out: {_some(names)}: {why}" for why, names in by_reason.items()]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _range(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Lowest, median, highest; None of no values."""
    return (values[0], median(values), values[-1]) if values else (None, None, None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
