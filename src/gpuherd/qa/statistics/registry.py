"""The one list of statistics: a new one is one object in one file of this package, which registers itself.

    RELEVANCE = register(Relevance())

A statistic owns its options (a dataclass of ``option`` fields: they become flags of ``gpuherd score``), what it would
measure with them (``plan``, ``source``), what that costs (``cost``), what a job does (``job``), and what measures get
of it (``values``). Its module is imported at every start of ``gpuherd score``: at its top only ``registry`` and other
light modules are imported. Knows no single statistic.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args

from gpuherd.errors import BadModel, UsageError, printable
from gpuherd.jobs.run_dir import safe_name
from gpuherd.models.load.options import ShardOptions, WorkOptions
from gpuherd.models.names import quoted
from gpuherd.options import option
from gpuherd.qa.folder import RunsOptions
from gpuherd.qa.span import SPANS, Span
from gpuherd.qa.statistics.files import BadStatistic, StatisticMeta, StatisticSpec
from gpuherd.units import count

if TYPE_CHECKING:
    from gpuherd.lm.model import LanguageModel
    from gpuherd.qa.encoders.files import EncoderFiles
    from gpuherd.qa.grading.verdicts import Judgment
    from gpuherd.qa.record import Answered
    from gpuherd.qa.runs import Run

Eos = Literal["include", "exclude"]
LongTexts = Literal["refuse", "cut"]
Row = Mapping[str, Any]
Planned = Mapping[str, StatisticSpec]  # by names that the statistics know

# Why a question has no value.
TOO_LONG = "a text is too long for the model"
NO_ANSWER = "there is no answer"
NOT_FINITE = "the model gives no finite number"
# Questions whose texts a model compares together: many enough that its batches are full and equal texts meet.
QUESTIONS_AT_ONCE = 16


# An option of a group.
_measures = partial(option, group="measures")


@dataclass(frozen=True, kw_only=True)
class CommonOptions(RunsOptions, WorkOptions):
    """The options of every scoring; those of a statistic are a subclass, which adds its own."""

    measures: tuple[str, ...] = _measures(
        (),
        help="exact names, or the beginning of several (weighted-nll); log-probs: what needs nothing but the answers; "
        "all (default: what the answers, the models named here and earlier scorings allow)",
        many=True,
        metavar="M",
    )
    name: str | None = _measures(
        None, help="name of the scoring (default: 8 hex digits of all it depends on)", metavar="NAME"
    )
    eos: Eos = _measures(
        "include", help="whether the token that ended an answer counts among its tokens", choices=get_args(Eos)
    )
    span: Span = _measures(
        "answer",
        help="which part of what a reasoning model wrote is measured, texts and tokens alike: the answer behind its "
        "thought, the thought, or both; without thoughts these are the same",
        choices=SPANS,
    )
    long_texts: LongTexts = option(
        "refuse",
        help="texts too long for an encoder: their scores are undefined, or computed of the beginnings",
        choices=get_args(LongTexts),
        group="models",
    )
    judge: str | None = option(
        None,
        help="judging whose labels train the probe of p-ik and stand in the examples of P(True)",
        metavar="J",
        group="self-evaluation",
    )
    seed: int = option(
        0, help="of the folds of p-ik and the choice of examples", parse=count, metavar="N", group="self-evaluation"
    )

    def __post_init__(self) -> None:
        WorkOptions.__post_init__(self)
        object.__setattr__(self, "measures", tuple(self.measures))
        for sentence in self.contradictions():
            raise UsageError(sentence)

    def contradictions(self) -> Iterator[str]:
        """Contradictions among these options, as error messages. A subclass adds its own to those of ``super()``."""
        if self.name is not None and safe_name(self.name) != self.name:
            yield (
                f"--name {self.name!r}: a scoring's name has letters, digits and . _ + = @ - in it, at most 120, and "
                "begins with none of . and -"
            )


OptionsT = TypeVar("OptionsT", bound=CommonOptions)


# --- what is planned ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Has:
    """The answers and statistics of a run.

    Attributes:
        greedy: whether there are greedy answers.
        samples: how many for each question.
        measured: statistics of these answers that are there, the oldest first.
    """

    greedy: bool
    samples: int
    measured: tuple[StatisticMeta, ...] = ()

    def latest(self, kind: str, span: Span, **settings: object) -> StatisticMeta | None:
        """The latest statistic of this kind with these settings: one of other settings is never used in silence."""
        fitting = [
            each
            for each in self.measured
            if each.spec.kind == kind
            and each.spec.span == span
            and all(each.spec.settings.get(name) == value for name, value in settings.items())
        ]
        return fitting[-1] if fitting else None


@dataclass(frozen=True, slots=True)
class NeedSource:
    """Where a need is met from.

    Attributes:
        said: for the scoring's record: the statistic's name and the rule, or what is done with the answers.
        spec: the statistic; None where the answers are enough.
    """

    said: str
    spec: StatisticSpec | None = None


def planned_or_there(planned: StatisticSpec | None, there: StatisticMeta | None, remedy: str) -> NeedSource | str:
    """The statistic by the model that is named, else the one that is there already; else how to get one."""
    spec = planned if planned is not None else None if there is None else there.spec
    return f"not measured; {remedy}" if spec is None else NeedSource(spec.name, spec)


@dataclass(frozen=True, slots=True)
class Planning:
    """The inputs from which a statistic is planned.

    Attributes:
        needs: what the measures need that are meant.
        run: the run of answers.
        labels: the judgment of each question's main answer, by the question's id; None where no judging is named.
    """

    needs: frozenset[str]
    run: Run
    labels: Mapping[str, Judgment] | None = None


@dataclass(frozen=True, slots=True)
class StatisticCost:
    """The cost of measuring, for the division into jobs and for the plan of memory.

    Attributes:
        tokens: of each question, about how many tokens its work has.
        prompt_tokens: of the longest prompt of a language model, or more.
        questions: so many are measured at once; None: as many as sequences fit a batch.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int = 512
    questions: int | None = QUESTIONS_AT_ONCE


# --- what a job does ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchMeasurer:
    """Measures a batch of questions, a line of JSON each; ``seen``: observations about its model, for ``remarks``."""

    measure: Callable[[Sequence[Answered]], list[str]]
    seen: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class JobInputs:
    """The inputs of a job. Its model is loaded when it is first used.

    Attributes:
        answers: all answers of the run, in order.
        options: what the job was started with.
        words: what starts the same job again.
    """

    spec: StatisticSpec
    run: Run
    answers: Sequence[Answered]
    options: ShardOptions
    words: Sequence[str]

    def encoder(self) -> EncoderFiles:
        """The files of the encoder. Raises BadModel where they are not those that the work was begun with."""
        from gpuherd.qa.encoders.files import encoder_files

        files = encoder_files(self.options.model)
        if files.sha256 != self.spec.model_sha256:
            raise BadModel(f"{quoted(self.options.model)} has changed since this work was begun; score again")
        return files

    def language_model(self) -> LanguageModel:
        """The language model in memory, loaded as planned."""
        from gpuherd.lm.model import LanguageModel
        from gpuherd.models.load.jobs import load

        loaded = load(self.options, self.words)
        for line in loaded.report.lines():
            print(printable(line))  # noqa: T201 - the log of the job
        return LanguageModel.of(loaded)


# --- what measures get ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueInputs(Generic[OptionsT]):
    """The inputs from which the values of a need are made.

    Attributes:
        need: one of the statistic's needs.
        source: where it is met from.
        rows: of the statistic of ``source``, in the order of the questions; None where the answers are enough.
        texts: of each question the texts of its samples, the part that counts; none where there are no samples with
            finite log-probs. Empty for what answers themselves have (relevance).
        labels: of each question whether its main answer is right; None where there is no label.
        options: of the scoring.
    """

    need: str
    source: NeedSource
    rows: Sequence[Row] | None
    texts: Sequence[Sequence[str]]
    labels: Sequence[bool | None]
    options: OptionsT


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a need for measures: one a question (None: not measured), and remarks for the user."""

    column: Sequence[Any]
    remarks: tuple[str, ...] = ()


class Statistic(ABC, Generic[OptionsT]):
    """One statistic.

    Attributes:
        kind: how the names of its files begin.
        options: its dataclass of options.
        needs: what it gives to measures; a need is given by one statistic alone.
        costly: it needs the generator again, and is not measured unless somebody names a measure.
        of_samples: it compares samples, so that a run must have some.
    """

    kind: ClassVar[str]
    options: ClassVar[type[CommonOptions]] = CommonOptions
    needs: ClassVar[tuple[str, ...]]
    costly: ClassVar[bool] = False
    of_samples: ClassVar[bool] = False

    # What would be measured, and where needs are met from.

    @abstractmethod
    def plan(self, options: OptionsT, planning: Planning) -> dict[str, StatisticSpec]:
        """The statistics that the models in the options could measure, by names that ``source`` knows.

        Models are looked at only where a measure needs them. Raises MissingModel, BadModel, UsageError.
        """

    @abstractmethod
    def source(self, need: str, options: OptionsT, has: Has, planned: Planned) -> NeedSource | str:
        """Where one of its needs is met from, or the reason why it isn't. Pure.

        Args:
            planned: what all statistics planned.
        """

    def settings(self, options: OptionsT, sources: Mapping[str, NeedSource]) -> dict[str, Any]:  # noqa: ARG002
        """Settings on which its values depend besides the sources' names, for the scoring's record.

        Args:
            sources: those that are used.
        """
        return {}

    # What it costs.

    def by_encoder(self, spec: StatisticSpec) -> bool:  # noqa: ARG002
        """Whether an encoder measures it, not a language model."""
        return False

    @abstractmethod
    def cost(self, spec: StatisticSpec, answers: Sequence[Answered]) -> StatisticCost:
        """The cost of measuring it for these answers."""

    def language_model(self, spec: StatisticSpec, options: OptionsT, run: Run) -> tuple[str, OptionsT]:  # noqa: ARG002
        """The language model that measures it, and the options with how that is loaded: the one that answered.

        Raises BadModel where that has changed since.
        """
        from gpuherd.qa.statistics.language_model import unchanged_generator

        return unchanged_generator(options, run)

    # What a job does.

    @abstractmethod
    def job(self, spec: StatisticSpec, inputs: JobInputs) -> BatchMeasurer:
        """The measurer, with its model in memory."""

    def remarks(self, seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:  # noqa: ARG002
        """Sentences on what is out of the ordinary, from what all jobs saw (``Measuring.seen``)."""
        return ()

    # What measures get.

    @abstractmethod
    def values(self, given: ValueInputs[OptionsT]) -> Values:
        """The values of a need, one for each question."""


_STATISTICS: dict[str, Statistic[Any]] = {}

StatisticT = TypeVar("StatisticT", bound=Statistic[Any])


def register(new: StatisticT) -> StatisticT:
    """Puts a statistic into the list."""
    taken = {need for each in _STATISTICS.values() for need in each.needs}
    if new.kind in _STATISTICS or taken & set(new.needs):
        raise ValueError(f"there is a statistic {new.kind!r}, or one that gives {', '.join(new.needs)}, already")
    _STATISTICS[new.kind] = new
    return new


def statistics() -> tuple[Statistic[Any], ...]:
    """All statistics, in the order of their modules' names."""
    import gpuherd.qa.statistics as package

    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return tuple(sorted(_STATISTICS.values(), key=lambda each: type(each).__module__))


def statistic_of(spec: StatisticSpec) -> Statistic[Any]:
    """The statistic that a specification is of. Raises BadStatistic where it is not known here."""
    statistics()
    found = _STATISTICS.get(spec.kind)
    if found is None:
        raise BadStatistic(f"statistic {spec.name} is of a kind that this gpuherd doesn't know; update gpuherd")
    return found


def option_classes() -> tuple[type[CommonOptions], ...]:
    """The options of all statistics, as bases of one dataclass: none of them is a base of another, and the flags of the
    first statistic come first (fields of a dataclass come in the order of its last base first)."""
    every = list(dict.fromkeys(each.options for each in statistics()))
    most_derived = [each for each in every if not any(other is not each and issubclass(other, each) for other in every)]
    return tuple(reversed(most_derived)) or (CommonOptions,)
